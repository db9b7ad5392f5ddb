"""`rms_norm` against eager under the accuracy rule, and the forms that language models write out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusedlayers as fl
from fusedlayers import kernels
from fusedlayers.functional import rms_norm
from fusedlayers.ops import _row_norm
from fusedlayers.ops.rms_norm import rms_norm as form
from tests.harness import FLOATS, LAYOUTS, compare, laid_out, randn

pytestmark = [
    pytest.mark.usefixtures("forced"),
    # torch says on each kind of mixed call that its own fused kernel does not take it
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and:UserWarning"),
]

SIZES = [(1, 1), (3, 1), (1, 33), (3, 17), (17, 33), (33, 513), (1000, 3), (5, 1001), (2, 2050)]
NEEDS = [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 1), (0, 0, 0)]


def eager(x, shape, weight=None, eps=None, residual=None):
    if residual is None:
        return F.rms_norm(x, shape, weight, eps)
    s = x + residual
    return F.rms_norm(s, shape, weight, eps), s


def both(shape, eps=None):
    """The fused and the eager function of `(x, weight, residual)`."""
    return [lambda x, w=None, r=None, fn=fn: fn(x, shape, w, eps, r) for fn in (rms_norm, eager)]


def compare_all(x, w, r, shape=None, eps=None):
    fused, expected = both(shape or x.shape[-1:], eps)
    compare(fused, expected, (x, w))
    outs = [fn(x, w, r) for fn in (fused, expected)]
    assert outs[0][1].requires_grad == outs[1][1].requires_grad
    summed = x.requires_grad or r.requires_grad
    compare(*(fn if summed else (lambda *t, fn=fn: fn(*t)[0]) for fn in (fused, expected)), (x, w, r))


def operands(m, n, dtype=torch.float32, device="cpu", needs=(1, 1, 1)):
    """x, weight and residual."""
    return [
        randn(*s, dtype=dtype, device=device, seed=i, grad=bool(g))
        for i, (s, g) in enumerate(zip([(m, n), (n,), (m, n)], needs, strict=True))
    ]


@pytest.fixture
def short_chunks(monkeypatch):
    """Rows of over 64 elements go the way of rows too long for registers."""
    tile = _row_norm.Tile(0, 64, 4)
    for name in ("forward_tile", "backward_tile"):
        full = getattr(_row_norm, name)
        monkeypatch.setattr(_row_norm, name, lambda N, *more, full=full: tile if N > 64 else full(N, *more))
    _row_norm._cached_call.cache_clear()
    yield
    _row_norm._cached_call.cache_clear()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_size(size, dtype, device):
    # in rows of one, dx is what is left of 1 - x^2 / (x^2 + eps)
    compare_all(*operands(*size, dtype, device), eps=1.0 if size[1] == 1 else None)


@pytest.mark.parametrize("needs", NEEDS)
def test_every_requires_grad(needs, device):
    compare_all(*operands(9, 20, device=device, needs=needs))


@pytest.mark.parametrize("shape", [((7,), 1), ((4, 6), 2), ((2, 3, 5), 1), ((2, 3, 4, 5), 2), ((0, 5), 1), ((4, 0), 1)])
def test_every_shape(shape, device):
    shape, inner = shape
    inner = shape[len(shape) - inner :]
    x, r = (randn(*shape, device=device, seed=i) for i in range(2))
    w = randn(*inner, device=device, seed=2)
    with fl.settings(route="auto" if 0 in shape else fl.settings.route):
        compare_all(x, w, r, inner)
        compare(*both(inner), (x,))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [0, 2])
def test_every_layout(layout, which, device):
    inputs = [randn(*s, device=device, seed=i) for i, s in enumerate([(6, 5, 8), (8,), (6, 5, 8)])]
    inputs[which] = laid_out(inputs[which], layout)
    compare_all(*inputs)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_heads_of_a_packed_projection(dtype, device):
    """The query heads of one packed (query, key, value) projection, each normalised by itself."""
    qkv = randn(2, 3, 3, 4, 8, dtype=dtype, device=device)
    w = randn(8, dtype=dtype, device=device)
    compare(
        lambda t, w: rms_norm(t[:, :, 0], (8,), w, 1e-6), lambda t, w: F.rms_norm(t[:, :, 0], (8,), w, 1e-6), (qkv, w)
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [65, 200])
def test_long_rows(n, dtype, device, short_chunks):
    compare_all(*operands(5, n, dtype, device))
    compare(*both((n,)), operands(5, n, dtype, device)[:1])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_default_eps_is_torchs(dtype, device):
    """Tiny values show which epsilon `None` stands for."""
    x, w, _ = operands(4, 20, torch.float64, device)
    scale = 1e-8 if dtype == torch.float64 else 1e-4
    x, w = (x * scale).detach().to(dtype).requires_grad_(), w.detach().to(dtype).requires_grad_()
    expected = F.rms_norm(x, (20,), w)
    assert F.rms_norm(x, (20,)).square().mean() < 0.7
    torch.testing.assert_close(rms_norm(x, (20,), w), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_odd_rows(value, device, short_chunks):
    """NaN and inf stay in their row. Beside an inf the other values are 0, as the definition has it, and eager.

    Only torch's fused CUDA kernel gives NaN for the whole row, where it cannot load four values at once: its mean, of
    no use to an RMS norm, is inf - inf.
    """
    for n in (30, 100):
        x, w, _ = operands(5, n, device=device, needs=(1, 0, 0))
        with torch.no_grad():
            x[1, 3] = value
        results = [fn(x, w) for fn in both((n,))]
        with torch.no_grad():
            defined = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps) * w
            told = torch.where(results[1].isnan(), defined, results[1])
        torch.testing.assert_close(results[0], defined, equal_nan=True)
        torch.testing.assert_close(results[0], told, equal_nan=True)
        fused, expected = (torch.autograd.grad(y.sum(), x)[0] for y in results)
        rest = [0, 2, 3, 4]
        torch.testing.assert_close(fused[rest], expected[rest])
        assert not fused[1].isfinite().any()


@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("w_dtype", FLOATS, ids=str)
def test_every_pair_of_dtypes(x_dtype, w_dtype, device):
    """Eager takes any; the result has the dtype this torch gives."""
    x, r = (randn(4, 20, dtype=x_dtype, device=device, seed=i) for i in (0, 2))
    w = randn(20, dtype=w_dtype, device=device, seed=1)
    with fl.settings(route="auto"):
        compare(*both((20,)), (x, w))
        compare(*both((20,)), (x, w, r))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
def test_autocast_gives_eagers_dtype(x_dtype, dtype, device):
    """Torch's policy for it differs by version and device."""
    x, w, r = operands(4, 20, x_dtype, device)
    for param in {x_dtype, torch.float32}:
        weight = w.to(param).detach().requires_grad_()
        with torch.autocast(device, dtype), fl.settings(route="auto"):
            compare(*both((20,)), (x, weight))
            compare(*both((20,)), (x, weight, r))


