"""`y = act(gate) * up`, forward and backward: each operand read once, each result written once.

gate and up are matrices whose rows lie apart by any stride, so that the two halves of one projection need no copy.
Backward recomputes the activation; beside the gradients it writes the product itself where a later matrix product
needs it again, and partial sums for the gradients of biases, one row a block, as `reduce.sum_partials` takes them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import COUNTS


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def gated_forward(
    gate_ptr, up_ptr, y_ptr, M, N, gate_m, up_m,
    CT: tl.constexpr, ACT: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`gate_ptr`, `up_ptr` (M, N) with row strides; `y_ptr` (M, N). Blocks (cdiv(M, BM) * cdiv(N, BN))."""
    pid = tl.program_id(0)
    blocks_n = tl.cdiv(N, BN)
    m = (pid // blocks_n).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    n = (pid % blocks_n).to(tl.int64) * BN + tl.arange(0, BN)[None, :]
    inside = (m < M) & (n < N)
    gate = tl.load(gate_ptr + m * gate_m + n, mask=inside, other=0.0).to(CT)
    up = tl.load(up_ptr + m * up_m + n, mask=inside, other=0.0).to(CT)
    tl.store(y_ptr + m * N + n, (ACT(gate, P0, P1) * up).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def gated_backward(
    g_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, h_ptr, partial_ptr,
    M, N, gate_m, up_m, dgate_m, dup_m, rows_per_block, blocks_m,
    CT: tl.constexpr, ACT: tl.constexpr, GRAD: tl.constexpr, KEEPS_OUTPUT: tl.constexpr, P0: tl.constexpr,
    P1: tl.constexpr, NEED_DGATE: tl.constexpr, NEED_DUP: tl.constexpr, NEED_H: tl.constexpr,
    NEED_SUMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Blocks (blocks_m * cdiv(N, BN)): each walks `rows_per_block` rows of its BN columns.

    `g_ptr`, `h_ptr` (M, N); `dgate_ptr`, `dup_ptr` (M, N) with row strides, either of which may be `g_ptr`;
    `up_ptr` is read only for dgate and h. `partial_ptr` (2, blocks_m, N): sums of dgate, then of dup.
    """
    pid = tl.program_id(0)
    blocks_n = tl.cdiv(N, BN)
    pid_m = (pid // blocks_n).to(tl.int64)
    n = (pid % blocks_n).to(tl.int64) * BN + tl.arange(0, BN)[None, :]
    sum_gate = tl.zeros((BM, BN), dtype=CT)
    sum_up = tl.zeros((BM, BN), dtype=CT)
    begin = pid_m * rows_per_block
    end = tl.minimum(begin + rows_per_block, M)
    for start in range(begin, end, BM):
        m = start + tl.arange(0, BM)[:, None]
        inside = (m < end) & (n < N)
        g = tl.load(g_ptr + m * N + n, mask=inside, other=0.0).to(CT)
        gate = tl.load(gate_ptr + m * gate_m + n, mask=inside, other=0.0).to(CT)
        active = ACT(gate, P0, P1)
        if NEED_DGATE or NEED_H:
            up = tl.load(up_ptr + m * up_m + n, mask=inside, other=0.0).to(CT)
            if NEED_H:
                tl.store(h_ptr + m * N + n, (active * up).to(h_ptr.dtype.element_ty), mask=inside)
            if NEED_DGATE:
                dgate = GRAD(g * up, active if KEEPS_OUTPUT else gate, P0, P1)
                tl.store(dgate_ptr + m * dgate_m + n, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
                if NEED_SUMS:
                    sum_gate += tl.where(inside, dgate, 0.0)
        if NEED_DUP:
            dup = g * active
            tl.store(dup_ptr + m * dup_m + n, dup.to(dup_ptr.dtype.element_ty), mask=inside)
            if NEED_SUMS:
                sum_up += tl.where(inside, dup, 0.0)
    if NEED_SUMS:
        at = pid_m * N + n
        total_gate = tl.sum(sum_gate, axis=0)[None, :]
        total_up = tl.sum(sum_up, axis=0)[None, :]
        tl.store(partial_ptr + at, total_gate, mask=n < N)
        tl.store(partial_ptr + tl.cast(blocks_m, tl.int64) * N + at, total_up, mask=n < N)
