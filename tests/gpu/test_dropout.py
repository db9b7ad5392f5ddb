"""On the device: eager's masks bit for bit, the generator where eager leaves it, its training curve, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedlayers as fl
from fusedlayers.functional import scale_residual
from fusedlayers.ops import _dropout

pytestmark = pytest.mark.usefixtures("forced")  # a measured route may be eager's, which would test nothing

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = [
    (1,), (7,), (255,), (256,), (1000,), (1001,), (4098,), (33, 17), (513, 1000), (4, 197, 768), (32, 512, 768),
    (8, 1024, 1024), (3, 5, 7, 9), (64, 1026), (2048, 1028), (1081344,), (1081345,), (2162696,), (2162690,),
    (16, 64, 56, 56),
]  # fmt: skip


def generator() -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device()]


def drawn(fn, seed=1234, offset=0):
    """What `fn` returns from this state of the generator, and where it leaves the generator."""
    generator().manual_seed(seed)
    generator().set_offset(offset)
    result = fn()
    return result, generator().get_offset()


def test_masks_can_be_had_on_this_device(device):
    """Not a fallback: the check against `F.dropout` holds, and is made without touching the user's generator."""
    torch.manual_seed(5)
    torch.rand(3, device=device)
    _dropout._known.clear()
    before = generator().get_state()
    found = _dropout.knowledge(torch.ones(1, device=device).device)
    assert all(isinstance(widest, int) for widest in found.widest.values()), found
    assert found.captured is None, found
    assert torch.equal(generator().get_state(), before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_are_eagers_bit_for_bit(shape, dtype, device):
    ones, zeros = torch.ones(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
    for p, seed, offset in ((0.1, 1, 0), (0.5, 2**63 + 12345, 2**34 - 8), (0.73, 99, 2**35 + 4), (0.001, 2**31, 400)):
        expected, end = drawn(lambda p=p: F.dropout(ones, p, True), seed, offset)
        with fl.settings(route="triton"):
            got, ours = drawn(lambda p=p: scale_residual(ones, zeros, dropout_p=p, training=True), seed, offset)
        assert ours == end
        assert torch.equal(got, expected), f"p={p}: {(got != expected).sum().item()} of {got.numel()} differ"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 768), (33, 17), (16, 197, 384), (2, 3, 20)], ids=str)
