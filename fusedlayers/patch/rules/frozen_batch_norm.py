"""torchvision's `FrozenBatchNorm2d`, a fixed affine map, with the add and the activation after it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import functional as fused
from ...activations import Activation
from ...ops import affine_act as _ops
from .. import effects
from ..pattern import act, add, leaf, through, value
from ..rule import Call, Match, Rule, register_rule

FROZEN = "torchvision.ops.misc.FrozenBatchNorm2d"
IDENTITY = Activation("identity")


def frozen_norm_act(bn: Any, x: Tensor, activation: Activation = IDENTITY, residual: Tensor | None = None) -> Tensor:
    """`act(bn(x) + residual)`; scale and shift are worked out on each call, as the layer does."""
    scale = bn.weight * (bn.running_var + bn.eps).rsqrt()
    shift = bn.bias - bn.running_mean * scale
    if x.dim() != 4 or (residual is not None and residual.shape != x.shape):  # torch broadcasts, or raises
        y = x * scale.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1)
        return activation(y if residual is None else y + residual)
    if residual is None:
        return fused.affine_act(x, scale, shift, activation, dim=1)
    return _ops.affine_act(x, scale, shift, activation, 1, residual)


@register_rule
class FrozenNormAct(Rule):
    """`act(frozen_bn(x))`."""

    pattern = act("act")(through(leaf("bn", FROZEN)(value("x"))))
    priority = 10

    def fuse(self, m: Match) -> Call:
        return m.call(frozen_norm_act, m.bn, m.x, m.act)


@register_rule
class FrozenNormAddAct(Rule):
    """`act(frozen_bn(x) + residual)`: the end of a residual block."""

    pattern = act("act")(through(add("sum")(through(leaf("bn", FROZEN)(value("x"))), value("residual"))))
    priority = 20

    def check(self, m: Match) -> str | None:
        return None if effects.is_data(m.residual) else "what is added is not a tensor computed from the input"

    def fuse(self, m: Match) -> Call:
        return m.call(frozen_norm_act, m.bn, m.x, m.act, m.residual)


@register_rule
class LoneFrozenNorm(Rule):
    """A frozen batch norm that nothing fusable follows."""

    target = FROZEN

    def fuse(self, m: Match) -> Call:
        return m.call(frozen_norm_act, m.own(), m.inputs["x"])
