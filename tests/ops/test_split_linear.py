"""`split_linear` against eager's `F.linear` and heads, under autocast and without."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import fusedlayers as fl
from fusedlayers import inspect
from fusedlayers.ops import split_linear as op
from fusedlayers.ops.split_linear import reference, split_linear
from tests.harness import FLOATS, LAYOUTS, compare, laid_out, randn
from tests.ops.test_linear_act import kept_by, under_autocast
from tests.ops.test_split_heads import PLACES, incoming, place

pytestmark = pytest.mark.usefixtures("forced")

LOW = (torch.float16, torch.bfloat16)
SIZES = [(2, 5, 3, 2, 4), (1, 1, 3, 1, 1), (3, 1, 2, 1, 7), (2, 33, 3, 3, 24), (2, 70, 3, 1, 16)]
K = 20


def operands(sizes, dtype=torch.float32, device="cpu", needs=(1, 1, 1), bias=True):
    """x, weight and bias of a projection with these heads."""
    B, N, parts, H, D = sizes
    shapes = (B, N, K), (parts * H * D, K), (parts * H * D,)
    made = [randn(*s, dtype=dtype, device=device, grad=False, seed=i) for i, s in enumerate(shapes)]
    made[1] = made[1] * K**-0.5
    made = [t.requires_grad_(bool(need)) for t, need in zip(made, needs, strict=True)]
    return made if bias else [*made[:2], None]


def bound(sizes):
    return (lambda x, w, b, fn=fn: fn(x, w, b, *sizes) for fn in (split_linear, reference))


def compare_cast(sizes, inputs, device, low=torch.bfloat16, **settings):
    fused, eager = (under_autocast(fn, device, low) for fn in bound(sizes))
    return compare(fused, eager, inputs, computed=low, **settings)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("x_dtype", [torch.float32, "low"], ids=str)
def test_autocast(sizes, low, x_dtype, device):
    inputs = operands(sizes, device=device)
    if x_dtype == "low":
        inputs[0] = inputs[0].detach().to(low).requires_grad_()
    compare_cast(sizes, inputs, device, low)
    parts = under_autocast(next(bound(sizes)), device, low)(*inputs)
    assert [p.dtype for p in parts] == [low] * sizes[2]
    total = sum(p.float().sum() for p in parts)
    for t, g in zip(inputs, torch.autograd.grad(total, inputs), strict=True):
        assert (g.dtype, g.shape, g.stride()) == (t.dtype, t.shape, t.stride())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_without_autocast(dtype, device):
    sizes = (2, 9, 3, 2, 8)
    compare(*bound(sizes), operands(sizes, dtype, device))


@pytest.mark.parametrize("needs", list(itertools.product((0, 1), repeat=3))[1:], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_every_requires_grad(needs, bias, device):
    sizes = (2, 9, 3, 2, 8)
    inputs = operands(sizes, device=device, needs=needs, bias=bias)
    if any(t is not None and t.requires_grad for t in inputs):
        compare_cast(sizes, inputs, device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, device):
    sizes = (2, 9, 3, 2, 8)
    compare_cast(sizes, [laid_out(t, layout) for t in operands(sizes, device=device)], device)


def gradients(fn, inputs, grads, device):
    parts = under_autocast(fn, device, torch.bfloat16)(*inputs)
    used = [(p, g.to(p.dtype)) for p, g in zip(parts, grads, strict=True) if g is not None]
    return torch.autograd.grad([p for p, _ in used], inputs, [g for _, g in used])


@pytest.mark.parametrize("how", PLACES)
@pytest.mark.parametrize("unused", [(), (0,), (1, 2)], ids=str)
def test_gradients_of_every_layout(how, unused, device):
    sizes = (3, 19, 3, 2, 24)
    grads = [None if i in unused else place(g, how) for i, g in enumerate(incoming(sizes, device))]
    inputs = operands(sizes, device=device)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    parts = reference(*exact, *sizes)
    used = [(p, g.double()) for p, g in zip(parts, grads, strict=True) if g is not None]
    true = torch.autograd.grad([p for p, _ in used], exact, [g for _, g in used])
    fused, eager = (gradients(fn, inputs, grads, device) for fn in bound(sizes))
    for f, e, t in zip(fused, eager, true, strict=True):
        off, eager_off = ((v.double() - t).norm() for v in (f, e))
        assert off <= 1.5 * eager_off + 4 * torch.finfo(torch.bfloat16).eps * t.norm()


def test_higher_derivatives(device):
    sizes = (2, 3, 3, 1, 2)
    inputs = operands(sizes, torch.float64, device)
    fn = next(bound(sizes))
    assert torch.autograd.gradcheck(fn, inputs)
    assert torch.autograd.gradgradcheck(fn, inputs)


def test_second_derivatives_under_autocast(device):
    """They flow through what was cast, which is an output of the Function."""
    sizes = (2, 9, 3, 2, 8)
    found = []
    for fn in bound(sizes):
        inputs = operands(sizes, device=device)
        parts = under_autocast(fn, device, torch.bfloat16)(*inputs)
        first = torch.autograd.grad(sum(p.float().pow(3).sum() for p in parts), inputs, create_graph=True)
        found.append(torch.autograd.grad(sum(g.float().square().sum() for g in first), inputs))
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() <= 0.05 * want.norm()


def test_parameters_may_change_before_backward(device):
    """As in eager, which keeps what autocast made of them."""
    sizes = (2, 9, 3, 2, 8)
    found = []
    for fn in bound(sizes):
        inputs = operands(sizes, device=device)
        parts = under_autocast(fn, device, torch.bfloat16)(*inputs)
        with torch.no_grad():
            for t in inputs:
                t.mul_(3)
        found.append(torch.autograd.grad(sum(p.float().sum() for p in parts), inputs))
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() <= 0.02 * want.norm()


def test_no_more_is_kept_than_eager_keeps(device):
    sizes = (2, 33, 3, 2, 8)
    kept = []
    for fn in bound(sizes):
        held = kept_by(under_autocast(fn, device, torch.bfloat16), *operands(sizes, device=device))
        kept.append(sum({t.data_ptr(): t.untyped_storage().nbytes() for t in held}.values()))
    assert kept[0] <= kept[1]


def test_edits_in_place_raise_as_in_eager(device):
    for fn in bound((2, 9, 3, 2, 8)):
        q, _, _ = under_autocast(fn, device, torch.bfloat16)(*operands((2, 9, 3, 2, 8), device=device))
        with pytest.raises(RuntimeError, match=r"a function that returns multiple views|custom Function"):
            q.mul_(2)


@pytest.mark.parametrize("sizes", [(2, 5, 3, 2, 5), (2, 5, 3, 8), (-1, -1, 3, 2, 4)], ids=str)
def test_sizes_that_do_not_fit_raise_as_reshape(sizes, device):
    with fl.settings(route="auto"):
        errors = []
        for fn in (split_linear, reference):
            with pytest.raises(RuntimeError) as caught:
                under_autocast(lambda *t, fn=fn: fn(*t, *sizes), device, torch.bfloat16)(
                    *operands((2, 5, 3, 2, 4), device=device)
                )
            errors.append(str(caught.value))
        assert errors[0] == errors[1]


def test_wrong_widths_raise_as_linear(device):
    x, w, b = operands((2, 5, 3, 2, 4), device=device)
    with fl.settings(route="auto"), pytest.raises(RuntimeError, match="24"):
        under_autocast(lambda *t: split_linear(*t, 2, 5, 3, 2, 4), device, torch.bfloat16)(x[..., :7], w, b)


def test_the_bias_costs_no_pass_of_its_own(device, forced):
    """Fails where the bias's gradient is summed apart, or the parts are stacked before they are packed."""
    if forced != "triton":
        pytest.skip("no kernels here")
    sizes = (2, 9, 3, 2, 8)
    inputs = operands(sizes, device=device)
    parts = under_autocast(next(bound(sizes)), device, torch.bfloat16)(*inputs)
    grads = [torch.ones_like(p) for p in parts]
    started = inspect.launches(lambda: torch.autograd.grad(parts, inputs, grads, retain_graph=True))
    own = [k.name for k in started if k.name in ("pack", "sum_partials", "act_bias_backward")]
    assert own == ["pack", "sum_partials"]
    if device == "cuda":
        assert not any("reduce_kernel" in k.name or "CatArray" in k.name for k in started)


