"""Norms written in their product's dtype on a device, where autocast computes them in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers.patch.rules import low_norm


class Attention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).reshape(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        x = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width: int = 96, kind: type = nn.LayerNorm):
        super().__init__()
        self.norm1, self.attn, self.norm2 = kind(width), Attention(width), kind(width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("route", ["auto", "triton"])
def test_products_in_children(device, kind, dtype, route, monkeypatch):
    torch.manual_seed(0)
    original = nn.Sequential(Block(kind=kind), Block(kind=kind)).to(device)
    model = fl.patch_model(copy.deepcopy(original), on_fallback="ignore")
    rules = [r.rule for r in fl.explain(model).fused if "norm" in r.rule]
    assert rules == ["norm_for_product", "add_norm_for_product"] * 2
    given, real = [], low_norm._product_dtype
    monkeypatch.setattr(low_norm, "_product_dtype", lambda *args: given.append(real(*args)) or given[-1])
    x = torch.randn(4, 197, 96, device=device)
    with fl.settings(route=route), torch.autocast(device, dtype):
        report = fl.verify(model, x)
        assert report and not report.fallbacks, str(report)
        assert given and set(given) == {dtype}
        model[0].attn.qkv.register_forward_pre_hook(lambda module, args: given.append(args[0].dtype))
        given.clear()
        model[0](x)
    # the first norm, the hook on what reads it, the second norm
    assert given == [None, torch.float32, dtype]
