"""Times the 53 batch norms of ResNet-50 (batch 256, channels_last, bfloat16), forward and backward, on one GPU.

    python benchmarks/batch_norm_sites.py OUT.json [--batch 256] [--no-compile] [--variants [PART]]

Each distinct shape runs eager (`F.batch_norm`, add, `relu`), compiled and fused: the median of CUDA graph replays, the
fused outputs and gradients held to the accuracy rule. `--variants` times tile choices of the fused op instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fusedlayers import settings
from fusedlayers.activations import get
from fusedlayers.bench import report
from fusedlayers.bench.timing import copy_speed
from fusedlayers.ops import _tiling
from fusedlayers.ops import batch_norm_act as op


def resnet50_sites() -> dict[tuple[int, int, str], int]:
    """(channels, height, kind) -> how many; kinds: "relu", "add_relu" and "none" (downsampling)."""
    sites = {(64, 112, "relu"): 1}

    def add(channels: int, height: int, kind: str, count: int = 1) -> None:
        sites[channels, height, kind] = sites.get((channels, height, kind), 0) + count

    for width, blocks, before, height in ((64, 3, 56, 56), (128, 4, 56, 28), (256, 6, 28, 14), (512, 3, 14, 7)):
        add(width, before, "relu")  # the first block's 1x1 runs before the stride
        add(width, height, "relu", 2 * blocks - 1)
        add(4 * width, height, "add_relu", blocks)
        add(4 * width, height, "none")
    assert sum(sites.values()) == 53
    return sites


def eager(x: torch.Tensor, mean: Any, var: Any, weight: Any, bias: Any, residual: Any, kind: str) -> torch.Tensor:
    y = F.batch_norm(x, mean, var, weight, bias, True, 0.1, 1e-5)
    if residual is not None:
        y = y + residual
    return y if kind == "none" else F.relu(y)


def fused(x: torch.Tensor, mean: Any, var: Any, weight: Any, bias: Any, residual: Any, kind: str) -> torch.Tensor:
    act = get("identity" if kind == "none" else "relu")
    return op.batch_norm_act(x, mean, var, weight, bias, True, 0.1, 1e-5, act, residual)


class Site:
    """The tensors of one shape."""

    def __init__(self, batch: int, channels: int, height: int, kind: str) -> None:
        def randn() -> torch.Tensor:
            t = torch.randn(batch, channels, height, height, device="cuda", dtype=torch.bfloat16)
            return t.to(memory_format=torch.channels_last)

        torch.manual_seed(0)
        self.kind = kind
        self.x, self.grad = randn().requires_grad_(), randn()
        self.residual = randn().requires_grad_() if kind == "add_relu" else None
        self.weight = (torch.rand(channels, device="cuda") + 0.5).requires_grad_()
        self.bias = torch.randn(channels, device="cuda").requires_grad_()
        self.mean, self.var = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
        units = (3 + 5) + (3 if kind == "add_relu" else 0)  # (2r + 1w) + (4r + 1w), and residual's r + r + w
        self.bytes = units * self.x.numel() * 2

    def step(self, fn: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        y = fn(self.x, self.mean, self.var, self.weight, self.bias, self.residual, self.kind)
        wanted = [t for t in (self.x, self.weight, self.bias, self.residual) if t is not None]
        return y, torch.autograd.grad(y, wanted, self.grad)


STEPS = 8


def replay(step: Callable[[], Any], seconds: float) -> float:
    """Median milliseconds of `step` in replays of a CUDA graph that holds `STEPS` of them, one after another."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(STEPS):
            step()
    times: list[float] = []
    graph.replay()
    torch.cuda.synchronize()
    while sum(times) < 1000 * seconds and len(times) < 200:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) / STEPS


def phases(site: Site, fn: Callable[..., torch.Tensor], seconds: float) -> dict[str, float]:
    """Milliseconds of forward alone (that keeps what backward needs), and of forward with backward."""
    both = replay(lambda: site.step(fn), seconds)
    args = (site.x, site.mean, site.var, site.weight, site.bias, site.residual, site.kind)
    return {"forward": replay(lambda: fn(*args), seconds), "both": both}


def worst_error(site: Site) -> float:
    """The accuracy rule: fused error against float32 as a multiple of eager's, the worst of outputs and gradients."""
    exact = Site.__new__(Site)
    exact.__dict__ = {
        k: t.detach().float().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t
        for k, t in vars(site).items()
    }
    worst = 0.0
    results = (_flat(site.step(fused)), _flat(site.step(eager)), _flat(exact.step(eager)))
    for f, e, x in zip(*results, strict=True):
        floor = 1e-3 * x.norm()  # below half an ulp of bfloat16
        worst = max(worst, ((f.float() - x).norm() / torch.maximum((e.float() - x).norm(), floor)).item())
    return worst


