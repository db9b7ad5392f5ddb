"""How a batch norm is cut into chunks, tiles and blocks: a pure function of sizes, with the reasons."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from ..kernels import cdiv, next_power_of_2

SAVED, OWN, RUNNING = 0, 1, 2  # the kernels' SOURCE: where the second pass has its coefficients from


@dataclass(frozen=True)
class Tiling:
    """Loops over `x` as `(M, C, S)` in memory, S = 1 unless `row`.

    Attributes:
        fold: rows walked as one, where the channels fit no tile: M is that many times smaller, C larger.
        adjacent: instead the positions of a small map are walked as channels: S is 1, C that many times larger.
        align: the largest power of two up to 16 that divides S.
        channels: adjacent channels of a block (1 where `row`), `groups` of them.
        chunk: rows and columns of a chunk; `chunks` of them a channel group. One: a block owns its channels.
        sum_tile: rows, columns, and tiles in flight of the summing pass.
        apply_tile: rows, columns of the second pass; a block takes `span` tiles of a chunk, `parts` blocks share one.
        combine_tile: rows (all chunks) and channels of the kernel that combines partial sums, of `combine_warps`.
    """

    row: bool
    fold: int
    adjacent: bool
    M: int
    C: int
    S: int
    align: int
    channels: int
    groups: int
    chunk: tuple[int, int]
    chunks: int
    sum_tile: tuple[int, int, int]
    sum_warps: int
    apply_tile: tuple[int, int]
    apply_warps: int
    apply_stages: int
    span: int
    parts: int
    combine_tile: tuple[int, int]
    combine_warps: int

    @property
    def source(self) -> int:
        return OWN if self.partials == 1 else SAVED

    @property
    def sum_full(self) -> bool:
        """Whether every tile of the summing pass is full, so that it needs no masks."""
        tall, _, unroll = self.sum_tile
        return self._is_full(tall * unroll)

    @property
    def apply_full(self) -> bool:
        return self._is_full(self.apply_tile[0])

    def _is_full(self, rows: int) -> bool:
        return not self.row and self.M % rows == 0 and self.chunk[0] % rows == 0 and self.C % self.channels == 0

    @property
    def loops(self) -> tuple[int, ...]:
        return self.M, self.C, self.S // self.align, *self.chunk, self.chunks

    @property
    def features(self) -> int:
        """Channels, each C once."""
        return self.C // self.fold

    @property
    def partials(self) -> int:
        """Partial sums a channel."""
        return self.chunks * self.fold

    @property
    def layout(self) -> tuple[int, bool, int, int, bool]:
        return self.align, self.row, self.channels, self.fold, self.adjacent

    @property
    def sum_grid(self) -> tuple[int]:
        return (self.chunks * self.groups,)

    @property
    def apply_grid(self) -> tuple[int]:
        return (self.chunks * self.groups * self.parts,)

    @property
    def combine_grid(self) -> tuple[int]:
        return (cdiv(self.features, self.combine_tile[1]),)


@dataclass(frozen=True)
class Knobs:
    """What is worth varying on a new device."""

    channels: int = 64  # 128 bytes of bfloat16: a full cache line a row
    wide_channels: int = 128  # of half precision, where a multiprocessor has many rows: they lie closer in memory
    wide_from: int = 5 << 18  # bytes a multiprocessor; with fewer rows a block's start and end cost more than that
    adjacent_up_to: int = 64  # positions of a map whose rows are too short to be walked one by one,
    unaligned_up_to: int = 256  # or if they can only be read by single elements
    adjacent_from: int = 1 << 21  # elements; fewer are walked in one launch
    adjacent_channels: int = 64  # with fewer, each has more partial sums than a tile takes
    sum_elements: int = 2048
    sum_unroll: int = 4
    sum_warps: int = 4
    sum_blocks: int = 4  # a multiprocessor
    own_bytes: int = 16384  # tile of a second pass whose block sums first, and takes all tiles of its chunk
    own_warps: int = 8
    own_stages: int = 3
    saved_bytes: int = 8192  # tile of a second pass that need not: many short blocks
    saved_warps: int = 4
    saved_stages: int = 3
    saved_span: int = 2
    combine_channels: int = 16  # of a block; fewer: more blocks
    combine_warps: int = 8


FORWARD = Knobs()
BACKWARD = Knobs(sum_unroll=2, own_bytes=8192, wide_from=5 << 17, saved_span=3)


@functools.lru_cache(maxsize=4096)
def tiling(row: bool, M: int, C: int, S: int, itemsize: int, processors: int, backward: bool) -> Tiling:
    """The tiles of a forward or backward pass."""
    knobs = BACKWARD if backward else FORWARD
    elements = M * C * S
    long = itemsize == 2 and elements * itemsize >= knobs.wide_from * processors
    channels = knobs.wide_channels if long else knobs.channels
    short = knobs.unaligned_up_to if S % 4 else knobs.adjacent_up_to
    if row and short >= S and knobs.adjacent_channels <= C and elements >= knobs.adjacent_from:
        return _tiling(knobs, channels, S, True, False, M, C * S, 1, itemsize, processors)
    fold = 1 if row else _fold(M, C, channels)
    found = _tiling(knobs, channels, fold, False, row, M // fold, C * fold, S, itemsize, processors)
    if fold > 1 and found.chunks == 1:  # a block of its own needs all of a channel in one column
        return _tiling(knobs, channels, 1, False, row, M, C, S, itemsize, processors)
    return found


def _fold(M: int, C: int, channels: int) -> int:
    """Rows to walk as one, so that they are a whole number of tiles of `channels` wide."""
    if C % channels == 0 or C in (16, 32, 64):
        return 1
    fold = channels // math.gcd(C, channels)
    return fold if fold <= 16 and M % fold == 0 else 1


def _tiling(
    knobs: Knobs, channels: int, fold: int, adjacent: bool, row: bool, M: int, C: int, S: int, itemsize: int,
    processors: int,
) -> Tiling:  # fmt: skip
    channels = 1 if row else min(next_power_of_2(C), channels)
    groups = cdiv(C, channels)
    wide = min(next_power_of_2(S), 1024) if row else channels
    align = 1
    while row and align < 16 and S % (2 * align) == 0:
        align *= 2

    def tile(elements: int) -> tuple[int, int]:
        return max(1, min(next_power_of_2(M), elements // wide)), wide

    # Summing: one wave of equally long blocks, each long enough to be worth its own row of partial sums
    tall, _ = tile(knobs.sum_elements)
    wanted = max(1, processors * knobs.sum_blocks // groups)
    rows_long = knobs.sum_unroll * tall if S == 1 else tall
    down = max(1, min(wanted, cdiv(M, rows_long)))
    step = rows_long if M % rows_long == 0 else tall
    rows = cdiv(cdiv(M, down), step) * step
    down = cdiv(M, rows)
    across = max(1, min(wanted // down, cdiv(S, 4 * wide))) if row else 1
    cols = cdiv(cdiv(S, across), max(wide, 16)) * max(wide, 16) if row else 1
    across = cdiv(S, cols)
    chunks = down * across

    own = chunks == 1 and fold == 1
    size, warps, stages = (
        (knobs.own_bytes, knobs.own_warps, knobs.own_stages)
        if own
        else (knobs.saved_bytes, knobs.saved_warps, knobs.saved_stages)
    )
    apply_tile = tile(size // itemsize)
    tiles = cdiv(rows, apply_tile[0]) * cdiv(min(cols, S), wide)
    span = tiles if own else knobs.saved_span
    KP = 64  # by fours: each size is another kernel to build
    while chunks * fold > KP:
        KP *= 4
    return Tiling(
        row, fold, adjacent, M, C, S, align, channels, groups, (rows, cols), chunks,
        (tall, wide, knobs.sum_unroll), knobs.sum_warps,
        apply_tile, warps, stages, span, cdiv(tiles, span),
        (KP, max(1, min(next_power_of_2(C // fold), 8192 // KP, knobs.combine_channels))), knobs.combine_warps,
    )  # fmt: skip
