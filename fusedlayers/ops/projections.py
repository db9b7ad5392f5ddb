"""Two or three products of one tensor, as attention's `q`, `k` and `v`, under autocast.

Eager casts the tensor down once a product, each weight and bias both ways, sums each bias's gradient apart and adds
the input's gradients in float32. Here what is shared is cast once and kept once, and backward is one pass over the
gradients and two products: their sum is rounded to the input's dtype alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import KernelError, cdiv, load
from . import _gemm, _route
from ._autograd import direct, hooked, needs_grad
from ._dtypes import compute_dtype, triton_dtype

OP = "projections"
PARTS = (2, 3)
Parameters = Sequence[Tensor | None]


def reference(x: Tensor, weights: Sequence[Tensor], biases: Parameters) -> tuple[Tensor, ...]:
    """The torch expression this op stands for."""
    return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))


def projections(x: Tensor, weights: Sequence[Tensor], biases: Parameters) -> tuple[Tensor, ...]:
    """`F.linear(x, w, b)` for each weight and bias, every one a tensor of its own.

    Args:
        x: (..., K).
        weights: (N_i, K) each.
        biases: (N_i,) or `None` each.

    Raises:
        RuntimeError: what `F.linear` raises for the first that does not fit.
    """
    found = fused(x, weights, biases)
    return reference(x, weights, biases) if found is None else found


def fused(x: Tensor, weights: Sequence[Tensor], biases: Parameters) -> tuple[Tensor, ...] | None:
    """`projections` where they pay, else `None`: then eager's own ops are to be called."""
    if not _gemm.may_cast() or _route.is_compiling():
        return None
    if not needs_grad(x, *weights, *biases) or hooked(*weights, *biases):
        return None
    route, plan = _route.pick(OP, (x, *weights, *biases), plan=lambda: _plan(x, weights, biases), auto=auto)
    if route != "triton":
        return None
    try:
        return _apply(_gemm.viewable(x, plan.dtype), plan, *weights, *biases)[: len(weights)]
    except KernelError as error:
        _route.failed(OP, error)
        return None


def auto(plan: Plan) -> str:
    """The route where none is forced: where no weight is cast, eager has little to do but the products."""
    return "triton" if plan.casts else "reference"


@dataclass(frozen=True)
class Plan:
    """Products of (M, K) with (N_i, K) each, in `dtype`; `casts`: all weights are cast to it."""

    M: int
    widths: tuple[int, ...]
    K: int
    dtype: torch.dtype
    casts: bool


