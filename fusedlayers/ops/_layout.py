"""How a tensor with broadcasting coefficients lies in memory, as the one or two loops a kernel needs."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import NoStorageError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Coefficients:
    """`x` in memory order as `(A, T, C)` with coefficients `(A, C)` ("col"), or `(R, S)` with period `P` ("row").

    Attributes:
        sizes: `(A, T, C)` or `(R, S, P)`.
        count: number of coefficients.
        strides: of each operand over its coefficient dims: `(a, c)` or `(p, 0)`, 0 where it broadcasts.
        shape: the broadcast shape of the coefficients against `x`.
        order: the dims of `x` in memory order.
        x_stride: the strides of `x` once it is dense.
        dim: the channel dim the caller named, if any.
    """

    family: str
    sizes: tuple[int, int, int]
    count: int
    strides: tuple[tuple[int, int], ...]
    shape: Shape
    order: Shape
    x_stride: Shape
    dim: int | None

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether the coefficients lie in memory as their shape says."""
        varying = [d for d in self.order if self.shape[d] != 1]
        return varying == sorted(varying)

    def view(self, flat: Tensor) -> Tensor:
        """`(count,)` coefficients as a tensor that broadcasts against `x`."""
        if self.in_order:
            return flat.view(self.shape)
        inverse = [self.order.index(d) for d in range(len(self.order))]
        return flat.view([self.shape[d] for d in self.order]).permute(inverse)


def with_strides(t: Tensor, shape: Shape, stride: Shape) -> Tensor:
    """`t` itself where its elements lie as `stride` says, else a copy that does.

    Raises:
        NoStorageError: `t` is a whole batch of tensors to vmap, which no kernel could read either.
    """
    if t.stride() == stride:
        return t
    copy = torch.empty_strided(shape, stride, dtype=t.dtype, device=t.device)
    try:
        return copy.copy_(t)
    except RuntimeError as error:
        raise NoStorageError(str(error)) from error


def dense_stride(shape: Shape, stride: Shape) -> Shape:
    """Strides of a tensor of this shape whose elements fill one block, in the memory order of `stride`."""
    dense, step = [0] * len(shape), 1
    for d in reversed(memory_order(shape, stride)):
        dense[d] = step
        step *= shape[d]
    if all(n == 1 or s == d for n, s, d in zip(shape, stride, dense, strict=True)):
        return stride
    return tuple(dense)


def has_format(shape: Shape, stride: Shape) -> bool:
    """Whether a dense tensor is contiguous or channels last, which torch knows of images and volumes."""
    n = len(shape)
    orders = [range(n, 0, -1)] + [(n + 1, 1, *range(n, 2, -1))] * (n in (4, 5))
    dense = (dense_stride(shape, tuple(order)) for order in orders)
    return any(all(n == 1 or s == d for n, s, d in zip(shape, stride, found, strict=True)) for found in dense)


def memory_order(shape: Shape, stride: Shape) -> Shape:
    """Dims from the slowest to the fastest in memory; dims of size 1 keep their place before the next one."""
    real = [d for d in range(len(shape)) if shape[d] != 1]
    if any(stride[d] == 0 for d in real):  # repeats itself: no order of its own
        return tuple(range(len(shape)))
    placed: list[int] = []
    for d in real:  # not `sorted`, whose keys a compiler wants constant
        at = len(placed)
        while at and stride[placed[at - 1]] < stride[d]:
            at -= 1
        placed.insert(at, d)
    by_stride = iter(placed)
    return tuple(next(by_stride) if shape[d] != 1 else d for d in range(len(shape)))


@functools.lru_cache(maxsize=4096)
def coefficients(
    shape: Shape, stride: Shape, *operands: tuple[Shape, Shape], dim: int | None = None
) -> Coefficients | None:
    """The loops for a tensor of this shape and stride and coefficients `(shape, stride)` that broadcast to it.

    Returns `None` where the pattern needs more than two loops, or `x` itself would broadcast.
    """
    ndim = len(shape)
    aligned = []
    for op_shape, op_stride in operands:
        missing = ndim - len(op_shape)
        if missing < 0:
            return None
        full_shape = (1,) * missing + op_shape
        if any(n not in (1, m) for n, m in zip(full_shape, shape, strict=True)):
            return None
        full_stride = (0,) * missing + op_stride
        aligned.append((full_shape, tuple(0 if n == 1 else s for n, s in zip(full_shape, full_stride, strict=True))))
    order = memory_order(shape, stride)
    groups: list[tuple[bool, list[int]]] = []
    for d in order:
        if shape[d] == 1:
            continue
        varies = any(op_shape[d] != 1 for op_shape, _ in aligned)
        if groups and groups[-1][0] == varies:
            groups[-1][1].append(d)
        else:
            groups.append((varies, [d]))
    pattern = "".join("c" if varies else "." for varies, _ in groups)
    size = [_product(shape[d] for d in dims) for _, dims in groups]
    held = [dims for varies, dims in groups if varies]
    strides = []
    for _, op_stride in aligned:
        one = [_collapsed(shape, op_stride, dims) for dims in held]
        if None in one:
            return None
        strides.append((*one, 0, 0)[:2])
    coef_shape = tuple(max([op_shape[d] for op_shape, _ in aligned], default=1) for d in range(ndim))
    total = _product(shape)
    if pattern in ("", "."):
        family, sizes, count = "row", (1, total, 1), 1
    elif pattern == "c":
        family, sizes, count = "col", (1, 1, total), total
        strides = [(0, s) for s, _ in strides]
    elif pattern == ".c":
        family, sizes, count = "col", (1, size[0], size[1]), size[1]
        strides = [(0, s) for s, _ in strides]
    elif pattern == "c.c":
        family, sizes, count = "col", (size[0], size[1], size[2]), size[0] * size[2]
    elif pattern == "c.":
        family, sizes, count = "row", (size[0], size[1], size[0]), size[0]
    elif pattern == ".c.":
        family, sizes, count = "row", (size[0] * size[1], size[2], size[1]), size[1]
    else:
        return None
    return Coefficients(family, sizes, count, tuple(strides), coef_shape, order, dense_stride(shape, stride), dim)


def _collapsed(shape: Shape, stride: Shape, dims: list[int]) -> int | None:
    """The one stride over several dims taken as one; `None` where there is none."""
    step, expected = stride[dims[-1]], None
    for d in reversed(dims):
        if expected is not None and stride[d] != expected:
            return None
        expected = stride[d] * shape[d]
    return step


def _product(sizes: Iterable[int]) -> int:
    total = 1
    for n in sizes:
        total *= n
    return total
