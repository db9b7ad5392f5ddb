"""One model run twice: as it was built, and patched."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fusedlayers as fl

from .models import Zoo


@dataclass
class Pair:
    """A model and its patched twin of the same weights."""

    zoo: Zoo
    original: nn.Module
    patched: nn.Module

    @classmethod
    def of(cls, zoo: Zoo) -> Pair:
        original = zoo.make()
        return cls(zoo, original, fl.patch_model(copy.deepcopy(original), on_fallback="raise"))

    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.patched, self.original


def outputs(model: nn.Module, inputs: dict[str, Any], seed: int = 0) -> list[Tensor]:
    """The float tensors a call gives, in order, from one state of the generator."""
    torch.manual_seed(seed)
    return [t for t in pytree.tree_leaves(model(**inputs)) if isinstance(t, Tensor) and t.is_floating_point()]


def step(model: nn.Module, inputs: dict[str, Any], seed: int = 0) -> dict[str, Tensor | None]:
    """Outputs, the gradient of every parameter and of every float input, and all buffers after one training step."""
    model.zero_grad(set_to_none=True)
    given = {k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in inputs.items()}
    outs = outputs(model, given, seed)
    generator = torch.Generator().manual_seed(1)
    pulls = [torch.randn(t.shape, generator=generator).to(t.device, t.dtype) for t in outs]
    sum((t * pull).sum() for t, pull in zip(outs, pulls, strict=True) if t.requires_grad).backward()
    found: dict[str, Tensor | None] = {f"output {i}": t.detach() for i, t in enumerate(outs)}
    found |= {f"gradient of input {k}": v.grad for k, v in given.items() if v.requires_grad}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return found | {f"buffer {name}": b.detach().clone() for name, b in model.named_buffers()}


def assert_alike(got: dict[str, Tensor | None], want: dict[str, Tensor | None], tolerance: float) -> None:
    """Each tensor is off by at most `tolerance` of its norm, or of the usual norm of its kind where its own is less."""
    assert list(got) == list(want)
    sizes: dict[str, list[float]] = {}
    for name, b in want.items():
        if b is not None and b.is_floating_point() and b.numel():
            sizes.setdefault(name.partition(" ")[0], []).append(b.double().norm().item() / b.numel() ** 0.5)
    for name, b in want.items():
        a = got[name]
        assert (a is None) == (b is None), f"{name}: {'no' if a is None else 'a'} value, the original's is not so"
        if a is None or b is None:
            continue
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), f"{name}: {a.dtype} {tuple(a.shape)}"
        if not b.is_floating_point():
            assert torch.equal(a, b), f"{name} differs"
            continue
        usual = sorted(sizes[name.partition(" ")[0]])[len(sizes[name.partition(" ")[0]]) // 2] if b.numel() else 0.0
        off, size = (a.double() - b.double()).norm().item(), b.double().norm().item()
        allowed = tolerance * max(size, usual * b.numel() ** 0.5)
        assert off <= allowed, f"{name}: off by {off:.3g} of {size:.3g}, allowed {allowed:.3g}"
