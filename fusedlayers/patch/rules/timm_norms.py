"""timm's `RmsNorm`, which multiplies in the dtype of its input, and its group norm that holds its own activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.rms_norm import rms_norm
from .. import effects
from ..pattern import add, leaf, through, value
from ..rule import Call, Match, Rule, register_rule
from .batch_norm_act import _hold, _problem
from .group_norm import norm_act

RMS_NORM = "timm.layers.norm.RmsNorm"


def timm_rms_norm(layer: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    """The norm of `x + residual`, with a residual paired with that sum; the dtype is what timm's products give."""
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    if layer.weight is not None:
        dtype = torch.promote_types(dtype, layer.weight.dtype)
    if x.is_cuda and torch.is_autocast_enabled("cuda"):  # where pow gives float32
        dtype = torch.promote_types(dtype, torch.float32)
    if residual is not None and residual.shape != x.shape:
        total = x + residual
        return rms_norm(total, layer.normalized_shape, layer.weight, layer.eps, out_dtype=dtype), total
    return rms_norm(x, layer.normalized_shape, layer.weight, layer.eps, residual, out_dtype=dtype)


def _fast(layer: Any) -> str | None:
    return "timm's fast norm is on" if getattr(layer, "_fast_norm", False) else None


@register_rule
class AddTimmRmsNorm(Rule):
    """`norm(x + residual)` with timm's RMS norm, where the sum may be read on."""

    pattern = leaf("norm", RMS_NORM, pins=("_fast_norm",))(add("sum")(through(value("x")), through(value("residual"))))
    outputs = ("norm", "sum")
    priority = 10

    def check(self, m: Match) -> str | None:
        if not (effects.is_data(m.x) and effects.is_data(m.residual)):
            return "what is added is not a tensor computed from the input"
        return _fast(m.norm.module)

    def fuse(self, m: Match) -> Call:
        return m.call(timm_rms_norm, m.norm, m.x, m.residual)


@register_rule
class TimmRmsNorm(Rule):
    """timm's RMS norm with no residual add to take in."""

    target = RMS_NORM

    def check(self, m: Match) -> str | None:
        return _fast(m.module)

    def fuse(self, m: Match) -> Call:
        return m.call(timm_rms_norm, m.own("_fast_norm"), m.inputs["x"])


@register_rule
class TimmGroupNormAct(Rule):
    """timm's group norm with its own activation."""

    target = "timm.layers.norm_act.GroupNormAct"
    priority = 10

    def check(self, m: Match) -> str | None:
        return _fast(m.module) or _problem(m.module)

    def fuse(self, m: Match) -> Call:
        return m.call(norm_act, m.own("_fast_norm"), m.inputs["x"], _hold(m))
