"""The norm layers: `nn`'s own parameters and results, and the residual in front."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fusedlayers.nn.norm import FusedLayerNorm, FusedRMSNorm
from tests.harness import compare, randn

pytestmark = pytest.mark.usefixtures("forced")

PAIRS = [
    (FusedLayerNorm, nn.LayerNorm, {}),
    (FusedLayerNorm, nn.LayerNorm, {"eps": 1e-3, "bias": False}),
    (FusedLayerNorm, nn.LayerNorm, {"elementwise_affine": False}),
    (FusedRMSNorm, nn.RMSNorm, {}),
    (FusedRMSNorm, nn.RMSNorm, {"eps": 1e-3}),
    (FusedRMSNorm, nn.RMSNorm, {"elementwise_affine": False}),
]


def pair(fused, plain, kwargs, device, shape=(12,)):
    """Both layers with the same random parameters."""
    a, b = fused(shape, device=device, **kwargs), plain(shape, device=device, **kwargs)
    for i, p in enumerate(b.parameters()):
        p.data.copy_(randn(*p.shape, device=device, seed=i))
    a.load_state_dict(b.state_dict())
    return a, b


@pytest.mark.parametrize(("fused", "plain", "kwargs"), PAIRS)
@pytest.mark.parametrize("shape", [12, (3, 4)])
def test_computes_what_it_replaces(fused, plain, kwargs, shape, device):
    a, b = pair(fused, plain, kwargs, device, shape)
    inner = (shape,) if isinstance(shape, int) else shape
    x, r = (randn(5, *inner, device=device, seed=i) for i in (7, 8))
    names, params = list(dict(b.named_parameters())), tuple(b.parameters())

    def run(module, residual):
        def fn(x, r, *params):
            with_params = dict(zip(names, params, strict=True))
            if module is a:
                return functional_call(a, with_params, (x, r) if residual else (x,))
            s = x + r if residual else x
            y = functional_call(b, with_params, (s,))
            return (y, s) if residual else y

        return fn

    for residual in (False, True):
        compare(run(a, residual), run(b, residual), (x, r, *params))


@pytest.mark.parametrize(("fused", "plain", "kwargs"), PAIRS)
def test_is_the_layer_it_replaces(fused, plain, kwargs, device):
    a, b = fused(12, device=device, **kwargs), plain(12, device=device, **kwargs)
    assert isinstance(a, plain)
    assert a.extra_repr() == b.extra_repr()
    assert list(a.state_dict()) == list(b.state_dict())
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q) and p.device == q.device
    b.load_state_dict(a.state_dict())
    for clone in (copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        x = randn(3, 12, device=device)
        assert type(clone) is fused and torch.equal(clone(x), a(x))
