"""Builds kernels before they are launched, side by side in threads: most of Triton's work does not hold Python's lock.

That changes only when a kernel is ready. The launch that needs one waits for it, and where its build failed, builds it
again and reports that for itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton

if TYPE_CHECKING:
    from .launch import Launch

_building: dict[Hashable, Future] = {}
_lock = threading.Lock()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="fusedlayers")


def build(launch: Launch, dtypes: tuple[torch.dtype | None, ...], numbers: tuple[Any, ...], device: int) -> None:
    """Begins to build the kernel of `launch` for pointers of these dtypes (`None`: absent), unless that has begun."""
    key = _kernel(launch, dtypes, device)
    with _lock:
        if key not in _building:
            _building[key] = _pool().submit(_work, launch, dtypes, numbers, device)


def wait(launch: Launch, dtypes: tuple[torch.dtype | None, ...], device: int) -> None:
    """Until no build of this kernel is under way."""
    under_way = _building.get(_kernel(launch, dtypes, device)) if _building else None
    if under_way is not None:
        under_way.exception()


def _work(launch: Launch, dtypes: tuple, numbers: tuple, device: int) -> None:
    with torch.cuda.device(device):
        built = launch.kernel.warmup(*dtypes, *numbers, *launch.rest, grid=launch.grid, **launch.options)
        # some versions have a C compiler make what launches it, and find it in their disk cache from then on
        triton.runtime.driver.active.launcher_cls(built.src, built.metadata)


def _kernel(launch: Launch, dtypes: tuple, device: int) -> Hashable:
    """Equal for launches that Triton serves by one kernel: it tells sizes apart by what they are 1 or multiples of."""
    parameters = launch.kernel.params[len(launch.kernel.params) - len(launch.rest) :]
    rest = tuple(_specialised(p, value) for p, value in zip(parameters, launch.rest, strict=True))
    return launch.kernel, dtypes, rest, launch.num_warps, launch.num_stages, device


def _specialised(parameter: Any, value: Any) -> Any:
    if parameter.is_constexpr:
        return value
    if not isinstance(value, int) or parameter.do_not_specialize:
        return type(value)
    return value == 1, value % 16 == 0 and not parameter.do_not_specialize_on_alignment, value >= 2**31
