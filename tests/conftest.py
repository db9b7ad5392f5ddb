"""Shared fixtures. Kernels run where they can: in the interpreter (`TRITON_INTERPRET=1`), or on a GPU (`tests/gpu`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fusedlayers as fl
from fusedlayers import kernels

torch.set_num_threads(1)
torch.manual_seed(0)  # what modules of tests draw when they are imported


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same draws in a test wherever and after whatever it runs."""
    torch.manual_seed(0)


@pytest.fixture
def device() -> str:
    """Where the tensors of a test lie. `tests/gpu` overrides it."""
    return "cpu"


@pytest.fixture
def forced(device: str) -> Iterator[str]:
    """The route the ops under test are forced to: Triton wherever kernels can run, so that none falls back unseen."""
    route = "triton" if device == "cuda" or kernels.interpreted() else "reference"
    with fl.settings(route=route):
        yield route
