"""`rms_norm(x + residual)`: RMSNorm after an optional residual add, in one pass; also as models write it out."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ._drop_norm import drop_norm
from ._dtypes import compute_dtype, norm_autocasts
from ._row_norm import Dtypes, Norm, Result, row_norm


def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    residual: Tensor | None = None,
    *,
    offset: float = 0.0,
    cast_before_weight: bool = False,
    out_dtype: torch.dtype | None = None,
    passes: bool = False,
    as_eager: bool = False,
) -> Result:
    """See `functional.rms_norm`. The keywords give the forms that models write out themselves.

    Args:
        offset: added to the weight: 1 for Gemma, whose result has the dtype of x, also under autocast.
        cast_before_weight: `weight * xhat.to(x.dtype)`, as LlamaRMSNorm has it; the dtype is what that promotes to.
        out_dtype: the result's dtype; see `layer_norm`.
        passes, as_eager: see `row_norm`.
    """
    norm = _RMSNorm.of(normalized_shape, eps, out_dtype, offset, cast_before_weight)
    return row_norm(norm, x, residual, weight, None, passes, as_eager)


def dropout_rms_norm(
    x: Tensor,
    residual: Tensor,
    p: float,
    training: bool,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    offset: float = 0.0,
    cast_before_weight: bool = False,
    out_dtype: torch.dtype | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The RMS norm of `F.dropout(x, p, training) + residual`, and that sum; with eager's mask.

    `shift`: see `drop_norm`.
    """
    norm = _RMSNorm.of(normalized_shape, eps, out_dtype, offset, cast_before_weight)
    return drop_norm(norm, x, residual, weight, None, p, training, shift)


@dataclass(frozen=True, eq=False)
class _RMSNorm(Norm):
    op = "rms_norm"
    center = False

    def reference(self, s: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
        if self.offset or self.cast_before_weight:
            return self._written_out(s, weight)
        if self.out_dtype is None:
            return F.rms_norm(s, self.shape, weight, self.eps)
        wide = torch.promote_types(s.dtype, self.out_dtype)
        weight = weight if weight is None or wide == s.dtype else weight.to(wide)
        return F.rms_norm(s.to(wide), self.shape, weight, self.eps).to(self.out_dtype)

    def _written_out(self, s: Tensor, weight: Tensor | None) -> Tensor:
        ct = compute_dtype(s.dtype)
        y = s.to(ct)
        mean = y.pow(2).mean(tuple(range(-len(self.shape), 0)), keepdim=True)
        y = y * torch.rsqrt(mean + (torch.finfo(ct).eps if self.eps is None else self.eps))
        if self.cast_before_weight:
            y = y.to(s.dtype)
            if weight is not None:
                y = (weight + self.offset if self.offset else weight) * y
        else:
            y = (y if weight is None else y * (self.offset + weight.to(ct))).to(s.dtype)
        return y if self.out_dtype is None else y.to(self.out_dtype)

    def result_dtype(self, s: torch.dtype, params: Dtypes, device: str, autocast: bool) -> torch.dtype | str:
        """That of `s`, but float32 under CUDA autocast from torch 2.12 on."""
        if self.out_dtype is not None:
            return self.out_dtype
        if self.cast_before_weight:
            return torch.promote_types(s, *params) if params else s
        if self.offset:
            return s
        if autocast and s != torch.float64 and norm_autocasts(self.op, device):
            return torch.float32
        return _mixed_dtype(s, *params) if params and params[0] != s else s


@functools.cache
def _mixed_dtype(x: torch.dtype, weight: torch.dtype) -> torch.dtype:
    """What torch's rms_norm gives for these two; its versions differ, so it is asked."""
    with warnings.catch_warnings(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        warnings.simplefilter("ignore")  # it says that its fused kernel does not take them
        return torch.rms_norm(torch.ones(1, dtype=x), (1,), torch.ones(1, dtype=weight)).dtype
