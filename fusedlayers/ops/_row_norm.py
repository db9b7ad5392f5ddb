"""What LayerNorm and RMSNorm share: a norm of each row, after an optional residual add, and its gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..kernels import KernelError, cdiv, load, next_power_of_2
from . import _route
from ._autograd import composite_backward, direct, hooked, needs_grad
from ._dtypes import compute_dtype, triton_dtype

Result = Tensor | tuple[Tensor, Tensor]
Dtypes = tuple[torch.dtype, ...]


@dataclass(frozen=True, eq=False)
class Norm:
    """Which norm a call asks for; `layer_norm` and `rms_norm` each say how torch computes theirs. `of` makes them.

    Attributes:
        shape: the normalised dims.
        eps: `None`: the machine epsilon of the dtype it is computed in.
        out_dtype: the result's dtype, where it is not what torch's own function gives.
        offset: added to the weight.
        cast_before_weight: whether the normalised value is rounded to the dtype of x before the weight multiplies it.
    """

    op: ClassVar[str]
    center: ClassVar[bool]
    shape: tuple[int, ...]
    eps: float | None
    out_dtype: torch.dtype | None = None
    offset: float = 0.0
    cast_before_weight: bool = False

    @classmethod
    def of(cls, shape: Sequence[int], *settings: Any) -> Norm:
        """The one object of these settings, so that calls look their plan up by it."""
        # a shape that torch would not take either stays what it is, for the reference to raise
        shape = tuple(shape) if isinstance(shape, (tuple, list)) else shape
        if not _route.is_compiling():
            try:
                return _kept_norm(cls, shape, *settings)
            except TypeError:  # symbolic sizes have no hash
                pass
        return cls(shape, *settings)

    def reference(self, s: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The torch expression of the norm of `s`."""
        raise TypeError(f"{type(self).__name__} has no reference")

    def result_dtype(self, s: torch.dtype, params: Dtypes, device: str, autocast: bool) -> torch.dtype | str:
        """The dtype of `reference` for these of `s` and of the parameters, or why the kernels cannot give it."""
        raise TypeError(f"{type(self).__name__} has no dtype rule")


@functools.lru_cache(maxsize=4096)
def _kept_norm(cls: type[Norm], *settings: Any) -> Norm:
    return cls(*settings)


def row_norm(
    norm: Norm, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, passes: bool = False,
    as_eager: bool = False,
) -> Result:  # fmt: skip
    """The norm of `x + residual`, paired with that sum where there is a residual.

    The kernel's sum lies in rows. Where an operand does not, eager's may lie in another order, as in a network whose
    tokens are a transposed map: `as_eager` has it so, at the price of a pass for the sum, and one for rows of it.

    `passes`: without one, paired with x, for who reads it after the norm: the gradient of that is then added where the
    norm's own is written, in a pass that autograd would spend on the sum of the two.
    """
    if not _route.is_compiling():
        tensors = (x, residual, weight, bias)
        route, call = _route.pick(norm.op, tensors, plan=lambda: _prepare(norm, x, residual, weight, bias))
        if route == "triton":
            grad = needs_grad(*tensors)
            if residual is not None and ((as_eager and not call.in_rows) or (grad and hooked(weight, bias))):
                s = x + residual
                return row_norm(norm, s, None, weight, bias), s
            try:
                if grad:
                    if passes and x.requires_grad and not hooked(weight, bias):
                        return _apply_passing(x, None, weight, bias, call)
                    y, s = _apply(x, residual, weight, bias, call)
                else:
                    y, s, _ = call.forward(x, residual, weight, bias, False)
                return (y, x) if passes else y if residual is None else (y, s)
            except KernelError as error:
                _route.failed(norm.op, error)
    if residual is None:
        y = norm.reference(x, weight, bias)
        return (y, x) if passes else y
    s = x + residual
    return norm.reference(s, weight, bias), s


class _RowNorm(torch.autograd.Function):
    """Returns `(y, sum)`, sum `None` without a residual.

    Kept: what was normalised (x itself, or the sum), weight and bias, as eager does, and one or two numbers a row.
    Higher derivatives go through torch's own norm of what was kept, which autograd knows: x is an input, the sum an
    output.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        y, s, stats = call.forward(x, residual, weight, bias, True)
        # the bias is not read again: kept so that editing it before backward raises, as in eager
        ctx.save_for_backward(x if residual is None else s, weight, bias, stats)
        ctx.call = call
        if residual is not None and not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(s)
        return y, s

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, call, needs = ctx.saved_tensors, ctx.call, ctx.needs_input_grad[:4]
        if g is None or torch.is_grad_enabled():
            return call.composite(*saved[:3], needs, g, g_sum)
        try:
            return call.backward(*saved, needs, g, g_sum)
        except KernelError as error:
            _route.failed(call.norm.op, error)
            return call.composite(*saved[:3], needs, g, g_sum)


_apply = direct(_RowNorm)


class _PassingRowNorm(_RowNorm):
    """Returns `(y, x)`; x in the place of the sum, whose gradient it stands for."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: None, weight: Tensor | None, bias: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor]:
        y, _ = _RowNorm.forward(ctx, x, None, weight, bias, call)
        return y, x


