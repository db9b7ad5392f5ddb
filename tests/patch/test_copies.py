"""Copies, pickles and files of a patched model are patched, independent, and load in a new process."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.patch import rule as registry
from fusedlayers.patch.guards import is_patched, original_class

from .models import MLP, network

X = torch.randn(5, 8)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("through", [copy.deepcopy, pickled, saved])
def test_copies_are_patched_and_independent(through):
    model = fl.patch_model(network(), on_fallback="raise")
    other = through(model)
    assert torch.equal(other(X), model(X))
    assert [r.modules for r in fl.explain(other).fused] == [r.modules for r in fl.explain(model).fused]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not torch.equal(other(X), model(X)), "a copy computes with the original's weights"
    other[2].fc.register_forward_hook(lambda *a: None)
    model(X)


def test_a_shallow_copy():
    model = fl.patch_model(network(), on_fallback="raise")
    assert torch.equal(copy.copy(model)(X), model(X))


def test_pickles_name_the_original_class_and_carry_no_counts():
    model = fl.patch_model(network(), on_fallback="ignore")
    model[2].act = nn.Tanh()
    model(X)
    data = pickle.dumps(model)
    assert b"exec" not in data and MLP.__module__.encode() in data
    assert original_class(pickle.loads(data)[2]) is MLP


def test_a_cycle_back_to_the_patched_module():
    model = fl.patch_model(network(), on_fallback="raise")
    model[2].parent = [model]
    for other in (copy.deepcopy(model), pickled(model)):
        assert other[2].parent[0] is other
        assert torch.equal(other(X), model(X))


class Stateful(MLP):
    """Pickles by its own means."""

    def __getstate__(self):
        return {**self.__dict__, "note": "kept"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.restored = True


class Reduces(nn.Sequential):
    def __reduce__(self):
        return (type(self), tuple(self))


@pytest.mark.parametrize("through", [copy.deepcopy, pickled])
def test_classes_with_their_own_pickling(through):
    model = fl.patch_model(Stateful(), on_fallback="raise")
    other = through(model)
    assert other.note == "kept" and other.restored and is_patched(other)
    model = fl.patch_model(Reduces(nn.Linear(8, 8), nn.ReLU()), on_fallback="raise")
    other = through(model)
    assert is_patched(other) and torch.equal(other(X), model(X))


def test_loading_in_a_new_process(tmp_path):
    model = fl.patch_model(network(), on_fallback="raise")
    torch.save((model, X, model(X)), tmp_path / "model.pt")
    code = """
import sys, torch
model, x, y = torch.load(sys.argv[1], weights_only=False)
import fusedlayers as fl
assert torch.equal(model(x), y)
assert len(fl.explain(model).fused) == 5 and fl.explain(model).patched
fl.unpatch_model(model)
assert torch.equal(model(x), y) and type(model).__name__ == "Sequential" and type(model) is torch.nn.Sequential
"""
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "model.pt")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


def test_loading_where_a_rule_is_not_known_warns_and_computes_the_same(monkeypatch):
    model = fl.patch_model(network())
    data = pickle.dumps(model)
    from fusedlayers.patch import apply

    monkeypatch.setattr(apply, "_by_token", {})
    monkeypatch.setattr(registry, "_rules", {})
    with pytest.warns(UserWarning, match="was loaded unpatched"):
        other = pickle.loads(data)
    assert not is_patched(other) and torch.equal(other(X), model(X))


def test_state_dicts_go_both_ways(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    patched, plain = fl.patch_model(network()), network()
    safetensors.save_model(patched, str(tmp_path / "a.safetensors"))
    safetensors.load_model(plain, str(tmp_path / "a.safetensors"))
    assert torch.equal(plain(X), patched(X))
    fresh = fl.patch_model(network())
    fresh.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(fresh(X), plain(X))


def test_meta_device_and_assign():
    with torch.device("meta"):
        model = fl.patch_model(network(), on_fallback="raise")
    source = network()
    model.load_state_dict(source.state_dict(), assign=True)
    torch.testing.assert_close(model(X), source(X))


def test_averaged_copies():
    model = fl.patch_model(network(), on_fallback="raise")
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    before = average(X)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    average.update_parameters(model)
    assert not torch.equal(average(X), before) and not torch.equal(average(X), model(X))
