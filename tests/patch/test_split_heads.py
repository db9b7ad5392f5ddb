"""The rule for `q, k, v` of one projection: where it applies, what it leaves alone, and that nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedlayers as fl
from fusedlayers import inspect

from .models import assert_same, results, twin

pytestmark = pytest.mark.usefixtures("kernels_where_they_run")

X = (2, 5, 8)


class Attention(nn.Module):
    """As timm writes it; a subclass writes its own `heads`."""

    def __init__(self, width: int = 8, heads: int = 2):
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.heads(self.qkv(x), B, N)
        q, k = self.q_norm(q), self.k_norm(k)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))

    def heads(self, qkv, B, N):
        return qkv.reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)


class Swin(Attention):
    def heads(self, qkv, B, N):
        return qkv.reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind()


class Functions(Attention):
    def heads(self, qkv, B, N):
        shape = (B, N, 3, self.num_heads, self.head_dim)
        return torch.unbind(torch.permute(torch.reshape(qkv, shape), (2, 0, 3, 1, 4)), dim=0)


class KeysAndValues(Attention):
    def heads(self, qkv, B, N):
        q, kv = qkv.split((8, 16), dim=2)
        k, v = kv.reshape(B, -1, 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return q.reshape(B, N, self.num_heads, self.head_dim).transpose(1, 2), k, v


class OnlyTwoOfThree(Attention):
    def heads(self, qkv, B, N):
        q, k, _ = super().heads(qkv, B, N)
        return q, k, k


class NormedQueries(Attention):
    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(4), nn.LayerNorm(4)


FUSED = [Attention, Swin, Functions, KeysAndValues, OnlyTwoOfThree, NormedQueries]


RULES = ("split_projection", "split_heads")


def sites(model):
    found = fl.explain(model)
    return [r for r in (*found.fused, *found.reduced) if r.rule in RULES]


@pytest.mark.parametrize("kind", FUSED)
def test_every_spelling(kind):
    original = kind()
    patched = fl.patch_model(twin(original), on_fallback="raise", rules="split_heads")
    assert [r.name for r in sites(patched)] == [""]
    for mode in (True, False):
        for m in (original, patched):
            m.train(mode)
        assert_same(patched, original, torch.randn(X))
        with torch.no_grad():
            x = torch.randn(3, 4, 8)
            assert torch.equal(patched(x), original(x))


def test_gradients_are_eagers_to_the_bit():
    original = Attention()
    patched = fl.patch_model(twin(original), on_fallback="raise")
    x = torch.randn(X)
    for got, want in zip(results(patched, x), results(original, x), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", [Attention, Swin, Functions, OnlyTwoOfThree, NormedQueries])
@pytest.mark.parametrize("bias", [True, False])
def test_the_projection_is_taken_in(kind, bias):
    original = kind()
    if not bias:
        original.qkv.bias = None
    patched = fl.patch_model(twin(original), on_fallback="raise")
    assert [(r.name, r.rule) for r in sites(patched)] == [("qkv", "split_projection")]
    assert_same(patched, original, torch.randn(X))
    with torch.autocast("cpu", torch.bfloat16):
        report = fl.verify(patched, torch.randn(X))
    assert report and not report.fallbacks, str(report)


def test_a_projection_that_is_read_again_stays_apart():
    original = KeysAndValues()
    patched = fl.patch_model(twin(original), on_fallback="raise")
    assert [r.rule for r in sites(patched)] == ["split_heads"]


def test_an_adapter_keeps_the_heads():
    original = Attention()
    original.qkv = nn.Sequential(original.qkv)  # anything else in its place
    patched = fl.patch_model(twin(original), on_fallback="raise")
    assert [r.rule for r in sites(patched)] == ["split_heads"]
    assert_same(patched, original, torch.randn(X))


def test_the_kernel_runs():
    """Fails where the fused path is there but never taken."""
    if fl.settings.route == "reference" or torch.cuda.is_available():
        pytest.skip("no kernel runs")
    patched, x = fl.patch_model(Attention(), on_fallback="raise"), torch.randn(X)
    assert "pack" in [k.name for k in inspect.launches(lambda: patched(x).sum().backward())]


class OtherOrder(Attention):
    def heads(self, qkv, B, N):
        return qkv.reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 1, 3, 4).unbind(0)


class OtherDim(Attention):
    def heads(self, qkv, B, N):
        q, k = qkv[..., :16].reshape(B, 2, 2, 2, 10).permute(2, 0, 3, 1, 4).unbind(1)
        return q, k, k

    def forward(self, x):
        return sum(part.sum() for part in self.heads(self.qkv(x), *x.shape[:2]))


class FourParts(Attention):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 32)

    def heads(self, qkv, B, N):
        return qkv.reshape(B, N, 4, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)[:3]


class Views(Attention):
    """`view` raises where `reshape` copies."""

    def heads(self, qkv, B, N):
        return qkv.view(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)


class Indexed(Attention):
    """Parts taken one by one may be edited in place."""

    def heads(self, qkv, B, N):
        qkv = qkv.reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        return qkv[0].mul_(2), qkv[1], qkv[2]


@pytest.mark.parametrize("kind", [OtherOrder, OtherDim, FourParts, Views, Indexed])
def test_left_alone(kind):
    original = kind()
    patched = fl.patch_model(twin(original), on_fallback="raise")
    assert not sites(patched)
    assert_same(patched, original, torch.randn(X))


class ReadAgain(Attention):
    def heads(self, qkv, B, N):
        qkv = qkv.reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return q + qkv.sum(), k, v


class EditedBetween(Attention):
    def heads(self, qkv, B, N):
        seen = qkv.reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        qkv *= 2
        return seen.unbind(0)


@pytest.mark.parametrize(
    ("kind", "reason"), [(ReadAgain, "permute is also read elsewhere"), (EditedBetween, "may overwrite a value")]
)
def test_near_misses_say_why(kind, reason):
    original = kind()
    patched = fl.patch_model(twin(original), on_fallback="raise", rules="split_heads")
    found = fl.explain(original, rules="split_heads")
    assert [reason in r.reason for r in found.skipped if r.rule == "split_heads"] == [True]
    assert_same(patched, original, torch.randn(X))


class Scaled(Attention):
    """Edits a part in place: an error where gradients are recorded, elsewhere an edit of the projection."""

    def forward(self, x):
        B, N, _ = x.shape
        qkv = self.qkv(x)
        q, k, v = self.heads(qkv, B, N)
        q *= 0.5
        return F.relu(qkv + 1), (q @ k.transpose(-2, -1)) @ v


def test_edits_in_place_are_what_they_are_in_eager():
    original = Scaled()
    patched, x = fl.patch_model(twin(original), on_fallback="raise"), torch.randn(X)
    assert sites(patched)
    for m in (patched, original):
        with pytest.raises(RuntimeError, match="a function that returns multiple views"):
            m(x)
    with torch.no_grad():
        for got, want in zip(patched(x), original(x), strict=True):
            assert torch.equal(got, want)


class ReadsWhatAPartOverwrites(Attention):
    """The add reads the projection before q, a view of it, is overwritten, its relu after that."""

    def forward(self, x):
        B, N, _ = x.shape
        qkv = self.qkv(x)
        q, _, _ = self.heads(qkv, B, N)
        wide = qkv + qkv.flip(0)
        q.add_(1)
        return F.relu(wide), qkv * 1


def test_other_rules_know_what_the_parts_share():
    """Fails where the parts count as tensors of their own, so that nothing seems to overwrite the projection."""
    original = ReadsWhatAPartOverwrites()
    patched, x = fl.patch_model(twin(original), on_fallback="raise"), torch.randn(X)
    assert sites(patched)
    with torch.no_grad():
        for got, want in zip(patched(x), original(x), strict=True):
            assert torch.equal(got, want)
    assert any("overwrite" in r.reason for r in fl.explain(patched).skipped)


def test_hooks_see_what_they_saw():
    original = Attention()
    patched, x = fl.patch_model(twin(original), on_fallback="ignore"), torch.randn(X)
    seen = {}
    for name, m in (("original", original), ("patched", patched)):
        for child in ("qkv", "q_norm", "proj"):
            getattr(m, child).register_forward_hook(
                lambda _, args, out, key=(name, child): seen.update({key: (args[0].detach(), out.detach())})
            )
            getattr(m, child).register_full_backward_hook(
                lambda _, gi, go, key=(name, child, "grad"): seen.update({key: (gi[0], go[0])})
            )
        m(x.clone().requires_grad_()).sum().backward()
    assert len(seen) == 12
    for (name, *what), values in seen.items():
        for got, want in zip(values, seen[("original", *what)], strict=True):
            assert torch.equal(got, want), (name, *what)


def test_what_is_counted_stays():
    """Fails where a site without an activation, norm or add counts as one, or hides what is said of one."""

    class Block(Attention):
        def forward(self, x):
            return super().forward(x).sin() + x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return self.block(x)

    with_rule, without = fl.explain(Model()), fl.explain(Model(), rules=[r for r in fl.rules() if r not in RULES])
    assert [r.name for r in sites(Model())] == ["block.qkv"]
    assert with_rule.counts == without.counts
    assert with_rule.counts.total["residual"] == 1
    assert with_rule.counts.fused["residual"] == 0
    assert [(r.name, r.reason) for r in with_rule.skipped] == [(r.name, r.reason) for r in without.skipped] != []


def test_copies_and_compile():
    patched, x = fl.patch_model(Attention(), on_fallback="raise"), torch.randn(X)
    other = copy.deepcopy(patched)
    assert torch.equal(other(x), patched(x))
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    for got, want in zip(results(compiled, x), results(patched, x), strict=True):
        torch.testing.assert_close(got, want)


class Attended(Attention):
    """timm's arguments: a mask that may be None and a flag, both passed on."""

    def forward(self, x, attn_mask=None, is_causal=False):
        B, N, C = x.shape
        q, k, v = self.heads(self.qkv(x), B, N)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


@pytest.mark.parametrize(
    "given", [{}, {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()}, {"is_causal": True}], ids=str
)
def test_masks_pass(given):
    original = Attended()
    patched = fl.patch_model(twin(original), on_fallback="raise")
    assert sites(patched)
    assert_same(patched, original, torch.randn(X), **given)
