"""The rules for Linears that read one value: where they apply, what they leave alone, and that nothing else changes."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedlayers as fl
from fusedlayers import inspect

from .models import assert_same, results, twin

pytestmark = pytest.mark.usefixtures("kernels_where_they_run")

X = (2, 5, 8)
IN_PLACE, THREE, TWO = "projections_in_place", "projections", "two_projections"


class Attention(nn.Module):
    """As a user writes it: its forward can be traced. Fewer heads for k and v, and no bias for k."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 4, bias=False), nn.Linear(8, 4)
        self.out = nn.Linear(8, 8)
        self.head_dim = 4

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        B, N, _ = x.shape
        q = self.query(x).view(B, N, -1, self.head_dim).transpose(1, 2)
        k = self.key(memory).view(B, -1, 1, self.head_dim).transpose(1, 2)
        v = self.value(memory).view(B, -1, 1, self.head_dim).transpose(1, 2)
        return self.attend(q, k, v, (B, N))

    def attend(self, q, k, v, shape):
        k, v = (t.expand(-1, q.shape[1], -1, -1) for t in (k, v))
        x = F.scaled_dot_product_attention(q, k, v)
        return self.out(x.transpose(1, 2).reshape(*shape, -1))


class Untraced(Attention):
    """As transformers writes it: no trace gets through `*shape`."""

    def forward(self, hidden, mask=None, **kwargs):
        """Attends.

        Over indented lines.
        """
        input_shape = hidden.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        q = self.query(hidden).view(*hidden_shape).transpose(1, 2)
        k = self.key(hidden).view(*hidden_shape).transpose(1, 2)
        v: torch.Tensor = self.value(hidden).view(*hidden_shape).transpose(1, 2)
        if mask is not None:
            q = q * mask
        return self.attend(q * kwargs.get("scale", 1.0), k, v, input_shape)


class Derived(Untraced):
    """Asks for its base, by a closure's cell."""

    def forward(self, hidden, mask=None, **kwargs):
        rows = max([*hidden.shape])
        k, v = self.key(hidden), self.value(hidden)
        return super().forward(hidden, mask, **kwargs) + k.mean() * v.sum() / rows


class Crossed(Attention):
    """k and v of another tensor than q's, in one branch of several."""

    def forward(self, hidden, memory=None, cached=None):
        current = memory if memory is not None else hidden
        q = self.query(hidden)
        if cached is not None:
            k, v = cached
        else:
            shape = (*current.shape[:-1], -1, self.head_dim)
            k = self.key(current).view(shape).transpose(1, 2)
            v = self.value(current).view(shape).transpose(1, 2)
        q = q.view(*hidden.shape[:-1], -1, self.head_dim).transpose(1, 2)
        return self.attend(q, k, v, hidden.shape[:-1])


KINDS = (Attention, Untraced, Derived, Crossed)


def sites(model):
    return [(r.name, r.rule) for r in fl.explain(model).fused if r.rule in (IN_PLACE, THREE, TWO)]


def trained(model, *args, **kwargs):
    with torch.autocast("cpu", torch.bfloat16):
        return results(model, *args, **kwargs)


def assert_same_trained(patched, original, *args, **kwargs):
    """Under autocast: outputs to the bit, gradients as far as the low dtype goes."""
    got, want = trained(patched, *args, **kwargs), trained(original, *args, **kwargs)
    assert torch.equal(got[0], want[0])
    for a, b in zip(got[1:], want[1:], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2 * b.abs().max().item())


