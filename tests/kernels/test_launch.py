"""Prepared launches reach Triton's launcher with the arguments `CompiledKernel.run` would give it, alone or chained."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from fusedlayers.kernels import launch

driver = pytest.importorskip("triton.backends.nvidia.driver")


class Recorder:
    """Stands in for the C launcher of one kernel."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __call__(self, *args) -> None:
        self.calls.append(args)


def compiled(scratch: int = 0) -> SimpleNamespace:
    run = driver.CudaLauncher.__new__(driver.CudaLauncher)
    run.__dict__.update(
        launch=Recorder(), num_ctas=1, launch_cooperative_grid=False, launch_pdl=True, gsan_enabled=False,
        arg_annotations=("annotations",), kernel_signature=b"signature",
        global_scratch_size=scratch, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
    )  # fmt: skip
    return SimpleNamespace(run=run, function=7, packed_metadata=("metadata",))


@pytest.fixture
def pretended(monkeypatch):
    """A current CUDA device on which tensors of the CPU lie, and kernels that are built by a recorder."""
    built = []

    def build(self, pointers, numbers):
        built.append(compiled())
        return built[-1]

    monkeypatch.setattr(driver.triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace()))
    monkeypatch.setattr(launch, "_INTERPRETED", False)
    monkeypatch.setattr(launch, "_current_device", lambda: -1)
    monkeypatch.setattr(launch, "_current_stream", lambda device: 99)
    monkeypatch.setattr(launch.Launch, "_build", build)
    monkeypatch.setattr(launch.ahead, "build", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return built


def arguments(call: tuple) -> tuple:
    """What the kernel itself gets, in either form."""
    return call[-1] if isinstance(call[-1], tuple) else call[13:]


def test_the_launcher_gets_what_run_would_give_it(pretended):
    t = torch.zeros(8)
    one = launch.Launch(SimpleNamespace(__name__="kernel"), (3, 2), (5, True))
    one(t, None, numbers=(1, 2))  # builds
    one(t, None, numbers=(1, 2))
    (kernel,) = pretended
    kernel.run(3, 2, 1, 99, 7, ("metadata",), None, None, None, t.data_ptr(), None, 1, 2, 5, True)
    direct, through_run = kernel.run.launch.calls
    assert direct == through_run and arguments(direct) == (t.data_ptr(), None, 1, 2, 5, True)


def test_a_kernel_that_needs_scratch_memory_goes_through_run(monkeypatch):
    """Which gets torch's for this launch alone: the allocator that others set stays theirs."""
    from triton.runtime import _allocation

    monkeypatch.setattr(launch, "_memory", lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))
    kernel, seen = compiled(scratch=16), []
    kernel.run = lambda *args, **options: seen.append((args, options, _allocation._allocator.get()))
    kernel.run.global_scratch_size = 16
    fire, bound, packed = launch._ready(kernel)
    assert bound == (7, ("metadata",), None, None, None) and not packed
    before = _allocation._allocator.get()
    fire(3, 1, 1, 99, *bound, 5)
    ((args, _, allocator),) = seen
    assert args == (3, 1, 1, 99, *bound, 5)
    assert allocator is launch._memory and allocator is not before and _allocation._allocator.get() is before

    def failing(*args):
        raise ValueError

    with pytest.raises(ValueError):
        launch.scratched(failing)()
    assert _allocation._allocator.get() is before


def test_a_launcher_of_another_kind_is_called_as_it_is():
    run = Recorder()
    fire, _, packed = launch._ready(SimpleNamespace(run=run, function=7, packed_metadata=()))
    assert fire is run and not packed


def test_a_chain_launches_what_its_launches_would(pretended):
    a, b, c = torch.zeros(8), torch.zeros(8), torch.zeros(8)
    kernel = SimpleNamespace(__name__="kernel")
    first, second = launch.Launch(kernel, (3,), (5,)), launch.Launch(kernel, (4,), (6,))
    chain = launch.Chain((first, (0, 2), False), (None, (1, 1), True), (second, (2, 1, 3), True))
    chain(a, b, c, None, numbers=(1, 2))  # builds both
    assert len(pretended) == 2 and not pretended[0].run.launch.calls
    chain(a, b, c, None, numbers=(3, 4))
    chain(b, a, c[1:], None, numbers=(3, 4))  # another alignment: another kernel for those that take it
    assert len(pretended) == 4
    chain(b, a, c[1:], None, numbers=(3, 4))
    x, y, z = a.data_ptr(), b.data_ptr(), c.data_ptr()
    seen = [[(call[:5], arguments(call)) for call in built.run.launch.calls] for built in pretended]
    assert seen == [
        [((3, 1, 1, 99, 7), (x, z, 5))],
        [((4, 1, 1, 99, 7), (z, y, None, 3, 4, 6))],
        [((3, 1, 1, 99, 7), (y, z + 4, 5))],
        [((4, 1, 1, 99, 7), (z + 4, x, None, 3, 4, 6))],
    ]


def test_a_chain_leaves_its_launches_to_an_observer(pretended, monkeypatch):
    seen = []
    a, b = torch.zeros(8), torch.zeros(8)
    one = launch.Launch(SimpleNamespace(__name__="kernel"), (3,), ())
    chain = launch.Chain((one, (0, 1), False))
    chain(a, b)
    chain(a, b)
    monkeypatch.setattr(launch, "observer", lambda self, pointers, numbers: seen.append((self, pointers, numbers)))
    chain(a, b)
    assert seen == [(one, (a, b), ())] and len(pretended[0].run.launch.calls) == 1


def test_a_chain_on_another_device_than_the_current_one_launches_there(pretended, monkeypatch):
    a, b = torch.zeros(8), torch.zeros(8)
    chain = launch.Chain((launch.Launch(SimpleNamespace(__name__="kernel"), (3,), ()), (0, 1), False))
    chain(a, b)
    monkeypatch.setattr(launch, "_current_device", lambda: 0)
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or contextlib.nullcontext())
    chain(a, b)
    assert entered == [-1] and len(pretended[0].run.launch.calls) == 1
