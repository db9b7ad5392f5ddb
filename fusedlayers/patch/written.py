"""A result as the forward writes it: a rule's pattern has one order of operands, and adds nothing in place.

Where a match has operands swapped, or adds in place, or its sum goes to a view or a dropout, what it replaces is kept
as an expression of its operands: from that come the memory order (`layout`) and the dtype (`in_place`) that eager's
result has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from . import effects
from .codegen import Child
from .in_place import as_left, writes
from .layout import Tree, lying
from .pattern import SUMS, State, activation_of, dropout_call, may_pass_through, passes_through
from .records import kind_of_module
from .rule import Call


def as_written(made: Call, state: State, outputs: Sequence[Node], several: bool) -> Call:
    """`made`, whose results have the memory order and the dtype of the nodes they replace, and are refused where eager
    refuses.

    `several`: it returns a tuple, of `outputs` and maybe more.
    """
    read = _Reading(state)
    trees = {at: tree for at, node in enumerate(outputs) if (tree := read.result(node)) is not None}
    if not trees:
        return made
    op = _ordered_all(made.op, tuple(trees.items())) if several else _ordered(made.op, trees[0])
    return Call(op, (read.operands, *made.args), made.kwargs)


_VIEWS = frozenset({"view", "view_as", "as_strided", "stride", "is_contiguous"})
_TURNS = frozenset(
    {"transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "unsqueeze", "squeeze", "getitem"}
)


def _tells_order(node: Node, root: nn.Module, inside: set[Node]) -> bool:
    """Whether a reader outside the match would notice in which order this result lies."""
    for reader in node.users:
        if reader in inside or reader.op == "output":
            continue
        if dropout_call(reader) is not None or may_pass_through(reader, root):
            return True
        target = getattr(reader.target, "__name__", reader.target)
        if reader.op in ("call_method", "call_function") and reader.args[:1] == (node,):
            if target in _VIEWS or (target in _TURNS and _tells_order(reader, root, inside)):
                return True
    return False


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
        self.differs = _is_sum(node) and _tells_order(node, self.state.module, self.inside)
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

    written = writes(tree)

    def ordered(operands: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        late = None
        if written:
            args, (late,) = as_left((tree,), operands, args)
        found = op(*args, **kwargs)
        return lying(found if late is None else found.to(late), tree, operands)

    return ordered


@functools.cache
def _ordered_all(op: Callable[..., Any], trees: tuple[tuple[int, Tree], ...]) -> Callable[..., Any]:
    written = any(writes(tree) for _, tree in trees)

    def ordered(operands: tuple[Any, ...], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        late: list[torch.dtype | None] = [None] * len(trees)
        if written:
            args, late = as_left([tree for _, tree in trees], operands, args)
        found = list(op(*args, **kwargs))
        for (at, tree), dtype in zip(trees, late, strict=True):
            found[at] = lying(found[at] if dtype is None else found[at].to(dtype), tree, operands)
        return tuple(found)

    return ordered
