"""`FusedLinear`, `FusedAffine` and their named classes: the layer they replace in every way a user can see."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.activations import Activation
from tests.harness import compare, randn

pytestmark = pytest.mark.usefixtures("forced")

NAMED = [
    (fl.FusedLinearReLU, nn.ReLU()),
    (fl.FusedLinearGELU, nn.GELU()),
    (fl.FusedLinearSiLU, nn.SiLU()),
]


def pair(act: nn.Module, bias: bool = True, device: str = "cpu") -> tuple[nn.Module, nn.Sequential]:
    """A fused layer and what it replaces, made from the same seed."""
    torch.manual_seed(5)
    fused = fl.FusedLinear(6, 4, bias, act, device=device)
    torch.manual_seed(5)
    return fused, nn.Sequential(nn.Linear(6, 4, bias, device=device), act)


@pytest.mark.parametrize("bias", [True, False])
def test_same_seed_same_parameters(bias, device):
    fused, plain = pair(nn.GELU(), bias, device)
    assert isinstance(fused, nn.Linear)
    assert list(fused.state_dict()) == list(plain[0].state_dict()) == (["weight", "bias"] if bias else ["weight"])
    for a, b in zip(fused.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("act", [nn.ReLU(), nn.GELU(approximate="tanh"), nn.LeakyReLU(0.3)], ids=str)
def test_computes_what_it_replaces(act, device):
    fused, plain = pair(act, device=device)
    x = randn(5, 6, device=device)
    inputs = (x, *fused.parameters())

    def call(module, names):
        return lambda x, *ps: torch.func.functional_call(module, dict(zip(names, ps, strict=True)), (x,))

    compare(call(fused, ["weight", "bias"]), call(plain, ["0.weight", "0.bias"]), inputs, sums=True)


@pytest.mark.parametrize(("cls", "act"), NAMED, ids=lambda v: getattr(v, "__name__", ""))
def test_named_classes(cls, act, device):
    layer = cls(3, 2, device=device, dtype=torch.float64)
    x = randn(5, 3, dtype=torch.float64, device=device)
    torch.testing.assert_close(layer(x), act(nn.functional.linear(x, layer.weight, layer.bias)))
    assert layer.weight.dtype == torch.float64
    assert cls(3, 2, False).bias is None


def test_tanh_form_of_gelu():
    assert fl.FusedLinearGELU(3, 2, approximate="tanh").activation == Activation("gelu_tanh")


def test_checkpoints_go_both_ways(device):
    fused, plain = pair(nn.ReLU(), device=device)
    other = nn.Linear(6, 4, device=device)
    other.load_state_dict(fused.state_dict())
    fused.load_state_dict(plain[0].state_dict())
    assert torch.equal(other.weight, fused.weight)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_compute_the_same_and_are_their_own(again, device):
    fused, _ = pair(nn.SiLU(), device=device)
    x = randn(2, 6, device=device)
    twin = again(fused)
    assert torch.equal(twin(x), fused(x)) and twin.activation == fused.activation
    with torch.no_grad():
        twin.weight.add_(1.0)
    assert not torch.equal(twin(x), fused(x))


def test_torch_save_and_load():
    fused, _ = pair(nn.SiLU())
    buffer = io.BytesIO()
    torch.save(fused, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False).weight, fused.weight)


def test_repr():
    assert repr(fl.FusedLinear(3, 2)) == "FusedLinear(in_features=3, out_features=2, bias=True, activation=relu)"
    shown = repr(fl.FusedLinear(3, 2, False, nn.LeakyReLU(0.2)))
    assert shown == "FusedLinear(in_features=3, out_features=2, bias=False, activation=leaky_relu(negative_slope=0.2))"
    assert repr(fl.FusedAffine(8, "silu", 1)) == "FusedAffine(8, activation=silu, dim=1)"


def test_meta_device_and_assign(device):
    fused = fl.FusedLinear(6, 4, device="meta")
    plain = nn.Linear(6, 4, device=device)
    fused.load_state_dict(plain.state_dict(), assign=True)
    x = randn(2, 6, device=device)
    torch.testing.assert_close(fused(x), torch.relu(plain(x)))


def test_unknown_activation():
    with pytest.raises(ValueError, match="did you mean 'gelu'"):
        fl.FusedLinear(3, 2, activation="gelo")
    with pytest.raises(TypeError, match="activation must be"):
        fl.FusedLinear(3, 2, activation=3)


@pytest.mark.parametrize(("shape", "dim"), [((5, 4), -1), ((2, 4, 3, 3), 1)])
def test_affine(shape, dim, device):
    layer = fl.FusedAffineReLU(4, dim, device=device)
    assert list(layer.state_dict()) == ["weight", "bias"]
    x = randn(*shape, device=device)
    assert torch.equal(layer(x), x.relu())
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, -2.0, 3.0, 0.5]))
        layer.bias.copy_(torch.tensor([0.1, 0.2, -0.3, 0.4]))
    broadcast = [1] * len(shape)
    broadcast[dim] = 4
    compare(
        lambda x, w, b: torch.func.functional_call(layer, {"weight": w, "bias": b}, (x,)),
        lambda x, w, b: torch.relu(w.view(broadcast) * x + b.view(broadcast)),
        (x, *layer.parameters()),
    )
