"""`act(gate) * up`: SwiGLU, GeGLU, ReGLU and their like, of two tensors or of the two halves of one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..activations import Activation
from ..kernels import KernelError, load
from . import _gemm, _route
from ._autograd import direct, needs_grad
from ._dtypes import compute_dtype, promoted, triton_dtype
from ._layout import Shape, dense_stride, memory_order, with_strides

OP = "gated_act"


def reference(gate: Tensor, up: Tensor, act: Activation) -> Tensor:
    """The torch expression this op stands for."""
    return act(gate) * up


def gated_act(gate: Tensor, up: Tensor, act: Activation) -> Tensor:
    """See `functional.gated_act`."""
    if not _route.is_compiling():
        route, plan = _route.pick(OP, (gate, up), plan=lambda: _plan(gate, up, act))
        if route == "triton":
            try:
                if needs_grad(gate, up):
                    return _apply(gate, up, plan)
                return plan.forward(gate, up)
            except KernelError as error:
                _route.failed(OP, error)
    return reference(gate, up, act)


def chunked_reference(x: Tensor, act: Activation, dim: int, gate_first: bool) -> Tensor:
    """`reference` of the halves of `x` along `dim`."""
    return reference(*halves(x, dim, gate_first), act)


def chunked(x: Tensor, act: Activation, dim: int = -1, gate_first: bool = True) -> Tensor:
    """`gated_act` of the halves of `x` along `dim`; backward writes both gradients into one tensor."""
    if not _route.is_compiling():
        route, plan = _route.pick(OP, (x,), plan=lambda: _chunked_plan(x, act, dim))
        if route == "triton":
            try:
                if needs_grad(x):
                    return _apply_chunked(x, plan, dim, gate_first)
                return plan.forward(*_halves(x, dim, gate_first))
            except KernelError as error:
                _route.failed(OP, error)
    return chunked_reference(x, act, dim, gate_first)


def halves(x: Tensor, dim: int, gate_first: bool) -> tuple[Tensor, Tensor]:
    """`(gate, up)`, views of `x`.

    Raises:
        RuntimeError: the size of `dim` is odd.
    """
    size = x.size(dim)
    if size % 2:
        raise RuntimeError(f"Halving dimension must be even, but dimension {dim} is size {size}")
    first, second = x.narrow(dim, 0, size // 2), x.narrow(dim, size // 2, size // 2)
    return (first, second) if gate_first else (second, first)


def _halves(x: Tensor, dim: int, gate_first: bool) -> Sequence[Tensor]:
    """The same of an even size, in one call and out of autograd's sight."""
    both = x.unsafe_chunk(2, dim)
    return both if gate_first else (both[1], both[0])


class _GatedAct(torch.autograd.Function):
    """Kept: gate, and up where the gate needs a gradient."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, plan: Plan) -> Tensor:
        ctx.save_for_backward(gate, up if ctx.needs_input_grad[0] else None)
        ctx.plan, ctx.dtypes = plan, (gate.dtype, up.dtype)
        return plan.forward(gate, up)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        if not torch.is_grad_enabled():
            try:
                plan, (dgate, dup) = ctx.plan, ctx.dtypes
                dgate = plan.grad(g, dgate) if needs[0] else None
                dup = plan.grad(g, dup) if needs[1] else None
                plan.backward(g, gate, up, dgate, dup)
                return dgate, dup, None
            except KernelError as error:
                _route.failed(OP, error)
        return *composite(g, gate, up, ctx.plan.act, needs, ctx.dtypes), None


class _Chunked(torch.autograd.Function):
    """Kept: x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, dim: int, gate_first: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.plan, ctx.where = plan, (dim, gate_first)
        return plan.forward(*_halves(x, dim, gate_first))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if not torch.is_grad_enabled():
            try:
                gate, up = _halves(x, *ctx.where)
                dx = torch.empty_strided(x.shape, ctx.plan.grad_stride, dtype=x.dtype, device=x.device)
                ctx.plan.backward(g, gate, up, *_halves(dx, *ctx.where))
                return dx, None, None, None
            except KernelError as error:
                _route.failed(OP, error)
        dim, gate_first = ctx.where
        gate, up = halves(x, dim, gate_first)
        both = composite(g, gate, up, ctx.plan.act, (True, True), (x.dtype, x.dtype))
        return torch.cat(both if gate_first else both[::-1], dim), None, None, None


_apply, _apply_chunked = direct(_GatedAct), direct(_Chunked)


def composite(
    g: Tensor, gate: Tensor, up: Tensor | None, act: Activation, needs: Sequence[bool], dtypes: Sequence[torch.dtype]
) -> list[Tensor | None]:
    """Both gradients in torch ops, for higher derivatives."""
    active = act(gate)
    dgate = dup = None
    if needs[0]:
        dactive = (g * up).to(active.dtype)
        dgate = act.backward(dactive, active if act.keeps == "output" else gate).to(dtypes[0])
    if needs[1]:
        dup = (g * active).to(dtypes[1])
    return [dgate, dup]


