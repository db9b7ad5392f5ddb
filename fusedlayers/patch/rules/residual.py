"""The end of a residual branch: LayerScale or a gate, dropout, DropPath, and the add, in one pass."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ... import functional as fused
from .. import effects
from ..codegen import Child
from ..pattern import Pattern, add, dropout, either, leaf, maybe, mul, parameter, through, value
from ..rule import NO_MATCH, Call, Match, Rule, register_rule

LAYER_SCALES = {"timm.layers.layer_scale.LayerScale": "gamma"}
"""Classes that multiply by the parameter named, over the last dim."""
DROP_PATHS = ("timm.layers.drop.DropPath", "torchvision.ops.stochastic_depth.StochasticDepth")


def scale_residual(
    x: Tensor,
    residual: Tensor,
    scale: Tensor | nn.Module | None,
    drop: nn.Module | float | None,
    path: nn.Module | None,
    gamma: str = "",
) -> Tensor:
    """`residual + path(drop(scale * x))` with each module's settings as they are on this call."""
    if isinstance(scale, nn.Module):
        scale = getattr(scale, gamma)
    p, q = rate(drop), 0.0
    if path is not None and path.training:
        q = path.drop_prob if hasattr(path, "drop_prob") else path.p
    if not (isinstance(x, Tensor) and isinstance(residual, Tensor) and x.is_floating_point()):
        y = x if scale is None else scale * x  # arithmetic on sizes and positions
        if isinstance(drop, nn.Module) or p:
            y = drop(y) if isinstance(drop, nn.Module) else F.dropout(y, p)
        return residual + (y if path is None else path(y))
    if isinstance(scale, Tensor) and not p and not q:
        return _multiply_add(scale, x, residual)
    return fused.scale_residual(x, residual, scale, dropout_p=p, drop_path_p=q, training=True)


def rate(drop: nn.Module | float | None) -> float:
    """The probability of a dropout in effect on this call."""
    if isinstance(drop, nn.Module):
        return drop.p if drop.training else 0.0
    return drop or 0.0


def _multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c` by shape: a gated branch added to a residual, or a modulation's scale and shift."""
    if b.shape == c.shape:
        return fused.scale_residual(b, c, a)
    if a.shape == c.shape:
        return fused.scale_residual(a, c, b)
    if c.numel() > max(a.numel(), b.numel()):
        return c + a * b
    return fused.affine_act(a, b, c, "identity") if a.numel() > b.numel() else fused.affine_act(b, a, c, "identity")


def _branch(scaled: Pattern) -> Pattern:
    dropped = through(maybe(dropout("drop"))(through(scaled)))
    return through(maybe(leaf("path", *DROP_PATHS, pins=("mode", "scale_by_keep")))(dropped))


def active(drop: Child | float | None) -> bool:
    """Whether a dropout or drop path may ever drop something as it is set now."""
    if isinstance(drop, Child):
        return getattr(drop.module, "drop_prob", getattr(drop.module, "p", 1.0)) != 0
    return bool(drop)


SCALED = either(
    leaf("scale", *LAYER_SCALES, pins=("inplace",))(through(value("x"))),
    mul("scaled")(parameter("scale"), through(value("x"))),
    mul("scaled")(value("scale"), through(value("x"))),
)


@register_rule
class ScaleResidual(Rule):
    """`residual + drop_path(dropout(scale * x))`, whichever of them are there."""

    pattern = add("sum")(value("residual"), _branch(either(SCALED, value("x"))))
    priority = 20
    random = True

    def check(self, m: Match) -> str | None:
        scale, path = getattr(m, "scale", None), m.path
        if not (effects.is_data(m.x) and effects.is_data(m.residual)):
            return "what is added is not a tensor computed from the input"
        if scale is None and not any(map(active, (m.drop, path))):
            return NO_MATCH
        if path is not None:
            if getattr(path.module, "mode", "row") != "row":
                return f"{path.path[-1]} drops whole batches"
            if not getattr(path.module, "scale_by_keep", True):
                return f"{path.path[-1]} does not scale what it keeps"
        return None

    def fuse(self, m: Match) -> Call:
        scale, gamma = getattr(m, "scale", None), ""
        if isinstance(scale, Child):
            kind = type(scale.module)
            gamma = LAYER_SCALES[f"{kind.__module__}.{kind.__qualname__}"]
        return m.call(scale_residual, m.x, m.residual, scale, m.drop, m.path, gamma)
