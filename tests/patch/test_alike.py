"""Layers repeated many times are traced once; those that only look alike are not taken for one another."""

import copy

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers.patch import trace
from fusedlayers.patch.guards import MARK


class Block(nn.Module):
    def __init__(self, scale=2.0):
        super().__init__()
        self.fc, self.act, self.extra = nn.Linear(4, 4), nn.ReLU(), None
        self.of_a_layer, self.sizes = scale, (1, 1)

    def forward(self, x):
        y = self.act(self.fc(x)) * getattr(self, "of_a_" + "layer"[:5])  # a name that no code holds
        if "gate" in self._modules:
            y = y * self.gate(x)
        y = y if self.extra is None else y + self.extra(x)
        return y * self.sizes[0]


class Blocks(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        return [block(x) for block in self.blocks]


def _gated(block):
    block.gate = nn.Linear(4, 4)


def _extended(block):
    block.extra = nn.Linear(4, 4)


def _scaled(block):
    block.of_a_layer = 3.0


def _negated(block):
    block.of_a_layer = -0.0


def _sized(block):
    block.sizes = (2, 1)


def _of_booleans(block):
    block.sizes = (True, 1)


def _with_a_sigmoid(block):
    block.act = nn.Sigmoid()


def _hooked(block):
    block.fc.register_forward_hook(lambda *_: None)


def test_layers_alike_are_traced_once(monkeypatch):
    traced = []
    once = trace._trace
    monkeypatch.setattr(trace, "_trace", lambda module, *rest: traced.append(module) or once(module, *rest))
    model = fl.patch_model(Blocks(*(Block() for _ in range(5))))
    assert [m for m in traced if isinstance(m, Block)] == [model.blocks[0]] * 2  # in each mode
    assert len({type(b) for b in model.blocks}) == 1
    assert MARK in vars(type(model.blocks[4]))


CHANGES = [_gated, _extended, _scaled, _negated, _sized, _of_booleans, _with_a_sigmoid, _hooked]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("change", CHANGES)
def test_a_difference_is_never_lost(change, order):
    torch.manual_seed(0)
    plain, other = Block(0.0 if change is _negated else 2.0), Block(2.0)
    change(other)
    model = Blocks(*[plain, other][::order])
    for block in (other, plain):  # as if it were alone
        alone = fl.patch_model(copy.deepcopy(block))
        together = fl.patch_model(copy.deepcopy(model), on_fallback="raise").blocks[::order][block is other]
        assert (MARK in vars(type(alone))) == (MARK in vars(type(together)))
        if MARK in vars(type(alone)):
            assert vars(type(alone))[MARK].source == vars(type(together))[MARK].source
        x = torch.randn(3, 4)
        got, want = together(x), block(x)
        assert torch.equal(got, want)
        assert torch.equal(got.signbit(), want.signbit())


def test_nothing_is_kept_from_one_patching_to_the_next():
    model = fl.patch_model(Blocks(Block(), Block()))
    fl.explain(model)
    copy.deepcopy(model)
    assert not trace._known
    assert not len(trace._kept)


class Named(str):
    """Equal to others of its name."""


def _named(name, scale):
    made = Named(name)
    made.scale = scale
    return made


@pytest.mark.parametrize("attribute", ["of_a_layer", "sizes"])
def test_a_string_that_carries_more_than_compares(attribute):
    class Carried(Block):
        def forward(self, x):
            return self.act(self.fc(x)) * getattr(self, attribute).scale

    model = Blocks(Carried(), Carried())
    for block, scale in zip(model.blocks, (2.0, 3.0), strict=True):
        setattr(block, attribute, _named("half", scale))
    x = torch.randn(3, 4)
    expected = model(x)
    for a, b in zip(fl.patch_model(model)(x), expected, strict=True):
        assert torch.equal(a, b)


class Asked(nn.Module):
    """Its settings are no attributes: what answers for them is its own."""

    def __init__(self, mode):
        super().__init__()
        self.settings, self.fc = {"mode": mode}, nn.Linear(4, 4)

    def forward(self, x):
        h = self.fc(x)
        return torch.relu(h) if self.mode == "relu" else torch.tanh(h)


class ByGetattr(Asked):
    def __getattr__(self, name):
        settings = self.__dict__.get("settings", {})
        return settings[name] if name in settings else super().__getattr__(name)


class ByGetattribute(Asked):
    def __getattribute__(self, name):
        return object.__getattribute__(self, "settings")["mode"] if name == "mode" else super().__getattribute__(name)


@pytest.mark.parametrize("kind", [ByGetattr, ByGetattribute])
def test_layers_that_answer_by_code_of_their_own(kind):
    x, model = torch.randn(3, 4), Blocks(kind("relu"), kind("tanh"))
    expected = model(x)
    for a, b in zip(fl.patch_model(model)(x), expected, strict=True):
        torch.testing.assert_close(a, b)
