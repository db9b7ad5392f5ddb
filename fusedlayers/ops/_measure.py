"""Measures an op's host cost once per machine, and keeps the outcome on disk for every later process.

On a size where the device has next to nothing to do, a call costs what the host spends on it. Where the fused call
costs the host more than eager's own ops, eager serves tensors so small that a network of such calls waits for its
host; elsewhere the fused call is at least as fast at any size. So one small probe an op and direction decides,
and builds only that op's own kernels.

As in a network, one backward follows many calls, so what starts a backward counts little. It runs in the thread that
measures: two that take turns wake each other, at a price that differs by a factor from one moment to the next.

Nothing of the user's is touched: probes make their own tensors, draw nothing from any generator, and run outside
autocast, but for those of ops that stand for what autocast does. A measurement is never made while a stream is
captured, and never waits for another thread's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..activations import get
from ..kernels import ahead, apart
from ..settings import settings
from . import _table

MARGIN = 1.03
ROUNDS, CALLS = 15, 10
EAGER_PASSES = {True: 8, False: 4}
"""About how often eager's ops read or write the tensor, with a backward and without."""
HEAVIER = {"mlp": 4, "gated_mlp": 4}
"""By op, how many times as long as that and what is beside it such a call keeps the device: its products are its own,
and work on a hidden tensor several times as large as the one a table is asked about."""
SLACK = 5
"""How much longer the device is busy with the products and convolutions beside such an op than with the op itself:
meanwhile the host runs ahead, and what an op costs it is hidden."""

Args = tuple[Any, ...]
_lock = threading.Lock()


def look_up(op: str, x: Tensor) -> tuple[dict[str, Any] | None, str]:
    """The routes of an op from this machine's cache, else measured now; `None` where now is not the time."""
    device = x.device
    path = cache_path(device)
    known = _read(path)
    if op in known:
        return known[op], f"a measurement on this machine, made before ({path})"
    if op not in PROBES:
        return {}, "the op's own rule: it has no probe"
    # inside a backward this may be autograd's own thread, which a measurement in another would wait for
    if torch.cuda.is_current_stream_capturing() or torch._C._current_graph_task_id() != -1:
        return None, ""
    if not _lock.acquire(blocking=False):
        return None, ""
    try:
        with _file_lock(path.with_suffix(".lock")):
            known = _read(path)  # another process may have measured while this one waited
            if op not in known:
                known[op] = apart(lambda: _measured(op, device))
                _write(path, known)
        return known[op], f"a measurement on this machine ({path})"
    except Exception as error:  # a probe that cannot run decides nothing, and must not fail the user's call
        return {}, f"the op's own rule: measuring failed ({type(error).__name__}: {error})"
    finally:
        _lock.release()


def cache_path(device: torch.device) -> Path:
    """One file a device and version of torch, Triton and this library."""
    import triton

    name = _table.slug(torch.cuda.get_device_name(device))
    versions = f"torch-{torch.__version__}_triton-{triton.__version__}_fusedlayers-{__version__}"
    return Path(settings.cache) / f"routes_{name}_{versions}.json"


def _measured(op: str, device: torch.device) -> dict[str, Any]:
    """`measure` in a thread that begins on the first device."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return measure(op, device)


def measure(op: str, device: torch.device) -> dict[str, Any]:
    """The runs of `op` in both directions, from one probe that takes turns between its routes."""
    fn, calls = getattr(importlib.import_module(f"{__package__}.{op}"), op), [PROBES[op](device) for _ in range(CALLS)]
    routes: dict[str, Any] = {}
    for train in (True, False):
        step = functools.partial(_step, fn, calls, train, op in CASTING)
        fused, eager = (us / CALLS for us in host_times(op, device, step, ({}, _table.REFERENCE)))
        for dtype, short in _table.NAMES.items():
            nbytes = EAGER_PASSES[train] * HEAVIER.get(op, 1) * dtype.itemsize
            below = crossover(fused, eager, bandwidth(device), nbytes)
            if below:
                direction = _table.TRAIN if train else _table.INFER
                routes[f"{op}/{direction}/{short}"] = [[below.bit_length() - 1, "reference"]]
    return routes


def crossover(fused_us: float, eager_us: float, bytes_per_us: float, bytes_per_element: int) -> int:
    """Elements below which eager is faster, inside a network; 0 where it never is."""
    if fused_us <= MARGIN * eager_us:
        return 0
    return int(fused_us * bytes_per_us / bytes_per_element / SLACK)


def host_times(op: str, device: torch.device, step: Callable[[], Any], entries: Sequence[_table.Entry]) -> list[float]:
    """Microseconds a step with each of `entries` in force, the best of several rounds in which all take turns."""
    best = [float("inf")] * len(entries)
    key = op, torch.cuda.current_device() if device.index is None else device.index
    for round_ in range(ROUNDS + 1):
        for i, entry in enumerate(entries):
            with _table.in_force(key, entry):
                torch.cuda.synchronize(device)
                begin = time.perf_counter()
                step()
                torch.cuda.synchronize(device)
            if round_:  # the first one builds
                best[i] = min(best[i], (time.perf_counter() - begin) * 1e6)
        ahead.settle()
    return best


def bandwidth(device: torch.device) -> float:
    """Bytes a microsecond of the device's memory, by its own account; about 1 TB/s where it gives none."""
    p = torch.cuda.get_device_properties(device)
    clock, width = getattr(p, "memory_clock_rate", 0), getattr(p, "memory_bus_width", 0)
    return clock * 1e3 * 2 * width / 8 / 1e6 or 1e6


