"""`y = act(batch_norm(x) [+ residual])`, forward and backward, over dense memory.

`x` is `(M, C, S)` in memory: NCHW with S = H*W ("row": a block works on one channel), or channels_last and (N, C) with
S = 1 ("col": on GC adjacent channels). A tensor is cut into K chunks, rows times columns, of a channel group each.
Where C fits no tile, FOLD rows are walked as one of FOLD * C "channels", so that tiles are full and loads are wide; and
where an NCHW map is small, its S positions as FOLD "channels" next to each other (ADJACENT). All of M, C and K are then
of that shape, and each of the K chunks gives FOLD partial sums a channel.

Training: `forward_sums` reads x and writes one mean and one M2 a chunk, the tiny `forward_combine` combines them in a
fixed order, `forward_apply` reads x (and residual) and writes y. Backward likewise: `backward_sums` reads grad and x
(and what was kept), `backward_apply` reads them again and writes dx. With one chunk (OWN) each direction is one launch,
and the second read comes from the L2. Evaluation (RUNNING) is one pass. No atomics: every run gives the same bits.

Statistics are stable: each lane sums deviations from its own first value, lanes and chunks combine by Chan's formula,
so what cancels is bounded by the number of values a lane sees, whatever the data. A chunk's mean is written as its
distance from the channel's very first value, so that the mean itself is rounded once.

Sums ask the L2 to hold what apply reads again (`AGAIN`), and apply walks its chunk backwards, so that what was read
last and is still there comes first; all that is read or written for the last time (`ONCE`) makes room for it.

`stats_ptr` (3, C), compute dtype: mean, 1/sqrt(var + eps), and forward's private copy of the bias, which a user may
edit before backward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .affine import _grad_z
from .launch import COUNTS
from .reduce import mean_of, product

# Where the second pass has its coefficients from (SOURCE): what was combined before it, its own block's sums, or the
# running statistics
SAVED, OWN, RUNNING = 0, 1, 2

AGAIN, ONCE = tl.constexpr("evict_last"), tl.constexpr("evict_first")


@triton.jit
def _chunk(k, M, S, rows_per, cols_per):
    """Rows `[m_lo, m_hi)` and columns `[s_lo, s_hi)` of chunk k."""
    across = tl.cdiv(S, cols_per)
    m_lo = tl.cast(k // across, tl.int64) * rows_per
    s_lo = tl.cast(k % across, tl.int64) * cols_per
    return m_lo, tl.minimum(m_lo + rows_per, M), s_lo, tl.minimum(s_lo + cols_per, S)


@triton.jit
def _tiles(m_lo, m_hi, s_lo, s_hi, BM: tl.constexpr, BJ: tl.constexpr, ROW: tl.constexpr):
    """How many tiles a chunk has, and how many of them side by side."""
    if ROW:
        across = tl.cdiv(s_hi - s_lo, BJ)
        return (tl.cdiv(m_hi - m_lo, BM) * across).to(tl.int32), across.to(tl.int32)
    return tl.cdiv(m_hi - m_lo, BM).to(tl.int32), 1


@triton.jit
def _tile(q, across, m_lo, m_hi, s_lo, s_hi, group, C, S, BM: tl.constexpr, BJ: tl.constexpr, ROW: tl.constexpr):
    """Offsets and mask of tile q of a chunk; all masked past its last tile."""
    if ROW:
        m = m_lo + (q // across) * BM + tl.arange(0, BM)
        s = s_lo + (q % across) * BJ + tl.arange(0, BJ)
        at = (m * C + group)[:, None] * S + s[None, :]
        return at, (m < m_hi)[:, None] & (s < s_hi)[None, :]
    m = m_lo + q * BM + tl.arange(0, BM)
    c = group * BJ + tl.arange(0, BJ)
    return m[:, None] * C + c[None, :], (m < m_hi)[:, None] & (c < C)[None, :]


@triton.jit
def _full_tile(q, first, C, BM: tl.constexpr):
    """Offsets of tile q of a chunk whose tiles are all full, from those of its tile 0; `_tile` without its masks.

    These passes are bound by instructions as much as by bytes: a mask costs one an element.
    """
    return first + tl.cast(q, tl.int64) * BM * C


@triton.jit
def _channel(c, C, FOLD: tl.constexpr, ADJACENT: tl.constexpr):
    """The channels of columns c, and how many there are."""
    if FOLD == 1:
        return c, C
    elif ADJACENT:
        return c // FOLD, C // FOLD
    else:
        return c % (C // FOLD), C // FOLD


@triton.jit
def _partial(r, c, C, FOLD, ADJACENT: tl.constexpr):
    """Where the partial sums r of channels c lie: FOLD of each chunk."""
    if ADJACENT:
        return (r // FOLD).to(tl.int64)[:, None] * C + (c * FOLD)[None, :] + (r % FOLD)[:, None]
    else:
        return r.to(tl.int64)[:, None] * (C // FOLD) + c[None, :]


@triton.jit
def _over_tile(v, ROW: tl.constexpr):
    """Sum of a tile over all that is not a channel."""
    if ROW:
        v = tl.sum(v, axis=1, keep_dims=True)
    elif v.shape[0] >= 64:  # groups first: rounding grows with the longest chain of additions
        v = tl.sum(tl.reshape(v, (v.shape[0] // 16, 16, v.shape[1])), axis=1)
    return tl.sum(v, axis=0)


@triton.jit
def _visits(extent, B: tl.constexpr, CT: tl.constexpr):
    """How many of `extent` values each of B lanes sees."""
    return tl.maximum((extent - tl.arange(0, B) + (B - 1)) // B, 0).to(CT)


@triton.jit
def _origin(x_ptr, c, C, S, FOLD, ADJACENT: tl.constexpr, CT: tl.constexpr):
    """The first value of each channel, from which all means are measured."""
    return tl.load(x_ptr + c.to(tl.int64) * (FOLD if ADJACENT else S), mask=c < C, other=0.0).to(CT)


@triton.jit
def _chunk_moments(x_ptr, m_lo, m_hi, s_lo, s_hi, group, C, S, CT: tl.constexpr, ROW: tl.constexpr,
                   FOLD: tl.constexpr, ADJACENT: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr, U: tl.constexpr,
                   FULL: tl.constexpr):  # fmt: skip
    """Mean, less the channel's origin, and M2 of every channel of one chunk."""
    count, across = _tiles(m_lo, m_hi, s_lo, s_hi, BM, BJ, ROW)
    at, mask = _tile(0, across, m_lo, m_hi, s_lo, s_hi, group, C, S, BM, BJ, ROW)
    start = at
    origin = tl.load(x_ptr + at, mask=mask, other=0.0).to(CT)
    s1 = tl.zeros((BM, BJ), dtype=CT)
    s2 = tl.zeros((BM, BJ), dtype=CT)
    for q in range(0, count, U):
        for u in tl.static_range(U):  # loads of U tiles in flight for one tile of sums
            if FULL:
                at = _full_tile(q + u, start, C, BM)
                d = tl.load(x_ptr + at, eviction_policy=AGAIN).to(CT) - origin
            else:
                at, mask = _tile(q + u, across, m_lo, m_hi, s_lo, s_hi, group, C, S, BM, BJ, ROW)
                d = tl.load(x_ptr + at, mask=mask, other=0.0, eviction_policy=AGAIN).to(CT)
                d = tl.where(mask, d - origin, 0.0)
            s1 += d
            s2 += d * d
    n = _visits(m_hi - m_lo, BM, CT)[:, None]
    if ROW:
        n = n * _visits(s_hi - s_lo, BJ, CT)[None, :]
        c = group + tl.arange(0, 1)
    else:
        c = group * BJ + tl.arange(0, BJ)
    channel, channels = _channel(c, C, FOLD, ADJACENT)
    first = _origin(x_ptr, channel, channels, S, FOLD, ADJACENT, CT)[None, :]
    total = ((m_hi - m_lo) * (s_hi - s_lo)).to(CT)
    share = s1 / tl.maximum(n, 1.0)
    lane = tl.where(n > 0, origin - first + share, 0.0)  # mean of a lane, from the channel's first value
    mean = mean_of(_over_tile(product(n, lane), ROW), total)
    off = lane - mean[None, :]
    more = mean_of(_over_tile(product(n, off), ROW), total)  # what rounding left: the lanes share their origin
    off = off - more[None, :]
    return mean + more, _over_tile(s2 - s1 * share + n * off * off, ROW)


