"""Patched models on a device: the kernels in place of the layers, against the original, in every precision."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from tests.patch import test_random_forwards as random_forwards

from .pooling import DRAWS, assert_verified


class Bottleneck(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1, bias=False)
        self.bn1, self.bn2, self.relu = nn.BatchNorm2d(width), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.down = nn.Sequential(nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width))
        self.head = nn.Sequential(nn.Conv2d(width, width, 1), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.down(x)
        return self.head(self.relu(out))


class Block(nn.Module):
    def __init__(self, width: int = 96, p: float = 0.1, kind: type = nn.LayerNorm):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = kind(width), kind(width), kind(width)
        self.mix, self.gamma, self.drop = nn.Linear(width, width), nn.Parameter(torch.rand(width)), nn.Dropout(p)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.gamma * self.mix(self.norm1(x)))
        x = x + self.fc2(self.act(self.fc1(self.norm2(x))))
        return x + self.down(F.silu(self.gate(self.norm3(x))) * self.up(self.norm3(x)))


def images(device: str) -> Tensor:
    return torch.randn(8, 64, 33, 31, device=device).to(memory_format=torch.channels_last)


MODELS = {
    "bottleneck": (lambda: Bottleneck().to(memory_format=torch.channels_last), images),
    "layer norm block": (Block, lambda device: torch.randn(4, 197, 96, device=device)),
    "rms norm block": (lambda: Block(p=0.0, kind=nn.RMSNorm), lambda device: torch.randn(3, 65, 96, device=device)),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 64, 1)), images),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(96, 4, 200, 0.0, "gelu", batch_first=True),
        lambda device: torch.randn(4, 65, 96, device=device),
    ),
}


@pytest.fixture(params=MODELS)
def case(request, device):
    torch.manual_seed(0)
    make, data = MODELS[request.param]
    return fl.patch_model(make().to(device), on_fallback="raise"), data(device)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("route", ["auto", "triton"])
def test_patched_equals_original_in_every_precision(case, training, route, device):
    model, x = case
    model.train(training)
    with fl.settings(route=route):
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast(device, dtype):
                report = fl.verify(model, x)
            assert report, str(report)
        for dtype in (torch.float32, torch.bfloat16):
            report = fl.verify(model.to(dtype), x.to(dtype))
            assert report, str(report)
            assert not report.fallbacks


def test_dropout_draws_the_masks_of_the_original(device):
    torch.manual_seed(0)
    model, x = Block(p=0.5).to(device), torch.randn(4, 197, 96, device=device)
    patched = fl.patch_model(copy.deepcopy(model), on_fallback="raise")
    outs = []
    for m in (model, patched):
        torch.manual_seed(7)
        outs.append((m(x), torch.rand(4, device=device)))
    torch.testing.assert_close(outs[1][0], outs[0][0], rtol=1e-3, atol=1e-3)
    assert torch.equal(outs[0][1], outs[1][1]), "the generator moved on as the original's"


@pytest.mark.parametrize("start", [0, 40])
def test_random_forwards(device, start):
    """In float64, where no rounding hides a wrong mask or a lost edit."""
    for seed in range(start, start + 40):
        random_forwards.assert_same(random_forwards.write(seed), device, torch.float64)


@pytest.mark.parametrize("start", [0, 40])
def test_random_forwards_by_kernels(device, start):
    """In float32, on the kernels, under the accuracy rule."""
    verified = 0
    for seed in range(start, start + 40):
        torch.manual_seed(seed)
        source = random_forwards.write(seed)
        original, x = random_forwards.make(source).to(device), torch.randn(4, 6, 5, device=device)
        patched = fl.patch_model(copy.deepcopy(original), on_fallback="raise")
        for mode in (True, False):
            try:
                sum((o * o).sum() for o in original.train(mode)(x.clone().requires_grad_())).backward()
            except RuntimeError:  # an in-place edit of what backward needs
                continue
            patched.train(mode)
            batches = [x, *(torch.randn(4, 6, 5, device=device) for _ in range(DRAWS - 1))]
            with fl.settings(route="triton"):
                report = fl.verify(patched, x)
                if "was forced and cannot run" in report.error:  # a broadcast, which torch's own ops take
                    continue
                assert_verified(lambda i, m=patched, xs=batches: fl.verify(m, xs[i]), source)
            verified += 1
    assert verified > 40


def test_moved_to_the_cpu_after_patching(case):
    model, x = case
    assert fl.verify(model.eval().cpu(), x.cpu())


def test_training_to_the_same_weights(device):
    torch.manual_seed(0)
    model, x = Block(p=0.1).to(device), torch.randn(4, 64, 96, device=device)
    patched = fl.patch_model(copy.deepcopy(model), on_fallback="raise")
    for m in (model, patched):
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(m.parameters(), 1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(patched.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
