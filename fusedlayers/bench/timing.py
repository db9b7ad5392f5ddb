"""Times contenders against each other in one run: device, wall and host time, peak memory, bytes kept for backward.

Contenders take turns within every round, so a clock that drifts or a noisy neighbour meets all of them alike. Device
time is that of a CUDA graph's replay where the work can be captured, else of events around plain calls; the graph
walks several sets of inputs where one set would stay in the L2 cache.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels import ahead

Call = Callable[[int], Any]
"""Runs one step on the input set of that number."""


@dataclass(frozen=True)
class Spread:
    """Of several samples, in the unit of the samples: the median, the middle 80%, and the best."""

    median: float
    low: float
    high: float
    best: float
    samples: int


def spread(samples: Sequence[float]) -> Spread:
    ordered = sorted(samples)
    n = len(ordered)
    return Spread(statistics.median(ordered), ordered[n // 10], ordered[n - 1 - n // 10], ordered[0], n)


@dataclass
class Timing:
    """What was measured of one contender; `None` where it could not be.

    Attributes:
        device_ms: one step on the device. `how`: `"graph"`, or `"events"` (then host gaps are included).
        wall_ms: one step, many in a row, synchronised at the end; on a GPU with all threads on one CPU, as is host_us.
        host_us: what one step costs the host until everything is queued.
        peak_bytes: the most memory one step takes on top of its inputs.
        kept_bytes: what autograd keeps from forward to backward, without the parameters.
    """

    device_ms: Spread | None = None
    how: str = ""
    wall_ms: Spread | None = None
    host_us: Spread | None = None
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Budget:
    """A number of seconds that a run may take; `None` is no limit."""

    def __init__(self, seconds: float | None):
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float:
        return float("inf") if self._end is None else self._end - time.monotonic()


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds in which all contenders take turns, and the least milliseconds of each turn."""

    rounds: int = 20
    turn_ms: float = 2.0
    most_calls: int = 200


QUICK = Effort(rounds=3, turn_ms=0.0, most_calls=1)


def compare(
    calls: Mapping[str, Call], sets: int = 1, effort: Effort = Effort(), device: str = "cuda"
) -> dict[str, Timing]:
    """Times every contender; one that raises is left out of the rest and has its error among its notes."""
    timings = {name: Timing() for name in calls}
    alive: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            for i in range(max(3, sets)):
                call(i % sets)
            ahead.settle()
            sync(device)
            timings[name].peak_bytes = peak_memory(lambda call=call: call(0)) if device == "cuda" else None
            alive[name] = call
        except Exception as error:
            timings[name].notes.append(f"{type(error).__name__}: {error}"[:500])
            sync(device)
    if device == "cuda":
        _device_times(alive, sets, effort, timings)
    with one_cpu(device):
        _wall_times(alive, sets, effort, timings, device)
    return timings


def _device_times(calls: Mapping[str, Call], sets: int, effort: Effort, timings: Mapping[str, Timing]) -> None:
    run: dict[str, Callable[[], None]] = {}
    graphs = []
    for name, call in calls.items():
        graph, why = capture(call, sets)
        timings[name].how = "events" if graph is None else "graph"
        if graph is None:
            timings[name].notes.append(f"not captured: {why}")
            run[name] = lambda call=call: [call(i) for i in range(sets)]
        else:
            graphs.append(graph)
            run[name] = graph.replay
    repeats = {name: _repeats(once, effort) for name, once in run.items()}
    samples: dict[str, list[float]] = {name: [] for name in run}
    for _ in range(effort.rounds):
        events = {}
        for name, once in run.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(repeats[name]):
                once()
            end.record()
            events[name] = (begin, end)
        torch.cuda.synchronize()
        for name, (begin, end) in events.items():
            samples[name].append(begin.elapsed_time(end) / repeats[name] / sets)
    for name, found in samples.items():
        timings[name].device_ms = spread(found)
    run.clear()
    for graph in graphs:
        graph.reset()


def _repeats(once: Callable[[], None], effort: Effort) -> int:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    once()
    begin.record()
    once()
    end.record()
    torch.cuda.synchronize()
    return max(1, min(effort.most_calls, round(effort.turn_ms / max(begin.elapsed_time(end), 1e-3))))


def capture(call: Call, sets: int) -> tuple[torch.cuda.CUDAGraph | None, str]:
    """A graph of one step on every input set, or why there is none."""
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for i in range(sets):
                call(i)
            _refuse_waits(call, sets)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(sets):
                call(i)
        return graph, ""
    except Exception as error:
        torch.cuda.synchronize()
        return None, f"{type(error).__name__}: {error}"[:300]


