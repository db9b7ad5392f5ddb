"""The memory order of a result: a fused op gives that of the sum or product as its rule's pattern is written, eager
that of the operands as the forward is written. Code that draws in memory order, or views, tells the two apart.

The strides that eager's elementwise ops give are worked out from an expression of the operands (`TensorIterator`'s
rule: dims by the strides of the first operand that tells them apart). Where all lie alike, one comparison of strides
is all there is to it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ..ops import _route

Tree = int | tuple[Any, ...]
"""An operand by number (of what `lying` is given), or `()` for a Python number; `("new", *trees)`, a result of its own;
`("into", left, *trees)`, written over its left operand; `("drop", module, tree)`, a result of its own while that
operand, a module, drops anything; `("norm", tree)`, which lies as the fused op chose."""
Lies = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


def lying(y: Any, tree: Tree, operands: tuple[Any, ...]) -> Any:
    """`y` with the strides that eager gives what `tree` says of `operands`.

    Raises:
        RuntimeError: eager's own, where it would write a larger result over its left operand.
    """
    first = operands[0]
    if not isinstance(y, Tensor) or not isinstance(first, Tensor):
        return y
    stride = y.stride()
    if first.stride() == stride and first.shape == y.shape:
        return y
    lies = tuple((tuple(t.shape), t.stride()) if isinstance(t, Tensor) else _drops(t) for t in operands)
    made = tuple(y.shape), stride
    if _route.is_compiling():  # sizes that change can be compared, but have no hash
        shape, wanted = _lies(tree, lies, made)
    else:
        try:
            shape, wanted = _known(tree, lies, made)
        except TypeError:
            shape, wanted = _lies(tree, lies, made)
    if wanted == stride or len(shape) != len(stride):
        return y
    order = _order(shape, wanted)
    y = y.permute(order).contiguous()
    return y.view(y.shape).permute([order.index(d) for d in range(len(order))])  # the view names dims of size 1 anew


def _drops(module: Any) -> bool:
    """Whether a dropout or drop path drops anything on this call; numbers do not."""
    if not isinstance(module, nn.Module) or not module.training:
        return False
    return getattr(module, "drop_prob", getattr(module, "p", 0)) != 0


def _lies(tree: Tree, lies: tuple[Any, ...], made: Lies) -> Lies:
    """How what `tree` says lies, given how its operands and the fused op's result do."""
    if isinstance(tree, int):
        return lies[tree] or ((), ())
    if not tree:
        return (), ()
    kind, *parts = tree
    if kind == "drop":
        active, inner = lies[parts[0]], _lies(parts[1], lies, made)
        return _elementwise([inner]) if active else inner
    found = [_lies(part, lies, made) for part in parts]
    if kind == "linear":
        shape = (*found[0][0][:-1], made[0][-1])
        return shape, _dense(shape, [max(n, 1) for n in shape], list(reversed(range(len(shape)))))
    if kind == "norm":
        return made if found[0][0] == made[0] else _elementwise(found)
    if kind == "new":
        return _elementwise(found)
    shape = _broadcast(s for s, _ in found)
    if len(shape) != len(found[0][0]) or any(n != m for n, m in zip(found[0][0], shape, strict=True)):
        left, whole = list(found[0][0]), list(shape)
        raise RuntimeError(f"output with shape {left} doesn't match the broadcast shape {whole}")
    return found[0]


_known = functools.lru_cache(maxsize=4096)(_lies)


def _broadcast(shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    shape: list[int] = []
    for other in shapes:
        shape = [1] * (len(other) - len(shape)) + shape
        for d, n in enumerate(other, len(shape) - len(other)):
            shape[d] = n if shape[d] == 1 else shape[d]
    return tuple(shape)


def _elementwise(found: list[Lies]) -> Lies:
    """Where the result of an elementwise op of operands that lie so lies itself."""
    shape = _broadcast(s for s, _ in found)
    dims = len(shape)
    if all(len(s) == dims and all(n == m for n, m in zip(s, shape, strict=True)) for s, _ in found):
        formats = [list(reversed(range(dims)))] + ([[1, 3, 2, 0]] if dims == 4 else [])
        for order in formats:
            if all(_is_dense(shape, stride, order) for _, stride in found):
                return shape, _dense(shape, [max(n, 1) for n in shape], order)
        _, stride = found[0]
        if all(other == stride for _, other in found) and _is_dense(shape, stride, _order(shape, stride)[::-1]):
            return shape, stride
    strides = []
    for s, stride in found:
        missing = dims - len(s)
        own = (0 if s[d] == 1 and shape[d + missing] != 1 else stride[d] for d in range(len(s)))
        strides.append((*(0,) * missing, *own))
    order = list(reversed(range(dims)))  # from the fastest
    for i in range(1, dims):
        at = i
        for before in range(i - 1, -1, -1):
            side = _compare(order[before], order[at], shape, strides)
            if side > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif side < 0:
                break
    return shape, _dense(shape, shape, order)


def _compare(a: int, b: int, shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> int:
    """Above 0 where dim a is slower than dim b, by the first operand that has both and tells them apart."""
    for stride in strides:
        if stride[a] == 0 or stride[b] == 0:
            continue
        if stride[a] != stride[b]:
            return 1 if stride[a] > stride[b] else -1
        if shape[a] > shape[b]:
            return 1
    return 0


def _dense(shape: tuple[int, ...], sizes: Sequence[int], order: list[int]) -> tuple[int, ...]:
    stride, step = [0] * len(shape), 1
    for d in order:
        stride[d] = step
        step *= sizes[d]
    return tuple(stride)


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...], order: list[int]) -> bool:
    """Whether elements fill one block, from the dim that varies fastest."""
    step = 1
    for d in order:
        if shape[d] != 1:
            if stride[d] != step:
                return False
            step *= shape[d]
    return True


def _order(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """Dims from the slowest to the fastest; of two that are as fast the larger first. Not `sorted`, for compilers."""
    placed: list[int] = []
    for d in range(len(shape)):
        at = len(placed)
        while at:
            before = placed[at - 1]
            if stride[before] > stride[d] or (stride[before] == stride[d] and not shape[before] < shape[d]):
                break
            at -= 1
        placed.insert(at, d)
    return placed
