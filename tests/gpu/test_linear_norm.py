"""Biases whose gradient a norm gives, on a device: sizes that the rules take on themselves."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.ops import _table
from fusedlayers.patch.rules import _left_bias, linear_batch_norm, linear_norm
from tests.harness import assert_accurate
from tests.patch.test_builtin_rules import block


def post_norm(self, x):
    return self.next(self.norm(self.drop(self.fc(x)) + x))


def convolution(**options):
    return nn.Sequential(nn.Conv2d(64, 64, 3, **options), nn.BatchNorm2d(64), nn.ReLU())


def post_norm_mlp(self, x):
    return self.norm(self.drop(self.fc(self.act(self.fc1(x)))) + x)


MODELS = {
    "dropout-mlp": (
        lambda: block(
            post_norm_mlp,
            fc1=nn.Linear(768, 3072),
            act=nn.GELU(),
            fc=nn.Linear(3072, 768),
            drop=nn.Dropout(0.1),
            norm=nn.LayerNorm(768),
        ),
        (4, 512, 768),
    ),
    "dropout": (
        lambda: block(
            post_norm, fc=nn.Linear(768, 768), drop=nn.Dropout(0.1), norm=nn.LayerNorm(768), next=nn.Identity()
        ),
        (4, 512, 768),
    ),
    "dropout-product": (
        lambda: block(
            post_norm, fc=nn.Linear(520, 520), drop=nn.Dropout(0.1), norm=nn.LayerNorm(520), next=nn.Linear(520, 64)
        ),
        (4, 600, 520),
    ),
    "linear": (lambda: nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.GELU()), (4096, 512)),
    "convolution": (convolution, (8, 64, 64, 64)),
}


def gradients(model, x, grad, autocast):
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(3)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        y = model(x)
    y.backward(grad.to(y.dtype))
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters()}}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_as_accurate_as_eager(name, autocast, device, monkeypatch):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    original = make().to(device)
    x = torch.randn(shape, device=device)
    patched = fl.patch_model(copy.deepcopy(original), on_fallback="raise")
    asked = []
    right = _left_bias.may_leave_bias
    for rules in (linear_norm, linear_batch_norm):
        monkeypatch.setattr(rules, "may_leave_bias", lambda *t: asked.append(right(*t)) or asked[-1])
    grad = torch.randn_like(original(x))
    # on a slow host these sizes may be eager's, and the bias's gradient what eager makes of it
    with contextlib.ExitStack() as kernels:
        kernels.enter_context(fl.settings(route="auto" if "dropout" in name else "triton"))
        for op in ("scale_residual", "layer_norm"):
            kernels.enter_context(_table.in_force((op, torch.cuda.current_device()), {}))
        fused = gradients(copy.deepcopy(patched), x, grad, autocast)
    plain = gradients(copy.deepcopy(original), x, grad, autocast)
    assert asked == [True]
    bias = "fc.bias" if "dropout" in name else "0.bias"
    if "dropout" not in name:
        # what is left in eager is rounding: none is nearer to none
        assert not fused.pop(bias).any()
        plain.pop(bias)
    exact = gradients(_exact(original, x), x.double(), grad.double(), False)
    for key, value in plain.items():
        assert fused[key].dtype == value.dtype and fused[key].stride() == value.stride()
        low = torch.bfloat16 if autocast else None
        assert_accurate(fused[key], value, exact[key], key, computed=low)


def _exact(original, x):
    """The model in float64; its dropout gives the mask that `original` draws for x."""
    model = copy.deepcopy(original).double()
    if hasattr(model, "drop"):
        torch.manual_seed(3)
        kept = nn.functional.dropout(torch.ones_like(x), original.drop.p) != 0
        model.drop = _Masked(kept, original.drop.p)
    return model


class _Masked(nn.Module):
    def __init__(self, kept, p):
        super().__init__()
        self.kept, self.p = kept, p

    def forward(self, x):
        return x * self.kept / (1 - self.p)
