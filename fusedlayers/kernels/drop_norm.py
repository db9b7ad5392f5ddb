"""The norms of `norm.py` over `dropout(x) + residual`, for rows that registers hold, forward and backward.

Whether an element is kept is drawn by `philox.keep_tile` from its place among the M*N, so no mask is stored. Pointers
and sizes are those of `norm.py`; x is multiplied by 0 or `keep_scale`, never selected: 0 * inf is NaN in torch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import COUNTS
from .norm import folded, grad_rows, norm_rows, normalised, store_sums, weight_of
from .philox import DRAWN, keep_tile, state


@triton.jit(do_not_specialize=DRAWN, do_not_specialize_on_alignment=COUNTS)
def forward(
    x_ptr, res_ptr, w_ptr, b_ptr, seed_ptr, offset_ptr, y_ptr, sum_ptr, stats_ptr,
    seed_low, seed_high, offset_low, offset_high, M, n_v, x_v, res_v, threshold, threads, keep_scale,
    XT: tl.constexpr, CT: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, CENTER: tl.constexpr,
    CAST: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr, WRITE_STATS: tl.constexpr, RNG_PTR: tl.constexpr,
    DROP: tl.constexpr, VEC: tl.constexpr, GROUPED: tl.constexpr, WIDE: tl.constexpr, V: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Blocks (cdiv(M, BR)), BN >= N. Reads M*N of x and residual, writes M*N of sum and y."""
    N = n_v * V
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    cols = tl.arange(0, BN)[None, :]
    in_rows = rows < M
    in_cols = cols < N
    mask = in_rows[:, None] & in_cols
    x = tl.load(x_ptr + rows[:, None] * (x_v * V) + cols, mask=mask, other=0.0).to(CT)
    res = tl.load(res_ptr + rows[:, None] * (res_v * V) + cols, mask=mask, other=0.0).to(CT)
    k0, k1, calls = state(seed_ptr, offset_ptr, seed_low, seed_high, offset_low, offset_high, RNG_PTR)
    keep = keep_tile(rows, N, 0, k0, k1, calls, threshold, threads, DROP, VEC, GROUPED, WIDE, BN)
    # the norm sees the sum as it is returned, rounded
    s = (x * tl.where(keep, keep_scale, 0.0).to(CT) + res).to(XT)
    tl.store(sum_ptr + rows[:, None] * N + cols, s, mask=mask)
    norm_rows(s.to(CT), rows, in_rows, cols, in_cols, w_ptr, b_ptr, y_ptr, stats_ptr, M, N,
              XT, CT, EPS, OFFSET, CENTER, CAST, HAS_W, HAS_B, WRITE_STATS)  # fmt: skip


@triton.jit(do_not_specialize=DRAWN, do_not_specialize_on_alignment=COUNTS)
def backward(
    g_ptr, gsum_ptr, s_ptr, w_ptr, stats_ptr, seed_ptr, offset_ptr, dx_ptr, dres_ptr, partial_ptr,
    seed_low, seed_high, offset_low, offset_high, M, n_v, g_v, gsum_v, s_v, threshold, threads, keep_scale,
    CT: tl.constexpr, OFFSET: tl.constexpr, CENTER: tl.constexpr, HAS_GSUM: tl.constexpr, HAS_W: tl.constexpr,
    NEED_DX: tl.constexpr, NEED_DRES: tl.constexpr, NEED_DW: tl.constexpr, NEED_DB: tl.constexpr,
    NEED_SHIFT: tl.constexpr, RNG_PTR: tl.constexpr, DROP: tl.constexpr, VEC: tl.constexpr, GROUPED: tl.constexpr,
    WIDE: tl.constexpr, V: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, AR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Any number K of blocks, BN >= N: block k takes tiles k, k + K, ... of BR rows.

    Reads M*N of g and s (and g_sum), writes M*N of dx and of dres, which are two tensors here. `partial_ptr` (2, K, N)
    as in `norm.backward`; with NEED_SHIFT (3, K, N): then the sums of dx.
    """
    N = n_v * V
    pid = tl.program_id(0)
    blocks = tl.num_programs(0)
    cols = tl.arange(0, BN)[None, :]
    in_cols = cols < N
    w = cols
    if HAS_W and (NEED_DX or NEED_DRES):
        w = weight_of(w_ptr, cols, in_cols, CT, OFFSET)
    k0, k1, calls = 0, 0, 0
    if NEED_DX:
        k0, k1, calls = state(seed_ptr, offset_ptr, seed_low, seed_high, offset_low, offset_high, RNG_PTR)
    sum_w = tl.zeros((AR, BN), dtype=CT)
    sum_b = tl.zeros((AR, BN), dtype=CT)
    sum_x = tl.zeros((AR, BN), dtype=CT)
    for tile in tl.range(pid, tl.cdiv(M, BR), blocks, num_stages=STAGES):
        rows = tile * BR + tl.arange(0, BR).to(tl.int64)
        in_rows = rows < M
        mask = in_rows[:, None] & in_cols
        g = tl.load(g_ptr + rows[:, None] * (g_v * V) + cols, mask=mask, other=0.0).to(CT)
        if NEED_DX or NEED_DRES or NEED_DW:
            s_at = s_ptr + rows[:, None] * (s_v * V) + cols
            xhat, rstd = normalised(s_at, stats_ptr, rows, in_rows, mask, M, CT, CENTER)
        if NEED_DX or NEED_DRES:
            ds = grad_rows(g, xhat, rstd, w, N, CENTER, HAS_W)
            if HAS_GSUM:
                ds += tl.load(gsum_ptr + rows[:, None] * (gsum_v * V) + cols, mask=mask, other=0.0).to(CT)
            at = rows[:, None] * N + cols
            if NEED_DRES:
                tl.store(dres_ptr + at, ds.to(dres_ptr.dtype.element_ty), mask=mask)
            if NEED_DX:
                keep = keep_tile(rows, N, 0, k0, k1, calls, threshold, threads, DROP, VEC, GROUPED, WIDE, BN)
                dx = ds * tl.where(keep, keep_scale, 0.0).to(CT)
                tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
                if NEED_SHIFT:  # in rows past the edge rstd is 0, and so is dx
                    sum_x += folded(dx, AR, BR)
        if NEED_DW:
            sum_w += folded(g * xhat, AR, BR)
        if NEED_DB:
            sum_b += folded(g, AR, BR)
    store_sums(partial_ptr, sum_w, sum_b, N, NEED_DW, NEED_DB, BN)
    if NEED_SHIFT:
        third = partial_ptr + 2 * tl.cast(blocks, tl.int64) * N
        store_sums(third, sum_x, sum_x, N, True, False, BN)
