"""Each op at the sizes of real networks, and a grid of small to large ones on which none may lose to eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from ..activations import get
from ..ops.projections import projections as projections_op
from ..ops.split_heads import split_heads as split_heads_op
from .peers import DTYPES, Case

Make = Callable[[torch.device], tuple]


def rand(device: torch.device, dtype: torch.dtype, *shape: int, grad: bool = True, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=device) * scale).to(dtype).requires_grad_(grad)


def affine_act(rows: int, cols: int, dtype: str, act: str = "relu") -> Case:
    dt, unit = DTYPES[dtype], rows * cols * DTYPES[dtype].itemsize
    eager = get(act)
    return Case(
        f"affine_act/{act}/{rows}x{cols}/{dtype}",
        lambda d: (rand(d, dt, rows, cols), rand(d, dt, cols), rand(d, dt, cols)),
        lambda x, a, b: functional.affine_act(x, a, b, act),
        lambda x, a, b: eager(a * x + b),
        moved=(2 * unit, 3 * unit),
        shared=(1, 2),
    )


def affine_scalars(n: int, dtype: str) -> Case:
    """`relu(a*x + b)` with numbers, forward only: the textbook example."""
    dt = DTYPES[dtype]
    return Case(
        f"affine_act/scalars/{n}/{dtype}",
        lambda d: (rand(d, dt, n, grad=False), 1.5, 0.5),
        functional.fused_relu,
        lambda x, a, b: torch.relu(a * x + b),
        moved=(2 * n * dt.itemsize, 0),
        training=False,
    )


def linear_act(rows: int, inner: int, cols: int, dtype: str, act: str) -> Case:
    dt, eager = DTYPES[dtype], get(act)
    return Case(
        f"linear_act/{act}/{rows}x{inner}x{cols}/{dtype}",
        lambda d: (
            rand(d, dt, rows, inner),
            rand(d, dt, cols, inner, scale=inner**-0.5),
            rand(d, dt, cols),
        ),
        lambda x, w, b: functional.linear_act(x, w, b, act),
        lambda x, w, b: eager(F.linear(x, w, b)),
        gemms=lambda x, w, b, g: (x.detach() @ w.detach().T, g @ w.detach(), g.T @ x.detach()),
        # x, y and the weight; then gradient, kept, x, weight and both gradients
        moved=((rows * (inner + cols) + inner * cols) * dt.itemsize,
               (rows * (2 * inner + 2 * cols) + 2 * inner * cols) * dt.itemsize),
        flops=6 * rows * inner * cols,
        shared=(1, 2),
    )  # fmt: skip


def gated_act(rows: int, cols: int, dtype: str, act: str = "silu") -> Case:
    dt, unit, eager = DTYPES[dtype], rows * cols * DTYPES[dtype].itemsize, get(act)
    return Case(
        f"gated_act/{act}/{rows}x{cols}/{dtype}",
        lambda d: (rand(d, dt, rows, cols), rand(d, dt, rows, cols)),
        lambda gate, up: functional.gated_act(gate, up, act),
        lambda gate, up: eager(gate) * up,
        liger=lambda: _liger_gated(act),
        moved=(3 * unit, 5 * unit),
    )


def layer_norm(rows: int, cols: int, dtype: str, residual: bool = False) -> Case:
    dt, unit = DTYPES[dtype], rows * cols * DTYPES[dtype].itemsize

    def eager(x: Tensor, w: Tensor, b: Tensor, r: Tensor | None = None) -> Any:
        if r is None:
            return F.layer_norm(x, (cols,), w, b)
        total = x + r
        return F.layer_norm(total, (cols,), w, b), total

    return Case(
        f"layer_norm{'+residual' if residual else ''}/-/{rows}x{cols}/{dtype}",
        _norm_inputs(rows, cols, dt, 2, residual),
        lambda x, w, b, r=None: functional.layer_norm(x, (cols,), w, b, 1e-5, residual=r),
        eager,
        liger=None if residual else _liger_layer_norm,
        moved=((4 if residual else 2) * unit, (4 if residual else 3) * unit),
        shared=(1, 2),
    )


def rms_norm(rows: int, cols: int, dtype: str, residual: bool = False) -> Case:
    dt, unit = DTYPES[dtype], rows * cols * DTYPES[dtype].itemsize

    def eager(x: Tensor, w: Tensor, r: Tensor | None = None) -> Any:
        if r is None:
            return F.rms_norm(x, (cols,), w, 1e-6)
        total = x + r
        return F.rms_norm(total, (cols,), w, 1e-6), total

    return Case(
        f"rms_norm{'+residual' if residual else ''}/-/{rows}x{cols}/{dtype}",
        _norm_inputs(rows, cols, dt, 1, residual),
        lambda x, w, r=None: functional.rms_norm(x, (cols,), w, 1e-6, residual=r),
        eager,
        liger=_liger_add_rms_norm if residual else _liger_rms_norm,
        moved=((4 if residual else 2) * unit, (4 if residual else 3) * unit),
        shared=(1,),
    )


def _norm_inputs(rows: int, cols: int, dt: torch.dtype, parameters: int, residual: bool) -> Make:
    def make(d: torch.device) -> tuple:
        made = [rand(d, dt, rows, cols), *(rand(d, dt, cols) for _ in range(parameters))]
        return (*made, rand(d, dt, rows, cols)) if residual else tuple(made)

    return make


def batch_norm_act(
    n: int, c: int, size: int, dtype: str, act: str = "relu", residual: bool = False, channels_last: bool = True
) -> Case:
    """Parameters in fp32, as under autocast."""
    dt, unit, activation = DTYPES[dtype], n * c * size * size * DTYPES[dtype].itemsize, get(act)

    def image(d: torch.device) -> Tensor:
        x = rand(d, dt, n, c, size, size, grad=False)
        return (x.contiguous(memory_format=torch.channels_last) if channels_last else x).requires_grad_()

    def make(d: torch.device) -> tuple:
        parameters = rand(d, torch.float32, c), rand(d, torch.float32, c)
        running = torch.zeros(c, device=d), torch.ones(c, device=d)
        return (image(d), *running, *parameters, *((image(d),) if residual else ()))

    def eager(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor, r: Tensor | None = None) -> Tensor:
        y = F.batch_norm(x, mean, var, w, b, True, 0.1, 1e-5)
        return activation(y if r is None else y + r)

    return Case(
        f"batch_norm_act{'+residual' if residual else ''}/{act}/{n}x{c}x{size}x{size}"
        f"{'' if channels_last else '-nchw'}/{dtype}",
        make,
        lambda x, mean, var, w, b, r=None: functional.batch_norm_act(
            x, mean, var, w, b, True, 0.1, 1e-5, activation=act, residual=r
        ),
        eager,
        moved=((4 if residual else 3) * unit, (7 if residual else 5) * unit),
        shared=(1, 2, 3, 4),
    )


def group_norm_act(n: int, c: int, size: int, dtype: str, groups: int = 32) -> Case:
    dt, unit = DTYPES[dtype], n * c * size * size * DTYPES[dtype].itemsize
    return Case(
        f"group_norm_act/silu/{n}x{c}x{size}x{size}/{dtype}",
        lambda d: (rand(d, dt, n, c, size, size), rand(d, dt, c), rand(d, dt, c)),
        lambda x, w, b: functional.group_norm_act(x, groups, w, b, 1e-5, "silu"),
        lambda x, w, b: F.silu(F.group_norm(x, groups, w, b, 1e-5)),
        moved=(2 * unit, 3 * unit),
        shared=(1, 2),
    )


def scale_residual(rows: int, cols: int, dtype: str, scale: bool = True, dropout: float = 0.0) -> Case:
    dt, unit = DTYPES[dtype], rows * cols * DTYPES[dtype].itemsize

    def make(d: torch.device) -> tuple:
        return (rand(d, dt, rows, cols), rand(d, dt, rows, cols), *((rand(d, dt, cols),) if scale else ()))

    def eager(x: Tensor, r: Tensor, s: Tensor | None = None) -> Tensor:
        y = x if s is None else x * s
        return r + (F.dropout(y, dropout) if dropout else y)

    backward = (3 if scale else 2) if scale or dropout else 0
    return Case(
        f"scale_residual/{'scale' if scale else 'plain'}{f'+dropout{dropout:g}' if dropout else ''}"
        f"/{rows}x{cols}/{dtype}",
        make,
        lambda x, r, s=None: functional.scale_residual(x, r, s, dropout_p=dropout, training=True),
        eager,
        moved=(3 * unit, backward * unit),
        shared=(2,) if scale else (),
    )


def split_heads(batch: int, tokens: int, heads: int, width: int, dtype: str) -> Case:
    """Forward makes views; backward writes the gradients of q, k and v into one."""
    dt, sizes = DTYPES[dtype], (batch, tokens, 3, heads, width)
    unit = 3 * batch * tokens * heads * width * dt.itemsize
    return Case(
        f"split_heads/-/{batch}x{tokens}x{heads}x{width}/{dtype}",
        lambda d: (rand(d, dt, batch, tokens, 3 * heads * width),),
        lambda x: split_heads_op(x, *sizes),
        lambda x: x.reshape(sizes).permute(2, 0, 3, 1, 4).unbind(0),
        moved=(0, 2 * unit),
    )


def projections(rows: int, inner: int, widths: tuple[int, ...], low: str) -> Case:
    """x and parameters in float32 under autocast to `low`, whose casts are a part of what is timed."""
    dt, n, total = DTYPES[low], len(widths), sum(widths)

    def make(d: torch.device) -> tuple:
        weights = (rand(d, torch.float32, w, inner, scale=inner**-0.5) for w in widths)
        return (rand(d, torch.float32, rows, inner), *weights, *(rand(d, torch.float32, w) for w in widths))

    def under_autocast(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor, *parameters: Tensor) -> Any:
            with torch.autocast(x.device.type, dt):
                return tuple(fn(x, parameters[:n], parameters[n:]))

        return call

    # x and the weights read in float32, cast; the gradients read, packed and read twice, x's and the weights' written
    ends, low_unit = 4 * inner * (rows + total), dt.itemsize
    return Case(
        f"projections/-/{rows}x{inner}x{'+'.join(map(str, widths))}/{low}-autocast",
        make,
        under_autocast(projections_op),
        under_autocast(lambda x, weights, biases: map(F.linear, [x] * n, weights, biases)),
        moved=(ends + low_unit * (2 * inner * (rows + total) + rows * total),
               ends + low_unit * (inner * (rows + total) + 4 * rows * total)),
        flops=6 * rows * inner * total,
        shared=tuple(range(1, 1 + 2 * n)),
    )  # fmt: skip


def key_cases() -> list[Case]:
    """The sizes that DESIGN and the issues name."""
    rows = 65536
    return [
        affine_scalars(1 << 27, "fp32"),
        affine_act(rows, 1024, "bf16", "relu"),
        affine_act(rows, 1024, "bf16", "gelu"),
        *(linear_act(8192, 1024, 4096, "bf16", a) for a in ("relu", "gelu", "silu")),
        gated_act(8192, 11008, "bf16"),
        gated_act(8192, 11008, "bf16", "gelu_tanh"),
        *(layer_norm(rows, c, "bf16", r) for r in (False, True) for c in (768, 1024, 4096, 8192)),
        *(rms_norm(rows, c, "bf16", r) for r in (False, True) for c in (768, 1024, 4096, 8192)),
        batch_norm_act(256, 64, 112, "bf16"),
        batch_norm_act(256, 256, 56, "bf16", residual=True),
        batch_norm_act(256, 512, 28, "bf16", residual=True),
        batch_norm_act(256, 1024, 14, "bf16", residual=True),
        batch_norm_act(256, 2048, 7, "bf16", residual=True),
        batch_norm_act(256, 128, 28, "bf16"),
        batch_norm_act(256, 512, 7, "bf16"),
        group_norm_act(16, 320, 64, "bf16"),
        scale_residual(rows, 768, "bf16"),
        scale_residual(rows, 768, "bf16", scale=False, dropout=0.1),
        scale_residual(rows, 768, "bf16", scale=True, dropout=0.1),
        split_heads(128, 197, 12, 64, "bf16"),
        projections(16384, 768, (768, 768, 768), "bf16"),
        projections(8192, 4096, (4096, 1024, 1024), "bf16"),
    ]


def grid_cases() -> list[Case]:
    """Every op from one row to 65536, in fp32 and bf16."""
    return list(_grid())


def _grid() -> Iterator[Case]:
    sizes = ((1, 256), (64, 512), (8192, 1024), (65536, 512))
    for dtype in ("bf16", "fp32"):
        for rows, cols in sizes:
            yield affine_act(rows, cols, dtype, "gelu")
            yield linear_act(rows, cols, cols, dtype, "relu")
            yield linear_act(rows, cols, cols, dtype, "gelu")
            yield gated_act(rows, cols, dtype)
            yield layer_norm(rows, cols, dtype)
            yield layer_norm(rows, cols, dtype, residual=True)
            yield rms_norm(rows, cols, dtype)
            yield scale_residual(rows, cols, dtype)
            yield scale_residual(rows, cols, dtype, scale=False, dropout=0.1)
        for n, c, size in ((1, 64, 8), (64, 256, 28), (256, 512, 7), (256, 64, 56)):
            yield batch_norm_act(n, c, size, dtype)
            yield batch_norm_act(n, c, size, dtype, residual=True)
            yield group_norm_act(n, c, size, dtype)


def small_cases() -> list[Case]:
    """One tiny case an op, for machines without a GPU and for tests."""
    return [
        affine_scalars(1000, "fp32"),
        affine_act(8, 16, "fp32"),
        linear_act(8, 16, 16, "fp32", "gelu"),
        gated_act(8, 16, "fp32"),
        layer_norm(8, 16, "fp32", residual=True),
        rms_norm(8, 16, "fp32"),
        batch_norm_act(2, 4, 3, "fp32", residual=True),
        group_norm_act(2, 32, 2, "fp32", groups=8),
        scale_residual(8, 16, "fp32"),
        split_heads(2, 3, 2, 4, "fp32"),
        projections(8, 16, (16, 8, 8), "bf16"),
    ]


def _liger_gated(act: str) -> Callable[..., Any] | None:
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    found = {"silu": LigerSiLUMulFunction, "gelu_tanh": LigerGELUMulFunction}.get(act)
    return None if found is None else lambda gate, up: found.apply(gate, up)


def _liger_layer_norm() -> Callable[..., Any]:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5)


def _liger_rms_norm() -> Callable[..., Any]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # its default overwrites the incoming gradient, which the next step would read
    return lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False)


def _liger_add_rms_norm() -> Callable[..., Any]:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return lambda x, w, r: LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6, 0.0, "llama", False)
