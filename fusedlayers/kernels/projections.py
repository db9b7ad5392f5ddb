"""The gradients of two or three products of one matrix, side by side, and the sums of their columns.

In: a gradient a product, (M, its width), read once where it lies. Out: (M, all widths), dense, written once, so that
one product gives the gradient of what they share and one those of all weights; and partial sums of every column, one
row a block, which `reduce.sum_partials` adds up to the gradients of the biases: two stages, no atomics, so every run
gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pack_sum(
    a_ptr, b_ptr, c_ptr, out_ptr, partial_ptr, M, A, B, C, a_m, a_n, b_m, b_n, c_m, c_n, rows_per_block,
    CT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`a_ptr` (M, A), `b_ptr` (M, B), `c_ptr` (M, C): gradients with any strides, 0 included; `None` and 0 wide where
    there are fewer.

    `out_ptr` (M, A + B + C), `partial_ptr` (cdiv(M, rows_per_block), A + B + C) of dtype CT: `None` for what is not
    wanted. Blocks (cdiv(M, rows_per_block) * (cdiv(A, BN) + cdiv(B, BN) + cdiv(C, BN))): each walks `rows_per_block`
    rows of BN columns of one gradient.
    """
    pid = tl.program_id(0)
    blocks_a, blocks_b = tl.cdiv(A, BN), tl.cdiv(B, BN)
    blocks_n = blocks_a + blocks_b + tl.cdiv(C, BN)
    pid_m = (pid // blocks_n).to(tl.int64)
    pid_n = pid % blocks_n
    N = A + B + C
    if pid_n < blocks_a:
        _part(a_ptr, out_ptr, partial_ptr, pid_m, pid_n, M, N, 0, A, a_m, a_n, rows_per_block, CT, BM, BN, STAGES)
    elif pid_n < blocks_a + blocks_b:
        if b_ptr is not None:
            pid_n -= blocks_a
            _part(b_ptr, out_ptr, partial_ptr, pid_m, pid_n, M, N, A, B, b_m, b_n, rows_per_block, CT, BM, BN, STAGES)
    else:
        if c_ptr is not None:
            pid_n -= blocks_a + blocks_b
            first = A + B
            _part(c_ptr, out_ptr, partial_ptr, pid_m, pid_n, M, N, first, C, c_m, c_n, rows_per_block, CT, BM, BN,
                  STAGES)  # fmt: skip


@triton.jit
def _part(
    g_ptr, out_ptr, partial_ptr, pid_m, pid_n, M, N, first, width, g_m, g_n, rows_per_block,
    CT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One gradient's block, its columns written from `first` on."""
    n = pid_n * BN + tl.arange(0, BN)
    in_n = n < width
    total = tl.zeros((BM, BN), dtype=CT)
    begin = pid_m * rows_per_block
    end = tl.minimum(begin + rows_per_block, M)
    for start in tl.range(begin, end, BM, num_stages=STAGES):
        m = start + tl.arange(0, BM)
        inside = (m < end)[:, None] & in_n[None, :]
        g = tl.load(g_ptr + m[:, None] * g_m + n.to(tl.int64)[None, :] * g_n, mask=inside, other=0.0)
        if out_ptr is not None:
            tl.store(out_ptr + m[:, None] * N + (first + n)[None, :], g.to(out_ptr.dtype.element_ty), mask=inside)
        if partial_ptr is not None:
            total += g.to(CT)
    if partial_ptr is not None:
        tl.store(partial_ptr + pid_m * N + first + n, tl.sum(total, axis=0), mask=in_n)