class _Projections(torch.autograd.Function):
    """Returns `(*ys, *more)`, `more` being what is kept of the operands in another dtype than their own.

    So higher derivatives flow through them, and the parameters may change before backward, as eager's may. Kept: x
    where a weight needs its gradient, and where x does the weights, as one matrix if they are cast. Both as the
    products read them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        n = len(plan.widths)
        weights, biases = parameters[:n], parameters[n:]
        ctx.plan, ctx.x_shape, ctx.x_dtype = plan, x.shape, x.dtype
        ctx.strides = tuple(w.stride() for w in weights)
        ctx.dtypes = tuple(None if p is None else p.dtype for p in parameters)
        need_x, need_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2 : 2 + n])
        low, kept = x, weights
        if x.dtype is not plan.dtype:
            low = x.to(plan.dtype) if _gemm.collapses(x) else x.to(plan.dtype, memory_format=torch.contiguous_format)
        packed, weights, biases = _cast(plan, weights, biases)
        if packed is not None:
            kept = (packed,)
        ctx.save_for_backward(low if need_weights else None, *(kept if need_x else ()))
        ctx.more = need_weights and low is not x, need_x and packed is not None
        rows, lead = _gemm.rows(low), x.shape[:-1]
        ys = [_gemm.linear(rows, w, b, (*lead, len(w))) for w, b in zip(weights, biases, strict=True)]
        if not need_x:
            own = zip(ys, ctx.needs_input_grad[2 : 2 + n], ctx.needs_input_grad[2 + n :], strict=True)
            ctx.mark_non_differentiable(*(y for y, need_w, need_b in own if not (need_w or need_b)))
        return *ys, *(low,) * ctx.more[0], *(packed,) * ctx.more[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        n = len(ctx.plan.widths)
        grads, more = grads[:n], iter(grads[n:])
        g_x, g_packed = (next(more) if there else None for there in ctx.more)
        direct_only = g_x is None and g_packed is None
        if direct_only and all(g is None for g in grads):
            return (None,) * (2 + 2 * n)
        # a gradient may be a subclass, or lie in no dense layout
        if direct_only and not torch.is_grad_enabled() and _route.obstacle(grads) is None:
            try:
                return _backward(ctx, grads)
            except KernelError as error:
                _route.failed(OP, error)
        return _composite(ctx, grads, g_x, g_packed)


_apply = direct(_Projections)


def _cast(
    plan: Plan, weights: Sequence[Tensor], biases: Parameters
) -> tuple[Tensor | None, Sequence[Tensor], list[Tensor | None]]:
    """Weights and biases in the products' dtype, what needs a copy by one launch.

    Before them: the weights as one matrix (sum of widths, K), of which they are parts, where all are cast.
    """
    packed, low, copies, full = None, [*weights, *biases], [], []
    if plan.casts:
        packed = weights[0].new_empty(sum(plan.widths), plan.K, dtype=plan.dtype)
        low[: len(weights)] = copies[:] = packed.split(plan.widths)
        full[:] = weights
    for i, t in enumerate(low):
        if t is not None and t.dtype is not plan.dtype:
            low[i] = torch.empty_like(t, dtype=plan.dtype)
            copies.append(low[i])
            full.append(t)
    if copies:
        torch._foreach_copy_(copies, full)
    return packed, low[: len(weights)], low[len(weights) :]


def _below(weights: Sequence[Tensor], live: Sequence[int], widths: Sequence[int]) -> Tensor:
    """Those of the weights, as they were kept, one below the other."""
    if len(weights) == 1:
        if len(live) == len(widths):
            return weights[0]
        weights = weights[0].split(widths)
    return torch.cat([weights[i] for i in live])


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """One pass over the gradients there are, one product for x, one for the weights that lie one below the other.

    What belongs to a product nobody used gets no gradient, as in eager.
    """
    x, *weights = ctx.saved_tensors
    plan, n = ctx.plan, len(grads)
    need_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[2:]
    live = [i for i, g in enumerate(grads) if g is not None and (need_x or needs[i] or needs[n + i])]
    if not live:
        return (None,) * (2 + 2 * n)
    widths = [plan.widths[i] for i in live]
    found: list[Tensor | None] = [None] * (2 * n)
    bias_dtypes = {ctx.dtypes[n + i] for i in live if needs[n + i]}
    sum_dtype = bias_dtypes.pop() if len(bias_dtypes) == 1 else compute_dtype(plan.dtype) if bias_dtypes else None
    weighted = [i for i in live if needs[i]]
    dz, sums = pack([_gemm.rows(grads[i]) for i in live], plan.dtype, need_x or bool(weighted), sum_dtype)
    if sums is not None:
        for i, db in zip(live, torch.unsafe_split_with_sizes(sums, widths), strict=True):
            found[n + i] = db.to(ctx.dtypes[n + i]) if needs[n + i] else None
    begins = dict(zip(live, _begins(widths), strict=True))
    for run in _runs(weighted, live, ctx.strides, ctx.dtypes):
        begin, end = begins[run[0]], begins[run[-1]] + plan.widths[run[-1]]
        some = dz if end - begin == dz.shape[1] else dz[:, begin:end]
        dw = _gemm.weight_grad(some, _gemm.rows(x), ctx.strides[run[0]], ctx.dtypes[run[0]])
        if len(run) == 1:
            found[run[0]] = dw
        else:  # not views to autograd, which would share their version
            parts = torch.unsafe_split_with_sizes(dw, [plan.widths[i] for i in run])
            for i, part in zip(run, parts, strict=True):
                found[i] = part
    if not need_x:
        return None, None, *found
    dx = _gemm.input_grad(dz, _below(weights, live, plan.widths), ctx.x_shape, ctx.x_dtype)
    return dx, None, *found


def _begins(widths: Sequence[int]) -> Iterator[int]:
    """Where each part begins."""
    begin = 0
    for width in widths:
        yield begin
        begin += width


def _runs(
    wanted: Sequence[int], live: Sequence[int], strides: Sequence[tuple[int, int]], dtypes: Sequence[Any]
) -> list[list[int]]:
    """The weights that need a gradient, those together that one product gives: neighbours, row by row in memory."""
    runs: list[list[int]] = []
    for i in wanted:
        last = runs[-1][-1] if runs else None
        together = last is not None and live.index(last) + 1 == live.index(i) and dtypes[last] is dtypes[i]
        if together and strides[last][1] == strides[i][1] == 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def pack(
    grads: Sequence[Tensor], dtype: torch.dtype, need_packed: bool, sum_dtype: torch.dtype | None
) -> tuple[Tensor | None, Tensor | None]:
    """Matrices of M rows side by side in `dtype`, and the sums of their columns in `sum_dtype`, in one pass."""
    first, N = grads[0], sum(g.shape[1] for g in grads)
    M = first.shape[0]
    given = tuple((g.shape[1], g.stride(), g.dtype) for g in grads)
    run, blocks = _launch(M, given, dtype, need_packed, sum_dtype)
    packed = first.new_empty(M, N, dtype=dtype) if need_packed else None
    partial = sums = None
    if sum_dtype is not None:
        partial = first.new_empty(1, blocks, N, dtype=compute_dtype(dtype))
        sums = first.new_empty(N, dtype=sum_dtype)
    if need_packed or sums is not None:
        run(*grads, *(None,) * (3 - len(grads)), packed, partial, sums, None)
    return packed, sums


@functools.lru_cache(maxsize=4096)
def _launch(
    M: int, given: tuple[tuple[int, tuple[int, int], torch.dtype], ...], dtype: torch.dtype, need_packed: bool,
    sum_dtype: torch.dtype | None,
) -> tuple[Any, int]:  # fmt: skip
    """The launches of `pack_sum` and `reduce.sum_partials`, and the number of partial sums a column."""
    widths, launch = [width for width, _, _ in given], load("launch")
    columns = _gemm.SUMS.columns
    grid, tile, per_block, blocks = _gemm.pass_tile(M, sum(cdiv(n, columns) for n in widths) * columns, True)
    strides = [s for _, stride, _ in given for s in stride]
    none = 3 - len(given)
    rest = (
        M, *widths, *(0,) * none, *strides, *(0,) * 2 * none, per_block, triton_dtype(compute_dtype(dtype)), *tile,
        _gemm.SUMS.stages,
    )  # fmt: skip
    # a, b, c, packed, partial, sums, None
    steps = [(launch.Launch(load("projections").pack_sum, grid, rest, _gemm.SUMS.warps), (0, 1, 2, 3, 4), False)]
    if sum_dtype is not None:
        finisher = load("reduce").finisher(blocks, sum(widths), compute_dtype(dtype), sum_dtype, None)
        steps.append((finisher, (4, 5, 6), False))
    return launch.Chain(*steps), blocks


def _composite(
    ctx: Any, grads: Sequence[Tensor | None], g_x: Tensor | None, g_packed: Tensor | None
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The same gradients in torch ops, for higher derivatives."""
    x, *weights = ctx.saved_tensors
    widths, n = ctx.plan.widths, len(grads)
    need_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[2:]
    weights = weights[0].split(widths) if len(weights) == 1 else weights
    # an earlier call read those weights alone; to autograd it was all of them
    own = dict(enumerate(g_packed.split(widths))) if g_packed is not None else {}
    read = getattr(ctx, "read", frozenset())
    ctx.read = read | {i for i, g in enumerate(grads) if need_x and g is not None}
    dx = None if g_x is None or not need_x else g_x.to(ctx.x_dtype)
    found: list[Tensor | None] = [None] * (2 * n)
    for i, g in enumerate(grads):
        if g is not None:
            g = _gemm.rows(g)
            if need_x:
                d = _gemm.input_grad(g, weights[i], ctx.x_shape, ctx.plan.dtype).to(ctx.x_dtype)
                dx = d if dx is None else dx + d
            if needs[i]:
                found[i] = _gemm.weight_grad(g, _gemm.rows(x), None, ctx.plan.dtype).to(ctx.dtypes[i])
            if needs[n + i]:
                found[n + i] = g.sum(0).to(ctx.dtypes[n + i])
        if needs[i] and i in own and i in read:
            d = own[i].to(ctx.dtypes[i])
            found[i] = d if found[i] is None else found[i] + d
    return dx, None, *found


