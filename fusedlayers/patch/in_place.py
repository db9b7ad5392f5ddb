"""The dtype of a sum in place: that of its left operand, where a fused op gives the wider of the two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops._dtypes import promoted
from .layout import Tree


def writes(tree: Tree) -> bool:
    """Whether anything is added in place."""
    return isinstance(tree, tuple) and bool(tree) and (tree[0] == "into" or any(map(writes, tree[1:])))


def as_left(
    trees: Sequence[Tree], operands: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[tuple[Any, ...], list[torch.dtype | None]]:
    """`args`, with operands that are added in place in the dtype of what they are added to; and the dtypes that the
    results are to be cast to, where what is added is made by the fused op itself.

    Raises:
        RuntimeError: eager's own, where no cast to the left operand's dtype is allowed.
    """
    if len({t.dtype for t in operands if isinstance(t, Tensor)}) < 2:
        return args, [None] * len(trees)
    low: list[tuple[Tensor, torch.dtype]] = []
    late: list[torch.dtype | None] = []
    for tree in trees:
        made: list[torch.dtype] = []
        kind = _dtype(tree, operands, low, made)
        late.append(kind[0] if made and kind is not None else None)
    return tuple(next((t.to(dtype) for t, dtype in low if t is a), a) for a in args), late


def _dtype(
    tree: Tree, operands: tuple[Any, ...], low: list[tuple[Tensor, torch.dtype]], made: list[torch.dtype]
) -> tuple[torch.dtype, int] | None:
    """Of what `tree` says, with its number of dims: a tensor of none leaves the dtype of others be. `low` takes
    operands that are added in place to something of a lower dtype, and that; `made` the dtypes of what is no operand.
    """
    if isinstance(tree, int):
        return (operands[tree].dtype, operands[tree].dim()) if isinstance(operands[tree], Tensor) else None
    if not tree:
        return None
    kind, *parts = tree
    parts = parts[1:] if kind == "drop" else parts
    found = [_dtype(part, operands, low, made) for part in parts]
    if kind == "into" and found[0] is not None:
        left = found[0][0]
        for part, other in zip(parts[1:], found[1:], strict=True):
            wide = left if other is None else promoted(found[0], other)
            if not torch.can_cast(wide, left):
                torch.empty((), dtype=left).add_(torch.empty((), dtype=wide))  # raises what eager does
            elif wide is not left:
                operand = _operand(part)
                if operand is None:
                    made.append(wide)
                else:
                    low.append((operands[operand], left))
    if kind != "new":
        return found[0]
    known = [k for k in found if k is not None]
    return (promoted(*known), max(dims for _, dims in known)) if known else None


def _operand(tree: Tree) -> int | None:
    """The operand that `tree` is, dropped or not."""
    while isinstance(tree, tuple) and tree and tree[0] == "drop":
        tree = tree[2]
    return tree if isinstance(tree, int) else None
