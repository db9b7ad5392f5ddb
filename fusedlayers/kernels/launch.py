"""The one place that launches a kernel: at least host time, on the tensor's own device and current stream.

Triton's `kernel[grid](...)` binds and specialises every argument on each call. A `Launch` holds all of a call but its
pointers, so that running it costs one look at each pointer and one call of the compiled kernel's own `run`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
import triton
import triton.language as tl  # noqa: F401  (its dtypes, for ops that must not import Triton themselves)
from torch import Tensor

from . import KernelError, NoStorageError, ahead, interpreted

_INTERPRETED = interpreted()
_current_device = getattr(torch._C, "_cuda_getDevice", None)  # both are missing from builds without CUDA
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_build_lock = threading.Lock()
# Sizes that count rows, or blocks: no address is aligned by them, so one kernel serves all their values. Another batch
# or another length of a sequence then builds nothing, and a network's sites share more kernels. Not affine's: its
# backward then takes more registers than its grid leaves room for
COUNTS = ["M", "K", "rows_per", "rows_per_block", "span", "blocks", "blocks_m"]

_MAX_X = 2**31 - 1
_MAX_YZ = 65535

_built: dict[int, Any] = {}


def kernels_built() -> int:
    """How many kernels were launched in this process, each compiled or loaded from Triton's disk cache before."""
    return len(_built)


observer: Callable[[Launch, tuple[Tensor | None, ...], tuple[int, ...]], None] | None = None
"""Set by `fusedlayers.inspect` while it looks: called in place of every launch, which it makes by `Launch.run`."""


Ready = tuple[Callable[..., Any], tuple[Any, ...], bool]
"""What launches a built kernel, what it takes between the stream and the kernel's arguments, and whether those are one
tuple."""


class Launch:
    """A kernel with its grid, sizes and constants bound; calling it with the pointer arguments runs it.

    The kernel's parameters are its pointers, then `numbers`, then `rest` in order. `numbers` may differ from call to
    call: int32s that the kernel names in `do_not_specialize`. Whoever keeps a `Launch` keeps it under the dtypes
    of its pointers and under which of them are `None`.

    Raises:
        KernelError: the grid is larger than a GPU takes; on the first call: the kernel cannot be built or launched.
    """

    __slots__ = ("_ready", "grid", "kernel", "maxnreg", "num_stages", "num_warps", "rest")

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], rest: tuple[Any, ...], num_warps: int = 4, num_stages: int = 2,
        maxnreg: int | None = None,
    ) -> None:  # fmt: skip
        x, y, z = (*grid, 1, 1)[:3]
        if x > _MAX_X or y > _MAX_YZ or z > _MAX_YZ:
            raise KernelError(f"{kernel.__name__}: a grid of {grid} blocks is larger than a GPU takes")
        self.kernel, self.grid, self.rest = kernel, (x, y, z), rest
        self.num_warps, self.num_stages, self.maxnreg = num_warps, num_stages, maxnreg
        self._ready: dict[Any, Ready] = {}

    def __call__(self, *pointers: Tensor | None, numbers: tuple[int, ...] = (), observed: bool = False) -> None:
        if _INTERPRETED or (observer is not None and not observed):
            self._unusual(pointers, numbers, observed)
            return
        addresses: list[Any] = []
        bits, some = 0, None
        try:
            for p in pointers:
                if p is None:
                    addresses.append(None)
                else:
                    address = p.data_ptr()
                    addresses.append(address)
                    bits |= address
                    some = p
        except RuntimeError as error:
            raise NoStorageError(str(error)) from error
        device = some.get_device()
        # Triton compiles another kernel where a pointer is not 16-byte aligned
        key = device if not bits & 15 else (device, *(a is None or a % 16 == 0 for a in addresses))
        ready = self._ready.get(key)
        if ready is None or device != _current_device():
            self._elsewhere(ready, key, device, pointers, addresses, numbers)
        else:
            fire, bound, packed = ready
            x, y, z = self.grid
            if packed:
                fire(x, y, z, _current_stream(device), *bound, (*addresses, *numbers, *self.rest))
            else:
                fire(x, y, z, _current_stream(device), *bound, *addresses, *numbers, *self.rest)

    def run(self, pointers: tuple[Tensor | None, ...], numbers: tuple[int, ...] = ()) -> None:
        """The launch itself, for an observer."""
        self(*pointers, numbers=numbers, observed=True)

    @property
    def options(self) -> dict[str, Any]:
        """What Triton is told besides the kernel's arguments."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
        return options if self.maxnreg is None else {**options, "maxnreg": self.maxnreg}

    def _unusual(self, pointers: tuple[Tensor | None, ...], numbers: tuple[int, ...], observed: bool) -> None:
        if observer is not None and not observed:
            observer(self, pointers, numbers)
        elif 0 not in self.grid:
            try:
                for p in pointers:
                    if p is not None:
                        p.data_ptr()
            except RuntimeError as error:
                raise NoStorageError(str(error)) from error
            with _build_lock:  # the interpreter keeps its grid and patched functions in globals
                self.kernel[self.grid](*pointers, *numbers, *self.rest, **self.options)

    def _elsewhere(
        self, ready: Any, key: Any, device: int, pointers: tuple[Tensor | None, ...], addresses: list,
        numbers: tuple[int, ...],
    ) -> None:  # fmt: skip
        """The first launch, which builds the kernel, and those on a device that is not the current one."""
        if 0 in self.grid:
            return
        with torch.cuda.device(device):
            if ready is None:
                self._ready[key] = _ready(self._build(pointers, numbers))
            else:
                fire, bound, packed = ready
                arguments = (*addresses, *numbers, *self.rest)
                fire(*self.grid, _current_stream(device), *bound, *((arguments,) if packed else arguments))

    def _build(self, pointers: tuple[Tensor | None, ...], numbers: tuple[int, ...]) -> Any:
        """Compiles through Triton's own path, which also makes the first launch."""
        ahead.wait(self, tuple(None if p is None else p.dtype for p in pointers), torch.cuda.current_device())
        with _build_lock:
            try:
                compiled = scratched(self.kernel[self.grid])(*pointers, *numbers, *self.rest, **self.options)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise KernelError(f"{self.kernel.__name__} could not be built or launched: {reason}") from error
            _built[id(compiled)] = compiled  # several launches share one kernel
            return compiled