@triton.jit
def _statistics(
    partial_ptr, K, M, S, C, rows_per, cols_per, c, FOLD, ADJACENT: tl.constexpr, KP: tl.constexpr, CT: tl.constexpr
):
    """Mean, less the origin, and M2 of channels c from all K chunks."""
    k = tl.arange(0, KP)
    m_lo, m_hi, s_lo, s_hi = _chunk(k // FOLD, M, S, rows_per, cols_per)
    n = tl.where(k < K * FOLD, (m_hi - m_lo) * (s_hi - s_lo), 0).to(CT)[:, None]
    at = _partial(k, c, C, FOLD, ADJACENT)
    mask = (k < K * FOLD)[:, None] & (c < C // FOLD)[None, :]
    means = tl.load(partial_ptr + at, mask=mask, other=0.0)
    m2 = tl.load(partial_ptr + tl.cast(K, tl.int64) * C + at, mask=mask, other=0.0)
    total = (tl.cast(M, tl.int64) * S * FOLD).to(CT)
    mean = mean_of(tl.sum(product(n, means), axis=0), total)
    off = tl.where(mask, means - mean[None, :], 0.0)
    more = mean_of(tl.sum(product(n, off), axis=0), total)
    off = tl.where(mask, off - more[None, :], 0.0)
    return mean + more, tl.sum(m2 + n * off * off, axis=0)


@triton.jit
def _rsqrt(v):
    if v.dtype == tl.float64:
        return 1.0 / tl.sqrt(v)
    return tl.rsqrt(v)


@triton.jit
def _settle(mean, m2, M, S, EPS: tl.constexpr, FOLD):
    """1/sqrt(var + eps) and the unbiased variance; rounding must not make a variance negative."""
    count = tl.cast(M, tl.int64) * S * FOLD
    m2 = tl.where(m2 < 0, 0.0, m2)
    return _rsqrt(m2 / count.to(mean.dtype) + EPS), m2 / (count - 1).to(mean.dtype)


@triton.jit
def _track(mean_ptr, var_ptr, c, in_c, mean, unbiased, momentum_hi, momentum_lo):
    """Moves the running statistics. `momentum` comes as two float32 halves, enough for float64."""
    momentum = tl.zeros(mean.shape, dtype=mean.dtype) + momentum_hi + momentum_lo
    old = tl.load(mean_ptr + c, mask=in_c, other=0.0).to(mean.dtype)
    tl.store(mean_ptr + c, (momentum * mean + (1.0 - momentum) * old).to(mean_ptr.dtype.element_ty), mask=in_c)
    old = tl.load(var_ptr + c, mask=in_c, other=0.0).to(mean.dtype)
    tl.store(var_ptr + c, (momentum * unbiased + (1.0 - momentum) * old).to(var_ptr.dtype.element_ty), mask=in_c)


@triton.jit
def _count(count_ptr, first):
    """One more batch, counted by the block of the first channel."""
    if count_ptr is not None:
        if first == 0:
            tl.store(count_ptr, tl.load(count_ptr) + 1)


@triton.jit
def _save(stats_ptr, c, C, mean, inv, bias):
    tl.store(stats_ptr + c, mean, mask=c < C)
    tl.store(stats_ptr + C + c, inv, mask=c < C)
    tl.store(stats_ptr + 2 * tl.cast(C, tl.int64) + c, bias, mask=c < C)


@triton.jit
def _parameter(ptr, c, C, HAS: tl.constexpr, default: tl.constexpr, CT: tl.constexpr):
    if HAS:
        return tl.load(ptr + c, mask=c < C, other=0.0).to(CT)
    return tl.zeros(c.shape, dtype=CT) + default


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def forward_sums(
    x_ptr, partial_ptr, M, C, S_units, rows_per, cols_per, K,
    CT: tl.constexpr, ALIGN: tl.constexpr, ROW: tl.constexpr, GC: tl.constexpr, FOLD: tl.constexpr,
    ADJACENT: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr, U: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Blocks (K * cdiv(C, GC)). `partial_ptr` (2, K, C): mean and M2 of each chunk. Reads x once."""
    S = S_units * ALIGN
    groups = tl.cdiv(C, GC)
    k = tl.program_id(0) // groups
    group = (tl.program_id(0) % groups).to(tl.int64)
    m_lo, m_hi, s_lo, s_hi = _chunk(k, M, S, rows_per, cols_per)
    mean, m2 = _chunk_moments(x_ptr, m_lo, m_hi, s_lo, s_hi, group, C, S, CT, ROW, FOLD, ADJACENT, BM, BJ, U, FULL)
    c = group * GC + tl.arange(0, GC)
    tl.store(partial_ptr + tl.cast(k, tl.int64) * C + c, mean, mask=c < C)
    tl.store(partial_ptr + (tl.cast(K, tl.int64) + k) * C + c, m2, mask=c < C)


@triton.jit(do_not_specialize_on_alignment=["M", "C", "S", "rows_per", "cols_per", "K", "FOLD"])
def forward_combine(
    x_ptr, partial_ptr, bias_ptr, running_mean_ptr, running_var_ptr, count_ptr, stats_ptr, momentum_hi, momentum_lo,
    M, C, S, rows_per, cols_per, K, FOLD,
    CT: tl.constexpr, EPS: tl.constexpr, HAS_BIAS: tl.constexpr, TRACK: tl.constexpr, ADJACENT: tl.constexpr,
    KP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Blocks (cdiv(C / FOLD, BC)): the chunks' moments to `stats_ptr`, and into the running statistics.

    `count_ptr` (), int64 or `None`: batches that these have seen, one more now.
    """
    c = tl.program_id(0).to(tl.int64) * BC + tl.arange(0, BC)
    mean, m2 = _statistics(partial_ptr, K, M, S, C, rows_per, cols_per, c, FOLD, ADJACENT, KP, CT)
    C = C // FOLD
    mean += _origin(x_ptr, c, C, S, FOLD, ADJACENT, CT)
    inv, unbiased = _settle(mean, m2, M, S, EPS, FOLD)
    _save(stats_ptr, c, C, mean, inv, _parameter(bias_ptr, c, C, HAS_BIAS, 0.0, CT))
    if TRACK:
        _track(running_mean_ptr, running_var_ptr, c, c < C, mean, unbiased, momentum_hi, momentum_lo)
        _count(count_ptr, tl.program_id(0))


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def forward_apply(
    x_ptr, res_ptr, weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr, count_ptr, stats_ptr, y_ptr, z_ptr,
    momentum_hi, momentum_lo, M, C, S_units, rows_per, cols_per, K, span,
    CT: tl.constexpr, ACT: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, EPS: tl.constexpr, SOURCE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr, TRACK: tl.constexpr,
    WRITE_Z: tl.constexpr, WRITE_STATS: tl.constexpr, ALIGN: tl.constexpr, ROW: tl.constexpr, GC: tl.constexpr,
    FOLD: tl.constexpr, ADJACENT: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr, FULL: tl.constexpr,
    STAGES: tl.constexpr, SUM_BM: tl.constexpr, SUM_BJ: tl.constexpr, U: tl.constexpr, SUM_FULL: tl.constexpr,
):  # fmt: skip
    """Blocks (K * cdiv(C, GC) times those that share a chunk), each `span` tiles of a chunk, the last ones first.

    Reads x (and residual), writes y (and z).
    """
    S = S_units * ALIGN
    groups = tl.cdiv(C, GC)
    group = (tl.program_id(0) % groups).to(tl.int64)
    k = (tl.program_id(0) // groups) % K
    part = tl.program_id(0) // groups // K
    c = group * GC + tl.arange(0, GC)
    in_c = c < C
    channel, channels = _channel(c, C, FOLD, ADJACENT)
    m_lo, m_hi, s_lo, s_hi = _chunk(k, M, S, rows_per, cols_per)
    bias = _parameter(bias_ptr, channel, channels, HAS_BIAS, 0.0, CT)
    if SOURCE == 0:
        mean = tl.load(stats_ptr + channel, mask=in_c, other=0.0)
        inv = tl.load(stats_ptr + channels + channel, mask=in_c, other=0.0)
    elif SOURCE == 2:
        mean = tl.load(running_mean_ptr + channel, mask=in_c, other=0.0).to(CT)
        inv = _rsqrt(tl.load(running_var_ptr + channel, mask=in_c, other=0.0).to(CT) + EPS)
    else:
        mean, m2 = _chunk_moments(
            x_ptr, m_lo, m_hi, s_lo, s_hi, group, C, S, CT, ROW, FOLD, ADJACENT, SUM_BM, SUM_BJ, U, SUM_FULL
        )  # fmt: skip
        mean += _origin(x_ptr, channel, channels, S, FOLD, ADJACENT, CT)
        inv, unbiased = _settle(mean, m2, M, S, EPS, FOLD)
        if TRACK:
            _track(running_mean_ptr, running_var_ptr, c, in_c, mean, unbiased, momentum_hi, momentum_lo)
            _count(count_ptr, group)
    if WRITE_STATS:
        if k + part == 0:  # of a channel's FOLD columns, the first
            first = tl.where(c % FOLD == 0, channel, channels) if ADJACENT else c
            _save(stats_ptr, first, channels, mean, inv, bias)
    mean = mean[None, :]
    scale = (inv * _parameter(weight_ptr, channel, channels, HAS_WEIGHT, 1.0, CT))[None, :]
    bias = bias[None, :]
    count, across = _tiles(m_lo, m_hi, s_lo, s_hi, BM, BJ, ROW)
    last = count - 1 - part * span
    start, _ = _tile(0, across, m_lo, m_hi, s_lo, s_hi, group, C, S, BM, BJ, ROW)
    for i in tl.range(0, tl.minimum(span, last + 1), num_stages=STAGES):
        if FULL:
            at, mask = _full_tile(last - i, start, C, BM), None
        else:
            at, mask = _tile(last - i, across, m_lo, m_hi, s_lo, s_hi, group, C, S, BM, BJ, ROW)
        x = tl.load(x_ptr + at, mask=mask, eviction_policy=ONCE).to(CT)
        z = (x - mean) * scale + bias
        if HAS_RES:
            z += tl.load(res_ptr + at, mask=mask, eviction_policy=ONCE).to(CT)
        if WRITE_Z:
            tl.store(z_ptr + at, z.to(z_ptr.dtype.element_ty), mask=mask, eviction_policy=ONCE)
        tl.store(y_ptr + at, ACT(z, P0, P1).to(y_ptr.dtype.element_ty), mask=mask, eviction_policy=ONCE)


@triton.jit
def _chunk_gradients(
    g_ptr, x_ptr, kept_ptr, dz_ptr, dx_ptr, mean, scale, bias, m_lo, m_hi, s_lo, s_hi, group, C, S,
    CT: tl.constexpr, ACT: tl.constexpr, GRAD: tl.constexpr, KEEPS_OUTPUT: tl.constexpr, P0: tl.constexpr,
    P1: tl.constexpr, MASK: tl.constexpr, WRITE_DZ: tl.constexpr, WRITE_DX: tl.constexpr, ROW: tl.constexpr,
    BM: tl.constexpr, BJ: tl.constexpr, U: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Sums of dz and of dz * (x - mean) over one chunk."""
    # a second pass, where there is one, reads x and either the dz written here or what it is made of
    X: tl.constexpr = ONCE if WRITE_DX else AGAIN
    G: tl.constexpr = ONCE if WRITE_DX or WRITE_DZ else AGAIN
    count, across = _tiles(m_lo, m_hi, s_lo, s_hi, BM, BJ, ROW)
    start, _ = _tile(0, across, m_lo, m_hi, s_lo, s_hi, group, C, S, BM, BJ, ROW)
    sum_dz = tl.zeros((BM, BJ), dtype=CT)
    sum_dz_x = tl.zeros((BM, BJ), dtype=CT)
    for q in range(0, count, U):
        for u in tl.static_range(U):
            if FULL:
                at, mask = _full_tile(q + u, start, C, BM), None
            else:
                at, mask = _tile(q + u, across, m_lo, m_hi, s_lo, s_hi, group, C, S, BM, BJ, ROW)
            g = tl.load(g_ptr + at, mask=mask, eviction_policy=G).to(CT)
            x = tl.load(x_ptr + at, mask=mask, eviction_policy=X).to(CT) - mean
            kept = g
            if MASK == 2:
                kept = tl.load(kept_ptr + at, mask=mask, eviction_policy=G).to(CT)
            dz = _grad_z(g, x, kept, scale, bias, MASK, ACT, GRAD, KEEPS_OUTPUT, P0, P1)
            if not FULL:  # lanes past the edge hold anything
                dz = tl.where(mask, dz, 0.0)
                x = tl.where(mask, x, 0.0)
            if WRITE_DZ:
                tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=mask, eviction_policy=X)
            if WRITE_DX:
                dx = (dz * scale).to(dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + at, dx, mask=mask, eviction_policy=ONCE)
            sum_dz += dz
            sum_dz_x += dz * x
    return _over_tile(sum_dz, ROW), _over_tile(sum_dz_x, ROW)


@triton.jit
def _coefficients(stats_ptr, weight_ptr, c, C, HAS_WEIGHT: tl.constexpr, CT: tl.constexpr, FOLD: tl.constexpr,
                  ADJACENT: tl.constexpr):  # fmt: skip
    """mean, inv, bias and inv * weight of columns c."""
    in_c = c < C
    channel, channels = _channel(c, C, FOLD, ADJACENT)
    mean = tl.load(stats_ptr + channel, mask=in_c, other=0.0)
    inv = tl.load(stats_ptr + channels + channel, mask=in_c, other=0.0)
    bias = tl.load(stats_ptr + 2 * tl.cast(channels, tl.int64) + channel, mask=in_c, other=0.0)
    return mean, inv, bias, inv * _parameter(weight_ptr, channel, channels, HAS_WEIGHT, 1.0, CT)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def backward_sums(
    g_ptr, x_ptr, kept_ptr, weight_ptr, stats_ptr, dz_ptr, dx_ptr, partial_ptr,
    M, C, S_units, rows_per, cols_per, K,
    CT: tl.constexpr, ACT: tl.constexpr, GRAD: tl.constexpr, KEEPS_OUTPUT: tl.constexpr, P0: tl.constexpr,
    P1: tl.constexpr, MASK: tl.constexpr, HAS_WEIGHT: tl.constexpr, WRITE_DZ: tl.constexpr, WRITE_DX: tl.constexpr,
    ALIGN: tl.constexpr, ROW: tl.constexpr, GC: tl.constexpr, FOLD: tl.constexpr, ADJACENT: tl.constexpr,
    BM: tl.constexpr, BJ: tl.constexpr, U: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Blocks (K * cdiv(C, GC)). `partial_ptr` (2, K, C): sums of dz, then of dz * (x - mean).

    Reads grad and x (and what was kept); writes dz, the residual's gradient, where there is one. With running
    statistics dx needs no sums and is written here.
    """
    S = S_units * ALIGN
    groups = tl.cdiv(C, GC)
    k = tl.program_id(0) // groups
    group = (tl.program_id(0) % groups).to(tl.int64)
    c = group * GC + tl.arange(0, GC)
    in_c = c < C
    mean, _, bias, scale = _coefficients(stats_ptr, weight_ptr, c, C, HAS_WEIGHT, CT, FOLD, ADJACENT)
    m_lo, m_hi, s_lo, s_hi = _chunk(k, M, S, rows_per, cols_per)
    sum_dz, sum_dz_x = _chunk_gradients(
        g_ptr, x_ptr, kept_ptr, dz_ptr, dx_ptr, mean[None, :], scale[None, :], bias[None, :], m_lo, m_hi, s_lo, s_hi,
        group, C, S, CT, ACT, GRAD, KEEPS_OUTPUT, P0, P1, MASK, WRITE_DZ, WRITE_DX, ROW, BM, BJ, U, FULL,
    )  # fmt: skip
    tl.store(partial_ptr + tl.cast(k, tl.int64) * C + c, sum_dz, mask=in_c)
    tl.store(partial_ptr + (tl.cast(K, tl.int64) + k) * C + c, sum_dz_x, mask=in_c)


@triton.jit
def _total(partial_ptr, K, C, c, FOLD, ADJACENT: tl.constexpr, KP: tl.constexpr):
    """Both sums of channels c over all K chunks."""
    k = tl.arange(0, KP)
    at = _partial(k, c, C, FOLD, ADJACENT)
    mask = (k < K * FOLD)[:, None] & (c < C // FOLD)[None, :]
    first = tl.sum(tl.load(partial_ptr + at, mask=mask, other=0.0), axis=0)
    return first, tl.sum(tl.load(partial_ptr + tl.cast(K, tl.int64) * C + at, mask=mask, other=0.0), axis=0)


@triton.jit
def _parameter_gradients(dweight_ptr, dbias_ptr, c, C, sum_dz, sum_dz_x, inv, DWEIGHT: tl.constexpr,
                         DBIAS: tl.constexpr):  # fmt: skip
    if DWEIGHT:
        tl.store(dweight_ptr + c, (sum_dz_x * inv).to(dweight_ptr.dtype.element_ty), mask=c < C)
    if DBIAS:
        tl.store(dbias_ptr + c, sum_dz.to(dbias_ptr.dtype.element_ty), mask=c < C)


@triton.jit(do_not_specialize_on_alignment=["C", "K", "FOLD"])
def backward_combine(
    partial_ptr, stats_ptr, sums_ptr, dweight_ptr, dbias_ptr, C, K, FOLD,
    WRITE_SUMS: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, ADJACENT: tl.constexpr, KP: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Blocks (cdiv(C / FOLD, BC)): the chunks' sums to `sums_ptr` (2, C / FOLD), and the parameters' gradients."""
    c = tl.program_id(0).to(tl.int64) * BC + tl.arange(0, BC)
    sum_dz, sum_dz_x = _total(partial_ptr, K, C, c, FOLD, ADJACENT, KP)
    C = C // FOLD
    inv = tl.load(stats_ptr + C + c, mask=c < C, other=0.0)
    _parameter_gradients(dweight_ptr, dbias_ptr, c, C, sum_dz, sum_dz_x, inv, DWEIGHT, DBIAS)
    if WRITE_SUMS:
        tl.store(sums_ptr + c, sum_dz, mask=c < C)
        tl.store(sums_ptr + C + c, sum_dz_x, mask=c < C)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def backward_apply(
    g_ptr, x_ptr, kept_ptr, weight_ptr, stats_ptr, sums_ptr, dx_ptr, dres_ptr, dweight_ptr, dbias_ptr,
    M, C, S_units, rows_per, cols_per, K, span,
    CT: tl.constexpr, ACT: tl.constexpr, GRAD: tl.constexpr, KEEPS_OUTPUT: tl.constexpr, P0: tl.constexpr,
    P1: tl.constexpr, MASK: tl.constexpr, SOURCE: tl.constexpr, HAS_WEIGHT: tl.constexpr, DRES: tl.constexpr,
    DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, ALIGN: tl.constexpr, ROW: tl.constexpr, GC: tl.constexpr,
    FOLD: tl.constexpr, ADJACENT: tl.constexpr, BM: tl.constexpr, BJ: tl.constexpr, FULL: tl.constexpr,
    STAGES: tl.constexpr, SUM_BM: tl.constexpr, SUM_BJ: tl.constexpr, U: tl.constexpr, SUM_FULL: tl.constexpr,
):  # fmt: skip
    """Blocks as in `forward_apply`. `sums_ptr` (2, C / FOLD): of dz and of dz * (x - mean), with SAVED; with OWN a
    block takes its own, and writes the parameters' gradients.

    Reads grad (or dz, with MASK 0) and x (and what was kept), writes dx (and the residual's gradient).
    """
    S = S_units * ALIGN
    groups = tl.cdiv(C, GC)
    group = (tl.program_id(0) % groups).to(tl.int64)
    k = (tl.program_id(0) // groups) % K
    part = tl.program_id(0) // groups // K
    c = group * GC + tl.arange(0, GC)
    in_c = c < C
    channel, channels = _channel(c, C, FOLD, ADJACENT)
    mean, inv, bias, scale = _coefficients(stats_ptr, weight_ptr, c, C, HAS_WEIGHT, CT, FOLD, ADJACENT)
    bias = bias[None, :]
    m_lo, m_hi, s_lo, s_hi = _chunk(k, M, S, rows_per, cols_per)
    if SOURCE == 0:
        sum_dz = tl.load(sums_ptr + channel, mask=in_c, other=0.0)
        sum_dz_x = tl.load(sums_ptr + channels + channel, mask=in_c, other=0.0)
    else:
        sum_dz, sum_dz_x = _chunk_gradients(
            g_ptr, x_ptr, kept_ptr, dx_ptr, dx_ptr, mean[None, :], scale[None, :], bias, m_lo, m_hi, s_lo, s_hi,
            group, C, S, CT, ACT, GRAD, KEEPS_OUTPUT, P0, P1, MASK, False, False, ROW, SUM_BM, SUM_BJ, U, SUM_FULL,
        )  # fmt: skip
        _parameter_gradients(dweight_ptr, dbias_ptr, c, channels, sum_dz, sum_dz_x, inv, DWEIGHT, DBIAS)
    n = (tl.cast(M, tl.int64) * S * FOLD).to(CT)
    along_one = (sum_dz / n)[None, :]
    along_x = (sum_dz_x / n * inv * inv)[None, :]
    mean = mean[None, :]
    scale = scale[None, :]
    count, across = _tiles(m_lo, m_hi, s_lo, s_hi, BM, BJ, ROW)
    last = count - 1 - part * span
    start, _ = _tile(0, across, m_lo, m_hi, s_lo, s_hi, group, C, S, BM, BJ, ROW)
    for i in tl.range(0, tl.minimum(span, last + 1), num_stages=STAGES):
        if FULL:
            at, mask = _full_tile(last - i, start, C, BM), None
        else:
            at, mask = _tile(last - i, across, m_lo, m_hi, s_lo, s_hi, group, C, S, BM, BJ, ROW)
        dz = tl.load(g_ptr + at, mask=mask, eviction_policy=ONCE).to(CT)
        x = tl.load(x_ptr + at, mask=mask, eviction_policy=ONCE).to(CT) - mean
        if MASK != 0:
            kept = dz
            if MASK == 2:
                kept = tl.load(kept_ptr + at, mask=mask, eviction_policy=ONCE).to(CT)
            dz = _grad_z(dz, x, kept, scale, bias, MASK, ACT, GRAD, KEEPS_OUTPUT, P0, P1)
        if DRES:
            tl.store(dres_ptr + at, dz.to(dres_ptr.dtype.element_ty), mask=mask, eviction_policy=ONCE)
        dx = (dz - along_one - x * along_x) * scale
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask, eviction_policy=ONCE)
