"""A sum in place has the dtype of its left operand, where a fused op gives the wider of the two."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import fusedlayers as fl

from .models import twin
from .test_builtin_rules import block


def test_a_sum_in_place_keeps_the_dtype_of_its_left_operand():
    def behind_norm(self, x, r):
        h = self.bn(x)
        h += r
        return self.act(h)

    def before_norm(self, x, r):
        h = x * 1
        h += self.drop(r)
        return self.norm(h), h

    def norm_onto(self, x, r):
        h = x * 1
        h += self.bn(r)
        return self.act(h), *(b.clone() for b in self.bn.buffers())

    low, wide = torch.randn(3, 6, 4, 4).bfloat16(), torch.randn(3, 6, 4, 4)
    rows, wide_rows = torch.randn(5, 6).bfloat16(), torch.randn(5, 6)
    models = [
        (block(behind_norm, bn=nn.BatchNorm2d(6).bfloat16(), act=nn.GELU()), (low, wide)),
        (block(behind_norm, bn=nn.BatchNorm2d(6), act=nn.GELU()), (wide, low)),
        (block(norm_onto, bn=nn.BatchNorm2d(6), act=nn.GELU()), (low, wide)),
        (block(before_norm, drop=nn.Dropout(0.5), norm=nn.LayerNorm(6).bfloat16()), (rows, wide_rows)),
    ]
    for original, args in models:
        patched = fl.patch_model(twin(original), on_fallback="raise")
        assert fl.explain(patched).fused
        for training in (True, False):
            found = []
            for m in (patched, original):
                given = [t.clone().requires_grad_() for t in args]
                torch.manual_seed(0)
                outs = m.train(training)(*given)
                outs = outs if isinstance(outs, tuple) else (outs,)
                sum(o.float().square().sum() for o in outs).backward()
                found.append([*outs, *(t.grad for t in given)])
            for a, b in zip(*found, strict=True):
                assert a.dtype == b.dtype
                off = (a.detach().float() - b.detach().float()).norm()
                assert off <= 2e-2 * b.float().norm()  # a few ulp: what is added is rounded first


def test_a_factor_without_dims_leaves_the_dtype_of_a_sum_in_place():
    """ReZero's, in float32 beside values in half precision: seen to widen the sum."""

    def scaled_first(self, x, r):
        h = self.alpha * x
        h += r
        return self.act(h)

    def scaled_last(self, x, r):
        h = r * 1
        h += self.alpha * x
        return self.act(h)

    low, wide = torch.randn(3, 4).bfloat16(), torch.randn(3, 4)
    for forward, args in itertools.product((scaled_first, scaled_last), ((low, wide), (low, low), (wide, low))):
        original = block(forward, alpha=nn.Parameter(torch.tensor(0.5)), act=nn.GELU())
        patched = fl.patch_model(twin(original), on_fallback="raise")
        assert fl.explain(patched).fused
        got, want = patched(*args), original(*args)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=2e-2, atol=4e-2)


def test_a_sum_in_place_that_no_cast_allows_raises_as_eager_does():
    def forward(self, x, r):
        h = r * 1
        h += x
        return self.act(h)

    original = block(forward, act=nn.ReLU())
    patched = fl.patch_model(twin(original), on_fallback="raise")
    assert fl.explain(patched).fused
    for m in (patched, original):
        with pytest.raises(RuntimeError, match="result type Float can't be cast to the desired output type Long"):
            m(torch.randn(3, 4), torch.ones(3, 4, dtype=torch.int64))
