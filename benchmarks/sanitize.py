"""Every op, forward and backward, once at small ragged sizes: something for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python benchmarks/sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/sanitize.py

A few activations by default, since the sanitizer slows kernels a hundredfold; `--all` takes every one.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fusedlayers as fl
from tests.op_table import OPS, REPRESENTATIVE, activation

SIZES = [((3,), 1), ((33,), 17), ((5, 7), 130), ((1,), 513)]
DTYPES = [torch.float32, torch.bfloat16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every activation")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    calls = 0
    with fl.settings(route="triton"):
        for op, (lead, n), dtype in itertools.product(OPS.values(), SIZES, DTYPES):
            rows, features = op.least
            lead, n = (max(lead[0], rows), *lead[1:]), max(n, features)
            acts = (op.activations if options.all else REPRESENTATIVE) if op.activated else ("-",)
            for act in acts:
                inputs = op.inputs(lead, n, dtype, options.device)
                outs = op.fused(activation(act) if op.activated else None, *inputs)
                outs = outs if isinstance(outs, tuple) else (outs,)
                torch.autograd.grad(outs, inputs, [torch.ones_like(o) for o in outs])
                calls += 1
    if options.device == "cuda":
        torch.cuda.synchronize()
    print(f"{calls} calls of {len(OPS)} ops, forward and backward")
    return 0


if __name__ == "__main__":
    sys.exit(main())
