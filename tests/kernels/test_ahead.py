"""Kernels built ahead, in threads: each once, and those that the launches then ask for. Compiles with no GPU."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch

from fusedlayers import kernels
from fusedlayers.activations import get
from fusedlayers.ops import batch_norm_act as op

pytest.importorskip("triton")
if kernels.interpreted():
    pytest.skip("the interpreter builds nothing", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget

from fusedlayers.kernels import ahead, launch


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """A current device that is only a target to compile for; what was compiled, by name."""
    launchers: list[str] = []
    active = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=lambda src, metadata: launchers.append(src.name),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead, "_building", {})
    found: list[str] = []

    def listen(*, src, metadata, metadata_group, times, cache_hit) -> None:
        found.append(metadata["name"])

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    yield found
    assert sorted(launchers) == sorted(found)
    for kernel in vars(kernels.load("batch_norm")).values():
        if hasattr(kernel, "device_caches"):
            kernel.device_caches.clear()


EVERY = True, True, True, False


def call(channels: int, height: int) -> op._Call:
    shape = torch.Size((32, channels, height, height))
    stride = channels * height * height, 1, channels * height, channels
    parameters = ((torch.float32, (channels,)),) * 4
    device = torch.device("cuda", 0)
    found = op._cached_call(
        get("relu"), True, 1e-5, shape, stride, torch.bfloat16, None, *parameters, False, device
    )  # fmt: skip
    found._launches.clear()
    return found


def finish() -> None:
    ahead.settle()
    assert {build.result() for build in ahead._building.values()} == {""}


def test_a_forward_begins_to_build_its_backward(compiled, monkeypatch):
    monkeypatch.setattr(op, "_processors", lambda device: 132)
    first = call(64, 28)
    first.build_backward(EVERY)
    finish()
    assert sorted(compiled) == ["backward_apply", "backward_combine", "backward_sums"]
    # what the launch then asks for is there: the same kernels, by real tensors
    run = first._launches[EVERY][0]
    x, f = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64)
    pointers = x, x, None, f, f, None, x, f, f, f, f, None
    for step, which, _ in run.steps:
        mine = tuple(pointers[i] for i in which)
        assert ahead._kernel(step, tuple(None if p is None else p.dtype for p in mine), 0) in ahead._building
        step.kernel.run(*mine, *step.rest, grid=step.grid, warmup=True, **step.options)
    assert len(compiled) == 3


def test_sizes_that_share_a_kernel_build_it_once(compiled, monkeypatch):
    monkeypatch.setattr(op, "_processors", lambda device: 132)
    for height in (28, 30, 28):
        call(64, height).build_backward(EVERY)
    finish()
    assert len(compiled) == len(set(compiled)) == len(ahead._building)


def test_a_chain_builds_its_launches_side_by_side(monkeypatch):
    begun = []
    monkeypatch.setattr(ahead, "build", lambda launch, *rest: begun.append((launch, *rest)))
    kernel = SimpleNamespace(__name__="kernel")
    first, second = launch.Launch(kernel, (3,), ()), launch.Launch(kernel, (4,), ())
    second._ready[1] = None
    chain = launch.Chain((first, (0, 2), False), (None, (1, 1), True), (second, (2, 1), True))
    chain.build_ahead([torch.bfloat16, None, torch.float32], 0, (1, 2))
    assert begun == [
        (first, (torch.bfloat16, torch.float32), (), 0),
        (second, (torch.float32, None), (1, 2), 0),
    ]
    begun.clear()
    chain.build_ahead([torch.bfloat16, None, torch.float32], 1)
    assert [b[0] for b in begun] == [first]  # the other is built on that device


class Kernel:
    """One whose build does as it is told."""

    params = ()

    def __init__(self, warmup) -> None:
        self.warmup = lambda *args, **kwargs: warmup()


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(ahead, "_building", {})


def begin(warmup) -> Future | None:
    one = launch.Launch(Kernel(warmup), (3,), ())
    ahead.build(one, (torch.float32,), (), 0)
    ahead.wait(one, (torch.float32,), 0)
    return next(iter(ahead._building.values()), None)


def test_a_build_that_fails_is_left_to_the_launch(alone):
    assert begin(lambda: [][0]).result().startswith("IndexError")


def test_without_a_thread_it_is_left_to_the_launch(alone, monkeypatch):
    def submit(*args) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ahead, "_pool", lambda: SimpleNamespace(submit=submit))
    assert begin(lambda: None) is None


def test_what_waits_its_turn_is_dropped_when_the_program_ends(alone, monkeypatch):
    built = []
    monkeypatch.setattr(threading, "main_thread", lambda: SimpleNamespace(is_alive=lambda: False))
    assert begin(lambda: built.append(1)).result() == "the program has ended" and not built
