"""`out = residual + path * drop * (scale * x)`, forward and backward, over dense memory.

`x` is walked as rows of C consecutive elements, `A * T` of them. Where `scale` varies along memory (`COL`: per
channel of the last dim, channels_last, AdaLN gates) it is `(A, C)`, with strides; else one value a row, with period
`P`: NCHW, gates a sample, and scalars. `path_ptr` (samples,) holds DropPath's factor of each `path_rows` rows.
`drop` is 0 or `keep_scale`, drawn by `philox.keep_tile` from an element's place in memory, so nothing is stored.

Forward reads x and residual and writes out. Its kernel without a residual, run on grad, is also the backward where
scale needs no gradient: 1 read, 1 write. Else backward reads grad and x, writes dx, and partial sums of the scale's
gradient, one row a block, which `reduce.sum_partials` adds up: two stages, no atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .philox import DRAWN, keep_tile, state


@triton.jit
def _factor(z, path_ptr, row, in_row, path_rows, N, first_col, k0, k1, calls, threshold, keep_scale, threads,
            HAS_PATH: tl.constexpr, DROP: tl.constexpr, VEC: tl.constexpr, GROUPED: tl.constexpr, WIDE: tl.constexpr,
            BN: tl.constexpr):  # fmt: skip
    """`z` (BM, BN) times the factors of dropout and DropPath. Products, not selections: 0 * inf is NaN in torch."""
    if DROP != 0:
        keep = keep_tile(row, N, first_col, k0, k1, calls, threshold, threads, DROP, VEC, GROUPED, WIDE, BN)
        z = z * tl.where(keep, keep_scale, 0.0).to(z.dtype)
    if HAS_PATH:
        path = tl.load(path_ptr + row // path_rows, mask=in_row, other=0.0).to(z.dtype)
        z = z * path[:, None]
    return z


@triton.jit(do_not_specialize=DRAWN)
def forward(
    x_ptr, res_ptr, scale_ptr, path_ptr, seed_ptr, offset_ptr, out_ptr,
    seed_low, seed_high, offset_low, offset_high,
    scale_value, A, T, C, P, scale_a, scale_c, path_rows, threshold, threads, keep_scale,
    CT: tl.constexpr, COL: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_RES: tl.constexpr, HAS_PATH: tl.constexpr,
    RNG_PTR: tl.constexpr, DROP: tl.constexpr, VEC: tl.constexpr, GROUPED: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Blocks (A * cdiv(T, BM) * cdiv(C, BN)), one tile each. Without a scale pointer, `scale_value`."""
    pid = tl.program_id(0)
    blocks_c = tl.cdiv(C, BN)
    blocks_t = tl.cdiv(T, BM)
    first_col = (pid % blocks_c) * BN
    block, a = pid // blocks_c, tl.cast(0, tl.int64)
    if A != 1:  # a division costs as much as several elements
        a = (block // blocks_t).to(tl.int64)
        block = (block % blocks_t).to(block.dtype)  # T may take 64 bits, blocks do not
    t = block.to(tl.int64) * BM + tl.arange(0, BM)
    c = first_col + tl.arange(0, BN)
    in_row, in_col = t < T, c < C
    row = a * T + t
    at = row[:, None] * C + c[None, :]
    mask = in_row[:, None] & in_col[None, :]
    z = tl.load(x_ptr + at, mask=mask, other=0.0).to(CT)
    if HAS_RES:
        residual = tl.load(res_ptr + at, mask=mask, other=0.0).to(CT)
    if HAS_SCALE:
        if COL:
            z = tl.load(scale_ptr + a * scale_a + c * scale_c, mask=in_col, other=0.0).to(CT)[None, :] * z
        else:
            z = tl.load(scale_ptr + (row % P) * scale_a, mask=in_row, other=0.0).to(CT)[:, None] * z
    else:
        z = z * scale_value
    k0, k1, calls = 0, 0, 0
    if DROP != 0:
        k0, k1, calls = state(seed_ptr, offset_ptr, seed_low, seed_high, offset_low, offset_high, RNG_PTR)
    z = _factor(z, path_ptr, row, in_row, path_rows, C, first_col, k0, k1, calls, threshold, keep_scale, threads,
                HAS_PATH, DROP, VEC, GROUPED, WIDE, BN)  # fmt: skip
    if HAS_RES:
        z = residual + z
    tl.store(out_ptr + at, z.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=DRAWN)
def backward(
    g_ptr, x_ptr, scale_ptr, path_ptr, seed_ptr, offset_ptr, dx_ptr, partial_ptr,
    seed_low, seed_high, offset_low, offset_high,
    scale_value, A, T, C, P, scale_a, scale_c, path_rows, per_block, blocks, threshold, threads, keep_scale,
    CT: tl.constexpr, COL: tl.constexpr, HAS_SCALE: tl.constexpr, NEED_DX: tl.constexpr, HAS_PATH: tl.constexpr,
    RNG_PTR: tl.constexpr, DROP: tl.constexpr, VEC: tl.constexpr, GROUPED: tl.constexpr, WIDE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dx and the scale's partial sums; `blocks` share one coefficient's sum.

    COL: blocks (A * blocks * cdiv(C, BN)), each walks `per_block` of the T rows; `partial_ptr` (blocks, A * C).
    Else: blocks (cdiv(T, BM) * blocks), each walks `per_block` of the C columns; `partial_ptr` (T / P * blocks, P).
    """
    pid = tl.program_id(0)
    if COL:
        blocks_c = tl.cdiv(C, BN)
        first_col = (pid % blocks_c) * BN
        share = (pid // blocks_c) % blocks
        a = (pid // (blocks_c * blocks)).to(tl.int64)
        begin = tl.cast(share, tl.int64) * per_block
        end = tl.minimum(begin + per_block, T)
    else:
        first_col = 0
        share = pid % blocks
        a = tl.cast(0, tl.int64)
        begin = tl.cast(share, tl.int64) * per_block
        end = tl.minimum(begin + per_block, C)
    lines = tl.arange(0, BM)
    columns = tl.arange(0, BN)
    if COL:
        in_c = first_col + columns < C
        scale = scale_value
        if HAS_SCALE:
            scale = tl.load(scale_ptr + a * scale_a + (first_col + columns) * scale_c, mask=in_c, other=0.0)
            scale = scale.to(CT)[None, :]
    else:
        line = (pid // blocks).to(tl.int64) * BM + lines
        in_t = line < T
        scale = scale_value
        if HAS_SCALE:
            scale = tl.load(scale_ptr + (line % P) * scale_a, mask=in_t, other=0.0).to(CT)[:, None]
    k0, k1, calls = 0, 0, 0
    if DROP != 0:
        k0, k1, calls = state(seed_ptr, offset_ptr, seed_low, seed_high, offset_low, offset_high, RNG_PTR)
    total = tl.zeros((BM, BN), dtype=CT)
    for start in range(begin, end, BM if COL else BN):
        if COL:
            t = start + lines
            row = a * T + t
            in_row = t < end
            in_col = in_c
            col = first_col
        else:
            row = line
            in_row = in_t
            in_col = start + columns < end
            col = start
        mask = in_row[:, None] & in_col[None, :]
        at = row[:, None] * C + (col + columns)[None, :]
        g = tl.load(g_ptr + at, mask=mask, other=0.0).to(CT)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(CT)
        dz = _factor(g, path_ptr, row, in_row, path_rows, C, col, k0, k1, calls, threshold, keep_scale, threads,
                     HAS_PATH, DROP, VEC, GROUPED, WIDE, BN)  # fmt: skip
        if NEED_DX:
            tl.store(dx_ptr + at, (dz * scale).to(dx_ptr.dtype.element_ty), mask=mask)
        total += dz * x
    if COL:
        at_partial = tl.cast(share, tl.int64) * (tl.cast(A, tl.int64) * C) + a * C + first_col + columns
        tl.store(partial_ptr + at_partial, tl.sum(total, axis=0), mask=in_c)
    else:
        at_partial = ((line // P) * blocks + share) * P + line % P
        tl.store(partial_ptr + at_partial, tl.sum(total, axis=1), mask=in_t)
