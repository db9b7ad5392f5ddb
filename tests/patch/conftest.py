"""Fixtures of the tests of patching."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import fusedlayers as fl


@pytest.fixture(params=["reference", "triton"])
def kernels_where_they_run(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test on torch's own ops, and on the kernels in the interpreter."""
    if request.param == "triton" and not fl.kernels.interpreted():
        pytest.skip("kernels are not interpreted here")
    with fl.settings(route="auto" if request.param == "triton" else "reference"):
        yield
