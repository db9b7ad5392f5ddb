"""The measuring side of the benchmarks: graphs, kernel sums, peaks, and a model of each kind of step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusedlayers.bench import models, ops, peers, timing, workloads
from fusedlayers.bench.timing import QUICK


def test_a_captured_call_is_timed_by_its_graph_and_another_by_events():
    x = torch.randn(1 << 20, device="cuda")

    def waits(i):
        return x.sum().item()

    found = timing.compare({"fine": lambda i: x * 2, "waits": waits}, sets=2, effort=QUICK)
    assert found["fine"].how == "graph" and found["fine"].device_ms.median > 0
    assert found["fine"].peak_bytes >= x.nbytes
    assert found["waits"].how == "events" and "not captured" in found["waits"].notes[0]
    assert float((x * 2).sum()) == pytest.approx(2 * float(x.sum()), rel=1e-3)  # the device is still well


@pytest.mark.parametrize(
    "case",
    [
        ops.affine_act(64, 256, "bf16"),
        ops.layer_norm(64, 256, "bf16", residual=True),
        ops.batch_norm_act(4, 32, 8, "bf16", residual=True),
        ops.scale_residual(64, 256, "bf16", scale=True, dropout=0.1),
        ops.linear_act(64, 64, 64, "bf16", "gelu"),
        ops.gated_act(64, 256, "bf16"),
    ],
    ids=lambda c: c.name,
)
def test_a_case_is_captured_forward_and_backward(case):
    found = peers.run_case(case, ["eager"], "cuda", QUICK, control=True)
    for name, timed in found["peers"].items():
        assert timed["how"] == "graph", (name, timed["notes"])
        assert timed["device_ms"]["median"] > 0
    assert "error" not in found and found["peers"]["fused"]["peak_bytes"] > 0


def test_a_model_is_measured_in_every_variant():
    def build(device, tiny):
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8)).to(device)
        return model, (torch.randn(256, 64, device=device), torch.randint(8, (256,), device=device))

    small = workloads.Workload("small", build, workloads._classify)
    found = models.measure(small, ("eager", "patched"), "cuda")["variants"]
    for variant in found.values():
        assert variant["device_ms"] > 0 and variant["launches"] > 5 and variant["peak_bytes"] > 0
        assert variant["full_ms"]["median"] >= 0.5 * variant["step_ms"]["median"]
    assert found["patched"]["launches"] <= found["eager"]["launches"]


def test_ceilings_are_of_this_device():
    found = timing.ceilings()
    assert 1e10 < found["copy_bytes_per_s"] < 1e14 and 1e11 < found["bf16_flop_per_s"] < 1e17
