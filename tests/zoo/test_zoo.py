"""Every model of the zoo: patched it gives what it gave, in both modes and precisions, and can be taken back."""

from __future__ import annotations

import copy
import io
import pickle
import time

import pytest
import torch

import fusedlayers as fl

from .compare import Pair, assert_alike, outputs, step
from .models import ZOO, Zoo

TOLERANCE = 1e-9
"""In float64. A wrong eps, momentum, mask, mode or form of an activation shows as 1e-6 at the least."""
ROUNDS_IN_FLOAT = ("llama", "qwen2", "gemma", "t5", "phi3")
"""Models whose norms compute in float32 whatever they are given; fused, they keep float64."""


def each(zoo: Zoo):
    marks = [pytest.mark.slow] if zoo.slow else []
    marks.append(pytest.mark.skipif(zoo.missing(), reason=f"needs {zoo.library}"))
    return pytest.param(zoo, marks=marks, id=zoo.name)


@pytest.fixture(scope="module", params=[each(zoo) for zoo in ZOO.values()])
def pair(request) -> Pair:
    return Pair.of(request.param)


def test_both_modes_give_the_same_outputs_gradients_and_statistics(pair):
    tolerance = 1e-6 if pair.zoo.name.rpartition(".")[2] in ROUNDS_IN_FLOAT else TOLERANCE
    exact = Pair(pair.zoo, *(copy.deepcopy(m).double() for m in (pair.original, pair.patched)))
    for training in (True, False):
        for batch, seed in ((2, 0), (3, 1)):  # other arguments the second time
            inputs = {k: v.double() if v.is_floating_point() else v for k, v in pair.zoo.inputs(batch, seed).items()}
            got, want = (step(m.train(training), inputs, seed) for m in exact.both())
            assert_alike(got, want, tolerance)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_accuracy(pair, precision):
    """Against float64, no further off than eager, plus a few ulp; no call takes its original path unseen."""
    for training in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            report = fl.verify(pair.patched.train(training), **pair.zoo.inputs(2, 0))
        assert report, str(report)
        assert not report.fallbacks


def patched_in(model: torch.nn.Module) -> float:
    """Seconds of the processor that patching takes."""
    start = time.process_time()
    fl.patch_model(model)
    return time.process_time() - start


def test_names_order_and_identity_stay(pair):
    model = copy.deepcopy(pair.original)
    before = [*model.named_parameters(), *model.named_buffers()]
    shown, keys = repr(model), list(model.state_dict())
    classes = [type(m) for m in model.modules()]
    spent = patched_in(model)
    after = [*model.named_parameters(), *model.named_buffers()]
    assert all(a == b and x is y for (a, x), (b, y) in zip(before, after, strict=True))
    assert list(model.state_dict()) == keys and repr(model) == shown
    assert all(isinstance(m, cls) for m, cls in zip(model.modules(), classes, strict=True))
    if spent >= 1.0:  # once more, on a machine that may have been busy
        spent = patched_in(copy.deepcopy(pair.original))
    assert spent < 1.0, f"patching took {spent:.2f} s"


def test_pickled_and_loaded(pair):
    inputs, model = pair.zoo.inputs(2, 0), pair.patched.eval()
    with torch.no_grad():
        want = outputs(model, inputs)
        revived = pickle.loads(pickle.dumps(model))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for again in (revived, torch.load(file, weights_only=False)):
            assert len(fl.explain(again).fused) == len(fl.explain(model).fused)
            assert all(torch.equal(a, b) for a, b in zip(outputs(again, inputs), want, strict=True))


def test_unpatching_gives_the_original_back(pair):
    model = fl.unpatch_model(copy.deepcopy(pair.patched)).eval()
    original, inputs = pair.original.eval(), pair.zoo.inputs(2, 0)
    for a, b in zip(model.modules(), original.modules(), strict=True):
        assert type(a) is type(b) and a.__dict__.keys() == b.__dict__.keys()
    model.load_state_dict(original.state_dict())
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(outputs(model, inputs), outputs(original, inputs), strict=True))


def test_every_site_left_alone_has_its_reason(pair):
    report = fl.explain(pair.patched)
    assert report.fused and all(r.reason for r in [*report.skipped, *report.reduced])
    left = {kind: report.counts.total[kind] - report.counts.fused[kind] for kind in report.counts.total}
    assert sum(left.values()) <= len(report.skipped) + len(report.reduced)


def test_enough_families_run_by_default():
    families = {name for name, zoo in ZOO.items() if not zoo.slow}
    assert len(ZOO) == 29 and len(families) >= 10
