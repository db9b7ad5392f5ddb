"""`norm(dropout(x) + residual)`: post-norm and pre-norm blocks, what stands in the way, what changes after patching."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedlayers as fl

from .models import assert_same, twin
from .test_builtin_rules import block, check, sites

ROWS = torch.randn(4, 7, 6)
FUSED = ("drop_add_norm", ("drop", "norm"))


def post_norm(self, x):
    """BERT's output layers."""
    h = self.drop(self.fc(x))
    return self.norm(h + x)


def model(forward=post_norm, drop=None, norm=None, **children) -> nn.Module:
    drop, norm = drop or nn.Dropout(0.3), norm or nn.LayerNorm(6)
    return block(forward, fc=nn.Linear(6, 6, bias=False), drop=drop, norm=norm, **children)


@pytest.mark.parametrize("norm", [nn.LayerNorm(6), nn.LayerNorm(6, elementwise_affine=False), nn.RMSNorm(6)], ids=str)
def test_the_end_of_a_post_norm_block(norm):
    patched = check(model(norm=norm), ROWS, FUSED)
    report = fl.explain(patched)
    assert not report.skipped and not report.reduced
    assert "(1/1 norms, 1/1 adds, 0/0 activations)" in str(report)


def test_every_call_reads_p_and_the_mode(joined):
    original = model()
    patched = fl.patch_model(twin(original), on_fallback="raise")
    for p, training in ((0.3, True), (0.3, False), (0.6, True), (0.0, True), (1.0, True)):
        for m in (original, patched):
            m.train()
            m.drop.p = p
            m.drop.train(training)  # the dropout alone
        torch.manual_seed(2)
        got = patched(ROWS)
        torch.manual_seed(2)
        torch.testing.assert_close(got, original(ROWS))
    assert [p for p, _ in joined] == [0.3, 0.6, 1.0]


def test_functional_dropout_and_either_order_of_the_sum(joined):
    def forward(self, x):
        return self.norm(x + F.dropout(self.fc(x), 0.3, self.training))

    def added(self, x):
        h = self.fc(x)
        h = F.dropout(h, p=0.3, training=self.training)
        h += x
        return self.norm(h)

    for f in (forward, added):
        patched = fl.patch_model(block(f, fc=nn.Linear(6, 6, bias=False), norm=nn.LayerNorm(6)), on_fallback="raise")
        assert "drop_add_norm" in [rule for rule, _ in sites(patched)]
        assert fl.verify(patched.train(), ROWS) and fl.verify(patched.eval(), ROWS)
    assert {p for p, _ in joined} == {0.3}


def test_the_sum_may_be_read_on(joined):
    """A pre-norm block; with one product behind the norm it is the form for that."""

    def forward(self, x):
        s = x + self.drop(self.fc(x))
        return s + self.norm(s).tanh()

    def product(self, x):
        s = x + self.drop(self.fc(x))
        return s + self.out(self.norm(s))

    check(model(forward), ROWS, FUSED)
    check(model(product, out=nn.Linear(6, 6)), ROWS, ("drop_add_norm_for_product", ("drop", "norm")))
    assert joined


def test_the_norm_for_a_product_under_autocast():
    def forward(self, x):
        return self.out(self.norm(self.drop(self.fc(x)) + x))

    original = model(forward, out=nn.Linear(6, 6))
    patched = fl.patch_model(twin(original), on_fallback="raise")
    for m in (original, patched):
        m.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(0)
        got = patched(ROWS)
        torch.manual_seed(0)
        want = original(ROWS)
        assert got.dtype == want.dtype == torch.bfloat16
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        assert fl.verify(patched, ROWS)


def test_shapes_that_broadcast():
    def forward(self, x):
        return self.norm(self.drop(self.fc(x)) + x.mean(1, keepdim=True))

    check(model(forward), ROWS, FUSED)


def test_a_scaled_branch_stays_with_its_scale():
    def forward(self, x):
        return self.norm(self.drop(self.gamma * self.fc(x)) + x)

    gamma = nn.Parameter(torch.rand(6))
    check(model(forward, gamma=gamma), ROWS, ("scale_residual", ("drop",)), ("lone_norm", ("norm",)))


def test_dropout_in_place_or_off_is_not_taken_in():
    off = model(drop=nn.Dropout(0.0))
    assert sites(off) == [("add_norm", ("norm", "drop"))]
    inplace = model(drop=nn.Dropout(0.3, inplace=True))
    assert FUSED not in sites(inplace) and not fl.explain(inplace).reduced
    check(inplace, ROWS, *sites(inplace))


def test_what_stands_in_the_way_leaves_the_smaller_sites():
    hooked = model()
    hooked.drop.register_forward_hook(lambda *_: None)
    report = fl.explain(hooked)
    assert [(r.rule, r.modules) for r in report.reduced] == [("add_norm", ("norm",))]
    assert "not drop_add_norm" in report.reduced[0].reason and "hook" in report.reduced[0].reason
    hooked = model()
    hooked.norm.register_forward_hook(lambda *_: None)
    assert [r.rule for r in fl.explain(hooked).reduced] == ["scale_residual"]

    def twice(self, x):
        h = self.drop(self.fc(x))
        return self.norm(h + x) + h

    assert [r.rule for r in fl.explain(model(twice)).reduced] == ["add_norm"]

    def random_between(self, x):
        h = self.drop(self.fc(x))
        return self.norm(h + torch.rand_like(x))

    assert "drop_add_norm" not in [rule for rule, _ in sites(model(random_between))]


def test_what_is_done_later_acts_as_on_the_original():
    for change in (
        lambda m: m.drop.register_forward_hook(lambda _, __, out: out * 2),
        lambda m: setattr(m.drop, "inplace", True),
        lambda m: setattr(m, "drop", nn.Identity()),
        lambda m: setattr(m, "norm", nn.Identity()),
    ):
        original = model().train()
        patched = fl.patch_model(twin(original), on_fallback="ignore")
        for m in (original, patched):
            change(m)
        torch.manual_seed(1)
        got = patched(ROWS)
        torch.manual_seed(1)
        torch.testing.assert_close(got, original(ROWS))
        assert fl.explain(patched).fallbacks[""]


def test_copies_and_unpatching():
    original = model().eval()
    patched = fl.patch_model(twin(original))
    assert_same(copy.deepcopy(patched), original, ROWS)
    assert type(fl.unpatch_model(patched)) is type(original)
    assert_same(patched, original, ROWS)


@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_encoder_layer(norm_first, joined):
    layer = nn.TransformerEncoderLayer(6, 2, 12, 0.1, batch_first=True, norm_first=norm_first)
    patched = fl.patch_model(layer, on_fallback="raise").train()
    patched(ROWS)
    assert [p for p, _ in joined] == ([0.1] if norm_first else [0.1, 0.1])
    assert fl.verify(patched, ROWS)
