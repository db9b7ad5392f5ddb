"""What `fusedlayers.inspect` sees of the library's own kernels, where they run."""

from __future__ import annotations

import pytest
import torch

import fusedlayers as fl
from fusedlayers import inspect, kernels
from fusedlayers.functional import affine_act
from tests.harness import randn


@pytest.fixture(autouse=True)
def kernels_run(device):
    if device == "cpu" and not kernels.interpreted():
        pytest.skip("kernels run on a device or in the interpreter")
    with fl.settings(route="triton"):
        yield


def step(x, a, b):
    return torch.autograd.grad(affine_act(x, a, b), (x, a, b), torch.ones_like(x))


def test_launches_forward_and_backward(device):
    x, a, b = randn(8, 16, device=device), randn(16, device=device), randn(16, device=device)
    names = [k.name for k in inspect.launches(step, x, a, b)]
    assert [n for n in names if "ones" not in n and "fill" not in n.lower()] == [
        "forward_col", "backward_col", "sum_partials",
    ]  # fmt: skip


def test_traffic_of_one_kernel_is_the_least(device):
    x, a, b = (randn(*s, device=device, grad=False) for s in [(64, 256), (256,), (256,)])
    found = inspect.traffic(affine_act, x, a, b)
    assert found.by_op == {"forward_col": 2 * x.nbytes + 2 * a.nbytes}
    assert found.moved == found.least


def test_a_sweep_runs_the_kernels_with_every_value(device):
    x, a, b = randn(8, 16, device=device), randn(16, device=device), randn(16, device=device)
    found = inspect.sweep(affine_act, x, a, b, parameter="num_warps", values=(1, 4))
    assert set(found) == {1, 4} and all(t.median > 0 for t in found.values())
