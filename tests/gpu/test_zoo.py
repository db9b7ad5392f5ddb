"""Real models on a GPU: patched, no further off float64 than eager, in float32 and under bfloat16 autocast."""

from __future__ import annotations

import pytest
import torch

import fusedlayers as fl
from fusedlayers.patch import VerifyReport

from ..zoo.models import ZOO, Zoo
from .pooling import assert_verified

BATCH = 32
"""Enough values per channel for the batch norms of the last maps, which are 1x1."""


def each(zoo: Zoo):
    marks = [pytest.mark.slow] if zoo.slow else []
    marks.append(pytest.mark.skipif(zoo.missing(), reason=f"needs {zoo.library}"))
    return pytest.param(zoo, marks=marks, id=zoo.name)


@pytest.fixture(scope="module", params=[each(zoo) for zoo in ZOO.values()])
def patched(request) -> tuple[Zoo, torch.nn.Module]:
    return request.param, fl.patch_model(request.param.make().cuda(), on_fallback="raise")


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accuracy(patched, precision, training, device):
    zoo, model = patched
    model.train(training)

    def verified(seed: int) -> VerifyReport:
        inputs = {k: v.to(device) for k, v in zoo.inputs(BATCH, seed).items()}
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
            return fl.verify(model, **inputs)

    assert not assert_verified(verified).fallbacks
    found = fl.explain(model)
    assert found.fused and not found.failures, found.failures
