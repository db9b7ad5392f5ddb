"""`fusedlayers.inspect`: launches, traffic, PTX, sweeps and rooflines."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers import inspect, kernels
from fusedlayers.functional import affine_act

compiles = pytest.mark.skipif(
    kernels.unavailable() is not None or kernels.interpreted(), reason="compiling needs Triton, and not its interpreter"
)


@compiles
def test_ptx_of_an_affine_is_one_fma():
    text = inspect.ptx("affine")
    assert ".target sm_90" in text and "fma.rn.f32" in text


@compiles
def test_ptx_takes_kernels_types_and_constants():
    text = inspect.ptx("affine.backward_row", dtype="bf16", activation="gelu", MASK=1, BR=16, BS=32)
    assert "ex2.approx" in text and "cvt.rn.bf16" in text
    assert ".target sm_80" in inspect.ptx(kernels.load("affine").forward_row, "sm_80")


@compiles
def test_ptx_names_what_it_does_not_know():
    with pytest.raises(ValueError, match="no kernel family 'afine'"):
        inspect.ptx("afine")
    with pytest.raises(ValueError, match=r"no kernel 'nothing' in affine .*forward_col"):
        inspect.ptx("affine.nothing")
    with pytest.raises(TypeError, match="no constant BX"):
        inspect.ptx("affine", BX=4)
    with pytest.raises(TypeError, match="needs a value for its constant MASK"):
        inspect.ptx("affine.backward_col")


def test_traffic_of_plain_ops():
    x, y = torch.randn(100, 10), torch.randn(100, 10)
    found = inspect.traffic(lambda a, b: (a + b).relu(), x, y)
    assert found.by_op == {"add": 3 * x.nbytes, "relu": 2 * x.nbytes}
    assert found.moved == 5 * x.nbytes and found.least == 3 * x.nbytes
    assert found.ratio == pytest.approx(5 / 3) and "1.67 times" in str(found)


def test_traffic_counts_views_allocations_and_broadcasts_for_what_they_are():
    x = torch.randn(100, 10)
    assert inspect.traffic(lambda t: torch.empty_like(t).view(-1), x).moved == 0
    assert inspect.traffic(lambda t: t + torch.ones(1).expand(100, 10), x).by_op["add"] == 2 * x.nbytes + 4
    assert inspect.traffic(lambda t: t.mul_(2), x.clone()).by_op == {"mul_": 2 * x.nbytes}


def test_traffic_counts_gradients_as_results():
    layer, x = nn.Linear(8, 4), torch.randn(16, 8)

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            self.layer(x).sum().backward()

    found = inspect.traffic(Step(), x)
    own = layer.weight.nbytes + layer.bias.nbytes
    assert found.least == x.nbytes + 2 * own and found.moved > found.least


def test_a_call_under_traffic_takes_its_usual_route():
    x = torch.randn(4, 4)
    with fl.settings(route="triton"):
        if kernels.interpreted():
            inspect.traffic(affine_act, x, 2.0, 1.0)
        else:
            with pytest.raises(RuntimeError, match="the tensors lie on the CPU"):
                inspect.traffic(affine_act, x, 2.0, 1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a device all kernels are counted")
def test_without_a_device_only_the_librarys_kernels_are_counted():
    assert inspect.launches(torch.relu, torch.randn(4)) == []


def test_a_sweep_names_its_parameters():
    with pytest.raises(ValueError, match="'num_warps' or 'num_stages'"):
        inspect.sweep(torch.relu, torch.randn(4), parameter="BLOCK")


def test_a_roofline_needs_ceilings_without_a_device(tmp_path):
    points = [("affine/a", 1e6, 4e6, 1e-3), ("linear/b", 1e12, 4e8, 2e-3)]
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="give the ceilings"):
            inspect.roofline(points, tmp_path / "r.png")
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, of the bench extra")
    ceilings = {"copy_bytes_per_s": 4e12, "bf16_flop_per_s": 7e14}
    path = inspect.roofline(points, tmp_path / "r.png", ceilings=ceilings)
    assert path.stat().st_size > 5000
