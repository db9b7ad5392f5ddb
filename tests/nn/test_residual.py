"""`FusedScaleResidual`: its parameter, its modes, and what it computes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from fusedlayers.nn.residual import FusedScaleResidual
from tests.harness import compare, randn


def test_parameter_is_layerscales_gamma():
    layer = FusedScaleResidual(8, init_values=0.1)
    assert list(layer.state_dict()) == ["gamma"]
    assert layer.gamma.shape == (8,) and layer.gamma.unique().tolist() == pytest.approx([0.1])
    assert FusedScaleResidual(8, dtype=torch.bfloat16, device="meta").gamma.dtype == torch.bfloat16
    with torch.no_grad():
        layer.gamma.fill_(3.0)
    layer.reset_parameters()
    assert layer.gamma.unique().tolist() == pytest.approx([0.1])


def test_without_a_scale_there_is_no_parameter():
    layer = FusedScaleResidual(dropout_p=0.5)
    assert layer.gamma is None and not list(layer.parameters()) and not layer.state_dict()
    x, residual = randn(4, 6), randn(4, 6, seed=1)
    compare(layer.eval(), lambda x, r: r + x, (x, residual))


@pytest.mark.parametrize(
    ("shape", "channel_dim", "view"),
    [
        ((5, 8), -1, (8,)),
        ((2, 5, 8), 2, (8,)),
        ((2, 8, 3, 4), 1, (8, 1, 1)),
        ((2, 8, 3), -2, (8, 1)),
        ((8, 3), 0, (8, 1)),
    ],
    ids=str,
)
def test_channels_lie_where_said(shape, channel_dim, view):
    layer = FusedScaleResidual(8, init_values=0.5, channel_dim=channel_dim)
    with torch.no_grad():
        layer.gamma.copy_(torch.arange(8.0))
    x, residual = randn(*shape), randn(*shape, seed=1)
    compare(layer, lambda x, r: r + layer.gamma.detach().to(x.dtype).view(view) * x, (x, residual))
    layer(x, residual).sum().backward()
    expected = x.detach().movedim(channel_dim, 0).reshape(8, -1).sum(1)
    torch.testing.assert_close(layer.gamma.grad, expected)


def test_drops_in_training_only():
    layer = FusedScaleResidual(16, init_values=1.0, dropout_p=0.5, drop_path_p=0.25)
    x, residual = torch.ones(8, 16), torch.zeros(8, 16)
    torch.manual_seed(0)
    got = layer(x, residual)
    torch.manual_seed(0)
    z = F.dropout(layer.gamma * x, 0.5, True)
    assert torch.equal(got, residual + z * z.new_empty(8, 1).bernoulli_(0.75).div_(0.75))
    assert torch.equal(layer.eval()(x, residual), x)


def test_bad_probabilities_are_refused():
    with pytest.raises(ValueError, match=r"dropout probability has to be between 0 and 1, but got 1\.5"):
        FusedScaleResidual(8, dropout_p=1.5)
    with pytest.raises(ValueError, match=r"drop probability has to be between 0 and 1, but got -1"):
        FusedScaleResidual(8, drop_path_p=-1)


def test_copies_and_says_what_it_is():
    layer = FusedScaleResidual(8, dropout_p=0.1, channel_dim=1)
    other = copy.deepcopy(layer)
    assert other.gamma is not layer.gamma and torch.equal(other.gamma, layer.gamma)
    assert repr(layer) == "FusedScaleResidual(8, init_values=1e-05, dropout_p=0.1, drop_path_p=0.0, channel_dim=1)"
    assert repr(FusedScaleResidual()) == "FusedScaleResidual(dropout_p=0.0, drop_path_p=0.0)"