def test_what_takes_them():
    """With another tensor for k and v only those go together, a site of its own."""
    assert sites(fl.patch_model(Attention())) == [("query", THREE), ("key", TWO)]
    for kind, members in [
        (Untraced, ("query", "key", "value")),
        (Derived, ("key", "value")),
        (Crossed, ("key", "value")),
    ]:
        (found,) = fl.explain(fl.patch_model(kind())).fused
        assert (found.name, found.rule, found.modules) == ("", IN_PLACE, ("", *members))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_nothing_changes(kind, training):
    original = kind().train(training)
    patched = fl.patch_model(twin(original), on_fallback="raise")
    assert_same(patched, original, torch.randn(X))
    assert_same_trained(patched, original, torch.randn(X))
    with torch.no_grad():
        x = torch.randn(3, 4, 8)
        assert torch.equal(patched(x), original(x))


def test_a_second_tensor():
    for kind in (Attention, Crossed):
        original = kind()
        patched = fl.patch_model(twin(original), on_fallback="raise")
        assert_same_trained(patched, original, torch.randn(X), torch.randn(2, 3, 8))
    cached = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4)
    for x in (torch.randn(X),):
        assert torch.equal(patched(x, cached=cached), original(x, cached=cached))


@pytest.mark.parametrize("given", [{"mask": torch.ones(1, 1, 5, 1)}, {"scale": 0.5}, {"mask": None}], ids=str)
def test_all_arguments_pass(given):
    original = Untraced()
    patched = fl.patch_model(twin(original), on_fallback="raise")
    x = torch.randn(X)
    assert torch.equal(patched(x, **given), original(x, **given))
    assert torch.equal(patched(x, *given.values()), original(x, *given.values())) or "scale" in given


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_runs(kind):
    """Fails where the fused path is there but never taken."""
    if fl.settings.route == "reference" or torch.cuda.is_available():
        pytest.skip("no kernel runs")
    patched, x = fl.patch_model(kind(), on_fallback="raise"), torch.randn(X)
    started = [k.name for k in inspect.launches(lambda: trained(patched, x))]
    assert "pack_sum" in started
    assert "pack_sum" not in [k.name for k in inspect.launches(lambda: results(patched, x))]


@pytest.mark.parametrize("kind", [Attention, Untraced])
def test_one_that_is_something_else_leaves_the_others(kind):
    """A hook, an adapter's layer, a parametrization on one: the other two still go together."""

    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    def hooked(m):
        m.query.register_forward_hook(lambda *_: None)

    def adapted(m):
        m.query = Adapted(8, 8)

    def parametrized(m):
        nn.utils.parametrizations.weight_norm(m.query)

    for change in (hooked, adapted, parametrized):
        original = kind()
        change(original)
        patched = fl.patch_model(copy.deepcopy(original), on_fallback="raise")
        found = [r for r in [*fl.explain(patched).fused, *fl.explain(patched).reduced]]
        assert [r.modules[-2:] for r in found] == [("key", "value")], change
        assert_same_trained(patched, original, torch.randn(X))


def test_two_that_are_something_else_say_why():
    for kind in (Attention, Untraced):
        original = kind()
        for layer in (original.query, original.key):
            layer.register_forward_hook(lambda *_: None)
        report = fl.explain(fl.patch_model(original))
        assert not report.fused
        assert any("hook" in r.reason for r in report.skipped)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_comes_later_is_called(kind):
    original = kind()
    patched, x, seen = fl.patch_model(twin(original), on_fallback="ignore"), torch.randn(X), []
    for m in (original, patched):
        m.value.register_forward_hook(lambda _, args, out: seen.append(out.detach()))
    assert_same_trained(patched, original, x)
    assert len(seen) >= 2 and torch.equal(seen[0], seen[-1])
    assert fl.explain(patched).fallbacks


class Between(Attention):
    """What is between them overwrites what they read."""

    def forward(self, x):
        shape = (*x.shape[:-1], -1, self.head_dim)
        x = x * 1
        q = self.query(x)
        touch(x)
        k, v = self.key(x), self.value(x)
        return self.attend(*(t.view(shape).transpose(1, 2) for t in (q, k, v)), shape[:2])


class TracedBetween(Attention):
    def forward(self, x):
        x = x * 1
        q = self.query(x)
        x.mul_(2)
        return (q * self.key(x).repeat(1, 1, 2)).sin()


