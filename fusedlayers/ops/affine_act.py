"""`act(scale * x + shift [+ residual])` for scalars, per-channel and broadcasting coefficients."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..activations import Activation
from ..kernels import KernelError, cdiv, load, next_power_of_2
from . import _route
from ._autograd import needs_grad
from ._dtypes import activated, compute_dtype, promoted, triton_dtype
from ._layout import Coefficients, coefficients, with_strides

OP = "affine_act"
Coef = Tensor | float
_NOTHING, _RECOMPUTE, _KEPT = 0, 1, 2  # the kernels' MASK


def reference(
    x: Tensor, scale: Coef, shift: Coef, act: Activation, dim: int | None = None, residual: Tensor | None = None
) -> Tensor:
    """The torch expression this op stands for."""
    if dim is not None:
        scale, shift = _along(scale, x, dim), _along(shift, x, dim)
    z = scale * x + shift
    return act(z if residual is None else z + residual)


def affine_act(
    x: Tensor, scale: Coef, shift: Coef, act: Activation, dim: int | None = None, residual: Tensor | None = None
) -> Tensor:
    """See `functional.affine_act`; `residual`, of the shape of `x`, is added before the activation."""
    if _route.is_compiling():
        return reference(x, scale, shift, act, dim, residual)
    scale_, shift_ = _on_device(scale, x), _on_device(shift, x)
    tensors = [t for t in (x, scale_, shift_, residual) if isinstance(t, Tensor)]
    route, plan = _route.pick(OP, tensors, plan=lambda: _plan(x, scale_, shift_, dim, residual, act))
    if route == "triton":
        try:
            if needs_grad(*tensors):
                return _AffineAct.apply(x, scale_, shift_, residual, act, plan)[0]
            return _forward(x, scale_, shift_, residual, act, plan)[1]
        except KernelError as error:
            _route.failed(OP, error)
    return reference(x, scale, shift, act, dim, residual)


class _AffineAct(torch.autograd.Function):
    """Returns `(y, z, coef)`: what backward keeps are outputs, so that higher derivatives flow through them.

    Kept: x only where scale needs a gradient, as eager does. The pre-activation is recomputed from it where it can
    be, else the output (ReLU, sigmoid, tanh) or the pre-activation z itself is kept, again as eager does.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Coef, shift: Coef, residual: Tensor | None, act: Activation, plan: Coefficients
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        ctx.set_materialize_grads(False)
        need_x = ctx.needs_input_grad[1]
        if act.name == "identity":
            ctx.mask = _NOTHING
        else:
            ctx.mask = _RECOMPUTE if need_x and residual is None else _KEPT
        keep_z = ctx.mask == _KEPT and act.keeps == "input"
        x, y, z, coef = _forward(x, scale, shift, residual, act, plan, keep_z, keep_coef=True)
        kept = None if ctx.mask != _KEPT else z if keep_z else y
        ctx.save_for_backward(x if need_x else None, kept, coef)
        ctx.act, ctx.plan, ctx.shape, ctx.stride = act, plan, x.shape, x.stride()
        ctx.x_dtype, ctx.residual_dtype = x.dtype, None if residual is None else residual.dtype
        ctx.coef_specs = tuple((t.shape, t.dtype) if isinstance(t, Tensor) else None for t in (scale, shift))
        return y, z, coef

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_z: Tensor | None, g_coef: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or g_z is not None or g_coef is not None:
            return _composite(ctx, g, g_z, g_coef)
        if g is None:
            return (None,) * 6
        try:
            return _backward(ctx, g)
        except KernelError as error:
            _route.failed(OP, error)
            return _composite(ctx, g, None, None)


