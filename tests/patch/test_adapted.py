"""What other libraries do to a model: quantize weights in place, wrap the forward of instances, hold on to one."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


class Rounded(nn.Parameter):
    """A weight that computes its products in its own way, before autocast sees them, as quantized ones do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear:
                x, weight, *bias = args
                return (x.float() @ weight.as_subclass(Tensor).round(decimals=1).t() + sum(bias)).to(x.dtype)
            return func(*args, **(kwargs or {}))


class Tame(nn.Parameter):
    """A weight of another class that takes part in torch's functions as any tensor does, as sharded ones do."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def weights(model: nn.Module, cls: type) -> nn.Module:
    for layer in model:
        if type(layer) is nn.Linear:
            layer.weight = cls(layer.weight.detach(), requires_grad=False)
            assert type(layer.weight) is cls
    return model


@pytest.mark.parametrize("autocast", [False, True])
def test_weights_quantized_after_patching_compute_as_unpatched(autocast):
    original = weights(network(), Rounded)
    patched = weights(fl.patch_model(network(), on_fallback="ignore"), Rounded)
    before = fl.patch_model(copy.deepcopy(original), on_fallback="raise")
    assert not {m for r in fl.explain(before) if r.status != "skipped" for m in r.modules} & {"1", "3", "5"}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        want = original(X)
        for model in (patched, before):
            got = model(X)
            assert got.dtype is want.dtype and torch.equal(got, want)
    assert list(fl.explain(patched).fallbacks[""]) == ["3.weight has become a tensor subclass"]


def test_weights_of_a_class_that_changes_nothing_stay_fused():
    model = weights(fl.patch_model(network(), on_fallback="raise"), Tame)
    assert torch.equal(model(X), weights(network(), Tame)(X))


def test_a_default_device_is_no_subclass():
    """It is a torch function mode, in which every tensor answers that it has one."""
    with torch.device("cpu"):
        assert torch.equal(fl.patch_model(network(), on_fallback="raise")(X), network()(X))


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def wrap(module: nn.Module) -> None:
    """An instance's forward replaced, the old one kept on the module: how accelerate hooks in."""
    module._old_forward = module.forward
    module.forward = types.MethodType(lambda self, *args: self._old_forward(*args) * 2, module)


def unwrap(module: nn.Module) -> None:
    module.forward = module.__dict__.pop("_old_forward")


def test_layers_of_a_container_with_a_forward_of_its_own_have_their_reason():
    model = Wrapped(network())
    wrap(model.inner)
    report = fl.explain(model, rules=["mlp"])
    assert {r.name: r.reason for r in report.skipped} == dict.fromkeys(
        ("inner.0", "inner.2", "inner.4"), "its container has a forward of its own"
    )
    assert report.counts.total == {"activation": 1, "norm": 2, "residual": 0}


def test_layers_of_a_graph_module_have_their_reason():
    report = fl.explain(torch.fx.symbolic_trace(network()), rules=["mlp"])
    assert len(report.skipped) == 3 and all("GraphModule" in r.reason for r in report.skipped)


def test_unpatching_restores_a_forward_that_was_kept_meanwhile():
    plain = network()
    patched = Wrapped(fl.patch_model(network(), on_fallback="raise"))
    wrap(patched.inner)
    torch.testing.assert_close(patched(X), 2 * plain(X))
    fl.unpatch_model(patched)
    assert patched.inner._old_forward.__func__ is nn.Sequential.forward
    torch.testing.assert_close(patched(X), 2 * plain(X))
    unwrap(patched.inner)
    torch.testing.assert_close(patched(X), plain(X))


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x) * 2


def test_an_activation_after_an_adapter_names_it():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.act = Adapter(nn.Linear(8, 8)), nn.GELU()

        def forward(self, x):
            return self.act(self.fc(x))

    (record,) = fl.explain(Block()).skipped
    assert record.name == "act" and f"follows fc ({__name__}.Adapter)" in record.reason
