"""The contract of `patch_model` and `unpatch_model`: same numbers, same objects, same names, and a way back."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import fusedlayers as fl
from fusedlayers.ops import _route
from fusedlayers.patch.guards import STATE, is_patched

from .models import MLP, Pair, assert_same, network, twin

X = torch.randn(5, 8)


def fused(model: nn.Module) -> list[tuple[str, ...]]:
    return [r.modules for r in fl.explain(model).fused]


def reason(model: nn.Module) -> str:
    skipped = fl.explain(model).skipped
    assert skipped, "nothing was skipped"
    return skipped[0].reason


def patched_twin(model: nn.Module, **options) -> tuple[nn.Module, nn.Module]:
    return fl.patch_model(twin(model), on_fallback="raise", **options), model


def test_sequential_neighbours_and_data_flow_in_every_form_are_fused():
    model, original = patched_twin(network())
    assert fused(model) == [("0", "1"), ("2.fc", "2.act"), ("2.fc2",), ("2.fc3",), ("3.0", "3.1")]
    for mode in (True, False):
        assert_same(model.train(mode), original.train(mode), X)
    assert_same(model[2], original[2], X, mask=torch.rand(8))


def test_in_place_and_same_object():
    model = network()
    assert fl.patch_model(model) is model
    assert fl.unpatch_model(model) is model


def test_parameters_keys_order_and_hooks_stay():
    model = network()
    model[2].register_forward_hook(lambda *a: None)
    parameters, keys, hooks = list(model.named_parameters()), list(model.state_dict()), dict(model[2]._forward_hooks)
    fl.patch_model(model)
    assert all(a is b and m == n for (m, a), (n, b) in zip(model.named_parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    assert model[2]._forward_hooks == hooks


def test_classes_length_indices_and_repr_stay():
    model = network()
    shown = repr(model)
    fl.patch_model(model)
    assert isinstance(model, nn.Sequential) and isinstance(model[2], MLP)
    assert len(model) == 4 and type(model[0]) is nn.Linear and type(model[2].act) is nn.GELU
    assert repr(model) == shown
    assert type(model[2]).__name__ == "MLP" and type(model[2]).__module__ == MLP.__module__


def test_unpatching_restores_class_dict_and_trained_values():
    model = network()
    before = {name: set(vars(m)) for name, m in model.named_modules()}
    fl.patch_model(model)
    model[0].weight.data.fill_(0.5)
    fl.unpatch_model(model)
    assert type(model) is nn.Sequential and type(model[2]) is MLP
    assert {name: set(vars(m)) for name, m in model.named_modules()} == before
    assert (model[0].weight == 0.5).all()
    assert fl.unpatch_model(model) is model


def test_patching_twice_changes_nothing_more():
    model = fl.patch_model(network())
    classes = [type(m) for m in model.modules()]
    fl.patch_model(model)
    assert [type(m) for m in model.modules()] == classes
    fl.unpatch_model(model)
    assert type(model) is nn.Sequential


def test_two_models_one_patched_the_other_and_torch_untouched():
    before = dict(vars(nn.Linear)), dict(vars(nn.Sequential)), dict(vars(F)), dict(vars(nn.Module))
    one, other = network(), network()
    fl.patch_model(one)
    assert not any(is_patched(m) for m in other.modules())
    assert (dict(vars(nn.Linear)), dict(vars(nn.Sequential)), dict(vars(F)), dict(vars(nn.Module))) == before
    assert MLP().forward.__func__ is MLP.forward


def test_a_bare_root_stays_as_it_is():
    layer = nn.Linear(4, 4)
    assert type(fl.patch_model(layer)) is nn.Linear
    assert not is_patched(fl.patch_model(nn.LayerNorm(4)))


def test_a_child_or_slice_of_a_patched_container_computes_what_it_did():
    model, original = patched_twin(network())
    assert torch.equal(model[0](X), original[0](X))
    assert torch.equal(model[2].fc(X), original[2].fc(X))
    for part in (slice(0, 1), slice(0, 2), slice(1, 3), slice(None, None, 2)):
        torch.testing.assert_close(model[part](X), original[part](X))


def test_sequential_edited_after_patching_acts_as_the_original():
    for edit in (
        lambda s: s.append(nn.Linear(8, 8)),
        lambda s: s.insert(1, nn.Tanh()),
        lambda s: s.__delitem__(1),
        lambda s: s.__setitem__(1, nn.Tanh()),
        lambda s: s.__setitem__(0, nn.Identity()),
        lambda s: s.pop(3),
    ):
        torch.manual_seed(0)
        model, original = network(), network()
        original.load_state_dict(model.state_dict())
        fl.patch_model(model, on_fallback="ignore")
        torch.manual_seed(1)
        edit(model)
        torch.manual_seed(1)
        edit(original)
        torch.testing.assert_close(model(X), original(X))


def test_subclasses_of_sequential_are_patched_and_keep_their_own_forward():
    class Twice(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * 2

    class Plain(nn.Sequential):
        """A subclass that changes nothing."""

    for cls in (Twice, Plain):
        model, original = patched_twin(cls(nn.Linear(8, 8), nn.ReLU()))
        assert fused(model) == [("0", "1")]
        assert_same(model, original, X)


def test_one_activation_shared_by_several_layers_is_fused_at_each():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU()

        def forward(self, x):
            return self.b(self.act(self.a(x))) + self.act(self.b(x))

    model, original = patched_twin(Shared(), rules=["linear_act"])
    assert fused(model) == [("a", "act"), ("b", "act")]
    assert_same(model, original, X)


def test_a_layer_used_with_and_without_its_follower():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.act = nn.Linear(8, 8), nn.ReLU()

        def forward(self, x):
            return self.act(self.fc(x)) + self.fc(x)

    model, original = patched_twin(Both())
    assert fused(model) == [("fc", "act")]
    assert_same(model, original, X)


def test_an_output_with_a_second_reader_is_left_alone():
    class Second(Pair):
        def forward(self, x):
            y = self.fc(x)
            return self.act(y) + y

    model = Second(nn.Linear(8, 8), nn.ReLU())
    assert reason(model) == "fc is also read elsewhere"
    assert_same(fl.patch_model(twin(model)), model, X)


def test_an_in_place_activation_whose_input_is_read_again_is_left_alone():
    class Again(Pair):
        def forward(self, x):
            y = self.fc(x)
            return self.act(y) * y

    model = Again(nn.Linear(8, 8), nn.ReLU(inplace=True))
    assert reason(model) == "act overwrites a value that others may read"
    assert torch.equal(fl.patch_model(twin(model))(X), model(X))


def test_an_operand_overwritten_between_layer_and_activation_is_left_alone():
    class Between(Pair):
        def forward(self, x):
            x = x * 1.0
            y = self.fc(x)
            x += 1
            return self.act(y) + x

    model = Between(nn.Linear(8, 8), nn.ReLU())
    assert "may overwrite a value in between" in reason(model)
    assert torch.equal(fl.patch_model(twin(model))(X), model(X))


class ByAnotherName(Pair):
    """The result of a function in place is what it was given."""

    def forward(self, x):
        x = x * 1.0
        same = F.silu(x, inplace=True)
        y = self.fc(x)
        same += 1
        return self.act(y)


class OfTheLayer(Pair):
    def forward(self, x):
        y = self.fc(x)
        self.fc.bias.detach().mul_(2)
        return self.act(y)


class OfTheModule(Pair):
    def forward(self, x):
        y = self.scale * self.fc(x)
        self.scale.mul_(0.5)
        return x + y


@pytest.mark.parametrize("kind", [ByAnotherName, OfTheLayer, OfTheModule])
def test_what_is_overwritten_in_between_by_another_name(kind):
    model = kind(nn.Linear(8, 8), nn.ReLU())
    model.register_buffer("scale", torch.ones(8))
    patched = fl.patch_model(twin(model), on_fallback="raise")
    with torch.no_grad():
        assert torch.equal(patched(X), model(X))


@pytest.mark.parametrize(
    "fc",
    [
        type("LoRALinear", (nn.Linear,), {})(8, 8),
        nn.LazyLinear(8),
        nn.modules.linear.NonDynamicallyQuantizableLinear(8, 8),
    ],
    ids=["lora", "lazy", "attention's out_proj"],
)
def test_exact_type_only(fc):
    model = Pair(fc, nn.ReLU())
    assert "not exactly a Linear" in reason(model)
    assert not is_patched(fl.patch_model(model))


def test_weights_that_are_not_plain_parameters_are_left_alone():
    class Quantized(nn.Parameter):
        """Another kind of parameter."""

    fc = nn.Linear(8, 8)
    fc.weight = Quantized(fc.weight.detach())
    assert reason(Pair(fc, nn.ReLU())) == "fc.weight is a Quantized"


def test_hooks_on_either_half():
    for half in ("fc", "act"):
        for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
            model = Pair(nn.Linear(8, 8), nn.ReLU())
            getattr(getattr(model, half), register)(lambda *a: None)
            assert reason(model) == f"{half} has a hook"
            assert not is_patched(fl.patch_model(model))


@pytest.mark.parametrize(
    "wrap",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
        nn.utils.spectral_norm,
        lambda m: prune.l1_unstructured(m, "weight", 0.5),
    ],
    ids=["weight_norm", "spectral_norm", "orthogonal", "old spectral_norm", "pruning"],
)
def test_reparametrized_before_and_after_patching(wrap):
    torch.manual_seed(0)
    before = Pair(wrap(nn.Linear(8, 8)), nn.ReLU())
    assert not is_patched(fl.patch_model(before))
    after = fl.patch_model(Pair(nn.Linear(8, 8), nn.ReLU()), on_fallback="ignore").eval()
    original = fl.unpatch_model(twin(after))
    torch.manual_seed(1)
    wrap(after.fc)
    torch.manual_seed(1)
    wrap(original.fc)
    assert_same(after, original, X)


def test_a_forward_of_an_instances_own_is_left_alone():
    model = network()
    model[2].forward = lambda x: x
    fl.patch_model(model)
    assert is_patched(model) and not is_patched(model[2])
    half = Pair(nn.Linear(8, 8), nn.ReLU())
    half.fc.forward = lambda x: x
    assert reason(half) == "fc has a forward of its own"


def test_activations_that_cannot_be_represented_are_left_alone():
    for act in (nn.PReLU(), nn.RReLU(), nn.Softmax(-1), type("ReLU", (nn.ReLU,), {})()):
        model = Pair(nn.Linear(8, 8), act)
        assert not is_patched(fl.patch_model(model))


def test_gelu_none_and_tanh_never_stand_in_for_each_other():
    for approximate in ("none", "tanh"):
        model, original = patched_twin(Pair(nn.Linear(8, 8), nn.GELU(approximate)))
        assert torch.equal(model(X), original(X))


def test_frozen_halves_and_mixed_modes():
    model, original = patched_twin(network())
    for m in (model, original):
        m[0].requires_grad_(False)
        m[2].fc.bias.requires_grad_(False)
        m[2].eval()
    assert_same(model, original, X)


def test_tied_and_aliased_weights():
    class Tied(MLP):
        def __init__(self):
            super().__init__()
            self.fc3.weight = self.fc2.weight
            self.fc4 = self.fc

    model, original = patched_twin(Tied())
    assert model.fc3.weight is model.fc2.weight
    assert_same(model, original, X)


def test_scripted_and_graph_modules_are_left_alone():
    inner = Pair(nn.Linear(8, 8), nn.ReLU())
    model = nn.Sequential(torch.jit.script(inner), torch.fx.symbolic_trace(inner), nn.Linear(8, 8), nn.ReLU())
    fl.patch_model(model)
    assert fused(model) == [("2", "3")]
    assert not any(is_patched(m) for m in (*model[0].modules(), model[1]))


def test_attention_and_encoder_layers_keep_their_fast_path():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation=nn.GELU())
    model = nn.TransformerEncoder(layer, 2)
    x = torch.randn(2, 3, 8)
    patched, original = patched_twin(model)
    for mode in (True, False):
        torch.manual_seed(0)
        got = patched.train(mode)(x)
        torch.manual_seed(0)
        torch.testing.assert_close(got, original.train(mode)(x))


def test_signature_defaults_and_keyword_only_arguments_stay():
    import inspect

    class Signed(Pair):
        def forward(self, x, /, scale=2.0, *rest, shift=1.0, **kwargs):
            return self.act(self.fc(x)) * scale + shift

    model, original = patched_twin(Signed(nn.Linear(8, 8), nn.ReLU()))
    assert inspect.signature(model.forward) == inspect.signature(original.forward)
    for call in (lambda m: m(X), lambda m: m(X, 3.0), lambda m: m(X, shift=0.5), lambda m: m(X, scale=3.0)):
        assert torch.equal(call(model), call(original))


def test_wrong_calls_raise_what_the_original_raises():
    model, original = patched_twin(network())
    for args in ((), (X, X, X), (torch.randn(5, 7),)):
        with pytest.raises(Exception) as want:
            original(*args)
        with pytest.raises(want.type):
            model(*args)


def test_errors_of_the_call_itself():
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got int"):
        fl.patch_model(3)
    with pytest.raises(ValueError, match="on_fallback must be one of"):
        fl.patch_model(network(), on_fallback="explode")


def test_an_optimizer_built_before_patching_trains_the_same():
    model, original = network(), None
    original = twin(model)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, original)]
    fl.patch_model(model, on_fallback="raise")
    for _ in range(3):
        for m, optimizer in zip((model, original), optimizers, strict=True):
            optimizer.zero_grad()
            m(X).square().sum().backward()
            optimizer.step()
    assert_same(model, original, X)


def test_patching_one_model_while_another_runs_in_a_thread():
    running, stop, wrong = network().eval(), threading.Event(), []
    want = running(X)

    def work():
        while not stop.is_set():
            if not torch.equal(running(X), want):
                wrong.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(10):
            fl.patch_model(network())
    finally:
        stop.set()
        thread.join()
    assert not wrong


def test_a_class_that_refuses_subclasses_is_a_reason_not_a_crash():
    class Final(Pair):
        def __init_subclass__(cls, **kwargs):
            raise TypeError("no subclasses, please")

    model = Final(nn.Linear(8, 8), nn.ReLU())
    fl.patch_model(model)
    assert not is_patched(model)


def test_class_hooks_of_bases_see_the_patched_class_only():
    made = []

    class Registry(Pair):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            made.append(cls)

    model = fl.patch_model(Registry(nn.Linear(8, 8), nn.ReLU()))
    assert made == [type(model)]


def test_a_decorated_forward_keeps_its_decorator():
    class Quiet(Pair):
        @torch.no_grad()
        def forward(self, x):
            return self.act(self.fc(x))

    model, original = patched_twin(Quiet(nn.Linear(8, 8), nn.ReLU()))
    assert fused(model) == [("fc", "act")]
    assert torch.equal(model(X), original(X)) and not model(X).requires_grad


def test_checkpointing_in_a_class_hook_stays_on():
    """transformers' GradientCheckpointingLayer wraps the forward of each subclass in __init_subclass__."""
    import functools

    ran = []

    class Checkpointed(nn.Module):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            inner = cls.forward

            @functools.wraps(inner)
            def forward(self, *args):
                if type(self).forward is forward:
                    ran.append(inner)
                return inner(self, *args)

            cls.forward = forward

    class Layer(Checkpointed):
        def __init__(self):
            super().__init__()
            self.fc, self.act = nn.Linear(8, 8), nn.ReLU()

        def forward(self, x):
            return self.act(self.fc(x))

    model, original = patched_twin(Layer())
    assert fused(model) == [("fc", "act")]
    assert torch.equal(model(X), original(X))
    assert len(ran) == 2 and ran[0] is not ran[1]


