"""Of each op and dtype, how far the fused results are off float64 as a multiple of eager's error: printed, and held.

`pytest tests/gpu/test_ratios.py -s` shows the figures.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.harness import FACTOR, Ratio, compare
from tests.modes.matrix import HALF, short
from tests.op_table import JUMPS, OPS, REPRESENTATIVE, activation

pytestmark = [pytest.mark.usefixtures("forced"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=short)
@pytest.mark.parametrize("name", OPS)
def test_largest_ratio(name, dtype, device, capsys):
    op = OPS[name]
    acts = [a for a in (REPRESENTATIVE if op.activated else ("-",)) if op.exact or dtype not in HALF or a not in JUMPS]
    found: list[Ratio] = []
    for act in acts:
        for seed in range(3):
            inputs = op.inputs((129, 9), 257, dtype, device, seed=seed, grid=op.exact and act in JUMPS)
            fused, eager = op.bound(activation(act) if op.activated else None)
            found += compare(fused, eager, inputs, seed=seed, sums=op.sums)
    if not any(r.eager for r in found):  # nothing is rounded
        assert not any(r.fused for r in found)
        return
    off, eager_off = (math.hypot(*(getattr(r, side) for r in found)) for side in ("fused", "eager"))
    worst = max((r.value, r.what) for r in found if r.eager > 0)
    with capsys.disabled():
        print(f"\n{name:20} {short(dtype)}  pooled {off / eager_off:.2f}  worst {worst[0]:.2f} ({worst[1]})", end="")
    assert off <= FACTOR * eager_off
