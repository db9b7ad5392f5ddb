"""A norm that one product alone reads, inside child modules too: written in the product's dtype under autocast.

On the CPU autocast leaves a norm of float32 in float32 and casts for products, as it does on a GPU.
"""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import fusedlayers as fl
from fusedlayers import functional as fused
from fusedlayers.patch.rule import Rule, _rules, register_rule
from fusedlayers.patch.rules import low_norm, rms_forms
from fusedlayers.patch.uses import called_with

from ..harness import assert_accurate, randn

LOW = torch.bfloat16
ROWS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
SQUARE = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def block(forward, **children):
    """A module whose class has this forward and these children."""
    module = type("Block", (nn.Module,), {"forward": forward})()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


def model(reader, norm=None, **others) -> nn.Module:
    """The usual residual block around what reads the norm."""
    return block(lambda self, x: x + self.reader(self.norm(x)), norm=norm or nn.LayerNorm(8), reader=reader, **others)


def rules(patched) -> list[str]:
    return [r.rule for r in fl.explain(patched).fused]


def seen(module, x=ROWS, dtype=LOW):
    """The result under autocast, every gradient, and the dtypes of what products were given."""
    given = []
    real = {name: getattr(F, name) for name in ("linear", "conv2d")}

    def spy(name):
        return lambda x, *args, **kwargs: given.append(x.dtype) or real[name](x, *args, **kwargs)

    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        for name in real:
            patch.setattr(F, name, spy(name))
        with torch.autocast("cpu", dtype=dtype):
            out = module(x)
        out.float().square().sum().backward()
    return given, [out, x.grad, *(p.grad for p in module.parameters())]


def assert_low(patched, original, x=ROWS, low=True):
    """The first product gets the low dtype, or not, and all is bit for bit what it was."""
    given, got = seen(patched, x)
    assert given[0] == (LOW if low else torch.float32), given
    want = seen(original, x)[1]
    assert all((a is b is None) or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in zip(got, want, strict=True))


def patched(module, **settings):
    return fl.patch_model(copy.deepcopy(module), **{"on_fallback": "raise", **settings})


# what counts as a reader


def attention(self, x, mask=None, causal: bool = False):
    rows, length, width = x.shape
    q, k, v = self.qkv(x).reshape(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
    if mask is not None:
        q = q + mask
    if causal:
        q = q * 2
    x = F.scaled_dot_product_attention(q, k, v)
    return self.proj(x.transpose(1, 2).reshape(rows, length, width))


def untraceable(self, x, mask=None):
    shape = (*x.shape[:-1], -1)
    if mask is not None:
        return self.other(x)
    return self.fc(x).view(shape)


def forwards(*functions):
    """A chain of containers, each calling the next, the last with a linear `fc`."""
    inner = linear()
    for function in reversed(functions):
        inner = block(function, fc=inner)
    return inner


ACCEPTED = {
    "attention": lambda: block(attention, qkv=nn.Linear(8, 24), proj=linear()),
    "mlp": lambda: block(lambda self, x: self.fc2(self.act(self.fc(x))), fc=linear(), act=nn.GELU(), fc2=linear()),
    "sequential": lambda: nn.Sequential(nn.Identity(), nn.Dropout(0.0), linear(), nn.ReLU()),
    "nested": lambda: forwards(lambda self, x: self.fc(x), lambda self, y: self.fc(y).tanh()),
    "layout": lambda: forwards(
        lambda self, x: self.fc(x.transpose(0, 1).unsqueeze(0)[0].contiguous()).transpose(0, 1),
        lambda self, x: self.fc(torch.flatten(x, 0, 1).view(-1, x.size(-1))).reshape(x.shape),
    ),
    "untraceable": lambda: block(untraceable, fc=linear()),
    "not patched": lambda: block(lambda self, x: self.fc(x) * 2 if self.scale else self.fc(x), fc=linear(), scale=True),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_product_inside_a_child(name):
    original = model(ACCEPTED[name]())
    found = patched(original)
    assert "norm_for_product" in rules(found), str(fl.explain(found))
    assert fl.verify(found, ROWS)
    for training in (True, False):
        assert_low(found.train(training), original.train(training))
    with torch.no_grad():
        assert torch.allclose(found(ROWS), original(ROWS), atol=1e-6), "and nothing changes without autocast"
    record = next(r for r in fl.explain(found).fused if r.rule == "norm_for_product")
    assert record.modules == ("norm",)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_after_an_add_and_by_keyword(norm):
    def forward(self, x):
        x = x + self.first(self.norm1(x))
        return x + self.attn(mask=None, x=self.norm2(x), causal=True)

    attn = block(attention, qkv=nn.Linear(8, 24), proj=linear())
    original = block(forward, norm1=norm(8), norm2=norm(8), first=linear(), attn=attn)
    found = patched(original)
    assert rules(found)[:2] == ["norm_for_product", "add_norm_for_product"]
    given, got = seen(found)
    assert given[:2] == [LOW, LOW]
    assert all(torch.equal(a, b) for a, b in zip(got, seen(original)[1], strict=True))


def test_a_convolution():
    def forward(self, x):
        return self.reader(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))

    original = block(forward, norm=nn.LayerNorm(8), reader=nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU()))
    image = torch.randn(2, 8, 3, 3)
    found = patched(original)
    assert_low(found, original, image)
    padded = copy.deepcopy(original)
    padded.reader[0] = nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect")
    assert rules(patched(padded))[0] != "norm_for_product"


