"""Children opened where two of them are an MLP together: BERT's `intermediate` and `output`."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedlayers as fl
from fusedlayers.patch.plan import PatchPlan

from .models import assert_same, results, twin
from .test_builtin_rules import sites

ROWS = torch.randn(4, 7, 6)
WHOLE = ("mlp_drop_add_norm", ("up.fc", "up.act", "down.fc", "down.drop", "down.norm"))


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(6, 12), nn.GELU()

    def forward(self, x):
        return self.act(self.fc(x))


class Down(nn.Module):
    def __init__(self, p=0.3):
        super().__init__()
        self.fc, self.drop, self.norm = nn.Linear(12, 6), nn.Dropout(p), nn.LayerNorm(6)

    def forward(self, h, x):
        return self.norm(self.drop(self.fc(h)) + x)


class Layer(nn.Module):
    def __init__(self, up=Up, down=Down):
        super().__init__()
        self.attention, self.up, self.down = nn.Linear(6, 6), up(), down()

    def forward(self, x, mask=None):
        x = self.attention(x)
        if mask is not None:
            x = x * mask
        return self.feed_forward(x)

    def feed_forward(self, x):
        return self.down(self.up(x), x)


def check(model, *expected, **options):
    """Patches a copy, which must have these sites and compute the same."""
    patched = fl.patch_model(twin(model), on_fallback="raise", **options)
    assert sites(patched) == list(expected)
    for mask in (None, torch.rand(7, 1)):
        found = []
        for m in (patched, model):
            torch.manual_seed(3)
            found.append(results(m, ROWS, **({} if mask is None else {"mask": mask})))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)
    return patched


def test_an_mlp_in_two_children():
    model = Layer()
    patched = check(model, WHOLE)
    assert "(1/1 norms, 1/1 adds, 1/1 activations)" in str(fl.explain(patched))
    assert type(patched.up) is Up and type(patched.down) is Down
    assert fl.explain(twin(model)).fused == fl.explain(patched).fused
    assert_same(patched.eval(), copy.deepcopy(model).eval(), ROWS)
    fl.unpatch_model(patched)
    assert type(patched) is Layer


def test_copies_and_pickles_stay_fused():
    patched = fl.patch_model(Layer(), on_fallback="raise")
    for again in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert sites(again) == [WHOLE]
        assert_same(again.eval(), patched.eval(), ROWS)


def test_a_plan_and_filters():
    check(Layer(), WHOLE, plan=PatchPlan({"up.fc": ["mlp_drop_add_norm"]}))
    check(Layer(), ("linear_act", ("up.fc", "up.act")), exclude="down*")


def test_nothing_is_opened_that_fuses_no_more():
    """A hook on one of them then takes nothing from the others."""

    class Normed(Layer):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(6)

        def forward(self, x):
            return self.feed_forward(self.norm(self.attention(x) + x))

    patched = fl.patch_model(Normed(), on_fallback="raise", exclude="down.fc")
    assert set(sites(patched)) == {("add_norm", ("norm",)), ("linear_act", ("up.fc", "up.act"))}
    assert type(patched.up) is not Up
    patched.down.register_forward_hook(lambda *_: None)
    patched(ROWS)


def test_halves_in_one_child():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = Up(), Down()

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Halves()

        def forward(self, x):
            return self.mlp.down(self.mlp.up(x), x)

    model = Nested()
    patched = fl.patch_model(twin(model), on_fallback="raise")
    assert sites(patched) == [(WHOLE[0], tuple(f"mlp.{name}" for name in WHOLE[1]))]
    for a, b in zip(*(_seeded(m) for m in (patched, model)), strict=True):
        torch.testing.assert_close(a, b)


def test_an_argument_without_a_default_may_be_none():
    """LUKE's entities, which most calls do without: the children's own forwards are fused for neither kind of call."""

    class Entities(Layer):
        def forward(self, x, entities):
            x = self.attention(x)
            if entities is not None:
                x = torch.cat((x, entities), 1)
            return self.feed_forward(x)

    class Demanding(Layer):
        def forward(self, x, mask):
            if mask is None:
                raise ValueError("a mask is needed")
            return self.feed_forward(x * mask)

    model = Entities()
    patched = fl.patch_model(twin(model), on_fallback="raise")
    assert sites(patched) == [WHOLE]
    for entities in (None, torch.randn(4, 2, 6)):
        for a, b in zip(*(_seeded(m, entities=entities) for m in (patched, model)), strict=True):
            torch.testing.assert_close(a, b)
    model = Demanding()
    patched = fl.patch_model(twin(model), on_fallback="raise")
    mask = torch.rand(7, 1)
    for a, b in zip(*(_seeded(m, mask=mask) for m in (patched, model)), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="a mask is needed"):
        patched(ROWS, None)


class ReadTwice(Layer):
    def feed_forward(self, x):
        h = self.up(x)
        return self.down(h, x) + h.mean()


class SoftUp(Up):
    def forward(self, x):
        return super().forward(x) * 2


class NormedDown(Down):
    """Something else than a product comes first."""

    def forward(self, h, x):
        return super().forward(F.layer_norm(h, (12,)), x)


class ReadingDown(Down):
    def forward(self, h, x):
        return super().forward(h, x) + h.mean()


class CalledUp(Up):
    def __call__(self, x):
        return 2 * super().__call__(x)


class Doubling(nn.Module):
    """Wraps its subclasses' forwards, as transformers' base class of layers with checkpoints does."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        forward = cls.forward

        @functools.wraps(forward)
        def doubled(self, *args):
            outermost = type(self).forward is doubled
            return forward(self, *args) * (2 if outermost else 1)

        cls.forward = doubled


