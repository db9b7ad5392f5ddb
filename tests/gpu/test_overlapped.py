"""Products with their activation in one kernel, on a Hopper: results, gradients, and what the ops make of it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedlayers as fl
from fusedlayers.activations import get
from fusedlayers.ops import _overlap
from tests.harness import assert_accurate

LOW, HALF = torch.bfloat16, torch.float16
CASES = [
    ((300, 136, 72), LOW, True),  # nothing fills its tiles
    ((1000, 264, 200), HALF, False),
    ((64, 8, 8), LOW, False),
    ((5000, 640, 1024), LOW, True),
    ((2304, 3072, 768), HALF, True),
    ((20000, 512, 256), LOW, False),
]
"""Shapes (M, N, K), dtypes, whether a row of the weight is a column of the result. Each kind is a kernel to build."""


@pytest.fixture(autouse=True)
def any_size(monkeypatch, device):
    if not _overlap._built_for(torch.device(device, torch.cuda.current_device())):
        pytest.skip("the kernel is Hopper's")
    monkeypatch.setattr(_overlap, "SMALLEST", 0)
    monkeypatch.setattr(_overlap, "FEWEST_FORWARD", 8)
    monkeypatch.setattr(_overlap, "FEWEST_BACKWARD", 8)


def randn(*shape, dtype, scale=1.0, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=g, device="cuda") * scale).to(dtype)


def weight(N, K, dtype, by_rows):
    w = randn(N, K, dtype=dtype, scale=K**-0.5)
    return w if by_rows else w.t().contiguous().t()


@pytest.mark.parametrize(("shape", "dtype", "by_rows"), CASES)
@pytest.mark.parametrize("name", sorted(_overlap.FORWARD))
def test_forward(name, shape, dtype, by_rows):
    M, N, K = shape
    act = get(name)
    x, w = randn(M, K, dtype=dtype), weight(N, K, dtype, by_rows)
    for bias in (None, randn(N, dtype=dtype)):
        y = torch.full((M, N), float("nan"), device="cuda", dtype=dtype)
        z = _overlap.linear_act(x, w, bias, act, y)
        eager = F.linear(x, w, bias)
        exact = F.linear(x.double(), w.double(), None if bias is None else bias.double())
        assert_accurate(z, eager, exact, "z", terms=2)
        assert torch.equal(y, act(z)) or assert_accurate(y, act(eager), act(exact), "y", terms=2)


@pytest.mark.parametrize(("shape", "dtype", "by_rows"), CASES)
@pytest.mark.parametrize("name", sorted(_overlap.BACKWARD))
def test_backward(name, shape, dtype, by_rows):
    M, N, K = shape
    act = get(name)
    g, w, z = randn(M, K, dtype=dtype), weight(N, K, dtype, by_rows).t(), randn(M, N, dtype=dtype, seed=1)
    eager = act.backward(g @ w, z)
    exact = act.backward(g.double() @ w.double(), z.double())
    for db_dtype in (None, torch.float32):
        dz, db, h = _overlap.act_backward(g, w, z, act, db_dtype)
        assert_accurate(dz, eager, exact, "dz", terms=2)
        assert_accurate(h, act(z), act(z.double()), "h", terms=2)
        if db_dtype is None:
            assert db is None
        else:
            assert_accurate(db, eager.sum(0).to(db_dtype), exact.sum(0), "db", terms=M, computed=dtype)


@pytest.mark.parametrize("name", sorted(_overlap.BACKWARD))
def test_the_same_bits_every_time(name):
    """Tiles of many blocks, several each, and a race would show."""
    act, dtype = get(name), torch.bfloat16
    x, w, bias = randn(20000, 512, dtype=dtype), weight(1536, 512, dtype, True), randn(1536, dtype=dtype)
    found = []
    for _ in range(5):
        y = torch.empty(20000, 1536, device="cuda", dtype=dtype)
        z = _overlap.linear_act(x, w, bias, act, y)
        found.append((z, y, *_overlap.act_backward(x, w.t(), z, act, torch.float32)))
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(found[0], again, strict=True))


def test_rows_with_gaps_and_values_that_are_not_finite():
    act, dtype = get("gelu"), torch.bfloat16
    x = randn(700, 512, dtype=dtype)[:, 64:320]
    x[5, 3], x[600, 7] = float("inf"), float("nan")
    w, y = weight(264, 256, dtype, True), torch.empty(700, 264, device="cuda", dtype=dtype)
    z = _overlap.linear_act(x, w, None, act, y)
    eager = F.linear(x, w)
    assert torch.equal(z.isnan(), eager.isnan()) and torch.equal(z.isinf(), eager.isinf())
    assert torch.equal(y.isnan(), act(eager).isnan())


class Block(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(256, 1024), act, nn.Linear(1024, 256)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


@pytest.mark.parametrize("frozen", [(), ("fc1.bias",), ("fc2.weight",), ("fc1.weight",)], ids=str)
@pytest.mark.parametrize("act", [nn.GELU(), nn.SiLU(), nn.GELU(approximate="tanh")], ids=str)
def test_a_patched_block_under_autocast(act, frozen, device, monkeypatch):
    torch.manual_seed(0)
    original = Block(act).to(device)
    for name, p in original.named_parameters():
        p.requires_grad_(name not in frozen)
    patched = fl.patch_model(copy.deepcopy(original), on_fallback="raise")
    asked = []
    for name in ("linear_act", "act_backward"):
        right = getattr(_overlap, name)

        def watched(*args, right=right, name=name):
            made = right(*args)
            asked.append((name, made is not None))
            return made

        monkeypatch.setattr(_overlap, name, watched)
    x, grad = torch.randn(3, 500, 256, device=device), torch.randn(3, 500, 256, device=device)

    def results(m, x, grad, low=True):
        x = x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            y = m(x)
        y.backward(grad.to(y.dtype))
        return [y.detach(), x.grad, *(p.grad for p in m.parameters())]

    with fl.settings(autotune=False):
        found = results(patched, x, grad)
    backward = isinstance(act, nn.SiLU) or act.approximate == "none"
    assert asked == [("linear_act", True)] + [("act_backward", backward)] * ("fc2.weight" not in frozen)
    exact = results(copy.deepcopy(original).double(), x.double(), grad.double(), low=False)
    for f, e, r in zip(found, results(original, x, grad), exact, strict=True):
        assert (f is None) == (e is None)
        if e is not None:
            assert_accurate(f, e, r, terms=2, computed=torch.bfloat16)


def test_in_a_graph_and_on_another_stream():
    act, dtype = get("gelu"), torch.bfloat16
    x, w, bias = randn(2000, 256, dtype=dtype), weight(512, 256, dtype, True), randn(512, dtype=dtype)
    y = torch.empty(2000, 512, device="cuda", dtype=dtype)
    expected = _overlap.linear_act(x, w, bias, act, y), y.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = _overlap.linear_act(x, w, bias, act, y)
    y.zero_()
    z.zero_()
    graph.replay()
    assert torch.equal(z, expected[0]) and torch.equal(y, expected[1])
    streams, found = [torch.cuda.Stream() for _ in range(3)], []
    torch.cuda.synchronize()
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                y = torch.empty_like(y)
                found.append((_overlap.linear_act(x, w, bias, act, y), y))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for pair in found for a, b in zip(pair, expected, strict=True))
