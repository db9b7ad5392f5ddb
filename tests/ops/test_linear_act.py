"""`linear_act` against eager under the accuracy rule: every route, activation, dtype, size, layout and gradient."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import fusedlayers as fl
from fusedlayers import kernels
from fusedlayers.activations import get
from fusedlayers.functional import linear_act
from fusedlayers.ops import _gemm
from fusedlayers.ops import linear_act as op
from tests import harness
from tests.harness import FLOATS, LAYOUTS, RAGGED, laid_out, randn
from tests.op_table import REPRESENTATIVE

ROUTES = ("triton", "library")
compare = functools.partial(harness.compare, sums=True)


@pytest.fixture(params=ROUTES, autouse=True)
def route(request, device):
    """Each route in turn; without kernels both are the reference, whose agreement with eager holds as well."""
    runs = device == "cuda" or kernels.interpreted()
    if not runs and request.param != ROUTES[0]:
        pytest.skip("no kernels here, so one pass over the reference is enough")
    with fl.settings(route=request.param if runs else "reference"):
        yield request.param


def eager(act):
    activation = get(act)
    return lambda x, weight, bias=None: activation(F.linear(x, weight, bias))


def operands(M, N, K, dtype=torch.float32, device="cpu", needs=(1, 1, 1)):
    """x, weight and bias, scaled so that the product's elements are about 1."""
    x, weight, bias = (randn(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate([(M, K), (N, K), (N,)]))
    with torch.no_grad():
        weight.mul_(K**-0.5)
    return [t.requires_grad_(bool(n)) for t, n in zip((x, weight, bias), needs, strict=True)]


@pytest.mark.parametrize("act", REPRESENTATIVE)  # all of them: tests/modes
def test_every_activation(act, device):
    compare(lambda *t: linear_act(*t, act), eager(act), operands(17, 33, 19, device=device))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("act", ["relu", "gelu", "gelu_tanh", "silu", "tanh"])
def test_every_dtype(act, dtype, device):
    """Fails where the bias meets a rounded product, or float64 is summed in float32."""
    compare(lambda *t: linear_act(*t, act), eager(act), operands(17, 33, 19, dtype, device))


@pytest.mark.parametrize("size", [(m, n, k) for m in RAGGED for n in RAGGED for k in RAGGED if m * n * k < 20000])
def test_ragged(size, device):
    """Fails without the mask over K."""
    compare(lambda *t: linear_act(*t, "gelu"), eager("gelu"), operands(*size, device=device))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [(130, 66, 200), (129, 513, 100)], ids=str)
def test_several_tiles(size, dtype, device):
    compare(lambda *t: linear_act(*t, "relu"), eager("relu"), operands(*size, dtype, device))


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_leading_dims(lead, act, device):
    _, weight, bias = operands(1, 7, 5, device=device)
    compare(lambda *t: linear_act(*t, act), eager(act), (randn(*lead, 5, device=device), weight, bias))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_every_layout(layout, which, device):
    inputs = operands(18, 8, 6, device=device)
    inputs[which] = laid_out(inputs[which], layout)
    compare(lambda *t: linear_act(*t, "silu"), eager("silu"), inputs)


def test_leading_dims_that_do_not_collapse(device):
    _, weight, bias = operands(1, 7, 5, device=device)
    x = laid_out(randn(4, 3, 5, device=device), "transposed")
    compare(lambda *t: linear_act(*t, "gelu"), eager("gelu"), (x, weight, bias))


