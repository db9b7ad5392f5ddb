"""Times `scale_residual`, with and without dropout, and `gated_act` on one GPU, against a copy in the same run.

    python benchmarks/residual_ops.py OUT.json [--rows 65536] [--cols 1024] [--no-compile] [--variants]

Each case runs eager, compiled and fused: the forward alone and forward + backward, by CUDA graph replays where the
work can be captured, else by events; "backward" is the difference. `%copy`: the least bytes that must move, at the
speed of a large copy, over the time taken. `--variants` times tile choices of the fused op instead.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedlayers import functional, settings
from fusedlayers.bench import report
from fusedlayers.bench.timing import Effort, compare, copy_speed, input_sets
from fusedlayers.ops import scale_residual as op

EFFORT = Effort(rounds=7, turn_ms=4.0)


@dataclass(frozen=True)
class Case:
    """`make(rows, cols)` gives the inputs; forward and backward move so many times the bytes of one (rows, cols)."""

    name: str
    make: Callable[[int, int], tuple]
    fused: Callable[..., Tensor]
    eager: Callable[..., Tensor]
    moved: tuple[int, int]
    dropout: str = "eager"


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def branch(rows: int, cols: int) -> tuple:
    return tensor(rows, cols), tensor(rows, cols)


def scaled(rows: int, cols: int) -> tuple:
    return *branch(rows, cols), tensor(cols)


def samples(rows: int, cols: int) -> tuple:
    return *branch_of_samples(rows, cols), tensor(cols)


def branch_of_samples(rows: int, cols: int) -> tuple:
    return tuple(tensor(rows // 256, 256, cols) for _ in range(2))


def drop_path(z: Tensor) -> Tensor:
    return z * z.new_empty((len(z),) + (1,) * (z.dim() - 1)).bernoulli_(0.9).div_(0.9)


def fused(**drops: float) -> Callable[..., Tensor]:
    return lambda x, r, s=None: functional.scale_residual(x, r, s, training=True, **drops)


def cases() -> list[Case]:
    dropped, whole = "dropout(x) + residual", fused(dropout_p=0.1)
    found = [
        Case("scale * x + residual", scaled, fused(), lambda x, r, s: r + s * x, (3, 3)),
        Case("drop_path(scale * x) + residual", samples, fused(drop_path_p=0.1),
             lambda x, r, s: r + drop_path(s * x), (3, 3)),
        Case(dropped, branch, whole, lambda x, r: r + F.dropout(x, 0.1, True), (3, 2)),
        Case(f"{dropped}, fast", branch, whole, lambda x, r: r + F.dropout(x, 0.1, True), (3, 2), "fast"),
        Case("dropout(scale * x) + residual", scaled, whole,
             lambda x, r, s: r + F.dropout(s * x, 0.1, True), (3, 3)),
        Case("dropout(scale * x) + residual, fast", scaled, whole,
             lambda x, r, s: r + F.dropout(s * x, 0.1, True), (3, 3), "fast"),
    ]  # fmt: skip
    if hasattr(functional, "gated_act"):
        found.append(Case("silu(gate) * up", branch, functional.gated_act, lambda g, u: F.silu(g) * u, (3, 5)))
    return found


def forward(fn: Callable[..., Tensor], inputs: list[tuple]) -> Callable[[int], Any]:
    @torch.no_grad()
    def call(i: int) -> Any:
        return fn(*inputs[i])

    return call


def both(fn: Callable[..., Tensor], inputs: list[tuple], grad: Tensor) -> Callable[[int], Any]:
    def call(i: int) -> Any:
        y = fn(*inputs[i])
        return torch.autograd.grad(y, inputs[i], grad.view_as(y))

    return call


def measure(case: Case, rows: int, cols: int, copy: float, peers: str) -> list[dict[str, Any]]:
    unit = rows * cols * 2
    sets = input_sets(2 * unit)
    inputs = [case.make(rows, cols) for _ in range(sets)]
    grad = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    contenders = {"fused": case.fused}
    if peers:
        contenders["eager"] = case.eager
    if peers == "compile":
        torch._dynamo.reset()
        contenders["compile"] = torch.compile(case.eager)
    with settings(dropout=case.dropout, route="triton"):
        runs = [
            compare({name: forward(fn, inputs) for name, fn in contenders.items()}, sets, EFFORT),
            compare({name: both(fn, inputs, grad) for name, fn in contenders.items()}, sets, EFFORT),
        ]
    rows_found = []
    for name in contenders:
        one, two = (run[name] for run in runs)
        if one.device_ms is None or two.device_ms is None:
            rows_found.append({"case": case.name, "contender": name, "notes": [*one.notes, *two.notes]})
            continue
        times = {"forward": one.device_ms.median, "backward": two.device_ms.median - one.device_ms.median}
        for phase, moved in zip(times, case.moved, strict=True):
            rows_found.append(
                {
                    "case": case.name, "contender": name, "phase": phase, "ms": times[phase],
                    "percent_of_copy": 100 * moved * unit / copy / (times[phase] / 1e3),
                    "host_us": (one if phase == "forward" else two).host_us.median, "how": (one.how, two.how),
                    "peak_bytes": (one if phase == "forward" else two).peak_bytes, "notes": [*one.notes, *two.notes],
                }
            )  # fmt: skip
    return rows_found


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'case':38} {'contender':9} {'phase':8} {'ms':>7} {'%copy':>6} {'host us':>8} {'peak MiB':>8}"]
    for row in rows:
        if "ms" not in row:
            lines.append(f"{row['case']:38} {row['contender']:9} {'; '.join(row['notes'])[:80]}")
            continue
        lines.append(
            f"{row['case']:38} {row['contender']:9} {row['phase']:8} {row['ms']:7.3f} {row['percent_of_copy']:6.1f} "
            f"{row['host_us']:8.1f} {(row['peak_bytes'] or 0) / 2**20:8.0f}"
            + ("" if set(row["how"]) == {"graph"} else "  by events")
        )
    return "\n".join(lines)


def variants(rows: int, cols: int, copy: float) -> list[dict[str, Any]]:
    """Every case with other tiles, elements a block and warps, in the forward and in the backward."""
    found, before = [], (op.FORWARD, op.BACKWARD)
    for case in cases()[:6]:
        for elements in (1024, 2048, 4096, 8192):
            for warps in (4, 8):
                op.FORWARD = elements, elements, warps
                op.BACKWARD = elements, elements, warps, before[1][3]
                op._cached_call.cache_clear()
                for row in measure(case, rows, cols, copy, peers=""):
                    found.append({**row, "contender": f"{elements}/{warps}"})
    op.FORWARD, op.BACKWARD = before
    op._cached_call.cache_clear()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="where to write the figures (JSON)")
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--cols", type=int, default=1024)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--variants", action="store_true", help="time tile choices of the fused op instead")
    args = parser.parse_args()
    began = time.monotonic()
    copy = copy_speed()
    if args.variants:
        rows = variants(args.rows, args.cols, copy)
    else:
        peers = "eager" if args.no_compile else "compile"
        rows = [row for case in cases() for row in measure(case, args.rows, args.cols, copy, peers)]
    run = {
        **report.origin(), "rows": args.rows, "cols": args.cols, "dtype": "bfloat16", "copy_bytes_per_s": copy,
        "seconds": time.monotonic() - began, "results": rows,
    }  # fmt: skip
    args.out.write_text(json.dumps(run, indent=1) + "\n")
    print(f"{run['device']}, torch {run['torch']}, {args.rows}x{args.cols} bf16, copy {copy / 1e12:.2f} TB/s")
    print(table(rows))


if __name__ == "__main__":
    main()