def touch(x):
    with torch.no_grad():
        x.mul_(2)


@pytest.mark.parametrize("kind", [Between, TracedBetween])
def test_what_is_overwritten_between(kind):
    original = kind()
    patched = fl.patch_model(twin(original), on_fallback="raise")
    assert sites(patched) == ([("", IN_PLACE)] if kind is Between else [])
    with torch.autocast("cpu", torch.bfloat16):
        for train in (True, False):
            with torch.set_grad_enabled(train):
                x = torch.randn(X)
                assert torch.equal(patched(x), original(x))


class Heads(nn.Module):
    """gate and up of a gated MLP, and an activation's Linear: what larger rules take."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down, self.fc = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x)) + F.relu(self.fc(x))


def test_larger_rules_come_first():
    found = {(r.name, r.rule) for r in fl.explain(fl.patch_model(Heads())).fused}
    assert {rule for _, rule in found} >= {"gated_mlp"} and not {THREE, TWO} & {rule for _, rule in found}


def test_filters_and_unpatch():
    for kind in (Attention, Untraced):
        for left_out in ({"exclude": "value"}, {"exclude": ""}, {"include": "out"}):
            assert not fl.explain(kind(), rules=[THREE, IN_PLACE], **left_out).fused
        original = kind()
        patched = fl.patch_model(twin(original))
        assert type(fl.unpatch_model(patched)) is kind
        assert_same(patched, original, torch.randn(X))


def test_copies_pickles_and_compile():
    for kind in (Attention, Untraced):
        patched, x = fl.patch_model(kind(), on_fallback="raise"), torch.randn(X)
        for other in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
            assert sites(other) == sites(patched)
            assert torch.equal(other(x), patched(x))
        buffer = io.BytesIO()
        torch.save(patched, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=False)(x), patched(x))
        compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
        for got, want in zip(trained(compiled, x), trained(patched, x), strict=True):
            torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)


def test_pickles_are_patched_again_elsewhere(monkeypatch):
    """As in a process that has not patched such a model before."""
    from fusedlayers.patch import apply

    for kind in (Attention, Untraced):
        patched = fl.patch_model(kind(), on_fallback="raise")
        data = pickle.dumps(patched)
        monkeypatch.setattr(apply, "_by_token", {})
        other = pickle.loads(data)
        monkeypatch.undo()
        assert sites(other) == sites(patched)


def test_checkpointing():
    for kind in (Attention, Untraced):
        original = kind()
        patched = fl.patch_model(twin(original), on_fallback="raise")
        for reentrant in (True, False):

            def step(m, reentrant=reentrant):
                m.zero_grad()
                x = torch.ones(X).requires_grad_()
                with torch.autocast("cpu", torch.bfloat16):
                    torch.utils.checkpoint.checkpoint(m, x, use_reentrant=reentrant).sum().backward()
                return [x.grad, *(p.grad for p in m.parameters())]

            for a, b in zip(step(patched), step(original), strict=True):
                torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2 * b.abs().max().item())


def test_what_else_is_reported_stays():
    """Fails where a forward of which only calls are replaced hides what is said of its norms."""

    class Normed(Untraced):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, hidden, mask=None):
            shape = [*hidden.shape]
            return (
                (self.query(hidden) + self.norm(hidden).sin())
                * self.query(hidden)
                * self.key(hidden).sum()
                / len(shape)
            )

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Normed()

        def forward(self, x):
            return self.block(x).cos()

    with_rule, without = fl.explain(Model()), fl.explain(Model(), rules=[r for r in fl.rules() if r != IN_PLACE])
    assert sites(Model()) == [("block", IN_PLACE)]
    assert with_rule.counts == without.counts
    assert [(r.name, r.reason) for r in with_rule.skipped] == [(r.name, r.reason) for r in without.skipped]