@pytest.mark.parametrize("needs", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
@pytest.mark.parametrize("act", ["relu", "silu", "identity"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_every_requires_grad(needs, act, has_bias, device):
    """Fails where a gradient comes that nobody asked for."""
    inputs = operands(9, 5, 7, device=device, needs=needs)[: 3 if has_bias else 2]
    compare(lambda *t: linear_act(*t, activation=act), eager(act), inputs)


@pytest.mark.parametrize("act", ["relu", "gelu"])
@pytest.mark.parametrize("grad", ["ones", "expanded", "transposed"])
def test_every_layout_of_the_gradient(grad, act, device):
    """Fails where the gradient is read as if it were contiguous."""
    inputs = operands(9, 5, 7, device=device)
    outs = [fn(*inputs) for fn in (lambda *t: linear_act(*t, act), eager(act))]
    g = {
        "ones": lambda: torch.ones((), device=device).expand(9, 5),
        "expanded": lambda: randn(1, 5, device=device, grad=False).expand(9, 5),
        "transposed": lambda: randn(5, 9, device=device, grad=False).t(),
    }[grad]()
    before = g.clone()
    got, expected = (torch.autograd.grad(y, inputs, g) for y in outs)
    assert torch.equal(g, before)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("act", ["relu", "gelu", "silu", "tanh", "identity"])
def test_higher_derivatives(act, device):
    """Fails where the pre-activation's own gradient is dropped."""
    inputs = operands(2, 3, 4, torch.float64, device)
    assert torch.autograd.gradcheck(lambda *t: linear_act(*t, act), inputs)
    assert torch.autograd.gradgradcheck(lambda *t: linear_act(*t, act), inputs)


def test_gradient_penalty(device):
    """A loss that contains a gradient: first and second derivative meet in one backward."""
    inputs = operands(6, 4, 5, torch.float64, device)

    def penalty(fn):
        y = fn(*inputs)
        (gx,) = torch.autograd.grad(y.square().sum(), inputs[0], create_graph=True)
        return torch.autograd.grad(gx.square().sum() + y.sum(), inputs, allow_unused=True)

    for a, b in zip(penalty(lambda *t: linear_act(*t, "gelu")), penalty(eager("gelu")), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("x_dtype", [torch.float32, "low"], ids=str)
@pytest.mark.parametrize("act", ["relu", "gelu", "softplus"])
def test_autocast(act, x_dtype, low, device):
    """float32 parameters under autocast: eager's dtypes, backward outside of the context."""
    inputs = operands(33, 65, 48, device=device)
    if x_dtype == "low":
        inputs[0] = inputs[0].detach().to(low).requires_grad_()

    def under(fn):
        return under_autocast(fn, device, low)

    y = under(lambda *t: linear_act(*t, act))(*inputs)
    assert y.dtype == under(eager(act))(*inputs).dtype
    for t, g in zip(inputs, torch.autograd.grad(y.float().sum(), inputs), strict=True):
        assert g.dtype == t.dtype
    compare(under(lambda *t: linear_act(*t, act)), under(eager(act)), inputs, computed=low)


def under_autocast(fn, device, low=torch.bfloat16):
    """`fn` inside autocast, but for the float64 of the accuracy rule."""

    def call(*t):
        if t[0].dtype == torch.float64:
            return fn(*t)
        with torch.autocast(device, dtype=low):
            return fn(*t)

    return call


def first_derivatives(fn):
    """Those of a loss of `fn`, as a function whose gradients are the second derivatives."""

    def call(*t):
        wanted = [i for i in t if i is not None and i.requires_grad]
        y = fn(*t)
        return torch.autograd.grad(y.to(t[0].dtype).square().sum(), wanted, create_graph=True)

    return call


def kept_by(fn, *inputs):
    """What autograd keeps of a call."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fn(*inputs)
    return kept


def check_edits(fn, inputs):
    """Nothing that autocast casts is kept in its own dtype, so all of it may change before backward, as in eager."""
    y = fn(*inputs)
    expected = torch.autograd.grad(y.float().sum(), inputs, retain_graph=True)
    with torch.no_grad():
        for t in inputs:
            t.add_(1.0)
    for a, b in zip(torch.autograd.grad(y.float().sum(), inputs), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("act", ["relu", "gelu", "softplus", "identity"])
@pytest.mark.parametrize("needs", [(1, 1, 1), (1, 0, 0), (0, 1, 1)], ids=str)
def test_autocast_second_derivatives(act, needs, device):
    """Fails where a cast inside the op is lost to autograd."""
    inputs = operands(9, 5, 7, device=device, needs=needs)
    pair = (first_derivatives(under_autocast(fn, device)) for fn in (lambda *t: linear_act(*t, act), eager(act)))
    compare(*pair, inputs, computed=torch.bfloat16)


@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_autocast_operands_may_change_before_backward(act, device):
    check_edits(under_autocast(lambda *t: linear_act(*t, act), device), operands(9, 5, 7, device=device))


@pytest.mark.parametrize("needs", [(1, 1, 1), (1, 0, 0), (0, 1, 0)], ids=str)
def test_what_backward_keeps_under_autocast(needs, device):
    """Never an operand in float32."""
    if fl.settings.route == "reference":
        pytest.skip("what eager keeps is eager's affair")
    kept = kept_by(
        under_autocast(lambda *t: linear_act(*t, "gelu"), device), *operands(9, 5, 7, device=device, needs=needs)
    )
    expected = [(9, 5), *[(9, 7)] * needs[1], *[(5, 7)] * needs[0]]
    assert sorted((tuple(t.shape), t.dtype) for t in kept) == sorted((s, torch.bfloat16) for s in expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_no_matrix_is_copied_once(autocast, device, monkeypatch):
    """x is kept as the product read it, so backward copies nothing, and x itself may go, or change."""
    if fl.settings.route == "reference":
        pytest.skip("what eager keeps is eager's affair")
    fn = under_autocast(lambda *t: linear_act(*t, "gelu"), device) if autocast else lambda *t: linear_act(*t, "gelu")
    _, weight, bias = operands(9, 5, 7, device=device)
    x = randn(3, 7, 4, device=device).detach().transpose(1, 2).requires_grad_()
    (kept,) = (t for t in kept_by(fn, x, weight, bias) if t.shape == x.shape)
    assert kept.is_contiguous()
    check_edits(lambda x: fn(x, weight, bias), [x])
    compare(lambda *t: linear_act(*t, "gelu"), eager("gelu"), (x, weight, bias))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_can_be_viewed_as_a_matrix(layout, device):
    """Fails where the copy is decided on by another rule than torch's own."""
    for shape in [(4, 3, 5), (1, 3, 5), (4, 1, 5), (2, 3, 4, 5), (5,), (4, 5), (4, 3, 1)]:
        t = laid_out(randn(*shape, device=device, grad=False), layout)
        for u in (t, t.transpose(0, -1), t.flip(0)[:1], t[:1].expand_as(t)):
            try:
                u.view(-1, u.shape[-1])
                views = True
            except RuntimeError:
                views = False
            assert _gemm.collapses(u) == views


def test_gradient_that_several_products_read_is_copied_once(device):
    """Fails where each product copies it, or one is copied that they read where it lies."""
    g = torch.ones((), device=device)
    for t in (g.expand(4, 5), g.expand(2, 2, 5), torch.ones(4, 10, device=device)[:, ::2], g.expand(3, 1)):
        assert _gemm.factor(t).is_contiguous()
    dense = torch.ones(4, 5, device=device)
    for t in (dense, dense.t(), dense[1:], dense[:, 1:], dense[:1], dense.view(2, 2, 5)):
        assert _gemm.factor(t).data_ptr() == t.data_ptr()


def test_autocast_leaves_float64_alone(device):
    inputs = operands(5, 4, 3, torch.float64, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert linear_act(*inputs, "gelu").dtype == eager("gelu")(*inputs).dtype


@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_gradient_lies_as_its_weight(act, device):
    weight = randn(7, 5, device=device, grad=False).t().requires_grad_()
    linear_act(randn(9, 7, device=device), weight, None, act).sum().backward()
    assert weight.grad.stride() == weight.stride() == (1, 5)


def test_nothing_is_multiplied_that_nobody_asked_for(device, monkeypatch):
    products = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *a, **k: products.append(1) or mm(*a, **k))
    if fl.settings.route == "reference":
        pytest.skip("eager's own backward does not call torch.mm")
    for needs, expected in [((1, 1, 1), 2), ((1, 0, 0), 1), ((0, 1, 0), 1), ((0, 0, 1), 0)]:
        products.clear()
        linear_act(*operands(5, 4, 3, device=device, needs=needs), "gelu").sum().backward()
        assert len(products) == expected


def test_bias_may_change_before_backward(device):
    inputs = operands(9, 5, 7, device=device)
    expected = torch.autograd.grad(eager("gelu")(*inputs).sum(), inputs)
    y = linear_act(*inputs, "gelu")
    with torch.no_grad():
        inputs[2].add_(3.0)
    for a, b in zip(torch.autograd.grad(y.sum(), inputs), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_operands_may_not_change_before_backward(which, act, device):
    inputs = operands(9, 5, 7, device=device)
    y = linear_act(*inputs, act)
    with torch.no_grad():
        inputs[which].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(("act", "legal"), [("relu", False), ("gelu", True)])
@pytest.mark.parametrize("shape", [(9, 7), (3, 3, 7)], ids=str)
def test_output_may_change_where_eager_allows_it(shape, act, legal, device):
    _, weight, bias = operands(9, 5, 7, device=device)
    y = linear_act(randn(*shape, device=device), weight, bias, act)
    y.add_(1.0)
    if legal:
        y.sum().backward()
        assert weight.grad is not None
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_backward_twice_is_identical(act, device):
    inputs = operands(33, 17, 9, device=device)
    y = linear_act(*inputs, act)
    first = torch.autograd.grad(y, inputs, torch.ones_like(y), retain_graph=True)
    second = torch.autograd.grad(y, inputs, torch.ones_like(y))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("act", ["relu", "gelu", "silu"])
def test_nan_and_inf_as_eager(act, device):
    """NaN passes; inf times a zero weight is NaN, as in eager. Fails with `tl.where(z > 0, z, 0)` for ReLU."""
    x, weight, bias = operands(6, 4, 5, device=device)
    with torch.no_grad():
        x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), -float("inf")
        weight[1] = 0.0
        bias[3] = -float("inf")
    compare(lambda *t: linear_act(*t, act), eager(act), (x, weight, bias))


def test_empty_batch(device):
    _, weight, bias = operands(1, 5, 7, device=device)
    x = randn(0, 7, device=device)
    with fl.settings(route="auto"):
        y = linear_act(x, weight, bias, "gelu")
        gx, gw, gb = torch.autograd.grad(y.sum(), (x, weight, bias))
    assert y.shape == (0, 5) and gx.shape == (0, 7)
    assert gw.shape == weight.shape and not gw.any() and not gb.any()


def test_no_grad_keeps_nothing(device):
    inputs = operands(5, 4, 3, device=device)
    with torch.no_grad():
        y = linear_act(*inputs, "gelu")
    assert y.grad_fn is None and not y.requires_grad
    with torch.inference_mode():
        assert linear_act(*inputs, "relu").is_inference()


def test_what_backward_keeps(device):
    """x, weight, and one activation: the output for ReLU, the pre-activation for GELU. Never both, never the bias."""
    if fl.settings.route == "reference":
        pytest.skip("what eager keeps is eager's affair")
    inputs = operands(9, 5, 7, device=device)
    for act, expected in [("relu", {(9, 7), (5, 7), (9, 5)}), ("gelu", {(9, 7), (5, 7), (9, 5)})]:
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.shape) or t, lambda t: t):
            linear_act(*inputs, act)
        assert len(kept) == 3 and set(map(tuple, kept)) == expected


def test_bad_input_raises_what_linear_raises(device):
    x, weight, bias = operands(4, 3, 6, device=device)
    bad = [
        (x, randn(3, 5, device=device), bias),
        (x, weight, randn(4, device=device)),
        (x.detach().int(), weight, bias),
        (x.double(), weight, bias),
        (x, weight, bias.to("meta")),
    ]
    with fl.settings(route="auto"):
        for inputs in bad:
            with pytest.raises(Exception) as expected:
                F.linear(*inputs)
            with pytest.raises(type(expected.value)) as got:
                linear_act(*inputs, "gelu")
            assert str(got.value) == str(expected.value)
        with pytest.raises(ValueError, match="did you mean 'silu'"):
            linear_act(x, weight, bias, "sillu")


AUTO = [("relu", "library"), ("gelu", "library"), ("silu", "library"), ("identity", "reference")]


@pytest.mark.parametrize(("act", "expected"), AUTO)
def test_auto_fuses_what_pays(act, expected):
    """With nothing to follow, eager is one call already."""
    plan = op.Plan(8, 6, 4, torch.float32, torch.float32, get(act), (8, 4), (8, 6), (torch.float32,) * 3, {})
    assert op.auto(plan) == expected


def test_exact_gelu_never_takes_the_tanh_epilogue(device):
    x = torch.empty(1, device=device)
    assert not op._has_epilogue(get("gelu"), x)
    assert op._has_epilogue(get("relu"), x)
    assert op._has_epilogue(get("gelu_tanh"), x) == (device == "cuda")
