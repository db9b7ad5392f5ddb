"""Whole layers: MLPs and gated MLPs, whose floor is their matrix products alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from ..activations import get
from .ops import rand
from .peers import DTYPES, Case

MLPS = (
    (8192, 1024, 4096, "gelu"),
    (8192, 1024, 4096, "relu"),
    (65536, 256, 1024, "silu"),
    (32768, 512, 2048, "gelu"),
    (8192, 4096, 16384, "gelu"),
)
"""Tokens, width, hidden width, activation."""


def mlp(rows: int, width: int, hidden: int, act: str, dtype: str = "bf16") -> Case:
    dt, activation = DTYPES[dtype], get(act)

    def make(d: torch.device) -> tuple:
        return (
            rand(d, dt, rows, width),
            rand(d, dt, hidden, width, scale=width**-0.5),
            rand(d, dt, hidden),
            rand(d, dt, width, hidden, scale=hidden**-0.5),
            rand(d, dt, width),
        )

    def gemms(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, g: Tensor) -> None:
        x, w1, w2 = x.detach(), w1.detach(), w2.detach()
        h = x @ w1.T
        h @ w2.T
        dh = g @ w2
        g.T @ h
        dh @ w1
        dh.T @ x

    weights = 2 * width * hidden
    return Case(
        f"mlp/{act}/{rows}x{width}-{hidden}-{width}/{dtype}",
        make,
        lambda *args: functional.mlp(*args, activation=act),
        lambda x, w1, b1, w2, b2: F.linear(activation(F.linear(x, w1, b1)), w2, b2),
        gemms=gemms,
        # the hidden tensor is written and read once a pass, its gradient too
        moved=(
            (rows * (2 * width + 2 * hidden) + weights) * dt.itemsize,
            (rows * (3 * width + 3 * hidden) + 2 * weights) * dt.itemsize,
        ),
        flops=12 * rows * width * hidden,
        shared=(1, 2, 3, 4),
    )


def gated_mlp(rows: int, width: int, hidden: int, act: str = "silu", dtype: str = "bf16") -> Case:
    dt, activation = DTYPES[dtype], get(act)

    def make(d: torch.device) -> tuple:
        return (
            rand(d, dt, rows, width),
            *(rand(d, dt, hidden, width, scale=width**-0.5) for _ in range(2)),
            rand(d, dt, width, hidden, scale=hidden**-0.5),
        )

    def gemms(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, g: Tensor) -> None:
        x, gate, up, down = (t.detach() for t in (x, gate, up, down))
        h = x @ gate.T
        x @ up.T
        h @ down.T
        dh = g @ down
        g.T @ h
        for w in (gate, up):
            dh @ w
            dh.T @ x

    def liger() -> Any:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return lambda x, gate, up, down: F.linear(LigerSiLUMulFunction.apply(F.linear(x, gate), F.linear(x, up)), down)

    weights = 3 * width * hidden
    return Case(
        f"gated_mlp/{act}/{rows}x{width}-{hidden}/{dtype}",
        make,
        lambda *args: functional.gated_mlp(*args, activation=act),
        lambda x, gate, up, down: F.linear(activation(F.linear(x, gate)) * F.linear(x, up), down),
        liger=liger if act == "silu" else None,
        gemms=gemms,
        moved=(
            (rows * (2 * width + 4 * hidden) + weights) * dt.itemsize,
            (rows * (3 * width + 6 * hidden) + 2 * weights) * dt.itemsize,
        ),
        flops=18 * rows * width * hidden,
        shared=(1, 2, 3),
    )


def cases(device: str) -> list[Case]:
    if device == "cpu":
        return [mlp(8, 16, 32, "gelu", "fp32"), gated_mlp(8, 16, 32, dtype="fp32")]
    return [*(mlp(*shape) for shape in MLPS), gated_mlp(8192, 4096, 11008)]