def test_blocks_that_come_out_the_same_share_their_class_and_survive_copies():
    original = nn.Sequential(*(model(ACCEPTED["attention"]()) for _ in range(2)))
    for a, b in zip(original[0].modules(), original[1].modules(), strict=True):
        b.__class__ = a.__class__
    found = patched(original, on_fallback="ignore")  # attention itself falls back where its projection is hooked
    assert type(found[0]) is type(found[1])
    again = copy.deepcopy(found)
    assert_low(again, original)
    again[0].reader.qkv.register_forward_pre_hook(lambda *a: None)
    assert seen(found)[0][0] == LOW and seen(again)[0][0] == torch.float32


class Child(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x):
        return self.fc(x)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.reader = nn.LayerNorm(8), Child()

    def forward(self, x):
        return x + self.reader(self.norm(x))


def test_pickled_and_loaded():
    original = Whole()
    assert_low(pickle.loads(pickle.dumps(patched(original))), original)


def test_no_cast_where_autocast_is_off_or_the_stream_is_wide():
    found = patched(model(Child()))
    assert seen(found.double(), ROWS.double())[0][0] == torch.float64
    with torch.autocast("cpu", enabled=False):
        assert found.float()(ROWS).dtype == torch.float32


# what does not


def helper(x):
    return F.gelu(x)


class Forgetful(Child):
    def __call__(self, x):
        return super().__call__(x) + x.mean()


def doubled(function):
    @functools.wraps(function)
    def forward(self, x):
        return function(self, x * 2)

    return forward


def two_forms(self, x, mask=None):
    return x * mask if mask is not None else self.fc(x)


def with_block(self, x):
    with torch.autocast("cpu", enabled=False):
        return self.fc(x)


