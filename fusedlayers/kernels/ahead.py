"""Builds kernels before they are launched, side by side in threads: most of Triton's work does not hold Python's lock.

That changes only when a kernel is ready: the launch that needs it waits for a build under way, and where none was
begun or it failed, builds the kernel itself and reports that itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .launch import Launch

_THREADS = 3
"""More wait for one another's Python: a first forward of ResNet-50 took 10.6 s with 8, and 7.7 s with 3."""

_building: dict[Hashable, Future[str]] = {}
_lock = threading.Lock()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), thread_name_prefix="fusedlayers")


def build(launch: Launch, dtypes: tuple[torch.dtype | None, ...], numbers: tuple[Any, ...], device: int) -> None:
    """Begins to build the kernel of `launch` for pointers of these dtypes (`None`: absent), unless that has begun."""
    key = _kernel(launch, dtypes, device)
    with _lock, contextlib.suppress(RuntimeError):  # no thread to be had, as when Python ends
        if key not in _building:
            _building[key] = _pool().submit(_work, launch, dtypes, numbers, device)


def wait(launch: Launch, dtypes: tuple[torch.dtype | None, ...], device: int) -> None:
    """Until no build of this kernel is under way."""
    under_way = _building.get(_kernel(launch, dtypes, device)) if _building else None
    if under_way is not None:
        under_way.result()


def settle() -> None:
    """Until no build is under way, so that what is timed next has the processor to itself."""
    for under_way in list(_building.values()):
        under_way.result()


def _work(launch: Launch, dtypes: tuple, numbers: tuple, device: int) -> str:
    """Returns what went wrong, as text: the exception would keep all that Triton held."""
    if not threading.main_thread().is_alive():
        return "the program has ended"
    try:
        import triton

        with torch.cuda.device(device):
            built = launch.kernel.warmup(*dtypes, *numbers, *launch.rest, grid=launch.grid, **launch.options)
            # Triton 3.6 has a C compiler make what launches it, and finds that in its disk cache from then on
            triton.runtime.driver.active.launcher_cls(built.src, built.metadata)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _kernel(launch: Launch, dtypes: tuple, device: int) -> Hashable:
    """Equal for launches that Triton serves by one kernel, as far as ours go; a mistake would cost a build, no more."""
    parameters = launch.kernel.params[len(launch.kernel.params) - len(launch.rest) :]
    rest = tuple(_specialised(p, value) for p, value in zip(parameters, launch.rest, strict=True))
    return launch.kernel, dtypes, rest, launch.num_warps, launch.num_stages, device


def _specialised(parameter: Any, value: Any) -> Any:
    """Triton compiles in sizes of 1, and tells multiples of 16 and what fits 32 bits from others."""
    if parameter.is_constexpr:
        return value
    if not isinstance(value, int) or parameter.do_not_specialize:
        return type(value)
    return value == 1, value % 16 == 0 and not parameter.do_not_specialize_on_alignment, value >= 2**31
