"""The one place that launches a kernel: at least host time, on the tensor's own device and current stream.

Triton's `kernel[grid](...)` binds and specialises every argument on each call. A `Launch` holds all of a call but its
pointers, so that running it costs one look at each pointer and one call of the compiled kernel's own `run`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl  # noqa: F401  (its dtypes, for ops that must not import Triton themselves)
from torch import Tensor

from . import KernelError, interpreted

_INTERPRETED = interpreted()
_build_lock = threading.Lock()
_MAX_X = 2**31 - 1
_MAX_YZ = 65535

_built: dict[int, Any] = {}


def kernels_built() -> int:
    """How many kernels were compiled, or loaded from Triton's disk cache, in this process."""
    return len(_built)


observer: Callable[[Launch, tuple[Tensor | None, ...], tuple[int, ...]], None] | None = None
"""Set by `fusedlayers.inspect` while it looks: called in place of every launch, which it makes by `Launch.run`."""


class Launch:
    """A kernel with its grid, sizes and constants bound; calling it with the pointer arguments runs it.

    The kernel's parameters are its pointers, then `numbers`, then `rest` in order. `numbers` may differ from call to
    call: int32s that the kernel names in `do_not_specialize`. Whoever keeps a `Launch` keeps it under the dtypes
    of its pointers and under which of them are `None`.

    Raises:
        KernelError: the grid is larger than a GPU takes; on the first call: the kernel cannot be built or launched.
    """

    __slots__ = ("_compiled", "grid", "kernel", "num_stages", "num_warps", "rest")

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], rest: tuple[Any, ...], num_warps: int = 4, num_stages: int = 2
    ) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        if x > _MAX_X or y > _MAX_YZ or z > _MAX_YZ:
            raise KernelError(f"{kernel.__name__}: a grid of {grid} blocks is larger than a GPU takes")
        self.kernel, self.grid, self.rest = kernel, (x, y, z), rest
        self.num_warps, self.num_stages = num_warps, num_stages
        self._compiled: dict[Any, Any] = {}

    def __call__(self, *pointers: Tensor | None, numbers: tuple[int, ...] = ()) -> None:
        if observer is not None:
            observer(self, pointers, numbers)
        else:
            self.run(pointers, numbers)

    def run(self, pointers: tuple[Tensor | None, ...], numbers: tuple[int, ...] = ()) -> None:
        """The launch itself."""
        if _INTERPRETED:
            if 0 not in self.grid:
                options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
                with _build_lock:  # the interpreter keeps its grid and patched functions in globals
                    self.kernel[self.grid](*pointers, *numbers, *self.rest, **options)
            return
        addresses, bits, device = [], 0, -1
        for p in pointers:
            if p is None:
                addresses.append(None)
            else:
                address = p.data_ptr()
                addresses.append(address)
                bits |= address
                device = p.get_device() if device < 0 else device
        # Triton compiles another kernel where a pointer is not 16-byte aligned
        key = device if not bits & 15 else (device, *(a is None or a % 16 == 0 for a in addresses))
        compiled = self._compiled.get(key)
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self._run(compiled, key, device, pointers, addresses, numbers)
        else:
            self._run(compiled, key, device, pointers, addresses, numbers)

    def _run(
        self, compiled: Any, key: Any, device: int, pointers: tuple[Tensor | None, ...], addresses: list,
        numbers: tuple[int, ...],
    ) -> None:  # fmt: skip
        if compiled is None:
            if 0 not in self.grid:
                self._compiled[key] = self._build(pointers, numbers)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        function, metadata = compiled.function, compiled.packed_metadata
        compiled.run(*self.grid, stream, function, metadata, None, None, None, *addresses, *numbers, *self.rest)

    def _build(self, pointers: tuple[Tensor | None, ...], numbers: tuple[int, ...]) -> Any:
        """Compiles through Triton's own path, which also makes the first launch."""
        with _build_lock:
            try:
                options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
                compiled = self.kernel[self.grid](*pointers, *numbers, *self.rest, **options)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise KernelError(f"{self.kernel.__name__} could not be built or launched: {reason}") from error
            _built[id(compiled)] = compiled  # several launches share one kernel
            return compiled


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, num_stages: int = 2) -> None:
    """Runs `kernel` once, all its parameters given positionally, pointers first. Ops on a hot path keep a `Launch`."""
    pointers = 0
    while pointers < len(args) and (args[pointers] is None or isinstance(args[pointers], Tensor)):
        pointers += 1
    rest = args[pointers:]
    dtypes = tuple(None if p is None else p.dtype for p in args[:pointers])
    key = (kernel, grid, rest, dtypes, num_warps, num_stages)
    prepared = _prepared.get(key)
    if prepared is None:
        if len(_prepared) >= _MOST_PREPARED:
            _prepared.clear()
        prepared = _prepared[key] = Launch(kernel, grid, rest, num_warps, num_stages)
    prepared(*args[:pointers])


_prepared: dict[Any, Launch] = {}
_MOST_PREPARED = 4096
