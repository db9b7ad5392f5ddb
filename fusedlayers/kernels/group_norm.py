"""`y = act(group_norm(x))`, forward and backward, over dense memory.

An entity is one channel of one sample, e = n * C + c; E = N * C of them with S positions each, D channels to a group,
so that entity e lies in group e // D. In memory `x` is `(E, S)` ("row", NCHW) or `(N, S, C)` ("col", channels_last).

A group that fits a block's registers is read once (`forward_resident`, `backward_resident`; row only). Else
`forward_moments` takes mean and M2 of every entity in K chunks of its positions, `forward_combine` those of a group,
and `forward_apply` reads x again, from the L2 where it fits. Backward likewise: sums of dz and dz * xhat of every
entity and chunk, combined into groups for dx, and over samples (`reduce.finish`) for the parameters' gradients.
No atomics: every run gives the same bits.

`stats_ptr`, compute dtype: mean (E / D), 1/sqrt(var + eps) (E / D), then forward's private copy of the bias (C), which
a user may edit before backward.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .affine import _grad_z
from .batch_norm import _rsqrt, _visits
from .launch import COUNTS
from .reduce import mean_of, product


@triton.jit
def _entities(pid, C, E, BE: tl.constexpr, ROW: tl.constexpr):
    """The block's entities, their mask, and which sample they are of ("col" only)."""
    if ROW:
        e = pid.to(tl.int64) * BE + tl.arange(0, BE)
        return e, e < E, pid.to(tl.int64) * 0
    else:
        tiles = tl.cdiv(C, BE)
        n = (pid // tiles).to(tl.int64)
        c = (pid % tiles) * BE + tl.arange(0, BE)
        return n * C + c, c < C, n


@triton.jit
def _at(e, in_e, n, s, end, C, S, ROW: tl.constexpr):
    """Offsets and mask of positions s of the entities, as a tile."""
    if ROW:
        return e[:, None] * S + s[None, :], in_e[:, None] & (s < end)[None, :]
    else:
        return (n * S + s)[:, None] * C + (e - n * C)[None, :], (s < end)[:, None] & in_e[None, :]


@triton.jit
def _wide(v, ROW: tl.constexpr):
    """A value an entity, as a tile that broadcasts."""
    return v[:, None] if ROW else v[None, :]


@triton.jit
def _over_positions(v, ROW: tl.constexpr):
    return tl.sum(v, axis=1 if ROW else 0)


@triton.jit
def _parameters(weight_ptr, bias_ptr, c, mask, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CT: tl.constexpr):
    weight = tl.zeros(c.shape, dtype=CT) + 1.0
    bias = tl.zeros(c.shape, dtype=CT)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + c, mask=mask, other=0.0).to(CT)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + c, mask=mask, other=0.0).to(CT)
    return weight, bias


