"""Layer norm and RMS norm: with the residual add and the dropout before them, and alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...nn._children import stored
from ...ops.layer_norm import dropout_layer_norm, layer_norm
from ...ops.rms_norm import dropout_rms_norm, rms_norm
from .. import effects
from ..pattern import Pattern, State, add, dropout, leaf, through, value
from ..rule import NO_MATCH, Call, Match, Rule, register_rule
from .residual import SCALED, active, rate

LAYER_NORMS: tuple[type | str, ...] = (nn.LayerNorm, "timm.layers.norm.LayerNorm")
RMS_NORMS: tuple[type | str, ...] = (nn.RMSNorm,) if hasattr(nn, "RMSNorm") else ()
NORMS = (*LAYER_NORMS, *RMS_NORMS)


def norm(layer: Any, x: Tensor, residual: Tensor | None = None, **how: Any) -> Any:
    """What the layer makes of x, or of `x + residual`; `how`: keywords of `ops.layer_norm` and `ops.rms_norm`."""
    shape, eps = layer.normalized_shape, layer.eps
    if isinstance(layer, nn.LayerNorm):
        weight, bias = stored(layer, "weight", "bias")
        return layer_norm(x, shape, weight, bias, eps, residual, **how)
    return rms_norm(x, shape, layer.weight, eps, residual, **how)


def add_norm(layer: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual`, and that sum."""
    if x.shape != residual.shape:  # the fused op adds like to like; broadcasting stays with torch
        total = x + residual
        return norm(layer, total), total
    return norm(layer, x, residual)


def drop_add_norm(layer: Any, x: Tensor, residual: Tensor, drop: nn.Module | float) -> tuple[Tensor, Tensor]:
    """The norm of `drop(x) + residual` with the dropout as it is set on this call, and that sum."""
    p = rate(drop)
    return dropped_norm(layer, x, residual, p) if p else add_norm(layer, x, residual)


def dropped_norm(
    layer: Any, x: Tensor, residual: Tensor, p: float, out_dtype: torch.dtype | None = None, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`shift`: see `ops._drop_norm.drop_norm`; only where x and the residual are of one shape."""
    if x.shape != residual.shape:
        total = F.dropout(x, p, True) + residual
        return norm(layer, total), total
    shape, eps = layer.normalized_shape, layer.eps
    if isinstance(layer, nn.LayerNorm):
        weight, bias = stored(layer, "weight", "bias")
        return dropout_layer_norm(x, residual, p, True, shape, weight, bias, eps, out_dtype=out_dtype, shift=shift)
    return dropout_rms_norm(x, residual, p, True, shape, layer.weight, eps, out_dtype=out_dtype, shift=shift)


def _obstacle(layer: nn.Module) -> str | None:
    return "timm's fast norm is on" if getattr(layer, "_fast_norm", False) else None


def after_dropout(normed: Pattern, branch: Pattern) -> Pattern:
    """`normed(dropout(branch) + residual)`."""
    return normed(add("sum")(through(dropout("drop")(through(branch))), through(value("residual"))))


def dropout_problem(m: Match) -> str | None:
    """What keeps a match of `after_dropout` from being one; a scaled branch stays with the pass that scales it."""
    if not active(m.drop) or any(True for _ in SCALED.match(m.x, State(m.module))):
        return NO_MATCH
    if not (effects.is_data(m.x) and effects.is_data(m.residual)):
        return "what is added is not a tensor computed from the input"
    return None


@register_rule
class AddNorm(Rule):
    """`norm(x + residual)` where the sum may be read on: the middle of a transformer block."""

    pattern = leaf("norm", *NORMS, pins=("_fast_norm",))(add("sum")(through(value("x")), through(value("residual"))))
    outputs = ("norm", "sum")
    priority = 10

    def check(self, m: Match) -> str | None:
        if not (effects.is_data(m.x) and effects.is_data(m.residual)):
            return "what is added is not a tensor computed from the input"
        return _obstacle(m.norm.module)

    def fuse(self, m: Match) -> Call:
        return m.call(add_norm, m.norm, m.x, m.residual)


@register_rule
class DropAddNorm(Rule):
    """`norm(dropout(x) + residual)`, where the sum may be read on: the end of a post-norm block."""

    pattern = after_dropout(leaf("norm", *NORMS, pins=("_fast_norm",)), value("x"))
    outputs = ("norm", "sum")
    priority = 22
    random = True

    def check(self, m: Match) -> str | None:
        problem = dropout_problem(m)
        return _obstacle(m.norm.module) if problem is None else problem

    def fuse(self, m: Match) -> Call:
        return m.call(drop_add_norm, m.norm, m.x, m.residual, m.drop)


@register_rule
class LoneNorm(Rule):
    """A layer norm or RMS norm with no residual add to take in."""

    target = NORMS

    def check(self, m: Match) -> str | None:
        return _obstacle(m.module)

    def fuse(self, m: Match) -> Call:
        (x,) = m.inputs.values()
        return m.call(norm, m.own("_fast_norm"), x)
