"""The heads of the parts of one projection, as attention reads them: `q, k, v` of `qkv`.

Forward makes the views that eager makes, and costs what they cost. Eager's backward stacks the parts' gradients and
then copies the stack into the projection's order; here one kernel writes it in that order from where they lie.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels import KernelError, cdiv, load, next_power_of_2
from . import _route
from ._autograd import direct, needs_grad
from ._dtypes import compute_dtype, triton_dtype
from ._layout import Shape

OP = "split_heads"
PARTS = (2, 3)
ORDER = (2, 0, 3, 1, 4)
"""From (B, N, parts, H, D) to (parts, B, H, N, D)."""
SUM_ROWS = 64
"""Tokens of a block that sums them."""


def reference(x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """The torch expression this op stands for."""
    return x.reshape(*sizes).permute(*ORDER).unbind(0)


def split_heads(x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """`x.reshape(B, N, parts, H, D)` as one (B, H, N, D) view a part.

    Args:
        x: of any shape with as many elements.
        sizes: B, N, parts, H, D, one of which may be -1.

    Raises:
        RuntimeError: `sizes` do not fit x, as `reshape` does.
    """
    if not _route.is_compiling() and needs_grad(x):
        route, plan = _route.pick(OP, (x,), plan=lambda: _plan(x.shape, x.stride(), x.dtype, sizes))
        if route == "triton":
            return _apply(x, plan)
    return reference(x, *sizes)


class _SplitHeads(torch.autograd.Function):
    """Kept: nothing. Like eager's, the views may not be edited in place: a Function of several outputs forbids it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Plan) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        return x.view(plan.sizes).permute(ORDER).unbind(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(g is None for g in grads):
            return None, None
        # a gradient may be a subclass, or lie in no dense layout
        if not torch.is_grad_enabled() and _route.obstacle(grads) is None:
            try:
                return ctx.plan.backward(grads), None
            except KernelError as error:
                _route.failed(OP, error)
        return ctx.plan.composite(grads), None


_apply = direct(_SplitHeads)


@dataclass(frozen=True)
class _Plan:
    shape: Shape
    dtype: torch.dtype
    sizes: tuple[int, int, int, int, int]

    @property
    def blocks(self) -> int:
        """How many partial sums a column has, at most."""
        return self.sizes[0] * cdiv(self.sizes[1], SUM_ROWS)

    def backward(self, grads: Sequence[Tensor | None]) -> Tensor:
        return self.packed(grads)[0]

    def packed(
        self, grads: Sequence[Tensor | None], sum_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient of x, and the sums of its columns in `sum_dtype`, in one pass."""
        given = next(g for g in grads if g is not None)
        dx = torch.empty(self.shape, dtype=self.dtype, device=given.device)
        strides = tuple(None if g is None else g.stride() for g in grads)
        dtypes = tuple(None if g is None else g.dtype for g in grads)
        run, blocks = _launch(self.sizes, strides, (*dtypes, self.dtype), sum_dtype)
        partial = sums = None
        if sum_dtype is not None:
            columns = self.shape[-1]
            partial = dx.new_empty(1, blocks, columns, dtype=compute_dtype(self.dtype))
            sums = dx.new_empty(columns, dtype=sum_dtype)
        run(dx, *grads, *(None,) * (3 - len(grads)), partial, sums, None)
        return dx, sums

    def composite(self, grads: Sequence[Tensor | None]) -> Tensor:
        """The same in torch ops, for higher derivatives."""
        given = next(g for g in grads if g is not None)
        parts = torch.stack([torch.zeros_like(given) if g is None else g for g in grads])
        return parts.permute(1, 3, 0, 2, 4).reshape(self.shape)


@functools.lru_cache(maxsize=4096)
def _plan(shape: Shape, stride: Shape, dtype: torch.dtype, sizes: tuple[Any, ...]) -> _Plan | str:
    if len(sizes) != 5 or not all(type(n) is int for n in sizes):
        return "sizes are not five integers"
    if 0 in shape:
        return "a size is 0"
    try:
        seen = torch.empty_strided(shape, stride, device="meta").view(sizes)
    except RuntimeError as error:
        return str(error)  # torch raises it again, or makes a copy
    if seen.shape[2] not in PARTS:
        return f"{seen.shape[2]} parts"
    return _Plan(tuple(shape), dtype, tuple(seen.shape))


@functools.lru_cache(maxsize=4096)
def _launch(
    sizes: tuple[int, int, int, int, int], strides: tuple[Shape | None, ...], dtypes: tuple[torch.dtype | None, ...],
    sum_dtype: torch.dtype | None,
) -> tuple[Any, int]:  # fmt: skip
    """The launches of `pack` and `reduce.sum_partials`, and the number of partial sums a column.

    Their pointers are what `pack` gives, three gradients of these strides and `dtypes`, and the sums.
    """
    B, N, parts, H, D = sizes
    C = H * D
    # a gradient whose tokens are neighbours in memory, as a transposed product's, is read along them
    tokens_first = any(s is not None and s[2] == 1 != s[3] for s in strides)
    # with sums fewer and taller blocks, so that fewer of them are left to add up
    BC = min(4096 // SUM_ROWS if tokens_first or sum_dtype is not None else 256, next_power_of_2(C))
    BN = min(4096 // BC, next_power_of_2(N))
    blocks, ct = B * cdiv(N, BN), compute_dtype(dtypes[-1])
    numbers = [n for s in (*strides, None)[:3] for n in (s or (0, 0, 0, 0))]
    rest, launch = (N, C, *numbers, triton_dtype(ct), parts, D, BN, BC), load("launch")
    # packed, q, k, v, partial, sums, None
    pack = launch.Launch(load("split_heads").pack, (blocks * cdiv(C, BC),), rest)
    steps = [(pack, (1, 2, 3, 0, 4), False)]
    if sum_dtype is not None:
        steps.append((load("reduce").finisher(blocks, parts * C, ct, sum_dtype, None), (4, 5, 6), False))
    return launch.Chain(*steps), blocks
