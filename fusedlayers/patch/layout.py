"""The memory order of a result: eager's elementwise ops give it that of their left operand, a fused op that of one
operand always. Code that draws in memory order, or views, tells the two apart."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..ops._layout import memory_order
from .rule import Call, Match


def comes_first(m: Match, element: str, value: Any) -> bool:
    """Whether `value` is the left operand of the node that the pattern calls `element`."""
    return dict(m.state.nodes)[element].args[0] is value


def in_order(m: Match, element: str, value: Any, made: Call) -> Call:
    """`made`, whose result lies in memory as `value` does if that is the left operand of `element`.

    Of several results that is the last, the sum itself.
    """
    if not comes_first(m, element, value):
        return made
    return Call(_like_first(made.op), (value, *made.args), made.kwargs)


@functools.cache
def _like_first(op: Callable[..., Any]) -> Callable[..., Any]:
    """`op` behind an argument more, in whose order the result lies: one function an op, that blocks may share it."""

    def ordered(left: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = op(*args, **kwargs)
        if isinstance(found, tuple):
            return (*found[:-1], lying_as(found[-1], left))
        return lying_as(found, left)

    return ordered


def lying_as(y: Any, left: Any) -> Any:
    """`y` in the memory order of `left`, where the two differ and `left` is as large."""
    if not isinstance(y, Tensor) or not isinstance(left, Tensor):
        return y
    if y.stride() == left.stride() or y.shape != left.shape or 0 in left.stride():  # an expanded one has no say
        return y
    order = memory_order(tuple(y.shape), left.stride())
    return y.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])
