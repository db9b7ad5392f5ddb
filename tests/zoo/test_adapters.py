"""Adapters of PEFT, put on before patching and after: every result is that of the same adapters, unpatched."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedlayers as fl

from .compare import assert_alike, outputs, step

TOLERANCE = 1e-5
NEEDED = ("peft", "transformers", "timm")
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason=f"needs {', '.join(NEEDED)}"
)
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 2}


def tokens(seed: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 90, (3, 7), generator=torch.Generator().manual_seed(seed))}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, vocab_size=96, use_cache=False, **SIZES))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(vocab_size=96, **SIZES))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_head=4, n_layer=2, use_cache=False))


def _vit() -> nn.Module:
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=48, num_classes=10)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.ReLU())


def images(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(seed))}


def rows(seed: int) -> dict[str, Tensor]:
    return {"input": torch.randn(5, 16, generator=torch.Generator().manual_seed(seed))}


@dataclass(frozen=True)
class Base:
    """A model to adapt, the layers to adapt in it, and one to train whole."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]
    targets: list[str]
    kept: str
    options: dict[str, Any]

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()


BASES = {
    "llama": Base(_llama, tokens, ["q_proj", "gate_proj", "up_proj", "down_proj"], "norm", {"task_type": "CAUSAL_LM"}),
    "bert": Base(_bert, tokens, ["query", "dense"], "LayerNorm", {"task_type": "FEATURE_EXTRACTION"}),
    "gpt2": Base(_gpt2, tokens, ["c_attn", "c_fc", "c_proj"], "ln_f", {"fan_in_fan_out": True}),
    "vit": Base(_vit, images, ["qkv", "fc1", "fc2"], "head", {}),
    "mlp": Base(_mlp, rows, ["1", "3"], "0", {}),
}


def adapter(base: Base, kind: str) -> Any:
    import peft

    options = dict(base.options)
    if kind == "ln_tuning":
        return peft.LNTuningConfig(target_modules=["input_layernorm", "norm"])
    if kind == "ia3":
        feedforward = base.targets[-1:]
        return peft.IA3Config(
            target_modules=base.targets, feedforward_modules=feedforward, init_ia3_weights=False, **options
        )
    options |= {
        "lora": {},
        "dora": {"use_dora": True},
        "dropout": {"lora_dropout": 0.2},
        "kept": {"modules_to_save": [base.kept]},
    }[kind]
    return peft.LoraConfig(r=4, target_modules=base.targets, init_lora_weights=False, **options)


def adapted(model: nn.Module, base: Base, kind: str = "lora") -> nn.Module:
    import peft

    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(model, adapter(base, kind))
    for name, parameter in model.named_parameters():  # some kinds start where they change nothing
        if parameter.requires_grad and "magnitude" not in name:
            with torch.no_grad():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    return model


def same(model: nn.Module, original: nn.Module, base: Base, autocast: bool = False) -> None:
    for training in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got, want = (step(m.train(training), base.inputs(0), 3) for m in (model, original))
        assert_alike(got, want, TOLERANCE)


