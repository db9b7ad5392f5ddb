"""`tune` with scripted times: what does not pay is undone, the rest kept, the plan repeats it, nothing else moves."""

from __future__ import annotations

import importlib
import json
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.functional import affine_act, linear_act
from fusedlayers.ops import _route
from fusedlayers.patch import patch_model
from fusedlayers.patch.guards import STATE, is_patched
from fusedlayers.patch.tune import tune

tuning = importlib.import_module("fusedlayers.patch.tune")  # the package's attribute of that name is the function


class Pair(nn.Module):
    """Two sites in one module."""

    def __init__(self, n=8):
        super().__init__()
        self.a, self.act, self.b, self.last = nn.Linear(n, n), nn.GELU(), nn.Linear(n, n), nn.ReLU()
        self.norm = nn.BatchNorm1d(n)

    def forward(self, x):
        return self.last(self.b(self.norm(self.act(self.a(x)))))


class Net(nn.Module):
    def __init__(self, n=8):
        super().__init__()
        self.first, self.second = Pair(n), Pair(n)
        self.head = nn.Sequential(nn.Linear(n, n), nn.SiLU())
        self.unused = nn.Sequential(nn.Linear(n, n), nn.ReLU())

    def forward(self, x):
        return self.head(self.second(self.first(x)))


@pytest.fixture
def times(monkeypatch):
    """Times of the variants of a module, by its class: fused, original, then without each site in turn."""
    script: dict[str, list[float]] = {}
    timed: list[str] = []

    def scripted(calls):
        for call in calls:
            call(1)()
        if len(calls) == 1:  # a whole step, or the sites that are left together
            return [[script.get("rest", 1.0)] * 3]
        name = "pair" if len(calls) == 4 else "head"
        timed.append(name)
        return [[t] * 3 for t in script[name]]

    monkeypatch.setattr(tuning, "_times", scripted)
    script["timed"] = timed
    return script


@pytest.fixture
def net():
    torch.manual_seed(0)
    return patch_model(Net(), on_fallback="raise", rules=["linear_act"])


def test_what_pays_is_kept_and_what_does_not_is_undone(net, times):
    times.update(pair=[2.0, 3.0, 2.5, 1.5], head=[1.0, 0.9], rest=1.4)
    report = tune(net, torch.randn(4, 8))
    kept = {r.name for r in report.kept}
    assert kept == {"first.a", "second.a", "unused.0"}
    assert {r.name for r in report.undone} == {"first.b", "second.b", "head.0"}
    assert is_patched(net.first) and not is_patched(net.head)
    fused = {r.name for r in fl.explain(net).fused}
    assert fused == kept
    reasons = {r.name: r.reason for r in report}
    assert reasons["head.0"].startswith("0.90 times as fast")
    assert reasons["first.a"].startswith("1.25 times as fast") and "did not run" in reasons["unused.0"]
    assert set(report.step_ms) == {"original", "patched", "tuned"}
    skipped = {r.name: r.reason for r in fl.explain(net).skipped}
    assert skipped["first.b"] == "undone by tune"
    assert str(report).startswith("3 of 6 fused sites kept") and json.dumps(report.to_dict())


def test_what_is_tuned_is_timed_again_where_it_is_another_model(net, times, monkeypatch):
    steps = iter([3.0, 2.0, 1.0])
    monkeypatch.setattr(tuning, "_step_ms", lambda *_: next(steps))
    times.update(pair=[2.0, 3.0, 2.0, 3.0], head=[1.0, 2.0], rest=1.4)
    report = tune(net, torch.randn(4, 8))
    assert not report.undone and report.step_ms == {"original": 3.0, "patched": 2.0, "tuned": 2.0}
    steps = iter([3.0, 2.0, 1.0])
    times.update(head=[1.0, 0.9])
    assert tune(net, torch.randn(4, 8)).step_ms["tuned"] == 1.0


def test_sites_that_share_a_layer_are_not_timed_one_by_one(times):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.1)

        def forward(self, x):
            x = x + self.drop(self.a(x))
            return x + self.drop(self.b(x))

    times.update(pair=[2.0, 3.0, 1.0, 1.0])
    report = tune(patch_model(Twice(), on_fallback="raise"), torch.randn(4, 8))
    assert [r.rule for r in report] == ["scale_residual"] * 2 and len(report.kept) == 2
    assert {r.reason for r in report} == {"not timed by itself, another site has the same members"}


def test_a_site_slower_only_by_its_median_says_why_it_stays(net, times, monkeypatch):
    def scripted(calls):
        return [[1.0, 2.0, 2.0], *([[1.0, 1.0, 1.0]] * (len(calls) - 1))]

    monkeypatch.setattr(tuning, "_times", scripted)
    kept = {r.name: r.reason for r in tune(net, torch.randn(4, 8)).kept}
    assert kept["head.0"].startswith("0.50 times as fast") and kept["head.0"].endswith("its best time is no slower")


