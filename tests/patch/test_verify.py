"""`verify`: passes what is right, fails what is wrong with the module to blame, and leaves everything as it was."""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.patch import VerificationError
from fusedlayers.patch import rule as registry
from fusedlayers.patch.pattern import act, leaf, value
from fusedlayers.patch.verify import _shaken

from .models import MLP, network

X = torch.randn(5, 8)


@pytest.fixture
def _own_rules(monkeypatch):
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))


def wrong_rule(op):
    class Wrong(fl.Rule):
        pattern = act("act")(leaf("fc", nn.Linear)(value("x")))

        def fuse(self, m):
            return m.call(op, m.fc, m.act, m.x)

    return Wrong()


def test_right_in_both_modes_with_dropout_and_running_statistics():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), MLP(), nn.LayerNorm(8))
    fl.patch_model(model, on_fallback="raise")
    for mode in (True, False):
        report = fl.verify(model.train(mode), X)
        assert report, str(report)
        assert report.reference == "float64" and report.modules == 3 and not report.fallbacks
        assert {c.kind for c in report.comparisons} == {"output", "input gradient", "parameter gradient", "buffer"}
    assert "ok; 3 patched modules" in str(report)


@pytest.mark.usefixtures("_own_rules")
@pytest.mark.parametrize(
    "op",
    [
        lambda fc, activation, x: activation(fc(x)) * 1.001,
        lambda fc, activation, x: activation(fc(x) + (fc.weight.sum() - fc.weight.sum().detach())),
        lambda fc, activation, x: activation(fc(x)).double(),
        lambda fc, activation, x: activation(nn.functional.linear(x, fc.weight.detach(), fc.bias)),
        lambda fc, activation, x: activation(fc(x)) + torch.rand(1) * 1e-3,
    ],
    ids=["value", "gradient", "dtype", "missing gradient", "randomness"],
)
def test_wrong_and_whose_fault_it_is(op):
    model = nn.Sequential(MLP(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8))
    wrong = fl.patch_model(model[1], rules=[wrong_rule(op)])
    assert wrong is model[1]
    fl.patch_model(model, rules=["linear_act"])
    report = fl.verify(model, X)
    assert not report and not report.ok
    assert report.worst == "1"
    with pytest.raises(VerificationError, match="FAILED"):
        report.raise_if_failed()


@pytest.mark.usefixtures("_own_rules")
def test_two_modules_that_fail_only_together():
    """To blame is the one whose patching makes the difference."""
    ran = []

    def first(fc, activation, x):
        ran.append(1)
        return activation(fc(x))

    def second(fc, activation, x):
        return activation(fc(x)) + 0.1 * len(ran)

    model = nn.Sequential(nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    fl.patch_model(model[1], rules=[wrong_rule(first)])
    fl.patch_model(model[3], rules=[wrong_rule(second)])
    fl.patch_model(model, rules=["linear_act"])

    class Clears(nn.Module):
        def forward(self, x):
            ran.clear()
            return x

    report = fl.verify(nn.Sequential(Clears(), model), X)
    assert not report and report.worst == "1.3", str(report)


def test_a_model_that_refuses_inputs_that_require_a_gradient():
    """As transformers' speech models, which make their input require one: compared with the caller's own."""

    class Speech(nn.Sequential):
        def forward(self, x):
            x = x[:]
            x.requires_grad = True
            return super().forward(x)

    model = fl.patch_model(Speech(MLP()))
    model(X.clone()).sum().backward()
    report = fl.verify(model, X)
    assert report and "you can only change requires_grad flags of leaf variables" in report.note
    assert {c.kind for c in report.comparisons} == {"output", "parameter gradient"}
    assert f"note: {report.note}" in str(report) and not X.requires_grad
    assert not fl.verify(model, X, backward=False).note


@pytest.mark.usefixtures("_own_rules")
def test_a_patched_model_that_raises():
    def raises(fc, activation, x):
        raise RuntimeError("boom")

    model = fl.patch_model(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), rules=[wrong_rule(raises)])
    assert "only the patched model raises RuntimeError: boom" in str(fl.verify(model, X))


def test_errors_of_the_original_are_the_callers():
    model = fl.patch_model(network())
    with pytest.raises(RuntimeError):
        fl.verify(model, torch.randn(5, 7))


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
    fl.patch_model(model)
    model(X).sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    objects = [p.grad for p in model.parameters()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    rng, python = torch.get_rng_state(), random.getstate()
    classes = [type(m) for m in model.modules()]
    x = X.clone().requires_grad_()
    assert fl.verify(model, x)
    assert x.grad is None
    assert all(p.grad is g and torch.equal(g, b) for p, g, b in zip(model.parameters(), objects, grads, strict=True))
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(b is buffers[n] for n, b in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), rng) and random.getstate() == python
    assert [type(m) for m in model.modules()] == classes
    assert not fl.explain(model).fallbacks


def test_nothing_patched():
    report = fl.verify(network(), X)
    assert report and "nothing to compare" in str(report)


