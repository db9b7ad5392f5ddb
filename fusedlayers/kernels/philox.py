"""Philox4x32-10, and the order in which torch's CUDA dropout hands its numbers to the elements of a tensor.

The generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). cuRAND's state is a key (the
seed) and a 128-bit counter: the low half counts calls (the generator's offset, in fours), the high half is the
subsequence, one a thread. Each call gives four 32-bit words.

torch starts `threads` threads. Each takes vectors of `VEC` elements that follow each other in memory, thread by
thread, and all come round again `threads * VEC` elements later; a call serves four elements of a vector, and with two
elements a vector half of it is wasted. Without vectors (`VEC = 1`) a call serves the elements at distance `threads`.

`keep_tile` computes the same decision from an element's place alone, so forward and backward need no stored mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The kernels' DROP: none, torch's own mask, or one Philox call of seven rounds for eight elements
OFF, EAGER, FAST = 0, 1, 2

# What differs from call to call or with the size of a mask
DRAWN = ["seed_low", "seed_high", "offset_low", "offset_high", "threshold", "threads"]


@triton.jit
def philox(k0, k1, c0, c1, c2, c3, ROUNDS: tl.constexpr):
    """Four uint32 words for a key and a counter of uint32 words."""
    for _ in tl.static_range(ROUNDS):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = b.to(tl.uint32)
        c3 = a.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _four(a, b, c, d):
    """(M, N) each -> (M, 4N): a, b, c, d of each place next to each other."""
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(a.shape[0], 4 * a.shape[1])


@triton.jit
def _eight(a, b, c, d, e, f, g, h):
    """Likewise, (M, 8N)."""
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.join(even, odd).reshape(a.shape[0], 8 * a.shape[1])


@triton.jit
def _pick(a, b, c, d, which):
    return tl.where(which < 2, tl.where(which == 0, a, b), tl.where(which == 2, c, d))


@triton.jit
def _eager_groups(first, k0, k1, calls, threads, VEC: tl.constexpr, BN: tl.constexpr):
    """Words for BN elements from every `first` (BM,), a multiple of VEC, 4 or 8. One call for four."""
    vector = first // VEC
    lap = vector // threads
    # a tile's row is shorter than a lap, so it passes its end once at most: one division a row, none a vector
    thread = (vector % threads).to(tl.int32)[:, None] + tl.arange(0, BN // VEC)[None, :]
    over = thread >= threads.to(tl.int32)
    thread = tl.where(over, thread - threads.to(tl.int32), thread).to(tl.uint32)
    call = calls + (lap.to(tl.int64)[:, None] + over.to(tl.int64)) * (VEC // 4)
    zero = tl.zeros_like(thread)
    a, b, c, d = philox(k0, k1, call.to(tl.uint32), (call >> 32).to(tl.uint32), thread, zero, 10)
    if VEC == 4:
        words = _four(a, b, c, d)
    else:
        call += 1
        e, f, g, h = philox(k0, k1, call.to(tl.uint32), (call >> 32).to(tl.uint32), thread, zero, 10)
        words = _eight(a, b, c, d, e, f, g, h)
    return words


@triton.jit
def _eager_single(at, k0, k1, calls, threads, VEC: tl.constexpr):
    """The word for each element `at`, by a call of its own."""
    if VEC == 1:
        thread = at % threads
        turn = at // threads
        call = calls + (turn // 4).to(tl.int64)
        which = turn % 4
    else:
        vector = at // VEC
        thread = vector % threads
        PER: tl.constexpr = (VEC + 3) // 4
        call = calls + (vector // threads).to(tl.int64) * PER + ((at % VEC) // 4).to(tl.int64)
        which = at % VEC % 4
    low, high = call.to(tl.uint32), (call >> 32).to(tl.uint32)
    a, b, c, d = philox(k0, k1, low, high, thread.to(tl.uint32), tl.zeros_like(low), 10)
    return _pick(a, b, c, d, which)


@triton.jit
def _fast_groups(first, k0, k1, calls, BN: tl.constexpr):
    """16-bit numbers for BN elements from every `first`, a multiple of 8. One call for eight."""
    group = (first // 8).to(tl.int64)[:, None] + tl.arange(0, BN // 8)[None, :]
    low, high = group.to(tl.uint32), (group >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    a, b, c, d = philox(k0, k1, calls.to(tl.uint32) + zero, (calls >> 32).to(tl.uint32) + zero, low, high, 7)
    words = _four(a, b, c, d)
    return tl.join(words & 0xFFFF, words >> 16).reshape(words.shape[0], 2 * words.shape[1])


@triton.jit
def _fast_single(at, k0, k1, calls):
    group = (at // 8).to(tl.int64)
    low, high = group.to(tl.uint32), (group >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    a, b, c, d = philox(k0, k1, calls.to(tl.uint32) + zero, (calls >> 32).to(tl.uint32) + zero, low, high, 7)
    lane = at % 8
    return (_pick(a, b, c, d, lane // 2) >> ((lane % 2) * 16).to(tl.uint32)) & 0xFFFF


@triton.jit
def state(seed_ptr, offset_ptr, seed_low, seed_high, offset_low, offset_high, FROM_MEMORY: tl.constexpr):
    """Key words and the number of calls before this one, from `seed_ptr`, `offset_ptr` int64, or from int32 words."""
    if FROM_MEMORY:
        seed = tl.load(seed_ptr)
        offset = tl.load(offset_ptr)
        k0 = seed.to(tl.uint32)
        k1 = (seed >> 32).to(tl.uint32)
    else:
        k0 = tl.cast(seed_low, tl.int32).to(tl.uint32, bitcast=True)
        k1 = tl.cast(seed_high, tl.int32).to(tl.uint32, bitcast=True)
        low = tl.cast(offset_low, tl.int32).to(tl.uint32, bitcast=True).to(tl.int64)
        offset = (tl.cast(offset_high, tl.int32).to(tl.int64) << 32) | low
    return k0, k1, offset >> 2


@triton.jit
def keep_tile(row, N, first_col, k0, k1, calls, threshold, threads, DROP: tl.constexpr, VEC: tl.constexpr,
              GROUPED: tl.constexpr, WIDE: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Whether each element of a tile is kept: rows `row` (BM,) of N elements, columns from `first_col` on. (BM, BN).

    GROUPED: N and `first_col` are multiples of VEC, which is 4 or 8; for FAST, 8.
    WIDE: places do not fit 32 bits.
    """
    first = row.to(tl.int64) * N + first_col
    limit = tl.cast(threshold, tl.int32).to(tl.uint32, bitcast=True)
    if WIDE:
        lap = tl.cast(threads, tl.int64)
    else:
        first = first.to(tl.uint32)
        lap = tl.cast(threads, tl.uint32)
    if GROUPED:
        if DROP == 1:
            word = _eager_groups(first, k0, k1, calls, lap, VEC, BN)
        else:
            word = _fast_groups(first, k0, k1, calls, BN)
    else:
        at = first[:, None] + tl.arange(0, BN).to(first.dtype)[None, :]
        if DROP == 1:
            word = _eager_single(at, k0, k1, calls, lap, VEC)
        else:
            word = _fast_single(at, k0, k1, calls)
    return word < limit
