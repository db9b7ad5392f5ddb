"""`tests/ops/test_split_heads.py` again, on a device, and inside attention that is patched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers import inspect
from tests.ops.test_split_heads import *  # noqa: F403
from tests.patch.models import twin
from tests.patch.test_split_heads import Attention


class ByHand(Attention):
    """Without the fused attention, whose backward may add up in another order each time."""

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.heads(self.qkv(x), B, N)
        attention = ((q * self.head_dim**-0.5) @ k.transpose(-2, -1)).softmax(-1)
        return self.proj((attention @ v).transpose(1, 2).reshape(B, N, C))


def trained(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.autocast("cuda", torch.bfloat16):
        y = model(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), list(model.parameters()))]


@pytest.mark.parametrize("shape", [(8, 197, 768), (3, 49, 192), (2, 1, 128)], ids=str)
def test_patched_attention_under_autocast(shape):
    """To the bit: nothing but the place of the gradients differs."""
    torch.manual_seed(0)
    original = ByHand(shape[-1], shape[-1] // 64).cuda()
    patched = fl.patch_model(twin(original), on_fallback="raise", rules="split_heads")
    x = torch.randn(shape, device="cuda")
    for got, want in zip(trained(patched, x), trained(original, x), strict=True):
        assert torch.equal(got, want)
    assert "pack" in [k.name for k in inspect.launches(trained, patched, x)]


def test_patched_fused_attention_under_autocast():
    torch.manual_seed(0)
    original = Attention(768, 12).cuda()
    patched = fl.patch_model(twin(original), on_fallback="raise", rules="split_heads")
    x = torch.randn(8, 197, 768, device="cuda")
    for got, want in zip(trained(patched, x), trained(original, x), strict=True):
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02 * want.abs().max().item())
    names = [k.name for k in inspect.launches(trained, patched, x)]
    assert "pack" in names and not any("CatArray" in name for name in names)
