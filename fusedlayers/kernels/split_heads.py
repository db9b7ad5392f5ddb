"""The gradient of a projection whose output was split into the heads of two or three parts.

In: a gradient a part, (B, H, N, D), read once where it lies, whatever its strides. Out: (B, N, PARTS, H, D), dense,
written once. Nothing is computed, so bits stay as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pack(
    q_ptr, k_ptr, v_ptr, out_ptr, N, C, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
    PARTS: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """`q_ptr`, `k_ptr`, `v_ptr`: the parts' gradients with their strides, `None` for one that is zero.

    `out_ptr` (B, N, PARTS, C), C = H * D. Blocks (B * cdiv(N, BN) * cdiv(C, BC)): each BN tokens of one sample, BC
    columns of every part.
    """
    pid = tl.program_id(0)
    blocks_c = tl.cdiv(C, BC)
    blocks_n = tl.cdiv(N, BN)
    b = (pid // (blocks_c * blocks_n)).to(tl.int64)
    n = pid // blocks_c % blocks_n * BN + tl.arange(0, BN)[:, None]
    c = pid % blocks_c * BC + tl.arange(0, BC)[None, :]
    out_ptr += (b * N + n) * (PARTS * tl.cast(C, tl.int64)) + c
    _part(q_ptr, out_ptr, b, n, c, N, C, q_b, q_h, q_n, q_d, D, BN, BC)
    _part(k_ptr, out_ptr + C, b, n, c, N, C, k_b, k_h, k_n, k_d, D, BN, BC)
    if PARTS == 3:
        _part(v_ptr, out_ptr + 2 * C, b, n, c, N, C, v_b, v_h, v_n, v_d, D, BN, BC)


@triton.jit
def _part(
    g_ptr, out_ptr, b, n, c, N, C, g_b, g_h, g_n, g_d,
    D: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    inside = (n < N) & (c < C)
    if g_ptr is None:
        g = tl.zeros((BN, BC), dtype=out_ptr.dtype.element_ty)
    else:
        at = b * g_b + n.to(tl.int64) * g_n + (c // D).to(tl.int64) * g_h + (c % D).to(tl.int64) * g_d
        g = tl.load(g_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr, g.to(out_ptr.dtype.element_ty), mask=inside)