@triton.jit
def _resident(pid, E, S, D, BG: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr):
    """Groups, entities and offsets of a block that holds BG whole groups, each padded to BD channels."""
    row = tl.arange(0, BG * BD)
    first = pid.to(tl.int64) * BG
    e = (first + row // BD) * D + row % BD
    in_e = (row % BD < D) & (e < E)
    s = tl.arange(0, BS)
    group = first + tl.arange(0, BG)
    return group, e, in_e, e[:, None] * S + s[None, :], in_e[:, None] & (s < S)[None, :]


@triton.jit
def _over_group(v, BG: tl.constexpr, BD: tl.constexpr):
    """Sum of a value an entity, `(BG * BD,)`, over its group, given back to each of them, `(BG, BD)`."""
    return tl.sum(tl.reshape(v, (BG, BD)), axis=1)


@triton.jit
def _to_entities(v, BG: tl.constexpr, BD: tl.constexpr):
    """A value a group, `(BG,)`, as one an entity, `(BG * BD,)`."""
    return tl.reshape(tl.broadcast_to(v[:, None], (BG, BD)), (BG * BD,))


@triton.jit
def forward_resident(
    x_ptr, weight_ptr, bias_ptr, stats_ptr, y_ptr, E, C, S_units, D,
    CT: tl.constexpr, ACT: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, EPS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, WRITE_STATS: tl.constexpr, ALIGN: tl.constexpr,
    BG: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Blocks (cdiv(groups, BG)). Reads x once, writes y once."""
    S = S_units * ALIGN
    group, e, in_e, at, mask = _resident(tl.program_id(0), E, S, D, BG, BD, BS)
    weight, bias = _parameters(weight_ptr, bias_ptr, e % C, in_e, HAS_WEIGHT, HAS_BIAS, CT)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(CT)
    count = (tl.cast(D, tl.int64) * S).to(CT)
    mean = mean_of(_over_group(tl.sum(x, axis=1), BG, BD), count)
    off = tl.where(mask, x - _to_entities(mean, BG, BD)[:, None], 0.0)
    more = mean_of(_over_group(tl.sum(off, axis=1), BG, BD), count)  # what rounding left of the mean
    off = tl.where(mask, off - _to_entities(more, BG, BD)[:, None], 0.0)
    inv = _rsqrt(_over_group(tl.sum(product(off, off), axis=1), BG, BD) / count + EPS)
    scale = _to_entities(inv, BG, BD) * weight
    y = ACT(off * scale[:, None] + bias[:, None], P0, P1)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    if WRITE_STATS:
        groups = E // D
        tl.store(stats_ptr + group, mean + more, mask=group < groups)
        tl.store(stats_ptr + tl.cast(groups, tl.int64) + group, inv, mask=group < groups)
        tl.store(stats_ptr + 2 * tl.cast(groups, tl.int64) + e, bias, mask=in_e & (e < C))


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def forward_moments(
    x_ptr, partial_ptr, E, C, S_units, per_chunk, K,
    CT: tl.constexpr, ROW: tl.constexpr, ALIGN: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Blocks (entity tiles * K). `partial_ptr` (3, K, E), of each chunk: its first value, the mean less that, and M2.

    As in the batch norm, each lane sums deviations from its own first value, and lanes combine by Chan's formula.
    The two parts of a mean stay apart: rounded to one, they would be rounded again when the group's is made of them.
    Reads x once.
    """
    S = S_units * ALIGN
    k = tl.program_id(0) % K
    e, in_e, n = _entities(tl.program_id(0) // K, C, E, BE, ROW)
    lo = k.to(tl.int64) * per_chunk
    hi = tl.minimum(lo + per_chunk, S)
    at, mask = _at(e, in_e, n, lo + tl.arange(0, BS), hi, C, S, ROW)
    origin = tl.load(x_ptr + at, mask=mask, other=0.0).to(CT)
    s1 = tl.zeros(origin.shape, dtype=CT)
    s2 = tl.zeros(origin.shape, dtype=CT)
    for start in range(lo, hi, BS):
        at, mask = _at(e, in_e, n, start + tl.arange(0, BS), hi, C, S, ROW)
        d = tl.where(mask, tl.load(x_ptr + at, mask=mask, other=0.0).to(CT) - origin, 0.0)
        s1 += d
        s2 += d * d
    visits = _visits(hi - lo, BS, CT)
    visits = visits[None, :] if ROW else visits[:, None]
    at, mask = _at(e, in_e, n, lo + tl.arange(0, 1), hi, C, S, ROW)
    first = tl.load(x_ptr + at, mask=mask, other=0.0).to(CT)
    share = s1 / tl.maximum(visits, 1.0)
    lane = tl.where(visits > 0, origin - first + share, 0.0)
    mean = _over_positions(visits * lane, ROW) / (hi - lo).to(CT)
    off = lane - _wide(mean, ROW)
    m2 = _over_positions(s2 - s1 * share + visits * off * off, ROW)
    at = partial_ptr + k.to(tl.int64) * E + e
    step = tl.cast(K, tl.int64) * E
    tl.store(at, _over_positions(first, ROW), mask=in_e)
    tl.store(at + step, mean, mask=in_e)
    tl.store(at + 2 * step, m2, mask=in_e)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def forward_combine(
    partial_ptr, bias_ptr, stats_ptr, E, C, S, D, per_chunk, K,
    CT: tl.constexpr, EPS: tl.constexpr, HAS_BIAS: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Blocks (groups): the moments of a group from its K * D partial ones, to `stats_ptr`."""
    group = tl.program_id(0).to(tl.int64)
    groups = tl.num_programs(0).to(tl.int64)
    step = tl.cast(K, tl.int64) * E
    first = tl.load(partial_ptr + group * D)
    total = tl.zeros((BI,), dtype=CT)
    for start in range(0, K * D, BI):
        i = start + tl.arange(0, BI)
        k = (i // D).to(tl.int64)
        n = tl.minimum(S - k * per_chunk, per_chunk).to(CT)
        at = partial_ptr + k * E + group * D + i % D
        off = tl.load(at, mask=i < K * D, other=0.0) - first + tl.load(at + step, mask=i < K * D, other=0.0)
        total += tl.where(i < K * D, n * off, 0.0)
    count = (tl.cast(D, tl.int64) * S).to(CT)
    shift = mean_of(tl.sum(total, axis=0), count)
    total = tl.zeros((BI,), dtype=CT)
    for start in range(0, K * D, BI):
        i = start + tl.arange(0, BI)
        k = (i // D).to(tl.int64)
        n = tl.minimum(S - k * per_chunk, per_chunk).to(CT)
        at = partial_ptr + k * E + group * D + i % D
        off = tl.load(at, mask=i < K * D, other=0.0) - first + tl.load(at + step, mask=i < K * D, other=0.0) - shift
        m2 = tl.load(at + 2 * step, mask=i < K * D, other=0.0)
        total += tl.where(i < K * D, m2 + n * off * off, 0.0)
    m2 = tl.sum(total, axis=0)
    m2 = tl.where(m2 < 0, 0.0, m2)  # rounding
    tl.store(stats_ptr + group, first + shift)
    tl.store(stats_ptr + groups + group, _rsqrt(m2 / count + EPS))
    if group * D < C:
        for start in range(0, D, BI):
            c = start + tl.arange(0, BI)
            bias = tl.zeros((BI,), dtype=CT)
            if HAS_BIAS:
                bias = tl.load(bias_ptr + group * D + c, mask=c < D, other=0.0).to(CT)
            tl.store(stats_ptr + 2 * groups + group * D + c, bias, mask=c < D)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def forward_apply(
    x_ptr, weight_ptr, stats_ptr, y_ptr, E, C, S_units, D, per_block, blocks,
    CT: tl.constexpr, ACT: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ROW: tl.constexpr, ALIGN: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Blocks (entity tiles * blocks), each `per_block` positions. Reads x, writes y."""
    S = S_units * ALIGN
    k = tl.program_id(0) % blocks
    e, in_e, n = _entities(tl.program_id(0) // blocks, C, E, BE, ROW)
    groups = tl.cast(E // D, tl.int64)
    mean = tl.load(stats_ptr + e // D, mask=in_e, other=0.0)
    inv = tl.load(stats_ptr + groups + e // D, mask=in_e, other=0.0)
    weight, bias = _parameters(weight_ptr, stats_ptr + 2 * groups, e % C, in_e, HAS_WEIGHT, True, CT)
    scale = _wide(inv * weight, ROW)
    lo = k.to(tl.int64) * per_block
    hi = tl.minimum(lo + per_block, S)
    for start in range(lo, hi, BS):
        at, mask = _at(e, in_e, n, start + tl.arange(0, BS), hi, C, S, ROW)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(CT)
        y = ACT((x - _wide(mean, ROW)) * scale + _wide(bias, ROW), P0, P1)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_resident(
    g_ptr, x_ptr, weight_ptr, stats_ptr, dx_ptr, partial_ptr, E, C, S_units, D,
    CT: tl.constexpr, ACT: tl.constexpr, GRAD: tl.constexpr, KEEPS_OUTPUT: tl.constexpr, P0: tl.constexpr,
    P1: tl.constexpr, MASK: tl.constexpr, HAS_WEIGHT: tl.constexpr, NEED_DX: tl.constexpr, SUMS: tl.constexpr,
    ALIGN: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Blocks (cdiv(groups, BG)). `partial_ptr` (2, 1, E): sums of dz, then of dz * xhat, of each entity.

    Reads grad and x once, writes dx once.
    """
    S = S_units * ALIGN
    group, e, in_e, at, mask = _resident(tl.program_id(0), E, S, D, BG, BD, BS)
    groups = tl.cast(E // D, tl.int64)
    mean = _to_entities(tl.load(stats_ptr + group, mask=group < groups, other=0.0), BG, BD)
    inv = _to_entities(tl.load(stats_ptr + groups + group, mask=group < groups, other=0.0), BG, BD)
    weight, bias = _parameters(weight_ptr, stats_ptr + 2 * groups, e % C, in_e, HAS_WEIGHT, True, CT)
    g = tl.load(g_ptr + at, mask=mask, other=0.0).to(CT)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(CT)
    normed = tl.where(mask, (x - mean[:, None]) * inv[:, None], 0.0)
    dz = _grad_z(g, normed, g, weight[:, None], bias[:, None], MASK, ACT, GRAD, KEEPS_OUTPUT, P0, P1)
    dz = tl.where(mask, dz, 0.0)
    sum_dz = tl.sum(dz, axis=1)
    sum_dz_x = tl.sum(product(dz, normed), axis=1)
    if SUMS:
        tl.store(partial_ptr + e, sum_dz, mask=in_e)
        tl.store(partial_ptr + tl.cast(E, tl.int64) + e, sum_dz_x, mask=in_e)
    if NEED_DX:
        count = (tl.cast(D, tl.int64) * S).to(CT)
        along_one = _to_entities(_over_group(product(sum_dz, weight), BG, BD) / count, BG, BD)
        along_x = _to_entities(_over_group(product(sum_dz_x, weight), BG, BD) / count, BG, BD)
        dx = (dz * weight[:, None] - along_one[:, None] - normed * along_x[:, None]) * inv[:, None]
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def backward_sums(
    g_ptr, x_ptr, weight_ptr, stats_ptr, partial_ptr, E, C, S_units, D, per_chunk, K,
    CT: tl.constexpr, ACT: tl.constexpr, GRAD: tl.constexpr, KEEPS_OUTPUT: tl.constexpr, P0: tl.constexpr,
    P1: tl.constexpr, MASK: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROW: tl.constexpr, ALIGN: tl.constexpr,
    BE: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Blocks (entity tiles * K). `partial_ptr` (2, K, E): sums of dz, then of dz * xhat. Reads grad and x once."""
    S = S_units * ALIGN
    k = tl.program_id(0) % K
    e, in_e, n = _entities(tl.program_id(0) // K, C, E, BE, ROW)
    groups = tl.cast(E // D, tl.int64)
    mean = _wide(tl.load(stats_ptr + e // D, mask=in_e, other=0.0), ROW)
    inv = _wide(tl.load(stats_ptr + groups + e // D, mask=in_e, other=0.0), ROW)
    weight, bias = _parameters(weight_ptr, stats_ptr + 2 * groups, e % C, in_e, HAS_WEIGHT, True, CT)
    weight, bias = _wide(weight, ROW), _wide(bias, ROW)
    lo = k.to(tl.int64) * per_chunk
    hi = tl.minimum(lo + per_chunk, S)
    if ROW:
        sum_dz = tl.zeros((BE, BS), dtype=CT)
        sum_dz_x = tl.zeros((BE, BS), dtype=CT)
    else:
        sum_dz = tl.zeros((BS, BE), dtype=CT)
        sum_dz_x = tl.zeros((BS, BE), dtype=CT)
    for start in range(lo, hi, BS):
        at, mask = _at(e, in_e, n, start + tl.arange(0, BS), hi, C, S, ROW)
        g = tl.load(g_ptr + at, mask=mask, other=0.0).to(CT)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(CT)
        normed = tl.where(mask, (x - mean) * inv, 0.0)
        dz = tl.where(mask, _grad_z(g, normed, g, weight, bias, MASK, ACT, GRAD, KEEPS_OUTPUT, P0, P1), 0.0)
        sum_dz += dz
        sum_dz_x += dz * normed
    tl.store(partial_ptr + k.to(tl.int64) * E + e, _over_positions(sum_dz, ROW), mask=in_e)
    tl.store(partial_ptr + (tl.cast(K, tl.int64) + k) * E + e, _over_positions(sum_dz_x, ROW), mask=in_e)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def backward_combine(
    partial_ptr, weight_ptr, sums_ptr, E, C, S, D, K,
    CT: tl.constexpr, HAS_WEIGHT: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Blocks (groups). `sums_ptr` (2, groups): means over a group of dz * weight, then of dz * weight * xhat."""
    group = tl.program_id(0).to(tl.int64)
    along_one = tl.zeros((BI,), dtype=CT)
    along_x = tl.zeros((BI,), dtype=CT)
    for start in range(0, K * D, BI):
        i = start + tl.arange(0, BI)
        e = group * D + i % D
        weight, _ = _parameters(weight_ptr, weight_ptr, e % C, i < K * D, HAS_WEIGHT, False, CT)
        at = (i // D).to(tl.int64) * E + e
        along_one += weight * tl.load(partial_ptr + at, mask=i < K * D, other=0.0)
        along_x += weight * tl.load(partial_ptr + tl.cast(K, tl.int64) * E + at, mask=i < K * D, other=0.0)
    count = (tl.cast(D, tl.int64) * S).to(CT)
    tl.store(sums_ptr + group, tl.sum(along_one, axis=0) / count)
    tl.store(sums_ptr + tl.num_programs(0) + group, tl.sum(along_x, axis=0) / count)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def backward_apply(
    g_ptr, x_ptr, weight_ptr, stats_ptr, sums_ptr, dx_ptr, E, C, S_units, D, per_block, blocks,
    CT: tl.constexpr, ACT: tl.constexpr, GRAD: tl.constexpr, KEEPS_OUTPUT: tl.constexpr, P0: tl.constexpr,
    P1: tl.constexpr, MASK: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROW: tl.constexpr, ALIGN: tl.constexpr,
    BE: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Blocks (entity tiles * blocks), each `per_block` positions. Reads grad and x again, writes dx."""
    S = S_units * ALIGN
    k = tl.program_id(0) % blocks
    e, in_e, n = _entities(tl.program_id(0) // blocks, C, E, BE, ROW)
    groups = tl.cast(E // D, tl.int64)
    mean = _wide(tl.load(stats_ptr + e // D, mask=in_e, other=0.0), ROW)
    inv = _wide(tl.load(stats_ptr + groups + e // D, mask=in_e, other=0.0), ROW)
    along_one = _wide(tl.load(sums_ptr + e // D, mask=in_e, other=0.0), ROW)
    along_x = _wide(tl.load(sums_ptr + groups + e // D, mask=in_e, other=0.0), ROW)
    weight, bias = _parameters(weight_ptr, stats_ptr + 2 * groups, e % C, in_e, HAS_WEIGHT, True, CT)
    weight, bias = _wide(weight, ROW), _wide(bias, ROW)
    lo = k.to(tl.int64) * per_block
    hi = tl.minimum(lo + per_block, S)
    for start in range(lo, hi, BS):
        at, mask = _at(e, in_e, n, start + tl.arange(0, BS), hi, C, S, ROW)
        g = tl.load(g_ptr + at, mask=mask, other=0.0).to(CT)
        normed = (tl.load(x_ptr + at, mask=mask, other=0.0).to(CT) - mean) * inv
        dz = _grad_z(g, normed, g, weight, bias, MASK, ACT, GRAD, KEEPS_OUTPUT, P0, P1)
        dx = (dz * weight - along_one - normed * along_x) * inv
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
