"""`layer_norm(x + residual)`: LayerNorm after an optional residual add, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ._drop_norm import drop_norm
from ._dtypes import norm_autocasts
from ._row_norm import Dtypes, Norm, Result, row_norm


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    passes: bool = False,
    as_eager: bool = False,
) -> Result:
    """See `functional.layer_norm`.

    `out_dtype` is for a norm whose readers all cast down to it, as they do under autocast: written in that dtype at
    once, the value is rounded once, as before, and the pass that casts it is saved. `passes`, `as_eager`: see
    `row_norm`.
    """
    return row_norm(_LayerNorm.of(normalized_shape, eps, out_dtype), x, residual, weight, bias, passes, as_eager)


def dropout_layer_norm(
    x: Tensor,
    residual: Tensor,
    p: float,
    training: bool,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out_dtype: torch.dtype | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The layer norm of `F.dropout(x, p, training) + residual`, and that sum; with eager's mask.

    `shift`: see `drop_norm`.
    """
    return drop_norm(_LayerNorm.of(normalized_shape, eps, out_dtype), x, residual, weight, bias, p, training, shift)


@dataclass(frozen=True, eq=False)
class _LayerNorm(Norm):
    op = "layer_norm"
    center = True

    def reference(self, s: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y = F.layer_norm(s, self.shape, weight, bias, self.eps)
        return y if self.out_dtype is None else y.to(self.out_dtype)

    def result_dtype(self, s: torch.dtype, params: Dtypes, device: str, autocast: bool) -> torch.dtype | str:
        """float32 under CUDA autocast, else that of `s`. The parameters are of one dtype with it; the CPU also takes
        float32 ones beside half precision."""
        dtypes = {s, *params}
        if autocast and norm_autocasts(self.op, device):
            fits = torch.float64 not in dtypes or len(dtypes) == 1
            y = torch.float64 if torch.float64 in dtypes else torch.float32
        else:
            fits = len(dtypes) == 1 or (device == "cpu" and s.itemsize == 2 and set(params) == {torch.float32})
            y = s
        return (self.out_dtype or y) if fits else "torch does not take these dtypes together"
