"""timm's `BatchNormAct2d`, which holds its activation itself, also with the residual add after one that has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...activations import Activation, recognise
from ...nn.batch_norm import batch_norm_act
from .. import effects
from ..codegen import Child
from ..guards import member_problem
from ..pattern import add, leaf, settings_of, through, value
from ..rule import NO_MATCH, Call, Match, Rule, register_rule

TIMM = "timm.layers.norm_act.BatchNormAct2d"


def timm_norm_act(bn: Any, x: Tensor, activation: Activation | None, residual: Tensor | None = None) -> Tensor:
    if x.ndim != 4:
        torch._assert(False, f"expected 4D input (got {x.ndim}D input)")
    return batch_norm_act(bn, x, activation, residual)


def _problem(bn: nn.Module) -> str | None:
    """Why the norm and what it holds may not be computed at once."""
    drop, act = (bn._modules.get(name) for name in ("drop", "act"))
    if type(drop) is not nn.Identity or act is None:
        return "it drops between norm and activation" if drop is not None else "not the BatchNormAct2d known here"
    if recognise(act) is None:
        return f"{type(act).__name__} is not an activation known here"
    return member_problem(drop, "drop") or member_problem(act, "act")


def _hold(m: Match, *path: str) -> Activation | None:
    """Guards what the norm at `path` holds, and gives its activation."""
    act = m.child(*path, "act").module
    m.child(*path, "drop")
    m.child(*path, "act", pins=settings_of(act))
    found = recognise(act)
    return None if found is None or found.name == "identity" else found


@register_rule
class TimmNormAct(Rule):
    """timm's batch norm with its own activation."""

    target = TIMM
    priority = 10

    def check(self, m: Match) -> str | None:
        return _problem(m.module)

    def fuse(self, m: Match) -> Call:
        return m.call(timm_norm_act, m.own(), m.inputs["x"], _hold(m))


@register_rule
class TimmNormAdd(Rule):
    """`bn(x) + residual` where timm's batch norm has no activation."""

    pattern = add("sum")(through(leaf("bn", TIMM)(value("x"))), value("residual"))
    priority = 10

    def check(self, m: Match) -> str | None:
        bn: Child = m.bn
        act = recognise(bn.module.act) if isinstance(bn.module._modules.get("act"), nn.Module) else None
        if act is None or act.name != "identity":
            return NO_MATCH
        if not effects.is_data(m.residual):
            return "what is added is not a tensor computed from the input"
        return _problem(bn.module)

    def fuse(self, m: Match) -> Call:
        _hold(m, *m.bn.path)
        return m.call(timm_norm_act, m.bn, m.x, None, m.residual)
