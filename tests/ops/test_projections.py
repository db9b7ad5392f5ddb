"""`projections` against eager's two or three `F.linear`, under autocast and without."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import fusedlayers as fl
from fusedlayers import inspect
from fusedlayers.ops import _table
from fusedlayers.ops import projections as op
from fusedlayers.ops.projections import projections, reference
from tests.harness import FLOATS, LAYOUTS, RAGGED, compare, laid_out, randn
from tests.ops.test_linear_act import first_derivatives, kept_by, under_autocast

pytestmark = pytest.mark.usefixtures("forced")

LOW = (torch.float16, torch.bfloat16)


def flat(fn):
    """`fn` of x and all parameters in a row, the weights first."""

    def call(x, *parameters):
        half = len(parameters) // 2
        return fn(x, parameters[:half], parameters[half:])

    return call


fused, eager = flat(projections), flat(reference)


def joined(fn):
    """All outputs as one vector."""
    return lambda *t: torch.cat([y.reshape(-1) for y in fn(*t)])


def operands(M, widths, K, dtype=torch.float32, device="cpu", needs=None, biases=None, lead=None):
    """x, a weight a width, a bias a width or `None`."""
    shapes = [((M,) if lead is None else lead) + (K,), *((n, K) for n in widths), *((n,) for n in widths)]
    made = [randn(*s, dtype=dtype, device=device, grad=False, seed=i) for i, s in enumerate(shapes)]
    made = [t * K**-0.5 if 0 < i <= len(widths) else t for i, t in enumerate(made)]
    for i, has in enumerate(biases or ()):
        if not has:
            made[1 + len(widths) + i] = None
    needs = needs or (True,) * len(made)
    return [t if t is None else t.requires_grad_(bool(need)) for t, need in zip(made, needs, strict=True)]


def trained(fn):
    """The outputs that autograd knows."""
    return lambda *t: tuple(y for y in fn(*t) if y.requires_grad)


def compare_trained(inputs, device):
    """Fails where a gradient comes that nobody asked for, or an output needs one that in eager does not."""
    pair = (trained(under_autocast(fn, device)) for fn in (fused, eager))
    compare(*pair, inputs, computed=torch.bfloat16)
    compare_cast(inputs, device, backward=False)


def compare_cast(inputs, device, low=torch.bfloat16, **settings):
    return compare(under_autocast(fused, device, low), under_autocast(eager, device, low), inputs, computed=low,
                   **settings)  # fmt: skip


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("x_dtype", [torch.float32, "low"], ids=str)
@pytest.mark.parametrize("widths", [(7, 7), (24, 24, 24), (48, 16, 16)], ids=str)
def test_autocast(widths, x_dtype, low, device):
    """float32 parameters: eager's dtypes, backward outside of the context."""
    inputs = operands(33, widths, 20, device=device)
    if x_dtype == "low":
        inputs[0] = inputs[0].detach().to(low).requires_grad_()
    compare_cast(inputs, device, low)
    ys = under_autocast(fused, device, low)(*inputs)
    assert [y.dtype for y in ys] == [low] * len(widths)
    for t, g in zip(inputs, torch.autograd.grad(joined(lambda *y: y)(*ys).float().sum(), inputs), strict=True):
        assert (g.dtype, g.shape, g.stride()) == (t.dtype, t.shape, t.stride())


@pytest.mark.parametrize("M", RAGGED)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (17, 3, 33, 5), (129, 130, 7, 17), (5, 200, 40)], ids=str)
def test_ragged(M, sizes, device):
    *widths, K = sizes
    compare_cast(operands(M, widths, K, device=device), device)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_without_autocast(dtype, device):
    compare(fused, eager, operands(19, (6, 4, 4), 9, dtype, device))


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 3)], ids=str)
def test_leading_dims(lead, device):
    compare_cast(operands(0, (8, 6), 5, device=device, lead=lead), device)


@pytest.mark.parametrize("biases", list(itertools.product((0, 1), repeat=3)), ids=str)
def test_missing_biases(biases, device):
    compare_cast(operands(9, (6, 4, 4), 5, device=device, biases=biases), device)


@pytest.mark.parametrize("needs", list(itertools.product((0, 1), repeat=5)), ids=str)
def test_every_requires_grad(needs, device):
    compare_trained(operands(9, (6, 4), 5, device=device, needs=needs), device)


