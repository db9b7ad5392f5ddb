"""`FusedGroupNormAct` against `nn.GroupNorm` and the activation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.activations import get
from tests.harness import compare, randn

pytestmark = pytest.mark.usefixtures("forced")


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_is_group_norm_and_activation(affine, activation, device):
    ours = fl.FusedGroupNormAct(2, 6, eps=1e-4, affine=affine, activation=activation).to(device)
    plain = nn.GroupNorm(2, 6, eps=1e-4, affine=affine).to(device)
    assert isinstance(ours, nn.GroupNorm) and list(ours.state_dict()) == list(plain.state_dict())
    if affine:
        with torch.no_grad():
            ours.weight.copy_(randn(6)), ours.bias.copy_(randn(6, seed=1))
    plain.load_state_dict(ours.state_dict())
    twin = copy.deepcopy(plain).double()
    x = randn(3, 6, 4, 5, device=device)
    compare(ours, lambda x: get(activation)((twin if x.dtype == torch.float64 else plain)(x)), (x,))


def test_shows_its_activation_and_checks_it():
    assert "activation=silu" in repr(fl.FusedGroupNormAct(2, 4))
    with pytest.raises(ValueError, match="unknown activation"):
        fl.FusedGroupNormAct(2, 4, activation="sillu")
    with pytest.raises(ValueError, match="divisible"):
        fl.FusedGroupNormAct(3, 4)
