"""`act(group_norm(x))`, contiguous or channels last."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..activations import Activation
from ..kernels import KernelError, cdiv, load, next_power_of_2
from . import _route
from ._autograd import direct, needs_grad
from ._dtypes import activated, compute_dtype, norm_autocasts, triton_dtype
from ._layout import dense_stride, memory_order, with_strides

OP = "group_norm_act"
_NOTHING, _RECOMPUTE = 0, 1  # the kernels' MASK
_PLAIN = (Tensor, nn.Parameter)


def reference(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, act: Activation
) -> Tensor:
    """The torch expression this op stands for."""
    return act(F.group_norm(x, num_groups, weight, bias, eps))


def group_norm_act(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, act: Activation,
    as_eager: bool = False,
) -> Tensor:  # fmt: skip
    """See `functional.group_norm_act`.

    `as_eager`: the result lies as torch's does, for who views it or draws in its order: on a GPU that is contiguous
    where x is channels last, at the price of a pass that torch spends as well.
    """
    if not _route.is_compiling():
        if as_eager and type(x) in _PLAIN and x.dim() > 3 and _makes_contiguous(x) and _route.intercepted() is None:
            x = x.contiguous()
        tensors = (x, weight, bias)
        route, call = _route.pick(OP, tensors, plan=lambda: _prepare(x, num_groups, weight, bias, eps, act))
        if route == "triton":
            try:
                if needs_grad(*tensors):
                    return _apply(*tensors, call)[0]
                return call.forward(*tensors)[0]
            except KernelError as error:
                _route.failed(OP, error)
    return reference(x, num_groups, weight, bias, eps, act)


class _GroupNormAct(torch.autograd.Function):
    """Returns `(y, stats)`: what backward keeps are outputs, so that higher derivatives flow through them.

    Kept: x, weight and the groups' statistics, as eager does, and a private copy of the bias, from which the
    pre-activation is recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        y, stats = call.forward(x, weight, bias, keep=True)
        ctx.save_for_backward(x, weight, stats)
        ctx.call = call
        return y, stats

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_stats: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, call, needs = ctx.saved_tensors, ctx.call, ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or g_stats is not None:
            return call.composite(*saved, needs, g, g_stats)
        if g is None:
            return (None,) * 4
        try:
            return call.backward(*saved, needs, g)
        except KernelError as error:
            _route.failed(OP, error)
            return call.composite(*saved, needs, g, None)


_apply = direct(_GroupNormAct)


@dataclass(frozen=True)
class Sizes:
    """`x` as E = N * C entities of S positions, D of them a group; `row`: positions are adjacent in memory."""

    row: bool
    N: int
    C: int
    S: int
    D: int
    align: int

    @property
    def E(self) -> int:
        return self.N * self.C

    @property
    def groups(self) -> int:
        return self.E // self.D


@dataclass(frozen=True)
class Tiles:
    """`resident`: groups, channels and positions of a block that holds whole groups, or `None`; `tile`: entities and
    positions of the others, `chunks` of `per_chunk` positions where sums are taken, `blocks` of `per_block` elsewhere.
    """

    resident: tuple[int, int, int] | None
    warps: int
    tile: tuple[int, int]
    tiles: int
    per_chunk: int
    chunks: int
    per_block: int
    blocks: int


