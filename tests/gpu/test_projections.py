"""`tests/ops/test_projections.py` again, on a device, and inside attention that is patched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers import inspect
from tests.ops.test_projections import *  # noqa: F403
from tests.patch.models import twin
from tests.patch.test_projections import Attention, Untraced


def widened(kind: type[nn.Module], width: int) -> nn.Module:
    """Of real size; k and v of one head."""
    torch.manual_seed(0)
    model = kind()
    model.query, model.out, model.head_dim = nn.Linear(width, width), nn.Linear(width, width), 64
    model.key, model.value = nn.Linear(width, 64, bias=False), nn.Linear(width, 64)
    return model.cuda()


def trained(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.autocast("cuda", torch.bfloat16):
        y = model(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()])]


@pytest.mark.parametrize("kind", [Attention, Untraced])
@pytest.mark.parametrize("shape", [(8, 197, 768), (3, 49, 192), (2, 1, 128)], ids=str)
def test_patched_attention_under_autocast(shape, kind):
    original = widened(kind, shape[-1])
    patched = fl.patch_model(twin(original), on_fallback="raise")
    x = torch.randn(shape, device="cuda", requires_grad=True)
    with fl.settings(route="auto", autotune=False):  # no size is too small
        for got, want in zip(trained(patched, x), trained(original, x), strict=True):
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            torch.testing.assert_close(got, want, rtol=0.02, atol=0.02 * want.abs().max().item())
        assert "pack_sum" in [k.name for k in inspect.launches(trained, patched, x)]
