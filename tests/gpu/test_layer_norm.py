"""`tests/ops/test_layer_norm.py` on a device, and sizes that need one."""

import pytest
import torch
import torch.nn.functional as F

from fusedlayers.functional import layer_norm
from tests.ops.test_layer_norm import *  # noqa: F403


@pytest.mark.parametrize("shape", [(1_048_577, 2_048), (33_000, 65_537)], ids=str)
def test_offsets_past_2_to_31(shape, device):
    """Rows in registers and rows in chunks, where an int32 offset would wrap."""
    rows, cols = shape
    if torch.cuda.mem_get_info()[0] < 12 * rows * cols:
        pytest.skip("needs 26 GB of device memory")
    x = torch.empty(shape, device=device, dtype=torch.bfloat16).normal_().requires_grad_()
    w, b = (torch.randn(cols, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    y = layer_norm(x, (cols,), w, b)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), torch.ones_like(y))
    for rows_ in (slice(0, 3), slice(rows - 3, rows)):
        part = x.detach()[rows_].requires_grad_()
        expected = F.layer_norm(part, (cols,), w, b)
        torch.testing.assert_close(y[rows_], expected)
        torch.testing.assert_close(dx[rows_], torch.autograd.grad(expected.sum(), part)[0], rtol=0.02, atol=0.02)
    xhat = sum(F.layer_norm(part.float(), (cols,)).sum(0) for part in x.detach().split(4096))
    torch.testing.assert_close(dw.float(), xhat, rtol=0.01, atol=0.01 * rows**0.5)
    assert (db == torch.tensor(float(rows), dtype=db.dtype, device=device)).all()
