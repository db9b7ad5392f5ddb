"""Every op, forward and backward, once at small ragged sizes: something for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python benchmarks/sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/sanitize.py

A few activations by default, since the sanitizer slows kernels a hundredfold; `--all` takes every one, and `--only
GLOB,...` some of the ops.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fusedlayers as fl
from fusedlayers import functional as fused
from fusedlayers.ops import _overlap
from fusedlayers.ops.layer_norm import dropout_layer_norm
from tests.op_table import OPS, REPRESENTATIVE, activation

SIZES = [((3,), 1), ((33,), 17), ((5, 7), 130), ((1,), 513)]
DTYPES = [torch.float32, torch.bfloat16]

Random = Callable[..., torch.Tensor]
"""Makes an input of these sizes that wants a gradient."""


def backward(outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    torch.autograd.grad(outs, inputs, [torch.ones_like(o) for o in outs])


def dropout_residual(rand: Random, n: int) -> None:
    x, r, s = rand(33, n), rand(33, n), rand(n)
    backward([fused.scale_residual(x, r, s, dropout_p=0.3, training=True)], [x, r, s])


def dropout_norm(rand: Random, n: int) -> None:
    x, r, w, b = rand(33, n), rand(33, n), rand(n), rand(n)
    backward(dropout_layer_norm(x, r, 0.3, True, (n,), w, b), [x, r, w, b])


def biased_dropout_norm(rand: Random, n: int) -> None:
    """Whose backward sums a third gradient: that of the bias which was added to x."""
    x, r, w, b, bias = rand(33, n), rand(33, n), rand(n), rand(n), rand(n)
    backward(dropout_layer_norm(x, r, 0.3, True, (n,), w, b, shift=bias), [x, r, w, b, bias])


def channels_last_norm(rand: Random, n: int) -> None:
    """Of channels that fit no tile, so that rows are walked several at a time."""
    x, w, b = rand(8, 8 * (n % 5 + 3), 16, 16), rand(8 * (n % 5 + 3)), rand(8 * (n % 5 + 3))
    images = x.to(memory_format=torch.channels_last)
    backward([fused.batch_norm_act(images, None, None, w, b, True, 0.1, 1e-5, "relu")], [x, w, b])


def overlapped_mlp(rand: Random, n: int) -> None:
    """Products with their activation behind them in one kernel, at a size that would not pay."""
    x, w1, b1, w2, b2 = rand(n + 128, 256), rand(8 * n, 256), rand(8 * n), rand(256, 8 * n), rand(256)
    with fl.settings(route="auto"), mock.patch.object(_overlap, "SMALLEST", 0):
        backward([fused.mlp(x, w1, b1, w2, b2, "silu")], [x, w1, b1, w2, b2])


MORE = {
    f.__name__: f for f in (dropout_residual, dropout_norm, biased_dropout_norm, channels_last_norm, overlapped_mlp)
}
"""What the table of ops has not: those that draw, a layout, and a kernel that small products are not left to."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every activation")
    parser.add_argument("--only", metavar="GLOB,...", default="*", help="the ops whose name matches one")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()

    def wanted(named: dict[str, Any]) -> list[Any]:
        return [it for name, it in named.items() if any(fnmatch.fnmatch(name, g) for g in options.only.split(","))]

    ops, more = wanted(OPS), wanted(MORE)
    calls = 0
    with fl.settings(route="triton"):
        for op, (lead, n), dtype in itertools.product(ops, SIZES, DTYPES):
            rows, features = op.least
            lead, n = (max(lead[0], rows), *lead[1:]), max(n, features)
            acts = (op.activations if options.all else REPRESENTATIVE) if op.activated else ("-",)
            for act in acts:
                inputs = op.inputs(lead, n, dtype, options.device)
                outs = op.fused(activation(act) if op.activated else None, *inputs)
                outs = outs if isinstance(outs, tuple) else (outs,)
                backward(outs, inputs)
                calls += 1
        for step, n, dtype in itertools.product(more, (17, 24, 130), DTYPES):

            def rand(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
                return torch.randn(shape, device=options.device, dtype=dtype, requires_grad=True)

            step(rand, n)
            calls += 1
    if options.device == "cuda":
        torch.cuda.synchronize()
    print(f"{calls} calls of {len(ops) + len(more)} ops, forward and backward")
    return 0


if __name__ == "__main__":
    sys.exit(main())
