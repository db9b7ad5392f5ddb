"""Group norm with the activation after it, as in diffusion networks, and alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...activations import Activation, get
from ...ops.group_norm_act import group_norm_act
from ..pattern import act, leaf, through, value
from ..rule import Call, Match, Rule, register_rule


def norm_act(norm: Any, x: Tensor, activation: Activation | None) -> Tensor:
    act = get("identity" if activation is None else activation)
    return group_norm_act(x, norm.num_groups, norm.weight, norm.bias, norm.eps, act, as_eager=True)


@register_rule
class GroupNormAct(Rule):
    """`act(group_norm(x))`."""

    pattern = act("act")(through(leaf("norm", nn.GroupNorm)(value("x"))))
    priority = 10

    def fuse(self, m: Match) -> Call:
        return m.call(norm_act, m.norm, m.x, m.act)


@register_rule
class LoneGroupNorm(Rule):
    """A group norm that no activation follows."""

    target = nn.GroupNorm

    def fuse(self, m: Match) -> Call:
        return m.call(norm_act, m.own(), m.inputs["input"], None)
