"""Attention's `q, k, v` of one projection, product and heads together, under autocast.

Forward is what eager does. Backward packs the heads' gradients as `split_heads` does and in the same pass sums what the
bias's gradient is; the products then give the other gradients in the parameters' own dtype, and nothing is cast.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import KernelError
from . import _gemm, _route, split_heads
from ._autograd import direct, needs_grad

OP = "split_linear"
MOST_SUMS = 16384
"""Partial sums of the bias's gradient: with more, as of many very short sequences, adding them up costs as much, and is
less accurate, than a pass of its own."""


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, *sizes: int) -> tuple[Tensor, ...]:
    """The torch expression this op stands for."""
    return split_heads.reference(F.linear(x, weight, bias), *sizes)


def split_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *sizes: int) -> tuple[Tensor, ...]:
    """`split_heads(F.linear(x, weight, bias), *sizes)`.

    Args:
        x: (..., K).
        weight: (parts * H * D, K).
        bias: (parts * H * D,) or `None`.
        sizes: B, N, parts, H, D, one of which may be -1.

    Raises:
        RuntimeError: what `F.linear` or `reshape` raises for what does not fit.
    """
    if _gemm.may_cast() and not _route.is_compiling() and needs_grad(x, weight, bias):
        route, plan = _route.pick(OP, (x, weight, bias), plan=lambda: _plan(x, weight, bias, sizes), auto=auto)
        if route == "triton":
            return _apply(_gemm.viewable(x, plan.dtype), weight, bias, plan)[: plan.heads.sizes[2]]
    return split_heads.split_heads(F.linear(x, weight, bias), *sizes)


def auto(plan: Plan) -> str:
    """The route where none is forced: where no weight is cast, eager's product has little to do beside it."""
    return "triton" if 1 in plan.casts else "reference"


@dataclass(frozen=True)
class Plan:
    """A product in `dtype` and the heads its result has.

    dtypes: of x, weight and bias as they come; `casts`: which of them autocast gives another.
    """

    dtype: torch.dtype
    heads: split_heads._Plan
    x_shape: Sequence[int]
    dtypes: tuple[torch.dtype | None, ...]
    casts: tuple[int, ...]


class _SplitLinear(torch.autograd.Function):
    """Returns `(q, k, v, *casts)`, the parts views of the product, which eager's too may not be edited in place.

    Kept: x and weight, each only where the other needs its gradient, as the product read them. `casts`, those that
    autocast gave another dtype, are outputs so that higher derivatives flow through them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        need_x, need_weight = ctx.needs_input_grad[:2]
        inputs = x, weight
        ctx.plan, ctx.weight_stride = plan, weight.stride()
        if plan.casts:
            x, weight, bias = _gemm.lowered(plan.dtype, plan.casts, (x, weight, bias))
        saved = x if need_weight else None, weight if need_x else None
        ctx.save_for_backward(*saved)
        y = F.linear(_gemm.rows(x), weight, bias)
        return (*y.view(plan.heads.sizes).permute(split_heads.ORDER).unbind(0), *_gemm.casts(saved, inputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        parts = ctx.plan.heads.sizes[2]
        grads, g_casts = grads[:parts], grads[parts:]
        cast = _gemm.given(g_casts)
        if not cast and not _gemm.given(grads):
            return (None,) * 4
        # a gradient may be a subclass, or lie in no dense layout
        if not torch.is_grad_enabled() and not cast and _route.obstacle(grads) is None:
            try:
                return _backward(ctx, grads)
            except KernelError as error:
                _route.failed(OP, error)
        return _composite(ctx, grads, g_casts)


_apply = direct(_SplitLinear)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
    plan = ctx.plan
    x_dtype, weight_dtype, bias_dtype = plan.dtypes
    summed = need_bias and plan.heads.blocks <= MOST_SUMS
    dz, db = plan.heads.packed(grads, bias_dtype if summed else None)
    if need_bias and not summed:
        db = _gemm.bias_grad(dz, bias_dtype)
    dx = _gemm.input_grad(dz, weight, plan.x_shape, x_dtype) if need_x else None
    dw = _gemm.weight_grad(dz, _gemm.rows(x), ctx.weight_stride, weight_dtype) if need_weight else None
    return dx, dw, db, None


def _composite(
    ctx: Any, grads: Sequence[Tensor | None], g_casts: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The same gradients in torch ops, for higher derivatives."""
    x, weight = ctx.saved_tensors
    plan, dtype, needs = ctx.plan, ctx.plan.dtype, ctx.needs_input_grad
    need_x, need_weight, need_bias = needs[:3]
    dx = dw = db = None
    if _gemm.given(grads):
        dz = plan.heads.composite(grads).to(dtype)
        dx = _gemm.input_grad(dz, weight, plan.x_shape, dtype) if need_x else None
        dw = _gemm.weight_grad(dz, _gemm.rows(x), None, dtype) if need_weight else None
        db = dz.sum(0).to(plan.dtypes[2]) if need_bias else None
    dx, dw = _gemm.through_casts((dx, dw), (x, weight), plan.dtypes[:2], needs[:2], g_casts)
    return dx, dw, db, None


def _plan(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: tuple[Any, ...]) -> Plan | str:
    """What the kernels need to know of this call, or why they leave it to `F.linear`, which may raise for it."""
    dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    return _cached_plan(
        x.shape, weight.shape, None if bias is None else bias.shape, dtypes, _gemm.autocast_dtype(x), sizes
    )


@functools.lru_cache(maxsize=4096)
def _cached_plan(
    x: Any, weight: Any, bias: Any, dtypes: tuple[torch.dtype | None, ...], autocast: torch.dtype | None,
    sizes: tuple[Any, ...],
) -> Plan | str:  # fmt: skip
    dtype = _gemm.gemm_dtype(autocast, *dtypes)
    if dtype is None:
        return "the dtypes differ"
    shape = _gemm.linear_shape(x, weight, bias)
    if isinstance(shape, str):
        return shape
    M, N, _ = shape
    heads = split_heads._plan((M, N), (N, 1), dtype, sizes)
    if isinstance(heads, str):
        return heads
    casts = tuple(i for i, d in enumerate(dtypes) if d not in (None, dtype))
    return Plan(dtype, heads, tuple(x), dtypes, casts)
