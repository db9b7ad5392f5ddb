"""Every test of this folder runs on a CUDA device, and is skipped, with the reason, where there is none.

Several processes may share the device (pytest-xdist): each measures into a folder of its own, and tests of much memory
run one at a time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch

import fusedlayers as fl


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture(autouse=True, scope="session")
def measurements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured routes start from nothing, and leave nothing in the user's cache."""
    with fl.settings(cache=tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(autouse=True)
def left_well() -> Iterator[None]:
    """A test that broke a graph capture, or failed with much memory in hand, does not take the next ones with it."""
    yield
    if not torch.cuda.is_available():
        return
    end_broken_capture()
    if torch.cuda.memory_reserved() > 2 * 2**30:
        gc.collect()
        torch.cuda.empty_cache()


def end_broken_capture() -> None:
    """A capture that was invalidated leaves the generator believing in it; a whole one, of nothing, ends that."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()
        torch.rand(1, device="cuda")
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        graph.capture_end()
    torch.rand(1, device="cuda")


@pytest.fixture
def much_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Only one test at a time, of all processes, holds this; it gives its memory back."""
    fcntl = pytest.importorskip("fcntl", reason="needs a lock between processes")
    with open(tmp_path_factory.getbasetemp().parent / "much_memory.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        yield
        gc.collect()
        torch.cuda.empty_cache()
