"""What really runs: kernels started, bytes moved, the PTX of a kernel, a launch parameter against time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from . import kernels
from .activations import get as get_activation
from .ops import _route

if TYPE_CHECKING:
    from pathlib import Path

    from .bench.timing import Spread

__all__ = ["Kernel", "Traffic", "launches", "ptx", "roofline", "sweep", "traffic"]


@dataclass(frozen=True)
class Kernel:
    """One start of a kernel; `us` is its time on the device, `None` where it was not measured."""

    name: str
    us: float | None = None


def launches(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Kernel]:
    """The device kernels that `fn(*args, **kwargs)` starts, in order; `len()` counts them.

    `fn` is called twice, and looked at the second time, so that what is built once is not counted. With a CUDA device
    these are all kernels, the library's, torch's and the vendor's, from `torch.profiler`. Without one they are the
    library's own kernels, which Triton's interpreter runs (`TRITON_INTERPRET=1`), and no others.
    """
    fn(*args, **kwargs)
    if not torch.cuda.is_available():
        found: list[Kernel] = []

        def note(launch: Any, pointers: Any, numbers: Any) -> None:
            found.append(Kernel(launch.kernel.__name__))
            launch.run(pointers, numbers)

        with _observing(note):
            fn(*args, **kwargs)
        return found
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        fn(*args, **kwargs)
        torch.cuda.synchronize()
    started = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    started = [e for e in started if not e.name.startswith(("Memcpy", "Memset", "gpu_user_annotation"))]
    started.sort(key=lambda e: e.time_range.start)
    return [Kernel(e.name, e.time_range.elapsed_us()) for e in started]


@dataclass
class Traffic:
    """Bytes that a call moves, op by op, and the least it could.

    Attributes:
        moved: each op's or kernel's distinct tensors, inputs and outputs, counted once an op.
        least: the tensors that existed before and were read, plus the results: each once.
        by_op: `moved` by op or kernel, in order of size.
    """

    moved: int = 0
    least: int = 0
    by_op: Counter[str] = field(default_factory=Counter)

    @property
    def ratio(self) -> float:
        """How many times the least is moved."""
        return self.moved / self.least if self.least else float("nan")

    def __str__(self) -> str:
        lines = [f"moved {self.moved / 2**20:.3f} MiB, least {self.least / 2**20:.3f} MiB: {self.ratio:.2f} times"]
        return "\n".join(lines + [f"  {n / 2**20:12.3f} MiB  {name}" for name, n in self.by_op.most_common()])


def traffic(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Traffic:
    """Bytes that `fn(*args, **kwargs)` moves between ops, and the least possible.

    Counted from the tensors, not by the hardware: each torch op and each kernel of this library is taken to read every
    tensor it is given once and to write every tensor it makes or changes once; views and allocations move nothing, and
    a broadcast tensor counts for the memory it has. So what an op reads twice inside itself counts once, what a cache
    serves counts in full, and work that leaves no tensor does not count. The least is every tensor that was there
    before and is read, once, and every result, once; results are what `fn` returns, and the gradients that it puts on
    tensors among `args`, or on the parameters of `fn` where that is a module.
    """
    counter = _Counter()
    owned = list(fn.parameters()) if isinstance(fn, nn.Module) else []
    with _observing(counter.launched), counter:
        result = fn(*args, **kwargs)
    given = [t for t in [*tree_leaves((args, kwargs)), *owned] if isinstance(t, Tensor)]
    results = [t for t in tree_leaves(result) if isinstance(t, Tensor)] + [t.grad for t in given if t.grad is not None]
    written = {_storage(t): _nbytes(t) for t in results if _storage(t) in counter.made}
    found = counter.found
    found.moved = sum(found.by_op.values())
    found.least = sum(counter.read_from_outside.values()) + sum(written.values())
    return found


class _Counter(TorchDispatchMode):
    """Adds up what each op reads and writes, and which of it was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Traffic()
        self.made: set[int] = set()
        self.read_from_outside: dict[int, int] = {}
        self._alive: list[Tensor] = []  # or a freed address would come back as another tensor

    def __enter__(self) -> Any:
        _route.own_modes += 1
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        _route.own_modes -= 1
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        name = func.overloadpacket.__name__
        before = {_storage(t) for t in inputs}
        changes = func._schema.is_mutable
        if changes or any(_storage(t) not in before for t in outputs):
            allocates = name.startswith(("empty", "new_empty"))
            self._note(name, [] if allocates else inputs, [] if allocates else [*outputs, *inputs[:changes]])
        self.made.update(_storage(t) for t in outputs if _storage(t) not in before)
        self._alive += outputs
        return out

    def launched(self, launch: Any, pointers: Sequence[Tensor | None], numbers: tuple[int, ...]) -> None:
        self._note(launch.kernel.__name__, [p for p in pointers if p is not None], [])
        with _disable_current_modes():  # what the interpreter does to run it is not its traffic
            launch.run(pointers, numbers)

    def _note(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        distinct = {(_storage(t), t.storage_offset()): _nbytes(t) for t in read}
        written_too = {(_storage(t), t.storage_offset(), "written"): _nbytes(t) for t in written}
        total = sum(distinct.values()) + sum(written_too.values())
        if total:
            self.found.by_op[name] += total
        for t in read:
            if _storage(t) not in self.made:
                self.read_from_outside[_storage(t)] = max(_nbytes(t), self.read_from_outside.get(_storage(t), 0))
                self._alive.append(t)


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _nbytes(t: Tensor) -> int:
    """The memory a tensor's elements lie in: an expanded one repeats its own."""
    elements = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * t.element_size()


@contextmanager
def _observing(note: Callable[..., None]) -> Iterator[None]:
    if kernels.unavailable():
        yield
        return
    launch = kernels.load("launch")
    before, launch.observer = launch.observer, note
    try:
        yield
    finally:
        launch.observer = before


def ptx(
    kernel: str | Any,
    arch: str = "sm_90",
    *,
    dtype: str = "fp32",
    activation: str = "relu",
    num_warps: int = 4,
    signature: Mapping[str, str] | None = None,
    **constants: Any,
) -> str:
    """The PTX of one of the library's kernels, compiled with no GPU.

    Args:
        kernel: `"family.kernel"` such as `"affine.forward_col"`, a family such as `"affine"` for its first kernel, or
            a `triton.jit` function.
        arch: `"sm_80"`, `"sm_90"`, ...
        dtype: of every pointer: `"fp16"`, `"bf16"`, `"fp32"` or `"fp64"`.
        activation: what the kernel's `ACT` and `GRAD` compute.
        num_warps: as in a launch.
        signature: types of single arguments where the usual guess (pointers end in `_ptr`, values are fp32, sizes
            i32) is not what is wanted.
        constants: the kernel's compile-time constants by name. By default tiles (`BT`, `BLOCK_M`, ...) are 64, what
            `NEED_...` and `HAS_...` ask for is there, any other switch is off.

    Raises:
        ValueError: no such kernel.
        TypeError: a constant of that name does not exist, or has no default.
        RuntimeError: Triton is missing, or this process interprets its kernels (`TRITON_INTERPRET`).
    """
    if kernels.unavailable() or kernels.interpreted():
        why = kernels.unavailable() or "this process interprets Triton kernels; unset TRITON_INTERPRET"
        raise RuntimeError(f"no PTX here: {why}")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = _kernel(kernel) if isinstance(kernel, str) else kernel
    fixed = _constants(function, dtype, activation, constants)
    types = {}
    for p in function.params:
        given = (signature or {}).get(p.name)
        types[p.name] = "constexpr" if p.is_constexpr else given or _type(p.name, dtype)
    source = ASTSource(fn=function, signature=types, constexprs=fixed)
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return triton.compile(source, target=target, options={"num_warps": num_warps, "enable_fp_fusion": True}).asm["ptx"]


def _kernel(name: str) -> Any:
    family, _, wanted = name.partition(".")
    if family not in _families():
        raise ValueError(f"no kernel family {family!r} (known: {', '.join(_families())})")
    module = kernels.load(family)
    found = {
        n: f for n, f in vars(module).items()
        if hasattr(f, "arg_names") and f.__module__ == module.__name__ and any(p.endswith("_ptr") for p in f.arg_names)
    }  # fmt: skip
    if wanted:
        if wanted not in found:
            raise ValueError(f"no kernel {wanted!r} in {family} (known: {', '.join(found)})")
        return found[wanted]
    public = [n for n in found if not n.startswith("_")]
    if not public:
        raise ValueError(f"{family} has no kernel of its own")
    return found[public[0]]


def _families() -> list[str]:
    folder = os.path.dirname(kernels.__file__)
    helpers = {"__init__", "launch", "activations"}
    return sorted(n for f in os.listdir(folder) if f.endswith(".py") and (n := f[:-3]) not in helpers)


def _type(name: str, dtype: str) -> str:
    if name.endswith("_ptr"):
        return f"*{dtype}"
    return "fp32" if name in ("eps", "momentum") or name.endswith(("_value", "_eps")) else "i32"


def _constants(function: Any, dtype: str, activation: str, given: Mapping[str, Any]) -> dict[str, Any]:
    tl = kernels.load("launch").tl
    device_act, act = kernels.load("activations"), get_activation(activation)
    p0, p1 = device_act.constants(act)
    compute = tl.float64 if dtype == "fp64" else tl.float32
    known = {
        "CT": compute, "P0": p0, "P1": p1, "ACT": device_act.value(act), "GRAD": device_act.gradient(act),
        "KEEPS_OUTPUT": act.keeps == "output",
    }  # fmt: skip
    names = [p.name for p in function.params if p.is_constexpr]
    unknown = set(given) - set(names)
    if unknown:
        raise TypeError(f"{function.__name__} has no constant {', '.join(sorted(unknown))} (it has {', '.join(names)})")
    found = {}
    for name in names:
        if name in given:
            found[name] = given[name]
        elif name in known:
            found[name] = known[name]
        elif name.startswith("B") and name.isupper():
            found[name] = 64
        elif name.startswith(("HAS_", "NEED_")):
            found[name] = True
        elif name.startswith(("WRITE_", "KEEP_", "IS_", "WITH_", "SUM_")):
            found[name] = False
        else:
            raise TypeError(f"{function.__name__} needs a value for its constant {name}: ptx(..., {name}=...)")
    return found


def sweep(
    fn: Callable[..., Any], *args: Any, parameter: str = "num_warps", values: Sequence[int] = (1, 2, 4, 8, 16)
) -> dict[int, Spread]:
    """Milliseconds of `fn(*args)` with every kernel of this library launched with each value of a parameter.

    The values take turns in every round, and are timed on the device where there is one. A value that a kernel cannot
    be built with is left out.

    Args:
        fn: anything that runs kernels of this library, on a CUDA device or in Triton's interpreter.
        args: its arguments.
        parameter: `"num_warps"` or `"num_stages"`.
        values: what to try.

    Raises:
        ValueError: another parameter; tiles follow from the grid, which the op works out.
        RuntimeError: Triton cannot be imported here.
    """
    from .bench.timing import QUICK, Effort, compare

    if parameter not in ("num_warps", "num_stages"):
        raise ValueError(f"parameter must be 'num_warps' or 'num_stages', not {parameter!r}")
    if kernels.unavailable():
        raise RuntimeError(f"nothing to sweep: {kernels.unavailable()}")
    launch = kernels.load("launch")
    changed: dict[Any, Any] = {}

    def with_value(value: int) -> Callable[[int], Any]:
        def note(one: Any, pointers: Any, numbers: Any) -> None:
            other = changed.get((id(one), value))
            if other is None:
                settings = {"num_warps": one.num_warps, "num_stages": one.num_stages, parameter: value}
                other = changed[id(one), value] = launch.Launch(one.kernel, one.grid, one.rest, **settings)
                kept.append(one)  # or its id could come back as another's
            other.run(pointers, numbers)

        def call(_: int) -> Any:
            with _observing(note):
                return fn(*args)

        return call

    kept: list[Any] = []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    calls = {str(v): with_value(v) for v in values}
    timings = compare(calls, effort=Effort() if device == "cuda" else QUICK, device=device)
    found = {int(v): t.device_ms or t.wall_ms for v, t in timings.items()}
    return {v: t for v, t in found.items() if t is not None}


def roofline(
    points: Sequence[tuple[str, float, float, float]],
    path: str | Path,
    *,
    ceilings: Mapping[str, float] | None = None,
    title: str = "",
) -> Path:
    """Draws a roofline: FLOP/s against FLOP a byte, under what the device reaches.

    Args:
        points: `(label, FLOP, bytes, seconds)` of each piece of work, the bytes as `traffic(...).least` gives them.
        path: where the PNG goes.
        ceilings: `copy_bytes_per_s` and `bf16_flop_per_s`; default: measured on the current CUDA device.
        title: written above.

    Raises:
        ImportError: matplotlib is not installed.
        RuntimeError: no ceilings were given, and there is no CUDA device to measure them on.
    """
    from .bench import plots, timing

    if ceilings is None:
        if not torch.cuda.is_available():
            raise RuntimeError("without a CUDA device, give the ceilings: copy_bytes_per_s and bf16_flop_per_s")
        ceilings = timing.ceilings()
    return plots.roofline(points, dict(ceilings), path, title)
