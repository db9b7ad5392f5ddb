"""Forwards that no trace gets through: which calls in their source may go together, and which may not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.patch import splice

from .models import assert_same, twin
from .test_projections import IN_PLACE, Untraced, X, assert_same_trained, sites

pytestmark = pytest.mark.usefixtures("kernels_where_they_run")


class Kept(nn.Module):
    """Nothing here may go together; each forward is one that no trace gets through."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))


class Rebound(Kept):
    def forward(self, x):
        _ = [*x.shape]
        y = self.a(x)
        x = x + 1
        return y + self.b(x)


class Branches(Kept):
    def forward(self, x):
        y = self.a(x)
        if [*x.shape]:
            y = y + self.b(x)
        return y


class Conditional(Kept):
    def forward(self, x):
        y = self.a(x) if len([*x.shape]) == 3 else self.b(x)
        return y


class Lazy(Kept):
    def forward(self, x):
        shape = [*x.shape]
        return self.a(x) + (len(shape) > 5 and self.b(x))


class Deferred(Kept):
    def forward(self, x):
        return sum([self.a(x)] + [layer() for layer in [lambda: self.b(x)] * len([*x.shape])])


class Assigned(Kept):
    def forward(self, x):
        y = self.a(x)
        self.shape = [*x.shape]
        return y + self.b(x)


class Behind(Kept):
    """No version tells of this."""

    def forward(self, x):
        x = x * len([*x.shape])
        y = self.a(x)
        x.data.mul_(2)
        return y + self.b(x)


class Walrus(Kept):
    def forward(self, x):
        return self.a(x) + self.b(x := x + len([*x.shape]))


class Twice(Kept):
    def forward(self, x):
        return self.a(x) + self.a(x) * len([*x.shape])


class Ambient(Kept):
    def forward(self, x):
        _ = [*x.shape]
        y = self.a(x)
        torch.set_grad_enabled(torch.is_grad_enabled())
        return y + self.b(x)


@pytest.mark.parametrize("kind", Kept.__subclasses__())
def test_left_alone(kind):
    assert not splice.groups(kind.forward)
    original = kind()
    patched = fl.patch_model(twin(original), on_fallback="raise")
    assert not sites(patched)
    assert_same_trained(patched, original, torch.randn(X))


class Loop(Kept):
    """Two runs, one of them many times, in a try block; targets come after values."""

    def forward(self, x):
        total = 0
        for n in range(len([*x.shape])):
            try:
                y = self.a(x) + n * self.b(x)
                x = self.c(x)
            finally:
                total = total + y
        first, second = self.a(total), self.c(total)
        return first * second


def test_runs():
    assert splice.groups(Loop.forward) == (("a", "c"), ("a", "b", "c"))
    assert splice.groups(Untraced.forward) == (("query", "key", "value"),)
    original = Loop()
    patched = fl.patch_model(twin(original), on_fallback="raise")
    assert sites(patched) == [("", IN_PLACE)]
    assert_same_trained(patched, original, torch.randn(X))
    assert_same(patched, original, torch.randn(X))


def test_source_that_is_not_the_codes(monkeypatch):
    """A file that was changed since it was loaded is no longer what runs."""
    before = splice.inspect.getsource
    monkeypatch.setattr(splice.inspect, "getsource", lambda f: before(f).replace("-1,", "1,"))
    splice.groups.cache_clear()
    assert not splice.groups(Untraced.forward)
    splice.groups.cache_clear()


def test_replaced_between():
    """A child that the forward itself replaces on its way is called."""

    class Replaces(Kept):
        def forward(self, x):
            y = self.a(x) * len([*x.shape])
            self.swap()
            return y + self.b(x)

        def swap(self):
            self.b = nn.Linear(8, 8)
            nn.init.ones_(self.b.weight)
            nn.init.zeros_(self.b.bias)

    original = Replaces()
    patched = fl.patch_model(twin(original), on_fallback="raise")
    x = torch.randn(X)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(patched(x), original(x))


@torch.no_grad()
def _edits_weight(m):
    m.b.weight.mul_(2)


@torch.no_grad()
def _edits_bias(m):
    m.b.bias.add_(1)


def _gives_weight(m):
    m.b.weight = m.c.weight


def _hooks(m):
    m.b.register_forward_hook(lambda _, args, out: out * 2)


def _gives_forward(m):
    m.b.forward = m.c.forward


@pytest.mark.parametrize("change", [_edits_weight, _edits_bias, _gives_weight, _hooks, _gives_forward])
def test_changed_between(change):
    """What the forward does to a child on its way, by code that nobody has read."""

    class Changes(Kept):
        def forward(self, x):
            y = self.a(x) * len([*x.shape])
            change(self)
            return y + self.b(x)

    original = Changes()
    patched = fl.patch_model(twin(original), on_fallback="raise")
    assert sites(patched) == [("", IN_PLACE)]
    x = torch.randn(X)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(patched(x), original(x))
