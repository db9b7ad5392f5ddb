"""Two Linears with an activation between them, and their gated kind."""

from __future__ import annotations

from torch import Tensor, nn

from ... import functional as fused
from ...activations import Activation
from ..pattern import act, leaf, mul, through, value
from ..rule import Call, Match, Rule, register_rule


def mlp(fc1: nn.Linear, activation: Activation, fc2: nn.Linear, x: Tensor) -> Tensor:
    return fused.mlp(x, fc1.weight, fc1.bias, fc2.weight, fc2.bias, activation)


@register_rule
class Mlp(Rule):
    """`fc2(act(fc1(x)))`."""

    pattern = leaf("fc2", nn.Linear)(through(act("act")(leaf("fc1", nn.Linear)(value("x")))))
    priority = 20

    def fuse(self, m: Match) -> Call:
        return m.call(mlp, m.fc1, m.act, m.fc2, m.x)


def gated_mlp(gate: nn.Linear, up: nn.Linear, down: nn.Linear, activation: Activation, x: Tensor) -> Tensor:
    weights, biases = (m.weight for m in (gate, up, down)), (m.bias for m in (gate, up, down))
    return fused.gated_mlp(x, *weights, *biases, activation)


@register_rule
class GatedMlp(Rule):
    """`down(act(gate(x)) * up(x))`: SwiGLU, GeGLU, ReGLU with two projections."""

    pattern = leaf("down", nn.Linear, stand_in=True)(
        through(
            mul("product")(
                act("act")(leaf("gate", nn.Linear, stand_in=True)(value("x"))),
                leaf("up", nn.Linear, stand_in=True)(value("x")),
            )
        )
    )
    priority = 30

    def fuse(self, m: Match) -> Call:
        return m.call(gated_mlp, m.gate, m.up, m.down, m.act, m.x)


def gated_act(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    return fused.gated_act(gate, up, activation)


@register_rule
class GatedAct(Rule):
    """`act(gate) * up`, whatever made them."""

    pattern = mul("product")(act("act")(value("gate")), value("up"))
    priority = 5

    def fuse(self, m: Match) -> Call:
        return m.call(gated_act, m.gate, m.up, m.act)
