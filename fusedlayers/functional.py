"""The functions users call: differentiable in every tensor argument, in eager's dtype, also under autocast."""

from __future__ import annotations

from torch import Tensor, nn

from . import activations
from .activations import Activation
from .ops import affine_act as _affine_act

ActivationLike = str | Activation | nn.Module | None

__all__ = ["affine_act", "fused_relu"]


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
