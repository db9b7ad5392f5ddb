"""`norm(dropout(x) + residual)`: the row norms with the dropout before their add, in one pass each way.

The mask is the very one of `F.dropout`, or one of `settings(dropout="fast")`; it is not kept but drawn again. What one
kernel cannot do at once (rows too long for registers, masks that only torch can draw) is left to `scale_residual` and
then the norm, each by its own route.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import KernelError, cdiv, load, next_power_of_2
from . import _dropout, _route, _row_norm, _table
from ._autograd import direct, hooked, needs_grad
from ._dropout import Dropout, Rng
from ._dtypes import triton_dtype
from ._row_norm import Norm, Tile, row_norm
from ._shift import shifted
from .scale_residual import OP as SCALE_RESIDUAL
from .scale_residual import scale_residual


def drop_norm(
    norm: Norm, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, p: float, training: bool,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The norm of `F.dropout(x, p, training) + residual`, and that sum.

    `shift` (N,) is what was added to x (*, N) out of autograd's sight, the bias of the product that made x: it gets its
    gradient here, the sums over that of x, which the kernel has at hand. For calls that nothing traces or transforms.

    Raises:
        ValueError: `p` is no probability; as `F.dropout` says it, also in evaluation.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if shift is not None and not (shift.requires_grad and x.requires_grad and norm.shape == shift.shape):
        x, shift = shifted(x, shift), None
    if not training or p == 0.0:
        return row_norm(norm, shifted(x, shift), residual, weight, bias)
    if not _route.is_compiling():
        # before anything is prepared
        if _route.tables_choose() and _table.known(SCALE_RESIDUAL, (x,), True) == "reference":
            s = F.dropout(shifted(x, shift), p, True) + residual
            return row_norm(norm, s, None, weight, bias), s
        tensors, op = (x, residual, weight, bias), f"dropout_{norm.op}"
        plan = functools.partial(_prepare, norm, x, residual, weight, bias, p)
        route, call = _route.pick(op, tensors, plan=plan, auto=functools.partial(_worth, tensors), draws=True)
        if route == "apart" or (route == "triton" and (call is _APART or hooked(weight, bias))):
            x = shifted(x, shift)
            alike = x.stride() == residual.stride()  # else the sum lies as its left operand, which is another one there
            s = scale_residual(x, residual, None, p, 0.0, True) if alike else F.dropout(x, p, True) + residual
            return row_norm(norm, s, None, weight, bias), s
        if route == "triton":
            rng = _dropout.draw(call.drop, x.device)
            before = _dropout.mark(x.device, rng)
            try:
                if needs_grad(*tensors):
                    return _apply(x, residual, weight, bias, shift, rng, call)
                return call.forward(x, residual, weight, bias, False, rng)[:2]
            except KernelError as error:
                _dropout.rewind(x.device, before)
                _route.failed(op, error)
    s = F.dropout(shifted(x, shift), p, True) + residual
    return norm.reference(s, weight, bias), s


def left_to_eager(device: int, dtype: torch.dtype, numel: int) -> bool:
    """Whether a dropout and an add of so many elements are known to be left to eager, and the norm with them apart."""
    return _route.tables_choose() and _table.trained(SCALE_RESIDUAL, device, dtype, numel) == "reference"


def _worth(tensors: tuple[Tensor | None, ...], call: _Call) -> str:
    """Where a dropout and an add are better left to eager, they are here too; then each part takes its own route."""
    return "apart" if _table.choose(SCALE_RESIDUAL, tensors, "triton", True) == "reference" else "triton"


class _DropNorm(torch.autograd.Function):
    """As `_row_norm._RowNorm`; kept beside what that keeps: the seed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, shift: Tensor | None,
        rng: Rng, call: _Call,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        y, s, stats = call.forward(x, residual, weight, bias, True, rng)
        in_memory = _dropout.pointers(rng)
        ctx.save_for_backward(s, weight, bias, stats, *in_memory)
        ctx.call, ctx.rng = call, rng if in_memory[0] is None else None
        ctx.shift = shift.dtype if ctx.needs_input_grad[4] else None
        if not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(s)
        return y, s

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        s, weight, bias, stats, *in_memory = ctx.saved_tensors
        rng, needs = ctx.rng if in_memory[0] is None else tuple(in_memory), ctx.needs_input_grad[:4]
        # a kernel that fails here raises: the mask exists only as its seed
        if g is None or torch.is_grad_enabled():
            return *ctx.call.composite(s, weight, bias, needs, g, g_sum, rng, ctx.shift), None, None
        return *ctx.call.backward(s, weight, bias, stats, needs, g, g_sum, rng, ctx.shift), None, None


_apply = direct(_DropNorm)


