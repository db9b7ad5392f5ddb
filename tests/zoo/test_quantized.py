"""Weights and layers of torchao and bitsandbytes: left alone with a reason, before patching and after."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl

from .compare import assert_alike, outputs, step
from .test_adapters import BASES, adapted


def needs(*libraries: str):
    missing = [name for name in (*libraries, "transformers", "timm") if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def wide_mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64)]
    return nn.Sequential(*layers, nn.Linear(64, 64), nn.ReLU())


def x(seed: int = 0) -> dict[str, Tensor]:
    return {"input": torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))}


MODELS = {"mlp": (wide_mlp, x), "llama": (BASES["llama"].make, lambda: BASES["llama"].inputs(0))}
models = pytest.mark.parametrize("name", MODELS)


def fused_members(model: nn.Module) -> set[str]:
    report = fl.explain(model)
    return {m for r in [*report.fused, *report.reduced] for m in r.modules}


def reasons(model: nn.Module) -> set[str]:
    return {why for counted in fl.explain(model).fallbacks.values() for why in counted}


def both(quantize: Callable[[nn.Module], nn.Module], make: Callable[[], nn.Module]) -> tuple[nn.Module, ...]:
    """The quantized model; patched afterwards; and quantized after having been patched."""
    original = quantize(make())
    before = fl.patch_model(copy.deepcopy(original), on_fallback="raise")
    return original, before, quantize(fl.patch_model(make(), on_fallback="ignore"))


def exactly(models: tuple[nn.Module, ...], inputs: dict[str, Tensor], autocast: bool = False) -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        want, *others = (outputs(m.eval(), inputs) for m in models)
    for got in others:
        assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


# torchao


def torchao(kind: str) -> Callable[[nn.Module], nn.Module]:
    from torchao import quantization

    def quantize(model: nn.Module) -> nn.Module:
        quantization.quantize_(model, getattr(quantization, kind)())
        return model

    return quantize


KINDS = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig")


@needs("torchao")
@models
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_torchao(name, kind):
    """They keep the class of their layer, and take no part in autocast."""
    make, inputs = MODELS[name]
    original, before, after = both(torchao(kind), make)
    kinds = {n: type(m.weight).__name__ for n, m in original.named_modules() if type(m) is nn.Linear}
    assert not {"Parameter", "Tensor"} & set(kinds.values()), kinds
    assert not fused_members(before) & kinds.keys()
    left = {r.reason for r in [*fl.explain(before).skipped, *fl.explain(before).reduced]}
    assert any(f".weight is a {cls}" in why for cls in kinds.values() for why in left)
    for autocast in (False, True):
        exactly((original, before, after), inputs(), autocast)
    assert reasons(after) and all("weight has become a tensor subclass" in why for why in reasons(after))
    assert list(after.state_dict()) == list(original.state_dict())
    exactly((original, copy.deepcopy(after), fl.unpatch_model(after), fl.unpatch_model(before)), inputs())


@needs("torchao")
def test_gradients_through_weights_of_torchao():
    pairs = both(torchao("Int8WeightOnlyConfig"), wide_mlp)
    want, *others = (step(m.train(), x()) for m in pairs)
    for got in others:
        assert_alike(got, want, 0.0)


@needs("torchao")
def test_compiled_after_quantizing():
    torch.compiler.reset()
    original, before, after = both(torchao("Int8WeightOnlyConfig"), wide_mlp)
    with torch.no_grad():
        want = original(**x())
        for model in (before, after):
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(**x()), want)


@needs("torchao")
def test_quantization_aware_training():
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.qat import QATConfig

    def to(stage: str) -> Callable[[nn.Module], nn.Module]:
        return lambda model: quantize_(model, QATConfig(Int8DynamicActivationIntxWeightConfig(), step=stage)) or model

    original, before, after = pairs = both(to("prepare"), wide_mlp)
    for seed in range(2):
        for model in pairs:
            model.results = step(model.train(), x(seed))
            torch.optim.SGD(model.parameters(), lr=1e-2).step()
        assert_alike(before.results, original.results, 0.0)
        assert_alike(after.results, original.results, 0.0)
    converted = tuple(map(to("convert"), pairs))
    for autocast in (False, True):
        exactly(converted, x(), autocast)


@needs("torchao")
def test_training_in_float8():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def convert(model: nn.Module) -> nn.Module:
        return convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))

    original, before, after = both(convert, wide_mlp)
    assert {type(original[i]).__name__ for i in (1, 3, 5)} == {"Float8Linear"}
    want, *others = (step(m.train(), x()) for m in (original, before, after))
    for got in others:
        assert_alike(got, want, 0.0)
    assert not fused_members(before) & {"1", "3", "5"}
    assert all("has been replaced" in why for why in reasons(after))


# bitsandbytes


def bitsandbytes(kind: str) -> Callable[[nn.Module], nn.Module]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import bitsandbytes as bnb

    def quantize(model: nn.Module) -> nn.Module:
        for name, layer in list(model.named_modules()):
            if type(layer) is nn.Linear and "head" not in name:
                options = {"has_fp16_weights": False} if kind == "Linear8bitLt" else {"compute_dtype": torch.float32}
                made = getattr(bnb.nn, kind)(layer.in_features, layer.out_features, layer.bias is not None, **options)
                made.load_state_dict(layer.state_dict())
                model.set_submodule(name, made.to("cpu"))
        return model

    return quantize


@needs("bitsandbytes")
@models
@pytest.mark.parametrize("kind", ["Linear8bitLt", "Linear4bit"])
def test_layers_of_bitsandbytes(name, kind):
    make, inputs = MODELS[name]
    original, before, after = both(bitsandbytes(kind), make)
    held = {n for n, m in original.named_modules() if type(m).__name__ == kind}
    assert held and not fused_members(before) & held
    left = {r.reason for r in [*fl.explain(before).skipped, *fl.explain(before).reduced]}
    assert any(f"is a bitsandbytes.nn.modules.{kind}, not exactly a Linear" in why for why in left)
    if name == "llama":
        assert [r.rule for r in fl.explain(before).reduced].count("gated_act") == 2
    try:
        with torch.no_grad():
            outputs(original.eval(), inputs())
    except NotImplementedError as error:
        pytest.skip(f"this bitsandbytes has no {kind} for the CPU: {error}")
    exactly((original, before, after), inputs())
    assert reasons(after) and all("has been replaced" in why for why in reasons(after))


@needs("bitsandbytes", "peft")
def test_adapters_on_layers_of_bitsandbytes():
    def quantize(model: nn.Module) -> nn.Module:
        model = bitsandbytes("Linear4bit")(model)
        model.is_loaded_in_4bit = True
        return adapted(model, BASES["llama"])

    original, before, after = both(quantize, BASES["llama"].make)
    reduced = [r.reason for r in fl.explain(before).reduced if r.rule == "gated_act"]
    assert len(reduced) == 2 and all("peft.tuners.lora.bnb.Linear4bit" in why for why in reduced)
    want, *others = (step(m.train(), BASES["llama"].inputs(0)) for m in (original, before, after))
    for got in others:
        assert_alike(got, want, 1e-6)
