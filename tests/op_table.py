"""Every op once: the fused callable, what eager writes for it, and how to make its inputs.

The property suite, the mode matrix, `tests/gpu`, `benchmarks/sanitize.py` and the coverage table of the docs all read
this table: an op added here is held to all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedlayers import functional as fused
from fusedlayers.activations import Activation, get, names
from fusedlayers.ops.projections import projections
from fusedlayers.ops.split_heads import split_heads
from fusedlayers.ops.split_linear import split_linear
from tests.harness import FLOATS, randn

Shape = tuple[int, ...]

REPRESENTATIVE = ("gelu", "relu", "softplus")
"""Input kept; output kept; settings of its own and float32 under CUDA's autocast."""

JUMPS = frozenset(
    {"gelu_clipped", "hard_mish", "hard_sigmoid", "hard_swish", "hardshrink", "hardsigmoid", "hardswish", "hardtanh"}
    | {"leaky_relu", "relu", "relu6", "rrelu", "selu", "softshrink", "threshold"}
)
"""Activations whose value or slope jumps. Half precision may round two nearly equal values to either side of it."""

NOT_TWICE = frozenset({"hardsigmoid"})
"""Activations that torch itself differentiates only once."""

NO_VMAP = frozenset({"rrelu"})
"""Activations whose torch op has no batching rule: `vmap` raises, as on eager."""

SETTINGS = {
    "threshold": (0.25, -0.5),
    "hardtanh": (-0.75, 1.25),
    "leaky_relu": (0.2,),
    "elu": (1.5,),
    "celu": (1.5,),
    "softplus": (1.5, 4.0),
    "gelu_clipped": (-0.1, 1.0),
}
"""Settings other than the defaults, where tests can tell them apart."""


def activation(name: str) -> Activation:
    """The activation with settings that are not its defaults."""
    return Activation(name, SETTINGS.get(name, ()))


