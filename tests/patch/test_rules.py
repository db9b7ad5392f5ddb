"""Rules of a user's own: a pattern, a whole class, several outputs, a reduced site; and what a wrong one does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.patch import rule as registry
from fusedlayers.patch.pattern import act, add, call, constant, either, item, leaf, maybe, mul, parameter, value

from .models import Pair, assert_same, twin

X = torch.randn(5, 8)


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))


class Scale(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width))

    def forward(self, x):
        return x * self.weight + self.bias


def scale_act(scale, activation, x):
    return fl.functional.affine_act(x, scale.weight, scale.bias, activation)


def fused(model, **options):
    return [(r.rule, r.modules) for r in fl.explain(model, **options).fused]


def test_a_user_rule_in_a_few_lines():
    @fl.register_rule
    class ScaleAct(fl.Rule):
        pattern = act("act")(leaf("scale", Scale)(value("x")))

        def fuse(self, m):
            return m.call(scale_act, m.scale, m.act, m.x)

    assert "scale_act" in fl.rules()
    model = Pair(Scale(), nn.SiLU())
    patched = fl.patch_model(twin(model), on_fallback="raise")
    assert fused(patched) == [("scale_act", ("fc", "act"))]
    assert_same(patched, model, X)


def test_a_rule_for_a_whole_class_with_settings_it_decided_on():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.act, self.gain = Scale(), nn.ReLU(), 1.0

        def forward(self, x, gate=None):
            for _ in range(int(x.ndim > 0)):  # hides the pattern from a trace
                x = self.act(self.scale(x))
            return x * self.gain if gate is None else x * gate

    @fl.register_rule
    class WholeBlock(fl.Rule):
        target = Block

        def check(self, m):
            return None if m.module.gain == 1.0 else "its gain is not 1"

        def fuse(self, m):
            m.own("gain")
            return m.call(scale_act, m.child("scale"), "relu", m.inputs["x"])

    model = Block()
    patched = fl.patch_model(twin(model), on_fallback="ignore")
    assert fused(patched) == [("whole_block", ("", "scale"))]
    assert_same(patched, model, X)
    gate = torch.rand(8)
    assert torch.equal(patched(X, gate), model(X, gate))
    patched.gain = 2.0
    assert torch.equal(patched(X), model(X) * 2)
    assert set(fl.explain(patched).fallbacks[""]) == {"this form of call was not traced", "gain has changed"}
    model.gain = 2.0
    assert [r.reason for r in fl.explain(model).skipped if r.rule == "whole_block"] == ["its gain is not 1"]


def test_a_rule_for_a_bare_layer_swaps_the_layer_alone_but_never_a_root():
    @fl.register_rule
    class AloneScale(fl.Rule):
        target = Scale

        def fuse(self, m):
            return m.call(scale_act, m.own(), "identity", m.inputs["x"])

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = Scale()

        def forward(self, x):
            return self.scale(x).sum(-1)

    model = Outer()
    patched = fl.patch_model(twin(model), on_fallback="raise")
    assert fused(patched) == [("alone_scale", ("scale",))]
    assert_same(patched, model, X)
    assert type(fl.patch_model(Scale())) is Scale
    assert type(fl.unpatch_model(patched).scale) is Scale


def test_several_outputs():
    def add_scale(scale, x, residual):
        total = x + residual
        return scale(total), total

    @fl.register_rule
    class AddScale(fl.Rule):
        pattern = leaf("scale", Scale)(add("sum")(value("x"), value("residual")))
        outputs = ("scale", "sum")

        def fuse(self, m):
            return m.call(add_scale, m.scale, m.x, m.residual)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.scale, self.out = nn.Linear(8, 8), Scale(), nn.Linear(8, 8)

        def forward(self, x):
            total = self.fc(x) + x
            doubled = total * 2
            return total + self.out(self.scale(total)) + doubled

    model = Block()
    patched = fl.patch_model(twin(model), on_fallback="raise")
    assert fused(patched) == [("add_scale", ("scale",))]
    assert_same(patched, model, X)


def test_the_largest_safe_part_is_reported_as_reduced():
    def gated(activation, gate, up):
        return activation(gate) * up

    @fl.register_rule
    class Gated(fl.Rule):
        pattern = mul()(act("act")(value("gate")), value("up"))

        def fuse(self, m):
            return m.call(gated, m.act, m.gate, m.up)

    @fl.register_rule
    class GatedMLP(fl.Rule):
        name, priority = "gated_mlp_test", 5
        pattern = mul()(
            act("act")(leaf("gate", nn.Linear, stand_in=True)(value("x"))),
            leaf("up", nn.Linear, stand_in=True)(value("x")),
        )

        def fuse(self, m):
            return m.call(lambda gate, up, activation, x: activation(gate(x)) * up(x), m.gate, m.up, m.act, m.x)

    class MLP(nn.Module):
        def __init__(self, up):
            super().__init__()
            self.gate, self.up, self.act = nn.Linear(8, 8), up, nn.SiLU()

        def forward(self, x):
            return self.act(self.gate(x)) * self.up(x)

    whole, adapter = MLP(nn.Linear(8, 8)), MLP(nn.Sequential(nn.Linear(8, 8)))
    rules = [Gated, GatedMLP]
    assert [rule for rule, _ in fused(whole, rules=rules)] == ["gated_mlp_test"]
    report = fl.explain(adapter, rules=rules)
    assert not report.fused and [r.rule for r in report.reduced] == ["gated"]
    assert "not gated_mlp_test: up is a torch.nn.modules.container.Sequential" in report.reduced[0].reason
    for model in (whole, adapter):
        assert_same(fl.patch_model(twin(model), rules=rules, on_fallback="raise"), model, X)


def test_optional_alternative_and_functional_elements():
    def run(fc, x, gamma, p, activation):
        return activation(fc(x).chunk(2, -1)[0]) * gamma

    @fl.register_rule
    class Everything(fl.Rule):
        pattern = mul()(
            parameter("gamma"),
            maybe(leaf("drop", nn.Dropout))(
                act("act")(
                    item(0)(
                        call("halves", torch.chunk, "chunk")(
                            leaf("fc", nn.Linear)(value("x")), constant("n"), constant("dim")
                        )
                    )
                )
            ),
        )

        def check(self, m):
            return None if m.drop is None or m.n == 2 else "dropout"

        def fuse(self, m):
            return m.call(run, m.fc, m.x, m.gamma, m.n, m.act)

    class Block(nn.Module):
        def __init__(self, drop):
            super().__init__()
            self.fc, self.act, self.gamma = nn.Linear(8, 8), nn.ReLU(), nn.Parameter(torch.rand(4))
            if drop:
                self.drop = nn.Dropout(0.0)

        def forward(self, x):
            x = self.act(self.fc(x).chunk(2, -1)[0])
            return self.gamma * (self.drop(x) if hasattr(self, "drop") else x)

    for drop, members in ((False, {"fc", "act"}), (True, {"fc", "act", "drop"})):
        model = Block(drop)
        patched = fl.patch_model(twin(model), rules=[Everything], on_fallback="raise")
        assert set(fl.explain(patched).fused[0].modules) == members
        assert_same(patched, model, X)
    assert isinstance(either(value("x"), constant("c")), type(either()))


def test_larger_patterns_come_first_whatever_the_order_of_registration():
    names = list(fl.rules())
    priorities = [fl.rules()[n].priority for n in names]
    assert priorities == sorted(priorities, reverse=True)


def test_wrong_rules():
    with pytest.raises(TypeError, match="takes a Rule"):
        fl.register_rule(3)

    class Neither(fl.Rule):
        """No pattern, no target."""

    with pytest.raises(TypeError, match="needs either a pattern or a target"):
        fl.register_rule(Neither)

    class LinearAct(fl.Rule):
        pattern = act()(value("x"))

    with pytest.raises(ValueError, match="'linear_act' is already registered"):
        fl.register_rule(LinearAct)


def test_a_rule_that_fails_is_a_reason_not_a_crash():
    class Breaks(fl.Rule):
        pattern = act("act")(value("x"))

        def fuse(self, m):
            return m.call(None, m.nothing)

    model = fl.patch_model(Pair(nn.Linear(8, 8), nn.ReLU()), rules=[Breaks()])
    report = fl.explain(model, rules=[Breaks()])
    assert (
        "rule breaks failed (AttributeError: this rule's pattern has no element 'nothing')" in report.skipped[0].reason
    )


def test_a_value_that_a_rule_would_take_in_and_read_as_well_is_left_alone():
    class Squares(Pair):
        def forward(self, x):
            y = self.act(self.fc(x))
            return y * y

    model = Squares(nn.Linear(8, 8), nn.ReLU())
    patched = fl.patch_model(twin(model), rules=["gated_act"], on_fallback="raise")
    reasons = [r.reason for r in fl.explain(model, rules=["gated_act"]).skipped]
    assert "it reads a value that it would take in" in reasons
    assert_same(patched, model, X)
