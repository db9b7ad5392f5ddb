"""A Linear and the activation that alone reads its output."""

from __future__ import annotations

from torch import Tensor, nn

from ... import functional as fused
from ...activations import Activation
from ...nn._children import stored
from ..pattern import act, leaf, value
from ..rule import Call, Match, Rule, register_rule


def linear_act(fc: nn.Linear, activation: Activation, x: Tensor) -> Tensor:
    weight, bias = stored(fc, "weight", "bias")
    return fused.linear_act(x, weight, bias, activation)


@register_rule
class LinearAct(Rule):
    """`act(fc(x))`: bias and activation in one pass over the product."""

    pattern = act("act")(leaf("fc", nn.Linear)(value("x")))

    def fuse(self, m: Match) -> Call:
        return m.call(linear_act, m.fc, m.act, m.x)
