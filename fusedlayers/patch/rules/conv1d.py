"""GPT-2's `Conv1D`, a Linear whose weight lies the other way round, and the activation after it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import functional as fused
from ...activations import Activation
from ..pattern import act, leaf, through, value
from ..rule import Call, Match, Rule, register_rule

CONV1D = ("transformers.pytorch_utils.Conv1D", "transformers.modeling_utils.Conv1D")


def conv1d_act(fc: Any, activation: Activation, x: Tensor) -> Tensor:
    return fused.linear_act(x, fc.weight.t(), fc.bias, activation)


def conv1d_mlp(fc1: Any, activation: Activation, fc2: Any, x: Tensor) -> Tensor:
    return fused.mlp(x, fc1.weight.t(), fc1.bias, fc2.weight.t(), fc2.bias, activation)


@register_rule
class Conv1dAct(Rule):
    """`act(fc(x))` of GPT-2's kind of Linear."""

    pattern = act("act")(leaf("fc", *CONV1D, pins=("nf",))(value("x")))

    def fuse(self, m: Match) -> Call:
        return m.call(conv1d_act, m.fc, m.act, m.x)


@register_rule
class Conv1dMlp(Rule):
    """`fc2(act(fc1(x)))` of GPT-2's kind of Linear."""

    pattern = leaf("fc2", *CONV1D, pins=("nf",))(through(act("act")(leaf("fc1", *CONV1D, pins=("nf",))(value("x")))))
    priority = 20

    def fuse(self, m: Match) -> Call:
        return m.call(conv1d_mlp, m.fc1, m.act, m.fc2, m.x)