def test_alike_modules_are_timed_once(net, times):
    times.update(pair=[1.0, 2.0, 2.0, 2.0], head=[1.0, 2.0])
    x = torch.randn(4, 8, requires_grad=True)
    report = tune(net, x)
    assert times["timed"] == ["pair", "head"] and len(report.kept) == 6


def test_sites_that_pay_alone_but_not_together_are_undone(net, times):
    times.update(pair=[2.0, 1.0, 2.5, 1.9], head=[1.0, 2.0], rest=2.0)
    report = tune(net, torch.randn(4, 8))
    assert {r.name for r in report.kept} == {"head.0", "unused.0"}
    assert "together slower than the original module" in report.undone[0].reason
    assert not is_patched(net.first)


def test_the_plan_repeats_it(net, times, tmp_path):
    times.update(pair=[2.0, 3.0, 2.5, 1.5], head=[1.0, 0.9], rest=1.4)
    x = torch.randn(4, 8)
    report = tune(net, x)
    report.save(tmp_path / "plan.json")
    again = Net()
    again.load_state_dict(net.state_dict())
    patch_model(again, plan=tmp_path / "plan.json", on_fallback="raise")
    assert {r.name for r in fl.explain(again).fused} == {r.name for r in report.kept}
    assert again.first.__dict__[STATE].routes["linear_act"] in ("reference", "library")
    torch.testing.assert_close(again(x), net(x))


def test_a_plan_holds_the_routes_of_its_ops_and_of_no_others():
    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    plan = {"version": 1, "sites": {"0": ["linear_act"]}, "routes": {"": {"linear_act": "library"}}}
    patch_model(block, plan=plan, on_fallback="raise")
    seen = []
    pick = _route.pick

    def noting(op, *args, **kwargs):
        seen.append((op, dict(_route.held.routes or {})))
        return pick(op, *args, **kwargs)

    _route.pick = noting
    try:
        block(torch.randn(2, 8))
        affine_act(torch.randn(2), 1.0, 1.0)
    finally:
        _route.pick = pick
    assert seen == [("linear_act", {"linear_act": "library"}), ("affine_act", {})]
    assert _route.held.routes is None


def test_a_held_route_is_taken_and_gives_way_to_a_forced_one():
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    assert _route.held.routes is None
    _route.held.routes = {"linear_act": "reference"}
    try:
        assert _route.pick("linear_act", (x, w), plan=lambda: pytest.fail("not asked"))[0] == "reference"
        with fl.settings(route="triton"):
            if not torch.cuda.is_available():
                with pytest.raises(RuntimeError, match="forced"):
                    _route.pick("linear_act", (x, w), plan=lambda: "no")
        torch.testing.assert_close(linear_act(x, w), torch.relu(x @ w.T))
    finally:
        _route.held.routes = None


def test_the_model_is_left_as_it_was_found(net, times):
    times.update(pair=[1.0, 2.0, 2.0, 2.0], head=[1.0, 2.0])
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    x = torch.randn(4, 8)
    net(x).sum().backward()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    grads = {n: p.grad for n, p in net.named_parameters()}
    values = {n: None if g is None else g.clone() for n, g in grads.items()}
    state = torch.get_rng_state()

    def step():
        optimizer.zero_grad()
        net(torch.randn(4, 8)).sum().backward()
        optimizer.step()

    report = tune(net, step=step)
    assert len(report.kept) == 6
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    for n, p in net.named_parameters():
        assert p.grad is grads[n] and (p.grad is None or torch.equal(p.grad, values[n]))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(not m._forward_pre_hooks for m in net.modules())
    assert net.first.__dict__[STATE].on_fallback == "raise" and not net.first.__dict__[STATE].fallbacks


def test_a_site_that_falls_back_is_not_timed(times):
    net = patch_model(Net(), on_fallback="ignore", rules=["linear_act"])
    net.head[1].register_forward_hook(lambda *a: None)
    times.update(pair=[1.0, 2.0, 2.0, 2.0])
    report = tune(net, torch.randn(4, 8))
    (head,) = [r for r in report if r.name == "head.0"]
    assert head.kept and "original path" in head.reason and "hook" in head.reason
    assert not net.head.__dict__[STATE].fallbacks


def test_an_unpatched_model_is_patched_first_and_no_gradients_means_forward_only(times):
    net = Net().eval().requires_grad_(False)
    times.update(pair=[1.0, 2.0, 2.0, 2.0], head=[1.0, 2.0])
    times["rest"] = 1.0
    with torch.no_grad():
        report = tune(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4))
        assert len(report) == 1
    assert not any(is_patched(m) for m in net.modules())
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        tune("model")


def test_real_times_decide_on_a_real_model():
    net = patch_model(Net(), on_fallback="raise", rules=["linear_act"])
    report = tune(net, torch.randn(64, 8))
    assert len(report) == 6 and all(ms > 0 for ms in report.step_ms.values())
    assert {r.name for r in report.kept} == {r.name for r in fl.explain(net).fused}


