"""The gradient of a projection whose output was split into the heads of two or three parts.

In: a gradient a part, (B, H, N, D), read once where it lies, whatever its strides. Out: (B, N, PARTS, H, D), dense,
written once; nothing is computed, so bits stay as they are. Where the projection's bias wants its gradient, the sums of
the columns come from the same pass: a partial sum a block, which `reduce.sum_partials` adds up.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pack(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, N, C, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    CT: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """`q_ptr`, `k_ptr`, `v_ptr`: the parts' gradients with their strides, `None` for one that is zero.

    `out_ptr` (B, N, PARTS, C), C = H * D. `partial_ptr` (B * cdiv(N, BN), PARTS, C) of dtype CT, or `None`. Blocks
    (B * cdiv(N, BN) * cdiv(C, BC)): each BN tokens of one sample, BC columns of every part.
    """
    pid = tl.program_id(0)
    blocks_c = tl.cdiv(C, BC)
    blocks_n = tl.cdiv(N, BN)
    b = (pid // (blocks_c * blocks_n)).to(tl.int64)
    n = pid // blocks_c % blocks_n * BN + tl.arange(0, BN)[:, None]
    c = pid % blocks_c * BC + tl.arange(0, BC)[None, :]
    row = PARTS * tl.cast(C, tl.int64)
    out_ptr += (b * N + n) * row + c
    if partial_ptr is not None:
        partial_ptr += (pid // blocks_c) * row
    _part(q_ptr, out_ptr, partial_ptr, 0, b, n, c, N, C, q_b, q_h, q_n, q_d, CT, D, BN, BC)
    _part(k_ptr, out_ptr, partial_ptr, 1, b, n, c, N, C, k_b, k_h, k_n, k_d, CT, D, BN, BC)
    if PARTS == 3:
        _part(v_ptr, out_ptr, partial_ptr, 2, b, n, c, N, C, v_b, v_h, v_n, v_d, CT, D, BN, BC)


@triton.jit
def _part(
    g_ptr, out_ptr, partial_ptr, part, b, n, c, N, C, g_b, g_h, g_n, g_d,
    CT: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    inside = (n < N) & (c < C)
    if g_ptr is None:
        g = tl.zeros((BN, BC), dtype=out_ptr.dtype.element_ty)
    else:
        at = b * g_b + n.to(tl.int64) * g_n + (c // D).to(tl.int64) * g_h + (c % D).to(tl.int64) * g_d
        g = tl.load(g_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + part * C, g.to(out_ptr.dtype.element_ty), mask=inside)
    if partial_ptr is not None:
        tl.store(partial_ptr + part * C + c, tl.sum(g.to(CT), axis=0, keep_dims=True), mask=c < C)