def layers(model: nn.Module) -> Iterator[str]:
    """Names of the adapters' layers."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return (name for name, m in model.named_modules() if isinstance(m, BaseTunerLayer))


def fused_members(model: nn.Module) -> set[str]:
    report = fl.explain(model)
    return {m for r in [*report.fused, *report.reduced] for m in r.modules}


CASES = [(name, "lora") for name in BASES]
CASES += [("llama", kind) for kind in ("dora", "dropout", "kept", "ia3", "ln_tuning")] + [("bert", "kept")]
cases = pytest.mark.parametrize(("name", "kind"), CASES)


@cases
def test_adapted_before_patching(name, kind):
    base = BASES[name]
    original = adapted(base.make(), base, kind)
    patched = fl.patch_model(copy.deepcopy(original), on_fallback="raise")
    assert list(patched.state_dict()) == list(original.state_dict())
    held = [n for n in layers(original) if kind != "ln_tuning"]
    assert not {m for m in fused_members(patched) if m in held or any(m.startswith(f"{n}.") for n in held)}
    if name == "llama" and kind in ("lora", "dora", "dropout", "kept"):
        reduced = [r.reason for r in fl.explain(patched).reduced if r.rule == "gated_act"]
        assert len(reduced) == 2
        assert all("is a peft.tuners.lora.layer.Linear, not exactly a Linear" in why for why in reduced)
    same(patched, original, base)
    assert fl.explain(patched).fused
    fl.unpatch_model(patched)
    assert [type(m) for m in patched.modules()] == [type(m) for m in original.modules()]


@cases
def test_adapted_after_patching(name, kind):
    base = BASES[name]
    original = adapted(base.make(), base, kind)
    patched = adapted(fl.patch_model(base.make(), on_fallback="ignore"), base, kind)
    assert list(patched.state_dict()) == list(original.state_dict())
    assert [n for n, p in patched.named_parameters() if p.requires_grad] == [
        n for n, p in original.named_parameters() if p.requires_grad
    ]
    same(patched, original, base)
    reasons = {why for counted in fl.explain(patched).fallbacks.values() for why in counted}
    assert all("has been replaced" in why for why in reasons)
    assert reasons or kind == "ln_tuning"
    fl.unpatch_model(patched)
    assert [type(m) for m in patched.modules()] == [type(m) for m in original.modules()]
    same(patched, original, base)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_autocast(name):
    base = BASES[name]
    original = adapted(base.make(), base)
    after = adapted(fl.patch_model(base.make(), on_fallback="ignore"), base)
    for model in (fl.patch_model(copy.deepcopy(original), on_fallback="raise"), after):
        same(model, original, base, autocast=True)


@pytest.mark.parametrize("name", BASES)
def test_switched_off_and_merged(name):
    """Adapters merged into their layers leave plain ones behind, which are fused again without another word."""
    base = BASES[name]
    original = adapted(base.make(), base).eval()
    after = adapted(fl.patch_model(base.make(), on_fallback="ignore"), base).eval()
    before = fl.patch_model(copy.deepcopy(original), on_fallback="raise")
    inputs = base.inputs(0)
    with torch.no_grad():
        for model in (after, before):
            with model.disable_adapter(), original.disable_adapter():
                torch.testing.assert_close(outputs(model, inputs), outputs(original, inputs))
            model.merge_adapter()
            torch.testing.assert_close(outputs(model, inputs), outputs(original, inputs), rtol=1e-4, atol=1e-5)
            model.unmerge_adapter()
        counted = {n: sum(c.values()) for n, c in fl.explain(after).fallbacks.items()}
        merged = [m.merge_and_unload() for m in (after, before, original)]
        want = outputs(merged[2], inputs)
        for model in merged[:2]:
            assert list(model.state_dict()) == list(merged[2].state_dict())
            torch.testing.assert_close(outputs(model, inputs), want)
        prefix = "base_model.model."
        again = {n: sum(c.values()) for n, c in fl.explain(merged[0]).fallbacks.items()}
        assert again == {n.removeprefix(prefix).removeprefix("base_model.model"): c for n, c in counted.items()}


def test_trained_saved_and_loaded(tmp_path):
    import peft

    base = BASES["llama"]
    patched = adapted(fl.patch_model(base.make(), on_fallback="ignore"), base)
    original = adapted(base.make(), base)
    for model in (patched, original):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        for seed in range(3):
            step(model.train(), base.inputs(seed), seed)
            optimizer.step()
    same(patched, original, base)
    patched.save_pretrained(tmp_path)
    for fresh in (base.make(), fl.patch_model(base.make(), on_fallback="ignore")):
        loaded = peft.PeftModel.from_pretrained(fresh, tmp_path, is_trainable=True)
        same(loaded, original, base)


def test_patched_again_after_adapting_takes_in_what_is_left():
    base = BASES["llama"]
    model = adapted(fl.patch_model(base.make(), on_fallback="raise"), base)
    fl.patch_model(fl.unpatch_model(model), on_fallback="raise")
    assert [r.rule for r in fl.explain(model).reduced].count("gated_act") == 2
    same(model, adapted(base.make(), base), base)
