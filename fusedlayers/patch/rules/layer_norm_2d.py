"""Layer norm over the channels of images, as timm and torchvision write it: the dims permuted around the norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rule import Call, Match, Rule, register_rule
from .layer_norm import norm

LAYER_NORMS_2D = ("timm.layers.norm.LayerNorm2d", "torchvision.models.convnext.LayerNorm2d")


def layer_norm_2d(layer: Any, x: Tensor) -> Tensor:
    return norm(layer, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@register_rule
class LayerNorm2d(Rule):
    """A layer norm over dim 1 of `(N, C, H, W)`."""

    target = LAYER_NORMS_2D
    priority = 10

    def check(self, m: Match) -> str | None:
        return "timm's fast norm is on" if getattr(m.module, "_fast_norm", False) else None

    def fuse(self, m: Match) -> Call:
        return m.call(layer_norm_2d, m.own("_fast_norm"), m.inputs["x"])
