"""What ops with matrix products share: `F.linear`'s dtype rule, the one elementwise pass each way, and the gradients.

Gradients' products go to the vendor library, and only those that are asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import activations, kernels
from ..activations import Activation
from ..kernels import cdiv, load, next_power_of_2
from ..settings import settings
from ._dtypes import activated, compute_dtype, triton_dtype

_IDENTITY = activations.get("identity")
_HAS_OUT_DTYPE = torch.version.cuda is not None and "dtype" in torch.ops.aten.mm.overloads()  # torch >= 2.8
_any_autocast = torch._C._is_any_autocast_enabled
_fp32_precision = getattr(torch._C, "_get_fp32_precision_getter", None)


def may_cast() -> bool:
    """Whether an op that stands for autocast's casts may have something to do; asked first, as most calls have not."""
    return _any_autocast() or settings.route == "triton"


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast casts the operands of a product to where x lies; `None` outside of autocast."""
    device = "cuda" if x.is_cuda else x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def gemm_dtype(autocast: torch.dtype | None, dtype: torch.dtype, *others: torch.dtype | None) -> torch.dtype | None:
    """The dtype `F.linear` multiplies in: autocast's inside autocast, else the common one; `None` if they differ."""
    if autocast and dtype is not torch.float64:
        dtype = autocast
    for other in others:
        # autocast leaves float64 alone, and casts all others to its own
        if other not in (None, dtype) and not (autocast and torch.float64 not in (other, dtype)):
            return None
    return dtype