def _plan(x: Tensor, weights: Sequence[Tensor], biases: Parameters) -> Plan | str:
    """What the kernels need to know of this call, or why they leave it to `F.linear`, which may raise for it."""
    shapes, dtypes = [x.shape], [x.dtype]
    for t in (*weights, *biases):
        shapes.append(None if t is None else t.shape)
        dtypes.append(None if t is None else t.dtype)
    return _cached_plan(tuple(shapes), tuple(dtypes), len(weights), _gemm.autocast_dtype(x))


@functools.lru_cache(maxsize=4096)
def _cached_plan(
    shapes: tuple[Any, ...], dtypes: tuple[torch.dtype | None, ...], n: int, autocast: torch.dtype | None
) -> Plan | str:
    x, weights, biases = shapes[0], shapes[1 : n + 1], shapes[n + 1 :]
    dtype = _gemm.gemm_dtype(autocast, *dtypes)
    if dtype is None:
        return "the dtypes differ"
    if n not in PARTS or len(biases) != n:
        return f"{n} products with {len(biases)} biases"
    found = [_gemm.linear_shape(x, w, b) for w, b in zip(weights, biases, strict=True)]
    for shape in found:
        if isinstance(shape, str):
            return shape
    M, _, K = found[0]
    return Plan(M, tuple(N for _, N, _ in found), K, dtype, dtype not in dtypes[1 : n + 1])
