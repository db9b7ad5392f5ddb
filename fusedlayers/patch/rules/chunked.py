"""Gated MLPs whose gate and up come from one projection: Phi-3, GLM, timm's GluMlp."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from ... import functional as fused
from ...activations import Activation
from ..pattern import Pattern, State, act, leaf, mul, through, value
from ..rule import Call, Match, Rule, register_rule


class _Half(Pattern):
    """One half of its input along the last dim."""

    def __init__(self, index: int):
        super().__init__()
        self.index = index

    def match(self, node: Any, state: State) -> Iterator[State]:
        if not isinstance(node, Node) or node.target is not operator.getitem or node.args[1] != self.index:
            return
        halves = node.args[0]
        if not _is_chunk(halves):
            return
        found = state.take(None, node)
        if halves not in {n for _, n in found.nodes}:
            found = found.take(None, halves)
        yield from self._follow(halves.args[:1], found)


def _is_chunk(node: Any) -> bool:
    """`x.chunk(2, dim=-1)` in any spelling."""
    chunks = isinstance(node, Node) and (
        node.target is torch.chunk or (node.op, node.target) == ("call_method", "chunk")
    )
    if not chunks:
        return False
    given = dict(zip(("input", "chunks", "dim"), node.args, strict=False)) | dict(node.kwargs)
    return given.get("chunks") == 2 and given.get("dim", 0) == -1


def _product(gate: int) -> Pattern:
    both = lambda: leaf("both", nn.Linear, stand_in=True)(value("x"))  # noqa: E731
    return mul("product")(act("act")(_Half(gate)(both())), _Half(1 - gate)(both()))


def chunked_mlp(both: nn.Linear, down: nn.Linear, activation: Activation, gate_first: bool, x: Tensor) -> Tensor:
    biases = both.bias, None, down.bias
    return fused.gated_mlp(x, both.weight, None, down.weight, *biases, activation, gate_first=gate_first)


class _ChunkedMlp(Rule):
    gate_first = True
    priority = 30

    def fuse(self, m: Match) -> Call:
        return m.call(chunked_mlp, m.both, m.down, m.act, self.gate_first, m.x)


@register_rule
class ChunkedMlp(_ChunkedMlp):
    """`down(act(gate) * up)` with `gate, up = both(x).chunk(2, -1)`."""

    pattern = leaf("down", nn.Linear, stand_in=True)(through(_product(0)))


@register_rule
class ChunkedMlpGateLast(_ChunkedMlp):
    """`down(up * act(gate))` with `up, gate = both(x).chunk(2, -1)`."""

    gate_first = False
    pattern = leaf("down", nn.Linear, stand_in=True)(through(_product(1)))
