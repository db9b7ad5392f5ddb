"""Reads and writes stay inside their tensors: ragged sizes, one row, one feature, buffers with watched neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.harness import compare, laid_out, run
from tests.modes.matrix import pair, size
from tests.op_table import OPS, Op

pytestmark = [pytest.mark.usefixtures("forced"), pytest.mark.filterwarnings("ignore")]

CASES = [(op, "gelu" if op.activated else "-") for op in OPS.values()]
every_op = pytest.mark.parametrize(("op", "act"), CASES, ids=[op.name for op, _ in CASES])
CANARY, MARGIN = 1234.0, 64


class Guard:
    """Hands out the inside of a larger buffer wherever an op allocates, and looks at the margins afterwards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.buffers: list[tuple[Tensor, int]] = []
        self.real = torch.empty_strided
        like, empty, new = torch.empty_like, torch.empty, torch.Tensor.new_empty
        monkeypatch.setattr(torch, "empty_like", lambda t, **kw: self.within(like(t, **kw)))
        monkeypatch.setattr(torch, "empty", lambda *a, **kw: self.within(empty(*a, **kw)))
        monkeypatch.setattr(torch, "empty_strided", lambda *a, **kw: self.within(self.real(*a, **kw)))
        monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, *a, **kw: self.within(new(t, *a, **kw)))

    def within(self, t: Tensor) -> Tensor:
        if not t.is_floating_point() or t.is_meta or t.numel() == 0:
            return t
        count = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        buffer = self.real((count + 2 * MARGIN,), (1,), dtype=t.dtype, device=t.device).fill_(CANARY)
        self.buffers.append((buffer, count))
        return buffer.as_strided(t.shape, t.stride(), MARGIN)

    def assert_untouched(self) -> None:
        assert self.buffers, "nothing was allocated where the guard looks"
        for buffer, count in self.buffers:
            margins = torch.cat([buffer[:MARGIN], buffer[MARGIN + count :]])
            assert (margins == buffer.new_tensor(CANARY)).all(), "a kernel wrote outside of its output"


@every_op
@pytest.mark.parametrize("shape", [((3, 5), 7), ((17,), 33), ((5, 1), 1), ((4,), 65)], ids=str)
def test_neighbours_of_outputs_stay(op: Op, act, shape, device, forced, monkeypatch):
    """Fails when a store of affine_act's forward loses its mask's `t < T`."""
    lead, n = (max(shape[0][0], op.least[0]), *shape[0][1:]), max(shape[1], op.least[1])
    inputs = op.inputs(lead, n, device=device)
    fused, eager = pair(op, act)
    outs, _ = run(eager, inputs)
    incoming = [torch.ones_like(o) for o in outs]
    with monkeypatch.context() as patched:
        guard = Guard(patched)
        torch.autograd.grad(run(fused, inputs)[0], inputs, incoming)
        if forced == "triton":
            guard.assert_untouched()


@every_op
@pytest.mark.parametrize("rows", [1, 3, 33])
@pytest.mark.parametrize("features", [1, 3, 17, 130])
def test_ragged_sizes(op: Op, act, rows, features, device):
    """Fails when backward's lanes past the edge are not taken out of the sums (`tl.where(mask, dz, 0)`)."""
    if rows >= op.least[0] and features >= op.least[1] and (op.name != "batch_norm_act" or rows > 1):
        inputs = [laid_out(t, "in_nan_buffer") for t in op.inputs((rows,), features, device=device)]
        compare(*pair(op, act), inputs, sums=True)


@every_op
def test_values_that_eager_makes_nan(op: Op, act, device):
    """NaN and infinities in x, and a zero weight times infinity, wherever eager has them, and nowhere else."""
    fused, eager = pair(op, "relu" if op.activated else act)  # torch's own gelu makes NaN of inf in some CPU loops
    for value in (math.nan, math.inf, -math.inf):
        found = []
        for fn in (fused, eager):
            inputs = op.inputs(*size(op), device=device)
            with torch.no_grad():
                inputs[0][-1, -1].fill_(value)
                if len(inputs) > 1:
                    inputs[1].view(-1)[0] = 0.0
            outs, grads = run(fn, inputs, [torch.ones_like(o) for o in run(eager, inputs)[0]])
            found.append([t.isnan() if t is not None else None for t in (*outs, grads[0])])
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)