REFUSED = {
    "residual": lambda self, x: x + self.fc(x),
    "its dtype": lambda self, x: self.fc(x).to(x.dtype),
    "type_as": lambda self, x: self.fc(x).type_as(x),
    "in place": lambda self, x: self.fc(x.mul_(2)),
    "arithmetic": lambda self, x: self.fc(x * 2),
    "a helper": lambda self, x: self.fc(helper(x)),
    "another form": two_forms,
    "two products": lambda self, x: self.fc(x) + self.fc(x),
    "two halves": lambda self, x: self.fc(torch.cat([self.half(h) for h in x.chunk(2, -1)], -1)),
    "returned": lambda self, x: self.fc(x) * 0 + x,
    "a dtype view": lambda self, x: self.fc(x.view(torch.int32).view(torch.float32)),
    "a dtype view, given": lambda self, x, kind=None: self.fc(x) if kind is None else self.fc(x.view(kind)),
    "a dtype view, read": lambda self, x: self.fc(x.view(self.fc.weight.dtype)),
    "indexed by a value": lambda self, x: self.fc(x[x.argmax(-1).clamp(max=1)].sum(1)),
    "dropout": lambda self, x: self.fc(self.drop(x)),
    "another layer": lambda self, x: self.fc(self.act(x)),
    "autocast off": with_block,
    "decorated": doubled(lambda self, x: self.fc(x)),
    "weight read": lambda self, x: F.linear(x, self.fc.weight),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_child_that_does_something_else_with_it(name):
    child = block(REFUSED[name], fc=linear(), half=nn.Linear(4, 4), drop=nn.Dropout(0.5), act=nn.Tanh())
    found = patched(model(child))
    assert "norm_for_product" not in rules(found)


def test_several_products_and_a_forward_that_says_too_little_are_named():
    def tuple_of(self, x):
        return self.fc(x[(*x.shape[:0], 0)])

    for forward, reason in (
        (REFUSED["two products"], "2 products read it, whose gradients are added up in float32"),
        (tuple_of, "reader reads it, whose forward iterates over a value"),
        (REFUSED["residual"], None),
    ):
        report = fl.explain(patched(model(block(forward, fc=linear()))))
        said = [r.reason for r in report.skipped if r.rule == "norm_for_product"]
        assert said == ([] if reason is None else [f"in float32 under autocast: {reason}"])
        assert report.counts.fused == report.counts.total | {"residual": 0}


def test_a_child_called_in_its_own_way():
    assert "norm_for_product" not in rules(patched(model(Forgetful())))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: (lambda y: y + self.reader(y))(self.norm(x)),
        lambda self, x: (lambda y: self.reader(y) + self.other(y))(self.norm(x)),
        lambda self, x: self.other(self.norm(x) * 2),
    ],
)
def test_a_container_that_does_something_else_with_it(forward):
    found = patched(block(forward, norm=nn.LayerNorm(8), reader=Child(), other=linear()))
    assert not any("product" in rule for rule in rules(found))


class Adapter(nn.Linear):
    """What a LoRA layer is: a Linear that reads its input twice."""

    def forward(self, x):
        return super().forward(x) + x


class Half(nn.Module):
    def forward(self, weight):
        return weight * 0.5


def hook(module):
    return module.register_forward_hook(lambda *a: None)


SPOILED = {
    "reader has a hook": lambda m: hook(m.reader),
    "reader.fc has a hook": lambda m: m.reader.fc.register_forward_pre_hook(lambda *a: None),
    "reader.fc is a Adapter": lambda m: setattr(m.reader, "fc", Adapter(8, 8)),
    "reader.fc is parametrized": lambda m: parametrize.register_parametrization(m.reader.fc, "weight", Half()),
    "reader.fc has a forward of its own": lambda m: setattr(m.reader.fc, "forward", m.reader.fc.forward),
}


@pytest.mark.parametrize("reason", SPOILED)
def test_a_layer_that_may_not_be_relied_on_is_named(reason):
    original = model(Child())
    SPOILED[reason](original)
    found = fl.patch_model(original)
    assert "norm_for_product" not in rules(found)
    said = {r.reason for r in fl.explain(found).skipped if r.rule == "norm_for_product"}
    expected = {
        "reader.fc is parametrized": "reader.fc is a torch.nn.utils.parametrize.ParametrizedLinear",
        "reader.fc is a Adapter": f"reader.fc is a {__name__}.Adapter",
    }.get(reason, reason)
    assert said == {f"in float32 under autocast: {expected}"}
    assert fl.explain(found).counts.fused["norm"] == 1, "fused it is, alone"
    assert seen(found)[0][0] == torch.float32


# after patching

LATER = {
    **SPOILED,
    "full backward hook": lambda m: m.reader.register_full_backward_hook(lambda *a: None),
    "child replaced": lambda m: setattr(m, "reader", block(REFUSED["residual"], fc=linear())),
    "product replaced": lambda m: setattr(m.reader, "fc", nn.Identity()),
    "forward of its own": lambda m: setattr(m.reader, "forward", lambda x: m.reader.fc(x) + x),
    "setting changed": lambda m: setattr(m.reader, "add", True),
    "child added": lambda m: setattr(m.reader, "other", nn.Tanh()),
    "dropout turned on": lambda m: setattr(m.reader.drop, "p", 0.5),
    "identity replaced": lambda m: setattr(m.reader, "skip", nn.Tanh()),
}


