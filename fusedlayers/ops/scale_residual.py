"""`residual + drop_path(dropout(scale * x))`: LayerScale, gate, dropout, DropPath and the residual add in one pass."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import KernelError, cdiv, load, next_power_of_2
from . import _dropout, _route
from ._autograd import direct, needs_grad
from ._dropout import Dropout, Rng
from ._dtypes import compute_dtype, promoted, triton_dtype
from ._layout import Coefficients, Shape, coefficients, memory_order, with_strides

OP = "scale_residual"
Scale = Tensor | float | None


def reference(
    x: Tensor,
    residual: Tensor,
    scale: Scale = None,
    dropout_p: float = 0.0,
    drop_path_p: float = 0.0,
    training: bool = False,
) -> Tensor:
    """The torch expression this op stands for."""
    z = x if scale is None else scale * x
    if training and dropout_p > 0.0:
        z = F.dropout(z, dropout_p)
    if training and drop_path_p > 0.0:
        z = z * _path(z, z.dtype, drop_path_p)
    return residual + z


def _path(x: Tensor, dtype: torch.dtype, p: float) -> Tensor:
    """DropPath's factors `(B, 1, ...)`, drawn by torch as timm and torchvision draw them: 0, or 1 / (1 - p)."""
    keep = 1.0 - p
    factors = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1), dtype=dtype).bernoulli_(keep)
    return factors.div_(keep) if keep > 0.0 else factors


def scale_residual(
    x: Tensor, residual: Tensor, scale: Scale, dropout_p: float, drop_path_p: float, training: bool
) -> Tensor:
    """See `functional.scale_residual`."""
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
    if not 0.0 <= drop_path_p <= 1.0:
        raise ValueError(f"drop probability has to be between 0 and 1, but got {drop_path_p}")
    if not training:
        dropout_p = drop_path_p = 0.0
    if not _route.is_compiling():
        tensors = [x, *(t for t in (residual, scale) if isinstance(t, Tensor))]
        route, call = _route.pick(
            OP, tensors, plan=lambda: _prepare(x, residual, scale, dropout_p, drop_path_p), auto=_worth,
            draws=bool(dropout_p or drop_path_p),
        )  # fmt: skip
        if route == "triton":
            rng = before = None
            if dropout_p or drop_path_p:  # in eager's order: dropout draws first
                rng = _dropout.draw(call.drop, x.device)
                before = _dropout.mark(x.device, rng)
            try:
                path = _path(x, call.z_dtype, drop_path_p) if drop_path_p else None
                if needs_grad(*tensors):
                    return _apply(x, residual, scale, path, rng, call)
                return call.forward(x, residual, scale, path, rng)
            except KernelError as error:
                _dropout.rewind(x.device, before)
                _route.failed(OP, error)
    return reference(x, residual, scale, dropout_p, drop_path_p, training)