@pytest.mark.parametrize("name", ["type", "isinstance", "getattr", "hasattr", "tuple", "slice", "_m"])
def test_arguments_named_as_what_the_generated_code_calls(name):
    """Seen to call the argument."""
    scope = {}
    exec(f"def forward(this, x, {name}=None): return this.act(this.fc(x))", scope)
    original = type("Named", (Pair,), {"forward": scope["forward"]})(nn.Linear(8, 8), nn.GELU())
    model = fl.patch_model(twin(original))
    assert reason(model) == f"an argument is named {name}"
    assert torch.equal(model(X), original(X)) and torch.equal(model(X, **{name: 3}), original(X))


def test_an_argument_named_self_of_a_forward_that_calls_its_module_otherwise():
    class Named(Pair):
        def forward(this, x, self=None):
            return this.act(this.fc(x))

    original = Named(nn.Linear(8, 8), nn.GELU())
    model = fl.patch_model(twin(original))
    assert torch.equal(model(X), original(X)) and torch.equal(model(X, X), original(X))


def test_modules_that_nothing_may_be_compared_with():
    """Torch itself never asks whether two modules are equal: seen to fail at patching."""

    class Alone(Pair):
        __hash__ = nn.Module.__hash__

        def __eq__(self, other):
            raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")

    model, original = patched_twin(nn.Sequential(Alone(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 8)))
    assert fused(model) and torch.equal(model(X), original(X))


