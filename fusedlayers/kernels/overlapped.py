"""A product with an activation behind it, on Hopper: one tile's activation runs while the next tile is multiplied.

In a plain product nothing hides what follows the multiplications, so an activation there costs what a pass of its own
does. Here a block has three partitions that run side by side: one copies tiles of both operands into a ring of shared
memory; two consumers take tiles of the result in turn, one multiplying while the other works on what it has multiplied.
Blocks stay on their multiprocessor until all tiles are done.

Written in Gluon, Triton's language for what its compiler does not decide by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

# the names since Triton 3.7, and before
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

BM, BN, BK, GROUP = 128, 128, 64, 8
"""Sizes of a tile, and rows of tiles whose columns are walked together, for the L2."""


@dataclass(frozen=True)
class Config:
    """Steps of both operands in flight, warps of a consumer, registers of each of its threads, and of a thread on
    average when the kernel starts."""

    stages: int
    warps: int
    registers: int
    average: int


def config(act: str, backward: bool) -> Config:
    """The fastest on an H200. Eight warps hide more of an activation's latency, four leave each thread more registers:
    silu's gradient in eight spills more than it wins."""
    if backward and act == "silu":
        return Config(5, 4, 240, 168)
    return Config(4 if backward else 5, 8, 112, 96)


@gluon.jit
def _place(tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Row and column of a tile, in units of tiles."""
    first = tile // (GROUP * tiles_n) * GROUP
    rows = gl.minimum(tiles_m - first, GROUP)
    within = tile % (GROUP * tiles_n)
    return first + within % rows, within // rows


@gluon.jit
def _copy(a_desc, b_desc, a_ring, b_ring, full, empty, tiles_m, tiles_n, steps, B_ROWS: gl.constexpr,
          BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """The partition that fills the ring; `B_ROWS`: b is (N, K), a row a column of the result."""
    at = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, GROUP)
        for step in range(steps):
            slot = at % STAGES
            filled = full.index(slot)
            mbarrier.wait(empty.index(slot), (at // STAGES & 1) ^ 1)
            mbarrier.expect(filled, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            _load(a_desc, [m * BM, step * BK], filled, a_ring.index(slot))
            if B_ROWS:
                _load(b_desc, [n * BN, step * BK], filled, b_ring.index(slot))
            else:
                _load(b_desc, [step * BK, n * BN], filled, b_ring.index(slot))
            at += 1


@gluon.jit
def _multiply(a_ring, b_ring, full, empty, at, steps, layout: gl.constexpr, B_ROWS: gl.constexpr, BM: gl.constexpr,
              BN: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The products of one tile, the last still under way. A slot is free again once the step after it has begun."""
    acc = warpgroup_mma_init(gl.zeros((BM, BN), dtype=gl.float32, layout=layout))
    for step in range(steps):
        slot = (at + step) % STAGES
        mbarrier.wait(full.index(slot), (at + step) // STAGES & 1)
        b = b_ring.index(slot)
        if B_ROWS:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a_ring.index(slot), b, acc, is_async=True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        mbarrier.arrive(empty.index((at + step + STAGES - 1) % STAGES), count=1, pred=step > 0)
    return acc


@gluon.jit
def _halves(tile, BM: gl.constexpr, BN: gl.constexpr):
    return tile.reshape([BM, 2, BN // 2]).permute(0, 2, 1).split()


@gluon.jit
def _write(desc, row, col, held, value):
    held.store(value)
    fence_async_shared()
    _store(desc, [row, col], held)


@gluon.jit
def _upon(total, held, z_desc, bias_ptr, row, col, cols, N, ACT: gl.constexpr, P0: gl.constexpr,
          P1: gl.constexpr):  # fmt: skip
    """Writes z, half a tile of a forward, and gives `act(z)`."""
    if bias_ptr is not None:
        total += gl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]
    z = total.to(z_desc.dtype)
    _write(z_desc, row, col, held, z)
    return ACT(z.to(gl.float32), P0, P1).to(z_desc.dtype)


@gluon.jit
def _through(total, held, dz_desc, partial_ptr, m, row, col, cols, N, ACT: gl.constexpr, GRAD: gl.constexpr,
             P0: gl.constexpr, P1: gl.constexpr):  # fmt: skip
    """Writes dz, half a tile of a backward, in the place of z, and its sums, and gives `act(z)`."""
    z = held.load(total.type.layout).to(gl.float32)
    dz = GRAD(total, z, P0, P1)
    h = ACT(z, P0, P1).to(dz_desc.dtype)
    if partial_ptr is not None:
        gl.store(partial_ptr + m.to(gl.int64) * N + cols, gl.sum(dz, axis=0), mask=cols < N)
    _write(dz_desc, row, col, held, dz.to(dz_desc.dtype))
    return h


@gluon.jit
def _activate(first_desc, second_desc, z_desc, bias_ptr, partial_ptr, a_ring, b_ring, held, full, empty, z_full, turn,
              tiles_m, tiles_n, steps, N, ACT: gl.constexpr, GRAD: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr,
              B_ROWS: gl.constexpr, BACKWARD: gl.constexpr, WHO: gl.constexpr, WARPS: gl.constexpr, BM: gl.constexpr,
              BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """A consumer: every other tile of this block, in two halves of its columns.

    `turn` lets the consumers multiply one after the other: a barrier tells a phase from the one before it only, so
    neither may wait for a slot that has yet to be filled for the other.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BN, 16])
    HALF: gl.constexpr = BN // 2
    left = held.index(2 * WHO)
    right = held.index(2 * WHO + 1)
    at = 0
    count = 0
    mine = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        if count % 2 == WHO:
            m, n = _place(tile, tiles_m, tiles_n, GROUP)
            row = m * BM
            col = n * BN
            if BACKWARD:
                arrived = z_full.index(WHO)
                tma.store_wait(0)
                mbarrier.expect(arrived, 2 * z_desc.block_type.nbytes)
                _load(z_desc, [row, col], arrived, left)
                _load(z_desc, [row, col + HALF], arrived, right)
            mbarrier.wait(turn.index(WHO), (mine & 1) ^ (1 - WHO))
            acc = _multiply(a_ring, b_ring, full, empty, at, steps, layout, B_ROWS, BM, BN, STAGES)
            mbarrier.arrive(turn.index(1 - WHO), count=1)
            total = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(empty.index((at + steps - 1) % STAGES), count=1)
            one, other = _halves(total, BM, BN)
            half: gl.constexpr = one.type.layout
            cols = col + gl.arange(0, HALF, layout=gl.SliceLayout(0, half))
            if BACKWARD:
                mbarrier.wait(z_full.index(WHO), mine & 1)
                h_left = _through(one, left, first_desc, partial_ptr, m, row, col, cols, N, ACT, GRAD, P0, P1)
                h_right = _through(other, right, first_desc, partial_ptr, m, row, col + HALF, cols + HALF, N, ACT, GRAD,
                                   P0, P1)  # fmt: skip
            else:
                tma.store_wait(0)
                h_left = _upon(one, left, first_desc, bias_ptr, row, col, cols, N, ACT, P0, P1)
                h_right = _upon(other, right, first_desc, bias_ptr, row, col + HALF, cols + HALF, N, ACT, P0, P1)
            tma.store_wait(1)  # the left half has been read from where it was held
            _write(second_desc, row, col, left, h_left)
            tma.store_wait(1)
            _write(second_desc, row, col + HALF, right, h_right)
            mine += 1
        at += steps
        count += 1  # noqa: SIM113  Gluon has no enumerate
    tma.store_wait(0)


@gluon.jit
def _ring(desc, STAGES: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=1)
    return made


@gluon.jit
def _tiles_of(ptr, rows, cols, stride, BR: gl.constexpr, BC: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BR, BC], ptr.dtype.element_ty)
    return tma.make_tensor_descriptor(ptr, [rows, cols], [stride, 1], [BR, BC], layout)


@gluon.jit
def _second(ptr, N, K, stride, ROWS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr):
    if ROWS:
        made = _tiles_of(ptr, N, K, stride, BN, BK)
    else:
        made = _tiles_of(ptr, K, N, stride, BK, BN)
    return made


@gluon.jit
def _run(a_desc, b_desc, first_desc, second_desc, z_desc, bias_ptr, partial_ptr, M, N, K, ACT: gl.constexpr,
         GRAD: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, B_ROWS: gl.constexpr, BACKWARD: gl.constexpr,
         BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
         WARPS: gl.constexpr, REGISTERS: gl.constexpr):  # fmt: skip
    a_ring = _ring(a_desc, STAGES)
    b_ring = _ring(b_desc, STAGES)
    held = _ring(first_desc, 4)
    full = _barriers(STAGES)
    empty = _barriers(STAGES)
    z_full = _barriers(2)
    turn = _barriers(2)
    fence_async_shared()
    tiles_m = gl.cdiv(M, BM)
    tiles_n = gl.cdiv(N, BN)
    steps = gl.cdiv(K, BK)
    gl.warp_specialize([
        (_activate, (first_desc, second_desc, z_desc, bias_ptr, partial_ptr, a_ring, b_ring, held, full, empty, z_full,
                     turn, tiles_m, tiles_n, steps, N, ACT, GRAD, P0, P1, B_ROWS, BACKWARD, 0, WARPS, BM, BN, STAGES,
                     GROUP)),
        (_activate, (first_desc, second_desc, z_desc, bias_ptr, partial_ptr, a_ring, b_ring, held, full, empty, z_full,
                     turn, tiles_m, tiles_n, steps, N, ACT, GRAD, P0, P1, B_ROWS, BACKWARD, 1, WARPS, BM, BN, STAGES,
                     GROUP)),
        (_copy, (a_desc, b_desc, a_ring, b_ring, full, empty, tiles_m, tiles_n, steps, B_ROWS, BM, BN, BK, STAGES,
                 GROUP)),
    ], [WARPS, 1], [REGISTERS, 24])  # fmt: skip


@gluon.jit(do_not_specialize=["M"])
def forward(x_ptr, w_ptr, bias_ptr, z_ptr, h_ptr, M, N, K, x_m, w_row, ACT: gl.constexpr, P0: gl.constexpr,
            P1: gl.constexpr, W_ROWS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
            STAGES: gl.constexpr, GROUP: gl.constexpr, WARPS: gl.constexpr, REGISTERS: gl.constexpr):  # fmt: skip
    """`z_ptr` (M, N) = x @ w.T + bias, rounded, and `h_ptr` (M, N) = act(z).

    `x_ptr` has rows `x_m` apart; `w_ptr`, rows `w_row` apart, is (N, K), or without W_ROWS (K, N); `bias_ptr` (N,) may
    be absent. Blocks: as many as there are multiprocessors. Reads both operands, writes 2*M*N elements.
    """
    x = _tiles_of(x_ptr, M, K, x_m, BM, BK)
    w = _second(w_ptr, N, K, w_row, W_ROWS, BN, BK)
    z = _tiles_of(z_ptr, M, N, N, BM, BN // 2)
    h = _tiles_of(h_ptr, M, N, N, BM, BN // 2)
    _run(x, w, z, h, z, bias_ptr, None, M, N, K, ACT, ACT, P0, P1, W_ROWS, False, BM, BN, BK, STAGES, GROUP, WARPS,
         REGISTERS)  # fmt: skip


@gluon.jit(do_not_specialize=["M"])
def backward(g_ptr, w_ptr, z_ptr, dz_ptr, h_ptr, partial_ptr, M, N, K, g_m, w_row, ACT: gl.constexpr,
             GRAD: gl.constexpr, P0: gl.constexpr, P1: gl.constexpr, W_ROWS: gl.constexpr, BM: gl.constexpr,
             BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, WARPS: gl.constexpr,
             REGISTERS: gl.constexpr):  # fmt: skip
    """`dz_ptr` (M, N) = act'(z) * (g @ w), `h_ptr` (M, N) = act(z), and sums of dz over the rows of each tile.

    `g_ptr` (M, K) has rows `g_m` apart; `w_ptr` as in `forward`, K its other dim; `z_ptr` (M, N) is contiguous;
    `partial_ptr` (cdiv(M, BM), N) in float32 may be absent. Reads both operands and z, writes 2*M*N elements.
    """
    g = _tiles_of(g_ptr, M, K, g_m, BM, BK)
    w = _second(w_ptr, N, K, w_row, W_ROWS, BN, BK)
    z = _tiles_of(z_ptr, M, N, N, BM, BN // 2)
    dz = _tiles_of(dz_ptr, M, N, N, BM, BN // 2)
    h = _tiles_of(h_ptr, M, N, N, BM, BN // 2)
    _run(g, w, dz, h, z, None, partial_ptr, M, N, K, ACT, GRAD, P0, P1, W_ROWS, True, BM, BN, BK, STAGES, GROUP,
         WARPS, REGISTERS)  # fmt: skip
