"""`y = act(x @ w.T + b)` in one kernel: bias and activation on the accumulator, before anything is rounded.

Every block computes one (BM, BN) tile of y, walking K in steps of BK. Blocks are numbered in groups of GROUP rows of
tiles, so that those which run together share their operands in the L2. Reads M*K + N*K (+ N) elements, from memory or
the L2, and writes M*N, twice where the pre-activation is kept.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import cdiv, next_power_of_2


@triton.jit
def _to_tf32(x):
    """Rounded to nearest, as the vendor's products do; the tensor cores by themselves cut the low bits off."""
    return tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit(do_not_specialize_on_alignment=["M"])  # its K is a length, not a count
def linear_forward(
    x_ptr, w_ptr, b_ptr, y_ptr, z_ptr, M, N, K, x_m, x_k, w_n, w_k, b_n,
    CT: tl.constexpr, ACT: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, HAS_BIAS: tl.constexpr,
    WRITE_Z: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """`x_ptr` (M, K), `w_ptr` (N, K) and `b_ptr` (N,) with any strides; `y_ptr`, `z_ptr` (M, N), contiguous.

    Blocks (cdiv(M, BM) * cdiv(N, BN)). `UPCAST` multiplies in CT: the interpreter's bfloat16 products are wrong.
    """
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    first_m = pid // (GROUP * tiles_n) * GROUP
    group = tl.minimum(tiles_m - first_m, GROUP)
    within = pid % (GROUP * tiles_n)
    m = (first_m + within % group).to(tl.int64) * BM + tl.arange(0, BM)
    n = (within // group).to(tl.int64) * BN + tl.arange(0, BN)
    in_m = (m < M)[:, None]
    in_n = (n < N)[None, :]
    k = tl.arange(0, BK)
    step_x = tl.cast(x_k, tl.int64)
    step_w = tl.cast(w_k, tl.int64)
    x_at = x_ptr + m[:, None] * x_m + k[None, :] * step_x
    w_at = w_ptr + n[None, :] * w_n + k[:, None] * step_w
    acc = tl.zeros((BM, BN), dtype=CT)
    for start in range(0, K, BK):
        if EVEN_K:
            x = tl.load(x_at, mask=in_m, other=0.0)
            w = tl.load(w_at, mask=in_n, other=0.0)
        else:
            in_k = k < K - start
            x = tl.load(x_at, mask=in_m & in_k[None, :], other=0.0)
            w = tl.load(w_at, mask=in_n & in_k[:, None], other=0.0)
        if UPCAST:
            x = x.to(CT)
            w = w.to(CT)
        if PRECISION == "tf32":
            acc = tl.dot(_to_tf32(x), _to_tf32(w), acc, input_precision=PRECISION, out_dtype=CT)
        elif x.dtype.primitive_bitwidth < 32:
            acc = tl.dot(x, w, acc, input_precision=PRECISION, out_dtype=CT)
        else:
            # Without tensor cores one long chain of additions would lose more than the library's sums: each step adds
            # up from zero. The bound on imprecise additions has no other use here than to keep the two sums apart.
            acc += tl.dot(x, w, input_precision=PRECISION, out_dtype=CT, max_num_imprecise_acc=BK)
        x_at += BK * step_x
        w_at += BK * step_w
    if HAS_BIAS:
        acc += tl.load(b_ptr + n * b_n, mask=n < N, other=0.0).to(CT)[None, :]
    at = m[:, None] * N + n[None, :]
    inside = in_m & in_n
    if WRITE_Z:
        tl.store(z_ptr + at, acc.to(z_ptr.dtype.element_ty), mask=inside)
    tl.store(y_ptr + at, ACT(acc, P0, P1).to(y_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Config:
    """Tile, rows of tiles a group, warps, and loads in flight. Every one fits the 99 KiB of sm_86 and sm_89."""

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int
    GROUP: int = 8

    @property
    def tile(self) -> tuple[int, int, int, int]:
        return self.BM, self.BN, self.BK, self.GROUP


CONFIGS: dict[str, tuple[Config, ...]] = {
    # by the unit that multiplies; within one, from few rows or columns to many
    "half": (
        Config(16, 64, 128, 4, 3),
        Config(64, 16, 128, 4, 3),
        Config(64, 64, 64, 4, 4),
        Config(128, 128, 64, 8, 3),
        Config(128, 256, 32, 8, 4),
    ),
    "tf32": (
        Config(16, 64, 64, 4, 3),
        Config(64, 16, 64, 4, 3),
        Config(64, 64, 32, 4, 4),
        Config(128, 128, 32, 8, 3),
    ),
    # without tensor cores the arithmetic is the limit, not the loads
    "ieee": (Config(16, 32, 32, 4, 2), Config(32, 16, 32, 4, 2), Config(64, 64, 16, 4, 2)),
    "float64": (Config(16, 32, 16, 4, 2), Config(32, 16, 16, 4, 2), Config(64, 64, 16, 4, 2)),
}


@functools.lru_cache(maxsize=4096)
def config(dtype: torch.dtype, tf32: bool, M: int, N: int) -> Config:
    """The tile for a product: the largest that neither side is smaller than, if that still fills a GPU."""
    unit = {torch.float64: "float64", torch.float32: "tf32" if tf32 else "ieee"}.get(dtype, "half")
    narrow_m, narrow_n, *square = CONFIGS[unit]
    if min(next_power_of_2(M), next_power_of_2(N)) < 64:
        return narrow_m if M <= N else narrow_n
    for larger in reversed(square[1:]):
        if larger.BM <= M and larger.BN <= N and cdiv(M, larger.BM) * cdiv(N, larger.BN) >= 96:
            return larger
    return square[0]