@dataclass(frozen=True)
class Op:
    """One op.

    `fused(act, *tensors)` and `eager(act, *tensors)` take the same tensors, of `shapes(lead, n)` for leading dims
    `lead` and `n` features, and return a tensor or a tuple. `fan_in` names weights: entries are scaled so that the
    products stay of unit size.
    """

    name: str
    fused: Callable[..., Any]
    eager: Callable[..., Any]
    shapes: Callable[[Shape, int], list[Shape]]
    activated: bool = True
    fan_in: frozenset[int] = field(default_factory=frozenset)
    per_sample: frozenset[int] = frozenset({0})
    """Operands that have the leading dims."""
    least: tuple[int, int] = (1, 1)
    """Fewest rows and features with a meaning (one value has no variance)."""
    exact: bool = False
    """Whether the pre-activation of values on a coarse grid is exact in every dtype."""
    sums: bool = False
    """Whether outputs are sums of many terms, which may cancel by luck."""

    def inputs(
        self,
        lead: Shape,
        n: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        needs: Sequence[Any] | None = None,
        seed: int = 0,
        grid: bool = False,
    ) -> list[Tensor]:
        """Operands with random values; on a `grid`, values that no dtype rounds and no jump coincides with."""
        tensors = []
        for i, shape in enumerate(self.shapes(lead, n)):
            t = randn(*shape, dtype=torch.float64, grad=False, seed=seed + i)
            if grid:
                t = (t.clamp(-2, 2) * 2).round() / 2 if i not in self.fan_in else t.clamp(-1, 1).round() / 2
                t = t + 3 / 16 if i == len(self.shapes(lead, n)) - 1 else t
            elif i in self.fan_in:
                t = t * shape[-1] ** -0.5
            tensors.append(t.to(device, dtype))
        needs = (True,) * len(tensors) if needs is None else needs
        return [t.requires_grad_(bool(need)) for t, need in zip(tensors, needs, strict=True)]

    def bound(self, act: str | Activation | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """`fused` and `eager` with the activation filled in, as functions of the tensors alone."""
        found = get(act) if self.activated else None
        return lambda *t: self.fused(found, *t), lambda *t: self.eager(found, *t)

    @property
    def activations(self) -> tuple[str, ...]:
        return tuple(names()) if self.activated else ("-",)


OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    OPS[op.name] = op
    return op


def cells(dtypes: Sequence[torch.dtype] = FLOATS) -> Iterator[tuple[Op, str, torch.dtype, bool]]:
    """`(op, activation, dtype, slow)` of the whole product.

    Not slow: every activation on `affine_act`, in all dtypes; three on each other op.
    """
    for op in OPS.values():
        for act in op.activations:
            for dtype in dtypes:
                yield op, act, dtype, op.activated and op.name != "affine_act" and act not in REPRESENTATIVE


def _channels_second(lead: Shape, n: int) -> Shape:
    return (lead[0], n, *lead[1:])


def _heads(x: Tensor, columns: int | None = None) -> Shape:
    """Two heads of each of three parts of so many columns, all leading dims but the first taken for tokens."""
    return x.shape[0] if x.dim() > 1 else 1, math.prod(x.shape[1:-1]), 3, 2, (columns or x.shape[-1]) // 6


register(
    Op(
        "affine_act",
        lambda act, x, scale, shift: fused.affine_act(x, scale, shift, act),
        lambda act, x, scale, shift: act(scale * x + shift),
        lambda lead, n: [(*lead, n), (n,), (n,)],
        exact=True,
    )
)
register(
    Op(
        "affine_act_channels",
        lambda act, x, scale, shift: fused.affine_act(x, scale, shift, act, dim=1),
        lambda act, x, s, t: act(s.view(-1, *[1] * (x.dim() - 2)) * x + t.view(-1, *[1] * (x.dim() - 2))),
        lambda lead, n: [_channels_second(lead, n), (n,), (n,)],
        exact=True,
    )
)
register(
    Op(
        "linear_act",
        lambda act, x, weight, bias: fused.linear_act(x, weight, bias, act),
        lambda act, x, weight, bias: act(F.linear(x, weight, bias)),
        lambda lead, n: [(*lead, 11), (n, 11), (n,)],
        fan_in=frozenset({1}),
        exact=True,
        sums=True,
    )
)
register(
    Op(
        "mlp",
        lambda act, x, w1, b1, w2, b2: fused.mlp(x, w1, b1, w2, b2, act),
        lambda act, x, w1, b1, w2, b2: F.linear(act(F.linear(x, w1, b1)), w2, b2),
        lambda lead, n: [(*lead, 9), (n, 9), (n,), (5, n), (5,)],
        fan_in=frozenset({1, 3}),
        sums=True,
    )
)
register(
    Op(
        "gated_act",
        lambda act, gate, up: fused.gated_act(gate, up, act),
        lambda act, gate, up: act(gate) * up,
        lambda lead, n: [(*lead, n), (*lead, n)],
        per_sample=frozenset({0, 1}),
        exact=True,
    )
)
register(
    Op(
        "gated_mlp",
        lambda act, x, w_gate, w_up, w_down: fused.gated_mlp(x, w_gate, w_up, w_down, activation=act),
        lambda act, x, w_gate, w_up, w_down: F.linear(act(F.linear(x, w_gate)) * F.linear(x, w_up), w_down),
        lambda lead, n: [(*lead, 9), (n, 9), (n, 9), (5, n)],
        fan_in=frozenset({1, 2, 3}),
        sums=True,
    )
)
register(
    Op(
        "batch_norm_act",
        lambda act, x, weight, bias: fused.batch_norm_act(x, None, None, weight, bias, True, 0.1, 1e-3, act),
        lambda act, x, weight, bias: act(F.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-3)),
        lambda lead, n: [_channels_second(lead, n), (n,), (n,)],
        least=(3, 1),
        sums=True,
    )
)
register(
    Op(
        "batch_norm_add_act",
        lambda act, x, weight, bias, r: fused.batch_norm_act(x, None, None, weight, bias, True, 0.1, 1e-3, act, r),
        lambda act, x, weight, bias, r: act(F.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-3) + r),
        lambda lead, n: [_channels_second(lead, n), (n,), (n,), _channels_second(lead, n)],
        per_sample=frozenset({0, 3}),
        least=(3, 1),
        sums=True,
    )
)
register(
    Op(
        "group_norm_act",
        lambda act, x, weight, bias: fused.group_norm_act(x, 1, weight, bias, 1e-3, act),
        lambda act, x, weight, bias: act(F.group_norm(x, 1, weight, bias, 1e-3)),
        lambda lead, n: [_channels_second(lead, n), (n,), (n,)],
        least=(1, 4),
        sums=True,
    )
)
register(
    Op(
        "layer_norm",
        lambda _, x, weight, bias: fused.layer_norm(x, weight.shape, weight, bias, 1e-3),
        lambda _, x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, 1e-3),
        lambda lead, n: [(*lead, n), (n,), (n,)],
        activated=False,
        least=(1, 4),
        sums=True,
    )
)
register(
    Op(
        "add_layer_norm",
        lambda _, x, weight, bias, r: fused.layer_norm(x, weight.shape, weight, bias, 1e-3, r),
        lambda _, x, weight, bias, r: (F.layer_norm(x + r, weight.shape, weight, bias, 1e-3), x + r),
        lambda lead, n: [(*lead, n), (n,), (n,), (*lead, n)],
        activated=False,
        per_sample=frozenset({0, 3}),
        least=(1, 4),
        sums=True,
    )
)
register(
    Op(
        "rms_norm",
        lambda _, x, weight: fused.rms_norm(x, weight.shape, weight, 1e-3),
        lambda _, x, weight: F.rms_norm(x, weight.shape, weight, 1e-3),
        lambda lead, n: [(*lead, n), (n,)],
        activated=False,
        least=(1, 2),
        sums=True,
    )
)
register(
    Op(
        "scale_residual",
        lambda _, x, residual, scale: fused.scale_residual(x, residual, scale),
        lambda _, x, residual, scale: residual + scale * x,
        lambda lead, n: [(*lead, n), (*lead, n), (n,)],
        activated=False,
        per_sample=frozenset({0, 1}),
    )
)
register(
    Op(
        "split_heads",
        lambda _, x: split_heads(x * 1.0, *_heads(x)),  # views of a tensor of its own, as a projection makes it
        lambda _, x: (x * 1.0).reshape(_heads(x)).permute(2, 0, 3, 1, 4).unbind(0),
        lambda lead, n: [(*lead, 6 * max(n // 6, 1))],
        activated=False,
    )
)
register(
    Op(
        "split_linear",
        lambda _, x, w, b: split_linear(x, w, b, *_heads(x, 6)),
        lambda _, x, w, b: F.linear(x, w, b).reshape(_heads(x, 6)).permute(2, 0, 3, 1, 4).unbind(0),
        lambda lead, n: [(*lead, n), (6, n), (6,)],
        activated=False,
        fan_in=frozenset({1}),
        sums=True,
    )
)
register(
    Op(
        "projections",
        lambda _, x, q, k, b, c: torch.cat(projections(x, (q, k), (b, c)), -1),
        lambda _, x, q, k, b, c: torch.cat((F.linear(x, q, b), F.linear(x, k, c)), -1),
        lambda lead, n: [(*lead, 11), (n, 11), (5, 11), (n,), (5,)],
        activated=False,
        fan_in=frozenset({1, 2}),
        sums=True,
    )
)
