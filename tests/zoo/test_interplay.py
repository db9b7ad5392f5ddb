"""What people do with real models, before patching and after: the result is what it would have been unpatched."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fusedlayers as fl

from .compare import assert_alike, outputs, step
from .models import ZOO

TOLERANCE = 1e-5
MODELS = ("torchvision.resnet18", "timm.vit_tiny", "timm.mobilenetv3_large_100", "transformers.llama")


@pytest.fixture(params=MODELS)
def zoo(request):
    found = ZOO[request.param]
    if found.missing():
        pytest.skip(f"needs {found.library}")
    return found


def pair(zoo, **options) -> tuple[nn.Module, nn.Module]:
    original = zoo.make()
    return fl.patch_model(copy.deepcopy(original), **options), original


def same(patched: nn.Module, original: nn.Module, zoo) -> None:
    inputs = zoo.inputs(4, 0)
    for training in (True, False):
        got, want = (step(m.double().train(training), doubled(inputs)) for m in (patched, original))
        assert_alike(got, want, TOLERANCE)


def doubled(inputs):
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def linears(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if type(m) is nn.Linear]


def test_synchronized_batch_norm_before_and_after_patching():
    zoo = ZOO["torchvision.resnet18"]
    if zoo.missing():
        pytest.skip(f"needs {zoo.library}")
    patched, original = pair(zoo, on_fallback="ignore")
    for first in (nn.SyncBatchNorm.convert_sync_batchnorm(patched), fl.patch_model(_synced(zoo), on_fallback="ignore")):
        assert any(isinstance(m, nn.SyncBatchNorm) for m in first.modules())
        got, want = (
            outputs(m.eval(), zoo.inputs(2, 0)) for m in (first, nn.SyncBatchNorm.convert_sync_batchnorm(original))
        )
        torch.testing.assert_close(got, want)


def _synced(zoo) -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(zoo.make())


def test_moving_averages(zoo):
    patched, original = pair(zoo, on_fallback="raise")
    averages = []
    for model in (patched, original):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for seed in range(2):
            step(model.double(), doubled(zoo.inputs(4, seed)), seed)
            optimizer.step()
            average.double().update_parameters(model)
        averages.append(average)
    ours, theirs = averages
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert len(fl.explain(ours.module).fused) == len(fl.explain(patched).fused), "the copy is patched too"
    same(ours.module, theirs.module, zoo)


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def test_parametrized_before_and_after_patching(zoo):
    patched, original = pair(zoo, on_fallback="ignore")
    names = linears(original)[:3]
    for model in (patched, original):
        for name in names:
            parametrize.register_parametrization(model.get_submodule(name), "weight", Halved())
    same(patched, original, zoo)
    before = fl.patch_model(copy.deepcopy(original), on_fallback="raise")
    assert not {m for r in fl.explain(before).fused for m in r.modules} & set(names)
    same(before, original, zoo)


def test_traced(zoo):
    patched, original = pair(zoo, on_fallback="raise")
    if zoo.library == "transformers":
        pytest.skip("its models return no plain tensors")
    args = tuple(zoo.inputs(2, 0).values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(patched.eval(), args)
        graphs = [torch.fx.symbolic_trace(m.eval()) for m in (patched, original)]
    with torch.no_grad():
        want = original.eval()(*args)
        torch.testing.assert_close(traced(*args), want)
        assert graphs[0].code == graphs[1].code
        torch.testing.assert_close(graphs[0](*args), want)


def test_replicas_use_their_own_weights(zoo):
    """What `nn.DataParallel` makes of a module: a shallow copy with other tensors in it."""
    patched, original = pair(zoo, on_fallback="raise")
    replica = patched._replicate_for_data_parallel()
    for name, parameter in patched._parameters.items():
        setattr(replica, name, None if parameter is None else parameter.detach().clone())
    for name, child in patched._modules.items():
        setattr(replica, name, copy.deepcopy(child))
    with torch.no_grad():
        for p in patched.parameters():
            p.zero_()
        torch.testing.assert_close(
            outputs(replica.eval(), zoo.inputs(2, 0)), outputs(original.eval(), zoo.inputs(2, 0))
        )


def test_quantized_projections_are_left_alone(zoo):
    if not linears(zoo.make()):
        pytest.skip("it has no plain Linear")
    quantize = pytest.importorskip("torch.ao.quantization").quantize_dynamic
    if "qnnpack" not in torch.backends.quantized.supported_engines and not torch.backends.quantized.engine:
        pytest.skip("this torch has no engine for quantized products")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        original = quantize(zoo.make().eval(), {nn.Linear}, dtype=torch.qint8)
        after = quantize(fl.patch_model(zoo.make().eval(), on_fallback="ignore"), {nn.Linear}, dtype=torch.qint8)
    patched = fl.patch_model(copy.deepcopy(original), on_fallback="raise")
    quantized = {n for n, m in original.named_modules() if "quantized" in type(m).__module__}
    assert quantized and not {m for r in fl.explain(patched).fused for m in r.modules} & quantized
    with torch.no_grad():
        want = outputs(original, zoo.inputs(2, 0))
        for model in (patched, after):
            torch.testing.assert_close(outputs(model, zoo.inputs(2, 0)), want)
