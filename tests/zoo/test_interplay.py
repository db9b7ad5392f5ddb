"""What people do with real models, before patching and after: the result is what it would have been unpatched."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import fusedlayers as fl

from .compare import assert_alike, outputs, step
from .models import ZOO

TOLERANCE = 1e-5
MODELS = ("torchvision.resnet18", "timm.vit_tiny", "timm.mobilenetv3_large_100", "transformers.llama")
few = pytest.mark.parametrize("zoo", ["timm.vit_tiny", "transformers.llama"], indirect=True)


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


NORMALIZATIONS = {
    "weight_norm": torch.nn.utils.parametrizations.weight_norm,
    "spectral_norm": torch.nn.utils.parametrizations.spectral_norm,
    "old weight_norm": torch.nn.utils.weight_norm,
    "old spectral_norm": torch.nn.utils.spectral_norm,
}


@few
@pytest.mark.parametrize("how", NORMALIZATIONS)
def test_normalized_weights_before_and_after_patching(zoo, how):
    after = fl.patch_model(zoo.make(), on_fallback="ignore")
    original, before = zoo.make(), zoo.make()
    names = linears(original)[:4]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model in (original, before, after):
            torch.manual_seed(0)
            for name in names:
                NORMALIZATIONS[how](model.get_submodule(name))
    fl.patch_model(before, on_fallback="raise")
    assert not {m for r in fl.explain(before).fused for m in r.modules} & set(names)
    inputs = zoo.inputs(4, 0)
    for training in (True, False):
        want, *others = (step(m.train(training), inputs) for m in (original, before, after))
        for got in others:
            assert_alike(got, want, TOLERANCE)


def test_moving_averages_of_timm():
    zoo = ZOO["timm.mobilenetv3_large_100"]
    if zoo.missing():
        pytest.skip(f"needs {zoo.library}")
    from timm.utils import ModelEmaV3

    averages = []
    for model in pair(zoo, on_fallback="raise"):
        average = ModelEmaV3(model, decay=0.5)
        step(model.train(), zoo.inputs(4, 0))
        torch.optim.SGD(model.parameters(), lr=1e-2).step()
        average.update(model)
        averages.append(average.module)
    ours, theirs = averages
    assert fl.explain(ours).fused and list(ours.state_dict()) == list(theirs.state_dict())
    assert_alike(step(ours.eval(), zoo.inputs(4, 1)), step(theirs.eval(), zoo.inputs(4, 1)), TOLERANCE)


@few
def test_hooks_on_every_module_see_what_they_saw(zoo):
    """As torchinfo and profilers set them; nothing is fused while they are there."""
    seen, models = [], pair(zoo, on_fallback="ignore")
    for model in models:
        calls: list[object] = []
        seen.append(calls)

        def note(module, args, out, calls=calls):
            shapes = [tuple(t.shape) for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
            calls.append((type(module).__name__, str(module), shapes))

        handles = [module.register_forward_hook(note) for module in model.modules()]
        outputs(model.eval(), zoo.inputs(2, 0))
        for handle in handles:
            handle.remove()
    assert seen[0] == seen[1] and len(seen[0]) >= len(list(models[1].children()))
    counted = {n: sum(c.values()) for n, c in fl.explain(models[0]).fallbacks.items()}
    outputs(models[0], zoo.inputs(2, 0))
    assert {n: sum(c.values()) for n, c in fl.explain(models[0]).fallbacks.items()} == counted, "fused again"


@few
def test_counted_flops(zoo):
    counts = []
    for model in pair(zoo, on_fallback="ignore"):  # it sets hooks on all modules
        with FlopCounterMode(display=False) as counter:
            loss = sum(out.sum() for out in outputs(model.train(), zoo.inputs(2, 0)))
            loss.backward()
        counts.append(counter.get_flop_counts())
    assert counts[0] == counts[1] and counts[0]["Global"]


@few
def test_data_parallel_without_devices(zoo):
    patched, original = (nn.DataParallel(m) for m in pair(zoo, on_fallback="raise"))
    assert list(patched.state_dict()) == list(original.state_dict())
    assert_alike(step(patched, zoo.inputs(4, 0)), step(original, zoo.inputs(4, 0)), TOLERANCE)


# accelerate puts a forward of its own on instances


@few
def test_hooks_of_accelerate_before_and_after_patching(zoo):
    hooks = pytest.importorskip("accelerate.hooks")

    class Count(hooks.ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Count.calls += 1
            return args, kwargs

    def hooked(model: nn.Module) -> nn.Module:
        for module in model.modules():
            hooks.add_hook_to_module(module, Count())
        return model

    original = hooked(zoo.make())
    after = hooked(fl.patch_model(zoo.make(), on_fallback="ignore"))
    before = fl.patch_model(hooked(zoo.make()), on_fallback="raise")
    report = fl.explain(before)
    assert not report.fused and report.skipped
    assert all("a forward of its own" in r.reason for r in report.skipped)
    inputs, counted = zoo.inputs(4, 0), []
    for training in (True, False):
        found = []
        for model in (original, before, after):
            Count.calls = 0
            found.append(step(model.train(training), inputs))
            counted.append(Count.calls)
        for got in found[1:]:
            assert_alike(got, found[0], TOLERANCE)
    assert len(set(counted)) == 1 and counted[0] > 0
    for model in (original, before, after):
        hooks.remove_hook_from_module(model, recurse=True)
    for model in (after, fl.unpatch_model(after)):
        assert_alike(step(model, inputs), step(copy.deepcopy(original), inputs), TOLERANCE)
    code = {getattr(m.forward, "__func__", m.forward).__code__.co_filename for m in after.modules()}
    assert not [name for name in code if name.startswith("<fusedlayers")], "a forward of the patched classes is left"


@few
def test_offloaded_by_accelerate(zoo):
    """Weights on the meta device, brought in by hooks for each call of a layer: a fused op would read them without."""
    accelerate = pytest.importorskip("accelerate")
    want = outputs(zoo.make().eval(), zoo.inputs(2, 0))
    offload = lambda model: accelerate.cpu_offload(model, execution_device=torch.device("cpu"))  # noqa: E731
    with torch.no_grad():
        for model in (
            offload(fl.patch_model(zoo.make(), on_fallback="ignore")),
            fl.patch_model(offload(zoo.make()), on_fallback="raise"),
        ):
            assert any(p.is_meta for p in model.parameters())
            torch.testing.assert_close(outputs(model.eval(), zoo.inputs(2, 0)), want)


def test_convolutions_folded_after_patching():
    """`fuse_modules` puts other modules in the place of a conv, its norm and its activation."""
    zoo = ZOO["torchvision.resnet18"]
    if zoo.missing():
        pytest.skip(f"needs {zoo.library}")
    fuse = pytest.importorskip("torch.ao.quantization").fuse_modules
    groups = [["conv1", "bn1", "relu"], *([f"layer{i}.0.conv1", f"layer{i}.0.bn1"] for i in (1, 2, 3, 4))]
    patched, original = (fuse(m.eval(), groups) for m in pair(zoo, on_fallback="ignore"))
    with torch.no_grad():
        want = outputs(original, zoo.inputs(2, 0))
        for model in (patched, fl.patch_model(copy.deepcopy(original), on_fallback="raise")):
            torch.testing.assert_close(outputs(model, zoo.inputs(2, 0)), want)