def _flat(result: tuple[torch.Tensor, tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    return [result[0], *result[1]]


VARIANTS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "default": ({}, {}),
    "sums 2 x 8 warps": ({"sum_blocks": 2, "sum_warps": 8, "sum_elements": 4096},) * 2,
    "apply stages 1": ({"own_stages": 1, "saved_stages": 1},) * 2,
    "apply stages 2": ({"own_stages": 2, "saved_stages": 2},) * 2,
    "apply stages 4": ({"own_stages": 4, "saved_stages": 4},) * 2,
    "span 4": ({"saved_span": 4},) * 2,
    "span 8": ({"saved_span": 8},) * 2,
    "apply tiles doubled, 8 warps": ({"saved_bytes": 16384, "saved_warps": 8},) * 2,
    "unroll 2/1": ({"sum_unroll": 2}, {"sum_unroll": 1}),
    "unroll 8/4": ({"sum_unroll": 8}, {"sum_unroll": 4}),
    "sums 2 blocks": ({"sum_blocks": 2},) * 2,
    "sums 3 blocks": ({"sum_blocks": 3},) * 2,
    "sums 6 blocks": ({"sum_blocks": 6},) * 2,
    "span 1": ({"saved_span": 1},) * 2,
    "span 2": ({"saved_span": 2},) * 2,
    "span 3": ({"saved_span": 3},) * 2,
    "combine 8 channels": ({"combine_channels": 8},) * 2,
    "combine 4 channels": ({"combine_channels": 4},) * 2,
    "combine 4 warps": ({"combine_warps": 4},) * 2,
    "channels 64": ({"wide_channels": 64},) * 2,
    "channels 128": ({"channels": 128},) * 2,
    "channels 256": ({"channels": 256, "wide_channels": 256},) * 2,
}


def use(variant: str) -> None:
    forward, backward = VARIANTS[variant]
    _tiling.FORWARD = dataclasses.replace(_FORWARD, **forward)
    _tiling.BACKWARD = dataclasses.replace(_BACKWARD, **backward)
    _tiling.tiling.cache_clear()
    op._cached_call.cache_clear()


_FORWARD, _BACKWARD = _tiling.FORWARD, _tiling.BACKWARD


def run_variants(batch: int, seconds: float, part: str) -> dict[str, Any]:
    sites = resnet50_sites()
    names = [n for n in VARIANTS if n == "default" or part in n]
    results: dict[str, Any] = {}
    for name in names:
        use(name)
        rows = {}
        for (channels, height, kind), count in sites.items():
            site = Site(batch, channels, height, kind)
            rows[f"{channels}x{height} {kind}"] = {"count": count, **phases(site, fused, seconds)}
        total = {p: sum(r["count"] * r[p] for r in rows.values()) for p in ("forward", "both")}
        results[name] = {"sites": rows, **total}
        print(f"{name:34s} forward {total['forward']:7.3f}  both {total['both']:7.3f} ms", flush=True)
    use("default")
    print("\nbest of each shape (forward; backward = both - forward):")
    for key in results["default"]["sites"]:

        def time(name: str, phase: str, key: str = key) -> float:
            row = results[name]["sites"][key]
            return row["forward"] if phase == "forward" else row["both"] - row["forward"]

        line = f"{key:18s}"
        for phase in ("forward", "backward"):
            best = min(names, key=lambda n: time(n, phase))
            line += f"  {phase} {1000 * time('default', phase):7.1f} -> {1000 * time(best, phase):7.1f} us ({best})"
        print(line)
    return results


def run_sites(args: argparse.Namespace) -> dict[str, Any]:
    speed = copy_speed()
    routes: dict[str, Callable[..., torch.Tensor]] = {"eager": eager, "fused": fused}
    if not args.no_compile:
        torch._dynamo.config.cache_size_limit = 64
        routes["compile"] = torch.compile(eager, dynamic=False)
    rows = []
    print(
        f"copy {speed / 1e12:.2f} TB/s\n{'site':18s} n "
        + "".join(f"{r:>18s}" for r in routes)
        + "   limit  error ratio"
    )
    for (channels, height, kind), count in resnet50_sites().items():
        site = Site(args.batch, channels, height, kind)
        row = {"channels": channels, "height": height, "kind": kind, "count": count, "error": worst_error(site)}
        row["limit"] = site.bytes / speed * 1000
        row |= {name: phases(site, fn, args.seconds) for name, fn in routes.items()}
        rows.append(row)
        save(args, {"copy_bytes_per_s": speed, "sites": rows})  # what there is, should time run out
        times = "".join(f"{row[r]['forward']:9.3f}{row[r]['both']:9.3f}" for r in routes)
        print(f"{channels:5d}x{height:<4d}{kind:8s} {count} {times} {row['limit']:7.3f} {row['error']:.2f}", flush=True)
        assert row["error"] <= 1.5, f"the fused result is less accurate than eager's: {row}"
    total = {r: sum(row["count"] * row[r]["both"] for row in rows) for r in routes}
    total["limit"] = sum(row["count"] * row["limit"] for row in rows)
    print("all 53 sites, ms: " + ", ".join(f"{r} {t:.2f}" for r, t in total.items()))
    return {"copy_bytes_per_s": speed, "sites": rows, "total_ms": total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where the JSON goes")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=0.05, help="of replays in each measurement")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--variants", nargs="?", const="", metavar="PART", help="time tile choices, or those named so")
    args = parser.parse_args()
    with settings(route="triton"):
        if args.variants is not None:
            results = run_variants(args.batch, args.seconds, args.variants)
        else:
            results = run_sites(args)
    save(args, results)


def save(args: argparse.Namespace, results: dict[str, Any]) -> None:
    args.out.write_text(json.dumps({**report.origin(), "batch": args.batch, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
