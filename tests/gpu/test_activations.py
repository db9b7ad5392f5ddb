"""Every activation on the device: odd values and kinks as torch's CUDA kernels have them, CUDA autocast's dtypes."""

from __future__ import annotations

import pytest
import torch

import fusedlayers as fl
from fusedlayers.activations import get
from fusedlayers.functional import affine_act
from tests.op_table import activation
from tests.test_activations import KINKS, ODD, TAILS

pytestmark = pytest.mark.usefixtures("forced")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("act", fl.activations())
def test_odd_values_and_kinks_as_eager(act, dtype, device):
    """Fails when relu uses `tl.maximum`: on a GPU the larger of NaN and 0 is 0."""
    for found in {activation(act), get(act)}:
        results = []
        for fn in (lambda x, a=found: affine_act(x, 1.0, 0.0, a), found):
            x = torch.tensor(ODD + KINKS, dtype=dtype, device=device, requires_grad=True)
            y = fn(x)
            results.append((y, *torch.autograd.grad(y, x, torch.full_like(y, 0.75))))
        for what, a, b in zip(("value", "slope"), *results, strict=True):
            limit = 2e-6 if dtype == torch.float32 else 1e-13
            torch.testing.assert_close(a, b, rtol=limit, atol=limit, equal_nan=True, msg=lambda m, w=what: f"{w}: {m}")


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh", "mish", "softplus", "elu", "tanh", "silu", "quick_gelu"])
def test_tails(act, device):
    """Off by at most eager's error and a few ulp of the largest value, in windows of a unit each."""
    found = get(act)
    z = torch.linspace(-40, 40, 80 * 256 + 1, device=device)[:-1]
    exact = TAILS.get(act, found)(z.double())
    fused, eager = ((t.double() - exact).abs().view(80, 256) for t in (affine_act(z, 1.0, 0.0, act), found(z)))
    size = exact.abs().view(80, 256).amax(1)
    assert (fused.amax(1) <= 1.5 * eager.amax(1) + 4 * torch.finfo(torch.float32).eps * size + 1e-30).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act", fl.activations())
def test_autocast_dtype(act, dtype, device):
    with torch.autocast("cuda", dtype=dtype):
        expected = get(act)(torch.randn(4, dtype=dtype, device=device)).dtype
        assert expected == (torch.float32 if "cuda" in get(act).spec.autocast_fp32 else dtype)
        assert affine_act(torch.randn(4, 3, dtype=dtype, device=device), 2.0, 1.0, act).dtype == expected
