"""What is left of a layer once the library has multiplied: the activation, and one backward pass for it and the bias.

`act_bias_backward` reads the gradient and what was kept, and writes the pre-activation's gradient, the activation
itself where a later product needs it again, and partial sums of the bias's gradient, one row a block, which
`reduce.sum_partials` adds up: two stages, no atomics, so every run gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import COUNTS


@triton.jit
def activate(z_ptr, y_ptr, numel, CT: tl.constexpr, ACT: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """`z_ptr`, `y_ptr` (numel,). Blocks (cdiv(numel, BLOCK)). One read, one write."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    z = tl.load(z_ptr + at, mask=inside, other=0.0).to(CT)
    tl.store(y_ptr + at, ACT(z, P0, P1).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def act_bias_backward(
    g_ptr, kept_ptr, dz_ptr, h_ptr, partial_ptr, M, N, g_m, g_n, rows_per_block,
    CT: tl.constexpr, ACT: tl.constexpr, GRAD: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    HAS_ACT: tl.constexpr, NEED_DZ: tl.constexpr, NEED_H: tl.constexpr, NEED_DB: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Blocks (cdiv(M, rows_per_block) * cdiv(N, BN)): each walks `rows_per_block` rows of its BN columns.

    `g_ptr` (M, N) with any strides, 0 included; `kept_ptr`, `dz_ptr`, `h_ptr` (M, N), contiguous; `dz_ptr` may be
    `g_ptr`. `partial_ptr` (cdiv(M, rows_per_block), N): sums of dz. `NEED_H`: the kept input's activation.
    """
    pid = tl.program_id(0)
    blocks_n = tl.cdiv(N, BN)
    pid_m = (pid // blocks_n).to(tl.int64)
    n = (pid % blocks_n) * BN + tl.arange(0, BN)
    in_n = n < N
    total = tl.zeros((BM, BN), dtype=CT)
    begin = pid_m * rows_per_block
    end = tl.minimum(begin + rows_per_block, M)
    for start in tl.range(begin, end, BM, num_stages=STAGES):
        m = start + tl.arange(0, BM)
        inside = (m < end)[:, None] & in_n[None, :]
        at = m[:, None] * N + n[None, :]
        g_at = m[:, None] * g_m + n.to(tl.int64)[None, :] * g_n
        dz = tl.load(g_ptr + g_at, mask=inside, other=0.0).to(CT)
        if HAS_ACT:
            kept = tl.load(kept_ptr + at, mask=inside, other=0.0).to(CT)
            dz = GRAD(dz, kept, P0, P1)
            if NEED_H:
                tl.store(h_ptr + at, ACT(kept, P0, P1).to(h_ptr.dtype.element_ty), mask=inside)
        if NEED_DZ:
            tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=inside)
        if NEED_DB:
            # a derivative that is not finite at 0 must not reach the sums from past the edge
            total += tl.where(inside, dz, 0.0)
    if NEED_DB:
        tl.store(partial_ptr + pid_m * N + n, tl.sum(total, axis=0), mask=in_n)