class Flags(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.drop, self.skip, self.add, self.other = linear(), nn.Dropout(0.0), nn.Identity(), False, None

    def forward(self, x):
        x = self.skip(self.drop(x))
        y = self.fc(x)
        if self.other is not None:
            y = self.other(x)
        return y + x if self.add else y


def first_input(m) -> list[torch.dtype]:
    """The dtype of what the child is given; a hook would be noticed, so its class's call is watched."""
    found = []
    real = nn.Module.__call__

    def call(self, *args, **kwargs):
        if self is m.reader:
            found.append(args[0].dtype)
        return real(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", dtype=LOW):
        patch.setattr(nn.Module, "__call__", call)
        m(ROWS)
    return found


@pytest.mark.parametrize("what", LATER)
def test_what_changes_after_patching_is_noticed(what):
    original = model(Flags())
    found = patched(original)
    assert first_input(found) == [LOW]
    for m in (found, original):
        torch.manual_seed(0)
        LATER[what](m)
    assert first_input(found) == [torch.float32] and first_input(original) == [torch.float32]
    results = []
    for m in (found, original):
        torch.manual_seed(0)
        results.append(seen(m)[1])
    for a, b in zip(*results, strict=True):
        assert (a is b is None) or torch.equal(a, b)


def test_a_hook_that_is_taken_off_again():
    found = patched(model(Child()))
    handle = hook(found.reader)
    assert first_input(found) == [torch.float32]
    handle.remove()
    assert first_input(found) == [LOW]


def test_a_class_given_another_forward(monkeypatch):
    class Own(Child):
        def forward(self, x):
            return self.fc(x)

    found = patched(model(Own()), exclude="reader")
    assert first_input(found) == [LOW]
    monkeypatch.setattr(Own, "forward", lambda self, x: self.fc(x) + x)
    assert first_input(found) == [torch.float32]


def test_a_child_patched_by_a_users_rule(monkeypatch):
    monkeypatch.setattr("fusedlayers.patch.rule._rules", dict(_rules))

    @register_rule
    class MineForLowNorm(Rule):
        """A rule of the user's own, whose op may ask for the dtype."""

        target = Child

        def fuse(self, m):
            return m.call(
                lambda layer, x: fused.linear_act(x, layer.fc.weight, layer.fc.bias, "identity"), m.own(), m.inputs["x"]
            )

    found = patched(model(Child()))
    assert "mine_for_low_norm" in rules(found)
    assert first_input(found) == [torch.float32]
    fl.unpatch_model(found.reader)
    assert first_input(found) == [LOW]


def test_a_compiled_call_leaves_the_cast_to_the_compiler():
    found, original = patched(model(Child())), model(Child())
    original.load_state_dict(found.state_dict())
    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=LOW), torch.no_grad():
        got = torch.compile(found, fullgraph=True, backend="eager")(ROWS)
        assert torch.equal(got, original(ROWS))


# gated MLPs


def gated(self, x):
    return self.down(self.act(self.gate(x)) * self.up(x))


def test_the_two_products_of_a_fused_gated_mlp_count_as_one():
    child = block(gated, gate=linear(), up=linear(), down=linear(), act=nn.SiLU())
    original = model(child)
    found = patched(original)
    assert rules(found) == ["norm_for_product", "gated_mlp"]
    assert first_input(found) == [LOW]
    with torch.autocast("cpu", dtype=LOW):
        assert fl.verify(found, ROWS)
    fl.unpatch_model(found.reader)
    assert first_input(found) == [torch.float32], "two products again"
    child.up = Adapter(8, 8)
    assert "norm_for_product" not in rules(patched(original))


# norms as transformers writes them


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "after an add"])
@pytest.mark.parametrize("dtype", [torch.float32, LOW], ids=str)
@pytest.mark.parametrize("form", rms_forms.FORMS, ids=lambda form: form.__name__)
def test_every_written_form_is_written_low(form, dtype, residual):
    """Forms that ask for a dtype of their own, too."""
    layer = block(lambda self, x: x, eps=1e-5)
    layer.weight = nn.Parameter(torch.randn(8, generator=torch.Generator().manual_seed(2)))
    x, added = ROWS.to(dtype), ROWS.flip(0).to(dtype) if residual else None
    want = form(layer, x, added, 1e-5)
    with torch.autocast("cpu", dtype=LOW):
        if residual:
            got = low_norm.add_low_written_norm(form, "eps", layer, x, added, layer, None)
            assert torch.equal(got[1], want[1])
            got, want = got[0], want[0]
        else:
            got = low_norm.low_written_norm(form, "eps", layer, x, layer, None)
    assert got.dtype == LOW
    torch.testing.assert_close(got, want.to(LOW), atol=0, rtol=2**-7)


