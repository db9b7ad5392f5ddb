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
from . import _gemm, _route, linear_act
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
    """Two products, the dtype of both, and the first one with its activation."""

    first: linear_act.Plan
    dtype: torch.dtype
    act: Activation


def _mlp(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, plan: Plan, route: str
) -> Tensor:  # fmt: skip
    x = _gemm.viewable(x, plan.dtype)
    if needs_grad(x, w1, b1):
        return _apply(x, w1, b1, w2, b2, plan, route)[0]
    with torch.no_grad():
        x, low1, low2, b1, low_b2 = _gemm.lowered(plan.dtype, route, x, (w1, w2), (b1, b2))
        h, _ = linear_act.forward(x, low1, b1, plan.first, route, keep_z=False)
    if needs_grad(w2, b2):  # nothing before them needs a gradient: autograd keeps h, and only where it must
        return F.linear(h, w2, b2)
    return _second(h, low2, low_b2, route)


def _second(h: Tensor, w2: Tensor, b2: Tensor | None, route: str) -> Tensor:
    if route == "triton":
        return _gemm.linear_kernel(h, w2, b2, _IDENTITY, h.dtype, False)[0]
    return _gemm.linear(h, w2, b2)


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
        ctx.plan, ctx.x_shape, ctx.strides = plan, x.shape, (w1.stride(), w2.stride())
        ctx.dtypes = x.dtype, w1.dtype, w2.dtype
        ctx.bias_dtypes = tuple(None if b is None else b.dtype for b in (b1, b2))
        x, w1, w2, b1, b2 = _gemm.lowered(plan.dtype, route, x, (w1, w2), (b1, b2))
        h, z = linear_act.forward(x, w1, b1, plan.first, route, keep_z=plan.act.keeps == "input")
        kept = h if z is None else z
        saved = x if need_w1 else None, w1 if need_x else None, w2
        ctx.save_for_backward(*saved, kept)
        return _second(h, w2, b2, route), kept, *_gemm.casts(saved, inputs)

    @staticmethod
    def backward(
        ctx: Any, g: Tensor | None, g_kept: Tensor | None, *g_casts: Tensor | None
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        if torch.is_grad_enabled() or g_kept is not None or any(t is not None for t in g_casts):
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
    act, (b1_dtype, b2_dtype) = ctx.plan.act, ctx.bias_dtypes
    x_dtype, w1_dtype, w2_dtype = ctx.dtypes
    g, kept = _gemm.factor(g), _gemm.rows(kept)
    recompute = act.keeps == "input"
    dz, db1, h = _gemm.act_bias_backward(
        torch.mm(g, w2), None if act.name == "identity" else kept, act, ctx.plan.dtype,
        need_dz=need_x or need_w1, db_dtype=b1_dtype if need_b1 else None, need_h=need_w2 and recompute, overwrite=True,
    )  # fmt: skip
    dw2 = _gemm.weight_grad(g, h if recompute else kept, ctx.strides[1], w2_dtype) if need_w2 else None
    del h
    db2 = _gemm.bias_grad(g, b2_dtype) if need_b2 else None
    dx = _gemm.input_grad(dz, w1, ctx.x_shape, x_dtype) if need_x else None
    dw1 = _gemm.weight_grad(dz, _gemm.rows(x), ctx.strides[0], w1_dtype) if need_w1 else None
    return dx, dw1, db1, dw2, db2, None, None


def _composite(
    ctx: Any, g: Tensor | None, g_kept: Tensor | None, g_casts: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The same gradients in torch ops, for higher derivatives."""
    x, w1, w2, kept = ctx.saved_tensors
    need_x, need_w1, need_b1, need_w2, need_b2 = ctx.needs_input_grad[:5]
    act, dtype, keeps_output = ctx.plan.act, ctx.plan.dtype, ctx.plan.act.keeps == "output"
    hidden = _gemm.rows(kept)
    g_kept = None if g_kept is None else _gemm.rows(g_kept)
    dh = dz = dx = dw1 = db1 = dw2 = db2 = None
    if g is not None:
        g = _gemm.rows(g)
        dh = torch.mm(g, w2)
        dw2 = _gemm.weight_grad(g, hidden if keeps_output else act(hidden).to(dtype), None, dtype) if need_w2 else None
        db2 = g.sum(0).to(ctx.bias_dtypes[1]) if need_b2 else None
    if keeps_output and g_kept is not None:
        dh = g_kept if dh is None else dh + g_kept
    if dh is not None:
        dz = act.backward(dh, hidden)
    if not keeps_output and g_kept is not None:
        dz = g_kept if dz is None else dz + g_kept
    if dz is not None:
        dx = _gemm.input_grad(dz, w1, ctx.x_shape, dtype) if need_x else None
        dw1 = _gemm.weight_grad(dz, _gemm.rows(x), None, dtype) if need_w1 else None
        db1 = dz.sum(0).to(ctx.bias_dtypes[0]) if need_b1 else None
    dx, dw1, dw2 = _gemm.through_casts((dx, dw1, dw2), (x, w1, w2), ctx.dtypes, (need_x, need_w1, need_w2), g_casts)
    return dx, dw1, db1, dw2, db2, None, None


def _plan(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, act: Activation
) -> Plan | str:  # fmt: skip
    dtype = _gemm.gemm_dtype(x, w1, b1, w2, b2)
    if dtype is None:
        return "the dtypes differ"
    return _cached_plan(x.shape, w1.shape, b1 if b1 is None else b1.shape, w2.shape, b2 if b2 is None else b2.shape,
                        dtype, act)  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _cached_plan(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, dtype: torch.dtype, act: Activation) -> Plan | str:
    if not load("activations").supports(act):
        return f"{act.name} has no kernel"
    first = _gemm.linear_shape(x, w1, b1)
    second = first if isinstance(first, str) else _gemm.linear_shape((*x[:-1], w1[0]), w2, b2)
    if isinstance(second, str):
        return second
    # what eager computes of the hidden layer in float32 it casts down again for the second product
    return Plan(linear_act.Plan(*first, dtype, dtype, b1 is not None, act), dtype, act)