def _step(fn: Callable[..., Any], calls: Sequence[Args], train: bool, casts: bool) -> None:
    """All `calls`, each on tensors of its own, then one backward through all of them."""
    given = [t for args in calls for a in args for t in (a if isinstance(a, tuple) else (a,)) if isinstance(t, Tensor)]
    autocast = torch.autocast(given[0].device.type, torch.bfloat16, enabled=casts)
    with torch.autograd.set_multithreading_enabled(False), torch.set_grad_enabled(train), autocast:
        found = [fn(*args) for args in calls]
        if train:
            outs = [o for out in found for o in (out if isinstance(out, tuple) else (out,))]
            torch.autograd.grad(outs, [t for t in given if t.requires_grad], [o.detach() for o in outs])


def _values(device: torch.device, *shape: int, grad: bool = True) -> Tensor:
    """Numbers between -1 and 1, without a generator."""
    return torch.linspace(-1, 1, torch.Size(shape).numel(), device=device).view(shape).requires_grad_(grad)


def _rows(d: torch.device, *more: Any, tensors: int = 1, vectors: int = 0) -> Args:
    return (*(_values(d, 64, 64) for _ in range(tensors)), *(_values(d, 64) for _ in range(vectors)), *more)


def _batch_norm(d: torch.device) -> Args:
    mean, var, count = _values(d, 16, grad=False), torch.ones(16, device=d), torch.zeros(1, dtype=torch.int64, device=d)
    x, weight, bias = _values(d, 4, 16, 8, 8), _values(d, 16), _values(d, 16)
    return x, mean, var, weight, bias, True, 0.1, 1e-5, get("relu"), None, None, count


def _mlp(d: torch.device) -> Args:
    return _values(d, 64, 64), _values(d, 64, 64), _values(d, 64), _values(d, 64, 64), _values(d, 64), get("gelu")


def _gated_mlp(d: torch.device) -> Args:
    return _values(d, 64, 64), tuple(_values(d, 64, 64) for _ in range(3)), (None,) * 3, get("silu")


def _norm(d: torch.device, vectors: int) -> Args:
    return _values(d, 64, 64), (64,), *(_values(d, 64) for _ in range(vectors)), 1e-5


PROBES: dict[str, Callable[[torch.device], Args]] = {
    "affine_act": lambda d: _rows(d, get("relu"), vectors=2),
    "linear_act": lambda d: (_values(d, 64, 64), _values(d, 64, 64), _values(d, 64), get("gelu")),
    "mlp": _mlp,
    "gated_mlp": _gated_mlp,
    "gated_act": lambda d: _rows(d, get("silu"), tensors=2),
    "layer_norm": lambda d: _norm(d, 2),
    "rms_norm": lambda d: _norm(d, 1),
    "batch_norm_act": _batch_norm,
    "scale_residual": lambda d: _rows(d, 0.0, 0.0, False, tensors=2, vectors=1),
    "split_heads": lambda d: (_values(d, 4, 16, 96), 4, 16, 3, 2, 16),
    "split_linear": lambda d: (_values(d, 4, 16, 32), _values(d, 96, 32), _values(d, 96), 4, 16, 3, 2, 16),
    "projections": lambda d: (_values(d, 64, 64), (_values(d, 64, 64),) * 3, (_values(d, 64),) * 3),
}
"""By op: arguments of `ops.<op>.<op>`, about 4096 elements."""

CASTING = frozenset({"projections", "split_linear"})
"""Ops that leave everything to eager outside of autocast."""


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # none yet, or one that a crash left half written
        return {}
    return {op: routes for op, routes in found.items() if _sound(op, routes)} if isinstance(found, dict) else {}


def _sound(op: str, routes: Any) -> bool:
    """Whether it can be read as a table; what cannot is measured again."""
    try:
        _table.parse(op, routes)
    except ValueError:
        return False
    return True


def _write(path: Path, known: dict[str, Any]) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """One process at a time; the system lets go of it when a process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if os.name == "nt":
                file.seek(0)
                msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
