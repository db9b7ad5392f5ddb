"""Norms over the last N elements of each of M rows: LayerNorm and RMSNorm, with the residual add before them.

`forward` and `backward` hold whole rows in registers, `BR` rows at a time; the `_long` kernels walk a row in chunks of
`BN`. Statistics are a mean and then a sum of squared distances from it, never a difference of two large sums.

Pointers: x, residual, g, g_sum and s (what was normalised: x, or the sum) are read by rows of a stride of their own;
y, sum, dx and dres are dense. `stats_ptr` holds rstd (M,) and then, where there is a mean, mean (M,). XT is the dtype
of s, CT the one computed in. Sizes and strides come divided by `V`, their common divisor up to 16, and are multiplied
back here: so the compiler sees how far loads may be vectorised also where N is no multiple of 16.

Gradients of the parameters take two stages and no atomics: each block of `backward` walks many rows, adds up in
registers and writes one partial row; `reduce.finish` adds those up in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import COUNTS
from .reduce import mean_of, product


@triton.jit
def weight_of(w_ptr, cols, in_cols, CT: tl.constexpr, OFFSET: tl.constexpr):
    return tl.load(w_ptr + cols, mask=in_cols, other=0.0).to(CT) + OFFSET


@triton.jit
def _finished(xhat, w_ptr, b_ptr, cols, in_cols, XT: tl.constexpr, CT: tl.constexpr, OFFSET: tl.constexpr,
              CAST: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr):  # fmt: skip
    """`xhat * (OFFSET + w) + b`; with CAST, xhat is first rounded to the dtype of x, as LlamaRMSNorm does."""
    y = xhat
    if CAST:
        y = y.to(XT).to(CT)
    if HAS_W:
        y = y * weight_of(w_ptr, cols, in_cols, CT, OFFSET)
    if HAS_B:
        y = y + tl.load(b_ptr + cols, mask=in_cols, other=0.0).to(CT)
    return y


@triton.jit
def norm_rows(x, rows, in_rows, cols, in_cols, w_ptr, b_ptr, y_ptr, stats_ptr, M, N,
              XT: tl.constexpr, CT: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, CENTER: tl.constexpr,
              CAST: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr, WRITE_STATS: tl.constexpr):  # fmt: skip
    """Writes y and the statistics of rows held whole, `x` (BR, BN)."""
    if CENTER:
        mean = mean_of(tl.sum(x, axis=1), N)
        x = tl.where(in_cols, x - mean[:, None], 0.0)
        if WRITE_STATS:
            tl.store(stats_ptr + M + rows, mean, mask=in_rows)
    rstd = tl.rsqrt(tl.sum(product(x, x), axis=1) / N + EPS)
    if WRITE_STATS:
        tl.store(stats_ptr + rows, rstd, mask=in_rows)
    y = _finished(x * rstd[:, None], w_ptr, b_ptr, cols, in_cols, XT, CT, OFFSET, CAST, HAS_W, HAS_B)
    tl.store(y_ptr + rows[:, None] * N + cols, y.to(y_ptr.dtype.element_ty), mask=in_rows[:, None] & in_cols)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def forward(
    x_ptr, res_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, stats_ptr, M, n_v, x_v, res_v,
    XT: tl.constexpr, CT: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, CENTER: tl.constexpr,
    CAST: tl.constexpr, HAS_RES: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr, WRITE_STATS: tl.constexpr,
    V: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Blocks (cdiv(M, BR)), BN >= N. Reads M*N of x (and residual), writes M*N of y (and sum)."""
    N = n_v * V
    rows = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    cols = tl.arange(0, BN)[None, :]
    in_rows = rows < M
    in_cols = cols < N
    mask = in_rows[:, None] & in_cols
    x = tl.load(x_ptr + rows[:, None] * (x_v * V) + cols, mask=mask, other=0.0)
    if HAS_RES:
        res = tl.load(res_ptr + rows[:, None] * (res_v * V) + cols, mask=mask, other=0.0)
        # the norm sees the sum as it is returned, rounded
        x = (x.to(CT) + res.to(CT)).to(XT)
        tl.store(sum_ptr + rows[:, None] * N + cols, x, mask=mask)
    norm_rows(x.to(CT), rows, in_rows, cols, in_cols, w_ptr, b_ptr, y_ptr, stats_ptr, M, N,
              XT, CT, EPS, OFFSET, CENTER, CAST, HAS_W, HAS_B, WRITE_STATS)  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def forward_long(
    x_ptr, res_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, stats_ptr, M, n_v, x_v, res_v,
    XT: tl.constexpr, CT: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, CENTER: tl.constexpr,
    CAST: tl.constexpr, HAS_RES: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr, WRITE_STATS: tl.constexpr,
    V: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Blocks (M). Reads a row twice, the second time from the cache where it fits; chunks join by Chan's formula."""
    N = n_v * V
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * (x_v * V)
    if HAS_RES:
        res_ptr += row * (res_v * V)
        sum_ptr += row * N
    squares = tl.zeros((BN,), dtype=CT)
    mean = tl.sum(squares)
    spread = mean
    for start in range(0, N, BN):
        cols = start + tl.arange(0, BN)
        in_cols = cols < N
        x = tl.load(x_ptr + cols, mask=in_cols, other=0.0)
        if HAS_RES:
            res = tl.load(res_ptr + cols, mask=in_cols, other=0.0)
            x = (x.to(CT) + res.to(CT)).to(XT)
            tl.store(sum_ptr + cols, x, mask=in_cols)
        x = x.to(CT)
        if CENTER:
            n = tl.minimum(N - start, BN)
            here = mean_of(tl.sum(x), n)
            x = tl.where(in_cols, x - here, 0.0)
            apart = here - mean
            share = n.to(CT) / (start + n)
            mean += apart * share
            spread += tl.sum(product(x, x)) + apart * (apart * (share * start))
        else:
            squares += x * x
    if not CENTER:
        spread = tl.sum(squares)
    rstd = tl.rsqrt(spread / N + EPS)
    if WRITE_STATS:
        tl.store(stats_ptr + row, rstd)
        if CENTER:
            tl.store(stats_ptr + M + row, mean)
    for start in range(0, N, BN):
        cols = start + tl.arange(0, BN)
        in_cols = cols < N
        if HAS_RES:
            x = tl.load(sum_ptr + cols, mask=in_cols, other=0.0).to(CT)
        else:
            x = tl.load(x_ptr + cols, mask=in_cols, other=0.0).to(CT)
        if CENTER:
            x -= mean
        y = _finished(x * rstd, w_ptr, b_ptr, cols, in_cols, XT, CT, OFFSET, CAST, HAS_W, HAS_B)
        tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=in_cols)


