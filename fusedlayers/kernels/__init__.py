"""Triton kernels. No autograd and no `nn.Module` here: one file a family, one launcher (`launch.py`).

Nothing in this package is imported until a call takes the Triton route, so the library imports where Triton is missing.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

OLDEST = 3, 4
"""Older Tritons compile some kernels only, or none."""


class KernelError(RuntimeError):
    """A kernel could not be built or launched here (no compiler, too little shared memory, ...).

    Attributes:
        after: how many launches of its chain had been made by then; what they wrote stays written.
    """

    after = 0


class NoStorageError(KernelError):
    """A tensor of this call has no memory of its own to show, as one that left a finished torch.func transform."""


@functools.cache
def unavailable() -> str | None:
    """Why Triton cannot be used in this process; `None` when it can."""
    try:
        importlib.import_module("triton.language")
        version = importlib.import_module("triton").__version__
    except Exception as error:  # a broken install raises more than ImportError
        return f"Triton cannot be imported ({type(error).__name__}: {error})"
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        return f"Triton {version} is too old: the kernels need {'.'.join(map(str, OLDEST))} or newer"
    return None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU. Read by Triton itself when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def apart(work: Callable[[], Any]) -> Any:
    """`work()`, in a thread of its own: what is done once, inside a user's call, must not meet the hooks on saved
    tensors (activation checkpointing counts them, and may stop there), the modes and the autocast of that call."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.extend((work(), None))
        except BaseException as error:
            found.extend((None, error))

    thread = threading.Thread(target=run, name="fusedlayers")
    thread.start()
    thread.join()
    result, error = found
    if error is not None:
        raise error
    return result


@functools.cache
def load(family: str) -> ModuleType:
    """The kernel module of one family, imported on first use."""
    return apart(lambda: importlib.import_module(f"{__name__}.{family}"))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
