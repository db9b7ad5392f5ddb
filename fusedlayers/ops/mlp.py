"""`act(x @ w1.T + b1) @ w2.T + b2`, keeping one hidden tensor for backward where eager keeps two."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import activations
from ..activations import Activation
from ..kernels import KernelError, load
from . import _gemm, _overlap, _route, linear_act
from ._autograd import direct, needs_grad

OP = "mlp"
_IDENTITY = activations.get("identity")


def reference(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, act: Activation) -> Tensor:
    """The torch expression this op stands for."""
    return F.linear(act(F.linear(x, w1, b1)), w2, b2)


def mlp(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, act: Activation) -> Tensor:
    """See `functional.mlp`."""
    if not _route.is_compiling():
        tensors = (x, w1, b1, w2, b2)
        route, plan = _route.pick(OP, tensors, plan=lambda: _plan(*tensors, act), library=True, auto=auto)
        if route != "reference":
            try:
                return _mlp(*tensors, plan, route)
            except KernelError as error:
                _route.failed(OP, error)
    return reference(x, w1, b1, w2, b2, act)


def auto(plan: Plan) -> str:
    """The route where none is forced: as for `linear_act`, but for what is kept, so the identity gains as well."""
    return "library"


@dataclass(frozen=True)
class Plan:
    """Two products, the dtype of both, the first one with its activation, and the shape that leaves the second.

    dtypes: of x, w1, b1, w2 and b2 as they come; `casts`: which of them autocast gives another, by route.
    """

    first: linear_act.Plan
    dtype: torch.dtype
    act: Activation
    x_shape: Sequence[int]
    shape: Sequence[int]
    dtypes: tuple[torch.dtype | None, ...]
    casts: dict[str, tuple[int, ...]]


def _mlp(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, plan: Plan, route: str
) -> Tensor:  # fmt: skip
    x = _gemm.viewable(x, plan.dtype)
    if needs_grad(x, w1, b1):
        return _apply(x, w1, b1, w2, b2, plan, route)[0]
    with torch.no_grad():
        operands: Sequence[Tensor | None] = (x, w1, b1, w2, b2)
        if plan.casts:
            operands = _gemm.lowered(plan.dtype, plan.casts[route], operands)
        x, w1, b1, *second = operands
        h, _ = linear_act.forward(_gemm.rows(x), w1, b1, plan.first, route, keep_z=False)
    if needs_grad(w2, b2):  # nothing before them needs a gradient: autograd keeps h, and only where it must
        return F.linear(h.view(*plan.x_shape[:-1], -1), w2, b2)
    return _second(h, *second, plan, route)


def _second(h: Tensor, w2: Tensor, b2: Tensor | None, plan: Plan, route: str) -> Tensor:
    if route == "triton":
        return _gemm.linear_kernel(h, w2, b2, _IDENTITY, h.dtype, False, plan.shape)[0]
    return _gemm.linear(h, w2, b2, plan.shape)


class _Mlp(torch.autograd.Function):
    """Returns `(y, kept, *casts)`: what backward keeps are inputs and outputs, so that higher derivatives flow through.

    Kept of the hidden layer: its pre-activation, or its output where that is what the activation's gradient reads.
    The output is recomputed from the former in the pass that reads it anyway. Kept of x and the weights: what the
    products read; `casts` are those that autocast gave another dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, plan: Plan, route: str
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        need_x, need_w1 = ctx.needs_input_grad[:2]
        inputs = x, w1, w2
        ctx.plan, ctx.strides = plan, (w1.stride(), w2.stride())
        if plan.casts:
            x, w1, b1, w2, b2 = _gemm.lowered(plan.dtype, plan.casts[route], (x, w1, b1, w2, b2))
        h, z = linear_act.forward(_gemm.rows(x), w1, b1, plan.first, route, keep_z=plan.act.keeps == "input")
        kept = h if z is None else z
        saved = x if need_w1 else None, w1 if need_x else None, w2
        ctx.save_for_backward(*saved, kept)
        y = _second(h, w2, b2, plan, route)
        return (y, kept, *_gemm.casts(saved, inputs)) if plan.casts else (y, kept)

    @staticmethod
    def backward(
        ctx: Any, g: Tensor | None, g_kept: Tensor | None, *g_casts: Tensor | None
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        if torch.is_grad_enabled() or g_kept is not None or _gemm.given(g_casts):
            return _composite(ctx, g, g_kept, g_casts)
        if g is None:
            return (None,) * 7
        try:
            return _backward(ctx, g)
        except KernelError as error:
            _route.failed(OP, error)
            return _composite(ctx, g, None, g_casts)


_apply = direct(_Mlp)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, w1, w2, kept = ctx.saved_tensors
    need_x, need_w1, need_b1, need_w2, need_b2 = ctx.needs_input_grad[:5]
    plan, act = ctx.plan, ctx.plan.act
    x_dtype, w1_dtype, b1_dtype, w2_dtype, b2_dtype = plan.dtypes
    g = _gemm.factor(g)
    recompute, need_dz, db_dtype = act.keeps == "input", need_x or need_w1, b1_dtype if need_b1 else None
    found = _overlap.act_backward(g, w2, kept, act, db_dtype) if recompute and need_dz and need_w2 else None
    dz, db1, h = found or _gemm.act_bias_backward(
        torch.mm(g, w2), None if act.name == "identity" else kept, act, plan.dtype,
        need_dz=need_dz, db_dtype=db_dtype, need_h=need_w2 and recompute, overwrite=True,
    )  # fmt: skip
    del found  # or it holds h, which is done with before dz is
    dw2 = _gemm.weight_grad(g, h if recompute else kept, ctx.strides[1], w2_dtype) if need_w2 else None
    del h
    db2 = _gemm.bias_grad(g, b2_dtype) if need_b2 else None
    dx = _gemm.input_grad(dz, w1, plan.x_shape, x_dtype) if need_x else None
    dw1 = _gemm.weight_grad(dz, _gemm.rows(x), ctx.strides[0], w1_dtype) if need_w1 else None
    return dx, dw1, db1, dw2, db2, None, None


def _composite(
    ctx: Any, g: Tensor | None, g_kept: Tensor | None, g_casts: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The same gradients in torch ops, for higher derivatives."""
    x, w1, w2, kept = ctx.saved_tensors
    need_x, need_w1, need_b1, need_w2, need_b2 = ctx.needs_input_grad[:5]
    plan, act, dtype, keeps_output = ctx.plan, ctx.plan.act, ctx.plan.dtype, ctx.plan.act.keeps == "output"
    dh = dz = dx = dw1 = db1 = dw2 = db2 = None
    if g is not None:
        g = _gemm.rows(g)
        dh = torch.mm(g, w2)
        dw2 = _gemm.weight_grad(g, kept if keeps_output else act(kept).to(dtype), None, dtype) if need_w2 else None
        db2 = g.sum(0).to(plan.dtypes[4]) if need_b2 else None
    if keeps_output and g_kept is not None:
        dh = g_kept if dh is None else dh + g_kept
    if dh is not None:
        dz = act.backward(dh, kept)
    if not keeps_output and g_kept is not None:
        dz = g_kept if dz is None else dz + g_kept
    if dz is not None:
        dx = _gemm.input_grad(dz, w1, plan.x_shape, dtype) if need_x else None
        dw1 = _gemm.weight_grad(dz, _gemm.rows(x), None, dtype) if need_w1 else None
        db1 = dz.sum(0).to(plan.dtypes[2]) if need_b1 else None
    dtypes, needs = (plan.dtypes[0], plan.dtypes[1], plan.dtypes[3]), (need_x, need_w1, need_w2)
    dx, dw1, dw2 = _gemm.through_casts((dx, dw1, dw2), (x, w1, w2), dtypes, needs, g_casts)
    return dx, dw1, db1, dw2, db2, None, None


def _plan(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, act: Activation
) -> Plan | str:  # fmt: skip
    b1_shape, b1_dtype = (None, None) if b1 is None else (b1.shape, b1.dtype)
    b2_shape, b2_dtype = (None, None) if b2 is None else (b2.shape, b2.dtype)
    return _cached_plan(
        x.shape, w1.shape, b1_shape, w2.shape, b2_shape, x.dtype, w1.dtype, b1_dtype, w2.dtype, b2_dtype,
        _gemm.autocast_dtype(x), act,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _cached_plan(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, *settings: Any) -> Plan | str:
    *dtypes, autocast, act = settings
    dtype = _gemm.gemm_dtype(autocast, *dtypes)
    if dtype is None:
        return "the dtypes differ"
    if not load("activations").supports(act):
        return f"{act.name} has no kernel"
    first = _gemm.linear_shape(x, w1, b1)
    second = first if isinstance(first, str) else _gemm.linear_shape((*x[:-1], w1[0]), w2, b2)
    if isinstance(second, str):
        return second
    M, H, K = first
    # what eager computes of the hidden layer in float32 it casts down again for the second product
    hidden = linear_act.Plan(M, H, K, dtype, dtype, act, (M, K), (M, H), (dtype, dtype, dtype), {})
    return Plan(hidden, dtype, act, x, (*x[:-1], w2[0]), tuple(dtypes), _gemm.to_cast(dtype, dtypes, (2, 4)))