class _ScaleResidual(torch.autograd.Function):
    """Kept, as in eager: x where scale needs a gradient, scale where x does, DropPath's draw; of dropout, the seed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, scale: Scale, path: Tensor | None, rng: Rng | None, call: _Call
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        need_x, _, need_scale = ctx.needs_input_grad[:3]
        kept_scale = scale if need_x and isinstance(scale, Tensor) else None
        in_memory = _dropout.pointers(rng)
        ctx.save_for_backward(x if need_scale else None, kept_scale, path, *in_memory)
        ctx.call, ctx.rng = call, rng if in_memory[0] is None else None
        return call.forward(x, residual, scale, path, rng)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 6
        call, (need_x, need_res, need_scale) = ctx.call, ctx.needs_input_grad[:3]
        x, scale, path, *in_memory = ctx.saved_tensors
        saved = (x, scale, path, ctx.rng if in_memory[0] is None else tuple(in_memory))
        dx = dscale = None
        if need_x or need_scale:
            try:
                backward = call.composite if torch.is_grad_enabled() else call.backward
                dx, dscale = backward(*saved, need_x, need_scale, g)
            except KernelError as error:
                if call.drop.mode != _dropout.OFF:
                    raise  # the mask exists only as its seed
                _route.failed(OP, error)
                dx, dscale = call.composite(*saved, need_x, need_scale, g)
        return dx, g.to(call.residual_dtype) if need_res else None, dscale, None, None, None


_apply = direct(_ScaleResidual)


@dataclass(frozen=True)
class _Loops:
    """`x` in memory as `A * T` rows of C elements (`kernels/residual.py`).

    Attributes:
        col: whether the scale varies along a row, as `(A, C)`; else one value a row, with period P.
        scale_strides: of the scale over A and C, or over P and nothing.
        path_rows: rows a sample.
        coefs: where the scale lies.
        stride: the strides of the result, which the kernels walk.
        z_stride: those of eager's `scale * x`; the same tuple where they say the same.
        row_major: whether that product is contiguous.
    """

    col: bool
    A: int
    T: int
    C: int
    P: int
    scale_strides: tuple[int, int]
    path_rows: int
    coefs: Coefficients
    stride: Shape
    z_stride: Shape
    row_major: bool

    @property
    def numel(self) -> int:
        return self.A * self.T * self.C


class _Call:
    """Everything about one kind of call that its tensors' values do not change, worked out once."""

    def __init__(
        self, loops: _Loops, drop: Dropout, shape: Shape, x_dtype: torch.dtype, residual_dtype: torch.dtype,
        z_dtype: torch.dtype, scale: Any, path: bool,
    ) -> None:  # fmt: skip
        self.loops, self.drop, self.shape, self.path = loops, drop, shape, path
        self.x_dtype, self.residual_dtype, self.z_dtype = x_dtype, residual_dtype, z_dtype
        self.dtype = torch.promote_types(residual_dtype, z_dtype)
        self.compute = compute_dtype(self.dtype)
        self.scale_shape, self.scale_dtype = (scale[0], scale[2]) if isinstance(scale, tuple) else (None, None)
        self.number = None if isinstance(scale, tuple) else scale
        self.plain_scale = self.scale_shape == (loops.coefs.count,)  # whose gradient needs no view
        self._launches: dict[Any, Any] = {}

    def forward(self, x: Tensor, residual: Tensor, scale: Scale, path: Tensor | None, rng: Rng | None) -> Tensor:
        stride = self.loops.stride
        x = with_strides(x, self.shape, stride)
        return self._apply(x, with_strides(residual, self.shape, stride), scale, path, rng, self.dtype)

    def _apply(
        self, x: Tensor, residual: Tensor | None, scale: Scale, path: Tensor | None, rng: Rng | None, dtype: torch.dtype
    ) -> Tensor:
        """`[residual +] path * drop * (scale * x)`: the forward, and on grad the backward that needs no x."""
        out = torch.empty_strided(self.shape, self.loops.stride, dtype=dtype, device=x.device)
        scale, rng_pointers = self._scale_pointer(scale, x), _dropout.pointers(rng)
        key = (residual is None, x.dtype)
        run = self._launches.get(key)
        if run is None:
            run = self._prepare_apply(key, residual is not None, scale is not None, rng_pointers[0] is not None)
        run(x, residual, scale, path, *rng_pointers, out, numbers=_dropout.numbers(rng))
        return out

    def _scale_pointer(self, scale: Scale, x: Tensor) -> Tensor | None:
        if self.number is not None and self.compute == torch.float64:  # Triton passes Python floats as float32
            return x.new_full((), self.number, dtype=self.compute)
        return scale if isinstance(scale, Tensor) else None

    def _rest(self, has_scale: bool, also: bool, in_memory: bool, extra: tuple[int, ...] = ()) -> tuple:
        loops, drop = self.loops, self.drop
        number = 1.0 if self.number is None or has_scale else float(self.number)
        sizes = (loops.A, loops.T, loops.C, loops.P, *loops.scale_strides, loops.path_rows, *extra)
        flags = (triton_dtype(self.compute), loops.col, has_scale, also, self.path, in_memory)
        return (number, *sizes, *_dropout.constants(drop), *flags, *_dropout.drawn(drop, loops.numel, loops.C))

    def _prepare_apply(self, key: Any, has_residual: bool, has_scale: bool, in_memory: bool) -> Any:
        grid, tile, warps = _forward_tile(self.loops, self.drop.mode != _dropout.OFF)
        rest = (*self._rest(has_scale, has_residual, in_memory), *tile)
        run = self._launches[key] = load("launch").Launch(load("residual").forward, grid, rest, warps)
        return run

    def backward(
        self, x: Tensor | None, scale: Tensor | None, path: Tensor | None, rng: Rng | None, need_x: bool,
        need_scale: bool, g: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        g = with_strides(g, self.shape, self.loops.stride)
        if not need_scale:
            return self._apply(g, None, scale, path, rng, self.x_dtype), None
        x = with_strides(x, self.shape, self.loops.stride)
        dx = torch.empty_like(x) if need_x else None
        scale, rng_pointers = self._scale_pointer(scale, x), _dropout.pointers(rng)
        found = self._launches.get(need_x)
        if found is None:
            found = self._prepare_backward(need_x, scale is not None, rng_pointers[0] is not None)
        run, partials = found
        count, view = self.loops.coefs.count, self.loops.coefs.view
        partial = g.new_empty(1, partials, count, dtype=self.compute)
        dscale = g.new_empty(count, dtype=self.scale_dtype)
        run(g, x, scale, path, *rng_pointers, dx, partial, dscale, None, numbers=_dropout.numbers(rng))
        return dx, dscale if self.plain_scale else view(dscale).reshape(self.scale_shape)

    def _prepare_backward(self, need_x: bool, has_scale: bool, in_memory: bool) -> Any:
        loops = self.loops
        grid, tile, warps, per_block, blocks = _backward_tile(loops)
        rest = (*self._rest(has_scale, need_x, in_memory, (per_block, blocks)), *tile)
        run = load("launch").Launch(load("residual").backward, grid, rest, warps)
        partials = blocks if loops.col else loops.T // loops.P * blocks
        finish = load("reduce").finisher(partials, loops.coefs.count, self.compute, self.scale_dtype, None)
        # g, x, scale, path, seed, offset, dx, partial, dscale, None
        steps = (run, (0, 1, 2, 3, 4, 5, 6, 7), True), (finish, (7, 8, 9), False)
        found = self._launches[need_x] = load("launch").Chain(*steps), partials
        return found

    def composite(
        self, x: Tensor | None, scale: Tensor | None, path: Tensor | None, rng: Rng | None, need_x: bool,
        need_scale: bool, g: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """The same gradients in torch ops, for higher derivatives."""
        dz = g.to(self.compute)
        if rng is not None:
            ones = torch.empty_strided(self.shape, self.loops.stride, dtype=self.compute, device=g.device).fill_(1.0)
            dz = dz * _dropout.factor(ones, self.drop, rng)
        if path is not None:
            dz = dz * path.to(self.compute)
        dx = dscale = None
        if need_x:
            factor = self.number if scale is None else scale
            dx = (dz if factor is None else dz * factor).to(self.x_dtype)
        if need_scale:
            dscale = (dz * x.to(self.compute)).sum_to_size(self.scale_shape).to(self.scale_dtype)
        return dx, dscale


def _worth(call: _Call) -> str:
    """torch's own add does as well where nothing else is left."""
    only_add = call.number is None and call.scale_shape is None and call.drop is _dropout.NONE and not call.path
    return "reference" if only_add else "triton"


def _prepare(x: Tensor, residual: Tensor, scale: Scale, dropout_p: float, drop_path_p: float) -> _Call | str:
    """The prepared call, or why the kernels cannot take these arguments."""
    if not isinstance(residual, Tensor):
        return "residual is no tensor"
    if residual.shape != x.shape:
        return "residual and x broadcast"
    if isinstance(scale, Tensor):
        scale = scale.shape, scale.stride(), scale.dtype
    elif scale is not None and type(scale) not in (int, float):
        return f"scale is a {type(scale).__name__}"
    device, draws = x.device, None
    if dropout_p:
        # eager's dropout reads x itself, or a fresh product
        misaligned = x.data_ptr() % 16 if scale is None else 0
        draws = (dropout_p, misaligned, _dropout.setting(device))
    return _cached_call(
        device, x.shape, x.stride(), x.dtype, residual.stride(), residual.dtype, scale, draws, drop_path_p > 0.0
    )


@functools.lru_cache(maxsize=4096)
def _cached_call(
    device: torch.device, shape: Shape, x_stride: Shape, x_dtype: torch.dtype, residual_stride: Shape,
    residual_dtype: torch.dtype, scale: Any, draws: Any, path: bool,
) -> _Call | str:  # fmt: skip
    shape = tuple(shape)
    if 0 in shape:
        return "the batch is empty"
    operand = scale[:2] if isinstance(scale, tuple) else None if scale is None else ((), ())
    loops = _loops(shape, tuple(x_stride), tuple(residual_stride), operand, path)
    if isinstance(loops, str):
        return loops
    z_dtype = promoted((x_dtype, len(shape)), (scale[2], len(scale[0]))) if isinstance(scale, tuple) else x_dtype
    drop = _dropout.NONE
    if draws is not None:
        p, address, setting = draws
        drop = _dropout.plan(p, loops.numel, z_dtype, address, device, setting)
        if isinstance(drop, str):
            return drop
        if drop.mode == _dropout.EAGER:
            if loops.z_stride != loops.stride:
                return "dropout runs over memory in another order than the sum"
            if drop.vec == 1 and not loops.row_major:
                return "torch's dropout does not follow memory here (an odd number of elements, permuted)"
    return _Call(loops, drop, shape, x_dtype, residual_dtype, z_dtype, scale, path)


def _loops(shape: Shape, x_stride: Shape, residual_stride: Shape, operand: Any, path: bool) -> _Loops | str:
    operands = () if operand is None else (operand,)
    if coefficients(shape, x_stride, *operands) is None:
        return "the scale broadcasts in more than two loops"
    # eager's own layouts, from torch itself
    x, residual = (torch.empty_strided(shape, s, device="meta") for s in (x_stride, residual_stride))
    z = x if operand is None else torch.empty_strided(*operand, device="meta") * x
    stride = (residual + z).stride()
    coefs = coefficients(shape, stride, *operands)
    if coefs is None or coefs.x_stride != stride:
        return "the scale broadcasts in more than two loops"
    (T, C, P), A = coefs.sizes, 1
    if coefs.family == "col":
        (A, T, C), P = coefs.sizes, 1
    path_rows = 1
    if path:
        if not shape:
            return "DropPath needs a batch dim"
        if shape[0] > 1 and memory_order(shape, stride)[0] != 0:
            return "samples do not lie one after another in memory"
        sample = x.numel() // shape[0]
        if coefs.family == "row" and T == 1:  # one scale for all: a row a sample
            T, C = shape[0], sample
        if sample % C:
            return "the scale varies within a sample in more than two loops"
        path_rows = sample // C
    same = all(n == 1 or a == b for n, a, b in zip(shape, z.stride(), stride, strict=True))
    scale_strides = coefs.strides[0] if operands else (0, 0)
    return _Loops(
        coefs.family == "col", A, T, C, P, scale_strides, path_rows, coefs, stride,
        stride if same else z.stride(), z.is_contiguous(),
    )  # fmt: skip


# elements a block takes (col, row), warps; the same for backward, and how many blocks fill a GPU
FORWARD = 2048, 4096, 4
BACKWARD = 4096, 2048, 4, 1056


def _forward_tile(loops: _Loops, draws: bool) -> tuple[tuple[int], tuple[int, int], int]:
    """Grid, tile and warps of the forward: a block takes one tile, wide along memory.

    Where a mask is drawn, which is most of the arithmetic, no tile reaches beyond its row where that can be had.
    """
    elements, warps = FORWARD[0 if loops.col else 1], FORWARD[2]
    most = 1024 if loops.col else elements
    wide = max(8, min(next_power_of_2(loops.C), most))
    even = min(loops.C & -loops.C, most)  # the largest power of two that divides C
    if draws and even >= 256 and loops.T * even >= elements:
        wide = even
    tall = max(1, min(next_power_of_2(loops.T), elements // wide))
    return (loops.A * cdiv(loops.T, tall) * cdiv(loops.C, wide),), (tall, wide), warps


def _backward_tile(loops: _Loops) -> tuple[tuple[int], tuple[int, int], int, int, int]:
    """Grid, tile, warps, rows (`col`) or columns a block walks, and blocks that share one coefficient's sum.

    Enough blocks to fill a GPU several times over, few enough that the second stage reads little.
    """
    elements, warps, target = BACKWARD[0 if loops.col else 1], *BACKWARD[2:]
    wide = max(8, min(next_power_of_2(loops.C), 128 if loops.col else 1024))
    tall = max(1, min(next_power_of_2(loops.T), elements // wide))
    if loops.col:
        across, length, step = loops.A * cdiv(loops.C, wide), loops.T, tall
    else:
        across, length, step = cdiv(loops.T, tall), loops.C, wide
    blocks = max(1, min(cdiv(length, step), target // across))
    per_block = cdiv(cdiv(length, blocks), step) * step
    blocks = cdiv(length, per_block)
    return (across * blocks,), (tall, wide), warps, per_block, blocks