# how far off


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_accuracy(norm, dtype):
    original = block(lambda self, x: self.reader(self.norm(x)), norm=norm(32), reader=Child())
    original.reader.fc = nn.Linear(32, 48)
    found = patched(original)
    names = [n for n, _ in original.named_parameters()]

    def run(module, x, *params):
        with torch.autocast("cpu", dtype=dtype, enabled=x.dtype == torch.float32):
            return torch.func.functional_call(module, dict(zip(names, params, strict=True)), (x,)).float()

    inputs = [randn(64, 32), *(p.detach().clone().requires_grad_() for p in original.parameters())]
    ratios = []
    for m in (found, original):
        exact = copy.deepcopy(m if m is original else original).double()
        doubles = [t.detach().double().requires_grad_() for t in inputs]
        out, want = run(m, *inputs), run(exact, *doubles)
        grad = randn(*out.shape, grad=False).to(dtype)
        ratios.append(
            (torch.autograd.grad(out, inputs, grad.float()), torch.autograd.grad(want, doubles, grad.float()))
        )
    (got, exact), (eager, _) = ratios
    for name, f, e, x in zip(["x", *names], got, eager, exact, strict=True):
        assert_accurate(f, e, x, name)


# the code of a forward that cannot be traced


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda self, x: self.fc(x), ("fc",)),
        (lambda self, x, y: self.fc(x) + self.other(y) + x.shape[0], ("fc",)),
        (untraceable, ("other", "fc")),
        (lambda self, x: self.fc(x, 1), None),
        (lambda self, x: self.fc(x=x), None),
        (lambda self, x: self.fc(*[x]), None),
        (lambda self, x: helper(x), None),
        (lambda self, x: (self.a if self.c else self.b)(x), None),
        (lambda self, x: self.fc(x if self.c else 0), None),
        (lambda self, x: self.fc(0 if self.c else x), None),
        (lambda self, x: self.fc(x or 0), None),
        (lambda self, x: (lambda: self.fc(x))(), None),
        (lambda self, x: [self.fc(x) for _ in range(2)], None),
        (lambda self, x: self.inner.fc(x), None),
        (lambda self, x: other.fc(x), None),  # noqa: F821
        (lambda self, x: self.fc(x) if x.dtype else 0, None),
        (lambda self, x: (locals(), self.fc(x)), None),
        (lambda x, y: y, None),
        (with_block, None),
    ],
)
def test_what_code_does_with_an_argument(function, expected):
    assert called_with(function, "x") == expected


def test_code_that_assigns_to_the_argument_or_to_self():
    def argument(self, x):
        x = self.fc(x)
        return x

    def own(self, x):
        self = self.inner
        return self.fc(x)

    def deleted(self, x):
        y = self.fc(x)
        del x
        return y

    def generator(self, x):
        yield self.fc(x)

    assert [called_with(f, "x") for f in (argument, own, deleted, generator)] == [None] * 4


def test_a_product_that_comes_to_an_untraceable_forward_later():
    found = patched(model(block(untraceable, fc=linear())))
    assert first_input(found) == [LOW]
    found.reader.other = linear()
    assert first_input(found) == [torch.float32]
    assert "norm_for_product" not in rules(patched(model(block(untraceable, fc=linear(), other=nn.Tanh()))))


def test_meta_tensors_which_have_no_autocast():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).to("meta")
    x = ROWS.to("meta")
    expected = model(x)
    assert [r.rule for r in fl.explain(fl.patch_model(model, on_fallback="raise")).fused] == ["norm_for_product"]
    assert model(x).shape == expected.shape and model(x).is_meta
