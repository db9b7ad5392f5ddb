"""The memory order of a result: a fused op gives that of the sum or product as its rule's pattern is written, eager
that of the operands as the forward is written. Code that draws in memory order, or views, tells the two apart.

Where a match has operands swapped, or adds in place, what it replaces is kept as an expression of its operands, from
which the strides that eager's elementwise ops give are worked out (`TensorIterator`'s rule: dims by the strides of the
first operand that tells them apart). Where all lie alike, one comparison of strides is all there is to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from ..ops import _route
from . import effects
from .codegen import Child
from .pattern import SUMS, State, activation_of, dropout_call, may_pass_through, passes_through
from .records import kind_of_module
from .rule import Call

Tree = int | tuple[Any, ...]
"""An operand by number (of what `lying` is given), or `()` for a Python number; `("new", *trees)`, a result of its own;
`("into", left, *trees)`, written over its left operand; `("drop", module, tree)`, a result of its own while that
operand, a module, drops anything; `("norm", tree)`, which lies as the fused op chose."""
Lies = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


def as_written(made: Call, state: State, outputs: Sequence[Node], several: bool) -> Call:
    """`made`, whose results lie in memory as those of the nodes they replace, and are refused where eager refuses.

    `several`: it returns a tuple, of `outputs` and maybe more.
    """
    read = _Reading(state)
    trees = {at: tree for at, node in enumerate(outputs) if (tree := read.result(node)) is not None}
    if not trees:
        return made
    op = _ordered_all(made.op, tuple(trees.items())) if several else _ordered(made.op, trees[0])
    return Call(op, (read.operands, *made.args), made.kwargs)


class _Reading:
    """The expressions of a match's results, and the operands that they share."""

    def __init__(self, state: State):
        self.state, self.inside = state, {n for _, n in state.nodes}
        self.data: list[Node | Child] = []
        self.parameters: list[Node] = []
        self.differs = False

    @property
    def operands(self) -> tuple[Node | Child, ...]:
        """Parameters at the end, numbered from there: what stands first is to be most like the result."""
        return (*self.data, *reversed(self.parameters))

    def result(self, node: Node) -> Tree | None:
        """None where a fused op lies as eager's result does by itself, or nobody knows how that lies."""
        if activation_of(node, self.state.module) is None and not _is_sum(node):
            return None
        self.differs = False
        try:
            tree = self._of(node)
        except _Unknown:
            return None
        return tree if self.differs and self.data and isinstance(self.data[0], Node) else None

    def _of(self, node: Node) -> Tree:
        root = self.state.module
        if node not in self.inside:
            if node.op != "get_attr":
                return _number(self.data, node)
            return -1 - _number(self.parameters, node)
        call = dropout_call(node)
        if passes_through(node, root) is not None or (call is not None and not call[1]):
            return self._of(node.all_input_nodes[0])
        if may_pass_through(node, root):
            path = tuple(node.target.split("."))
            inner = self._of(node.args[0])
            return ("drop", _number(self.data, Child(path, effects.child(root, node.target))), inner)
        if activation_of(node, root) is not None or call is not None:
            return ("into" if effects.overwrites(node, root) else "new", self._of(node.all_input_nodes[0]))
        if node.op == "call_module":
            module = effects.child(root, node.target)
            if kind_of_module(module) == "norm" and len(node.args) == 1:
                return ("norm", self._of(node.args[0]))
            if isinstance(module, nn.Linear) and len(node.args) == 1:
                return ("linear", self._of(node.args[0]))
            if not isinstance(getattr(module, "gamma", None), Tensor):  # LayerScale
                raise _Unknown
            return ("new", self._of(node.args[0]), ())
        if not _is_sum(node):
            raise _Unknown
        left, right = (self._of(a) if isinstance(a, Node) else () for a in node.args)
        overwrites = bool(effects.overwrites(node, root))
        self.differs |= overwrites or node in self.state.swapped
        return ("into" if overwrites else "new", left, right)