def activated_dtype(act: Activation, dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The dtype eager's `act` returns here: autocast runs some activations in float32."""
    if act.spec.autocast_fp32 and torch.is_autocast_enabled(device_type):
        return activated(act, dtype, device_type)
    return dtype


def to_cast(
    dtype: torch.dtype, dtypes: Sequence[torch.dtype | None], biases: Sequence[int]
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """By route, which operands autocast gives another dtype, x being the first; empty where it gives none another.

    The Triton product adds the bias in float32, so it takes that as it is.
    """
    library = tuple(i for i, d in enumerate(dtypes) if d not in (None, dtype))
    return {"library": library, "triton": tuple(i for i in library if i not in biases)} if library else {}


def lowered(dtype: torch.dtype, which: Sequence[int], operands: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The operands, `which` of them as copies in `dtype`: the parameters by one launch, x so that it collapses."""
    low = list(operands)
    if which and which[0] == 0:
        x, which = low[0], which[1:]
        low[0] = x.to(dtype) if collapses(x) else x.to(dtype, memory_format=torch.contiguous_format)
    if len(which) == 1:
        low[which[0]] = low[which[0]].to(dtype)
    elif which:
        full = [low[i] for i in which]
        copies = [torch.empty_like(t, dtype=dtype) for t in full]
        torch._foreach_copy_(copies, full)
        for i, t in zip(which, copies, strict=True):
            low[i] = t
    return low


def casts(saved: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """Those of the saved tensors that are copies of a Function's inputs in another dtype: more outputs of its own.

    So higher derivatives flow through them, and the inputs may change before backward, as eager's may: it too keeps
    what it cast.
    """
    return [t for t, full in zip(saved, inputs, strict=True) if t is not None and t is not full]


def given(grads: Sequence[Tensor | None]) -> bool:
    """Whether any of these gradients came."""
    return any(g is not None for g in grads)


def through_casts(
    grads: Sequence[Tensor | None], saved: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None],
    needs: Sequence[bool], own: Sequence[Tensor | None],
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of inputs in their own `dtypes`, from those of what was saved of them, for higher derivatives.

    Args:
        grads: through the op, in the dtype of what was saved.
        own: what the outputs of `casts` got, in order.
    """
    rest, found = iter(own), []
    for grad, t, dtype, need in zip(grads, saved, dtypes, needs, strict=True):
        g = next(rest) if t is not None and t.dtype is not dtype else None
        if g is not None:
            grad = g if grad is None else grad + g
        found.append(grad.to(dtype) if need and grad is not None else None)
    return found


def tf32() -> bool:
    """Whether the user lets float32 products drop to TF32."""
    if _fp32_precision is not None:
        return _fp32_precision("cuda", "matmul") == "tf32"
    return torch.backends.cuda.matmul.allow_tf32


def linear_shape(x: Sequence[int], weight: Sequence[int], bias: Sequence[int] | None) -> tuple[int, int, int] | str:
    """`(M, N, K)` of `F.linear` on these shapes, or why the kernels leave it to `F.linear` itself."""
    if len(x) < 1 or len(weight) != 2 or x[-1] != weight[1] or (bias is not None and tuple(bias) != (weight[0],)):
        return f"F.linear on shapes {list(x)}, {list(weight)} and {None if bias is None else list(bias)}"
    M = 1
    for n in x[:-1]:
        M *= n
    N, K = weight
    return (M, N, K) if M and N and K else "a size is 0"


def rows(t: Tensor) -> Tensor:
    """`t` as a matrix, its last dim kept; a view where there is one."""
    return t if t.dim() == 2 else t.reshape(-1, t.shape[-1])


def collapses(t: Tensor) -> bool:
    """Whether `t` can be viewed as a matrix, its last dim kept."""
    if t.dim() <= 2 or t.is_contiguous():
        return True
    step = None
    for n, stride in zip(t.shape[-2::-1], t.stride()[-2::-1], strict=True):
        if n > 1:
            if step is not None and stride != step:
                return False
            step = n * stride
    return True


def viewable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x`, or one copy that can be viewed as a matrix, recorded by autograd, so that it is this that backward keeps.

    Where x is to be cast there is a copy anyway.
    """
    return x if x.dtype is not dtype or collapses(x) else x.contiguous()


def factor(g: Tensor) -> Tensor:
    """`g` as a matrix that a product reads where it lies: several of them read it, and each would copy any other."""
    g = rows(g)
    m, n = g.stride()
    return g if (n == 1 and m >= g.shape[1]) or (m == 1 and n >= g.shape[0]) else g.contiguous()


def linear_kernel(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: Activation, y_dtype: torch.dtype, keep_z: bool,
    shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`(act(z), z)` of `z = x @ weight.T + bias` by the Triton product; z, a matrix, only where it is to be kept."""
    M, N = x.shape[0], weight.shape[0]
    y = x.new_empty(shape or (M, N), dtype=y_dtype)
    z = x.new_empty(M, N) if keep_z else None
    lowered = x.dtype is torch.float32 and x.is_cuda and tf32()
    b_n = None if bias is None else bias.stride(0)
    b_dtype = None if bias is None else bias.dtype
    run = _linear_launch(
        *x.shape, x.stride(), N, weight.stride(), b_n, x.dtype, b_dtype, y_dtype, act, keep_z, lowered
    )  # fmt: skip
    run(x, weight, bias, y, z)
    return y, z


@functools.lru_cache(maxsize=4096)
def _linear_launch(
    M: int, K: int, x_stride: tuple[int, int], N: int, w_stride: tuple[int, int], b_n: int | None,
    dtype: torch.dtype, b_dtype: torch.dtype | None, y_dtype: torch.dtype, act: Activation, keep_z: bool,
    lowered: bool,
) -> Any:  # fmt: skip
    kernel, device_act = load("linear"), load("activations")
    config = kernel.config(dtype, lowered, M, N)
    ct = compute_dtype(dtype)
    upcast = kernels.interpreted() and ct != dtype
    rest = (
        M, N, K, *x_stride, *w_stride, b_n or 0, triton_dtype(ct), device_act.value(act, y_dtype),
        *device_act.constants(act), b_n is not None, keep_z, "tf32" if lowered else "ieee", upcast,
        K % config.BK == 0, *config.tile,
    )  # fmt: skip
    grid = (cdiv(M, config.BM) * cdiv(N, config.BN),)
    return load("launch").Launch(kernel.linear_forward, grid, rest, config.warps, config.stages)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Sequence[int] | None = None) -> Tensor:
    """`F.linear` of a matrix by the library, on one dtype; a matrix, or in `shape`.

    Never a view: an op may return it, and a user edit it in place.
    """
    if shape is None or len(shape) == 2:
        return F.linear(x, weight, bias)
    y = x.new_empty(shape)
    if bias is None:
        torch.mm(x, weight.t(), out=rows(y))
    else:
        torch.addmm(bias, x, weight.t(), out=rows(y))
    return y


def activate(z: Tensor, act: Activation, y: Tensor) -> Tensor:
    """Writes `act(z)` to y in one pass, which may be z itself; both are contiguous."""
    _activate_launch(z.numel(), z.dtype, y.dtype, act)(z, y)
    return y


@functools.lru_cache(maxsize=4096)
def _activate_launch(numel: int, dtype: torch.dtype, y_dtype: torch.dtype, act: Activation) -> Any:
    device_act = load("activations")
    block = 1024  # never fewer than a block has threads, so that none reads what another has overwritten
    value, constants = device_act.value(act, y_dtype), device_act.constants(act)
    rest = (numel, triton_dtype(compute_dtype(dtype)), value, *constants, block)
    return load("launch").Launch(load("act_bias").activate, (cdiv(numel, block),), rest)


def act_bias_backward(
    g: Tensor, kept: Tensor | None, act: Activation, dtype: torch.dtype, *,
    need_dz: bool, db_dtype: torch.dtype | None, need_h: bool = False, overwrite: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """`(dz, db, h)` from a gradient (M, N) and what was kept of the activation, in one pass over both.

    Args:
        kept: its input or output, as the registry says, contiguous; `None` for the identity.
        db_dtype: the bias's own dtype, in which its gradient is written at once; `None`: not needed.
        need_h: also give `act(kept)`, for a product that needs it again.
        overwrite: `g` is nobody else's, so dz may take its place.
    """
    M, N = g.shape  # sizes one by one: torch reads them faster than a tuple
    need_db = db_dtype is not None
    dz = h = db = partial = None
    if need_dz:
        own = overwrite and may_overwrite(g) and g.dtype is dtype and g.is_contiguous()
        dz = g if own else g.new_empty(M, N, dtype=dtype)
    if need_h:
        h = g.new_empty(M, N, dtype=dtype)
    kept_dtype = None if kept is None else kept.dtype
    run, blocks = _backward_launch(M, N, g.stride(), g.dtype, kept_dtype, dtype, act, need_dz, need_h, db_dtype)
    if need_db:
        partial = g.new_empty(1, blocks, N, dtype=compute_dtype(dtype))
        db = g.new_empty(N, dtype=db_dtype)
    run(g, kept, dz, h, partial, db, None)
    return dz, db, h


def may_overwrite(g: Tensor) -> bool:
    """Whether a pass may write its result over what it reads.

    Not where a tile has fewer elements than a block has threads: then several threads read the same element.
    """
    return g.numel() >= 4096


@functools.lru_cache(maxsize=4096)
def _backward_launch(
    M: int, N: int, g_stride: tuple[int, int], g_dtype: torch.dtype, kept_dtype: torch.dtype | None,
    dtype: torch.dtype, act: Activation, need_dz: bool, need_h: bool, db_dtype: torch.dtype | None,
) -> tuple[Any, int]:  # fmt: skip
    """The launches and the number of partial sums a column."""
    device_act, launch, need_db = load("activations"), load("launch"), db_dtype is not None
    grid, tile, per_block, blocks = pass_tile(M, N, need_db)
    rest = (
        M, N, *g_stride, per_block, triton_dtype(compute_dtype(dtype)), device_act.value(act, dtype),
        device_act.gradient(act, dtype), *device_act.constants(act), kept_dtype is not None, need_dz, need_h, need_db,
        *tile, SUMS.stages if need_db else 1,
    )  # fmt: skip
    # g, kept, dz, h, partial, db, None
    warps = SUMS.warps if need_db else 4
    steps = [(launch.Launch(load("act_bias").act_bias_backward, grid, rest, warps), (0, 1, 2, 3, 4), False)]
    if need_db:
        steps.append((load("reduce").finisher(blocks, N, compute_dtype(dtype), db_dtype, None), (4, 5, 6), False))
    return launch.Chain(*steps), blocks


def bias_grad(g: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The sum of `g` (M, N) over its rows, in the bias's dtype."""
    _, db, _ = act_bias_backward(g, None, _IDENTITY, g.dtype, need_dz=False, db_dtype=dtype)
    return db


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a @ b` in the dtype of what it is the gradient of; where the library can, the sum is rounded to that alone."""
    if dtype is a.dtype:
        return torch.mm(a, b)
    if _HAS_OUT_DTYPE and a.is_cuda and dtype is torch.float32 and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def input_grad(dz: Tensor, weight: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`dz @ weight`, in the shape and dtype of the layer's input."""
    dx = product(dz, weight, dtype)
    return dx if len(shape) == 2 else dx.view(shape)


def weight_grad(dz: Tensor, x: Tensor, weight_stride: tuple[int, int] | None, dtype: torch.dtype) -> Tensor:
    """`dz.T @ x`, lying in memory as the weight does, so that the optimizer reads both alike."""
    if weight_stride is not None and weight_stride[0] == 1 and weight_stride[1] > 1:
        return product(x.t(), dz, dtype).t()
    return product(dz.t(), x, dtype)


@dataclass(frozen=True)
class Pass:
    """How a backward pass with sums walks (M, N): tiles of `elements`, `columns` wide, by `blocks` blocks.

    Eight blocks on each of 132 multiprocessors: fewer would leave the memory idle while they compute, more would leave
    the second stage more to read. `stages`: tiles in flight.
    """

    elements: int = 2048
    columns: int = 128
    blocks: int = 1056
    warps: int = 4
    stages: int = 3


SUMS = Pass()


def pass_tile(M: int, N: int, sums: bool) -> tuple[tuple[int], tuple[int, int], int, int]:
    """Grid, tile, rows a block walks and blocks along M of a backward pass."""
    wide = min(next_power_of_2(N), SUMS.columns if sums else 1024)
    tall = max(1, min(next_power_of_2(M), (SUMS.elements if sums else 1024) // wide))
    across = cdiv(N, wide)
    blocks = cdiv(M, tall)
    if sums:
        blocks = max(1, min(blocks, SUMS.blocks // across))
    per_block = cdiv(cdiv(M, blocks), tall) * tall
    blocks = cdiv(M, per_block)
    return (blocks * across,), (tall, wide), per_block, blocks