def llama(x, w, eps=1e-6):
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    return w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def gemma(x, w, eps=1e-6):
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + w.to(wide))).type_as(x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("w_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("which", ["llama", "gemma"])
def test_written_out_forms(which, w_dtype, dtype, device):
    if dtype == torch.float64:
        w_dtype = None
    if dtype == torch.bfloat16 and which == "llama" and kernels.interpreted():
        dtype = torch.float16  # the interpreter cuts float32 off to bfloat16 where a GPU rounds
    x, w, r = operands(6, 40, dtype, device)
    w = w.to(w_dtype or dtype).detach().requires_grad_()
    eager, settings = {
        "llama": (llama, {"cast_before_weight": True}),
        "gemma": (gemma, {"offset": 1.0}),
    }[which]
    compare(lambda x, w: form(x, (40,), w, 1e-6, **settings), eager, (x, w))
    compare(lambda x, w, r: form(x, (40,), w, 1e-6, r, **settings)[0], lambda x, w, r: eager(x + r, w), (x, w, r))
    with torch.autocast(device, torch.bfloat16):
        assert form(x, (40,), w, 1e-6, **settings).dtype == eager(x, w).dtype


def test_rounding_before_the_weight(device):
    """Bit for bit what the written-out form gives, but for values on the edge between two."""
    x, w, _ = operands(64, 96, torch.float16, device)
    same = (form(x, (96,), w, 1e-6, cast_before_weight=True) == llama(x, w)).float().mean()
    other = (form(x, (96,), w, 1e-6) == llama(x, w)).float().mean()
    assert same > 0.99 > 0.9 > other


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_out_dtype(dtype, device):
    """T5's norm keeps float32 where its weight is float32; a norm read by Linears alone may be written low at once."""
    x, _, r = operands(6, 40, torch.bfloat16, device)
    w = randn(40, device=device, seed=1)
    compare(
        lambda x, w, r: form(x, (40,), w, 1e-6, r, out_dtype=dtype),
        lambda x, w, r: ((F.rms_norm((x + r).to(w.dtype), (40,), w, 1e-6)).to(_low(x, dtype)), x + r),
        (x, w, r),
    )


def _low(x, dtype):
    return torch.float64 if x.dtype == torch.float64 else dtype


def test_higher_derivatives(device):
    x, w, r = operands(2, 3, torch.float64, device)
    for settings in ({}, {"offset": 1.0}, {"cast_before_weight": True}):
        for inputs in ((x, w), (x, w, r)):
            call = lambda x, w, r=None, kw=settings: form(x, (3,), w, 1e-3, r, **kw)  # noqa: E731
            assert torch.autograd.gradcheck(call, inputs)
            assert torch.autograd.gradgradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(lambda x: rms_norm(x, (3,)), (x,))


def test_backward_twice_is_identical(device):
    inputs = operands(300, 40, torch.bfloat16, device)
    outs = rms_norm(inputs[0], (40,), inputs[1], None, inputs[2])
    first, second = (torch.autograd.grad(outs, inputs, [o.detach() for o in outs], retain_graph=True) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("edited", [0, 1])
def test_an_edited_tensor_raises_as_in_eager(edited, device):
    for fn in both((20,)):
        x, w, _ = operands(6, 20, device=device)
        x2 = x * 1.0
        y = fn(x2, w)
        with torch.no_grad():
            (x2, w)[edited].add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_bad_input_raises_what_torch_raises(device):
    x = randn(4, 6, device=device)
    for shape, params in [((5,), ()), ((6,), (randn(5, device=device),)), ((), ()), ((4, 6, 1), ()), (6, ())]:
        with fl.settings(route="auto"):
            with pytest.raises((RuntimeError, TypeError, ValueError)) as expected:
                F.rms_norm(x, shape, *params)
            with pytest.raises(type(expected.value)) as got:
                rms_norm(x, shape, *params)
        assert str(got.value) == str(expected.value)
