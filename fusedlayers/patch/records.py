"""What a rewriting leaves behind: one record a site, and how much of what there is to fuse was fused."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.fx import Node

from ..activations import recognise
from . import effects
from .pattern import activation_of
from .shadow import Path

KINDS = ("activation", "norm", "residual")


@dataclass(frozen=True)
class Found:
    """One site in one module, members relative to it. `status` is fused, reduced or skipped."""

    status: str
    rule: str
    members: tuple[Path, ...]
    reason: str = ""
    index: int = 0
    """Which of several sites with the same members."""
    kind: str = ""
    """What a record is about that tells of one activation, norm or residual, which nothing here took in."""


@dataclass
class Counts:
    """How many activations, norms and residual adds a module's forward holds, and how many of them are fused."""

    total: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    fused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def __iadd__(self, other: Counts) -> Counts:
        for kind in KINDS:
            self.total[kind] += other.total[kind]
            self.fused[kind] += other.fused[kind]
        return self


def kind_of(node: Node, root: nn.Module) -> str | None:
    """Whether a node is one of the things that `explain` counts."""
    if activation_of(node, root) is not None:
        return "activation"
    if node.op == "call_module":
        child = effects.child(root, node.target)
        kind = None if child is None else kind_of_module(child)
        return kind if kind == "norm" else None
    if node.op not in ("call_function", "call_method") or len(node.args) != 2:
        return None
    if node.target not in (operator.add, operator.iadd, torch.add, "add", "add_"):
        return None
    return "residual" if all(effects.is_data(a) for a in node.args) else None


def kind_of_module(module: nn.Module) -> str | None:
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return "norm"
    if "Norm" in type(module).__name__ and (module._parameters or module._buffers) and not module._modules:
        return "norm"
    found = recognise(module)
    return "activation" if found is not None and found.name != "identity" else None