def test_sites_that_ran_unfused_are_said():
    model = fl.patch_model(network(), on_fallback="ignore")
    model[2].act = nn.Tanh()
    report = fl.verify(model, X)
    assert report.ok and report.fallbacks == {"2": {"act has been replaced": 1}}
    assert "ran unfused" in str(report)
    assert not fl.explain(model).fallbacks, "verify's own runs are not the user's"


def test_forward_only_rtol_and_keyword_inputs():
    model = fl.patch_model(MLP())
    report = fl.verify(model, X, mask=torch.rand(8), backward=False)
    assert report and {c.kind for c in report.comparisons} == {"output"}
    assert fl.verify(model, X, rtol=1e-3).reference == "the original"
    assert not fl.verify(model, X, rtol=0.0) or all(c.error == 0 for c in fl.verify(model, X, rtol=0.0).comparisons)


def test_under_autocast_and_in_half_precision():
    model = fl.patch_model(network())
    with torch.autocast("cpu", torch.bfloat16):
        assert fl.verify(model, X)
    assert fl.verify(model.bfloat16(), X.bfloat16())


def test_reentrant_checkpointing():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)

    assert fl.verify(fl.patch_model(Checkpointed()), X)


class Scaled(nn.Module):
    """Linear layers with dropout between, as many models end."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3))
        self.b = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.3))
        self.c = nn.Linear(32, 4)

    def forward(self, x):
        noise = x.new_empty(x.shape[0], 1).bernoulli_(0.8)
        return self.c(self.b(self.a(x + 0.1 * torch.randn_like(x))) * noise)


WIDE = torch.randn(64, 8)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16 autocast"])
def test_draws_that_depend_on_the_dtype_have_a_reference(bf16):
    model = fl.patch_model(Scaled())
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        report = fl.verify(model, WIDE)
    assert report, str(report)
    assert report.reference == "float64"
    assert max(c.eager_error for c in report.comparisons) < (0.2 if bf16 else 1e-5)


def test_draws_of_native_dropout_as_a_gpu_makes_them(monkeypatch):
    monkeypatch.setattr(
        nn.functional, "dropout", lambda x, p, training, inplace: torch.native_dropout(x, p, training)[0]
    )
    report = fl.verify(fl.patch_model(Scaled().bfloat16()), WIDE.bfloat16())
    assert report and report.reference == "float64", str(report)
    assert max(c.eager_error for c in report.comparisons) < 0.2


@pytest.mark.usefixtures("_own_rules")
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16 autocast"])
@pytest.mark.parametrize(
    "op",
    [
        lambda fc, activation, x: activation(fc(x)) * 1.05,
        lambda fc, activation, x: activation(fc(x)) / 1.05 + 0 * torch.rand(1),
        lambda fc, activation, x: nn.functional.dropout(activation(fc(x)), 0.01),
        lambda fc, activation, x: torch.manual_seed(3) and activation(fc(x)),
    ],
    ids=["scaled", "draws more", "dropout too many", "other masks"],
)
def test_wrong_beside_dropout(op, bf16):
    model = Scaled()
    fl.patch_model(model.b, rules=[wrong_rule(op)])
    fl.patch_model(model, rules=["linear_act"])
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        report = fl.verify(model, WIDE)
    assert not report and report.reference == "float64" and report.worst == "b", str(report)


@pytest.mark.usefixtures("_own_rules")
def test_a_dropout_forgotten():
    class Forgets(fl.Rule):
        pattern = leaf("drop", nn.Dropout)(act("act")(leaf("fc", nn.Linear)(value("x"))))

        def fuse(self, m):
            return m.call(lambda drop, fc, activation, x: activation(fc(x)), m.drop, m.fc, m.act, m.x)

    model = Scaled()
    fl.patch_model(model.b, rules=[Forgets()])
    report = fl.verify(model, WIDE)
    assert not report and report.worst == "b", str(report)


def test_draws_that_stay_inside_an_op_leave_the_direct_comparison():
    model = fl.patch_model(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.RReLU()))
    report = fl.verify(model, X)
    assert report and report.reference == "the original"
    assert fl.verify(model.eval(), X).reference == "float64"


def test_runs_that_draw_otherwise_leave_the_direct_comparison():
    class Choosy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5))

        def forward(self, x):
            return self.inner(x) + (torch.rand_like(x) if x.dtype == torch.float32 else 0)

    report = fl.verify(fl.patch_model(Choosy()), X)
    assert report and report.reference == "the original"


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_drawn_again_by_checkpointing(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(8, 8), Scaled()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, self.first(x), use_reentrant=reentrant)

    report = fl.verify(fl.patch_model(Checkpointed()), WIDE)
    assert report and report.reference == "float64", str(report)
    assert max(c.eager_error for c in report.comparisons) < 1e-5


class Restless(nn.Module):
    """Gives something else each time, by what no generator's state says."""

    def __init__(self, size: float, where: str = "forward"):
        super().__init__()
        self.rng, self.size, self.where = random.Random(0), size, where

    def forward(self, x):
        noise = torch.tensor([self.rng.gauss(0, self.size) for _ in range(x.shape[-1])], dtype=x.dtype)
        if self.where == "forward":
            return x + noise
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(lambda grad: grad * (1 + noise))
        return x


