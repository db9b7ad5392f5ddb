"""`act(x @ weight.T + bias)`: one kernel or the library's epilogue forward, one pass and the library backward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations import Activation
from ..kernels import KernelError, load
from . import _gemm, _overlap, _route
from ._autograd import direct, needs_grad
from ._dtypes import activated

OP = "linear_act"


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, act: Activation) -> Tensor:
    """The torch expression this op stands for."""
    return act(F.linear(x, weight, bias))


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: Activation) -> Tensor:
    """See `functional.linear_act`."""
    if _route.is_compiling():
        return reference(x, weight, bias, act)
    plain = act.name == "identity"  # then the library is eager itself
    route, plan = _route.pick(
        OP, (x, weight, bias), plan=lambda: _plan(x, weight, bias, act), library=not plain, auto=auto
    )
    if route != "reference":
        try:
            viewable = _gemm.viewable(x, plan.dtype)
            if needs_grad(x, weight, bias):
                return _apply(viewable, weight, bias, plan, route)[0]
            if plan.casts:
                viewable, weight, bias = _gemm.lowered(plan.dtype, plan.casts[route], (viewable, weight, bias))
            return forward(_gemm.rows(viewable), weight, bias, plan, route, keep_z=False)[0]
        except KernelError as error:
            _route.failed(OP, error)
    return reference(x, weight, bias, act)


@dataclass(frozen=True)
class Plan:
    """A product of (M, K) and (N, K), its dtype, what follows it, and the dtype and shape that leave.

    dtypes: of x, weight and bias as they come; `casts`: which of them autocast gives another, by route.
    """

    M: int
    N: int
    K: int
    dtype: torch.dtype
    y_dtype: torch.dtype
    act: Activation
    x_shape: Sequence[int]
    shape: Sequence[int]
    dtypes: tuple[torch.dtype | None, ...]
    casts: dict[str, tuple[int, ...]]


def auto(plan: Plan) -> str:
    """The route where none is forced. The vendor's products are as fast as any here; what is fused is what follows.

    ReLU rides in the library's epilogue, nearly free. The others cost one pass forward, as in a plain kernel's
    epilogue, which hides no arithmetic, unless `_overlap` does; backward, one pass gives the gradient of activation and
    bias together. With nothing to follow eager is already one call.
    """
    return "reference" if plan.act.name == "identity" else "library"


class _LinearAct(torch.autograd.Function):
    """Returns `(y, z, *casts)`: what backward keeps are inputs and outputs, so that higher derivatives flow through it.

    Kept: x and weight, each only where the other needs its gradient, as the product read them (`casts` are those that
    autocast gave another dtype), and of the activation what eager keeps: y, or z.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, route: str
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        need_x, need_weight = ctx.needs_input_grad[:2]
        act, inputs = plan.act, (x, weight)
        ctx.plan, ctx.weight_stride = plan, weight.stride()
        if plan.casts:
            x, weight, bias = _gemm.lowered(plan.dtype, plan.casts[route], (x, weight, bias))
        y, z = forward(_gemm.rows(x), weight, bias, plan, route, keep_z=act.keeps == "input")
        kept = None if act.name == "identity" else y if z is None else z
        saved = x if need_weight else None, weight if need_x else None
        ctx.save_for_backward(*saved, kept)
        return (y, z, *_gemm.casts(saved, inputs)) if plan.casts else (y, z)

    @staticmethod
    def backward(
        ctx: Any, g: Tensor | None, g_z: Tensor | None, *g_casts: Tensor | None
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        if torch.is_grad_enabled() or g_z is not None or _gemm.given(g_casts):
            return _composite(ctx, g, g_z, g_casts)
        if g is None:
            return (None,) * 5
        try:
            return _backward(ctx, g)
        except KernelError as error:
            _route.failed(OP, error)
            return _composite(ctx, g, None, g_casts)


_apply = direct(_LinearAct)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, route: str, keep_z: bool
) -> tuple[Tensor, Tensor | None]:
    """`(y, z)` of x as a matrix; z, also one, only where it is to be kept."""
    act, shape = plan.act, plan.shape
    if route == "triton":
        return _gemm.linear_kernel(x, weight, bias, act, plan.y_dtype, keep_z, shape)
    if bias is not None and not keep_z and _has_epilogue(act, x):
        gelu = act.name == "gelu_tanh"
        if len(shape) == 2:
            return torch._addmm_activation(bias, x, weight.t(), use_gelu=gelu), None
        # into y, which is then no view, so that a user may edit it in place where eager's may be
        y = x.new_empty(shape)
        torch._addmm_activation(bias, x, weight.t(), use_gelu=gelu, out=_gemm.rows(y))
        return y, None
    if act.name == "identity":
        return _gemm.linear(x, weight, bias, shape), None
    if keep_z:
        y = x.new_empty(shape, dtype=plan.y_dtype)
        z = _overlap.linear_act(x, weight, bias, act, y)
        if z is None:
            z = _gemm.linear(x, weight, bias)
            _gemm.activate(z, act, y)
        return y, z
    z = _gemm.linear(x, weight, bias, shape)
    y = z if z.dtype is plan.y_dtype else torch.empty_like(z, dtype=plan.y_dtype)
    return _gemm.activate(z, act, y), None


