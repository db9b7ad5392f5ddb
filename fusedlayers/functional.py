"""The functions users call: differentiable in every tensor argument, in eager's dtype, also under autocast."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from . import activations
from .activations import Activation
from .ops import affine_act as _affine_act
from .ops import batch_norm_act as _batch_norm_act
from .ops import gated_act as _gated_act
from .ops import gated_mlp as _gated_mlp
from .ops import group_norm_act as _group_norm_act
from .ops import layer_norm as _layer_norm
from .ops import linear_act as _linear_act
from .ops import mlp as _mlp
from .ops import rms_norm as _rms_norm
from .ops import scale_residual as _scale_residual

ActivationLike = str | Activation | nn.Module | None

__all__ = [
    "affine_act",
    "batch_norm_act",
    "fused_relu",
    "gated_act",
    "gated_mlp",
    "group_norm_act",
    "layer_norm",
    "linear_act",
    "mlp",
    "rms_norm",
    "scale_residual",
]


def affine_act(
    x: Tensor,
    scale: Tensor | float,
    shift: Tensor | float,
    activation: ActivationLike = "relu",
    *,
    dim: int | None = None,
) -> Tensor:
    """`act(scale * x + shift)` in one pass over the data, forward and backward.

    Args:
        x: any shape, any float dtype, any strides.
        scale: a number, a 0-d tensor, or a tensor that broadcasts against `x`; with `dim`, shape `(C,)`.
        shift: likewise.
        activation: a name, an `Activation` or a torch activation module.
        dim: the dim of `x` along which `(C,)` coefficients lie; default: torch's own broadcasting, from the last dim.

    Returns:
        Shape and dtype of the torch expression `act(scale * x + shift)`.

    Raises:
        RuntimeError: the shapes do not broadcast, or the devices differ, as the torch expression raises.
        IndexError: `dim` is out of range.
        ValueError: unknown activation.

    >>> affine_act(torch.tensor([3.0, -4.0]), 2, 1)
    tensor([7., 0.])
    """
    return _affine_act.affine_act(x, scale, shift, activations.get(activation), dim)


def fused_relu(x: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """`max(0, a*x + b)`: `affine_act` with ReLU.

    >>> fused_relu(torch.tensor([3.0, -4.0]), 2, 1)
    tensor([7., 0.])
    """
    return _affine_act.affine_act(x, a, b, activations.get("relu"))


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: ActivationLike = "relu") -> Tensor:
    """`act(x @ weight.T + bias)`: bias and activation with the product, their gradients in one pass.

    Args:
        x: `(*, in_features)`, any leading dims, none included.
        weight: `(out_features, in_features)`, as `nn.Linear` has it.
        bias: `(out_features,)` or `None`.
        activation: a name, an `Activation` or a torch activation module.

    Returns:
        `(*, out_features)`, in the dtype of `act(F.linear(x, weight, bias))`, also under autocast.

    Raises:
        RuntimeError: sizes, dtypes or devices do not fit, as `F.linear` raises.
        ValueError: unknown activation.

    >>> linear_act(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 1.0], [-1.0, 0.0]]), activation="relu")
    tensor([3., 0.])
    """
    return _linear_act.linear_act(x, weight, bias, activations.get(activation))


def scale_residual(
    x: Tensor,
    residual: Tensor,
    scale: Tensor | float | None = None,
    *,
    dropout_p: float = 0.0,
    drop_path_p: float = 0.0,
    training: bool = False,
) -> Tensor:
    """`residual + drop_path(dropout(scale * x))` in one pass over the data, forward and backward.

    From one seed, the masks are those that `F.dropout(scale * x)` and then timm's or torchvision's DropPath would draw,
    and the generators move on as theirs would. Dropout's mask is not stored: backward draws it again.

    Args:
        x: what a residual branch computed; any shape, float dtype and strides.
        residual: what it is added to, as a rule of the shape of `x`.
        scale: LayerScale's `(C,)`, a gate such as `(B, 1, C)`, a number, or anything that broadcasts to `x`.
        dropout_p: probability to zero an element of `scale * x`.
        drop_path_p: probability to zero all of a sample, along the first dim (stochastic depth).
        training: drops nothing when false.

    Returns:
        Shape and dtype of the torch expression.

    Raises:
        ValueError: a probability lies outside [0, 1].
        RuntimeError: the shapes do not broadcast, or the devices differ, as the torch expression raises.

    >>> scale_residual(torch.tensor([1.0, 2.0]), torch.tensor([10.0, 10.0]), torch.tensor([0.5, 2.0]))
    tensor([10.5000, 14.0000])
    """
    return _scale_residual.scale_residual(x, residual, scale, dropout_p, drop_path_p, training)


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`F.layer_norm` of `x`, or of `x + residual`, in one pass over the data, forward and backward.

    Args:
        x: `(*, *normalized_shape)`, any float dtype; rows at any distance from each other are read in place.
        normalized_shape: the sizes of the last dims, over which mean and variance are taken.
        weight: of `normalized_shape`, or `None`.
        bias: likewise.
        eps: added to the variance.
        residual: added to `x` first; of the shape of `x`.

    Returns:
        The norm, in eager's dtype; with a `residual`, the pair `(norm, x + residual)`.

    Raises:
        RuntimeError: sizes, dtypes or devices do not fit, as `F.layer_norm` raises.

    >>> layer_norm(torch.tensor([1.0, 3.0]), (2,), eps=0.0)
    tensor([-1.,  1.])
    """
    return _layer_norm.layer_norm(x, normalized_shape, weight, bias, eps, residual, as_eager=True)


