"""One run of a model for comparison: all that comes out of it, and everything put back as it was found."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import apply
from .guards import STATE

DIRECT = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Relative difference that rounding explains in a deep model, by the coarsest dtype it computes in."""


@dataclass
class Results:
    """What came out of a run, by kind and name.

    Attributes:
        drew: whether torch's default generators moved on.
        dtype: the coarsest the model computed in.
    """

    tensors: dict[tuple[str, str], Tensor | None]
    drew: bool
    dtype: torch.dtype


def run(
    model: nn.Module,
    inputs: Sequence[Any],
    kwinputs: dict[str, Any],
    backward: bool,
    mode: AbstractContextManager[Any] | None = None,
    input_gradients: bool = True,
) -> Results:
    """Outputs, gradients and buffers of a forward and backward pass; only these two run under `mode`.

    `input_gradients`: every floating-point input is to have one, instead of those that the caller wants one for.
    """
    mode = nullcontext() if mode is None else mode
    before = _random_state()
    leaves: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            asked = backward and (input_gradients or value.requires_grad)
            value = value.detach().clone().requires_grad_(asked)
            if asked:
                leaves.append(value)
        return value

    args, kwargs = pytree.tree_map(leaf, (tuple(inputs), dict(kwinputs)))
    with torch.enable_grad() if backward else torch.no_grad():
        with mode:
            out = model(*args, **kwargs)
        flat = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        found: dict[tuple[str, str], Tensor | None] = {("output", str(i)): t.detach() for i, t in enumerate(flat)}
        if backward:
            named = [(("input gradient", str(i)), t) for i, t in enumerate(leaves)]
            named += [(("parameter gradient", n), p) for n, p in model.named_parameters() if p.requires_grad]
            roots = [t for t in flat if t.requires_grad]
            pulls = [_cotangent(t, i) for i, t in enumerate(roots)]
            with mode:
                grads = _gradients(model, roots, pulls, [t for _, t in named])
            found.update((key, grad) for (key, _), grad in zip(named, grads, strict=True))
    buffers = [(n, b) for n, b in model.named_buffers() if b is not None]
    found.update({("buffer", n): b.detach().clone() for n, b in buffers})
    return Results(found, not _same_random(before, _random_state()), _coarsest(model, flat))


def _coarsest(model: nn.Module, outputs: Sequence[Tensor]) -> torch.dtype:
    used = {t.dtype for t in (*model.parameters(), *outputs) if t.is_floating_point()} & DIRECT.keys()
    for device in {p.device.type for p in model.parameters()}:
        if torch.is_autocast_enabled(device):
            used.add(torch.get_autocast_dtype(device))
    return max(used, key=lambda d: DIRECT.get(d, 1.0), default=torch.float32)


def _cotangent(t: Tensor, seed: int) -> Tensor:
    """The same in every run and dtype, from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(t.shape, generator=generator, dtype=torch.float32)
    return drawn.to(torch.bfloat16).to(t.device, t.dtype)


def _gradients(model: nn.Module, roots: list[Tensor], pulls: list[Tensor], wanted: list[Tensor]) -> list[Tensor | None]:
    if not roots or not wanted:
        return [None] * len(wanted)
    try:
        return list(torch.autograd.grad(roots, wanted, pulls, allow_unused=True))
    except RuntimeError as error:
        if "checkpoint" not in str(error).lower() or any(
            getattr(p, "_post_accumulate_grad_hooks", None) for p in wanted
        ):
            raise
    kept = [(p, p.grad) for p in model.parameters()]  # reentrant checkpointing knows only backward()
    try:
        for p, _ in kept:
            p.grad = None
        torch.autograd.backward(roots, pulls)
        return [t.grad for t in wanted]
    finally:
        for p, grad in kept:
            p.grad = grad


@contextlib.contextmanager
def restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """These patched modules as the originals they were."""
    held = [(m, type(m), m.__dict__.get(STATE)) for m in modules]
    try:
        for m, _, _ in held:
            apply.restore(m)
        yield
    finally:
        for m, cls, site in held:
            apply.swap(m, cls, site)


@contextlib.contextmanager
def as_found(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Gives a function that puts buffers and generators back; done once more at the end."""
    buffers = [
        (m, name, b, None if b is None else b.detach().clone())
        for m in model.modules()
        for name, b in m._buffers.items()
    ]
    state = _random_state()

    def rewind() -> None:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                if buffer is not None and not _unchanged(buffer, value):
                    buffer.copy_(value)
        _set_random_state(state)

    try:
        yield rewind
    finally:
        rewind()


def _unchanged(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])


def _same_random(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return torch.equal(a["cpu"], b["cpu"]) and all(
        torch.equal(x, y) for x, y in zip(a.get("cuda", ()), b.get("cuda", ()), strict=False)
    )