def test_the_same_bits_every_time(device):
    sizes = (3, 70, 3, 2, 8)
    inputs = operands(sizes, device=device)
    grads = incoming(sizes, device)
    first = gradients(next(bound(sizes)), inputs, grads, device)
    for _ in range(5):
        again = gradients(next(bound(sizes)), inputs, grads, device)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_auto_leaves_parameters_of_low_dtype_to_eager(device):
    """Nothing is cast there: the product is torch's own, and the heads keep their pass."""
    sizes = (2, 9, 3, 2, 8)
    with fl.settings(route="auto"):
        q, _, _ = split_linear(*operands(sizes, torch.bfloat16, device), *sizes)
        assert "SplitLinear" not in q.grad_fn.name()
    plan = op._plan(*operands(sizes, torch.bfloat16, device), sizes)
    assert op.auto(plan) == "reference"


def test_linear_is_torchs_own(device):
    """Bit for bit what `F.linear` and the views give."""
    sizes = (2, 33, 3, 3, 24)
    x, w, b = operands(sizes, device=device)
    with torch.autocast(device, torch.bfloat16):
        want = F.linear(x, w, b).reshape(sizes).permute(2, 0, 3, 1, 4).unbind(0)
        for got, expected in zip(split_linear(x, w, b, *sizes), want, strict=True):
            assert torch.equal(got, expected) and got.stride() == expected.stride()