_apply_passing = direct(_PassingRowNorm)


class _Call:
    """Everything about one kind of call that its tensors' values do not change, worked out once."""

    def __init__(self, norm: Norm, x: tuple, residual: tuple | None, y_dtype: torch.dtype) -> None:
        self.norm, self.y_dtype = norm, y_dtype
        shape, x_stride, self.x_dtype = x
        self.shape = tuple(shape)  # torch takes a tuple faster than a torch.Size
        self.residual_dtype = None if residual is None else residual[2]
        self.s_dtype = self.x_dtype if residual is None else torch.promote_types(self.x_dtype, residual[2])
        self.dtype = compute_dtype(self.s_dtype)
        self.N = math.prod(norm.shape)
        self.M = math.prod(self.shape) // self.N
        self.x_step = row_step(self.shape, x_stride, len(norm.shape))
        self.residual_step = None if residual is None else row_step(self.shape, residual[1], len(norm.shape))
        self.in_rows = self.x_step is not None and (residual is None or self.residual_step is not None)
        self._launches: dict[Any, Any] = {}

    def forward(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns `(y, sum, statistics)`."""
        # sizes one by one: torch reads them faster than a tuple
        y = x.new_empty(*self.shape, dtype=self.y_dtype)
        s = stats = None
        if self.x_step is None:
            x = x.contiguous()
        if residual is not None:
            s = x.new_empty(*self.shape, dtype=self.s_dtype)
            residual = residual.contiguous() if self.residual_step is None else residual
        if keep:
            stats = x.new_empty(2 if self.norm.center else 1, self.M, dtype=self.dtype)
        key = keep, weight is None, bias is None
        run = self._launches.get(key) or self._prepare_forward(key)
        weight = weight if weight is None else weight.contiguous()
        run(x, residual, weight, bias if bias is None else bias.contiguous(), y, s, stats)
        return y, s, stats

    def _prepare_forward(self, key: tuple[bool, bool, bool]) -> Any:
        keep, no_weight, no_bias = key
        x_step, res_step = (self.N if step is None else step for step in (self.x_step, self.residual_step))
        has_res = self.residual_dtype is not None
        unit = _unit(self.N, x_step, res_step)
        flags = (self.norm.center, self.norm.cast_before_weight, has_res, not no_weight, not no_bias, keep, unit)
        tile = forward_tile(self.N, self.dtype.itemsize, has_res)
        sizes = (self.M, self.N // unit, x_step // unit, res_step // unit)
        dtypes = triton_dtype(self.s_dtype), triton_dtype(self.dtype)
        rest = (*sizes, *dtypes, self._eps(), float(self.norm.offset), *flags)
        kernel, launch = load("norm"), load("launch").Launch
        if tile.rows:
            run = launch(kernel.forward, (cdiv(self.M, tile.rows),), (*rest, tile.rows, tile.cols), tile.warps)
        else:
            run = launch(kernel.forward_long, (self.M,), (*rest, tile.cols), tile.warps)
        self._launches[key] = run
        return run

    def _eps(self) -> float:
        return torch.finfo(self.dtype).eps if self.norm.eps is None else float(self.norm.eps)

    def backward(
        self, s: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, needs: tuple[bool, ...],
        g: Tensor, g_sum: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        need_x, need_res, need_w, need_b = needs
        g, g_step = self._rows(g)
        s, s_step = self._rows(s)
        g_sum, sum_step = (None, self.N) if g_sum is None else self._rows(g_sum)
        # one tensor serves both, as in the backward of eager's add, unless their dtypes differ
        first = self.x_dtype if need_x else self.residual_dtype
        second = self.residual_dtype if need_x and need_res and self.residual_dtype != self.x_dtype else None
        dx = g.new_empty(*self.shape, dtype=first) if need_x or need_res else None
        dres = g.new_empty(*self.shape, dtype=second) if second is not None else None
        dtypes = weight.dtype if need_w else None, bias.dtype if need_b else None
        key = needs, dtypes, weight is None, g_sum is None, g_step, sum_step, s_step
        run, partials = self._launches.get(key) or self._prepare_backward(key, g.device)
        partial = stats.new_empty(2, partials, self.N) if need_w or need_b else None
        w = None if dx is None or weight is None else weight.contiguous()
        dw = stats.new_empty(*self.norm.shape, dtype=dtypes[0]) if need_w else None
        db = stats.new_empty(*self.norm.shape, dtype=dtypes[1]) if need_b else None
        run(g, g_sum, s, w, stats, dx, dres, partial, dw, db)
        return dx if need_x else None, dx if dres is None and need_res else dres, dw, db, None

    def _rows(self, t: Tensor) -> tuple[Tensor, int]:
        """A tensor whose rows lie one step apart, and that step."""
        if t.is_contiguous():
            return t, self.N
        step = row_step(self.shape, t.stride(), len(self.norm.shape))
        return (t.contiguous(), self.N) if step is None else (t, step)

    def _prepare_backward(self, key: tuple, device: torch.device) -> Any:
        (need_x, need_res, need_w, need_b), dtypes, no_weight, no_sum, g_step, sum_step, s_step = key
        need_dx, need_dres = need_x or need_res, need_x and need_res and self.residual_dtype != self.x_dtype
        has_w = not no_weight and need_dx
        unit = _unit(self.N, g_step, sum_step, s_step)
        g_v, sum_v, s_v = g_step // unit, sum_step // unit, s_step // unit
        kernel, launch, ct = load("norm"), load("launch").Launch, triton_dtype(self.dtype)
        M, N, offset, processors = self.M, self.N, float(self.norm.offset), _processors(device)
        # g, g_sum, s, w, stats, dx, dres, partial, dw, db
        steps: list[tuple[Any, tuple[int, ...], bool]] = []
        stored = max(self.s_dtype.itemsize, self.y_dtype.itemsize)
        tile = backward_tile(N, self.dtype.itemsize, stored, _shared_memory(device))
        if tile.rows:
            partials = blocks = _balanced(cdiv(M, tile.rows), processors * tile.per_processor)
            flags = (ct, offset, self.norm.center, not no_sum, has_w, need_dx, need_dres, need_w, need_b, unit)
            rest = (M, N // unit, g_v, sum_v, s_v, *flags, tile.rows, tile.cols, tile.sums, tile.stages)
            steps.append((launch(kernel.backward, (blocks,), rest, tile.warps), (0, 1, 2, 3, 4, 5, 6, 7), False))
        else:
            partials = 0
            if need_dx:
                rest = (M, N // unit, g_v, sum_v, s_v, ct, offset, self.norm.center, not no_sum, has_w, need_dres, unit)
                long = launch(kernel.backward_long, (M,), (*rest, tile.cols), tile.warps)
                steps.append((long, (0, 1, 2, 3, 4, 5, 6), False))
            if need_w or need_b:
                rows, cols = 16, 128
                across = cdiv(N, cols)
                per_block = cdiv(cdiv(M, max(1, processors * 4 // across)), rows) * rows
                partials = cdiv(M, per_block)
                sizes, flags = (M, N // unit, g_v, s_v, per_block, partials), (need_w, need_b, unit, rows, cols)
                rest = (*sizes, ct, self.norm.center, *flags)
                steps.append((launch(kernel.backward_params, (across * partials,), rest), (0, 2, 4, 7), False))
        if need_w or need_b:
            steps.append((load("reduce").finisher(partials, N, self.dtype, *dtypes), (7, 8, 9), False))
        self._launches[key] = prepared = load("launch").Chain(*steps), partials
        return prepared

    def composite(
        self, s: Tensor, weight: Tensor | None, bias: Tensor | None, needs: tuple[bool, ...],
        g: Tensor | None, g_sum: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """The same gradients in torch ops, for higher derivatives."""
        ds, *params = self._gradients(s, weight, bias, needs, g, g_sum)
        wanted = zip(needs, (self.x_dtype, self.residual_dtype), strict=False)
        return *(ds.to(dtype) if need and ds is not None else None for need, dtype in wanted), *params, None

    def _gradients(
        self, s: Tensor, weight: Tensor | None, bias: Tensor | None, needs: tuple[bool, ...],
        g: Tensor | None, g_sum: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Of s, weight and bias."""
        ds = dw = db = None
        if g is not None:
            wanted = needs[0] or needs[1], *needs[2:]
            ds, dw, db = composite_backward(self._exact, (s, weight, bias), wanted, (g,))
        if g_sum is not None:
            ds = g_sum if ds is None else ds + g_sum
        return ds, dw, db

    def _exact(self, s: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The norm in its compute dtype from end to end, so that no autocast policy and no rounding takes part."""
        wide = [None if t is None else t.to(self.dtype) for t in (s, weight, bias)]
        return self.norm.reference(*wide).to(self.y_dtype)


def _prepare(norm: Norm, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> _Call | str:
    """The prepared call, or why the kernels cannot take these arguments."""
    if not isinstance(norm.shape, tuple):
        return "normalized_shape is not a sequence"
    device = "cuda" if x.is_cuda else x.device.type
    return _cached_call(
        norm, (x.shape, x.stride(), x.dtype),
        None if residual is None else (residual.shape, residual.stride(), residual.dtype),
        None if weight is None else (weight.shape, weight.dtype), None if bias is None else (bias.shape, bias.dtype),
        device, torch.is_autocast_enabled(device),
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _cached_call(
    norm: Norm, x: tuple, residual: tuple | None, weight: tuple | None, bias: tuple | None, device: str, autocast: bool
) -> _Call | str:
    shape, inner = x[0], len(norm.shape)
    if inner == 0 or tuple(shape[len(shape) - inner :]) != norm.shape:
        return "normalized_shape does not fit the input"
    if any(p is not None and tuple(p[0]) != norm.shape for p in (weight, bias)):
        return "a parameter is not of normalized_shape"
    if 0 in shape:
        return "the batch is empty"
    if residual is not None and residual[0] != shape:
        return "residual broadcasts"
    s_dtype = x[2] if residual is None else torch.promote_types(x[2], residual[2])
    params = tuple(p[1] for p in (weight, bias) if p is not None)
    if any((p == torch.float64) != (s_dtype == torch.float64) for p in params):
        return "float64 beside another dtype"
    y_dtype = norm.result_dtype(s_dtype, params, device, autocast)
    return y_dtype if isinstance(y_dtype, str) else _Call(norm, x, residual, y_dtype)


@functools.lru_cache(maxsize=4096)
def row_step(shape: tuple[int, ...], stride: tuple[int, ...], inner: int) -> int | None:
    """Elements from one row to the next, a row being the last `inner` dims; `None` where rows need a copy first."""
    length = 1
    for n, step in zip(reversed(shape[-inner:]), reversed(stride[-inner:]), strict=True):
        if n != 1 and step != length:
            return None
        length *= n
    row = expected = None
    for n, step in zip(reversed(shape[:-inner]), reversed(stride[:-inner]), strict=True):
        if n == 1:
            continue
        if row is None:
            row = step
        elif step != expected:
            return None
        expected = step * n
    return length if row is None else row


@dataclass(frozen=True)
class Tile:
    """How a kernel walks rows: `rows` at a time (0: in chunks of `cols`), by `warps` warps.

    Attributes:
        sums: rows of the parameter sums a backward block holds.
        per_processor: backward blocks for each multiprocessor.
        stages: tiles of the backward in flight.
    """

    rows: int
    cols: int
    warps: int
    sums: int = 1
    per_processor: int = 1
    stages: int = 1


@functools.cache
def forward_tile(N: int, itemsize: int, residual: bool) -> Tile:
    """32 values a thread: enough loads in flight to fill the memory pipe, and half of its registers left.

    Up to 1024 columns rows stay within one warp, so that their sums need no barrier. `itemsize`: of the dtype computed
    in.
    """
    cols = next_power_of_2(N)
    if cols * itemsize > 65536:
        return Tile(0, 32768 // itemsize, 8)
    warps = _MEASURED_WARPS.get((cols, residual)) if itemsize == 4 else None
    return Tile(max(1, 1024 // cols), cols, warps or max(1, cols // 1024))


_MEASURED_WARPS = {(4096, False): 8, (4096, True): 2, (8192, False): 4, (8192, True): 4}
"""Of long rows, where others than 32 values a thread were 0.5 to 1% faster on an H200."""


@functools.cache
def backward_tile(N: int, itemsize: int, stored: int, shared: int) -> Tile:
    """16 values a thread of each of input, gradient, weight and two sums: what 128 registers hold.

    `per_processor` makes 16 warps of them resident, which is all there is room for: each block walks many rows and
    writes one partial row. The next tile is loaded while one is worked on. From 512 columns on all warps lie along the
    row, so that a thread adds the rows of its tile up by itself (`sums=1`). A third stage keeps the memory busy while
    two tiles are worked on, where three of both tensors, `stored` bytes an element, fit the `shared` memory.
    """
    cols = next_power_of_2(N)
    if cols * itemsize > 32768:
        return Tile(0, 16384 // itemsize, 8)
    if cols <= 256:
        return Tile(2048 // cols, cols, 4, sums=2048 // cols, per_processor=4, stages=2)
    rows, warps = (2, cols // 256) if cols <= 1024 else (1, cols // 512)
    stages = 3 if 3 * 2 * rows * cols * stored + 8192 <= shared else 2
    return Tile(rows, cols, warps, per_processor=max(1, 16 // warps), stages=stages)


def _unit(*sizes: int) -> int:
    """The largest power of two up to 16 that divides all sizes."""
    return math.gcd(16, *sizes)


def _balanced(tiles: int, blocks: int) -> int:
    """At most `blocks` blocks that share the tiles evenly."""
    return cdiv(tiles, cdiv(tiles, blocks))


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes a block may have; those of the smallest GPUs where the device does not say."""
    least = 99 * 1024
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(properties, "shared_memory_per_block_optin", least)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
