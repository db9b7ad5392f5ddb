"""The models people have: 29 of torchvision, timm, transformers and torch, at their real depth but on small inputs.

Weights are random and nothing is downloaded. What transformers has is built from configs, narrow; so is what costs
seconds otherwise.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Zoo:
    """One model: how it is built, and inputs for a batch size (and a sequence length where it has one)."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict[str, Tensor]]
    slow: bool = False

    @property
    def library(self) -> str:
        return self.name.partition(".")[0]

    def make(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build()

    def missing(self) -> bool:
        return importlib.util.find_spec(self.library) is None


ZOO: dict[str, Zoo] = {}


def zoo(name: str, build: Callable[[], nn.Module], inputs: Callable[[int, int], dict[str, Tensor]], **options) -> None:
    ZOO[name] = Zoo(name, build, inputs, **options)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def image(size: int, key: str = "x") -> Callable[[int, int], dict[str, Tensor]]:
    return lambda batch, seed: {key: torch.randn(batch, 3, size, size, generator=_seeded(seed))}


def tokens(*keys: str, length: int = 10) -> Callable[[int, int], dict[str, Tensor]]:
    """Ids below 90 for every key; another length for every batch size."""

    def make(batch: int, seed: int) -> dict[str, Tensor]:
        shape = (batch, length + batch)
        return {key: torch.randint(0, 90, shape, generator=_seeded(seed)) for key in keys}

    return make


# torchvision


def _torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision

        return getattr(torchvision.models, name)(weights=None, num_classes=10, **options)

    return build


def _torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    options = {"num_layers": 12, "num_heads": 4, "hidden_dim": 48, "mlp_dim": 96, "num_classes": 10}
    return VisionTransformer(image_size=32, patch_size=16, dropout=0.1, **options)


def _torchvision_vgg() -> nn.Module:
    """With a narrow head: its own holds nine tenths of all weights and nothing that the others do not."""
    model = _torchvision("vgg11_bn")()
    model.classifier[0], model.classifier[3] = nn.Linear(512 * 49, 64), nn.Linear(64, 64)
    model.classifier[6] = nn.Linear(64, 10)
    return model


def _torchvision_frozen() -> nn.Module:
    """The backbone of torchvision's detectors."""
    import torchvision

    model = torchvision.models.resnet50(weights=None, norm_layer=torchvision.ops.FrozenBatchNorm2d, num_classes=10)
    for module in model.modules():
        if isinstance(module, torchvision.ops.FrozenBatchNorm2d):
            module.weight.fill_(0.5)
    return model


zoo("torchvision.resnet18", _torchvision("resnet18"), image(32))
zoo("torchvision.resnet50", _torchvision("resnet50"), image(32), slow=True)
zoo("torchvision.resnet50_frozen_bn", _torchvision_frozen, image(32), slow=True)
zoo("torchvision.vgg11_bn", _torchvision_vgg, image(32), slow=True)
zoo("torchvision.densenet121", _torchvision("densenet121"), image(32), slow=True)
zoo("torchvision.mobilenet_v3_small", _torchvision("mobilenet_v3_small"), image(32))
zoo("torchvision.efficientnet_b0", _torchvision("efficientnet_b0"), image(32), slow=True)
zoo("torchvision.convnext_tiny", _torchvision("convnext_tiny"), image(32), slow=True)
zoo("torchvision.swin_t", _torchvision("swin_t"), image(32), slow=True)
zoo("torchvision.regnet_y_400mf", _torchvision("regnet_y_400mf"), image(32), slow=True)
zoo("torchvision.vit", _torchvision_vit, image(32))


# timm


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=10, **options)

    return build


zoo("timm.resnet50", _timm("resnet50"), image(32), slow=True)
zoo("timm.mobilenetv3_large_100", _timm("mobilenetv3_large_100"), image(32))
zoo("timm.efficientnet_b0", _timm("efficientnet_b0", drop_path_rate=0.2), image(32), slow=True)
zoo("timm.regnety_004", _timm("regnety_004"), image(32), slow=True)
zoo("timm.convnext_atto", _timm("convnext_atto", drop_path_rate=0.1), image(32))
zoo("timm.vit_tiny", _timm("vit_tiny_patch16_224", img_size=32, drop_path_rate=0.1), image(32))
zoo("timm.deit3_small", _timm("deit3_small_patch16_224", img_size=32, drop_path_rate=0.1), image(32), slow=True)
zoo("timm.mixer_s16", _timm("mixer_s16_224", img_size=32), image(32), slow=True)
zoo("timm.eva02_tiny", _timm("eva02_tiny_patch14_224", img_size=28), image(28))


# transformers


def _transformers(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A narrow model of real structure; attention written out, as gradients of gradients and exports need it too."""

    def build() -> nn.Module:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**options))

    return build


_BERT = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 12}
_LLAMA = {**_BERT, "num_key_value_heads": 2, "vocab_size": 96, "use_cache": False}

zoo("transformers.bert", _transformers("BertModel", "BertConfig", vocab_size=96, **_BERT), tokens("input_ids"))
zoo(
    "transformers.gpt2",
    _transformers("GPT2LMHeadModel", "GPT2Config", vocab_size=96, n_embd=48, n_head=4, n_layer=12, use_cache=False),
    tokens("input_ids"),
)
zoo("transformers.llama", _transformers("LlamaForCausalLM", "LlamaConfig", **_LLAMA), tokens("input_ids"))
zoo("transformers.qwen2", _transformers("Qwen2Model", "Qwen2Config", **_LLAMA), tokens("input_ids"), slow=True)
zoo(
    "transformers.gemma",
    _transformers("GemmaModel", "GemmaConfig", head_dim=12, pad_token_id=0, **_LLAMA),
    tokens("input_ids"),
)
zoo(
    "transformers.t5",
    _transformers(
        "T5Model",
        "T5Config",
        vocab_size=96,
        d_model=48,
        d_kv=12,
        d_ff=96,
        num_layers=6,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        use_cache=False,
    ),
    tokens("input_ids", "decoder_input_ids"),
)
zoo(
    "transformers.vit",
    _transformers("ViTModel", "ViTConfig", image_size=32, patch_size=16, **_BERT),
    image(32, "pixel_values"),
    slow=True,
)
zoo(
    "transformers.phi3",
    _transformers("Phi3Model", "Phi3Config", pad_token_id=0, **_LLAMA),
    tokens("input_ids"),
    slow=True,
)


# torch itself


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 6, norm=nn.LayerNorm(32), enable_nested_tensor=False)


def _sequence(batch: int, seed: int) -> dict[str, Tensor]:
    return {"src": torch.randn(batch, 5 + batch, 32, generator=_seeded(seed))}


zoo("torch.transformer_encoder", _encoder, _sequence)
