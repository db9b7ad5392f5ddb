"""Results lie in memory as eager's do, whichever operand a forward writes first."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import fusedlayers as fl

from .models import twin

NCHW, NHWC = torch.contiguous_format, torch.channels_last


def block(forward):
    """Of an input `x` and a branch `y`, each of a layout of its own."""
    module = type("Block", (nn.Module,), {"forward": forward})()
    module.bn, module.act, module.drop = nn.BatchNorm2d(4), nn.SiLU(), nn.Dropout(0.5)
    module.gamma = nn.Parameter(torch.randn(4, 1, 1, generator=torch.Generator().manual_seed(0)))
    module.norm = nn.LayerNorm(3)
    return module


FORWARDS = {
    "x + bn": lambda self, x, y: x + self.bn(y),
    "bn + x": lambda self, x, y: self.bn(y) + x,
    "act(x + bn)": lambda self, x, y: self.act(x + self.bn(y)),
    "act(bn + x)": lambda self, x, y: self.act(self.bn(y) + x),
    "act(x + y)": lambda self, x, y: self.act(x + y),
    "x * act": lambda self, x, y: x * self.act(y),
    "act * x": lambda self, x, y: self.act(y) * x,
    "x + gamma * y": lambda self, x, y: x + self.gamma * y,
    "gamma * y + x": lambda self, x, y: self.gamma * y + x,
    "y * gamma + x": lambda self, x, y: y * self.gamma + x,
    "act(gamma * y + x)": lambda self, x, y: self.act(self.gamma * y + x),
    "x * y + x": lambda self, x, y: x * y + x,
    "x + y * x": lambda self, x, y: x + y * x,
    "x + drop": lambda self, x, y: x + self.drop(y),
    "drop + x": lambda self, x, y: self.drop(y) + x,
    "drop.add(x)": lambda self, x, y: self.drop(y).add(x),
    "torch.add(drop, x)": lambda self, x, y: torch.add(self.drop(y), x),
    "norm(drop + x) and the sum": lambda self, x, y: (lambda s: self.norm(s) + s)(self.drop(y) + x),
    "norm(x + drop) and the sum": lambda self, x, y: (lambda s: self.norm(s) + s)(x + self.drop(y)),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", FORWARDS)
def test_of_operands_that_lie_in_different_orders(name, training):
    original = block(FORWARDS[name]).double().train(training)
    patched = fl.patch_model(twin(original), on_fallback="raise").train(training)
    assert fl.explain(patched).fused
    for formats in itertools.product([NCHW, NHWC], repeat=2):
        x, y = (torch.randn(2, 4, 5, 3, generator=torch.Generator().manual_seed(i)).double() for i in range(2))
        found = []
        for model in (patched, original):
            given = [t.clone(memory_format=f).requires_grad_() for t, f in zip((x, y), formats, strict=True)]
            torch.manual_seed(0)
            out = model(*given)
            again = torch.nn.functional.dropout(out, 0.5)  # draws in the order of memory
            found.append([out, again, *torch.autograd.grad(again.square().sum(), given)])
        assert found[0][0].stride() == found[1][0].stride(), formats
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want)


def _into_bn(self, x, y):
    h = self.bn(y)
    h += x
    return h


def _into_x(self, x, y):
    h = x * 1
    h += self.bn(y)
    return h


LAYOUTS = {
    "NCHW": lambda n: torch.randn(n, 4, 5, 3),
    "NHWC": lambda n: torch.randn(n, 4, 5, 3).contiguous(memory_format=NHWC),
    "WHCN": lambda n: torch.randn(3, 5, 4, n).permute(3, 2, 1, 0),
    "one": lambda n: torch.randn(1, 4, 5, 3),
    "expanded": lambda n: torch.randn(1, 5, 3, 4).permute(0, 3, 1, 2).expand(n, -1, -1, -1),
    "gate": lambda n: torch.randn(5, 3, 4).permute(2, 0, 1),
    "row": lambda n: torch.randn(n, 1, 3, 4).permute(0, 3, 1, 2),
}
MORE = {
    "x * y + x": FORWARDS["x * y + x"],
    "x * act": FORWARDS["x * act"],
    "drop + x": FORWARDS["drop + x"],
    "gamma * y + x": FORWARDS["gamma * y + x"],
    "x + bn": FORWARDS["x + bn"],
    "norm(idle(x) + drop) and the sum": lambda self, x, y: (lambda s: (self.norm(s), s))(self.idle(x) + self.drop(y)),
    "idle(x) * act": lambda self, x, y: self.idle(x) * self.act(y),
    "bn += x": _into_bn,
    "x += bn": _into_x,
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", MORE)
def test_of_operands_that_broadcast_repeat_or_have_dims_of_size_one(name, training):
    original = block(MORE[name]).double().train(training)
    original.idle = nn.Identity()
    patched = fl.patch_model(twin(original), on_fallback="raise").train(training)
    for left, right in itertools.product(LAYOUTS, repeat=2):
        x, y = LAYOUTS[left](2).double(), LAYOUTS[right](2).double()
        if "bn" in name and "gate" in (left, right):
            continue  # a batch norm wants four dims
        found = []
        for model in (patched, original):
            torch.manual_seed(0)
            try:
                out = model(x, y)
                found.append(out[-1] if isinstance(out, tuple) else out)
            except RuntimeError as error:
                found.append(str(error))
        if isinstance(found[1], str):
            assert found[0] == found[1], (left, right)
        else:
            torch.testing.assert_close(*found)
            if not (name == "bn += x" and "row" in (left, right)):  # which of its two names a dim of size 1 bears
                assert found[0].stride() == found[1].stride(), (left, right)


def test_a_sum_in_place_may_not_be_larger_than_what_it_is_written_over():
    patched = fl.patch_model(block(_into_bn), on_fallback="raise")
    with pytest.raises(RuntimeError, match=r"output with shape \[1, 4, 5, 3\] doesn't match the broadcast shape"):
        patched(torch.randn(2, 4, 5, 3), torch.randn(1, 4, 5, 3))


@pytest.mark.parametrize("name", ["act(x + bn)", "x * act", "x + bn", "gamma * y + x"])
def test_compiled_with_sizes_that_change(name):
    torch.compiler.reset()
    original = block(FORWARDS[name]).eval()
    patched = fl.patch_model(twin(original), on_fallback="raise").eval()
    compiled = torch.compile(patched, fullgraph=True, backend="eager", dynamic=True)
    for batch in (2, 6):
        x, y = torch.randn(batch, 4, 5, 3), torch.randn(batch, 4, 5, 3).contiguous(memory_format=NHWC)
        got, want = compiled(x, y), original(x, y)
        torch.testing.assert_close(got, want)
        assert got.stride() == want.stride()


def test_exported_with_a_batch_that_changes():
    patched = fl.patch_model(block(FORWARDS["gamma * y + x"]), on_fallback="raise").eval()
    given = torch.randn(2, 4, 5, 3), torch.randn(2, 4, 5, 3)
    sizes = ({0: torch.export.Dim("batch"), 2: torch.export.Dim("height")},) * 2
    exported = torch.export.export(patched, given, dynamic_shapes=sizes).module()
    x, y = torch.randn(7, 4, 6, 3), torch.randn(7, 4, 6, 3)
    torch.testing.assert_close(exported(x, y), patched(x, y))


def test_blocks_that_come_out_the_same_share_their_class():
    one = block(FORWARDS["x + bn"])
    first, second = fl.patch_model(nn.ModuleList([one, twin(one)]))
    assert type(first) is type(second) is not type(one.bn)


READ = {
    "a view": lambda self, s: s.transpose(1, 2).view(2, -1),
    "a view of some": lambda self, s: s[1:].permute(2, 1, 0).view(-1),
    "strides": lambda self, s: torch.tensor(s.stride()),
    "dropout": lambda self, s: self.drop(s),
    "a dropout function": lambda self, s: torch.nn.functional.dropout(s.transpose(1, 2), 0.5),
}


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("name", READ)
def test_a_sum_whose_order_the_forward_tells(name, drops):
    """Of a transposed map, beside its norm. Seen to fail: the view, and the masks were others."""

    def forward(self, x):
        t = x.flatten(2).transpose(1, 2)
        s = t + (self.drop(self.fc(t)) if drops else self.fc(t))
        return self.norm(s), READ[name](self, s)

    original = type("Block", (nn.Module,), {"forward": forward})()
    original.fc, original.norm, original.drop = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.5)
    patched = fl.patch_model(twin(original), on_fallback="raise")
    assert any("norm" in site.modules for site in fl.explain(patched).fused)
    x, found = torch.randn(2, 8, 3, 3), []
    for model in (patched, original):
        torch.manual_seed(0)
        found.append(model(x))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
