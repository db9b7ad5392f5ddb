"""Layer norm and RMS norm: with the residual add before them, and alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ... import functional as fused
from ...nn._children import stored
from .. import effects
from ..pattern import add, leaf, through, value
from ..rule import Call, Match, Rule, register_rule

LAYER_NORMS: tuple[type | str, ...] = (nn.LayerNorm, "timm.layers.norm.LayerNorm")
RMS_NORMS: tuple[type | str, ...] = (nn.RMSNorm,) if hasattr(nn, "RMSNorm") else ()
NORMS = (*LAYER_NORMS, *RMS_NORMS)


def norm(layer: Any, x: Tensor) -> Tensor:
    if isinstance(layer, nn.LayerNorm):
        weight, bias = stored(layer, "weight", "bias")
        return fused.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps)
    return fused.rms_norm(x, layer.normalized_shape, layer.weight, layer.eps)


def add_norm(layer: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual`, and that sum."""
    if x.shape != residual.shape:  # the fused op adds like to like; broadcasting stays with torch
        total = x + residual
        return norm(layer, total), total
    if isinstance(layer, nn.LayerNorm):
        weight, bias = stored(layer, "weight", "bias")
        return fused.layer_norm(x, layer.normalized_shape, weight, bias, layer.eps, residual)
    return fused.rms_norm(x, layer.normalized_shape, layer.weight, layer.eps, residual)


def _obstacle(layer: nn.Module) -> str | None:
    return "timm's fast norm is on" if getattr(layer, "_fast_norm", False) else None


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
class LoneNorm(Rule):
    """A layer norm or RMS norm with no residual add to take in."""

    target = NORMS

    def check(self, m: Match) -> str | None:
        return _obstacle(m.module)

    def fuse(self, m: Match) -> Call:
        (x,) = m.inputs.values()
        return m.call(norm, m.own("_fast_norm"), x)