class DoubledUp(Doubling):
    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(6, 12), nn.GELU()

    def forward(self, x):
        return self.act(self.fc(x))


class DecoratedUp(Up):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize(
    "make",
    [
        ReadTwice,
        lambda: Layer(up=SoftUp),
        lambda: Layer(down=NormedDown),
        lambda: Layer(down=ReadingDown),
        lambda: Layer(up=CalledUp),
        lambda: Layer(up=DoubledUp),
        lambda: Layer(up=DecoratedUp),
    ],
    ids=["read twice", "not an activation", "not a product", "read inside", "called", "wrapped", "decorated"],
)
def test_what_stays_apart(make):
    model = make()
    patched = fl.patch_model(twin(model), on_fallback="raise")
    assert "mlp_drop_add_norm" not in [rule for rule, _ in sites(patched)]
    for a, b in zip(*(_seeded(m) for m in (patched, model)), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_children_that_are_passed_whatever_keywords_come():
    class Scaling(Down):
        def forward(self, h, x, scale=1.0, **others):
            return super().forward(h, x) * scale * others.get("more", 1.0)

    class Passing(Layer):
        def forward(self, x, **keywords):
            return self.down(self.up(x), x, **keywords)

    model = Passing(down=Scaling)
    patched = fl.patch_model(twin(model), on_fallback="ignore")
    for keywords in ({}, {"scale": 2.0}, {"more": 3.0}):
        for a, b in zip(*(_seeded(m, **keywords) for m in (patched, model)), strict=True):
            torch.testing.assert_close(a, b)
    for m in (patched, model):
        with pytest.raises(TypeError, match="multiple values for argument 'h'"):
            m(ROWS, h=ROWS)


def _seeded(model, **keywords):
    torch.manual_seed(3)
    return results(model, ROWS, **keywords)


def test_hooks_on_either_child_are_called():
    hooked = Layer()
    seen = []
    hooked.up.register_forward_hook(lambda *_: seen.append("up"))
    patched = fl.patch_model(hooked, on_fallback="raise")
    patched(ROWS)
    assert seen == ["up"] and len(sites(patched)) == 2
    later = fl.patch_model(Layer(), on_fallback="ignore")
    later.down.register_forward_hook(lambda *_: seen.append("down"))
    later(ROWS)
    assert seen == ["up", "down"]
    (fallbacks,) = fl.explain(later).fallbacks.values()
    assert list(fallbacks) == ["down has a hook"]


def test_a_child_that_is_replaced_or_changed_later():
    patched = fl.patch_model(Layer(), on_fallback="ignore")
    expected = copy.deepcopy(patched).eval()(ROWS)
    patched.up = nn.Sequential(patched.up.fc, nn.GELU())
    torch.testing.assert_close(patched.eval()(ROWS), expected)
    patched.down.forward = lambda h, x: h
    assert patched(ROWS).shape == (4, 7, 12)


def test_a_child_whose_class_is_given_another_forward():
    class Own(Up):
        def forward(self, x):
            return self.act(self.fc(x))

    model = nn.Sequential(Layer(up=Own), Layer(up=Own))
    model[0].other = model[0].up
    patched = fl.patch_model(twin(model), on_fallback="ignore")
    for a, b in zip(*(_seeded(m) for m in (patched, model)), strict=True):
        torch.testing.assert_close(a, b)
    assert not fl.explain(patched).fallbacks
    Own.forward = lambda self, x: 2 * self.act(self.fc(x))
    for a, b in zip(*(_seeded(m) for m in (patched, model)), strict=True):
        torch.testing.assert_close(a, b)
    assert [list(f) for f in fl.explain(patched).fallbacks.values()] == [["up.forward has been replaced"]] * 2


def test_a_child_whose_forward_is_called_by_its_name():
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = Up()

        def forward(self, x):
            return self.up.forward(x)

    class Doubling(Up):
        def forward(self, x):
            return 2 * super().forward(x)

    def exchange(m):
        m.up.__class__ = Doubling

    def give(m):
        m.up.forward = lambda x: x

    for change in (exchange, give):
        model = Direct()
        patched = fl.patch_model(twin(model), on_fallback="ignore")
        assert set(sites(patched)) == {("linear_act", ("up.fc", "up.act"))}
        assert torch.equal(patched(ROWS), model(ROWS)) and not fl.explain(patched).fallbacks
        for m in (patched, model):
            change(m)
        assert torch.equal(patched(ROWS), model(ROWS))
        assert [list(f) for f in fl.explain(patched).fallbacks.values()] == [["up.forward has been replaced"]]


def test_a_child_that_another_container_calls_too():
    """Fused there alone, here as a part of more; copies as well."""

    class Other(nn.Module):
        def __init__(self, up):
            super().__init__()
            self.up = up

        def forward(self, x):
            return self.up(x).mean()

    class Both(nn.Module):
        def __init__(self, first):
            super().__init__()
            layer = Layer()
            children = [("other", Other(layer.up)), ("layer", layer)]
            for name, child in children if first else reversed(children):
                self.add_module(name, child)

        def forward(self, x):
            return self.layer(x) + self.other(x)

    for first in (True, False):
        model = Both(first)
        patched = fl.patch_model(twin(model), on_fallback="raise")
        for again in (patched, copy.deepcopy(patched)):
            assert "mlp_drop_add_norm" in [rule for rule, _ in sites(again)]
            for a, b in zip(*(_seeded(m) for m in (again, model)), strict=True):
                torch.testing.assert_close(a, b)


def test_a_child_that_is_fused_already_is_not_opened():
    model = Layer()
    patched = fl.patch_model(fl.patch_model(twin(model), rules="linear_act"), on_fallback="raise")
    assert [rule for rule, _ in sites(patched)] == ["linear_act", "linear_drop_add_norm"]
    for a, b in zip(*(_seeded(m) for m in (patched, model)), strict=True):
        torch.testing.assert_close(a, b)


def test_layers_of_one_kind_with_other_settings():
    """What a child's forward read is guarded as if it were the container's own."""

    class Scaled(Up):
        def __init__(self, by=1.0):
            super().__init__()
            self.by = by

        def forward(self, x):
            return self.act(self.fc(x * self.by))

    model = nn.Sequential(Layer(up=Scaled), Layer(up=lambda: Scaled(3.0)))
    patched = fl.patch_model(twin(model), on_fallback="ignore")
    assert [rule for rule, _ in sites(patched)] == ["mlp_drop_add_norm"] * 2
    for m in (patched, model):
        m.eval()
    torch.testing.assert_close(patched(ROWS), model(ROWS))
    for m in (patched, model):
        m[0].up.by = 2.0
    torch.testing.assert_close(patched(ROWS), model(ROWS))
    assert list(fl.explain(patched).fallbacks) == ["0"]


def test_a_sequential_that_does_more_when_called_stays_closed():
    class Tripled(nn.Sequential):
        def __call__(self, x):
            return 3 * super().__call__(x)

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch, self.act = Tripled(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)), nn.ReLU()

        def forward(self, x):
            return self.act(self.branch(x) + x)

    model = Residual()
    assert_same(fl.patch_model(twin(model), on_fallback="raise"), model, torch.randn(2, 4, 3, 3))