def _forward(
    x: Tensor, scale: Coef, shift: Coef, residual: Tensor | None, act: Activation, plan: Coefficients,
    keep_z: bool = False, keep_coef: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Returns `(x as read, y, z, coef)`; all but coef share x's dense strides."""
    kernel, device_act = load("affine"), load("activations")
    z_dtype = promoted(x, scale, shift, residual)
    ct = compute_dtype(z_dtype)
    x = with_strides(x, x.shape, plan.x_stride)
    if residual is not None:
        residual = with_strides(residual, x.shape, plan.x_stride)
    y = torch.empty_like(x, dtype=activated(act, z_dtype, x.device.type))
    z = torch.empty_like(x, dtype=z_dtype) if keep_z else None
    coef = x.new_empty((2, plan.count), dtype=ct) if keep_coef else None
    if ct == torch.float64:  # Triton passes Python floats as float32
        scale, shift = (t if isinstance(t, Tensor) else x.new_full((), t, dtype=ct) for t in (scale, shift))
    scale_ptr, scale_value = (scale, 0.0) if isinstance(scale, Tensor) else (None, float(scale))
    shift_ptr, shift_value = (shift, 0.0) if isinstance(shift, Tensor) else (None, float(shift))
    pointers = (x, residual, scale_ptr, shift_ptr, y, z, coef, scale_value, shift_value)
    flags = (
        triton_dtype(ct), device_act.value(act), *device_act.constants(act),
        scale_ptr is not None, shift_ptr is not None, residual is not None, keep_z, keep_coef,
    )  # fmt: skip
    (scale_a, scale_c), (shift_a, shift_c) = plan.strides
    grid, tile, warps = _forward_tile(plan)
    if plan.family == "col":
        _, T, C = plan.sizes
        args = (*pointers, T, C, plan.count, scale_a, scale_c, shift_a, shift_c, *flags, *tile)
        load("launch").launch(kernel.forward_col, grid, *args, num_warps=warps)
    else:
        args = (*pointers, *plan.sizes, scale_a, shift_a, *flags, *tile)
        load("launch").launch(kernel.forward_row, grid, *args, num_warps=warps)
    return x, y, z, coef


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    kernel, device_act, launch = load("affine"), load("activations"), load("launch").launch
    x, kept, coef = ctx.saved_tensors
    act, plan = ctx.act, ctx.plan
    need_dx, need_scale, need_shift, need_res = ctx.needs_input_grad[:4]
    g = with_strides(g, ctx.shape, ctx.stride)
    dx = torch.empty_like(g, dtype=ctx.x_dtype) if need_dx else None
    dres = torch.empty_like(g, dtype=ctx.residual_dtype) if need_res else None
    grid, tile, warps, per_block, blocks = _backward_tile(plan)
    K = plan.sizes[0] // plan.sizes[2] * blocks if plan.family == "row" else blocks
    need_sums = need_scale or need_shift
    partial = coef.new_empty((2, K, plan.count)) if need_sums else None
    flags = (
        triton_dtype(coef.dtype), device_act.value(act), device_act.gradient(act), act.keeps == "output",
        *device_act.constants(act), ctx.mask, need_dx, need_res, need_scale, need_shift, *tile,
    )  # fmt: skip
    pointers = (g, x, kept, coef, dx, dres, partial)
    if plan.family == "col":
        _, T, C = plan.sizes
        launch(kernel.backward_col, grid, *pointers, T, C, plan.count, per_block, blocks, *flags, num_warps=warps)
    else:
        launch(kernel.backward_row, grid, *pointers, *plan.sizes, per_block, blocks, K, *flags, num_warps=warps)
    dscale = dshift = None
    if need_sums:
        whole = [spec is not None and spec[0].numel() == plan.count for spec in ctx.coef_specs]
        out = [
            coef.new_empty(plan.count, dtype=spec[1] if full else coef.dtype) if need else partial
            for need, spec, full in zip((need_scale, need_shift), ctx.coef_specs, whole, strict=True)
        ]
        load("reduce").finish(partial, *out, need_scale, need_shift)
        dscale = _shaped(plan, out[0], ctx.coef_specs[0]) if need_scale else None
        dshift = _shaped(plan, out[1], ctx.coef_specs[1]) if need_shift else None
    return dx, dscale, dshift, dres, None, None


def _composite(ctx: Any, g: Tensor | None, g_z: Tensor | None, g_coef: Tensor | None) -> tuple[Tensor | None, ...]:
    """The same gradients in torch ops, for higher derivatives."""
    x, kept, coef = ctx.saved_tensors
    act, plan, ct = ctx.act, ctx.plan, coef.dtype
    need_dx, need_scale, need_shift, need_res = ctx.needs_input_grad[:4]
    scale, shift = plan.view(coef[0]), plan.view(coef[1])
    dz = None
    if g is not None:
        g = g.to(ct)
        if ctx.mask == _NOTHING:
            dz = g
        else:
            if ctx.mask == _RECOMPUTE:
                kept = scale * x.to(ct) + shift
                kept = act(kept) if act.keeps == "output" else kept
            dz = act.backward(g, kept.to(ct))
    if g_z is not None:
        dz = g_z.to(ct) if dz is None else dz + g_z.to(ct)
    dx = dscale = dshift = dres = None
    if dz is not None:
        dx = (dz * scale).to(ctx.x_dtype) if need_dx else None
        dres = dz.to(ctx.residual_dtype) if need_res else None
        dscale = (dz * x.to(ct)).sum_to_size(plan.shape) if need_scale else None
        dshift = dz.sum_to_size(plan.shape) if need_shift else None
    grads = [dscale, dshift]
    for i, need in enumerate((need_scale, need_shift)):
        if need and g_coef is not None:
            direct = plan.view(g_coef[i])
            grads[i] = direct if grads[i] is None else grads[i] + direct
        if grads[i] is not None:
            shape, dtype = ctx.coef_specs[i]
            grads[i] = _reduced(grads[i], plan, shape).to(dtype)
    return dx, *grads, dres, None, None


def _shaped(plan: Coefficients, flat: Tensor, spec: tuple[torch.Size, torch.dtype]) -> Tensor:
    """Sums `(count,)` down to the coefficient's own shape and dtype."""
    shape, dtype = spec
    if flat.numel() == shape.numel() and plan.in_order:
        return flat.view(shape)
    return _reduced(plan.view(flat), plan, shape).to(dtype)


def _reduced(full: Tensor, plan: Coefficients, shape: torch.Size) -> Tensor:
    if plan.dim is not None and len(shape) == 1:
        aligned = [1] * full.dim()
        aligned[plan.dim] = shape[0]
        return full.sum_to_size(aligned).reshape(shape)
    return full.sum_to_size(shape)


def _plan(
    x: Tensor, scale: Coef, shift: Coef, dim: int | None, residual: Tensor | None, act: Activation
) -> Coefficients | str:
    """The loops of this call, or why the kernels cannot take it."""
    if x.numel() == 0:
        return "the batch is empty"
    if residual is not None and residual.shape != x.shape:
        return "residual broadcasts"
    if not load("activations").supports(act):
        return f"{act.name} has no kernel"
    operands = tuple((t.shape, t.stride()) if isinstance(t, Tensor) else ((), ()) for t in (scale, shift))
    return _cached_plan(x.shape, x.stride(), operands, dim)


@functools.lru_cache(maxsize=4096)
def _cached_plan(shape: Any, stride: Any, operands: Any, dim: int | None) -> Coefficients | str:
    if dim is not None:
        if not -len(shape) <= dim < len(shape) or any(len(s) > 1 for s, _ in operands):
            return "dim does not fit"
        dim %= len(shape)
        after = len(shape) - 1 - dim
        operands = tuple((s + (1,) * after, st + (0,) * after) if s else (s, st) for s, st in operands)
    found = coefficients(tuple(shape), tuple(stride), *operands, dim=dim)
    return "the coefficients broadcast in more than two loops" if found is None else found


def _on_device(t: Coef, x: Tensor) -> Coef:
    """A 0-d CPU constant as the number torch treats it as beside a GPU tensor; anything else as it is."""
    if isinstance(t, Tensor) and t.dim() == 0 and t.is_cpu and not x.is_cpu and not t.requires_grad:
        return t.item()
    return t


def _along(t: Coef, x: Tensor, dim: int) -> Coef:
    """A `(C,)` coefficient shaped to broadcast along `dim` of `x`."""
    if not isinstance(t, Tensor) or t.dim() == 0:
        return t
    if t.dim() != 1:
        raise RuntimeError(f"with dim={dim}, scale and shift take one value per channel, got shape {list(t.shape)}")
    if not -x.dim() <= dim < x.dim():
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-x.dim()}, {x.dim() - 1}], but got {dim})"
        )
    shape = [1] * x.dim()
    shape[dim] = t.shape[0]
    return t.view(shape)


