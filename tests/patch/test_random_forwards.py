"""Forwards written at random from layers, in-place edits, views, dropout and reuse: patched equals original, always.

What aliases what, which value is read again and which draw comes first is where rewriting a forward goes wrong. Each
seed writes one; the patched module must give the same outputs, gradients, running statistics and input, to the bit
of the random masks, in training and in evaluation.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedlayers as fl

from .models import twin

LAYERS = {
    "fc1": lambda: nn.Linear(5, 5),
    "fc2": lambda: nn.Linear(5, 5),
    "conv": lambda: nn.Conv1d(6, 6, 1),
    "bn1": lambda: nn.BatchNorm1d(6),
    "bn2": lambda: nn.BatchNorm1d(6),
    "ln": lambda: nn.LayerNorm(5),
    "rms": lambda: nn.RMSNorm(5),
    "gn": lambda: nn.GroupNorm(2, 6),
    "relu": lambda: nn.ReLU(),
    "relu_": lambda: nn.ReLU(inplace=True),
    "gelu": lambda: nn.GELU(),
    "silu_": lambda: nn.SiLU(inplace=True),
    "drop": lambda: nn.Dropout(0.4),
    "drop_": lambda: nn.Dropout(0.4, inplace=True),
    "none": lambda: nn.Dropout(0.0),
    "same": lambda: nn.Identity(),
    "seq": lambda: nn.Sequential(nn.Conv1d(6, 6, 1), nn.BatchNorm1d(6)),
    "act": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 5)),
}

SPLIT = ".reshape(4, {}, 2, 1, 5).permute(2, 0, 3, 1, 4).unbind(0)"
CHAINS = (
    "{v} = self.relu_(self.bn1({u}) + {w})",
    "{v} = self.bn2({u}); {v} += {w}; {v} = F.relu({v})",
    "{v} = self.ln(self.drop({u}) + {w})",
    "{t} = {u} + self.none({w}); {v} = self.rms({t}) + {t}",
    "{v} = {w} + self.drop(self.gamma * {u})",
    "{v} = self.drop_(self.bn2({u})); {v} += {w}",
    "{v} = self.seq({u}); {v} += {w}",
    "{v} = self.fc2(self.none(self.gelu(self.fc1({u}))))",
    "{v} = self.fc2(F.silu(self.fc1({u})) * self.conv({u}))",
    "{v} = self.silu_(self.gn({u}))",
    "{v} = {u} * (1 + {w}) + {w}",
    "{t} = self.fc1({u}); {v} = self.relu_({t}) * {w}",
    "{t} = self.fc1({u}); {v} = self.fc2({u}) + {t}",
    "{t} = self.fc2({u}); {u} += {w}; {v} = {t} * self.fc1({u})",
    "q, k = torch.cat([{u}, {w}], -1)" + SPLIT.format(6) + "; {t} = q.squeeze(1); {v} = k.squeeze(1)",
    "q, k = {u}" + SPLIT.format(3) + "; k = k * 2; {u} += {w}; {v} = torch.cat([q, k], 3).view(4, 6, 5)",
)


def write(seed: int) -> str:
    """The source of a forward."""
    rng = random.Random(seed)
    values, lines = ["v0"], ["    v0 = x * 1.0"]
    for n in range(1, rng.randint(4, 14)):
        # mostly the newest value, so that chains which the rules look for come up
        u = values[-1] if rng.random() < 0.75 else rng.choice(values)
        w, v = rng.choice(values), f"v{n}"
        kind = rng.random()
        if kind < 0.25:
            lines.append("    " + rng.choice(CHAINS).format(v=v, u=u, w=w, t=f"t{n}"))
            if rng.random() < 0.2 and f"t{n}" in lines[-1]:
                values.append(f"t{n}")
        elif kind < 0.55:
            lines.append(f"    {v} = self.{rng.choice(list(LAYERS))}({u})")
        elif kind < 0.70:
            lines.append(f"    {v} = {u} + {w}")
        elif kind < 0.76:
            lines.append(f"    {u} += {w}")
            continue
        elif kind < 0.80:
            lines.append(f"    {v} = {u} * {w}")
        elif kind < 0.84:
            lines.append(f"    {v} = self.gamma * {u}")
        elif kind < 0.88:
            lines.append(f"    {v} = F.dropout({u}, 0.3, self.training)")
        elif kind < 0.92:
            lines.append(f"    {v} = {rng.choice(['F.relu', 'torch.sigmoid', 'F.gelu'])}({u})")
        elif kind < 0.96:
            lines.append(f"    {v} = {u}.view(4, 6, 5)")
        else:
            lines.append(f"    {u}.mul_(0.5)")
            continue
        values.append(v)
    last = ", ".join(dict.fromkeys((values[-1], rng.choice(values))))
    return "\n".join(["def forward(self, x):", *lines, f"    return {last},"])


def make(source: str) -> nn.Module:
    scope: dict = {"F": F, "torch": torch}
    exec(source, scope)
    module = type("Random", (nn.Module,), {"forward": scope["forward"]})()
    for name, layer in LAYERS.items():
        setattr(module, name, layer())
    module.gamma = nn.Parameter(torch.rand(5) + 0.5)
    return module


def run(module: nn.Module, x: torch.Tensor, backward: bool) -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.reset_running_stats()
    x = x.clone().requires_grad_(backward)
    with torch.set_grad_enabled(backward):
        outs = module(x)
    found = [o.detach().clone() for o in outs]
    if backward:
        module.zero_grad()
        sum((o * o).sum() for o in outs).backward()
        found += [x.grad, *(p.grad for p in module.parameters())]
    return [*found, x.detach(), torch.rand(1), *(b.clone() for b in module.buffers())]


def assert_same(source: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> int:
    torch.manual_seed(0)
    original, x = make(source).to(device, dtype), torch.randn(4, 6, 5).to(device, dtype)
    rtol, atol = (1e-4, 1e-5) if dtype is torch.float32 else (1e-9, 1e-11)
    patched = fl.patch_model(twin(original), on_fallback="raise")
    sites = sum(not r.rule.startswith("lone") for r in fl.explain(patched).fused)
    for mode in (True, False):
        for backward in (False, True):
            for m in (original, patched):
                m.train(mode)
            try:
                want = run(original, x, backward)
            except RuntimeError:  # an in-place edit of what backward needs
                continue
            for got, expected in zip(run(patched, x, backward), want, strict=True):
                assert (got is None) == (expected is None), source
                if got is not None:
                    scale = expected.abs().max().clamp(min=1.0)
                    torch.testing.assert_close(
                        got / scale, expected / scale, rtol=rtol, atol=atol, msg=lambda m: m + "\n" + source
                    )
    return sites


@pytest.mark.parametrize("start", range(0, 80, 20))
def test_random_forwards(start):
    assert sum(assert_same(write(seed)) for seed in range(start, start + 20)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("start", range(100, 2100, 100))
def test_many_random_forwards(start):
    for seed in range(start, start + 100):
        assert_same(write(seed))