class Cached(nn.Module):
    """As a transformer's layer with a cache: what it gets is added to what was there."""

    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(8, 8), nn.GELU()

    def forward(self, x, cache):
        cache.held.append(x)
        return self.act(self.fc(torch.cat(cache.held)))


class Cache:
    def __init__(self):
        self.held: list[torch.Tensor] = []


class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(8, 8), Cached()

    def forward(self, x, cache=None):
        return self.layer(self.first(x), Cache() if cache is None else cache)


@pytest.mark.parametrize("gradients", [True, False])
def test_each_run_finds_a_cache_as_the_first_one_did(gradients):
    lengths = set()
    net = patch_model(Caching(), on_fallback="raise")
    cache, right = Cache(), Cached.forward
    with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(gradients):
        patch.setattr(torch, "cat", lambda held, cat=torch.cat: lengths.add(len(held)) or cat(held))
        assert len(tune(net, torch.randn(2, 8))) == 1
        assert lengths == {1}
        tune(net, torch.randn(2, 8), cache)
    assert lengths == {1} and not cache.held and Cached.forward is right


def test_inputs_that_were_computed_and_their_gradients_are_left_alone():
    net = patch_model(nn.Sequential(nn.Linear(8, 8), nn.GELU()), on_fallback="raise")
    leaf = torch.randn(2, 8, requires_grad=True)
    for x in (leaf, leaf * 2):
        assert len(tune(net, x)) == 1
    assert leaf.grad is None


class Editing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.fc, self.act = nn.ReLU(inplace=True), nn.Linear(8, 8), nn.GELU()

    def forward(self, x):
        return self.act(self.fc(self.first(x)))


def test_a_module_that_edits_its_input_gets_it_unedited_each_time():
    net = patch_model(nn.Sequential(nn.Linear(8, 8), Editing()), on_fallback="raise")
    assert any(r.name.startswith("1.") and r.fused_ms for r in tune(net, torch.randn(2, 8)))
    x = -torch.ones(2, 8)
    tune(patch_model(Editing(), on_fallback="raise"), x)
    assert torch.equal(x, -torch.ones(2, 8))


def test_an_optimizer_in_hooks_moves_nothing():
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    before = [p.detach().clone() for p in net.parameters()]
    tune(patch_model(net), torch.randn(4, 8))
    assert all(map(torch.equal, before, net.parameters()))


def test_an_optimizer_in_a_forward_hook_moves_nothing():
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.register_forward_pre_hook(lambda *args: optimizer.step())
    before = [p.detach().clone() for p in net.parameters()]
    tune(patch_model(net), torch.randn(4, 8))
    assert all(map(torch.equal, before, net.parameters()))


def test_an_optimizer_that_torch_hangs_into_the_backward_moves_nothing():
    apply = pytest.importorskip("torch.distributed.optim")._apply_optimizer_in_backward
    net = patch_model(nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    apply(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    before = [p.detach().clone() for p in net.parameters()]
    tune(net, torch.randn(4, 8))
    assert all(map(torch.equal, before, net.parameters()))


def test_a_checkpoints_forward_with_gradients_is_what_is_timed(monkeypatch):
    net, timed = patch_model(Net(), on_fallback="raise", rules=["linear_act"]), []
    right = tuning._decide
    monkeypatch.setattr(tuning, "_decide", lambda m, call, rewind: timed.append(call.grad) or right(m, call, rewind))
    x = torch.randn(4, 8, requires_grad=True)
    tune(
        net,
        step=lambda: (
            checkpoint(net.head, checkpoint(net.first, x, use_reentrant=True), use_reentrant=True).sum().backward()
        ),
    )
    assert timed == [True, True]


def test_two_threads_that_tune_leave_no_recorder_behind():
    pick, inside, leave = _route.pick, [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    def record(i):
        with tuning._recorded():
            inside[i].set()
            leave[i].wait(20)

    threads = [threading.Thread(target=record, args=(i,)) for i in range(2)]
    for i, thread in enumerate(threads):
        thread.start()
        inside[i].wait(0.2)
    for i, thread in enumerate(threads):  # the first to come goes first
        leave[i].set()
        thread.join()
    assert _route.pick is pick


def test_frozen_modules_are_timed_apart_from_those_that_train(net, times):
    times.update(pair=[1.0, 2.0, 2.0, 2.0], head=[1.0, 2.0])
    net.second.requires_grad_(False)
    tune(net, torch.randn(4, 8, requires_grad=True))
    assert times["timed"].count("pair") == 2


def test_a_step_that_is_no_function_and_a_model_that_fails_leave_it_unpatched():
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    with pytest.raises(TypeError, match="step must be a function without arguments, got float"):
        tune(net, torch.randn(2, 4), step=2.0)
    with pytest.raises(RuntimeError):
        tune(net, torch.randn(2, 5))
    assert not any(is_patched(m) for m in net.modules())
