"""`tests/ops/test_drop_norm.py` on a device, and eager's own masks there: bits, generator, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedlayers as fl
from fusedlayers import kernels
from fusedlayers.ops import _drop_norm, _route, _table
from fusedlayers.ops.layer_norm import dropout_layer_norm
from tests.gpu.test_dropout import drawn
from tests.harness import assert_accurate
from tests.ops.test_drop_norm import *  # noqa: F403

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = [(1, 3), (33, 17), (64, 768), (4, 197, 768), (32, 512, 768), (64, 1026), (513, 1000), (2048, 1028), (7, 1001),
          (16, 64, 56), (9, 8192)]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_are_eagers_bit_for_bit(shape, dtype, device):
    ones, zeros = torch.ones(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
    x = ones.clone().requires_grad_()
    for p, seed, offset in ((0.1, 1, 0), (0.5, 2**63 + 12345, 2**34 - 8), (0.73, 99, 2**35 + 4)):
        expected, end = drawn(lambda p=p: F.dropout(ones, p, True), seed, offset)
        with fl.settings(route="triton"):
            (y, s), ours = drawn(lambda p=p: dropout_layer_norm(x, zeros, p, True, shape[-1:]), seed, offset)
            (dx,) = torch.autograd.grad((y, s), x, (zeros, ones))
        assert ours == end
        assert torch.equal(s, expected) and torch.equal(dx, expected), f"p={p}"


@pytest.mark.parametrize("layout", ["one_off", "four_off", "strided", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_of_awkward_memory(dtype, layout, device):
    """Misaligned, permuted and strided branches: eager's mask, the generator alike."""
    if layout.endswith("off"):
        skip = {"one_off": 1, "four_off": 4}[layout]
        x = torch.ones(3 * 4096 + skip, dtype=dtype, device=device)[skip:].view(3, 4096)
    elif layout == "strided":
        x = torch.ones(64, 96, dtype=dtype, device=device)[:, ::2]
    else:
        x = torch.ones(96, 64, dtype=dtype, device=device).t()
    residual = torch.zeros_like(x)
    expected, end = drawn(lambda: F.dropout(x, 0.3, True) + residual)
    with fl.settings(route="auto"):
        got, ours = drawn(lambda: dropout_layer_norm(x, residual, 0.3, True, x.shape[-1:])[1])
    assert ours == end and torch.equal(got, expected)


@pytest.mark.parametrize("dtypes", [(a, b) for a in DTYPES for b in (a, torch.float32)], ids=str)
def test_results_and_gradients_are_eagers(dtypes, device):
    low, wide = dtypes
    x = torch.randn(257, 1000, dtype=low, device=device, requires_grad=True)
    residual, *params = (
        torch.randn(*s, dtype=wide, device=device, requires_grad=True) for s in ((257, 1000), (1000,), (1000,))
    )
    inputs = (x, residual, *params)
    grads = [torch.randn(257, 1000, dtype=wide, device=device) for _ in range(2)]
    keep = drawn(lambda: F.dropout(torch.ones_like(x), 0.4, True))[0].detach() != 0

    def eager(x, residual, w, b, dropped=lambda x: F.dropout(x, 0.4, True)):
        s = dropped(x) + residual
        return F.layer_norm(s, (1000,), w, b), s

    def both(fn, inputs, grads):
        outs = fn(*inputs)
        return *outs, *torch.autograd.grad(outs, inputs, grads)

    doubles = [t.detach().double().requires_grad_() for t in inputs]
    exact = both(lambda *t: eager(*t, dropped=lambda x: x * keep / 0.6), doubles, [g.double() for g in grads])
    expected, end = drawn(lambda: both(eager, inputs, grads))
    with fl.settings(route="triton"):
        fused = lambda x, r, w, b: dropout_layer_norm(x, r, 0.4, True, (1000,), w, b)  # noqa: E731
        got, ours = drawn(lambda: both(fused, inputs, grads))
    assert ours == end
    for i, (f, e, x) in enumerate(zip(got, expected, exact, strict=True)):
        assert_accurate(f, e, x, f"result {i}", terms=257 if i >= 4 else 1)


