"""Any op on any call, against eager, under the accuracy rule.

Few examples by default, the same every time; `-m slow` draws 2,000, or as many as `EXAMPLES` says, and
`HYPOTHESIS_PROFILE=long` as many for both.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.harness import compare, laid_out, run
from tests.properties.strategies import Case, cases

pytestmark = [pytest.mark.usefixtures("forced"), pytest.mark.filterwarnings("ignore")]

_QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": False, "database": None}
settings.register_profile("short", max_examples=60, derandomize=True, **_QUIET)
settings.register_profile("long", max_examples=int(os.environ.get("EXAMPLES", 2000)), **_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


def holds(case: Case, device: str) -> None:
    """Outputs, and gradients for an incoming gradient of any layout."""
    fused, eager = case.callables()
    inputs = case.inputs(device)
    compare(fused, eager, inputs, seed=case.seed, sums=True)
    found = []
    for fn in (fused, eager):
        outs, _ = run(fn, inputs)
        seeds = [laid_out(torch.linspace(-1, 1, o.numel()).view(o.shape).to(o), case.grad_layout) for o in outs]
        wanted = [t for t in inputs if t.requires_grad]
        used = [(o, g) for o, g in zip(outs, seeds, strict=True) if o.requires_grad]
        found.append(torch.autograd.grad([o for o, _ in used], wanted, [g for _, g in used], allow_unused=True))
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.shape, a.dtype) == (b.shape, b.dtype)


@given(case=cases())
def test_as_eager(case, device):
    holds(case, device)


@pytest.mark.slow
@settings(settings.get_profile("long"))
@given(case=cases())
def test_as_eager_at_length(case, device):
    holds(case, device)