@pytest.mark.parametrize("name", ["fc-act", "class", "a b", "0", "it's"])
def test_parameters_and_children_of_any_name(name):
    """Seen to write `self.fc-act` and `self.class` into the forward."""

    class Named(Pair):
        def forward(self, x):
            y = self.act(self.fc(x)) * getattr(self, name) + self.all["of them"](x) + self.some[0]
            return self.keep(y, **{name: y})

    class Keep(nn.Module):
        def forward(self, x, **more):
            return x + more[name]

    model = Named(nn.Linear(8, 8), nn.GELU())
    model.register_parameter(name, nn.Parameter(torch.randn(8)))
    model.some, model.keep = nn.ParameterList([torch.randn(8)]), Keep()
    model.all = nn.ModuleDict({"of them": nn.Linear(8, 8)})
    patched, original = patched_twin(model)
    assert ("fc", "act") in fused(patched)
    assert_same(patched, original, X)


def test_a_model_that_is_patched_already_takes_the_routes_of_a_plan(monkeypatch):
    pick, held = _route.pick, []
    monkeypatch.setattr(_route, "pick", lambda *a, **k: held.append(_route.held.routes) or pick(*a, **k))
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    plain = twin(model)
    other = twin(model)
    fl.patch_model(other)
    fl.patch_model(model, on_fallback="raise")
    model.kept = model.forward  # as a library does that wraps it
    unrouted = type(model)
    for routes in ({"linear_act": "library"}, {"linear_act": "reference"}, {}):
        plan = {"version": 1, "sites": {"0": ["linear_act"]}, "routes": {"": routes} if routes else {}}
        assert fl.patch_model(model, plan=plan) is model
        site = model.__dict__[STATE]
        assert site.routes == routes and site.on_fallback == "raise"
        for call in (model, model.kept, twin(model)):
            held.clear()
            torch.testing.assert_close(call(X), plain(X))
            assert held == [routes or None]
        held.clear()
        other(X)
        assert held == [None], "another model of the same class is left as it was"
    assert type(model) is unrouted
    fl.unpatch_model(model)
    assert type(model) is nn.Sequential and model.kept.__func__ is nn.Sequential.forward