@triton.jit
def grad_rows(g, xhat, rstd, w, N, CENTER: tl.constexpr, HAS_W: tl.constexpr):
    """The gradient of what was normalised, for rows held whole; `w` (1, BN)."""
    wg = g
    if HAS_W:
        wg = product(g, w)
    slope = tl.sum(product(wg, xhat), axis=1)[:, None] / N
    dx = wg - xhat * slope
    if CENTER:
        dx -= tl.sum(wg, axis=1)[:, None] / N
    return dx * rstd


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def backward(
    g_ptr, gsum_ptr, s_ptr, w_ptr, stats_ptr, dx_ptr, dres_ptr, partial_ptr, M, n_v, g_v, gsum_v, s_v,
    CT: tl.constexpr, OFFSET: tl.constexpr, CENTER: tl.constexpr, HAS_GSUM: tl.constexpr, HAS_W: tl.constexpr,
    NEED_DX: tl.constexpr, NEED_DRES: tl.constexpr, NEED_DW: tl.constexpr, NEED_DB: tl.constexpr, V: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, AR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Any number K of blocks, BN >= N: block k takes tiles k, k + K, ... of BR rows.

    Reads M*N of g and s (and g_sum), writes M*N of dx; dres is the same gradient once more, where its dtype differs.
    `partial_ptr` (2, K, N): sums of g * xhat, then of g, held as (AR, BN) with AR = BR or 1.
    """
    N = n_v * V
    pid = tl.program_id(0)
    blocks = tl.num_programs(0)
    cols = tl.arange(0, BN)[None, :]
    in_cols = cols < N
    w = cols
    if HAS_W and NEED_DX:
        w = weight_of(w_ptr, cols, in_cols, CT, OFFSET)
    sum_w = tl.zeros((AR, BN), dtype=CT)
    sum_b = tl.zeros((AR, BN), dtype=CT)
    for tile in tl.range(pid, tl.cdiv(M, BR), blocks, num_stages=STAGES):
        rows = tile * BR + tl.arange(0, BR).to(tl.int64)
        in_rows = rows < M
        mask = in_rows[:, None] & in_cols
        g = tl.load(g_ptr + rows[:, None] * (g_v * V) + cols, mask=mask, other=0.0).to(CT)
        if NEED_DX or NEED_DW:
            s_at = s_ptr + rows[:, None] * (s_v * V) + cols
            xhat, rstd = normalised(s_at, stats_ptr, rows, in_rows, mask, M, CT, CENTER)
        if NEED_DX:
            dx = grad_rows(g, xhat, rstd, w, N, CENTER, HAS_W)
            if HAS_GSUM:
                dx += tl.load(gsum_ptr + rows[:, None] * (gsum_v * V) + cols, mask=mask, other=0.0).to(CT)
            at = rows[:, None] * N + cols
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if NEED_DRES:
                tl.store(dres_ptr + at, dx.to(dres_ptr.dtype.element_ty), mask=mask)
        if NEED_DW:
            sum_w += folded(g * xhat, AR, BR)
        if NEED_DB:
            sum_b += folded(g, AR, BR)
    store_sums(partial_ptr, sum_w, sum_b, N, NEED_DW, NEED_DB, BN)


@triton.jit
def normalised(at_ptr, stats_ptr, rows, in_rows, mask, M, CT: tl.constexpr, CENTER: tl.constexpr):
    """Rows as they were normalised, before the weight, and their rstd."""
    x = tl.load(at_ptr, mask=mask, other=0.0).to(CT)
    rstd = tl.load(stats_ptr + rows, mask=in_rows, other=0.0)[:, None]
    if CENTER:
        # lanes past the edge hold -mean then, and meet g = 0
        x -= tl.load(stats_ptr + M + rows, mask=in_rows, other=0.0)[:, None]
    return x * rstd, rstd


@triton.jit
def store_sums(partial_ptr, sum_w, sum_b, N, NEED_DW: tl.constexpr, NEED_DB: tl.constexpr, BN: tl.constexpr):
    """A block's row of the parameters' partial sums, (2, blocks, N)."""
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, BN)
    in_cols = tl.arange(0, BN) < N
    if NEED_DW:
        tl.store(partial_ptr + at, tl.sum(sum_w, axis=0), mask=in_cols)
    if NEED_DB:
        tl.store(partial_ptr + tl.cast(tl.num_programs(0), tl.int64) * N + at, tl.sum(sum_b, axis=0), mask=in_cols)


@triton.jit
def folded(t, AR: tl.constexpr, BR: tl.constexpr):
    """Adds the rows of a tile up at once where they lie in one thread; else the sums stay apart until the end."""
    if AR < BR:
        t = tl.sum(t, axis=0, keep_dims=True)
    return t


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def backward_long(
    g_ptr, gsum_ptr, s_ptr, w_ptr, stats_ptr, dx_ptr, dres_ptr, M, n_v, g_v, gsum_v, s_v,
    CT: tl.constexpr, OFFSET: tl.constexpr, CENTER: tl.constexpr, HAS_GSUM: tl.constexpr, HAS_W: tl.constexpr,
    NEED_DRES: tl.constexpr, V: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Blocks (M): dx of a row too long for registers, in two passes over g and s, the second from the cache."""
    N = n_v * V
    row = tl.program_id(0).to(tl.int64)
    g_ptr += row * (g_v * V)
    s_ptr += row * (s_v * V)
    rstd = tl.load(stats_ptr + row)
    mean = rstd
    if CENTER:
        mean = tl.load(stats_ptr + M + row)
    slopes = tl.zeros((BN,), dtype=CT)
    means = tl.zeros((BN,), dtype=CT)
    for start in range(0, N, BN):
        wg, xhat = _long_chunk(g_ptr, s_ptr, w_ptr, start, N, mean, rstd, CT, OFFSET, CENTER, HAS_W, BN)
        slopes += wg * xhat
        means += wg
    slope = tl.sum(slopes) / N
    shift = tl.sum(means) / N
    for start in range(0, N, BN):
        wg, xhat = _long_chunk(g_ptr, s_ptr, w_ptr, start, N, mean, rstd, CT, OFFSET, CENTER, HAS_W, BN)
        cols = start + tl.arange(0, BN)
        in_cols = cols < N
        dx = wg - xhat * slope
        if CENTER:
            dx -= shift
        dx *= rstd
        if HAS_GSUM:
            dx += tl.load(gsum_ptr + row * (gsum_v * V) + cols, mask=in_cols, other=0.0).to(CT)
        tl.store(dx_ptr + row * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=in_cols)
        if NEED_DRES:
            tl.store(dres_ptr + row * N + cols, dx.to(dres_ptr.dtype.element_ty), mask=in_cols)


@triton.jit
def _long_chunk(g_ptr, s_ptr, w_ptr, start, N, mean, rstd, CT: tl.constexpr, OFFSET: tl.constexpr,
                CENTER: tl.constexpr, HAS_W: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    cols = start + tl.arange(0, BN)
    in_cols = cols < N
    wg = tl.load(g_ptr + cols, mask=in_cols, other=0.0).to(CT)
    x = tl.load(s_ptr + cols, mask=in_cols, other=0.0).to(CT)
    if CENTER:
        x -= mean
    if HAS_W:
        wg *= weight_of(w_ptr, cols, in_cols, CT, OFFSET)
    return wg, x * rstd


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def backward_params(
    g_ptr, s_ptr, stats_ptr, partial_ptr, M, n_v, g_v, s_v, rows_per_block, blocks,
    CT: tl.constexpr, CENTER: tl.constexpr, NEED_DW: tl.constexpr, NEED_DB: tl.constexpr, V: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Blocks (cdiv(N, BN) * blocks): parameter sums beside `backward_long`, BN columns by `rows_per_block` rows each.

    `partial_ptr` (2, blocks, N). Reads M*N of g (and s).
    """
    N = n_v * V
    pid = tl.program_id(0)
    across = tl.cdiv(N, BN)
    k = (pid // across).to(tl.int64)
    cols = (pid % across) * BN + tl.arange(0, BN)
    in_cols = cols < N
    sum_w = tl.zeros((BR, BN), dtype=CT)
    sum_b = tl.zeros((BR, BN), dtype=CT)
    begin = k * rows_per_block
    end = tl.minimum(begin + rows_per_block, M)
    for start in range(begin, end, BR):
        rows = start + tl.arange(0, BR)
        in_rows = rows < end
        mask = in_rows[:, None] & in_cols[None, :]
        g = tl.load(g_ptr + rows[:, None] * (g_v * V) + cols[None, :], mask=mask, other=0.0).to(CT)
        if NEED_DW:
            x = tl.load(s_ptr + rows[:, None] * (s_v * V) + cols[None, :], mask=mask, other=0.0).to(CT)
            if CENTER:
                x -= tl.load(stats_ptr + M + rows, mask=in_rows, other=0.0)[:, None]
            sum_w += g * (x * tl.load(stats_ptr + rows, mask=in_rows, other=0.0)[:, None])
        if NEED_DB:
            sum_b += g
    at = partial_ptr + k * N + cols
    if NEED_DW:
        tl.store(at, tl.sum(sum_w, axis=0), mask=in_cols)
    if NEED_DB:
        tl.store(at + tl.cast(blocks, tl.int64) * N, tl.sum(sum_b, axis=0), mask=in_cols)
