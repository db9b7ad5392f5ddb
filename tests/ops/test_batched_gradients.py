"""Several gradients at once (`is_grads_batched`), which no kernel can read, wherever their elements lie."""

from __future__ import annotations

import pytest
import torch

import fusedlayers as fl
from fusedlayers import functional as F
from tests.harness import randn

pytestmark = pytest.mark.usefixtures("forced")

CALLS = {
    "affine_act": lambda x, w: F.affine_act(x, w, 0.5, "silu"),
    "scale_residual": lambda x, w: F.scale_residual(x, x, w),
    "gated_act": lambda x, w: F.gated_act(x, x * w),
    "group_norm_act": lambda x, w: F.group_norm_act(x, 2, w[:4], None),
    "batch_norm_act": lambda x, w: F.batch_norm_act(x, None, None, w[:4], None, True, 0.1, 1e-5, "silu"),
    "layer_norm": lambda x, w: F.layer_norm(x, (6,), w),
    "linear_act": lambda x, w: F.linear_act(x, w.expand(6, 6), None, "silu"),
}


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_batched_gradients(call, permuted, device):
    x, w = randn(2, 4, 6, device=device, seed=0), randn(6, device=device, seed=1)
    y = CALLS[call](x, w)
    grads = randn(3, 4, 6, 2, device=device, grad=False, seed=2).permute(0, 3, 1, 2)
    grads = grads if permuted else grads.contiguous()
    # one by one, each a call of its own
    wanted = zip(*(torch.autograd.grad(y, (x, w), g, retain_graph=True) for g in grads), strict=True)
    with fl.settings(route="auto"):  # a forced one says that there is no kernel for it
        got = torch.autograd.grad(y, (x, w), grads, is_grads_batched=True)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, torch.stack(b), rtol=1e-4, atol=1e-5)
