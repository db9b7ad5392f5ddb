"""Group norm with the activation after it, as in diffusion networks, and alone."""

from __future__ import annotations

from torch import Tensor, nn

from ... import functional as fused
from ...activations import Activation
from ..pattern import act, leaf, through, value
from ..rule import Call, Match, Rule, register_rule


def group_norm_act(norm: nn.GroupNorm, x: Tensor, activation: Activation | None) -> Tensor:
    return fused.group_norm_act(x, norm.num_groups, norm.weight, norm.bias, norm.eps, activation)


@register_rule
class GroupNormAct(Rule):
    """`act(group_norm(x))`."""

    pattern = act("act")(through(leaf("norm", nn.GroupNorm)(value("x"))))
    priority = 10

    def fuse(self, m: Match) -> Call:
        return m.call(group_norm_act, m.norm, m.x, m.act)


@register_rule
class LoneGroupNorm(Rule):
    """A group norm that no activation follows."""

    target = nn.GroupNorm

    def fuse(self, m: Match) -> Call:
        return m.call(group_norm_act, m.own(), m.inputs["input"], None)
