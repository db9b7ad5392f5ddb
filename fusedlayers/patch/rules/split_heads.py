"""Attention's `q, k, v` of one projection, whose backward in eager stacks three gradients and then copies the stack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from ...nn._children import stored
from ...ops.split_heads import ORDER, PARTS, split_heads
from ...ops.split_linear import split_linear
from ..pattern import Pattern, State, leaf, value
from ..rule import Call, Match, Rule, register_rule


class _Parts(Pattern):
    """`input.reshape(B, N, parts, H, D).permute(2, 0, 3, 1, 4).unbind(0)`; binds `sizes`."""

    def match(self, node: Any, state: State) -> Iterator[State]:
        if _arguments(node, "unbind", "dim") not in ((), (0,)):
            return
        permuted = node.args[0]
        if _arguments(permuted, "permute", "dims") != ORDER:
            return
        reshaped = permuted.args[0]
        sizes = _arguments(reshaped, "reshape", "shape")
        if sizes is None or len(sizes) != 5 or sizes[2] not in PARTS:
            return
        found = state.take(None, node).take(None, permuted).take(None, reshaped).bind("sizes", sizes)
        if found is not None:
            yield from self._follow(reshaped.args[:1], found)


def _arguments(node: Any, name: str, keyword: str) -> tuple[Any, ...] | None:
    """What `x.name(...)` or `torch.name(x, ...)` gives beside x, numbers one by one; None for any other node."""
    if not isinstance(node, Node) or not node.args or not isinstance(node.args[0], Node):
        return None
    if node.target is not getattr(torch, name) and (node.op, node.target) != ("call_method", name):
        return None
    rest = node.args[1:]
    if node.kwargs:
        if rest or set(node.kwargs) != {keyword}:
            return None
        rest = (node.kwargs[keyword],)
    return tuple(rest[0]) if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest


def split_projection(layer: nn.Linear, x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    return split_linear(x, *stored(layer, "weight", "bias"), *sizes)


@register_rule
class SplitProjection(Rule):
    """`q, k, v = qkv(x).reshape(B, N, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)`, the projection included."""

    pattern = _Parts()(leaf("qkv", nn.Linear, stand_in=True)(value("x")))
    views = True
    priority = 1

    def fuse(self, m: Match) -> Call:
        return m.call(split_projection, m.qkv, m.x, *m.sizes)


@register_rule
class SplitHeads(Rule):
    """`q, k, v = qkv.reshape(B, N, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)`, or `k, v` of two."""

    pattern = _Parts()(value("x"))
    views = True

    def fuse(self, m: Match) -> Call:
        return m.call(split_heads, m.x, *m.sizes)
