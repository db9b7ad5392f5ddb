"""The networks that `bench models` trains: real architectures with random weights, and random data."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..patch import explain, patch_model


@dataclass(frozen=True)
class Workload:
    """A model and its batch.

    Attributes:
        build: `build(device, tiny)` gives the module in training mode and its batch; `tiny` is for machines without
            a GPU.
        loss: of the module on the batch, called under autocast.
    """

    name: str
    build: Callable[[str, bool], tuple[nn.Module, tuple[Tensor, ...]]]
    loss: Callable[..., Tensor]


def _classify(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def _language(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def _image_model(name: str, batch: int, channels_last: bool) -> Workload:
    def build(device: str, tiny: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
        import timm

        model = timm.create_model(name, pretrained=False).to(device)
        images = torch.randn(2 if tiny else batch, 3, 224, 224, device=device)
        if channels_last:
            model, images = (t.to(memory_format=torch.channels_last) for t in (model, images))
        return model.train(), (images, torch.randint(1000, (len(images),), device=device))

    return Workload(f"timm/{name}/{batch}{'-channels_last' if channels_last else ''}", build, _classify)


def _language_model(kind: str, batch: int, length: int) -> Workload:
    def build(device: str, tiny: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
        import transformers as t

        if kind == "bert-base":
            small = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
            model = t.BertForMaskedLM(t.BertConfig(**(small if tiny else {})))
        else:
            small = dict(n_embd=32, n_layer=2, n_head=2)
            model = t.GPT2LMHeadModel(t.GPT2Config(use_cache=False, **(small if tiny else {})))
        shape = (2, 16) if tiny else (batch, length)
        return model.to(device).train(), (torch.randint(1000, shape, device=device),)

    return Workload(f"transformers/{kind}/{batch}x{length}", build, _language)


def _batch_norm_mlp(width: int, depth: int, batch: int) -> Workload:
    def build(device: str, tiny: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
        n, rows = (16, 32) if tiny else (width, batch)
        blocks = [m for _ in range(depth) for m in (nn.Linear(n, n), nn.BatchNorm1d(n), nn.ReLU())]
        model = nn.Sequential(*blocks, nn.Linear(n, 10)).to(device)
        return model.train(), (torch.randn(rows, n, device=device), torch.randint(10, (rows,), device=device))

    return Workload(f"mlp/batch_norm-{width}x{depth}/{batch}", build, _classify)


def workloads() -> list[Workload]:
    return [
        _image_model("resnet50", 256, True),
        _image_model("convnext_tiny", 128, True),
        _image_model("mixer_b16_224", 128, False),
        _image_model("vit_base_patch16_224", 128, False),
        _image_model("mobilenetv3_large_100", 256, True),
        _language_model("bert-base", 32, 512),
        _language_model("gpt2", 8, 1024),
        _batch_norm_mlp(512, 6, 65536),
    ]


def training_step(model: nn.Module, loss: Callable[..., Tensor], batch: tuple[Tensor, ...], device: str) -> Any:
    """Forward, loss and backward under bf16 autocast; gradients are dropped first, as an optimizer's loop does."""
    for p in model.parameters():
        p.grad = None
    with torch.autocast(device, torch.bfloat16):
        value = loss(model, *batch)
    value.backward()
    return value


def variant(name: str, model: nn.Module, record: dict[str, Any]) -> nn.Module:
    """A copy of the model as the variant has it; what patching found goes to `record`."""
    made = copy.deepcopy(model)
    if "patched" in name:
        begin = time.perf_counter()
        made = patch_model(made, on_fallback="ignore")
        record["patching_s"] = time.perf_counter() - begin
        found = explain(made)
        record["sites"] = {kind: len(getattr(found, kind)) for kind in ("fused", "reduced", "skipped")}
    if "compile" in name:
        made = torch.compile(made)
    return made
