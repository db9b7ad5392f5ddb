"""T5's feed-forwards, whose forward asks for the dtype of a weight and so cannot be traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import functional as fused
from ...activations import Activation, recognise
from ..guards import member_problem
from ..pattern import settings_of
from ..rule import Call, Match, Rule, register_rule

MODELS = {
    "t5": "T5",
    "mt5": "MT5",
    "umt5": "UMT5",
    "longt5": "LongT5",
    "udop": "Udop",
    "pop2piano": "Pop2Piano",
    "switch_transformers": "SwitchTransformers",
    "pix2struct": "Pix2StructText",
}


def _classes(suffix: str) -> tuple[str, ...]:
    return tuple(f"transformers.models.{model}.modeling_{model}.{prefix}{suffix}" for model, prefix in MODELS.items())


def _down(module: Any, hidden: Tensor) -> Tensor:
    """Dropout, the cast to a weight kept in float32, and the projection back: the children themselves."""
    hidden, weight = module.dropout(hidden), module.wo.weight
    if isinstance(weight, Tensor) and hidden.dtype != weight.dtype and weight.dtype != torch.int8:
        hidden = hidden.to(weight.dtype)
    return module.wo(hidden)


def t5_gated(module: Any, activation: Activation, x: Tensor) -> Tensor:
    return _down(module, fused.gated_act(module.wi_0(x), module.wi_1(x), activation))


def t5_dense(module: Any, activation: Activation, x: Tensor) -> Tensor:
    return _down(module, fused.linear_act(x, module.wi.weight, module.wi.bias, activation))


def _problem(module: Any, *names: str) -> str | None:
    absent = next((name for name in (*names, "act", "dropout", "wo") if name not in module._modules), None)
    if absent is not None:
        return f"it has no {absent}, as the class known here has"
    if recognise(module.act) is None:
        return f"{type(module.act).__name__} is not an activation known here"
    return member_problem(module.act, "act")


@register_rule
class T5GatedMlp(Rule):
    """T5's gated feed-forward: `act(wi_0(x)) * wi_1(x)`, whatever the projections are."""

    target = _classes("DenseGatedActDense")
    priority = 10

    def check(self, m: Match) -> str | None:
        return _problem(m.module, "wi_0", "wi_1")

    def fuse(self, m: Match) -> Call:
        m.child("act", pins=settings_of(m.module.act))
        return m.call(t5_gated, m.own(), recognise(m.module.act), *m.inputs.values())


@register_rule
class T5Mlp(Rule):
    """T5's feed-forward: `act(wi(x))`."""

    target = _classes("DenseActDense")
    priority = 10

    def check(self, m: Match) -> str | None:
        problem = _problem(m.module, "wi")
        if problem is None and type(m.module.wi) is not nn.Linear:
            return f"wi is a {type(m.module.wi).__name__}, not exactly a Linear"
        return problem or member_problem(m.module.wi, "wi")

    def fuse(self, m: Match) -> Call:
        m.child("act", pins=settings_of(m.module.act))
        m.child("wi")
        return m.call(t5_dense, m.own(), recognise(m.module.act), *m.inputs.values())
