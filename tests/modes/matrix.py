"""The matrix of ops, activations, dtypes and modes: its cells, as parameters of the tests that back them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import FLOATS, Ratio, compare, run
from tests.op_table import JUMPS, NOT_TWICE, Op, activation, cells

HALF = (torch.float16, torch.bfloat16)
MODES: dict[str, tuple[torch.dtype, ...]] = {
    "forward": FLOATS,
    "backward": FLOATS,
    "double_backward": (torch.float32, torch.float64),
    "autocast": HALF,
    "compile": (torch.float32,),
    "vmap": (torch.float32,),
    "export": (torch.float32,),
}
"""Each mode's dtypes; the test of a mode is `test_matrix.py::test_<mode>`."""


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]


def parameters(mode: str) -> list[Any]:
    return list(_parameters(mode))


def _parameters(mode: str) -> Iterator[Any]:
    for op, act, dtype, slow in cells(MODES[mode]):
        marks = (pytest.mark.slow,) if slow else ()
        yield pytest.param(op, act, dtype, id=f"{op.name}-{act}-{short(dtype)}", marks=marks)


def size(op: Op) -> tuple[tuple[int, ...], int]:
    """A ragged size, large enough for each op."""
    return (max(op.least[0], 3), 5), max(op.least[1], 7)


def operands(op: Op, act: str, dtype: torch.dtype, device: str, **kw: Any) -> list[Tensor]:
    grid = op.exact and act in JUMPS and dtype in HALF
    return op.inputs(*size(op), dtype, device, grid=grid, **kw)


def pair(op: Op, act: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return op.bound(activation(act) if op.activated else None)


def forward(op: Op, act: str, dtype: torch.dtype, device: str) -> list[Ratio]:
    with torch.no_grad():
        return compare(*pair(op, act), operands(op, act, dtype, device), sums=op.sums)


def backward(op: Op, act: str, dtype: torch.dtype, device: str) -> list[Ratio]:
    return compare(*pair(op, act), operands(op, act, dtype, device), sums=op.sums)


def double_backward(op: Op, act: str, dtype: torch.dtype, device: str) -> list[Ratio]:
    """Gradients of all first gradients (and of the incoming ones), where eager has them; else the error eager gives."""
    fused, eager = pair(op, act)
    inputs = operands(op, act, dtype, device)
    outs, _ = run(eager, inputs)
    seeds = [torch.linspace(-1, 1, o.numel(), dtype=dtype, device=device).view_as(o).requires_grad_() for o in outs]

    def first(fn: Callable[..., Any]) -> Callable[..., Any]:
        def grads(*tensors: Tensor) -> tuple[Tensor, ...]:
            inputs, given = tensors[: -len(seeds)], tensors[-len(seeds) :]
            outs = fn(*inputs)
            outs = outs if isinstance(outs, tuple) else (outs,)
            touched = sum(t.sum() for t in tensors) * 0.0  # a second gradient may be zeros in one and None in the other
            return (*torch.autograd.grad(outs, inputs, given, create_graph=True), touched)

        return grads

    if act in NOT_TWICE:
        errors = []
        for fn in (fused, eager):
            with pytest.raises(RuntimeError, match="not implemented") as caught:
                run(first(fn), [*inputs, *seeds], run(first(fn), [*inputs, *seeds])[0])
            errors.append(str(caught.value))
        assert errors[0] == errors[1]
        return []
    return compare(first(fused), first(eager), [*inputs, *seeds], sums=True, steepness=_steepness(op, act))


def _steepness(op: Op, act: str) -> float:
    """The largest third derivative of the activation: what a second gradient makes of an ulp of the pre-activation."""
    if not op.activated:
        return 1.0
    z = torch.linspace(-4, 4, 801, dtype=torch.float64).requires_grad_()
    slope = activation(act)(z)
    for _ in range(3):
        if slope is None or not slope.requires_grad:
            return 1.0
        (slope,) = torch.autograd.grad(slope.sum(), z, create_graph=True, allow_unused=True)
    return 1.0 if slope is None else max(1.0, slope.abs().max().item())


def autocast(op: Op, act: str, dtype: torch.dtype, device: str) -> list[Ratio]:
    """float32 operands under autocast, backward outside of it; x in float32, then already in the low dtype."""
    kind = torch.device(device).type

    def within(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Tensor) -> Any:
            with torch.autocast(kind, dtype=dtype):
                return fn(*tensors)

        return call

    fused, eager = (within(fn) for fn in pair(op, act))
    inputs = operands(op, act, dtype, device)
    wide = [t.detach().float().requires_grad_() for t in inputs]
    low = [t if i in op.per_sample else w for i, (t, w) in enumerate(zip(inputs, wide, strict=True))]
    ratios = []
    for given in (wide, low):
        ratios += compare(fused, eager, given, sums=op.sums, computed=dtype)
    return ratios