@dataclass(frozen=True)
class Plan:
    """The loops of a call: all tensors as (M, N) with dense columns.

    Attributes:
        shape, stride: of the product, dense in the memory order of the gate.
        row_strides: of gate, up and their gradients.
        copies: gate and up must first be made dense.
        grad_stride: of the gradients: dense, or those of the two halves of a dense one.
    """

    act: Activation
    dtype: torch.dtype
    ct: torch.dtype
    shape: Shape
    stride: Shape
    M: int
    N: int
    row_strides: tuple[int, int, int, int]
    copies: bool
    grad_stride: Shape
    launches: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        y = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=gate.device)
        gate, up = self._operands(gate, up)
        key = gate.dtype, up.dtype
        run = self.launches.get(key)
        if run is None:
            run = forward_launch(self.M, self.N, *self.row_strides[:2], *key, self.dtype, self.act)
            self.launches[key] = run
        run(gate, up, y)
        return y

    def grad(self, g: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(self.shape, self.grad_stride, dtype=dtype, device=g.device)

    def backward(self, g: Tensor, gate: Tensor, up: Tensor | None, dgate: Tensor | None, dup: Tensor | None) -> None:
        """Writes the gradients that are not `None`."""
        g = with_strides(g, self.shape, self.stride)
        gate, up = self._operands(gate, up)
        key = (
            g.dtype, gate.dtype, None if up is None else up.dtype, None if dgate is None else dgate.dtype,
            None if dup is None else dup.dtype, None,
        )  # fmt: skip
        run = self.launches.get(key)
        if run is None:
            run, _ = backward_launch(self.M, self.N, self.row_strides, key, self.ct, self.act, False)
            self.launches[key] = run
        run(g, gate, up, dgate, dup, None, None)

    def _operands(self, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.copies:
            gate = with_strides(gate, self.shape, self.stride)
            up = None if up is None else with_strides(up, self.shape, self.stride)
        return gate, up


def _plan(gate: Tensor, up: Tensor, act: Activation) -> Plan | str:
    if gate.shape != up.shape:
        return "gate and up broadcast"
    active = _gemm.activated_dtype(act, gate.dtype, "cuda" if gate.is_cuda else gate.device.type)
    return _cached_plan(gate.shape, gate.stride(), up.stride(), active, up.dtype, act)


def _chunked_plan(x: Tensor, act: Activation, dim: int) -> Plan | str:
    active = _gemm.activated_dtype(act, x.dtype, "cuda" if x.is_cuda else x.device.type)
    return _cached_chunked_plan(x.shape, x.stride(), dim, active, x.dtype, act)


@functools.lru_cache(maxsize=4096)
def _cached_plan(
    shape: Any, gate: Shape, up: Shape, active: torch.dtype, up_dtype: torch.dtype, act: Activation,
    grad: Shape | None = None,
) -> Plan | str:  # fmt: skip
    """`grad`: the strides of both gradients; default: dense, as the product is."""
    if 0 in shape:
        return "a size is 0"
    if not load("activations").supports(act):
        return f"{act.name} has no kernel"
    dtype = promoted((active, len(shape)), (up_dtype, len(shape)))
    stride = dense_stride(shape, gate)
    grad = grad or stride
    loops, copies = _two_loops(shape, stride, (gate, up, grad, grad)), False
    if loops is None:
        loops, copies = _two_loops(shape, stride, (stride, stride, grad, grad)), True
    if loops is None:
        return "the halves of x lie in more than two loops"
    return Plan(act, dtype, compute_dtype(dtype), tuple(shape), stride, *loops, copies, grad)


@functools.lru_cache(maxsize=4096)
def _cached_chunked_plan(
    shape: Any, stride: Shape, dim: int, active: torch.dtype, dtype: torch.dtype, act: Activation
) -> Plan | str:
    if not -len(shape) <= dim < len(shape) or shape[dim] % 2:
        return "x has no halves along dim"
    half = list(shape)
    half[dim] //= 2
    return _cached_plan(tuple(half), stride, stride, active, dtype, act, dense_stride(shape, stride))


def _two_loops(
    shape: Shape, stride: Shape, operands: Sequence[Shape]
) -> tuple[int, int, tuple[int, ...]] | None:  # fmt: skip
    """`(M, N, row strides)`: every operand as M rows of N elements in the memory order of `stride`, or `None`."""
    dims = [d for d in memory_order(shape, stride) if shape[d] != 1]
    N = 1
    while dims and all(s[dims[-1]] == N for s in operands):
        N *= shape[dims.pop()]
    if not dims:
        return 1, N, (N,) * len(operands)
    steps = tuple(s[dims[-1]] for s in operands)
    M = 1
    for d in reversed(dims):
        if any(s[d] != step * M for s, step in zip(operands, steps, strict=True)):
            return None
        M *= shape[d]
    return M, N, steps


@functools.lru_cache(maxsize=4096)
def forward_launch(
    M: int, N: int, gate_m: int, up_m: int, gate: torch.dtype, up: torch.dtype, dtype: torch.dtype, act: Activation
) -> Any:
    """The launch of `gated_forward`; its pointers are gate, up, y."""
    device_act = load("activations")
    grid, tile, *_ = _gemm.pass_tile(M, N, False)
    ct = triton_dtype(compute_dtype(dtype))
    rest = (M, N, gate_m, up_m, ct, device_act.value(act, dtype), *device_act.constants(act), *tile)
    return load("launch").Launch(load("gated").gated_forward, grid, rest)


@functools.lru_cache(maxsize=4096)
def backward_launch(
    M: int, N: int, row_strides: tuple[int, ...], dtypes: tuple[torch.dtype | None, ...], ct: torch.dtype,
    act: Activation, sums: bool,
) -> tuple[Any, int]:  # fmt: skip
    """The launch of `gated_backward` and its number of partial sums.

    Its pointers are g, gate, up, dgate, dup, h (of these `dtypes`, `None` where absent) and the partial sums.
    """
    device_act = load("activations")
    grid, tile, per_block, blocks = _gemm.pass_tile(M, N, sums)
    *_, dgate, dup, h = (d is not None for d in dtypes)
    rest = (
        M, N, *row_strides, per_block, blocks, triton_dtype(ct), device_act.value(act, dtypes[0]),
        device_act.gradient(act, dtypes[0]), act.keeps == "output", *device_act.constants(act), dgate, dup, h, sums,
        *tile,
    )  # fmt: skip
    return load("launch").Launch(load("gated").gated_backward, grid, rest), blocks