@functools.lru_cache(maxsize=4096)
def _forward_tile(plan: Coefficients) -> tuple[tuple[int], tuple[int, int], int]:
    """Grid, tile and warps of the forward: about 4096 elements a block, wide along memory."""
    a, b, c = plan.sizes
    if plan.family == "col":
        wide = min(next_power_of_2(c), 1024)
        tall = max(1, min(next_power_of_2(b), 4096 // wide))
        return (a * cdiv(b, tall) * cdiv(c, wide),), (tall, wide), 4
    wide = min(next_power_of_2(b), 4096)
    tall = max(1, min(next_power_of_2(a), 4096 // wide))
    return (cdiv(a, tall) * cdiv(b, wide),), (tall, wide), 4


@functools.lru_cache(maxsize=4096)
def _backward_tile(plan: Coefficients) -> tuple[tuple[int], tuple[int, int], int, int, int]:
    """Grid, tile, warps, elements a block walks and blocks that share one coefficient's sum.

    Enough blocks to fill a GPU several times over, few enough that the second stage reads little.
    """
    a, b, c = plan.sizes
    target = 1024
    if plan.family == "col":
        wide = min(next_power_of_2(c), 256)
        tall = max(1, min(next_power_of_2(b), 2048 // wide))
        across = a * cdiv(c, wide)
        blocks = max(1, min(cdiv(b, tall), target // across if across < target else 1))
        per_block = cdiv(cdiv(b, blocks), tall) * tall
        blocks = cdiv(b, per_block)
        return (a * blocks * cdiv(c, wide),), (tall, wide), 4, per_block, blocks
    wide = min(next_power_of_2(b), 1024)
    tall = max(1, min(next_power_of_2(a), 2048 // wide))
    across = cdiv(a, tall)
    blocks = max(1, min(cdiv(b, wide), target // across if across < target else 1))
    per_block = cdiv(cdiv(b, blocks), wide) * wide
    blocks = cdiv(b, per_block)
    return (across * blocks,), (tall, wide), 4, per_block, blocks
