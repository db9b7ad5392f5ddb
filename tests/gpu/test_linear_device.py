"""What only a device shows of the layers with products: TF32, graphs, large offsets, the same bits every time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import fusedlayers as fl
from fusedlayers import inspect
from fusedlayers.functional import gated_act, gated_mlp, linear_act, mlp
from fusedlayers.ops import _gemm
from tests.harness import compare, randn

ROUTES = ("triton", "library")


@pytest.fixture(params=ROUTES)
def route(request) -> Iterator[str]:
    with fl.settings(route=request.param):
        yield request.param


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def eager(x, w, b):
    return F.gelu(F.linear(x, w, b))


def operands(M, N, K, dtype=torch.float32):
    w = randn(N, K, dtype=dtype, device="cuda", grad=False).mul_(K**-0.5)
    return randn(M, K, dtype=dtype, device="cuda"), w.requires_grad_(), randn(N, dtype=dtype, device="cuda")


@pytest.mark.parametrize("size", [(33, 17, 513), (256, 384, 512), (1000, 1001, 129)], ids=str)
def test_float32_is_ieee_unless_tf32_is_allowed(size, route):
    """A product that drops to TF32 is about 500 times as far off."""
    compare(lambda *t: linear_act(*t, "gelu"), eager, operands(*size), sums=True)


@pytest.mark.parametrize("size", [(256, 384, 512), (1000, 1001, 129)], ids=str)
def test_tf32_is_followed(size, route, tf32):
    x, w, b = operands(*size)
    compare(lambda *t: linear_act(*t, "gelu"), eager, (x, w, b), sums=True)
    off = (linear_act(x, w, b, "identity").double() - F.linear(x.double(), w.double(), b.double())).abs().max()
    assert off > 1e-5  # else it did not follow


@pytest.mark.parametrize("size", [(1000, 1001, 1000), (4096, 1024, 512), (513, 4096, 33)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_large_tiles(size, dtype, route):
    compare(lambda *t: linear_act(*t, "gelu"), eager, operands(*size, dtype), sums=True)


def test_same_bits_every_time(route):
    x, w, b = operands(1000, 513, 257, torch.bfloat16)
    w2, b2 = operands(1, 129, 513, torch.bfloat16)[1:]
    with torch.no_grad():
        w_up = w.flip(0)
    runs = []
    for _ in range(20):
        outs = linear_act(x, w, b, "gelu"), mlp(x, w, b, w2, b2), gated_mlp(x, w, w_up, w2, b)
        loss = sum(y.float().square().sum() for y in outs)
        runs.append([*outs, *torch.autograd.grad(loss, (x, w, b, w2, b2))])
    for again in runs[1:]:
        assert all(torch.equal(p, q) for p, q in zip(runs[0], again, strict=True))


@pytest.mark.parametrize("warm", [False, True])
def test_captured_in_a_graph(warm, route):
    """Sizes of their own, so that the cold capture builds its kernels inside."""
    x, w, b = operands(64 + warm, 40, 24, torch.bfloat16)
    w2, b2 = operands(1, 24, 40, torch.bfloat16)[1:]

    def step():
        y = linear_act(mlp(x, w, b, w2, b2), w, b, "silu")
        return y, *torch.autograd.grad(y.float().square().sum(), (x, w, b, w2, b2))

    torch.mm(x, x.t())  # the vendor library sets itself up outside
    expected = None
    if warm:  # on a stream of its own and kept apart from its graph, whose leaves' stream a capture may not wait for
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            expected = [t.detach().clone() for t in step()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for a, e in zip(captured, expected or step(), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.usefixtures("much_memory")
def test_more_than_2_to_the_31_elements(route):
    """M = 1,048,577 rows of 2,048: the last ones lie past 2**31 elements, in backward too."""
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GB")
    M, N, K = 1_048_577, 2_048, 16
    x, w, b = operands(M, N, K, torch.bfloat16)
    y = linear_act(x, w, b, "silu")
    g = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(M, N)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), g)
    tail = x[-5:].detach().requires_grad_()
    expected = F.silu(F.linear(tail, w, b))
    torch.testing.assert_close(y[-5:], expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(
        dx[-5:], torch.autograd.grad(expected, tail, torch.ones_like(expected))[0], rtol=0.03, atol=0.3
    )
    assert dw.isfinite().all() and db.isfinite().all()
    del dx, dw, db
    y = y.detach()
    torch.testing.assert_close(gated_act(y, y)[-5:], F.silu(y[-5:]) * y[-5:], rtol=0.02, atol=0.02)


def test_device_that_is_not_current(route):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    x, w, b = (t.detach().to("cuda:1").requires_grad_() for t in operands(33, 17, 9))
    torch.testing.assert_close(linear_act(x, w, b, "gelu"), eager(x, w, b))


def test_side_stream(route):
    inputs = operands(129, 65, 33)
    expected = torch.autograd.grad(eager(*inputs).sum(), inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = torch.autograd.grad(linear_act(*inputs, "gelu").sum(), inputs)
    torch.cuda.current_stream().wait_stream(stream)
    for a, e in zip(got, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(512, 256, 384), (2, 17, 33), (129, 1, 3)], ids=str)
def test_gradients_under_autocast_are_rounded_once(size, route):
    """To float32, where eager's go through autocast's dtype; fails where this torch can and the op does not."""
    if not _gemm._HAS_OUT_DTYPE:
        pytest.skip("needs torch.mm with out_dtype, torch 2.8")
    x, w, b = operands(*size)
    with torch.autocast("cuda", torch.bfloat16):
        y = linear_act(x, w, b, "relu")
    g = randn(*size[:2], dtype=torch.bfloat16, device="cuda", grad=False)
    dx, dw, _ = torch.autograd.grad(y, (x, w, b), g)
    dz = torch.where(y > 0, g, 0).double()
    for got, exact in ((dx, dz @ w.bfloat16().double()), (dw, dz.t() @ x.bfloat16().double())):
        assert got.dtype == torch.float32
        assert (got - exact).norm() <= 1e-4 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("is_matrix", [True, False])
@pytest.mark.parametrize("op", [mlp, gated_mlp])
def test_casts_and_copies_are_launched_once(op, is_matrix, dtype, route):
    """All parameters are cast by one launch, none of their gradients is, and x is copied once at the most."""
    w, wide = (randn(128, 128, device="cuda", seed=i) for i in range(2))
    b = randn(128, device="cuda")
    parameters = [w, b, wide, b] if op is mlp else [w, wide, w, b, b, b]

    def launches(x, parameters):
        g = torch.ones(4, 32, 128, dtype=torch.bfloat16, device="cuda")

        def step():
            with torch.autocast("cuda", torch.bfloat16):
                y = op(x, *parameters)
            torch.autograd.grad(y, (x, *dict.fromkeys(parameters)), g)

        names = [k.name for k in inspect.launches(step)]
        return sum("copy_kernel_cuda" in n for n in names), sum("multi_tensor_apply" in n for n in names)

    x = randn(4, 32, 128, dtype=torch.bfloat16, device="cuda")
    copies, casts = launches(x, [t.detach().bfloat16().requires_grad_() for t in parameters])
    assert casts == 0
    x = x.detach().to(dtype)
    if not is_matrix:
        x = x.view(4, 128, 32).transpose(1, 2)
    expected = copies + (dtype is torch.float32 or not is_matrix)
    if dtype is torch.float32 and op is gated_mlp:
        expected += 1  # x's gradient is a sum of two products
    if _gemm._HAS_OUT_DTYPE:
        assert launches(x.requires_grad_(), parameters) == (expected, 1)
