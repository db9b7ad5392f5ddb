"""Routing by measurement, on a device: the probes really run, and never inside a capture."""

from __future__ import annotations

import pytest
import torch

import fusedlayers as fl
from fusedlayers.functional import affine_act
from fusedlayers.ops import _table
from tests.ops.test_table import *  # noqa: F403


@pytest.fixture
def unknown_device(monkeypatch, tmp_path):
    """This device, as if no table were shipped for it and nothing had been measured."""
    monkeypatch.setattr(_table, "_shipped", lambda name: None)
    monkeypatch.setattr(_table, "forget", lambda: (_table._entries.clear(), _table._sources.clear()))
    _table.forget()
    with fl.settings(cache=tmp_path, autotune=True, route="auto"):
        yield tmp_path
    _table.forget()


def test_a_capture_measures_nothing_and_the_next_call_does(unknown_device):
    x = torch.randn(64, 64, device="cuda")
    with fl.settings(route="triton"):
        affine_act(x, 2.0, 1.0)  # builds the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = affine_act(x, 2.0, 1.0)
    assert not list(unknown_device.glob("*.json"))
    graph.replay()
    torch.testing.assert_close(y, torch.relu(2.0 * x + 1.0))
    state, cpu_state = torch.cuda.get_rng_state(), torch.get_rng_state()
    torch.testing.assert_close(affine_act(x, 2.0, 1.0), torch.relu(2.0 * x + 1.0))
    assert len(list(unknown_device.glob("*.json"))) == 1
    assert torch.equal(torch.cuda.get_rng_state(), state) and torch.equal(torch.get_rng_state(), cpu_state)
    assert "a measurement on this machine" in _table.explain("affine_act", x.get_device())


def test_a_measurement_inside_autocast_and_no_grad_changes_neither(unknown_device):
    x = torch.randn(64, 64, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        y = affine_act(x, 2.0, 1.0)
        assert not torch.is_grad_enabled() and torch.is_autocast_enabled("cuda")
    assert y.dtype == torch.float32 and not y.requires_grad
