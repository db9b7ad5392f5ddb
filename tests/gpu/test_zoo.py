"""Real models on a GPU: patched, no further off float64 than eager, in float32 and under bfloat16 autocast."""

from __future__ import annotations

import pytest
import torch

import fusedlayers as fl

from ..zoo.models import ZOO, Zoo

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
    inputs = {k: v.to(device) for k, v in zoo.inputs(BATCH, 0).items()}
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
        report = fl.verify(model.train(training), **inputs)
    assert report, str(report)
    assert report.comparisons and not report.fallbacks
    found = fl.explain(model)
    assert found.fused and not found.failures, found.failures
