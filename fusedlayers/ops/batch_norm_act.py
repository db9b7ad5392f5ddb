"""`act(batch_norm(x) [+ residual])`, training and evaluation, running statistics as torch keeps them."""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations import Activation
from ..kernels import KernelError, load
from . import _route
from ._autograd import direct, needs_grad
from ._dtypes import activated, compute_dtype, promoted, triton_dtype
from ._layout import Coefficients, coefficients, has_format, with_strides
from ._shift import shifted
from ._tiling import RUNNING as _RUNNING
from ._tiling import SAVED as _SAVED
from ._tiling import Tiling, tiling

OP = "batch_norm_act"
_NOTHING, _RECOMPUTE, _KEPT = 0, 1, 2  # the kernels' MASK


def reference(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, momentum: float, eps: float, act: Activation, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The torch expression this op stands for."""
    z = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    return act(z if residual is None else z + residual)


def batch_norm_act(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, momentum: float, eps: float, act: Activation, residual: Tensor | None = None,
    shift: Tensor | None = None, count: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `functional.batch_norm_act`.

    `count` (), which counts batches, is incremented. `shift` (C,) is what was added to x out of autograd's sight, the
    bias of the product that made x: it gets its gradient here. That is 0 where the batch's own mean is taken off again.
    For calls that nothing traces or transforms.
    """
    if shift is not None and not (training and shift.requires_grad and x.requires_grad):
        x, shift = shifted(x, shift, 1), None
    args = (x, running_mean, running_var, weight, bias, training, momentum, eps, act, residual)
    if not _route.is_compiling():
        tensors = (x, weight, bias, residual, running_mean, running_var)
        route, call = _route.pick(OP, tensors, plan=lambda: _prepare(*args))
        if route == "triton":
            if call.odd and (x.is_cpu or _by_cudnn(x, running_mean, running_var, weight, bias, training, eps)):
                # eager's result is contiguous there
                return batch_norm_act(x.contiguous(), *args[1:], shift, count)
            if count is not None and not _takes(count, x, running_mean):
                count, _ = None, count.add_(1)
            try:
                if needs_grad(*tensors):
                    return _apply(*tensors, shift, count, momentum, call)[0]
                return call.forward(*tensors, count, momentum)[0]
            except KernelError as error:
                _route.failed(OP, error)
                if error.after > 1:  # the statistics have seen this batch, and it is counted
                    running_mean = running_var = count = None
    if count is not None:
        count.add_(1)
    return reference(shifted(x, shift, 1), running_mean, running_var, *args[3:])


def _takes(count: Tensor, x: Tensor, running_mean: Tensor | None) -> bool:
    """Whether the kernel that moves the running statistics can count the batch as well."""
    return (
        running_mean is not None
        and type(count) is Tensor
        and count.dtype is torch.int64
        and count.numel() == 1
        and count.get_device() == x.get_device()
        and not count.is_inference()
    )


def _by_cudnn(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, eps: float,
) -> bool:  # fmt: skip
    """Whether eager leaves this call on a GPU to cuDNN, rather than to kernels of torch's own."""
    if weight is None or bias is None:
        return False
    if _backend is None:
        return x.dtype is torch.float32 and x.dim() > 2 and torch.backends.cudnn.enabled
    # absent statistics are to cuDNN as good as any; the question takes tensors only
    mean, var = (weight if t is None else t for t in (running_mean, running_var))
    return _backend(x, weight, bias, mean, var, training, eps) != torch._C._BatchNormBackend.Native


_backend = getattr(torch._C, "_select_batch_norm_backend", None)  # torch >= 2.5


class _BatchNormAct(torch.autograd.Function):
    """Returns `(y, z, stats)`: what backward keeps are outputs, so that higher derivatives flow through them.

    Kept, as eager does: x, weight and the statistics; without a residual the pre-activation is recomputed from them,
    with one the output (ReLU, sigmoid, tanh) or the pre-activation z is kept. The running statistics are saved only
    so that a later edit of them raises, as eager's does.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
        running_mean: Tensor | None, running_var: Tensor | None, shift: Tensor | None, count: Tensor | None,
        momentum: float, call: _Call,
    ) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        y, z, stats = call.forward(x, weight, bias, residual, running_mean, running_var, count, momentum, keep=True)
        kept = None if call.mask != _KEPT else y if z is None else z
        ctx.save_for_backward(x, weight, stats, kept, running_mean, running_var)
        ctx.call, ctx.shift = call, shift.dtype if ctx.needs_input_grad[6] else None
        call.build_backward(ctx.needs_input_grad[:4])
        return y, z, stats

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_z: Tensor | None, g_stats: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, call, needs = ctx.saved_tensors[:4], ctx.call, ctx.needs_input_grad[:4]
        if g is None and g_z is None and g_stats is None:
            return (None,) * 10
        dshift = None if ctx.shift is None else saved[0].new_zeros(saved[0].shape[1], dtype=ctx.shift)
        rest = None, None, dshift, None, None, None
        if torch.is_grad_enabled() or g_z is not None or g_stats is not None:
            grads = call.composite(*saved, needs, g, g_z, g_stats)
            if dshift is not None and grads[0] is not None:  # 0 with a graph behind it, as eager's
                dshift = grads[0].sum([d for d in range(grads[0].dim()) if d != 1]).to(ctx.shift)
            return *grads, *rest[:2], dshift, *rest[3:]
        try:
            return *call.backward(*saved, needs, g), *rest
        except KernelError as error:
            _route.failed(OP, error)
            return *call.composite(*saved, needs, g, None, None), *rest


_apply = direct(_BatchNormAct)


class _Call:
    """Everything about one kind of call that its tensors' values do not change, worked out once."""

    def __init__(
        self, plan: Coefficients, act: Activation, training: bool, eps: float, track: bool, dtypes: tuple,
        y_dtype: torch.dtype, tilings: tuple[Tiling, Tiling], device: torch.device, odd: bool,
    ) -> None:  # fmt: skip
        self.odd = odd  # x is neither contiguous nor channels last
        self.plan, self.act, self.training, self.eps, self.track = plan, act, training, eps, track
        self.x_dtype, self.weight_dtype, self.bias_dtype, self.residual_dtype, self.z_dtype = dtypes
        self.y_dtype, (self.forward_tiling, self.backward_tiling) = y_dtype, tilings
        self.dtype = compute_dtype(self.z_dtype)
        if act.name == "identity":
            self.mask = _NOTHING
        else:
            self.mask = _RECOMPUTE if self.residual_dtype is None else _KEPT
        self.keeps_z = self.mask == _KEPT and act.keeps == "input"
        self.device = device
        self._launches: dict[Any, Any] = {}

    def forward(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
        running_mean: Tensor | None, running_var: Tensor | None, count: Tensor | None, momentum: float,
        keep: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """Returns `(y, z, stats)`; y and z have x's dense strides, z and stats are `None` where not kept."""
        shape, stride = x.shape, self.plan.x_stride
        x = with_strides(x, shape, stride)
        if residual is not None:
            residual = with_strides(residual, shape, stride)
        weight = None if weight is None else weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        y = torch.empty_like(x) if self.y_dtype is x.dtype else torch.empty_like(x, dtype=self.y_dtype)
        z = torch.empty_like(x, dtype=self.z_dtype) if keep and self.keeps_z else None
        key = keep, count is not None
        run, with_stats, chunks = self._launches.get(key) or self._prepare_forward(*key)
        # sizes one by one: torch reads them faster than a tuple
        C, ct = self.forward_tiling.features, self.dtype
        stats = x.new_empty(3, C, dtype=ct) if with_stats else None
        partial = x.new_empty(2, chunks, C, dtype=ct) if chunks else None
        halves = _halves(momentum) if self.track else (0.0, 0.0)
        run(x, residual, weight, bias, running_mean, running_var, count, partial, stats, y, z, numbers=halves)
        return y, z, stats

    def _prepare_forward(self, keep: bool, counts: bool) -> tuple[Any, bool, int]:
        """The launches, whether they write the statistics, and chunks of partial sums, if any."""
        kernel, device_act = load("batch_norm"), load("activations")
        Chain, Launch = load("launch").Chain, load("launch").Launch
        t, ct, bias = self.forward_tiling, triton_dtype(self.dtype), self.bias_dtype is not None
        source = t.source if self.training else _RUNNING
        layout = t.layout
        sums = combine = None
        if source == _SAVED:
            rest = (*t.loops, ct, *layout, *t.sum_tile, t.sum_full)
            sums = Launch(kernel.forward_sums, t.sum_grid, rest, t.sum_warps)
            rest = (t.M, t.C, t.S, *t.chunk, t.chunks, t.fold)
            rest += (ct, self.eps, bias, self.track, t.adjacent, *t.combine_tile)
            combine = Launch(kernel.forward_combine, t.combine_grid, rest, t.combine_warps)
        flags = (self.weight_dtype is not None, bias, self.residual_dtype is not None)
        flags += (self.track and combine is None, keep and self.keeps_z, keep and combine is None)
        act = device_act.value(self.act, self.y_dtype), *device_act.constants(self.act)
        rest = (*t.loops, t.span, ct, *act, self.eps, source)
        rest += (*flags, *layout, *t.apply_tile, t.apply_full, t.apply_stages, *t.sum_tile, t.sum_full)
        apply = Launch(kernel.forward_apply, t.apply_grid, rest, t.apply_warps)
        # x, residual, weight, bias, running_mean, running_var, count, partial, stats, y, z
        steps = (
            (sums, (0, 7), False),
            (combine, (0, 7, 3, 4, 5, 6, 8), True),
            (apply, (0, 1, 2, 3, 4, 5, 6, 8, 9, 10), True),
        )
        with_stats, chunks = keep or combine is not None, 0 if sums is None else t.partials
        self._launches[keep, counts] = prepared = Chain(*steps), with_stats, chunks
        return prepared

    def backward(
        self, x: Tensor, weight: Tensor | None, stats: Tensor, kept: Tensor | None, needs: tuple, g: Tensor
    ) -> tuple[Tensor | None, ...]:
        need_dx, need_dweight, need_dbias, need_dres = needs
        shape, stride, t = x.shape, self.plan.x_stride, self.backward_tiling
        g, x = with_strides(g, shape, stride), with_strides(x, shape, stride)
        weight = None if weight is None else weight.contiguous()
        dx = torch.empty_like(x) if need_dx else None
        C = t.features
        dweight = torch.empty_like(weight) if need_dweight else None
        dbias = stats.new_empty(C, dtype=self.bias_dtype) if need_dbias else None
        dres = written = None
        if need_dres:
            if self.mask == _NOTHING:
                dres = g.to(self.residual_dtype)
            else:
                dres = written = torch.empty_like(g, dtype=self.residual_dtype)
        run, chunks, totals = self._launches.get(needs) or self._prepare_backward(needs)
        partial = stats.new_empty(2, chunks, C) if chunks else None
        total = stats.new_empty(2, C) if totals else None
        run(g, x, kept, weight, stats, written, dx, partial, total, dweight, dbias, None)
        return dx, dweight, dbias, dres

    def build_backward(self, needs: tuple) -> None:
        """Begins to build backward's kernels, to be ready when forward has run through the model."""
        if needs in self._launches or not any(needs):
            return
        try:
            run, chunks, totals = self._prepare_backward(needs)
        except KernelError:
            return  # backward says so
        kept = None if self.mask != _KEPT else self.z_dtype if self.keeps_z else self.y_dtype
        need_dx, need_dweight, need_dbias, need_dres = needs
        run.build_ahead(
            (
                self.y_dtype,
                self.x_dtype,
                kept,
                self.weight_dtype,
                self.dtype,
                self.residual_dtype if need_dres and self.mask != _NOTHING else None,
                self.x_dtype if need_dx else None,
                self.dtype if chunks else None,
                self.dtype if totals else None,
                self.weight_dtype if need_dweight else None,
                self.bias_dtype if need_dbias else None,
                None,
            ),
            self.device.index,
        )

    def _rereads_dz(self, need_dres: bool) -> bool:
        """Whether the second pass reads the masked gradient the first one wrote: unless that rounded it."""
        return need_dres and self.mask != _NOTHING and self.residual_dtype in (self.y_dtype, self.dtype)

    def _prepare_backward(self, needs: tuple) -> tuple[Any, int, bool]:
        """The launches, chunks of partial sums, if any, and whether those are combined for the last launch."""
        kernel, device_act = load("batch_norm"), load("activations")
        Chain, Launch = load("launch").Chain, load("launch").Launch
        need_dx, need_dweight, need_dbias, need_dres = needs
        t, act, mask = self.backward_tiling, self.act, self.mask
        layout, weight = t.layout, self.weight_dtype is not None
        forms = device_act.value(act, self.y_dtype), device_act.gradient(act, self.y_dtype)
        flags = (triton_dtype(self.dtype), *forms, device_act.from_output(act))
        flags += device_act.constants(act)
        two_passes, writes = need_dx and self.training, need_dres and mask != _NOTHING
        source = t.source if two_passes else _SAVED
        sums = combine = apply = None
        if source == _SAVED:
            rest = (*t.loops, *flags, mask, weight, writes, need_dx and not two_passes)
            rest += (*layout, *t.sum_tile, t.sum_full)
            sums = Launch(kernel.backward_sums, t.sum_grid, rest, t.sum_warps)
            if two_passes or need_dweight or need_dbias:
                rest = (t.C, t.chunks, t.fold, two_passes, need_dweight, need_dbias, t.adjacent, *t.combine_tile)
                combine = Launch(kernel.backward_combine, t.combine_grid, rest, t.combine_warps)
        if two_passes:
            if sums is not None:
                writes, mask = False, _NOTHING if self._rereads_dz(need_dres) else mask
            rest = (*t.loops, t.span, *flags, mask, source, weight, writes)
            rest += (need_dweight and combine is None, need_dbias and combine is None)
            rest += (*layout, *t.apply_tile, t.apply_full, t.apply_stages, *t.sum_tile, t.sum_full)
            apply = Launch(kernel.backward_apply, t.apply_grid, rest, t.apply_warps)
        # g, x, kept, weight, stats, written, dx, partial, total, dweight, dbias, None
        totals = combine is not None and apply is not None
        gradient = 5 if sums is not None and self._rereads_dz(need_dres) else 0
        steps = (
            (sums, (0, 1, 2, 3, 4, 5, 6 if apply is None else 11, 7), False),
            (combine, (7, 4, 8, 9, 10), False),
            (apply, (gradient, 1, 2, 3, 4, 8, 6, 5, 9, 10), False),
        )
        self._launches[needs] = prepared = Chain(*steps), 0 if sums is None else t.partials, totals
        return prepared

    def composite(
        self, x: Tensor, weight: Tensor | None, stats: Tensor, kept: Tensor | None, needs: tuple,
        g: Tensor | None, g_z: Tensor | None, g_stats: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """The same gradients in torch ops, for higher derivatives."""
        act, ct = self.act, self.dtype
        need_dx, need_dweight, need_dbias, need_dres = needs
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        wide = x.to(ct)
        if self.training:
            centred = wide - wide.mean(dims, keepdim=True)
            inv = (centred.square().mean(dims, keepdim=True) + self.eps).rsqrt()
        else:
            centred, inv = wide - stats[0].detach().view(shape), stats[1].detach().view(shape)
        normed = centred * inv
        scaled = normed if weight is None else normed * weight.to(ct).view(shape)
        dz = None
        if g is not None:
            dz = g = g.to(ct)
            if self.mask != _NOTHING:
                if self.mask == _RECOMPUTE:
                    kept = scaled + stats[2].view(shape)
                    kept = act(kept) if act.keeps == "output" else kept
                dz = act.backward(g, kept.to(ct))
        if g_z is not None:
            dz = g_z.to(ct) if dz is None else dz + g_z.to(ct)
        dx = dweight = dbias = dres = None
        if dz is not None:
            if need_dx:
                dn = dz if weight is None else dz * weight.to(ct).view(shape)
                if self.training:
                    dn = dn - dn.mean(dims, keepdim=True) - normed * (dn * normed).mean(dims, keepdim=True)
                dx = (dn * inv).to(x.dtype)
            dweight = (dz * normed).sum(dims).to(self.weight_dtype) if need_dweight else None
            dbias = dz.sum(dims) if need_dbias else None
            dres = dz.to(self.residual_dtype) if need_dres else None
        if need_dbias and g_stats is not None:
            dbias = g_stats[2] if dbias is None else dbias + g_stats[2]
        return dx, dweight, None if dbias is None else dbias.to(self.bias_dtype), dres


def _prepare(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, momentum: Any, eps: Any, act: Activation, residual: Tensor | None,
) -> _Call | str:  # fmt: skip
    """The prepared call, or why the kernels cannot take these arguments: torch then raises its own errors."""
    if residual is not None and residual.shape != x.shape:
        return "residual broadcasts"
    if running_mean is not None:
        if running_mean.requires_grad or (running_var is not None and running_var.requires_grad):
            return "running statistics require a gradient"
        if training and not isinstance(momentum, (int, float)):
            return "momentum is not a number"
        if running_var is not None and not (running_mean.is_contiguous() and running_var.is_contiguous()):
            return "running statistics are strided"
    device = x.device
    fp32 = act.spec.autocast_fp32 and torch.is_autocast_enabled(device.type)
    return _cached_call(
        act, bool(training), eps, x.shape, x.stride(), x.dtype, None if residual is None else residual.dtype,
        None if weight is None else (weight.dtype, weight.shape), None if bias is None else (bias.dtype, bias.shape),
        None if running_mean is None else (running_mean.dtype, running_mean.shape),
        None if running_var is None else (running_var.dtype, running_var.shape), fp32 and device.type, device,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _cached_call(
    act: Activation, training: bool, eps: float, shape: Any, stride: Any, dtype: torch.dtype,
    residual_dtype: torch.dtype | None, weight: tuple | None, bias: tuple | None, mean: tuple | None,
    var: tuple | None, autocast_device: str | None, device: torch.device,
) -> _Call | str:  # fmt: skip
    if len(shape) < 2:
        return "x has no channel dim"
    if 0 in shape:
        return "the batch is empty"
    C, count = shape[1], shape.numel()
    if training and count == C:
        return "one value per channel"
    if eps < 0 or (training and eps == 0):
        return "eps is not positive"
    vectors = weight, bias, mean, var
    if any(v is not None and v[1] != (C,) for v in vectors):
        return "a parameter or statistic is not one value per channel"
    present = {v[0] for v in vectors if v is not None}
    if len(present) > 1 or not present <= {dtype, compute_dtype(dtype)}:
        return "parameters and statistics mix dtypes"
    if (mean is None) != (var is None) or (mean is None and not training):
        return "running statistics are missing"
    if not load("activations").supports(act):
        return f"{act.name} has no kernel"
    plan = coefficients(tuple(shape), tuple(stride), ((1, C) + (1,) * (len(shape) - 2), (0, 1) + (0,) * len(shape[2:])))
    if plan is None:
        return "the channel dim lies in several pieces"
    a, b, c = plan.sizes
    row = plan.family == "row"
    sizes = (a // c, c, b) if row else (b, c, 1)
    z_dtype = dtype if residual_dtype is None else promoted((dtype, len(shape)), (residual_dtype, len(shape)))
    dtypes = (dtype, weight and weight[0], bias and bias[0], residual_dtype, z_dtype)
    y_dtype = activated(act, z_dtype, autocast_device) if autocast_device else z_dtype
    tilings = tuple(tiling(row, *sizes, dtype.itemsize, _processors(device), backward) for backward in (False, True))
    odd = not has_format(shape, plan.x_stride)
    return _Call(plan, act, training, eps, training and mean is not None, dtypes, y_dtype, tilings, device, odd)


@functools.cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; the interpreter plays an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@functools.lru_cache(maxsize=64)
def _halves(momentum: float) -> tuple[float, float]:
    """A double as the sum of two float32: Triton takes Python floats as float32."""
    high = struct.unpack("f", struct.pack("f", momentum))[0]
    return high, momentum - high
