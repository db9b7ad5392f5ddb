"""Fixtures of the tests of patching."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import fusedlayers as fl
from fusedlayers.ops import layer_norm


@pytest.fixture(params=["reference", "triton"])
def kernels_where_they_run(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test on torch's own ops, and on the kernels in the interpreter."""
    if request.param == "triton" and not fl.kernels.interpreted():
        pytest.skip("kernels are not interpreted here")
    with fl.settings(route="auto" if request.param == "triton" else "reference"):
        yield


@pytest.fixture
def joined(monkeypatch):
    """The probability and the shift of each call of dropout, add and norm in one."""
    seen = []
    right = layer_norm.drop_norm

    def watched(norm, x, residual, weight, bias, p, training, shift=None):
        seen.append((p, shift))
        return right(norm, x, residual, weight, bias, p, training, shift)

    monkeypatch.setattr(layer_norm, "drop_norm", watched)
    return seen
