"""`verify` on a GPU, whose draws depend on the dtype: the float64 reference is given those of the original."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.patch.replay import Recording, Replaying
from tests.patch.test_verify import Scaled


class Checkpointed(nn.Module):
    """Draws again in backward, which on a GPU has a thread of its own."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.first, self.inner, self.reentrant = nn.Linear(8, 8), Scaled(), reentrant

    def forward(self, x):
        return checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [Scaled, lambda: Checkpointed(True), lambda: Checkpointed(False)])
def test_dropout_has_a_reference(make, precision, device):
    torch.manual_seed(0)
    model = fl.patch_model(make().to(device))
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
        report = fl.verify(model, torch.randn(256, 8, device=device))
    assert report, str(report)
    assert report.reference == "float64"
    assert max(c.eager_error for c in report.comparisons) < (0.2 if precision == "bf16" else 1e-2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_backwards_own_thread_is_recorded(reentrant, device):
    model, recording = Checkpointed(reentrant).to(device), Recording()
    x = torch.randn(16, 8, device=device, requires_grad=True)
    with recording:
        out = model(x)
        forward = len(recording.draws)
        out.sum().backward()
    assert forward == 4 and len(recording.draws) == 8
    assert [kept.dtype for _, kept in recording.draws[:4]] == [torch.bool, torch.float32, torch.bool, torch.bool]


def test_fused_attention_keeps_its_draws(device):
    x = torch.randn(2, 4, 16, 32, device=device, dtype=torch.bfloat16)
    recording = Recording()
    with recording:
        nn.functional.scaled_dot_product_attention(x, x, x)
    assert not recording.draws
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), recording:
        first = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), Replaying(recording):
        second = nn.functional.scaled_dot_product_attention(x.double(), x.double(), x.double(), dropout_p=0.5)
    torch.testing.assert_close(first.double(), second, rtol=0.05, atol=0.05)
    with (
        pytest.raises(RuntimeError, match="does not show"),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION),
        Recording(),
    ):
        nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