@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize("size", [0.01, 0.4])
def test_an_original_that_does_not_repeat_itself(size, drop):
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Sequential(nn.ReLU(), Restless(size)), nn.Dropout(drop), nn.Linear(8, 8), nn.GELU()
    )
    fl.patch_model(model)
    report = fl.verify(model, X)
    assert not report and not report.ok
    assert "the original does not repeat its own results" in report.error and report.worst == "1.1"
    assert "nothing can be judged" in str(report)
    assert not fl.verify(model, X, rtol=1e-6) and not fl.verify(model, X, backward=False)
    assert not any(m._forward_hooks for m in model.modules())


def test_gradients_that_do_not_repeat_themselves():
    model = fl.patch_model(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Restless(0.1, "backward"), nn.Linear(8, 8)))
    assert "does not repeat its own results: " in fl.verify(model, X).error
    assert fl.verify(model, X, backward=False)


def test_a_counter_that_nothing_resets():
    class Counts(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    report = fl.verify(fl.patch_model(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Counts())), X)
    assert "does not repeat its own results" in report.error and report.worst == "2"


def test_steady_models_run_no_more_often_than_needed():
    calls = []
    model = fl.patch_model(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5)))
    model.register_forward_hook(lambda *_: calls.append(1))
    assert fl.verify(model.eval(), X) and len(calls) == 3, "original, fused, float64"
    calls.clear()
    assert fl.verify(model.train(), X) and len(calls) == 4, "and once recorded"


def test_a_gradient_that_is_zero_but_for_rounding_is_said_to_be():
    model = fl.patch_model(nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU()))
    report = fl.verify(model, torch.randn(32, 64))
    assert report and [c.name for c in report.comparisons if c.eager_error > 0.5] == ["0.bias"]
    lines = str(report).splitlines()
    assert [line.split()[2] for line in lines if line.endswith("(zero but for rounding)")] == ["0.bias"]


def test_the_model_itself_may_be_the_worst():
    report = fl.verify(fl.patch_model(nn.Sequential(nn.Linear(8, 8), nn.Tanh())), X, backward=False)
    assert report.worst == "" and "worst: (root)" in str(report)


def test_the_report_is_json():
    data = json.loads(json.dumps(fl.verify(fl.patch_model(network()), X).to_dict()))
    assert data["ok"] is True and data["reference"] == "float64" and len(data["comparisons"]) > 10


def test_the_wrong_thing_to_verify():
    with pytest.raises(TypeError, match="expected a torch"):
        fl.verify(3, X)


class Cancels(nn.Module):
    """Attention's keys: a bias without effect, whose gradient is rounding alone; and draws that leave no float64."""

    def __init__(self):
        super().__init__()
        self.k, self.fc, self.act, self.rrelu = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(), nn.RReLU()

    def forward(self, x):
        k = self.k(x)
        return self.rrelu(self.act(self.fc(x - x.mean())) + (k - k.mean(0)))


def test_without_float64_a_gradient_of_rounding_alone_is_known_as_that():
    class Other(fl.Rule):
        """Its bias's gradient is rounded otherwise, as another kernel's is."""

        pattern = leaf("k", nn.Linear)(value("x"))

        def fuse(self, m):
            noise = 1e-7 * torch.randn(8, generator=torch.Generator().manual_seed(1))

            def op(k, x):
                return (
                    nn.functional.linear(x, k.weight, k.bias) + (k.bias * noise).sum() - (k.bias * noise).sum().detach()
                )

            return m.call(op, m.k, m.x)

    patched = fl.patch_model(Cancels(), rules=[Other()])
    report = fl.verify(patched, torch.randn(64, 8))
    assert report.reference == "the original" and report, str(report)


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.5])
@pytest.mark.parametrize("scale", [1.0, 255.0], ids=["unit", "pixels"])
@pytest.mark.parametrize("bf16", [False, True])
def test_without_float64_a_wrong_bias_gradient_fails(factor, scale, bf16):
    """Whatever the scale of the inputs, by which the weight's gradient outgrows the bias's."""

    def op(fc, activation, x):
        b = fc.bias * factor + (fc.bias * (1 - factor)).detach()
        return activation(nn.functional.linear(x, fc.weight, b))

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.RReLU(), nn.Linear(8, 4))
    patched = fl.patch_model(model, rules=[wrong_rule(op)])
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        report = fl.verify(patched, torch.rand(64, 8) * scale)
    assert report.reference == "the original"
    assert not report and report.worst == "0", str(report)


def test_a_verdict_leaves_parameters_and_generators():
    model = fl.patch_model(Cancels())
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    with _shaken(model, torch.bfloat16):
        assert not all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert torch.equal(state, torch.get_rng_state())
