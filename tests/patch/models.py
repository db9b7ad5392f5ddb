"""Small models that hold the situations the patching tests are about, and how to compare two of them."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """A linear and its activation by data flow, as a module, a function and a method; an argument that may be None."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(width, width)
        self.fc3 = nn.Linear(width, width)
        self.fc4 = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = x * mask
        x = self.act(self.fc(x)) + 1
        x = F.relu(self.fc2(x)) * 2
        return self.fc4(self.fc3(x).relu() - 1)


def network(width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), MLP(width), nn.Sequential(nn.Linear(width, width), nn.Tanh())
    )


class Pair(nn.Module):
    """`act(fc(x))` with whatever is given for either."""

    def __init__(self, fc: nn.Module, act: nn.Module):
        super().__init__()
        self.fc, self.act = fc, act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x))


def results(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> list[Tensor | None]:
    """Outputs, then input gradients, then every parameter gradient."""
    model.zero_grad(set_to_none=True)
    given = [a.detach().clone().requires_grad_() if a.is_floating_point() else a for a in args]
    out = model(*given, **kwargs)
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    sum(o.square().sum() for o in outs if o.requires_grad).backward()
    grads = [p.grad for p in model.parameters()]
    return [*outs, *(a.grad for a in given), *grads]


def assert_same(patched: nn.Module, original: nn.Module, *args: Tensor, **kwargs: Tensor) -> None:
    for got, want in zip(results(patched, *args, **kwargs), results(original, *args, **kwargs), strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
