"""`(act(x @ w_gate.T) * (x @ w_up.T)) @ w_down.T`, keeping gate and up only and recomputing their product."""

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
from . import _gemm, _route, gated_act
from ._autograd import direct, needs_grad
from ._dtypes import compute_dtype

OP = "gated_mlp"
_IDENTITY = activations.get("identity")
Weights = tuple[Tensor, Tensor | None, Tensor]
Biases = tuple[Tensor | None, Tensor | None, Tensor | None]


def reference(x: Tensor, weights: Weights, biases: Biases, act: Activation, gate_first: bool = True) -> Tensor:
    """The torch expression this op stands for; without `w_up`, `w_gate` projects to both halves at once."""
    (w_gate, w_up, w_down), (b_gate, b_up, b_down) = weights, biases
    gate = F.linear(x, w_gate, b_gate)
    if w_up is None:
        h = gated_act.chunked_reference(gate, act, -1, gate_first)
    else:
        h = gated_act.reference(gate, F.linear(x, w_up, b_up), act)
    return F.linear(h, w_down, b_down)


def gated_mlp(x: Tensor, weights: Weights, biases: Biases, act: Activation, gate_first: bool = True) -> Tensor:
    """See `functional.gated_mlp`."""
    if not _route.is_compiling():
        plan = functools.partial(_plan, x, weights, biases, act, gate_first)
        route, call = _route.pick(OP, (x, *weights, *biases), plan=plan, library=True, auto=auto)
        if route != "reference":
            try:
                return _gated_mlp(x, weights, biases, call, route)
            except KernelError as error:
                _route.failed(OP, error)
    return reference(x, weights, biases, act, gate_first)


@dataclass(frozen=True)
class Plan:
    """Hidden width H of the gate, the dtype of all products, and how the halves lie in a chunked projection.

    shape: of what leaves; dtypes: of x, weights and biases as they come; `casts`: which of them autocast gives
    another, by route.
    """

    M: int
    H: int
    dtype: torch.dtype
    act: Activation
    chunked: bool
    gate_first: bool
    x_shape: Sequence[int]
    shape: Sequence[int]
    dtypes: tuple[torch.dtype | None, ...]
    casts: dict[str, tuple[int, ...]]

    def split(self, gate_up: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gate and up, from two matrices or the halves of one."""
        return gated_act.halves(gate_up, -1, self.gate_first) if self.chunked else (gate_up, up)


def auto(plan: Plan) -> str:
    """The route where none is forced: the vendor's products, one pass for the gate each way."""
    return "library"


def _gated_mlp(x: Tensor, weights: Weights, biases: Biases, plan: Plan, route: str) -> Tensor:
    x = _gemm.viewable(x, plan.dtype)
    if needs_grad(x, *weights[:2], *biases[:2]):
        return _apply(x, *weights, *biases, plan, route)[0]
    with torch.no_grad():
        operands: Sequence[Tensor | None] = (x, *weights, *biases)
        if plan.casts:
            operands = _gemm.lowered(plan.dtype, plan.casts[route], operands)
        x, w_gate, w_up, w_down, b_gate, b_up, b_down = operands
        h = _gated(*_projections(x, w_gate, w_up, b_gate, b_up, route), plan)
    if needs_grad(weights[2], biases[2]):  # nothing before them needs a gradient: autograd keeps h, and only if it must
        return F.linear(h.view(*plan.x_shape[:-1], plan.H), weights[2], biases[2])
    return _product(h, w_down, b_down, route, plan.shape)


def _projections(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, b_gate: Tensor | None, b_up: Tensor | None, route: str
) -> tuple[Tensor, Tensor | None]:
    """Gate and up, or both in one tensor, as matrices."""
    x = _gemm.rows(x)
    return _product(x, w_gate, b_gate, route), None if w_up is None else _product(x, w_up, b_up, route)


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, route: str, shape: Sequence[int] | None = None
) -> Tensor:  # fmt: skip
    if route == "triton":
        return _gemm.linear_kernel(x, weight, bias, _IDENTITY, x.dtype, False, shape)[0]
    return _gemm.linear(x, weight, bias, shape)


def _gated(gate_up: Tensor, up: Tensor | None, plan: Plan) -> Tensor:
    gate, up = plan.split(gate_up, up)
    h = gate.new_empty(plan.M, plan.H)
    dtype = plan.dtype
    if gate.is_contiguous() and up.is_contiguous():
        run = gated_act.forward_launch(1, h.numel(), h.numel(), h.numel(), dtype, dtype, dtype, plan.act)
    else:
        run = gated_act.forward_launch(plan.M, plan.H, gate.stride(0), up.stride(0), dtype, dtype, dtype, plan.act)
    run(gate, up, h)
    return h


