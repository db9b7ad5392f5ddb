"""A value that a norm gives back for the additions after it, so that its gradient is not added up by autograd."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

import fusedlayers as fl

from ..harness import assert_accurate
from .test_low_norm import block, linear, rules

ROWS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


def reads(out: torch.Tensor, x: torch.Tensor) -> int:
    """How many nodes of the graph behind `out` hand a gradient to the leaf `x`."""
    seen, todo, count = set(), [out.grad_fn], 0
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if following is not None:
                count += getattr(following, "variable", None) is x
                todo.append(following)
    return count


def pre_norm(norm=nn.LayerNorm) -> nn.Module:
    return block(lambda self, x: x + self.fc(self.norm(x)), norm=norm(8), fc=linear())


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("autocast", [False, True])
def test_one_gradient_comes_back(norm, autocast, device, forced):
    plain = pre_norm(norm).to(device)
    patched = fl.patch_model(copy.deepcopy(plain), on_fallback="raise")
    assert rules(patched) == ["norm_for_product"]
    found = []
    counts = []
    for model in (plain, patched):
        x = ROWS.to(device).requires_grad_()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
            out = model(x)
        counts.append(reads(out, x))
        wanted = [x, *model.parameters()]
        found.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    assert counts[0] > 1 and counts[1] == (1 if forced == "triton" else counts[0])
    if not autocast:
        exact = plain.double()
        x = ROWS.to(device).double().requires_grad_()
        out = exact(x)
        true = [out, *torch.autograd.grad(out.square().sum(), [x, *exact.parameters()])]
        for eager, fused, ref in zip(*found, true, strict=True):
            assert_accurate(fused, eager, ref)


@pytest.mark.usefixtures("forced")
def test_second_derivatives(device):
    plain = pre_norm().double().to(device)
    patched = fl.patch_model(copy.deepcopy(plain), on_fallback="raise")
    x = ROWS.double().to(device).requires_grad_()
    assert torch.autograd.gradcheck(patched, x) and torch.autograd.gradgradcheck(patched, x)


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("frozen", ["input", "parameters", "all"])
def test_partly_frozen(frozen, device):
    plain = pre_norm().to(device)
    for p in plain.parameters():
        p.requires_grad_(frozen == "input")
    patched = fl.patch_model(copy.deepcopy(plain), on_fallback="raise")
    for model in (plain, patched):
        x = ROWS.to(device).requires_grad_(frozen == "parameters")
        out = model(x)
        assert out.requires_grad == (frozen != "all")
        if out.requires_grad:
            out.sum().backward()
            model.found = [x.grad, *(p.grad for p in model.parameters())]
    if frozen != "all":
        for a, b in zip(plain.found, patched.found, strict=True):
            torch.testing.assert_close(a, b)


def source(patched: nn.Module) -> str:
    return inspect.getsource(type(patched).forward)


def test_a_block_passes_it():
    assert "low_norm_passing" in source(fl.patch_model(pre_norm()))


def overwriting(self, x):
    h = x * 1.0
    out = h + self.fc(self.norm(h))
    h.mul_(2.0)
    return out


NOT_PASSED = {
    "it is returned": lambda self, x: (self.fc(self.norm(x)), x),
    "a product reads it": lambda self, x: self.fc(self.norm(x)) + self.gate(x),
    "the addition comes before": lambda self, x: self.fc(self.norm(x + 1.0)),
    "it is overwritten later": overwriting,
}


@pytest.mark.parametrize("forward", NOT_PASSED.values(), ids=NOT_PASSED)
def test_only_additions_are_given_it(forward):
    patched = fl.patch_model(block(forward, norm=nn.LayerNorm(8), fc=linear(), gate=linear()))
    assert "norm_for_product" in rules(patched)
    assert "low_norm" in source(patched) and "low_norm_passing" not in source(patched)


def test_an_input_that_is_edited_after_the_addition():
    """The value is the caller's own: a later edit is seen by autograd as it is in eager."""

    def forward(self, x):
        h = x * 1.0
        out = h + self.fc(self.norm(h))
        h.mul_(2.0)
        return out + h

    plain = block(forward, norm=nn.LayerNorm(8), fc=linear())
    patched = fl.patch_model(copy.deepcopy(plain))
    for model in (plain, patched):
        x = ROWS.clone().requires_grad_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # the norm kept it
            model(x).sum().backward()