def _has_epilogue(act: Activation, x: Tensor) -> bool:
    """Whether the library applies this very activation; its GELU is the tanh form on a GPU, the exact one on a CPU."""
    return act.name == "relu" or (act.name == "gelu_tanh" and x.is_cuda)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, kept = ctx.saved_tensors
    need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
    plan = ctx.plan
    x_dtype, weight_dtype, bias_dtype = plan.dtypes
    need_dz, db = need_x or need_weight, None
    if kept is None:
        dz = _gemm.factor(g)
        db = _gemm.bias_grad(dz, bias_dtype) if need_bias else None
    else:
        dz, db, _ = _gemm.act_bias_backward(
            _gemm.rows(g), _gemm.rows(kept), plan.act, plan.dtype,
            need_dz=need_dz, db_dtype=bias_dtype if need_bias else None,
        )  # fmt: skip
    dx = _gemm.input_grad(dz, weight, plan.x_shape, x_dtype) if need_x else None
    dw = _gemm.weight_grad(dz, _gemm.rows(x), ctx.weight_stride, weight_dtype) if need_weight else None
    return dx, dw, db, None, None


def _composite(
    ctx: Any, g: Tensor | None, g_z: Tensor | None, g_casts: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The same gradients in torch ops, for higher derivatives."""
    x, weight, kept = ctx.saved_tensors
    plan, dtype, needs = ctx.plan, ctx.plan.dtype, ctx.needs_input_grad
    need_x, need_weight, need_bias = needs[:3]
    dz = g
    if g is not None and kept is not None:
        g = _gemm.rows(g)
        dz = plan.act.backward(g, _gemm.rows(kept).to(g.dtype)).to(dtype)
    if g_z is not None:
        dz = g_z if dz is None else dz + g_z
    dx = dw = db = None
    if dz is not None:
        dz = _gemm.rows(dz)
        dx = _gemm.input_grad(dz, weight, plan.x_shape, dtype) if need_x else None
        dw = _gemm.weight_grad(dz, _gemm.rows(x), None, dtype) if need_weight else None
        db = dz.sum(0).to(plan.dtypes[2]) if need_bias else None
    dx, dw = _gemm.through_casts((dx, dw), (x, weight), plan.dtypes[:2], needs[:2], g_casts)
    return dx, dw, db, None, None


def _plan(x: Tensor, weight: Tensor, bias: Tensor | None, act: Activation) -> Plan | str:
    """What the kernels need to know of this call, or why they leave it to `F.linear`, which may raise for it."""
    b_shape, b_dtype = (None, None) if bias is None else (bias.shape, bias.dtype)
    return _cached_plan(
        x.shape, weight.shape, b_shape, x.dtype, weight.dtype, b_dtype, _gemm.autocast_dtype(x), x.is_cuda, act
    )


@functools.lru_cache(maxsize=4096)
def _cached_plan(
    x: Any, weight: Any, bias: Any, x_dtype: torch.dtype, w_dtype: torch.dtype, b_dtype: torch.dtype | None,
    autocast: torch.dtype | None, cuda: bool, act: Activation,
) -> Plan | str:  # fmt: skip
    dtypes = x_dtype, w_dtype, b_dtype
    dtype = _gemm.gemm_dtype(autocast, *dtypes)
    if dtype is None:
        return "the dtypes differ"
    if not load("activations").supports(act):
        return f"{act.name} has no kernel"
    shape = _gemm.linear_shape(x, weight, bias)
    if isinstance(shape, str):
        return shape
    y_dtype = activated(act, dtype, "cuda" if cuda else "cpu") if autocast else dtype
    casts = _gemm.to_cast(dtype, dtypes, (2,))
    return Plan(*shape, dtype, y_dtype, act, x, (*x[:-1], shape[1]), dtypes, casts)
