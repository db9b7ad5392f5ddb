"""The one place that launches a kernel: at least host time, on the tensor's own device and current stream.

Triton's `kernel[grid](...)` binds and specialises every argument on each call. Here the compiled kernel is kept under
a key of what Triton specialises on (dtypes, 16-byte alignment, sizes 1 and multiples of 16, constants) and its `run`
is called directly.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import triton.language as tl  # noqa: F401  (its dtypes, for ops that must not import Triton themselves)
from torch import Tensor

from . import KernelError, interpreted

_INTERPRETED = interpreted()
_compiled: dict[Any, Any] = {}
_constant_slots: dict[Any, tuple[bool, ...]] = {}
_build_lock = threading.Lock()
_MAX_X = 2**31 - 1
_MAX_YZ = 65535


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 2) -> None:
    """Runs `kernel` over `grid` with all its parameters positionally, constants included.

    Raises:
        KernelError: the kernel cannot be built or launched; nothing was run.
    """
    x, y, z = (*grid, 1, 1)[:3]
    if x == 0 or y == 0 or z == 0:
        return
    if x > _MAX_X or y > _MAX_YZ or z > _MAX_YZ:
        raise KernelError(f"{_name(kernel)}: a grid of {grid} blocks is larger than a GPU takes")
    if _INTERPRETED:
        kernel[(x, y, z)](*args, num_warps=num_warps, num_stages=num_stages)
        return
    device = next(a.device.index for a in args if isinstance(a, Tensor))
    current = torch.cuda.current_device()
    if device != current:
        with torch.cuda.device(device):
            _launch(kernel, (x, y, z), args, num_warps, num_stages, device)
    else:
        _launch(kernel, (x, y, z), args, num_warps, num_stages, device)


def _launch(kernel: Any, grid: tuple[int, int, int], args: tuple, num_warps: int, num_stages: int, device: int) -> None:
    slots = _constant_slots.get(kernel.fn)
    if slots is None:
        slots = _constant_slots[kernel.fn] = tuple(p.is_constexpr for p in kernel.params)
    key = (kernel.fn, device, num_warps, num_stages, *map(_special, args, slots))
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = _build(kernel, grid, args, num_warps, num_stages)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def _build(kernel: Any, grid: tuple[int, int, int], args: tuple, num_warps: int, num_stages: int) -> Any:
    """Compiles through Triton's own path, which also makes the first launch."""
    with _build_lock:
        try:
            return kernel[grid](*args, num_warps=num_warps, num_stages=num_stages)
        except Exception as error:
            raise KernelError(
                f"{_name(kernel)} could not be built or launched: {type(error).__name__}: {error}"
            ) from error


def _special(arg: Any, constant: bool) -> Any:
    """What Triton compiles differently for: a superset of its own key, so that a hit is always the right kernel."""
    if constant:
        return arg
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if arg.__class__ is int:
        return 1 if arg == 1 else (arg % 16 == 0, -(2**31) <= arg < 2**31)
    return arg.__class__


def _name(kernel: Any) -> str:
    return getattr(kernel, "__name__", None) or getattr(kernel.fn, "__name__", str(kernel))