def test_masks_of_a_scaled_branch(shape, dtype, device):
    """The mask of F.dropout(scale * x): of the product's dtype and alignment, not of x's."""
    x, residual = torch.ones(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
    for scale in (torch.ones(shape[-1], device=device), torch.ones(shape[-1], dtype=dtype, device=device), 1.0):
        expected, end = drawn(lambda s=scale: residual + F.dropout(s * x, 0.3, True))
        with fl.settings(route="triton"):
            got, ours = drawn(lambda s=scale: scale_residual(x, residual, s, dropout_p=0.3, training=True))
        assert ours == end and got.dtype == expected.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("layout", ["one_off", "two_off", "four_off", "channels_last", "odd_channels_last", "strided"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_of_awkward_memory(dtype, layout, p, device):
    """Misaligned, permuted and strided branches: eager's mask by either route, the generator alike."""
    if layout.endswith("off"):
        skip = {"one_off": 1, "two_off": 2, "four_off": 4}[layout]
        x = torch.ones(3 * 8192 + skip, dtype=dtype, device=device)[skip:].view(3, 8192)
    elif layout == "strided":
        x = torch.ones(64, 96, dtype=dtype, device=device)[:, ::2]
    else:
        x = torch.ones(3, 5, 7, 9 if layout.startswith("odd") else 8, dtype=dtype, device=device)
        x = x.to(memory_format=torch.channels_last)
    residual = torch.zeros_like(x)
    expected, end = drawn(lambda: residual + F.dropout(x, p, True))
    with fl.settings(route="auto"):
        got, ours = drawn(lambda: scale_residual(x, residual, dropout_p=p, training=True))
    assert ours == end and torch.equal(got, expected) and got.stride() == expected.stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaled", [True, False])
def test_backward_draws_the_same_mask(scaled, dtype, device):
    x = torch.randn(257, 1000, dtype=dtype, device=device, requires_grad=True)
    residual = torch.randn_like(x).requires_grad_()
    scale = torch.randn(1000, dtype=dtype, device=device).requires_grad_() if scaled else None
    inputs = [t for t in (x, residual, scale) if t is not None]
    g = torch.randn_like(x)

    def eager():
        y = residual + F.dropout(x if scale is None else scale * x, 0.4, True)
        return y, *torch.autograd.grad(y, inputs, g)

    def fused():
        with fl.settings(route="triton"):
            y = scale_residual(x, residual, scale, dropout_p=0.4, training=True)
            return y, *torch.autograd.grad(y, inputs, g)

    (expected, end), (got, ours) = drawn(eager), drawn(fused)
    assert ours == end
    assert torch.equal(got[1] == 0, expected[1] == 0)
    bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for a, b in zip(got, expected, strict=True):
        assert (a - b).norm() <= bound * b.norm()


def test_a_second_call_and_other_ops_stay_in_step(device):
    """A program that mixes this op with torch's own random ops reads one sequence of numbers."""

    def program(branch):
        out = [torch.rand(5, device=device)]
        h = torch.ones(64, 768, device=device)
        for _ in range(3):
            h = branch(h)
            out += [h, torch.randn(7, device=device)]
        return out

    def eager(h):
        z = F.dropout(h, 0.1, True)
        return h + z * z.new_empty(64, 1).bernoulli_(0.8).div_(0.8)

    expected, end = drawn(lambda: program(eager))
    got, ours = drawn(lambda: program(lambda h: scale_residual(h, h, dropout_p=0.1, drop_path_p=0.2, training=True)))
    assert ours == end
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


class _Block(nn.Module):
    """A transformer-like sub-block: norm, two layers, LayerScale, dropout, add."""

    def __init__(self, fused: bool):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.gamma = nn.Parameter(torch.full((64,), 0.5))
        self.fused = fused

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        z = self.down(F.gelu(self.up(self.norm(h))))
        if self.fused:
            return scale_residual(z, h, self.gamma, dropout_p=0.2, drop_path_p=0.1, training=self.training)
        z = F.dropout(self.gamma * z, 0.2, self.training)
        return h + z * z.new_empty(len(z), 1).bernoulli_(0.9).div_(0.9)


def _curve(fused: bool, device: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block(fused) for _ in range(3)), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data, target = torch.randn(512, 64, device=device), torch.randint(10, (512,), device=device)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(data), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_curve_is_eagers(device):
    fused, eager = _curve(True, device), _curve(False, device)
    assert fused == pytest.approx(eager, rel=2e-4)
    assert eager[-1] < eager[0]


@pytest.mark.parametrize("dropout", ["eager", "fast"])
def test_cuda_graph_draws_anew_on_every_replay(dropout, device):
    """Captured forward and backward: each replay another mask, its gradient that mask's, eager's own from one seed."""
    x = torch.ones(64, 768, device=device, requires_grad=True)
    residual = torch.zeros(64, 768, device=device)

    def captured(fn):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                torch.autograd.grad(fn(), x, torch.ones_like(residual))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fn()
            (dx,) = torch.autograd.grad(y, x, torch.ones_like(residual))
        torch.manual_seed(77)
        results = []
        for _ in range(3):
            graph.replay()
            results.append((y.clone(), dx.clone()))
        return results

    with fl.settings(dropout=dropout, route="triton"):  # no fallback, in the capture neither
        ours = captured(lambda: scale_residual(x, residual, dropout_p=0.3, training=True))
    for y, dx in ours:
        torch.testing.assert_close(dx, y.detach())
        assert (y == 0).float().mean().item() == pytest.approx(0.3, abs=0.02)
    assert not torch.equal(ours[0][0], ours[1][0]) and not torch.equal(ours[1][0], ours[2][0])
    if dropout == "eager":
        theirs = captured(lambda: residual + F.dropout(x, 0.3, True))
        for (a, _), (b, _) in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


def test_cold_call_inside_a_capture(device):
    """Nothing is checked or measured there: torch's own ops are captured."""
    _dropout._known.clear()
    x = torch.ones(32, 64, device=device)
    F.dropout(x, 0.5, True)
    graph = torch.cuda.CUDAGraph()
    with fl.settings(route="auto"), torch.cuda.graph(graph):
        y = scale_residual(x, x, dropout_p=0.5, training=True)
    graph.replay()
    assert set(y.unique().tolist()) == {1.0, 3.0} and not _dropout._known


@pytest.mark.parametrize("dropout", ["eager", "fast"])
def test_the_device_is_not_waited_for(dropout, device):
    x = torch.ones(512, 768, device=device, requires_grad=True)
    gamma = torch.ones(768, device=device, requires_grad=True)

    def step():
        y = scale_residual(x, x.detach(), gamma, dropout_p=0.1, drop_path_p=0.1, training=True)
        torch.autograd.grad(y, (x, gamma), torch.ones_like(y))

    with fl.settings(dropout=dropout):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_one_kernel_serves_every_seed(device):
    """Seeds and offsets change from call to call; nothing is compiled again for them."""
    from fusedlayers.kernels import launch

    x = torch.ones(64, 768, device=device)
    scale_residual(x, x, dropout_p=0.1, training=True)
    before = launch.kernels_built()
    for seed in (0, 1, 16, 2**31, 2**40 + 1):
        torch.manual_seed(seed)
        for _ in range(3):
            scale_residual(x, x, dropout_p=0.1, training=True)
    assert launch.kernels_built() == before


def test_dropout_keeps_nothing_for_backward(device):
    x = torch.ones(4096, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
    residual = torch.zeros_like(x)
    scale_residual(x, residual, dropout_p=0.1, training=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = scale_residual(x, residual, dropout_p=0.1, training=True)
    assert torch.cuda.memory_allocated() - before == y.numel() * y.element_size()


@pytest.mark.slow
@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("numel", [2**31 + 8, 2**32 + 24])
def test_masks_past_32_bits(numel, device):
    """64-bit places: in torch's kernel past 2**31 elements, in this one past 2**32."""
    x = torch.ones(numel, dtype=torch.bfloat16, device=device)
    expected, end = drawn(lambda: F.dropout(x, 0.5, True))
    with fl.settings(route="triton"):
        got, ours = drawn(lambda: scale_residual(x, torch.zeros_like(x), dropout_p=0.5, training=True))
    assert ours == end
    assert all(torch.equal(a, b) for a, b in zip(got.split(2**28), expected.split(2**28), strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_offsets_past_32_bits_forward_and_backward(dropout_p, device):
    """1,048,577 rows of 2,048: the last rows lie past 2**31 elements, and every row adds to the scale's gradient."""
    x = torch.empty(1048577, 2048, dtype=torch.bfloat16, device=device)
    x.uniform_(0.5, 2.0).requires_grad_()  # never zero, so that a zero product is a dropped one
    residual, scale = torch.randn_like(x), torch.randn(2048, device=device, requires_grad=True)
    with fl.settings(route="triton"):
        y, _ = drawn(lambda: scale_residual(x, residual, scale, dropout_p=dropout_p, training=True))
        dx, dscale = torch.autograd.grad(y, (x, scale), residual.to(y.dtype))
    with torch.no_grad():
        z, _ = drawn(lambda: F.dropout(scale * x, dropout_p, True))
        factor = (z != 0) / (1 - dropout_p)
        total = torch.zeros(2048, device=device, dtype=torch.float64)
        for rows in torch.arange(len(x), device=device).split(2**16):
            at = slice(int(rows[0]), int(rows[-1]) + 1)
            torch.testing.assert_close(y[at], residual[at] + z[at], atol=0.1, rtol=2e-2)
            dz = residual[at].float() * factor[at]
            torch.testing.assert_close(dx[at].float(), dz * scale, atol=0.1, rtol=2e-2)
            total += (dz * x[at].float()).sum(0, dtype=torch.float64)
    torch.testing.assert_close(dscale.double(), total, atol=1.0, rtol=1e-3)