def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`F.rms_norm` of `x`, or of `x + residual`, in one pass over the data, forward and backward.

    Args:
        x: `(*, *normalized_shape)`, any float dtype; rows at any distance from each other are read in place.
        normalized_shape: the sizes of the last dims, over which the mean square is taken.
        weight: of `normalized_shape`, or `None`.
        eps: added to the mean square; `None`: the machine epsilon, as torch takes it, of the dtype it computes in.
        residual: added to `x` first; of the shape of `x`.

    Returns:
        The norm, in eager's dtype; with a `residual`, the pair `(norm, x + residual)`.

    Raises:
        RuntimeError: sizes or devices do not fit, as `F.rms_norm` raises.

    >>> rms_norm(torch.tensor([3.0, -3.0]), (2,))
    tensor([ 1., -1.])
    """
    return _rms_norm.rms_norm(x, normalized_shape, weight, eps, residual, as_eager=True)


def batch_norm_act(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    activation: ActivationLike = "relu",
    residual: Tensor | None = None,
) -> Tensor:
    """`act(batch_norm(x) + residual)`, the running statistics kept as `F.batch_norm` keeps them.

    Training reads x twice and writes the result once, its backward reads four times and writes once (with a residual
    one more read each, and its gradient); the activation's mask is recomputed. Evaluation is one pass.

    Args:
        x: `(N, C, *)`, any float dtype, contiguous or channels last without a copy.
        running_mean, running_var: `(C,)` or `None`; updated in place when training, used when not.
        weight, bias: `(C,)` or `None`, in the dtype of `x`, or float32.
        training: whether the batch's own statistics are used.
        momentum: weight of this batch in the running statistics.
        eps: added to the variance.
        activation: a name, an `Activation` or a torch activation module.
        residual: added before the activation.

    Returns:
        Shape of `x`; dtype of `act(F.batch_norm(x, ...) + residual)`, also under autocast.

    Raises:
        ValueError: one value per channel when training, as `F.batch_norm` raises; unknown activation.
        RuntimeError: wrong shapes or dtypes, as `F.batch_norm` raises.

    >>> batch_norm_act(torch.tensor([[1.0], [3.0]]), None, None, None, None, True, 0.1, 0.0)
    tensor([[0.],
            [1.]])
    """
    return _batch_norm_act.batch_norm_act(
        x, running_mean, running_var, weight, bias, training, momentum, eps, activations.get(activation), residual
    )


def mlp(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, activation: ActivationLike = "gelu"
) -> Tensor:
    """`act(x @ w1.T + b1) @ w2.T + b2`, keeping one hidden tensor for backward where eager keeps two.

    Kept is the pre-activation, or the activation's output where its gradient needs no more (ReLU, sigmoid, tanh).

    Args:
        x: `(*, in_features)`.
        w1, b1: `(hidden, in_features)`, and `(hidden,)` or `None`.
        w2, b2: `(out_features, hidden)`, and `(out_features,)` or `None`.
        activation: a name, an `Activation` or a torch activation module.

    Returns:
        `(*, out_features)`, in the dtype of the torch expression, also under autocast.

    Raises:
        RuntimeError: sizes, dtypes or devices do not fit, as `F.linear` raises.
        ValueError: unknown activation.
    """
    return _mlp.mlp(x, w1, b1, w2, b2, activations.get(activation))


def gated_act(
    gate: Tensor,
    up: Tensor | None = None,
    activation: ActivationLike = "silu",
    *,
    dim: int = -1,
    gate_first: bool = True,
) -> Tensor:
    """`act(gate) * up` in one pass over the data, forward and backward: SwiGLU, GeGLU, ReGLU.

    Args:
        gate: any shape, any float dtype, any strides; halves of one tensor are read in place.
        up: likewise. `None`: gate and up are the halves of `gate` along `dim`, whose gradient is then one tensor.
        activation: a name, an `Activation` or a torch activation module.
        dim: the dim to halve, with `up=None`.
        gate_first: whether the gate is the first half, with `up=None`.

    Returns:
        Shape and dtype of the torch expression `act(gate) * up`.

    Raises:
        RuntimeError: the shapes do not broadcast, the devices differ, or the size to halve is odd, as torch raises.
        ValueError: unknown activation.

    >>> gated_act(torch.tensor([1.0, -1.0]), torch.tensor([5.0, 5.0]), "relu")
    tensor([5., 0.])
    """
    act = activations.get(activation)
    if up is None:
        return _gated_act.chunked(gate, act, dim, gate_first)
    return _gated_act.gated_act(gate, up, act)


def gated_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    activation: ActivationLike = "silu",
    *,
    gate_first: bool = True,
) -> Tensor:
    """`(act(x @ w_gate.T + b_gate) * (x @ w_up.T + b_up)) @ w_down.T + b_down`, keeping x, gate and up for backward.

    Args:
        x: `(*, in_features)`.
        w_gate, b_gate: `(hidden, in_features)`, and `(hidden,)` or `None`.
        w_up, b_up: likewise. Without `w_up`, `w_gate` `(2 * hidden, in_features)` and `b_gate` project to both.
        w_down, b_down: `(out_features, hidden)`, and `(out_features,)` or `None`.
        activation: a name, an `Activation` or a torch activation module.
        gate_first: without `w_up`, whether the gate is the first half of the projection.

    Returns:
        `(*, out_features)`, in the dtype of the torch expression, also under autocast.

    Raises:
        RuntimeError: sizes, dtypes or devices do not fit, as `F.linear` raises.
        ValueError: unknown activation.
    """
    weights, biases = (w_gate, w_up, w_down), (b_gate, b_up, b_down)
    return _gated_mlp.gated_mlp(x, weights, biases, activations.get(activation), gate_first)


def group_norm_act(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: ActivationLike = "silu",
) -> Tensor:
    """`act(group_norm(x))`, the norm and the activation in one pass where a group fits a block, else two reads.

    Args:
        x: `(N, C, *)`, any float dtype, contiguous or channels last without a copy; the result is laid out alike, also
            on a GPU, where torch's is contiguous (in a patched model it lies as torch's).
        num_groups: groups of adjacent channels, each normalised on its own.
        weight, bias: `(C,)` or `None`.
        eps: added to the variance.
        activation: a name, an `Activation` or a torch activation module.

    Returns:
        Shape of `x`, dtype of `act(F.group_norm(x, ...))`: float32 under CUDA autocast.

    Raises:
        RuntimeError: sizes, dtypes or devices do not fit, as `F.group_norm` raises.
        ValueError: one value per group, as `F.group_norm` raises; unknown activation.

    >>> group_norm_act(torch.tensor([[1.0, 3.0, 0.0, 4.0]]), 2, eps=0.0, activation="relu")
    tensor([[0., 1., 0., 1.]])
    """
    return _group_norm_act.group_norm_act(x, num_groups, weight, bias, eps, activations.get(activation))
