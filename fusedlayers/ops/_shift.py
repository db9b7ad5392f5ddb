"""A bias whose gradient another op gives: added to a product out of autograd's sight, and told of here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def shifted(x: Tensor, shift: Tensor | None, dim: int = -1) -> Tensor:
    """x as it is, and to autograd what it was before plus `shift` along `dim`; for calls that nothing transforms."""
    return x if shift is None else _Shifted.apply(x, shift, dim)


class _Shifted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor, dim: int) -> Tensor:
        ctx.dtypes, ctx.dim = (x.dtype, shift.dtype), dim
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        need_x, need_shift, _ = ctx.needs_input_grad
        summed = [d for d in range(g.dim()) if d != ctx.dim % g.dim()]
        dshift = (g.sum(summed) if summed else g).to(ctx.dtypes[1]) if need_shift else None
        return g if need_x else None, dshift, None