def test_under_autocast(device):
    """A branch in bfloat16 over a stream in float32: the norm in float32, gradients in each tensor's dtype."""
    x = torch.randn(64, 768, dtype=torch.bfloat16, device=device, requires_grad=True)
    residual, w, b = (torch.randn(*s, device=device, requires_grad=True) for s in ((64, 768), (768,), (768,)))
    with torch.autocast("cuda", dtype=torch.bfloat16), fl.settings(route="triton"):
        (y, s), _ = drawn(lambda: dropout_layer_norm(x, residual, 0.1, True, (768,), w, b))
        expected, _ = drawn(lambda: F.dropout(x, 0.1, True) + residual)
        mask, _ = drawn(lambda: F.dropout(torch.ones_like(x), 0.1, True))
    assert y.dtype == s.dtype == torch.float32
    torch.testing.assert_close(s, expected, rtol=1e-2, atol=1e-2)
    dx, dres = torch.autograd.grad(y.square().sum(), (x, residual))
    assert dx.dtype == torch.bfloat16 and dres.dtype == torch.float32
    assert torch.equal(dx == 0, mask == 0)


@pytest.mark.parametrize("dropout", ["eager", "fast"])
def test_cuda_graph_draws_anew_on_every_replay(dropout, device):
    x = torch.ones(64, 768, device=device, requires_grad=True)
    residual, ones = torch.zeros(64, 768, device=device), torch.ones(64, 768, device=device)

    def eager():
        s = F.dropout(x, 0.3, True) + residual
        return F.layer_norm(s, (768,)), s

    def step(fn):
        y, s = fn()
        return s, *torch.autograd.grad((y, s), x, (torch.zeros_like(y), ones))

    def captured(fn):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step(fn)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            s, dx = step(fn)
        torch.manual_seed(77)
        results = []
        for _ in range(3):
            graph.replay()
            results.append((s.clone(), dx.clone()))
        return results

    with fl.settings(dropout=dropout, route="triton"):  # no fallback, in the capture neither
        ours = captured(lambda: dropout_layer_norm(x, residual, 0.3, True, (768,)))
    for s, dx in ours:
        torch.testing.assert_close(dx, s.detach())
        assert (s == 0).float().mean().item() == pytest.approx(0.3, abs=0.02)
    assert not torch.equal(ours[0][0], ours[1][0]) and not torch.equal(ours[1][0], ours[2][0])
    if dropout == "eager":
        theirs = captured(eager)
        for (a, _), (b, _) in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


def test_one_kernel_serves_every_seed(device):
    from fusedlayers.kernels import launch

    x = torch.ones(64, 768, device=device, requires_grad=True)

    def step():
        y, _ = dropout_layer_norm(x, x, 0.1, True, (768,))
        y.sum().backward()

    step()
    before = launch.kernels_built()
    for seed in (0, 1, 16, 2**31, 2**40 + 1):
        torch.manual_seed(seed)
        step()
    assert launch.kernels_built() == before


def test_a_kernel_that_fails_has_not_drawn(device, monkeypatch):
    def fail(*_, **__):
        raise kernels.KernelError("no such kernel")

    monkeypatch.setattr(_drop_norm._Call, "forward", fail)
    monkeypatch.setattr(_route, "failures", {})
    x = torch.ones(64, 768, device=device)
    expected, end = drawn(lambda: F.dropout(x, 0.3, True) + x)
    own = _table.in_force(("scale_residual", 0), {})
    with fl.settings(route="auto"), own, pytest.warns(RuntimeWarning, match="runs as plain PyTorch"):
        (_, s), ours = drawn(lambda: dropout_layer_norm(x, x, 0.3, True, (768,)))
    assert ours == end and torch.equal(s, expected)


class PostNorm(nn.Module):
    """BERT's output layers, twice."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(768, 768), nn.Linear(768, 768)
        self.norm1, self.norm2 = nn.LayerNorm(768), nn.LayerNorm(768)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = self.norm1(self.drop(self.fc1(x)) + x)
        return self.norm2(self.drop(self.fc2(x)) + x)


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16], ids=str)
def test_a_patched_network_draws_as_the_original(low, device):
    torch.manual_seed(0)
    model = PostNorm().to(device)
    x = torch.randn(512, 768, device=device)

    def step():
        with torch.autocast("cuda", dtype=low, enabled=low is not torch.float32):
            y = model(x)
        return y, *torch.autograd.grad((y * x).sum() / 512, list(model.parameters()))

    expected, end = drawn(step)
    fl.patch_model(model, on_fallback="raise")
    assert [r.rule for r in fl.explain(model).fused][-1] == "linear_drop_add_norm"
    got, ours = drawn(step)
    assert ours == end
    bound = 1e-4 if low is torch.float32 else 3e-2
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and (a - b).norm() <= bound * b.norm().clamp_min(1e-3)
