"""`act(scale * x + shift [+ residual])` for scalars, per-channel and broadcasting coefficients."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..activations import Activation
from ..kernels import KernelError, cdiv, load, next_power_of_2
from . import _route
from ._autograd import direct, needs_grad
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
    if not _route.is_compiling():
        scale_, shift_ = _on_device(scale, x), _on_device(shift, x)
        tensors = [x, *(t for t in (scale_, shift_, residual) if isinstance(t, Tensor))]
        route, call = _route.pick(OP, tensors, plan=lambda: _prepare(x, scale_, shift_, dim, residual, act))
        if route == "triton":
            try:
                if needs_grad(*tensors):
                    return _apply(x, scale_, shift_, residual, call)[0]
                return call.forward(x, scale_, shift_, residual)[0]
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
        ctx: Any, x: Tensor, scale: Coef, shift: Coef, residual: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        ctx.set_materialize_grads(False)
        need_x = ctx.needs_input_grad[1]
        if call.act.name == "identity":
            ctx.mask = _NOTHING
        else:
            ctx.mask = _RECOMPUTE if need_x and residual is None else _KEPT
        keep_z = ctx.mask == _KEPT and call.act.keeps == "input"
        y, z, coef = call.forward(x, scale, shift, residual, keep_z, keep_coef=True)
        kept = None if ctx.mask != _KEPT else z if keep_z else y
        ctx.save_for_backward(x if need_x else None, kept, coef)
        ctx.call = call
        return y, z, coef

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_z: Tensor | None, g_coef: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, call, needs = ctx.saved_tensors, ctx.call, ctx.needs_input_grad[:4]
        if torch.is_grad_enabled() or g_z is not None or g_coef is not None:
            return call.composite(*saved, ctx.mask, needs, g, g_z, g_coef)
        if g is None:
            return (None,) * 5
        try:
            return call.backward(*saved, ctx.mask, needs, g)
        except KernelError as error:
            _route.failed(OP, error)
            return call.composite(*saved, ctx.mask, needs, g, None, None)


_apply = direct(_AffineAct)


class _Call:
    """Everything about one kind of call that its tensors' values do not change, worked out once."""

    def __init__(self, plan: Coefficients, act: Activation, shape: Any, dtypes: tuple, numbers: tuple, y_dtype: Any):
        self.plan, self.act, self.shape, self.y_dtype = plan, act, shape, y_dtype
        self.x_dtype, self.residual_dtype, *self.coef_dtypes, self.z_dtype = dtypes
        self.coef_shapes, self.values = numbers
        self.dtype = compute_dtype(self.z_dtype)
        # whether a coefficient's gradient is summed in its own shape; else it still has to shrink
        self.is_whole = [s is not None and s.numel() == plan.count and plan.in_order for s in self.coef_shapes]
        self._launches: dict[Any, Any] = {}

    def forward(
        self,
        x: Tensor,
        scale: Coef,
        shift: Coef,
        residual: Tensor | None,
        keep_z: bool = False,
        keep_coef: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns `(y, z, coef)`; y and z have the dense strides of x."""
        plan = self.plan
        x = with_strides(x, self.shape, plan.x_stride)
        if residual is not None:
            residual = with_strides(residual, self.shape, plan.x_stride)
        y = torch.empty_like(x) if self.y_dtype is x.dtype else torch.empty_like(x, dtype=self.y_dtype)
        z = torch.empty_like(x, dtype=self.z_dtype) if keep_z else None
        coef = x.new_empty(2, plan.count, dtype=self.dtype) if keep_coef else None
        if self.dtype == torch.float64:  # Triton passes Python floats as float32
            scale, shift = (t if isinstance(t, Tensor) else x.new_full((), t, dtype=self.dtype) for t in (scale, shift))
        run = self._launches.get((keep_z, keep_coef)) or self._prepare_forward(keep_z, keep_coef)
        scale = scale if isinstance(scale, Tensor) else None
        run(x, residual, scale, shift if isinstance(shift, Tensor) else None, y, z, coef)
        return y, z, coef

    def _prepare_forward(self, keep_z: bool, keep_coef: bool) -> Any:
        kernel, device_act, plan = load("affine"), load("activations"), self.plan
        has_scale, has_shift = (v is None or self.dtype == torch.float64 for v in self.values)
        (scale_a, scale_c), (shift_a, shift_c) = plan.strides
        grid, tile, warps = _forward_tile(plan)
        scale, shift = (0.0 if v is None else v for v in self.values)
        if plan.family == "col":
            sizes = (plan.sizes[1], plan.sizes[2], plan.count, scale_a, scale_c, shift_a, shift_c)
        else:
            sizes = (*plan.sizes, scale_a, shift_a)
        flags = (has_scale, has_shift, self.residual_dtype is not None, keep_z, keep_coef)
        rest = (scale, shift, *sizes, triton_dtype(self.dtype), device_act.value(self.act, self.y_dtype))
        rest += (*device_act.constants(self.act), *flags, *tile)
        entry = kernel.forward_col if plan.family == "col" else kernel.forward_row
        run = self._launches[keep_z, keep_coef] = load("launch").Launch(entry, grid, rest, warps)
        return run

    def backward(
        self, x: Tensor | None, kept: Tensor | None, coef: Tensor, mask: int, needs: tuple, g: Tensor
    ) -> tuple[Tensor | None, ...]:
        plan = self.plan
        need_dx, need_scale, need_shift, need_res = needs
        g = with_strides(g, self.shape, plan.x_stride)
        x = None if x is None else with_strides(x, self.shape, plan.x_stride)
        dx = dres = partial = dscale = dshift = None
        if need_dx:
            dx = torch.empty_like(g) if g.dtype is self.x_dtype else torch.empty_like(g, dtype=self.x_dtype)
        if need_res:
            dres = torch.empty_like(g, dtype=self.residual_dtype)
        run, partials = self._launches.get((mask, needs)) or self._prepare_backward(mask, needs)
        if need_scale or need_shift:
            partial = coef.new_empty(2, partials, plan.count)
            dscale = self._sum_buffer(0, coef) if need_scale else None
            dshift = self._sum_buffer(1, coef) if need_shift else None
        run(g, x, kept, coef, dx, dres, partial, dscale, dshift)
        if need_scale and not self.is_whole[0]:
            dscale = self._shaped(0, dscale)
        if need_shift and not self.is_whole[1]:
            dshift = self._shaped(1, dshift)
        return dx, dscale, dshift, dres, None

    def _prepare_backward(self, mask: int, needs: tuple) -> Any:
        kernel, device_act, plan, act = load("affine"), load("activations"), self.plan, self.act
        need_dx, need_scale, need_shift, need_res = needs
        grid, tile, warps, per_block, blocks = _backward_tile(plan)
        forms = device_act.value(act, self.y_dtype), device_act.gradient(act, self.y_dtype)
        flags = (triton_dtype(self.dtype), *forms, device_act.from_output(act))
        flags += (*device_act.constants(act), mask, need_dx, need_res, need_scale, need_shift, *tile)
        if plan.family == "col":
            partials = blocks
            entry, sizes = kernel.backward_col, (plan.sizes[1], plan.sizes[2], plan.count, per_block, blocks)
        else:
            R, _, P = plan.sizes
            partials = R // P * blocks
            entry, sizes = kernel.backward_row, (*plan.sizes, per_block, blocks, partials)
        # g, x, kept, coef, dx, dres, partial, dscale, dshift
        steps = [(load("launch").Launch(entry, grid, (*sizes, *flags), warps), (0, 1, 2, 3, 4, 5, 6), False)]
        if need_scale or need_shift:
            dtypes = [self._sum_dtype(i) if need else None for i, need in enumerate((need_scale, need_shift))]
            steps.append((load("reduce").finisher(partials, plan.count, self.dtype, *dtypes), (6, 7, 8), False))
        self._launches[mask, needs] = prepared = load("launch").Chain(*steps), partials
        return prepared

    def composite(
        self, x: Tensor | None, kept: Tensor | None, coef: Tensor, mask: int, needs: tuple,
        g: Tensor | None, g_z: Tensor | None, g_coef: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """The same gradients in torch ops, for higher derivatives."""
        act, plan, ct = self.act, self.plan, self.dtype
        need_dx, need_scale, need_shift, need_res = needs
        scale, shift = plan.view(coef[0]), plan.view(coef[1])
        dz = None
        if g is not None:
            dz = g = g.to(ct)
            if mask != _NOTHING:
                if mask == _RECOMPUTE:
                    kept = scale * x.to(ct) + shift
                    kept = act(kept) if act.keeps == "output" else kept
                dz = act.backward(g, kept.to(ct))
        if g_z is not None:
            dz = g_z.to(ct) if dz is None else dz + g_z.to(ct)
        dx = dres = None
        grads: list[Tensor | None] = [None, None]
        if dz is not None:
            dx = (dz * scale).to(self.x_dtype) if need_dx else None
            dres = dz.to(self.residual_dtype) if need_res else None
            grads[0] = (dz * x.to(ct)).sum_to_size(plan.shape) if need_scale else None
            grads[1] = dz.sum_to_size(plan.shape) if need_shift else None
        for i, need in enumerate((need_scale, need_shift)):
            if need and g_coef is not None:
                direct = plan.view(g_coef[i])
                grads[i] = direct if grads[i] is None else grads[i] + direct
            if grads[i] is not None:
                grads[i] = self._reduced(i, grads[i]).to(self.coef_dtypes[i])
        return dx, *grads, dres, None

    def _sum_buffer(self, i: int, coef: Tensor) -> Tensor:
        """Where coefficient i's gradient is summed."""
        if not self.is_whole[i]:
            return coef.new_empty(self.plan.count)
        shape, dtype = self.coef_shapes[i], self.coef_dtypes[i]
        return coef.new_empty(*shape, dtype=dtype) if shape else coef.new_empty((), dtype=dtype)

    def _sum_dtype(self, i: int) -> torch.dtype:
        return self.coef_dtypes[i] if self.is_whole[i] else self.dtype

    def _shaped(self, i: int, flat: Tensor) -> Tensor:
        return self._reduced(i, self.plan.view(flat)).to(self.coef_dtypes[i])

    def _reduced(self, i: int, full: Tensor) -> Tensor:
        """Sums the broadcast coefficients down to the shape coefficient i came in."""
        shape, dim = self.coef_shapes[i], self.plan.dim
        if dim is not None and len(shape) == 1:
            aligned = [1] * full.dim()
            aligned[dim] = shape[0]
            return full.sum_to_size(aligned).reshape(shape)
        return full.sum_to_size(shape)


def _prepare(
    x: Tensor, scale: Coef, shift: Coef, dim: int | None, residual: Tensor | None, act: Activation
) -> _Call | str:
    """The prepared call, or why the kernels cannot take these arguments."""
    if residual is not None and residual.shape != x.shape:
        return "residual broadcasts"
    fp32 = act.spec.autocast_fp32 and torch.is_autocast_enabled(x.device.type)
    residual_dtype = None if residual is None else residual.dtype
    return _cached_call(
        act, dim, x.shape, x.stride(), x.dtype, _key(scale), _key(shift), residual_dtype, fp32 and x.device.type
    )


def _key(t: Coef) -> Any:
    return (t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else float(t)


@functools.lru_cache(maxsize=4096)
def _cached_call(
    act: Activation, dim: int | None, shape: Any, stride: Any, dtype: torch.dtype, scale: Any, shift: Any,
    residual_dtype: torch.dtype | None, autocast_device: str | None,
) -> _Call | str:  # fmt: skip
    if 0 in shape:
        return "the batch is empty"
    if not load("activations").supports(act):
        return f"{act.name} has no kernel"
    keys = (scale, shift)
    operands = tuple(((), ()) if isinstance(k, float) else k[:2] for k in keys)
    if dim is not None:
        if not -len(shape) <= dim < len(shape) or any(len(s) > 1 for s, _ in operands):
            return "dim does not fit"
        dim %= len(shape)
        after = len(shape) - 1 - dim
        operands = tuple((s + (1,) * after, st + (0,) * after) if s else (s, st) for s, st in operands)
    plan = coefficients(tuple(shape), tuple(stride), *operands, dim=dim)
    if plan is None:
        return "the coefficients broadcast in more than two loops"
    coef_dtypes = [None if isinstance(k, float) else k[2] for k in keys]
    dims = [0 if isinstance(k, float) else len(k[0]) for k in keys]
    z_dtype = promoted((dtype, len(shape)), *zip(coef_dtypes, dims, strict=True), (residual_dtype, len(shape)))
    y_dtype = activated(act, z_dtype, autocast_device) if autocast_device else z_dtype
    shapes = [None if isinstance(k, float) else k[0] for k in keys]
    values = [k if isinstance(k, float) else None for k in keys]
    return _Call(plan, act, shape, (dtype, residual_dtype, *coef_dtypes, z_dtype), (shapes, values), y_dtype)


def _on_device(t: Coef, x: Tensor) -> Coef:
    """A 0-d CPU constant as the number torch treats it as beside a GPU tensor; anything else as it is."""
    if isinstance(t, Tensor) and t.dim() == 0 and t.is_cpu and isinstance(x, Tensor) and not x.is_cpu:
        return t if t.requires_grad else t.item()
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
    """Grid, tile and warps of the forward: 2048 elements a block, wide along memory."""
    a, b, c = plan.sizes
    if plan.family == "col":
        wide = min(next_power_of_2(c), 1024)
        tall = max(1, min(next_power_of_2(b), 2048 // wide))
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
    target = 528  # four blocks on each of 132 multiprocessors
    if plan.family == "col":
        wide = min(next_power_of_2(c), 128)
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