def _refuse_waits(call: Call, sets: int) -> None:
    """Raises where a step waits for the device. Inside a capture that would leave torch's generator broken after it."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(sets):
            call(i)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _wall_times(
    calls: Mapping[str, Call], sets: int, effort: Effort, timings: Mapping[str, Timing], device: str
) -> None:
    """Wall time of a turn of calls, and the part of it until the host had queued them all."""
    repeats = {}
    for name, call in calls.items():
        begin = time.perf_counter()
        call(0)
        sync(device)
        took = (time.perf_counter() - begin) * 1e3
        # at most 50 calls, so that the queue to the device does not fill up and stall the host
        repeats[name] = max(1, min(effort.most_calls, 50, round(effort.turn_ms / max(took, 1e-3))))
    wall: dict[str, list[float]] = {name: [] for name in calls}
    host: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(effort.rounds):
        for name, call in calls.items():
            n = repeats[name]
            sync(device)
            begin = time.perf_counter()
            for i in range(n):
                call(i % sets)
            queued = time.perf_counter()
            sync(device)
            done = time.perf_counter()
            wall[name].append((done - begin) / n * 1e3)
            host[name].append((queued - begin) / n * 1e6)
    for name in calls:
        timings[name].wall_ms, timings[name].host_us = spread(wall[name]), spread(host[name])


def peak_memory(call: Callable[[], Any]) -> int:
    """Bytes of device memory that `call` takes at its highest, on top of what was allocated before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def kept_for_backward(call: Callable[[], Any], parameters: Sequence[Tensor] = ()) -> int:
    """Bytes of distinct memory that autograd saves while `call` runs, without `parameters`."""
    seen: dict[int, int] = {}
    known = {p.untyped_storage().data_ptr() for p in parameters}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            seen[storage.data_ptr()] = storage.nbytes()
        alive.append(t)  # or its memory would be reused, and two tensors seen as one
        return t

    alive: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = call()
    del out
    return sum(seen.values())


def copy_speed(nbytes: int = 1 << 28) -> float:
    """Bytes a second, read plus written, that copying random data reaches.

    The better of the driver's copy, which a captured graph may hand to a slower engine, and of a kernel that reads
    and writes as much.
    """
    source = torch.randn(nbytes // 2, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    ways = {"copy": lambda i: target.copy_(source), "kernel": lambda i: torch.neg(source, out=target)}
    times = compare(ways, effort=Effort(rounds=7))
    return max(2 * nbytes / (t.device_ms.median / 1e3) for t in times.values() if t.device_ms)


def ceilings(device: str = "cuda") -> dict[str, float]:
    """What this device reaches: bytes a second of a large copy (read plus written), and FLOP/s of a bf16 product."""
    if device != "cuda":
        return {}
    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    product = compare({"mm": lambda i: torch.mm(a, b, out=out)}, effort=Effort(rounds=5, turn_ms=10))["mm"]
    found = {"copy_bytes_per_s": copy_speed()}
    if product.device_ms:
        found["bf16_flop_per_s"] = 2 * n**3 / (product.device_ms.median / 1e3)
    return found


def input_sets(nbytes: int) -> int:
    """How many sets of inputs of this size to rotate, so that the L2 cache does not serve the next step."""
    if not torch.cuda.is_available():
        return 1
    cache = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 0) or 64 << 20
    return max(1, min(8, -(-3 * cache // max(nbytes, 1))))


def seconds(step: Callable[[], Any], device: str) -> float:
    """Wall time of one call, synchronised at both ends."""
    sync(device)
    begin = time.perf_counter()
    step()
    sync(device)
    return time.perf_counter() - begin


@contextlib.contextmanager
def one_cpu(device: str) -> Iterator[None]:
    """This process's threads on one CPU, where the system can pin them: what a step asks of the host, at its best.
    On another device than a GPU as they are: there it is the CPUs that compute.

    Forward and backward take turns in two threads, and a CPU that sleeps in between runs at half speed when woken. What
    is born inside is born there: threads are let go at the end, processes are not.
    """
    tasks = Path("/proc/self/task")
    if device != "cuda" or not (hasattr(os, "sched_setaffinity") and tasks.exists()):
        yield
        return
    only = {max(os.sched_getaffinity(0))}
    before = {}
    try:
        for thread in (int(task.name) for task in tasks.iterdir()):
            with contextlib.suppress(OSError):  # a thread that has ended meanwhile
                before[thread] = os.sched_getaffinity(thread)
                os.sched_setaffinity(thread, only)
        yield
    finally:
        for thread in (int(task.name) for task in tasks.iterdir()):
            with contextlib.suppress(OSError):
                if os.sched_getaffinity(thread) == only:  # a new one as the main thread is
                    os.sched_setaffinity(thread, before.get(thread, before.get(os.getpid(), only)))


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
