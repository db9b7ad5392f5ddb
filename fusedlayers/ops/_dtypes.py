"""Which dtype a result has, and in which the kernels compute. Eager's answers, without running eager."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..activations import Activation

_LOW = (torch.float16, torch.bfloat16)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, else the dtype itself: torch's own "opmath" rule."""
    return torch.float32 if dtype in _LOW else dtype


@functools.cache
def triton_dtype(dtype: torch.dtype) -> Any:
    """The Triton name of a float dtype."""
    tl = kernels.load("launch").tl
    return {
        torch.float16: tl.float16,
        torch.bfloat16: tl.bfloat16,
        torch.float32: tl.float32,
        torch.float64: tl.float64,
    }[dtype]


def promoted(*operands: Tensor | float | None) -> torch.dtype:
    """The dtype of an elementwise torch expression on these operands, left to right; `None` entries are skipped."""
    present = [t for t in operands if t is not None]
    first = present[0]
    dtype = first.dtype
    dims = first.dim()
    for t in present[1:]:
        if not isinstance(t, Tensor):
            continue
        if t.dtype == dtype:
            dims = max(dims, t.dim())
        elif (t.dim() > 0) == (dims > 0):
            dtype = torch.promote_types(dtype, t.dtype)
        elif t.dim() > 0:
            dtype, dims = t.dtype, t.dim()
    return dtype


def activated(act: Activation, dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The dtype of `act` on an input of `dtype`: autocast runs some activations in float32."""
    if dtype in _LOW and device_type in act.spec.autocast_fp32 and torch.is_autocast_enabled(device_type):
        return torch.float32
    return dtype
