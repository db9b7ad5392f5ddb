"""The second stage of every two-stage reduction: partial sums, one row a block, added up in a fixed order."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import cdiv, next_power_of_2
from .launch import COUNTS, Launch


@triton.jit
def mean_of(total, count):
    """`total / count`, rounded to nearest.

    Plain `/` is approximate in float32, and ends in a product that the compiler folds into a subtraction after it only
    where nothing else needs the quotient: then a kernel that also stores the mean would give other bits.
    """
    # one return: Triton 3.6 compiles what stands behind a constant branch's own
    if total.dtype == tl.float64:
        mean = total / count
    else:
        mean = tl.div_rn(total, tl.cast(count, tl.float32))
    return mean


@triton.jit
def product(a, b):
    """`a * b` that is to be summed over lanes, kept from being fused into the first of those additions.

    Fused, each of two lanes rounds the other's product but not its own: lanes that hold one sum would differ in its
    last bit, and which of them is stored is a race.
    """
    return tl.fma(a, b, tl.zeros_like(a))


@triton.jit
def _summed(base, n, K, N, BK: tl.constexpr, BN: tl.constexpr):
    """The sums over K of columns `n` of `base` (K, N)."""
    total = tl.zeros((BK, BN), dtype=base.dtype.element_ty)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        mask = (k < K)[:, None] & (n < N)[None, :]
        total += tl.load(base + k.to(tl.int64)[:, None] * N + n[None, :], mask=mask, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def sum_partials(
    partial_ptr, first_ptr, second_ptr, third_ptr, K, N, FROM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr
):
    """`partial_ptr` (2, K, N), or (3, K, N) with a third output -> `first_ptr`, `second_ptr`, `third_ptr` (N,), each in
    its own dtype, from output `FROM` on.

    Blocks (cdiv(N, BN), outputs). Reads K*N elements of the compute dtype an output, writes N.
    """
    which = tl.program_id(1) + FROM
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    if second_ptr is None and third_ptr is not None:  # between two that are there: nothing was written for it
        n = tl.where(which == 1, N, n)
    result = _summed(partial_ptr + which.to(tl.int64) * K * N, n, K, N, BK, BN)
    if first_ptr is not None and which == 0:
        tl.store(first_ptr + n, result.to(first_ptr.dtype.element_ty), mask=n < N)
    if second_ptr is not None and which == 1:
        tl.store(second_ptr + n, result.to(second_ptr.dtype.element_ty), mask=n < N)
    if third_ptr is not None and which == 2:
        tl.store(third_ptr + n, result.to(third_ptr.dtype.element_ty), mask=n < N)


def finish(partial: Tensor, first: Tensor | None, second: Tensor | None) -> None:
    """Sums `partial` (2, K, N) over K into `first` (N,) and `second` (N,), those that are not `None`."""
    _, K, N = partial.shape
    dtypes = (partial.dtype, None if first is None else first.dtype, None if second is None else second.dtype)
    finisher(K, N, *dtypes)(partial, first, second)


@functools.lru_cache(maxsize=4096)
def finisher(
    K: int, N: int, partial: torch.dtype, first: torch.dtype | None, second: torch.dtype | None,
    third: torch.dtype | None = None,
) -> Launch:  # fmt: skip
    """The launch of `finish`, its pointers the same, for ops that keep it; a third output is one pointer more."""
    bn = min(next_power_of_2(N), 32)  # 128 bytes; few columns a block, or too few blocks share the work
    bk = 4096 // bn  # whatever K is, which goes with the batch: another length of a sequence is no other kernel
    begin = next(i for i, output in enumerate((first, second, third)) if output is not None)
    end = 3 if third is not None else 2 if second is not None else 1
    absent = (None,) if third is None else ()  # the pointer that is not given
    return Launch(sum_partials, (cdiv(N, bn), end - begin), (*absent, K, N, begin, bk, bn))