_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])


def _ready(compiled: Any) -> Ready:
    """How to launch this kernel: `CompiledKernel.run`, or the C function it hands its arguments to after it has
    allocated what this kernel does not need, where this version's order of arguments is known."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    if type(run).__module__ == "triton.backends.nvidia.driver" and (3, 6) <= _VERSION <= (3, 9):
        if not (run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False)):
            flags = (function, run.launch_cooperative_grid, run.launch_pdl)
            if _VERSION == (3, 6):
                return run.launch, (*flags, None, None, metadata, None, None, None), False
            rest = (metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature)
            return run.launch, (*flags, *rest), True
    needs_scratch = getattr(run, "global_scratch_size", 0)
    return scratched(run) if needs_scratch else run, (function, metadata, None, None, None), False


def scratched(launch: Callable[..., Any]) -> Callable[..., Any]:
    """`launch`, with torch's memory where the kernel needs some beside its arguments, whatever allocator is set."""
    from triton.runtime import _allocation

    held = _allocation._allocator
    if not hasattr(held, "reset"):  # not a context variable, before Triton 3.5
        return launch

    def launched(*args: Any, **options: Any) -> Any:
        token = held.set(_memory)
        try:
            return launch(*args, **options)
        finally:
            held.reset(token)

    return launched


def _memory(size: int, alignment: int, stream: int | None) -> Tensor:
    """Freed when the launch is under way, and then reused in the order of the stream, which is the current one."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


class Chain:
    """Launches that follow one another over one set of tensors; addresses, device and stream are looked up once.

    Each step is a `Launch`, which of the chain's pointers it takes (two at least), and whether it takes the numbers.
    The first pointer is given. A step whose launch is `None` is left out.
    """

    __slots__ = ("_begun", "_ready", "steps")

    def __init__(self, *steps: tuple[Launch | None, tuple[int, ...], bool]) -> None:
        self.steps = [step for step in steps if step[0] is not None]
        self._ready: dict[int, list[tuple]] = {}
        self._begun: set[int] = set()

    def __call__(self, *pointers: Tensor | None, numbers: tuple[Any, ...] = ()) -> None:
        device = pointers[0].get_device()
        ready = self._ready.get(device)
        if ready is None or observer is not None or device != _current_device():
            self._apart(device, pointers, numbers)
            return
        addresses: list[Any] = []
        bits = 0
        try:
            for p in pointers:
                if p is None:
                    addresses.append(None)
                else:
                    address = p.data_ptr()
                    addresses.append(address)
                    bits |= address
        except RuntimeError as error:
            raise NoStorageError(str(error)) from error
        if bits & 15:
            self._apart(device, pointers, numbers)
            return
        stream = _current_stream(device)
        addresses += numbers
        for fire, x, y, z, bound, packed, pick, rest in ready:
            if packed:
                fire(x, y, z, stream, *bound, pick(addresses) + rest)
            else:
                fire(x, y, z, stream, *bound, *pick(addresses), *rest)

    def build_ahead(self, dtypes: Sequence[torch.dtype | None], device: int, numbers: tuple[Any, ...] = ()) -> None:
        """Begins to build what is not built yet, for pointers of these dtypes (`None`: absent), without waiting."""
        if _INTERPRETED:
            return
        for launch, which, numbered in self.steps:
            if device not in launch._ready and 0 not in launch.grid:
                ahead.build(launch, tuple(dtypes[i] for i in which), numbers if numbered else (), device)

    def _apart(self, device: int, pointers: tuple[Tensor | None, ...], numbers: tuple[Any, ...]) -> None:
        """One launch after the other, each looking for itself; once all are built, they are kept together."""
        if device not in self._begun and len(self.steps) > 1:
            self._begun.add(device)
            self.build_ahead([None if p is None else p.dtype for p in pointers], device, numbers)
        for made, (launch, which, numbered) in enumerate(self.steps):
            try:
                launch(*(pointers[i] for i in which), numbers=numbers if numbered else ())
            except KernelError as error:
                error.after = made
                raise
        if device in self._ready or not all(device in launch._ready for launch, _, _ in self.steps):
            return
        after, ready = tuple(range(len(pointers), len(pointers) + len(numbers))), []
        for launch, which, numbered in self.steps:
            fire, bound, packed = launch._ready[device]
            pick = itemgetter(*which, *(after if numbered else ()))
            ready.append((fire, *launch.grid, bound, packed, pick, launch.rest))
        self._ready[device] = ready


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
