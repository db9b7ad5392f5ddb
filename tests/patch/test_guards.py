"""What is done to a model after patching acts as it would have on the original; each fallback is counted and shown."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.patch import FallbackError, FallbackWarning

from .models import MLP, Pair, assert_same, network, twin
from .test_builtin_rules import block

X = torch.randn(5, 8)


def pair(**options) -> Pair:
    return fl.patch_model(Pair(nn.Linear(8, 8), nn.LeakyReLU(0.1)), **options)


def fallbacks(model: nn.Module) -> dict[str, int]:
    return dict(fl.explain(model).fallbacks.get("", {}))


def test_hooks_added_later_fire_and_see_what_they_would_have_seen():
    model = pair(on_fallback="ignore")
    original = fl.unpatch_model(twin(model))
    for name in ("fc", "act"):
        seen = {}
        handles = [
            getattr(m, name).register_forward_hook(lambda mod, a, out, key=key, seen=seen: seen.__setitem__(key, out))
            for key, m in (("patched", model), ("original", original))
        ]
        assert torch.equal(model(X), original(X))
        assert torch.equal(seen["patched"], seen["original"])
        for handle in handles:
            handle.remove()
    assert set(fallbacks(model)) == {"fc has a hook", "act has a hook"}
    model(X)
    assert sum(fallbacks(model).values()) == 2


def test_a_hook_that_changes_the_output_counts():
    model = pair(on_fallback="ignore")
    model.fc.register_forward_hook(lambda mod, args, out: out * 2)
    assert torch.equal(model(X), nn.functional.leaky_relu(nn.Linear.forward(model.fc, X) * 2, 0.1))


def test_hooks_on_the_container_itself_cost_nothing():
    model = pair(on_fallback="raise")
    calls = []
    model.register_forward_hook(lambda *a: calls.append(1))
    model(X)
    assert calls == [1] and not fallbacks(model)


def test_global_hooks_fire_for_each_child():
    model, seen = pair(on_fallback="ignore"), []
    handle = nn.modules.module.register_module_forward_hook(lambda mod, a, out: seen.append(type(mod).__name__))
    model(X)
    handle.remove()
    assert seen == ["Linear", "LeakyReLU", "Pair"]
    assert fallbacks(model) == {"a hook on all modules is registered": 1}


def test_replaced_children_are_called():
    model = pair(on_fallback="ignore")
    model.act = nn.Tanh()
    assert torch.equal(model(X), torch.tanh(model.fc(X)))
    model.fc = nn.Identity()
    assert torch.equal(model(X), torch.tanh(X))
    assert fallbacks(model) == {"act has been replaced": 2}


def test_a_replaced_child_of_the_same_kind_is_fused_too():
    model = pair(on_fallback="raise")
    model.fc = nn.Linear(8, 3)
    assert torch.equal(model(X), nn.functional.leaky_relu(model.fc(X), 0.1))


def test_a_setting_of_the_activation_changed_later():
    model = pair(on_fallback="ignore")
    model.act.negative_slope = 0.5
    assert torch.equal(model(X), nn.functional.leaky_relu(model.fc(X), 0.5))
    assert fallbacks(model) == {"act.negative_slope has changed": 1}


def test_a_forward_given_to_a_child_later():
    model = pair(on_fallback="ignore")
    model.fc.forward = lambda x: x + 1
    assert torch.equal(model(X), nn.functional.leaky_relu(X + 1, 0.1))


def test_a_forward_given_to_the_class_later():
    class Local(Pair):
        """A class of this test alone."""

    model = fl.patch_model(Local(nn.Linear(8, 8), nn.ReLU()), on_fallback="ignore")
    Local.forward = lambda self, x: self.fc(x) - 7
    assert torch.equal(model(X), model.fc(X) - 7)


def test_attributes_read_by_the_forward_changed_later():
    class Scaled(Pair):
        scale = 2.0

        def forward(self, x):
            y = self.act(self.fc(x)) * self.scale
            return y if self.extra is None else self.extra(y)

    model = Scaled(nn.Linear(8, 8), nn.ReLU())
    model.extra = None
    fl.patch_model(model, on_fallback="ignore")
    original = fl.unpatch_model(twin(model))
    assert torch.equal(model(X), original(X)) and not fallbacks(model)
    for name, value, back in (("scale", 3.0, 2.0), ("extra", nn.Tanh(), None)):
        for m in (model, original):
            setattr(m, name, value)
        assert torch.equal(model(X), original(X))
        for m in (model, original):
            setattr(m, name, back)
    assert set(fallbacks(model)) == {"scale has changed", "extra has been set"}


ASKED = {
    "in children": lambda self, y: self.more(y) if "more" in self._modules else y,
    "a child": lambda self, y: self._modules.get("more", self.act)(y),
    "in parameters": lambda self, y: y * self.scale if "scale" in self._parameters else y,
    "parameters": lambda self, y: y + sum(self.parameters(recurse=False), 0),
    "buffers": lambda self, y: y + sum(self._buffers.values(), 0),
    "how many": lambda self, y: y + len(self._buffers),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_a_forward_looks_for_added_later(name):
    class Looks(Pair):
        asks = ASKED[name]

        def forward(self, x):
            return self.asks(self.act(self.fc(x)))

    model = Looks(nn.Linear(8, 8), nn.ReLU())
    fl.patch_model(model, on_fallback="ignore")
    original = fl.unpatch_model(twin(model))
    assert torch.equal(model(X), original(X)) and not fallbacks(model)
    scale, more = nn.Parameter(torch.full((8,), 3.0)), nn.Linear(8, 8)
    for m in (model, original):
        m.scale, m.more = scale, more
        m.register_buffer("offset", torch.ones(8))
    assert torch.equal(model(X), original(X))
    assert len(fallbacks(model)) == 1 and "have changed" in next(iter(fallbacks(model)))


SUMMED = {
    "norm(x + r)": lambda self, x, r: self.norm(x + r),
    "norm(drop(x) + r)": lambda self, x, r: self.norm(self.drop(x) + r),
    "act(r + x)": lambda self, x, r: self.act(r + x),
    "act(bn(x) + r)": lambda self, x, r: self.act(self.bn(x) + r),
    "r + drop(x)": lambda self, x, r: r + self.drop(x),
    "act(x) * r": lambda self, x, r: self.act(x) * r,
    "x + r * fc(x)": lambda self, x, r: x + r * self.fc(x),
}


def one_of_each(forward, drop: nn.Module) -> nn.Module:
    """One of each layer, called as `forward` says."""
    layers = {"norm": nn.LayerNorm(8), "bn": nn.BatchNorm1d(8), "fc": nn.Linear(8, 8), "act": nn.GELU()}
    return block(forward, drop=drop, **layers)


@pytest.mark.parametrize("name", SUMMED)
def test_arguments_that_are_no_tensors(name):
    """Seen to fail where a number was added, and to leave out what was None."""
    model = one_of_each(SUMMED[name], nn.Dropout(0.5))
    patched = fl.patch_model(twin(model), on_fallback="ignore")
    for r in (X, 0, 2.5):
        found = []
        for m in (patched, model):
            torch.manual_seed(0)
            found.append(m(X, r))
        torch.testing.assert_close(*found)
    for m in (patched, model):
        with pytest.raises(TypeError, match="unsupported operand type"):
            m(X, None)


TAKEN = {
    "fc(norm(x))": lambda self, x: self.fc(self.norm(x)),
    "act(bn(fc(x)))": lambda self, x: self.act(self.bn(self.fc(x))),
    "act(fc(drop(x)))": lambda self, x: self.act(self.fc(self.drop(x))),
}


@pytest.mark.parametrize("name", TAKEN)
def test_inputs_that_are_no_tensors(name):
    """Raise what eager raises: seen to ask them for their device, or their dims."""
    model = one_of_each(TAKEN[name], nn.Dropout(0.0))
    patched = fl.patch_model(twin(model), on_fallback="ignore")
    assert fl.explain(patched).fused
    for given in (None, 2.5, X.tolist(), X.numpy()):
        with pytest.raises(TypeError) as expected:
            model(given)
        with pytest.raises(TypeError) as raised:
            patched(given)
        assert str(raised.value) == str(expected.value)


def test_an_argument_that_is_a_number_unless_given():
    class Shifted(Pair):
        def forward(self, x, shift=0):
            return self.act(self.fc(x) + shift)

    model = Shifted(nn.Linear(8, 8), nn.GELU())
    patched = fl.patch_model(twin(model), on_fallback="raise")
    assert "shift is a number unless it is given" in [r.reason for r in fl.explain(patched).skipped]
    for args in ((), (2,), (X,)):
        assert torch.equal(patched(X, *args), model(X, *args))


def test_an_optional_child_removed_later():
    class Optional(Pair):
        def forward(self, x):
            y = self.act(self.fc(x))
            return y if self.head is None else self.head(y)

    model = Optional(nn.Linear(8, 8), nn.ReLU())
    model.head = nn.Linear(8, 2)
    fl.patch_model(model, on_fallback="ignore")
    assert model(X).shape == (5, 2)
    model.head = None
    assert model(X).shape == (5, 8)


def test_both_forms_of_call_stay_fused():
    model = fl.patch_model(MLP(), on_fallback="raise")
    original = fl.unpatch_model(twin(model))
    assert_same(model, original, X)
    assert_same(model, original, X, mask=torch.rand(8))
    assert_same(model, original, X, torch.rand(8))


def test_a_call_form_that_was_not_traced_is_counted():
    class Formed(Pair):
        def forward(self, x, width=8):
            if width == 8:
                return self.act(self.fc(x))
            return self.fc(x)

    model = fl.patch_model(Formed(nn.Linear(8, 8), nn.ReLU()), on_fallback="ignore")
    model(X)
    assert not fallbacks(model)
    assert torch.equal(model(X, 7), model.fc(X))
    assert fallbacks(model) == {"this form of call was not traced": 1}


def test_warns_once_a_site():
    model = fl.patch_model(network())
    model[0].register_forward_hook(lambda *a: None)
    with pytest.warns(FallbackWarning, match=r"the model runs unfused: 0 has a hook"):
        model(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X)
    assert fallbacks(model) == {"0 has a hook": 2}


def test_raises_when_asked():
    model = fl.patch_model(network(), on_fallback="raise")
    model[2].fc.register_forward_hook(lambda *a: None)
    with pytest.raises(FallbackError, match=r"2 runs unfused: fc has a hook"):
        model(X)


def test_fallbacks_are_shown_by_explain():
    model = fl.patch_model(network(), on_fallback="ignore")
    model[2].act = nn.Tanh()
    model(X)
    report = fl.explain(model)
    assert report.fallbacks == {"2": {"act has been replaced": 1}}
    assert "calls that took the original path" in str(report) and "act has been replaced" in str(report)
    assert "see the fallbacks below" in str(report).splitlines()[0]


def test_a_mode_without_a_fused_site_is_no_fallback():
    class Trains(Pair):
        def forward(self, x):
            return self.act(self.fc(x)) if self.training else self.fc(x)

    model = fl.patch_model(Trains(nn.Linear(8, 8), nn.ReLU()), on_fallback="raise")
    assert torch.equal(model.eval()(X), model.fc(X))
    assert not fallbacks(model)


def test_a_copy_counts_for_itself():
    model = fl.patch_model(network(), on_fallback="ignore")
    model[2].act = nn.Tanh()
    model(X)
    copy = twin(model)
    copy(X)
    copy(X)
    assert sum(fl.explain(model).fallbacks["2"].values()) == 1
    assert sum(fl.explain(copy).fallbacks["2"].values()) == 2


def test_a_child_whose_class_is_asked_about_and_that_is_patched_itself():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))
            self.fc, self.act = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x) if isinstance(layer, nn.Sequential) else -x
            return self.act(self.fc(x))

    original = Net()
    patched = fl.patch_model(twin(original), on_fallback="raise")
    assert_same(patched, original, torch.randn(3, 4))
    assert torch.compile(patched, backend="eager", fullgraph=True)(torch.ones(3, 4)).shape == (3, 4)
    for model in (original, patched):
        model.layers[1] = nn.ReLU()
    with pytest.raises(FallbackError, match=r"layers\.1 has been replaced"):
        patched(torch.randn(3, 4))
