"""Which dtype a result has, and in which the kernels compute. Eager's answers, without running eager."""

from __future__ import annotations

import functools
from typing import Any

import torch

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


def promoted(*operands: tuple[torch.dtype | None, int]) -> torch.dtype:
    """The dtype of an elementwise torch expression on operands `(dtype, number of dims)`; numbers have dtype `None`."""
    (dtype, dims), *others = operands
    assert dtype is not None
    for other, other_dims in others:
        if other is None:
            continue
        if (other_dims > 0) == (dims > 0):
            dtype = torch.promote_types(dtype, other)
        elif other_dims > 0:
            dtype = other
        dims = max(dims, other_dims)
    return dtype


def activated(act: Activation, dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The dtype of `act` on an input of `dtype` under autocast on this device: some activations run in float32."""
    return torch.float32 if dtype in _LOW and device_type in act.spec.autocast_fp32 else dtype


@functools.cache
def norm_autocasts(op: str, device_type: str) -> bool:
    """Whether autocast runs `aten::op`, a norm, in float32 on this device. Torch's versions differ: it is asked."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", f"Autocast{device_type.upper()}")