class _GatedMlp(torch.autograd.Function):
    """Returns `(y, gate, up, *casts)`, or `(y, gate and up, None, *casts)` of a chunked projection.

    What backward keeps are inputs and outputs, so that higher derivatives flow through them: gate, up, and of x and
    the weights what the products read; `casts` are those that autocast gave another dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor,
        b_gate: Tensor | None, b_up: Tensor | None, b_down: Tensor | None, plan: Plan, route: str,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        need_x, need_gate, need_up = ctx.needs_input_grad[:3]
        inputs = x, w_gate, w_up, w_down
        ctx.plan, ctx.strides = plan, (w_gate.stride(), None if w_up is None else w_up.stride(), w_down.stride())
        if plan.casts:
            operands = x, w_gate, w_up, w_down, b_gate, b_up, b_down
            x, w_gate, w_up, w_down, b_gate, b_up, b_down = _gemm.lowered(plan.dtype, plan.casts[route], operands)
        gate, up = _projections(x, w_gate, w_up, b_gate, b_up, route)
        saved = x if need_gate or need_up else None, w_gate if need_x else None, w_up if need_x else None, w_down
        ctx.save_for_backward(*saved, gate, up)
        y = _product(_gated(gate, up, plan), w_down, b_down, route, plan.shape)
        return (y, gate, up, *_gemm.casts(saved, inputs)) if plan.casts else (y, gate, up)

    @staticmethod
    def backward(
        ctx: Any, g: Tensor | None, g_gate: Tensor | None, g_up: Tensor | None, *g_casts: Tensor | None
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        if torch.is_grad_enabled() or _gemm.given((g_gate, g_up, *g_casts)):
            return _composite(ctx, g, g_gate, g_up, g_casts)
        if g is None:
            return (None,) * 9
        try:
            return _backward(ctx, g)
        except KernelError as error:
            _route.failed(OP, error)
            return _composite(ctx, g, None, None, g_casts)


_apply = direct(_GatedMlp)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, w_gate, w_up, w_down, kept_gate, kept_up = ctx.saved_tensors
    plan, needs = ctx.plan, ctx.needs_input_grad
    need_down, need_b_down = needs[3], needs[6]
    x_dtype, gate_dtype, up_dtype, down_dtype, *bias_dtypes = plan.dtypes
    g = _gemm.factor(g)
    dh = torch.mm(g, w_down)
    joined = _joins(plan, ctx.strides, needs, dh)
    dgate, dup, both, sums, h = _gate_pass(plan, dh, plan.split(kept_gate, kept_up), needs, joined)
    dw_down = _gemm.weight_grad(g, h, ctx.strides[2], down_dtype) if need_down else None
    del h, dh
    db_down = _gemm.bias_grad(g, bias_dtypes[2]) if need_b_down else None
    need_x, need_gate, need_up = needs[:3]
    x = None if x is None else _gemm.rows(x)
    dx = dw_gate = dw_up = db_gate = db_up = None
    if plan.chunked:
        dx = _gemm.product(both, w_gate, x_dtype) if need_x else None
        dw_gate = _gemm.weight_grad(both, x, ctx.strides[0], gate_dtype) if need_gate else None
        if needs[4]:
            db_gate = both.new_empty(2 * plan.H, dtype=bias_dtypes[0])
            load("reduce").finish(sums, *gated_act.halves(db_gate, -1, plan.gate_first))
    else:
        if need_x:
            dx = torch.mm(dgate, w_gate)
            dx = torch.addmm(dx, dup, w_up, out=dx).to(x_dtype)
        if both is not None:
            dw = _gemm.weight_grad(both, x, None, gate_dtype)
            dw_gate, dw_up = dw.narrow(0, 0, plan.H), dw.narrow(0, plan.H, plan.H)
        else:
            dw_gate = _gemm.weight_grad(dgate, x, ctx.strides[0], gate_dtype) if need_gate else None
            dw_up = _gemm.weight_grad(dup, x, ctx.strides[1], up_dtype) if need_up else None
        if sums is not None:
            db_gate, db_up = (
                g.new_empty(plan.H, dtype=dtype) if need else None
                for need, dtype in zip(needs[4:6], bias_dtypes, strict=False)
            )
            load("reduce").finish(sums, db_gate, db_up)
    dx = None if dx is None else dx.view(plan.x_shape)
    return dx, dw_gate, dw_up, dw_down, db_gate, db_up, db_down, None, None


def _joins(plan: Plan, strides: Sequence[tuple[int, int] | None], needs: tuple[bool, ...], dh: Tensor) -> bool:
    """Whether the gradients of two projections lie side by side, for one product to give both weights'.

    One product of twice the rows fills the last wave of blocks better than two do: 5% less time for 2 x 11008 rows.
    h then takes the place of dh, where a thread writes what it alone has read: all rows are of one alignment.
    """
    K = plan.x_shape[-1]
    same = plan.dtypes[1] == plan.dtypes[2] and strides[0] == strides[1] == (K, 1)
    return not plan.chunked and same and needs[1] and needs[2] and plan.H % 16 == 0 and _gemm.may_overwrite(dh)


def _gate_pass(
    plan: Plan, dh: Tensor, kept: tuple[Tensor, Tensor], needs: tuple[bool, ...], joined: bool
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """`(dgate, dup, both in one tensor, partial sums, h)` in one pass over dh, gate and up; `None` where not needed."""
    need_x, need_gate, need_up, need_down, need_b_gate, need_b_up = needs[:6]
    gate, up = kept
    dgate = dup = both = sums = None
    if plan.chunked or joined:
        both = torch.empty((plan.M, 2 * plan.H), dtype=plan.dtype, device=dh.device)
        dgate, dup = gated_act.halves(both, -1, plan.gate_first or joined)
    else:
        if need_x or need_gate or need_b_gate:  # dh is nobody else's, so dgate may take its place
            dgate = dh if _gemm.may_overwrite(dh) else torch.empty_like(dh)
        dup = torch.empty_like(dh) if need_x or need_up or need_b_up else None
    h = None
    if need_down:
        h = dh if joined else torch.empty_like(dh)
    tensors = (dh, gate, up, dgate, dup, h)
    dtypes = tuple(None if t is None else t.dtype for t in tensors)
    strides = (gate.stride(0), up.stride(0), *(plan.H if t is None else t.stride(0) for t in (dgate, dup)))
    need_sums = need_b_gate or need_b_up
    ct = compute_dtype(plan.dtype)
    run, blocks = gated_act.backward_launch(plan.M, plan.H, strides, dtypes, ct, plan.act, need_sums)
    if need_sums:
        sums = torch.empty((2, blocks, plan.H), dtype=ct, device=dh.device)
    run(*tensors, sums)
    return dgate, dup, both, sums, h


def _composite(
    ctx: Any, g: Tensor | None, g_gate: Tensor | None, g_up: Tensor | None, g_casts: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The same gradients in torch ops, for higher derivatives."""
    x, w_gate, w_up, w_down, kept_gate, kept_up = ctx.saved_tensors
    plan, act, needs, dtype = ctx.plan, ctx.plan.act, ctx.needs_input_grad, ctx.plan.dtype
    grads: list[Tensor | None] = [None] * 9
    dgate = dup = None
    if g is not None:
        gate, up = plan.split(kept_gate, kept_up)
        g = _gemm.rows(g)
        active = act(gate).to(dtype)
        dgate, dup = gated_act.composite(torch.mm(g, w_down), gate, up, act, (True, True), (dtype, dtype))
        grads[3] = _gemm.weight_grad(g, active * up, None, dtype) if needs[3] else None
        grads[6] = g.sum(0).to(plan.dtypes[6]) if needs[6] else None
    if plan.chunked:
        both = None if g is None else torch.cat((dgate, dup) if plan.gate_first else (dup, dgate), -1)
        pairs = [(both, g_gate, w_gate, 0)]
    else:
        pairs = [(dgate, g_gate, w_gate, 0), (dup, g_up, w_up, 1)]
    for dz, own, weight, i in pairs:
        if own is not None:
            dz = own if dz is None else dz + own
        if dz is None:
            continue
        if needs[0]:
            dx = _gemm.input_grad(dz, weight, plan.x_shape, dtype)
            grads[0] = dx if grads[0] is None else grads[0] + dx
        grads[1 + i] = _gemm.weight_grad(dz, _gemm.rows(x), None, dtype) if needs[1 + i] else None
        grads[4 + i] = dz.sum(0).to(plan.dtypes[4 + i]) if needs[4 + i] else None
    grads[:4] = _gemm.through_casts(grads[:4], (x, w_gate, w_up, w_down), plan.dtypes[:4], needs[:4], g_casts)
    return tuple(grads)