@pytest.mark.parametrize("needs", [(1, 1, 0, 1), (0, 1, 0, 1), (1, 0, 0, 1), (0, 0, 1, 0), (1, 0, 1, 1)], ids=str)
def test_frozen_ones_of_three(needs, device):
    """Fails where the gradients of weights that are no neighbours are cut from the wrong rows."""
    compare_trained(operands(9, (6, 4, 8), 5, device=device, needs=(*needs, *needs[1:])), device)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_missing_gradients(used, device):
    """What no loss reads gets no gradient, as in eager."""

    def some(fn):
        return under_autocast(lambda *t: tuple(fn(*t)[i] for i in used), device)

    compare(some(fused), some(eager), operands(9, (6, 4, 8), 5, device=device), computed=torch.bfloat16)


def place(g, how):
    if how == "heads":  # as attention leaves it
        return g.view(3, 3, 2, -1).transpose(1, 2).contiguous().transpose(1, 2).reshape_as(g)
    if how == "one number":
        return g[:1, :1].expand_as(g)
    return laid_out(g, how)


@pytest.mark.parametrize("how", [*LAYOUTS, "heads", "one number"])
@pytest.mark.parametrize("which", [(0,), (1, 2), (0, 1, 2)], ids=str)
def test_gradients_of_every_layout(how, which, device):
    """Fails where one is read with the strides of another."""
    inputs = operands(9, (6, 4, 8), 5, device=device)
    grads = [randn(9, n, device=device, dtype=torch.bfloat16, grad=False, seed=n) for n in (6, 4, 8)]
    placed = [place(g, how) if i in which else g for i, g in enumerate(grads)]
    dense = [g.contiguous() for g in placed]
    before = [g.clone() for g in placed]
    ys = under_autocast(fused, device)(*inputs)
    got = torch.autograd.grad(ys, inputs, placed, retain_graph=True)
    for a, b in zip(got, torch.autograd.grad(ys, inputs, dense), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(placed, before, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_every_layout(layout, which, device):
    inputs = operands(18, (8, 6), 6, device=device)
    inputs[which] = laid_out(inputs[which], layout)
    compare_cast(inputs, device)


def test_leading_dims_that_do_not_collapse(device):
    inputs = operands(0, (8, 6), 5, device=device, lead=(4, 3))
    inputs[0] = laid_out(inputs[0], "transposed")
    compare_cast(inputs, device)


def test_gradient_lies_as_its_weight(device):
    inputs = operands(9, (8, 6, 6), 6, device=device)
    inputs[2] = laid_out(inputs[2], "transposed")
    found = torch.autograd.grad(joined(under_autocast(fused, device))(*inputs).sum(), inputs)
    assert [g.stride() for g in found] == [t.stride() for t in inputs]


@pytest.mark.parametrize("needs", [(1, 1, 1, 1, 1), (1, 0, 0, 0, 0), (0, 1, 1, 0, 1), (1, 1, 0, 1, 0)], ids=str)
def test_second_derivatives(needs, device):
    """Fails where a cast inside the op is lost to autograd."""
    inputs = operands(9, (6, 4), 5, device=device, needs=needs)
    pair = (first_derivatives(joined(under_autocast(fn, device))) for fn in (fused, eager))
    compare(*pair, inputs, computed=torch.bfloat16, steepness=4.0)


def test_higher_derivatives(device):
    inputs = operands(2, (3, 2, 2), 3, torch.float64, device, biases=(1, 0, 1))
    given = [t for t in inputs if t is not None]
    call = lambda x, a, b, c, d, f: fused(x, a, b, c, d, None, f)  # noqa: E731
    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradgradcheck(call, given)


def test_gradient_penalty(device):
    """A loss that contains a gradient: first and second derivative meet in one backward."""

    def penalty(fn):
        def call(*inputs):
            a, b, c = under_autocast(fn, device)(*inputs)
            loss = (a.float() * b.float()).sum() + c.float().square().sum()
            loss = loss if inputs[0].dtype != torch.float64 else (a * b).sum() + c.square().sum()
            (gx,) = torch.autograd.grad(loss, inputs[0], create_graph=True)
            return gx.square().sum() + loss

        return call

    compare(penalty(fused), penalty(eager), operands(6, (4, 4, 2), 5, device=device), computed=torch.bfloat16,
            steepness=8.0)  # fmt: skip


@pytest.mark.parametrize("unused", [0, 1, 2])
def test_gradient_penalty_of_some(unused, device):
    """A weight whose product nobody used has no gradient, though all were cast as one."""
    found = []
    for fn in (fused, eager):
        inputs = operands(6, (4, 8, 8), 16, device=device)
        with torch.autocast(device, torch.float16):
            outputs = fn(*inputs)
        loss = sum(y.float().square().sum() for i, y in enumerate(outputs) if i != unused)
        (gx,) = torch.autograd.grad(loss, inputs[0], create_graph=True)
        found.append(torch.autograd.grad(loss + gx.square().mean(), inputs, allow_unused=True))
    assert found[1][1 + unused] is None
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * b.abs().max().item())


def test_hooks_hear_of_no_gradient_that_is_none(device):
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        inputs, heard = operands(6, (4, 8), 16, device=device), []
        for t in inputs[1:]:
            getattr(t, register)(lambda t, heard=heard: heard.append(t.sum()))
        with torch.autocast(device, torch.bfloat16):
            used, _ = fused(*inputs)
        used.float().sum().backward()
        assert len(heard) == 2


def test_operands_may_change_before_backward(device):
    """Nothing that autocast casts is kept in its own dtype."""
    inputs = operands(9, (6, 4, 4), 5, device=device)
    loss = joined(under_autocast(fused, device))(*inputs).float().sum()
    expected = torch.autograd.grad(loss, inputs, retain_graph=True)
    with torch.no_grad():
        for t in inputs:
            t.add_(1.0)
    for a, b in zip(torch.autograd.grad(loss, inputs), expected, strict=True):
        assert torch.equal(a, b)


def test_outputs_may_change(device):
    """Each is a tensor of its own."""
    inputs = operands(0, (6, 4), 5, device=device, lead=(3, 3))
    a, b = under_autocast(fused, device)(*inputs)
    assert fl.settings.route == "reference" or (a._base is None and b._base is None)
    was = b.clone()
    a.mul_(2).add_(1)
    assert torch.equal(b, was)
    (a.sum() + b.sum()).backward()
    assert torch.equal(inputs[3].grad, torch.full((6,), 18.0, device=device))


def test_gradients_are_no_views(device):
    """Fails where the gradients of the weights share a version, or may not be written."""
    inputs = operands(9, (6, 4, 4), 5, device=device)
    joined(under_autocast(fused, device))(*inputs).sum().backward()
    for t in inputs:
        assert not t.grad._is_view()
        t.grad.zero_()
    assert all(t.grad._version == 1 for t in inputs)


@pytest.mark.parametrize("needs", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=str)
def test_what_backward_keeps(needs, device):
    """x once and the weights once, both in the low dtype; eager keeps x once a product."""
    if fl.settings.route == "reference":
        pytest.skip("what eager keeps is eager's affair")
    x, weights, biases = needs
    inputs = operands(9, (6, 4, 4), 5, device=device, needs=(x, *[weights] * 3, *[biases] * 3))
    kept = kept_by(under_autocast(fused, device), *inputs)
    expected = [(9, 5)] * weights + [(14, 5)] * x
    assert sorted((tuple(t.shape), t.dtype) for t in kept) == sorted((s, torch.bfloat16) for s in expected)


def test_products_of_a_step(device, monkeypatch):
    """Fails where a gradient is multiplied that nobody asked for, or what is shared is multiplied apart."""
    if fl.settings.route == "reference":
        pytest.skip("eager's own backward does not call torch.mm")
    products, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: products.append(1) or mm(*a, **k))
    for needs, expected in [((1, 1, 1, 1), 2), ((1, 0, 0, 0), 1), ((0, 1, 1, 0), 1), ((0, 1, 0, 1), 2)]:
        inputs = operands(9, (6, 4, 4), 5, device=device, needs=(*needs, 1, 1, 1))
        y = joined(under_autocast(fused, device))(*inputs)
        products.clear()
        y.sum().backward()
        assert len(products) == expected
    inputs = operands(9, (6, 4, 4), 5, device=device, needs=(0, 0, 0, 0, 1, 1, 1))
    y = joined(under_autocast(fused, device))(*inputs)
    products.clear()
    y.sum().backward()
    assert not products


