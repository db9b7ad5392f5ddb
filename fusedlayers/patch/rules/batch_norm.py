"""Batch norm with what follows it: an activation, a residual add, both; and alone."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...nn.batch_norm import batch_norm_act
from .. import effects
from ..pattern import act, add, leaf, through, value
from ..rule import Call, Match, Rule, register_rule

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@register_rule
class BatchNormAct(Rule):
    """`act(bn(x))`."""

    pattern = act("act")(through(leaf("bn", *BATCH_NORMS)(value("x"))))
    priority = 10

    def fuse(self, m: Match) -> Call:
        return m.call(batch_norm_act, m.bn, m.x, m.act)


@register_rule
class BatchNormAddAct(Rule):
    """`act(bn(x) + residual)`: the end of a residual block."""

    pattern = act("act")(through(add("sum")(through(leaf("bn", *BATCH_NORMS)(value("x"))), value("residual"))))
    priority = 20

    def check(self, m: Match) -> str | None:
        return None if effects.is_data(m.residual) else "what is added is not a tensor computed from the input"

    def fuse(self, m: Match) -> Call:
        return m.call(batch_norm_act, m.bn, m.x, m.act, m.residual)


@register_rule
class BatchNormAdd(Rule):
    """`bn(x) + residual`, with no activation after it."""

    pattern = add("sum")(through(leaf("bn", *BATCH_NORMS)(value("x"))), value("residual"))
    priority = 10

    def check(self, m: Match) -> str | None:
        return None if effects.is_data(m.residual) else "what is added is not a tensor computed from the input"

    def fuse(self, m: Match) -> Call:
        return m.call(batch_norm_act, m.bn, m.x, None, m.residual)


def batch_norm(bn: _BatchNorm, x: Tensor) -> Tensor:
    return batch_norm_act(bn, x, None)


@register_rule
class LoneBatchNorm(Rule):
    """A batch norm that nothing fusable follows."""

    target = BATCH_NORMS

    def fuse(self, m: Match) -> Call:
        return m.call(batch_norm, m.own(), m.inputs["input"])