class _Unknown(Exception):
    """A node that may give a result of any shape."""


def _number(held: list[Any], operand: Node | Child) -> int:
    if operand not in held:
        held.append(operand)
    return held.index(operand)


def _is_sum(node: Node) -> bool:
    return node.op != "call_module" and node.target in SUMS and len(node.args) == 2


@functools.cache
def _ordered(op: Callable[..., Any], tree: Tree) -> Callable[..., Any]:
    """`op` behind its operands as written: one function an op and expression, that blocks may share it."""

    written = _writes(tree)

    def ordered(operands: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        late = None
        if written:
            args, (late,) = _as_left((tree,), operands, args)
        found = op(*args, **kwargs)
        return lying(found if late is None else found.to(late), tree, operands)

    return ordered


@functools.cache
def _ordered_all(op: Callable[..., Any], trees: tuple[tuple[int, Tree], ...]) -> Callable[..., Any]:
    written = any(_writes(tree) for _, tree in trees)

    def ordered(operands: tuple[Any, ...], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        late: list[torch.dtype | None] = [None] * len(trees)
        if written:
            args, late = _as_left([tree for _, tree in trees], operands, args)
        found = list(op(*args, **kwargs))
        for (at, tree), dtype in zip(trees, late, strict=True):
            found[at] = lying(found[at] if dtype is None else found[at].to(dtype), tree, operands)
        return tuple(found)

    return ordered


def _writes(tree: Tree) -> bool:
    return isinstance(tree, tuple) and bool(tree) and (tree[0] == "into" or any(map(_writes, tree[1:])))


def _as_left(
    trees: Sequence[Tree], operands: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[tuple[Any, ...], list[torch.dtype | None]]:
    """A sum in place has its left operand's dtype: `args`, with what is added in that dtype, and the dtypes that the
    results are to be cast to, where what is added is made by the fused op itself."""
    if len({t.dtype for t in operands if isinstance(t, Tensor)}) < 2:
        return args, [None] * len(trees)
    low: list[tuple[Tensor, torch.dtype]] = []
    late: list[torch.dtype | None] = []
    for tree in trees:
        made: list[torch.dtype] = []
        dtype = _dtype(tree, operands, low, made)
        late.append(dtype if made else None)
    return tuple(next((t.to(dtype) for t, dtype in low if t is a), a) for a in args), late


def _dtype(
    tree: Tree, operands: tuple[Any, ...], low: list[tuple[Tensor, torch.dtype]], made: list[torch.dtype]
) -> torch.dtype | None:
    """Of what `tree` says. `low` takes operands that are added in place to something of a lower dtype, and that; `made`
    the dtypes of what is no operand."""
    if isinstance(tree, int):
        return operands[tree].dtype if isinstance(operands[tree], Tensor) else None
    if not tree:
        return None
    kind, *parts = tree
    parts = parts[1:] if kind == "drop" else parts
    found = [_dtype(part, operands, low, made) for part in parts]
    if kind == "into" and found[0] is not None:
        for part, dtype in zip(parts[1:], found[1:], strict=True):
            wide = found[0] if dtype is None else torch.promote_types(found[0], dtype)
            if not torch.can_cast(wide, found[0]):
                torch.empty((), dtype=found[0]).add_(torch.empty((), dtype=dtype))  # raises what eager does
            elif wide is not found[0]:
                operand = _operand(part)
                if operand is None:
                    made.append(dtype)
                else:
                    low.append((operands[operand], found[0]))
    if kind != "new":
        return found[0]
    known = [d for d in found if d is not None]
    return functools.reduce(torch.promote_types, known) if known else None


def _operand(tree: Tree) -> int | None:
    """The operand that `tree` is, dropped or not."""
    while isinstance(tree, tuple) and tree and tree[0] == "drop":
        tree = tree[2]
    return tree if isinstance(tree, int) else None


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