def test_backward_launches(device, forced):
    """One pass over the gradients, one over its sums."""
    if forced != "triton":
        pytest.skip("no kernels here")
    inputs = operands(33, (24, 8, 8), 16, device=device)
    ys = under_autocast(fused, device)(*inputs)
    grads = [torch.ones_like(y) for y in ys]
    started = inspect.launches(lambda: torch.autograd.grad(ys, inputs, grads, retain_graph=True))
    ours = [k.name for k in started if k.name in ("pack_sum", "sum_partials")]
    assert ours == ["pack_sum", "sum_partials"]


def test_backward_twice_is_identical(device):
    inputs = operands(130, (24, 8, 8), 16, device=device)
    y = joined(under_autocast(fused, device))(*inputs)
    first, second = (torch.autograd.grad(y, inputs, torch.ones_like(y), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nan_and_inf_as_eager(device):
    inputs = operands(6, (4, 4), 5, device=device)
    with torch.no_grad():
        inputs[0][0, 0], inputs[0][1, 1] = float("nan"), float("inf")
    compare_cast(inputs, device)


def test_empty_batch(device):
    inputs = operands(0, (6, 4), 5, device=device)
    with fl.settings(route="auto"):
        a, b = under_autocast(fused, device)(*inputs)
        found = torch.autograd.grad(a.sum() + b.sum(), inputs)
    assert a.shape == (0, 6) and b.shape == (0, 4)
    assert all(g.shape == t.shape and not g.any() for g, t in zip(found, inputs, strict=True))


def test_no_grad_keeps_nothing(device):
    inputs = operands(5, (4, 4), 3, device=device)
    with torch.no_grad():
        assert all(y.grad_fn is None for y in under_autocast(fused, device)(*inputs))
    with torch.inference_mode():
        assert all(y.is_inference() for y in fused(*inputs))


def test_eagers_own_ops_where_no_weight_is_cast(device):
    """No autocast, or weights that are low already, or float64."""
    inputs = operands(9, (6, 4), 5, device=device)
    low = [t.detach().bfloat16().requires_grad_() for t in inputs]
    for fn, given in [
        ((lambda f: f), inputs),
        ((lambda f: under_autocast(f, device)), low),
        ((lambda f: under_autocast(f, device)), [inputs[0], *low[1:]]),
        ((lambda f: f), [t.detach().double().requires_grad_() for t in inputs]),
    ]:
        with fl.settings(route="auto"):
            ours, theirs = fn(fused)(*given), fn(eager)(*given)
        assert [type(y.grad_fn) for y in ours] == [type(y.grad_fn) for y in theirs]


def test_the_route_by_itself(device, forced):
    if forced != "triton":
        pytest.skip("no kernels here")
    inputs = operands(9, (6, 4), 5, device=device)
    with fl.settings(route="auto"), _table.in_force((op.OP, inputs[0].get_device()), {}):
        assert op.fused(inputs[0], inputs[1:3], inputs[3:]) is None
        with torch.autocast(device, torch.bfloat16):
            assert op.fused(inputs[0], inputs[1:3], inputs[3:]) is not None
            with torch.no_grad():
                assert op.fused(inputs[0], inputs[1:3], inputs[3:]) is None


def test_bad_input_raises_what_linear_raises(device):
    x, a, b, c, d = operands(4, (3, 2), 6, device=device)
    bad = [
        (x, a, randn(3, 5, device=device), c, d),
        (x, a, b, randn(4, device=device), d),
        (x.detach().int(), a, b, c, d),
        (x.double(), a, b, c, d),
        (x, a, b, c, d.to("meta")),
    ]
    with fl.settings(route="auto"):
        for inputs in bad:
            with pytest.raises(Exception) as expected:
                eager(*inputs)
            with pytest.raises(type(expected.value)) as got:
                fused(*inputs)
            assert str(got.value) == str(expected.value)


def test_more_products_are_eagers(device):
    with fl.settings(route="auto"):
        compare_cast(operands(9, (6, 4, 4, 2), 5, device=device), device)


@pytest.mark.parametrize("unused", [0, 1, 2])
def test_the_kernels_take_what_gradients_there_are(unused, device, forced, monkeypatch):
    """Seen to take eager's ops where the first was missing."""
    if forced != "triton":
        pytest.skip("no kernels here")
    inputs = operands(9, (6, 4, 4), 5, device=device)
    outputs = under_autocast(fused, device)(*inputs)
    monkeypatch.setattr(op, "_composite", None)
    sum(y.float().sum() for i, y in enumerate(outputs) if i != unused).backward()


def test_a_kernel_that_fails_leaves_eagers_backward(device, forced, monkeypatch):
    if forced != "triton":
        pytest.skip("no kernels here")
    inputs = operands(9, (6, 4, 4), 5, device=device)
    monkeypatch.setattr(op._route, "failures", {})
    with fl.settings(route="auto"), _table.in_force((op.OP, inputs[0].get_device()), {}):
        y = joined(under_autocast(fused, device))(*inputs)

        def fails(*_):
            raise op.KernelError("no such device")

        monkeypatch.setattr(op, "_launch", fails)
        with pytest.warns(RuntimeWarning, match="no such device"):
            got = torch.autograd.grad(y.float().sum(), inputs)
    want = torch.autograd.grad(joined(under_autocast(eager, device))(*inputs).float().sum(), inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_widths_of_real_layers(device):
    """Several blocks each way."""
    inputs = operands(300, (256, 129, 129), 64, device=device)
    compare_cast(inputs, device)
    y = F.linear(inputs[0], inputs[1], inputs[4])
    torch.testing.assert_close(under_autocast(fused, device)(*inputs)[0].float(), y, rtol=2e-2, atol=3e-2)