def _plan(x: Tensor, weights: Weights, biases: Biases, act: Activation, gate_first: bool) -> Plan | str:
    shapes, dtypes = [x.shape], [x.dtype]
    for t in (*weights, *biases):
        shapes.append(None if t is None else t.shape)
        dtypes.append(None if t is None else t.dtype)
    return _cached_plan(tuple(shapes), tuple(dtypes), _gemm.autocast_dtype(x), act, gate_first)


@functools.lru_cache(maxsize=4096)
def _cached_plan(
    shapes: Any, dtypes: Any, autocast: torch.dtype | None, act: Activation, gate_first: bool
) -> Plan | str:  # fmt: skip
    dtype = _gemm.gemm_dtype(autocast, *dtypes)
    if dtype is None:
        return "the dtypes differ"
    if not load("activations").supports(act):
        return f"{act.name} has no kernel"
    x, w_gate, w_up, w_down, b_gate, b_up, b_down = shapes
    chunked = w_up is None
    found = _gemm.linear_shape(x, w_gate, b_gate)
    if isinstance(found, str):
        return found
    M, width, _ = found
    if chunked and (width % 2 or b_up is not None):
        return "a chunked projection has an even width and one bias"
    H = width // 2 if chunked else width
    if not chunked and (w_up != w_gate or isinstance(_gemm.linear_shape(x, w_up, b_up), str)):
        return "gate and up differ in size"
    down = _gemm.linear_shape((*x[:-1], H), w_down, b_down)
    if isinstance(down, str):
        return down
    casts = _gemm.to_cast(dtype, dtypes, (4, 5, 6))
    return Plan(M, H, dtype, act, chunked, gate_first, x, (*x[:-1], w_down[0]), dtypes, casts)
