"""A residual add and the activation after it, where no norm before them takes them in."""

from __future__ import annotations

from torch import Tensor

from ...activations import Activation
from ...ops.affine_act import affine_act
from .. import effects
from ..pattern import act, add, through, value
from ..rule import NO_MATCH, Call, Match, Rule, register_rule


def add_act(activation: Activation, x: Tensor, residual: Tensor) -> Tensor:
    if not x.is_cuda or x.shape != residual.shape:
        return activation(x + residual)  # nothing to save, or a broadcast that torch sorts out
    return affine_act(x, 1.0, -0.0, activation, None, residual)  # 1 * x + -0.0 is x, its zeros' signs included


@register_rule
class AddAct(Rule):
    """`act(x + residual)`."""

    pattern = act("act")(through(add("sum")(through(value("x")), through(value("residual")))))
    priority = 3

    def check(self, m: Match) -> str | None:
        return None if effects.is_data(m.x) and effects.is_data(m.residual) else NO_MATCH

    def fuse(self, m: Match) -> Call:
        return m.call(add_act, m.act, m.x, m.residual)