@functools.lru_cache(maxsize=4096)
def tiling(sizes: Sizes, itemsize: int) -> Tiles:
    """Tiles by size. A group of up to 16384 elements (padded to powers of two) is read once and stays in registers."""
    wide, deep = next_power_of_2(sizes.S), next_power_of_2(sizes.D)
    resident, warps = None, 4
    if sizes.row and deep * wide <= (16384 if itemsize < 8 else 4096):
        resident = (max(1, min(next_power_of_2(sizes.groups), 1024 // (deep * wide))), deep, wide)
        warps = max(4, min(16, math.prod(resident) // 1024))
    if sizes.row:
        positions = min(wide, 1024)
        entities = max(1, min(next_power_of_2(sizes.E), 4096 // positions))
        tiles = cdiv(sizes.E, entities)
    else:
        entities = min(next_power_of_2(sizes.C), 64)  # 128 bytes of bfloat16: a full cache line a position
        positions = max(1, min(wide, 4096 // entities))
        tiles = sizes.N * cdiv(sizes.C, entities)
    # enough blocks to fill 132 multiprocessors four times over, few enough that combining them reads little
    chunks = max(1, min(cdiv(sizes.S, 4 * positions), 528 // tiles if tiles < 528 else 1))
    per_chunk = cdiv(cdiv(sizes.S, chunks), positions) * positions
    per_block = 2 * positions
    return Tiles(
        resident, warps, (entities, positions), tiles, per_chunk, cdiv(sizes.S, per_chunk), per_block,
        cdiv(sizes.S, per_block),
    )  # fmt: skip


class _Call:
    """Everything about one kind of call that its tensors' values do not change, worked out once."""

    def __init__(
        self, sizes: Sizes, stride: tuple[int, ...], eps: float, act: Activation, dtypes: tuple, y_dtype: torch.dtype
    ) -> None:
        self.sizes, self.stride, self.eps, self.act, self.y_dtype = sizes, stride, eps, act, y_dtype
        self.x_dtype, self.weight_dtype, self.bias_dtype = dtypes
        self.dtype = compute_dtype(self.x_dtype)
        self.mask = _NOTHING if act.name == "identity" else _RECOMPUTE
        self.tiles = tiling(sizes, self.x_dtype.itemsize)
        self._launches: dict[Any, Any] = {}

    def forward(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Returns `(y, stats)`; y has x's dense strides."""
        sizes, t = self.sizes, self.tiles
        x = with_strides(x, x.shape, self.stride)
        weight, bias = (None if p is None else p.contiguous() for p in (weight, bias))
        y = torch.empty_like(x) if self.y_dtype is x.dtype else torch.empty_like(x, dtype=self.y_dtype)
        stats = None
        if keep or t.resident is None:
            stats = x.new_empty(2 * sizes.groups + sizes.C, dtype=self.dtype)
        first, *rest = self._launches.get(keep) or self._prepare_forward(keep)
        if t.resident is not None:
            first(x, weight, bias, stats, y)
            return y, stats
        partial = x.new_empty(3, t.chunks, sizes.E, dtype=self.dtype)
        combine, apply = rest
        first(x, partial)
        combine(partial, bias, stats)
        apply(x, weight, stats, y)
        return y, stats

    def _prepare_forward(self, keep: bool) -> tuple[Any, ...]:
        kernel, device_act, Launch = load("group_norm"), load("activations"), load("launch").Launch
        s, t, ct = self.sizes, self.tiles, triton_dtype(self.dtype)
        weight, bias = self.weight_dtype is not None, self.bias_dtype is not None
        act = (device_act.value(self.act, self.y_dtype), *device_act.constants(self.act))
        loops = (s.E, s.C, s.S // s.align)
        if t.resident is not None:
            rest = (*loops, s.D, ct, *act, self.eps, weight, bias, keep, s.align, *t.resident)
            prepared = (Launch(kernel.forward_resident, (cdiv(s.groups, t.resident[0]),), rest, t.warps),)
        else:
            layout = (s.row, s.align, *t.tile)
            rest = (*loops, t.per_chunk, t.chunks, ct, *layout)
            moments = Launch(kernel.forward_moments, (t.tiles * t.chunks,), rest, 8)
            rest = (s.E, s.C, s.S, s.D, t.per_chunk, t.chunks, ct, self.eps, bias, self._combine_block())
            combine = Launch(kernel.forward_combine, (s.groups,), rest)
            rest = (*loops, s.D, t.per_block, t.blocks, ct, *act, weight, *layout)
            prepared = (moments, combine, Launch(kernel.forward_apply, (t.tiles * t.blocks,), rest, 8))
        self._launches[keep] = prepared
        return prepared

    def _combine_block(self) -> int:
        return min(next_power_of_2(self.tiles.chunks * self.sizes.D), 1024)

    def backward(
        self, x: Tensor, weight: Tensor | None, stats: Tensor, needs: tuple, g: Tensor
    ) -> tuple[Tensor | None, ...]:
        need_dx, need_dweight, need_dbias = needs
        sizes, t, shape = self.sizes, self.tiles, x.shape
        g, x = with_strides(g, shape, self.stride), with_strides(x, shape, self.stride)
        weight = None if weight is None else weight.contiguous()
        dx = torch.empty_like(x) if need_dx else None
        dweight = stats.new_empty(sizes.C, dtype=self.weight_dtype) if need_dweight else None
        dbias = stats.new_empty(sizes.C, dtype=self.bias_dtype) if need_dbias else None
        chunks = t.chunks if t.resident is None else 1
        partial = None
        if need_dweight or need_dbias or t.resident is None:
            partial = stats.new_empty(2, chunks, sizes.E)
        first, *rest = self._launches.get(needs) or self._prepare_backward(needs)
        if t.resident is not None:
            first(g, x, weight, stats, dx, partial)
        else:
            first(g, x, weight, stats, partial)
            if need_dx:
                sums = stats.new_empty(2, sizes.groups)
                combine, apply = rest
                combine(partial, weight, sums)
                apply(g, x, weight, stats, sums, dx)
        if need_dweight or need_dbias:
            load("reduce").finish(partial.view(2, chunks * sizes.N, sizes.C), dbias, dweight)
        return dx, dweight, dbias, None

    def _prepare_backward(self, needs: tuple) -> tuple[Any, ...]:
        kernel, device_act, Launch = load("group_norm"), load("activations"), load("launch").Launch
        need_dx, need_dweight, need_dbias = needs
        s, t, act, weight = self.sizes, self.tiles, self.act, self.weight_dtype is not None
        loops, ct = (s.E, s.C, s.S // s.align), triton_dtype(self.dtype)
        forms = device_act.value(act, self.y_dtype), device_act.gradient(act, self.y_dtype)
        flags = (ct, *forms, device_act.from_output(act))
        flags += (*device_act.constants(act), self.mask, weight)
        if t.resident is not None:
            rest = (*loops, s.D, *flags, need_dx, need_dweight or need_dbias, s.align, *t.resident)
            prepared = (Launch(kernel.backward_resident, (cdiv(s.groups, t.resident[0]),), rest, t.warps),)
        else:
            layout = (s.row, s.align, *t.tile)
            rest = (*loops, s.D, t.per_chunk, t.chunks, *flags, *layout)
            sums = Launch(kernel.backward_sums, (t.tiles * t.chunks,), rest, 8)
            rest = (s.E, s.C, s.S, s.D, t.chunks, ct, weight, self._combine_block())
            combine = Launch(kernel.backward_combine, (s.groups,), rest)
            rest = (*loops, s.D, t.per_block, t.blocks, *flags, *layout)
            prepared = (sums, combine, Launch(kernel.backward_apply, (t.tiles * t.blocks,), rest, 8))
        self._launches[needs] = prepared
        return prepared

    def composite(
        self, x: Tensor, weight: Tensor | None, stats: Tensor, needs: tuple, g: Tensor | None, g_stats: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The same gradients in torch ops, for higher derivatives."""
        act, ct, s = self.act, self.dtype, self.sizes
        need_dx, need_dweight, need_dbias = needs
        per_channel = [1, -1] + [1] * (x.dim() - 2)
        dims = [d for d in range(x.dim()) if d != 1]
        shift = stats[2 * s.groups :]
        dx = dweight = dbias = None
        if g is not None:
            wide = x.to(ct).reshape(s.N, s.C // s.D, -1)
            centred = wide - wide.mean(-1, keepdim=True)
            inv = (centred.square().mean(-1, keepdim=True) + self.eps).rsqrt()
            normed = (centred * inv).view(x.shape)
            scale = None if weight is None else weight.to(ct).view(per_channel)
            dz = g.to(ct)
            if self.mask != _NOTHING:
                z = (normed if scale is None else normed * scale) + shift.view(per_channel)
                dz = act.backward(dz, act(z) if act.keeps == "output" else z)
            if need_dx:
                dn = (dz if scale is None else dz * scale).reshape(wide.shape)
                flat = normed.view(wide.shape)
                dn = dn - dn.mean(-1, keepdim=True) - flat * (dn * flat).mean(-1, keepdim=True)
                dx = (dn * inv).view(x.shape).to(x.dtype)
            dweight = (dz * normed).sum(dims).to(self.weight_dtype) if need_dweight else None
            dbias = dz.sum(dims) if need_dbias else None
        if need_dbias and g_stats is not None:
            direct = g_stats[2 * s.groups :]
            dbias = direct if dbias is None else dbias + direct
        return dx, dweight, None if dbias is None else dbias.to(self.bias_dtype), None


def _prepare(
    x: Tensor, num_groups: Any, weight: Tensor | None, bias: Tensor | None, eps: Any, act: Activation
) -> _Call | str:
    """The prepared call, or why the kernels cannot take these arguments: torch then raises its own errors."""
    params = tuple(None if p is None else (p.dtype, p.shape) for p in (weight, bias))
    device = x.device.type
    return _cached_call(
        num_groups, eps, act, x.shape, x.stride(), x.dtype, params, device, torch.is_autocast_enabled(device)
    )


def _makes_contiguous(x: Tensor) -> bool:
    """Whether torch's group norm gives a contiguous result where x lies, whatever its format."""
    return x.is_cuda  # asking torch instead would show to whatever records the user's ops


def _suggests_channels_last(shape: Any, stride: Any) -> bool:
    """Whether torch's group norm takes a tensor for channels last: by all strides, those of dims of size 1 too."""
    least = 0
    for d in (1, *range(len(shape) - 1, 1, -1), 0):
        if stride[d] < max(least, d == 1) or (d == 0 and least == stride[1]):
            return False
        least = stride[d] * shape[d]
    return len(shape) in (4, 5)


@functools.lru_cache(maxsize=4096)
def _cached_call(
    num_groups: Any, eps: Any, act: Activation, shape: Any, stride: Any, dtype: torch.dtype, params: tuple,
    device: str, autocast: bool,
) -> _Call | str:  # fmt: skip
    if len(shape) < 2 or not isinstance(num_groups, int) or num_groups < 1 or shape[1] % num_groups:
        return "the groups do not divide the channels"
    if 0 in shape:
        return "the batch is empty"
    N, C = shape[:2]
    S = shape.numel() // (N * C)
    if N * C // num_groups * S == 1:
        return "one value per group"
    if any(p is not None and p[1] != (C,) for p in params):
        return "a parameter is not one value per channel"
    if not load("activations").supports(act):
        return f"{act.name} has no kernel"
    dtypes = {dtype, *(p[0] for p in params if p is not None)}
    low = dtype.itemsize == 2
    if autocast and norm_autocasts("group_norm", device):
        fits, y_dtype = torch.float64 not in dtypes or len(dtypes) == 1, torch.float32 if low else dtype
    else:
        fits = len(dtypes) == 1 or (device == "cpu" and low and dtypes == {dtype, torch.float32})
        y_dtype = dtype
    if not fits:
        return "torch does not take these dtypes together"
    if autocast:
        y_dtype = activated(act, y_dtype, device)
    real = [d for d in memory_order(tuple(shape), tuple(stride)) if shape[d] != 1]
    spatial = [d for d in real if d > 1]
    outer = [d for d in (0, 1) if shape[d] != 1]
    row = real == outer + spatial
    last = _suggests_channels_last(shape, stride) and real[-1:] == [1] and real[:-1] == outer[:-1] + spatial
    if (row or last) and spatial == sorted(spatial):  # in torch's formats, which its own results have
        dense = dense_stride(tuple(shape), tuple(stride))
    else:
        row, dense = True, tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    align = 1
    while row and align < 16 and S % (2 * align) == 0:
        align *= 2
    sizes = Sizes(row, N, C, S, C // num_groups, align)
    return _Call(sizes, dense, float(eps), act, (dtype, *(p and p[0] for p in params)), y_dtype)
