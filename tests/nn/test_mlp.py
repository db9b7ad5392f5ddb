"""`FusedMLP` and `FusedGatedMLP`: the layers inside, their checkpoints, and what happens when one is replaced."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedlayers as fl
from tests.harness import compare, randn

pytestmark = pytest.mark.usefixtures("forced")


class SwiGLU(nn.Module):
    """The layer as language models write it."""

    def __init__(self, chunked: bool = False, bias: bool = False):
        super().__init__()
        if chunked:
            self.gate_up_proj = nn.Linear(6, 20, bias)
        else:
            self.gate_proj = nn.Linear(6, 10, bias)
            self.up_proj = nn.Linear(6, 10, bias)
        self.down_proj = nn.Linear(10, 6, bias)

    def forward(self, x):
        if hasattr(self, "gate_up_proj"):
            gate, up = self.gate_up_proj(x).chunk(2, -1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(F.silu(gate) * up)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


CASES = {
    "mlp": (lambda: fl.FusedMLP(6), Mlp),
    "gated": (lambda: fl.FusedGatedMLP(6, 10), SwiGLU),
    "gated-bias": (lambda: fl.FusedGatedMLP(6, 10, bias=True), lambda: SwiGLU(bias=True)),
    "chunked": (lambda: fl.FusedGatedMLP(6, 10, chunked=True), lambda: SwiGLU(True)),
}


@pytest.fixture(params=CASES)
def pair(request, device) -> tuple[nn.Module, nn.Module]:
    """A fused module and the plain one, made from the same seed."""
    made = []
    for make in CASES[request.param]:
        torch.manual_seed(3)
        made.append(make().to(device))
    return tuple(made)


def call(module):
    names = [name for name, _ in module.named_parameters()]
    return lambda x, *ps: torch.func.functional_call(module, dict(zip(names, ps, strict=True)), (x,))


def test_same_seed_same_parameters_under_the_same_names(pair):
    fused, plain = (m.state_dict() for m in pair)
    assert list(fused) == list(plain)
    assert all(torch.equal(fused[k], plain[k]) for k in fused)


def test_computes_what_it_replaces(pair, device):
    fused, plain = pair
    inputs = (randn(5, 6, device=device), *fused.parameters())
    compare(call(fused), call(plain), inputs, sums=True)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(pair, again, device):
    fused, _ = pair
    x = randn(2, 6, device=device)
    twin = again(fused)
    assert torch.equal(twin(x), fused(x))
    with torch.no_grad():
        next(twin.parameters()).add_(1.0)
    assert not torch.equal(twin(x), fused(x))


class Adapter(nn.Linear):
    """A layer with something added, as LoRA has it."""

    def forward(self, x):
        return super().forward(x) + 1.0


@pytest.mark.parametrize("how", ["subclass", "hook", "pre_hook", "instance_forward"])
def test_what_replaces_or_hooks_a_layer_is_called(pair, how, device):
    fused, plain = pair
    x = randn(5, 6, device=device)
    for module in pair:
        for name, child in list(module.named_children()):
            if how == "subclass":
                adapter = Adapter(child.in_features, child.out_features, child.bias is not None, device=device)
                adapter.load_state_dict(child.state_dict())
                setattr(module, name, adapter)
            elif how == "hook":
                child.register_forward_hook(lambda m, args, out: out * 2.0)
            elif how == "pre_hook":
                child.register_forward_pre_hook(lambda m, args: (args[0] + 1.0,))
            else:
                child.forward = lambda x, child=child: F.linear(x, child.weight) * 3.0
    torch.testing.assert_close(fused(x), plain(x))


def test_global_hooks_see_every_layer(pair, device):
    fused, _ = pair
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(type(m)) and None)
    try:
        fused(randn(5, 6, device=device))
    finally:
        handle.remove()
    assert seen.count(nn.Linear) == len(list(fused.children()))


def test_arguments():
    layer = fl.FusedMLP(4, 6, 3, "relu", bias=False, device="meta", dtype=torch.float64)
    assert (layer.fc1.weight.shape, layer.fc2.weight.shape) == ((6, 4), (3, 6))
    assert layer.fc1.weight.is_meta and layer.fc2.weight.dtype == torch.float64 and layer.fc1.bias is None
    assert fl.FusedGatedMLP(4, 6, 3, device="meta").down_proj.weight.shape == (3, 6)
    assert "activation=gelu_tanh" in repr(fl.FusedMLP(4, activation=nn.GELU("tanh")))
    assert "chunked=True, gate_first=False" in repr(fl.FusedGatedMLP(4, 6, chunked=True, gate_first=False))
    with pytest.raises(ValueError, match="did you mean"):
        fl.FusedMLP(4, activation="gelo")
