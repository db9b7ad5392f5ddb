"""A Linear or an MLP, the dropout and the residual add behind it, and their norm: a block's ends as BERT writes them.

The products stay what they are. Only the gradient of the last bias, for which eager reads the gradient of the product's
result once more, comes from the norm's backward, which sums that up while it writes it.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ... import functional as fused
from ...activations import Activation
from ...nn._children import stored
from ...ops._drop_norm import left_to_eager
from ...ops._gemm import autocast_dtype, gemm_dtype
from .. import effects
from ..pattern import State, leaf, value
from ..rule import NO_MATCH, Call, Match, Rule, register_rule
from ._left_bias import SMALLEST, may_leave_bias
from .layer_norm import NORMS, _obstacle, after_dropout, drop_add_norm, dropped_norm
from .low_norm import Held, _ForProduct, _product_dtype, drop_add_low_norm
from .mlp import Mlp
from .residual import active, rate


def linear_drop_add_norm(
    fc: nn.Linear, layer: Any, x: Tensor, residual: Tensor, drop: nn.Module | float
) -> tuple[Tensor, Tensor]:
    """The norm of `drop(fc(x)) + residual`, and that sum."""
    p = rate(drop)
    y, shift = _product(fc, x, residual, p)
    if shift is None:
        return drop_add_norm(layer, y, residual, drop)
    return dropped_norm(layer, y, residual, p, shift=shift)


def linear_drop_add_low_norm(
    fc: nn.Linear, layer: Any, x: Tensor, residual: Tensor, drop: nn.Module | float, module: nn.Module, held: Held
) -> tuple[Tensor, Tensor]:
    """Likewise, under autocast in the dtype of the product behind the norm."""
    p = rate(drop)
    y, shift = _product(fc, x, residual, p)
    if shift is None:
        return drop_add_low_norm(layer, y, residual, drop, module, held)
    return dropped_norm(layer, y, residual, p, _product_dtype(module, held, y, residual), shift)


def _product(fc: nn.Linear, x: Tensor, residual: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    """`fc(x)`, and its bias where that is left to the norm to have a gradient."""
    weight, bias = stored(fc, "weight", "bias")
    if _leaves_bias(x, weight, bias, residual, p):
        return F.linear(x, weight, bias.detach()), bias
    return F.linear(x, weight, bias), None


def mlp_drop_add_norm(
    fc1: nn.Linear, activation: Activation, fc2: nn.Linear, layer: Any, x: Tensor, residual: Tensor,
    drop: nn.Module | float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The norm of `drop(fc2(activation(fc1(x)))) + residual`, and that sum."""
    p = rate(drop)
    first, (weight, bias) = stored(fc1, "weight", "bias"), stored(fc2, "weight", "bias")
    if _leaves_bias(x, weight, bias, residual, p):
        y = fused.mlp(x, *first, weight, bias.detach(), activation)
        return dropped_norm(layer, y, residual, p, shift=bias)
    return drop_add_norm(layer, fused.mlp(x, *first, weight, bias, activation), residual, drop)


def _leaves_bias(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> bool:
    """Whether the norm of `drop(x @ ... @ weight.T + bias) + residual` is to give the bias its gradient."""
    if not p or not may_leave_bias(x, weight, bias):
        return False
    if residual.numel() < SMALLEST or residual.shape != (*x.shape[:-1], weight.shape[0]):
        return False
    dtype = gemm_dtype(autocast_dtype(x), x.dtype, weight.dtype)
    return dtype is None or not left_to_eager(x.get_device(), dtype, residual.numel())  # has no such sum at hand


def _linear_problem(m: Match) -> str | None:
    """What keeps a match from being one; the rules for less tell what stands in their way as well."""
    if m.fc.module.bias is None or not _drops_and_adds(m):
        return NO_MATCH
    # a whole MLP in front keeps less
    return NO_MATCH if any(True for _ in Mlp.pattern.match(dict(m.state.nodes)["fc"], State(m.module))) else None


def _drops_and_adds(m: Match) -> bool:
    """Whether a dropout is on and something computed is added, out of place: in place the left operand decides the
    dtype, which only the rules for less see."""
    in_place = effects.overwrites(dict(m.state.nodes)["sum"], m.module)
    return active(m.drop) and effects.is_data(m.residual) and not in_place


@register_rule
class LinearDropAddNorm(Rule):
    """`norm(dropout(fc(x)) + residual)`, where the sum may be read on: the norm gives the bias of `fc` its gradient."""

    pattern = after_dropout(leaf("norm", *NORMS, pins=("_fast_norm",)), leaf("fc", nn.Linear)(value("x")))
    outputs = ("norm", "sum")
    priority = 23
    random = True

    def check(self, m: Match) -> str | None:
        problem = _linear_problem(m)
        return (NO_MATCH if _obstacle(m.norm.module) else None) if problem is None else problem

    def fuse(self, m: Match) -> Call:
        return m.call(linear_drop_add_norm, m.fc, m.norm, m.x, m.residual, m.drop)


@register_rule
class MlpDropAddNorm(Rule):
    """`norm(dropout(fc2(act(fc1(x)))) + residual)`, where the sum may be read on."""

    pattern = after_dropout(leaf("norm", *NORMS, pins=("_fast_norm",)), Mlp.pattern)
    outputs = ("norm", "sum")
    priority = 28
    random = True

    def check(self, m: Match) -> str | None:
        return None if _drops_and_adds(m) and _obstacle(m.norm.module) is None else NO_MATCH

    def fuse(self, m: Match) -> Call:
        return m.call(mlp_drop_add_norm, m.fc1, m.act, m.fc2, m.norm, m.x, m.residual, m.drop)


@register_rule
class LinearDropAddNormForProduct(_ForProduct):
    """`next(norm(dropout(fc(x)) + residual))`: `linear_drop_add_norm`, under autocast in the dtype of `next`."""

    pattern = LinearDropAddNorm.pattern
    outputs = ("norm", "sum")
    priority = 26
    random = True

    def check(self, m: Match) -> str | None:
        problem = _linear_problem(m)
        return (NO_MATCH if super().check(m) is not None else None) if problem is None else problem

    def fuse(self, m: Match) -> Call:
        return m.call(linear_drop_add_low_norm, m.fc, m.norm, m.x, m.residual, m.drop, m.own(), m.noted.held)