class _Call(_row_norm._Call):
    """Likewise, with a mask."""

    def __init__(self, norm: Norm, x: tuple, residual: tuple, y_dtype: torch.dtype, drop: Dropout) -> None:
        super().__init__(norm, x, residual, y_dtype)
        self.drop = drop

    def forward(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, keep: bool, rng: Rng
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns `(y, sum, statistics)`."""
        y = x.new_empty(*self.shape, dtype=self.y_dtype)
        s = x.new_empty(*self.shape, dtype=self.s_dtype)
        stats = x.new_empty(2 if self.norm.center else 1, self.M, dtype=self.dtype) if keep else None
        if self.x_step is None:
            x = x.contiguous()
        if self.residual_step is None:
            residual = residual.contiguous()
        in_memory = _dropout.pointers(rng)
        key = keep, weight is None, bias is None
        run = self._launches.get(key) or self._prepare_drop_forward(key, in_memory[0] is not None)
        weight = weight if weight is None else weight.contiguous()
        bias = bias if bias is None else bias.contiguous()
        run(x, residual, weight, bias, *in_memory, y, s, stats, numbers=_dropout.numbers(rng))
        return y, s, stats

    def _drawn(self, in_memory: bool) -> tuple[Any, ...]:
        """The kernels' RNG_PTR, DROP, VEC, GROUPED and WIDE."""
        return in_memory, *_dropout.drawn(self.drop, self.M * self.N, self.N)

    def _prepare_drop_forward(self, key: tuple[bool, bool, bool], in_memory: bool) -> Any:
        keep, no_weight, no_bias = key
        x_step, res_step = (self.N if step is None else step for step in (self.x_step, self.residual_step))
        unit, drawn = _row_norm._unit(self.N, x_step, res_step), self._drawn(in_memory)
        tile = forward_tile(self.N, drawn[3])
        sizes = (self.M, self.N // unit, x_step // unit, res_step // unit, *_dropout.constants(self.drop))
        flags = (float(self.norm.offset), self.norm.center, self.norm.cast_before_weight, not no_weight, not no_bias)
        dtypes = triton_dtype(self.s_dtype), triton_dtype(self.dtype)
        rest = (*sizes, *dtypes, self._eps(), *flags, keep, *drawn, unit, tile.rows, tile.cols)
        run = load("launch").Launch(load("drop_norm").forward, (cdiv(self.M, tile.rows),), rest, tile.warps)
        self._launches[key] = run
        return run

    def backward(
        self, s: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, needs: tuple[bool, ...],
        g: Tensor, g_sum: Tensor | None, rng: Rng, shift: torch.dtype | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Of x, residual, weight, bias, and of what was added to x, in the dtype `shift` where that is to have one."""
        need_x, need_res, need_w, need_b = needs
        g, g_step = self._rows(g)
        s, s_step = self._rows(s)
        g_sum, sum_step = (None, self.N) if g_sum is None else self._rows(g_sum)
        dx = g.new_empty(*self.shape, dtype=self.x_dtype) if need_x else None
        dres = g.new_empty(*self.shape, dtype=self.residual_dtype) if need_res else None
        dtypes = weight.dtype if need_w else None, bias.dtype if need_b else None, shift
        in_memory = _dropout.pointers(rng)
        key = needs, dtypes, weight is None, g_sum is None, g_step, sum_step, s_step
        found = self._launches.get(key) or self._prepare_drop_backward(key, g.device, in_memory[0] is not None)
        run, partials = found
        sums = 2 if shift is None else 3
        partial = stats.new_empty(sums, partials, self.N) if need_w or need_b or shift is not None else None
        w = weight.contiguous() if weight is not None and (need_x or need_res) else None
        dw = stats.new_empty(*self.norm.shape, dtype=dtypes[0]) if need_w else None
        db = stats.new_empty(*self.norm.shape, dtype=dtypes[1]) if need_b else None
        dshift = None if shift is None else stats.new_empty(self.N, dtype=shift)
        numbers = _dropout.numbers(rng)
        run(g, g_sum, s, w, stats, *in_memory, dx, dres, partial, dw, db, dshift, numbers=numbers)
        return dx, dres, dw, db, dshift

    def _prepare_drop_backward(self, key: tuple, device: torch.device, in_memory: bool) -> Any:
        (need_x, need_res, need_w, need_b), dtypes, no_weight, no_sum, g_step, sum_step, s_step = key
        unit = _row_norm._unit(self.N, g_step, sum_step, s_step)
        stored = max(self.s_dtype.itemsize, self.y_dtype.itemsize)
        tile = backward_tile(self.N, self.dtype.itemsize, stored, _row_norm._shared_memory(device))
        partials = _row_norm._balanced(cdiv(self.M, tile.rows), _row_norm._processors(device) * tile.per_processor)
        sizes = (self.M, self.N // unit, g_step // unit, sum_step // unit, s_step // unit)
        has_w = not no_weight and (need_x or need_res)
        need_shift = dtypes[2] is not None
        flags = (float(self.norm.offset), self.norm.center, not no_sum, has_w, need_x, need_res, need_w, need_b)
        flags += (need_shift,)
        layout = (unit, tile.rows, tile.cols, tile.sums, tile.stages)
        rest = (*sizes, *_dropout.constants(self.drop), triton_dtype(self.dtype), *flags, *self._drawn(in_memory))
        run = load("launch").Launch(load("drop_norm").backward, (partials,), (*rest, *layout), tile.warps)
        # g, g_sum, s, w, stats, seed, offset, dx, dres, partial, dw, db, dshift
        steps: list[tuple[Any, tuple[int, ...], bool]] = [(run, (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), True)]
        if need_w or need_b or need_shift:
            finish = load("reduce").finisher(partials, self.N, self.dtype, *dtypes)
            steps.append((finish, (9, 10, 11, 12) if need_shift else (9, 10, 11), False))
        self._launches[key] = prepared = load("launch").Chain(*steps), partials
        return prepared

    def composite(
        self, s: Tensor, weight: Tensor | None, bias: Tensor | None, needs: tuple[bool, ...],
        g: Tensor | None, g_sum: Tensor | None, rng: Rng, shift: torch.dtype | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """The same gradients in torch ops, with the same mask, for higher derivatives."""
        ds, dw, db = self._gradients(s, weight, bias, needs, g, g_sum)
        dx = dres = None
        if needs[0] and ds is not None:
            ones = torch.ones(self.shape, dtype=self.dtype, device=ds.device)
            dx = (ds * _dropout.factor(ones, self.drop, rng)).to(self.x_dtype)
        if needs[1] and ds is not None:
            dres = ds.to(self.residual_dtype)
        dshift = None if shift is None or dx is None else dx.reshape(-1, self.N).sum(0).to(shift)
        return dx, dres, dw, db, dshift


@functools.cache
def forward_tile(N: int, grouped: bool) -> Tile:
    """16 to 32 values a thread, rows up to 1024 columns within a warp; four times the threads where each element takes
    a call of the generator by itself, which is all there is to do then."""
    cols = next_power_of_2(N)
    return Tile(max(1, 512 // cols), cols, min(16, max(1, cols // 1024) * (1 if grouped else 4)))


@functools.cache
def backward_tile(N: int, itemsize: int, stored: int, shared: int) -> Tile:
    """8 values a thread where `norm.py`'s backward has 16, as the generator needs registers too: 96 of them then.

    As many stages as fit the `shared` memory for three tensors of `stored` bytes an element, and the mask on its way
    from the threads that draw it to those that use it.
    """
    cols = next_power_of_2(N)
    if cols <= 256:
        rows, warps, sums = 1024 // cols, 4, 1024 // cols
    else:
        rows, warps, sums = 1, min(16, cols // 256), 1
    elements = rows * cols
    stages = next(n for n in (3, 2, 1) if n == 1 or (n - 1) * 3 * elements * stored + 2 * elements + 1024 <= shared)
    return Tile(rows, cols, warps, sums, max(1, 20 // warps), stages)


_APART = object()
"""In place of a prepared call: to be done in two steps."""


def _prepare(norm: Norm, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, p: float) -> Any:
    """The prepared call, `_APART`, or why the kernels cannot take these arguments."""
    if not isinstance(norm.shape, tuple):
        return "normalized_shape is not a sequence"
    device = x.device
    return _cached_call(
        norm, (x.shape, x.stride(), x.dtype), (residual.shape, residual.stride(), residual.dtype),
        None if weight is None else (weight.shape, weight.dtype), None if bias is None else (bias.shape, bias.dtype),
        device, torch.is_autocast_enabled(device.type), p, x.data_ptr() % 16, _dropout.setting(device),
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _cached_call(
    norm: Norm, x: tuple, residual: tuple, weight: tuple | None, bias: tuple | None, device: torch.device,
    autocast: bool, p: float, address: int, setting: str,
) -> Any:  # fmt: skip
    plain = _row_norm._cached_call(norm, x, residual, weight, bias, device.type, autocast)
    if isinstance(plain, str):
        return plain
    size = plain.dtype.itemsize
    if next_power_of_2(plain.N) * size > 32768:  # rows that registers do not hold in backward
        return _APART
    drop = _dropout.plan(p, plain.M * plain.N, plain.x_dtype, address, device, setting)
    # torch's own mask follows memory, this kernel rows
    if isinstance(drop, str) or (drop.mode == _dropout.EAGER and (plain.x_step != plain.N or not plain.in_rows)):
        return _APART
    return _Call(norm, x, residual, plain.y_dtype, drop)
