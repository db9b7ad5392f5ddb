"""What the property suite draws: an op, an activation, sizes, layouts, dtypes, which gradients, and theirs' layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.harness import FLOATS, laid_out
from tests.modes.matrix import HALF
from tests.op_table import JUMPS, OPS, Op, activation

RAGGED = (1, 2, 3, 7, 16, 17, 33)
LAYOUTS = ("contiguous", "transposed", "sliced", "in_nan_buffer", "expanded")


@dataclass(frozen=True)
class Case:
    """One call: everything that distinguishes it."""

    op: str
    act: str
    lead: tuple[int, ...]
    n: int
    dtype: torch.dtype
    layouts: tuple[str, ...]
    needs: tuple[bool, ...]
    grad_layout: str
    seed: int

    def __repr__(self) -> str:
        needs = "".join(str(int(n)) for n in self.needs)
        call = f"{self.op}, {self.act}, {self.lead} x {self.n}, {self.dtype}"
        return f"Case({call}, {self.layouts}, {needs}, {self.grad_layout}, {self.seed})"

    @property
    def entry(self) -> Op:
        return OPS[self.op]

    def callables(self) -> tuple[Any, Any]:
        return self.entry.bound(activation(self.act) if self.entry.activated else None)

    def inputs(self, device: str) -> list[Tensor]:
        grid = self.entry.exact and self.act in JUMPS and self.dtype in HALF
        made = self.entry.inputs(self.lead, self.n, self.dtype, device, self.needs, self.seed, grid)
        return [laid_out(t, layout) for t, layout in zip(made, self.layouts, strict=True)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    op = OPS[draw(st.sampled_from(sorted(OPS)))]
    dtype = draw(st.sampled_from(FLOATS))
    acts = [a for a in op.activations if op.exact or a not in JUMPS or dtype not in HALF]
    act = draw(st.sampled_from(acts))
    channels_second = op.shapes((3, 5), 7)[0] == (3, 7, 5)
    lead = draw(st.lists(st.sampled_from((1, 2, 3, 5)), min_size=int(channels_second), max_size=3))
    n = max(draw(st.sampled_from(RAGGED)), op.least[1])
    rows = 1
    for size in lead:
        rows *= size
    if rows < op.least[0]:
        lead = [op.least[0] + 1, *lead]
    count = len(op.shapes(tuple(lead), n))
    # an expanded operand of a norm has no variance left
    layouts = LAYOUTS if op.least == (1, 1) else LAYOUTS[:-1]
    needs = draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    if op.name == "add_layer_norm":
        needs[0] = True
    return Case(
        op.name,
        act,
        tuple(lead),
        n,
        dtype,
        tuple(draw(st.lists(st.sampled_from(layouts), min_size=count, max_size=count))),
        tuple(needs),
        draw(st.sampled_from(LAYOUTS)),
        draw(st.integers(0, 999)),
    )
