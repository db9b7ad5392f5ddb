"""Times layer_norm and rms_norm over rows, with and without a residual add, forward and backward apart, on one GPU.

    python benchmarks/row_norms.py OUT.json [--rows 65536] [--cols 768 1024 4096 8192] [--seconds 80] [--no-compile]
    python benchmarks/row_norms.py OUT.json --sweep forward|backward [--residual] [--norm rms_norm] [--cols 1024]

Contenders: fused, eager, Liger-Kernel where it is installed, `torch.compile` while the seconds last. Each is a CUDA
graph; graphs take turns, the median counts. Fused results are held to the accuracy rule on a smaller batch first.
`--sweep` times tile choices of the fused kernels instead.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F

from fusedlayers import functional, settings
from fusedlayers.bench import report
from fusedlayers.bench.timing import copy_speed, peak_memory
from fusedlayers.kernels import next_power_of_2
from fusedlayers.ops import _row_norm

Fn = Callable[..., Any]


class Case:
    """The tensors of one norm, and what each contender makes of them."""

    def __init__(self, norm: str, rows: int, cols: int, residual: bool) -> None:
        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        torch.manual_seed(0)
        self.norm, self.cols, self.residual = norm, cols, residual
        self.name = f"{norm}{'+residual' if residual else ''} {rows}x{cols}"
        params = [randn(cols)] if norm == "rms_norm" else [randn(cols), randn(cols)]
        self.args = [t.requires_grad_() for t in (randn(rows, cols), *params, *([randn(rows, cols)] * residual))]
        self.grads = [randn(rows, cols) for _ in range(1 + residual)]
        unit = rows * cols * 2
        self.bytes = {"forward": (4 if residual else 2) * unit, "backward": (4 if residual else 3) * unit}

    def fused(self, x: torch.Tensor, *rest: torch.Tensor) -> Any:
        return self._call(getattr(functional, self.norm), x, rest, residual=rest[-1] if self.residual else None)

    def eager(self, x: torch.Tensor, *rest: torch.Tensor) -> Any:
        s = x + rest[-1] if self.residual else x
        y = self._call(getattr(F, self.norm), s, rest)
        return (y, s) if self.residual else y

    def _call(self, fn: Fn, x: torch.Tensor, rest: Sequence[torch.Tensor], **kwargs: Any) -> Any:
        params = rest[:1] if self.norm == "rms_norm" else rest[:2]
        return fn(x, (self.cols,), *params, eps=1e-6, **kwargs)

    def liger(self) -> Fn | None:
        try:
            if self.norm == "layer_norm":
                from liger_kernel.ops.layer_norm import LigerLayerNormFunction as Norm

                return None if self.residual else lambda x, w, b: Norm.apply(x, w, b, 1e-6)
            if self.residual:
                from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Norm

                return lambda x, w, r: Norm.apply(x, r, w, 1e-6, 0.0, "llama", False)
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Norm

            # its default overwrites the incoming gradient, which the next replay reads
            return lambda x, w: Norm.apply(x, w, 1e-6, 0.0, "llama", False)
        except ImportError:
            return None

    def step(self, fn: Fn) -> list[torch.Tensor]:
        outs = _outputs(fn(*self.args))
        return [*outs, *torch.autograd.grad(outs, self.args, self.grads)]


def _outputs(out: Any) -> tuple[torch.Tensor, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


REPEATS = 4


def capture(case: Case, fn: Fn, direction: str) -> torch.cuda.CUDAGraph:
    """A graph of `REPEATS` forwards, or backwards alone: their forward ran before, on the same stream."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        outs = _outputs(fn(*case.args))
        if direction == "forward":

            def run() -> Any:
                return fn(*case.args)
        else:

            def run() -> Any:
                return torch.autograd.grad(outs, case.args, case.grads, retain_graph=True)

        for _ in range(2):
            run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(REPEATS):
            run()
    graph.replay()
    torch.cuda.synchronize()
    graph.reads = outs  # and through their graph, what autograd kept
    return graph


def turns(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int = 25) -> dict[str, list[float]]:
    """Lower quartile, median and upper quartile of the microseconds of one run in each graph; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(1000 * begin.elapsed_time(end) / REPEATS)
    return {name: statistics.quantiles(found, n=4) for name, found in times.items()}


def worst_error(norm: str, cols: int, residual: bool) -> float:
    """The accuracy rule: fused error against float64 as a multiple of eager's, the worst of outputs and gradients."""
    case = Case(norm, 1000, cols, residual)
    found = case.step(case.fused), case.step(case.eager)
    case.args = [t.detach().double().requires_grad_() for t in case.args]
    case.grads = [t.double() for t in case.grads]
    ratios = []
    for f, e, x in zip(*found, case.step(case.eager), strict=True):
        floor = 1e-3 * x.norm()  # below half an ulp of bfloat16
        ratios.append(((f.double() - x).norm() / torch.maximum((e.double() - x).norm(), floor)).item())
    return max(ratios)


def run_case(case: Case, contenders: dict[str, Fn], speed: float) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case.name}
    for direction, nbytes in case.bytes.items():
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        for name, fn in contenders.items():
            try:
                graphs[name] = capture(case, fn, direction)
            except Exception as error:
                row.setdefault("failed", {})[f"{name} {direction}"] = f"{type(error).__name__}: {error}"[:300]
                torch.cuda.synchronize()
        for name, (low, us, high) in turns(graphs).items():
            found = {"us": us, "quartiles": [low, high], "of_copy": nbytes / (us / 1e6) / speed}
            row.setdefault(name, {})[direction] = found
        for graph in graphs.values():
            graph.reset()
        del graphs
        clear()
    for name, fn in contenders.items():
        if name in row:
            row[name]["peak_mib"] = peak_memory(lambda fn=fn: case.step(fn)) / 2**20
    return row


def clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def show(row: dict[str, Any]) -> None:
    line = f"{row['case']:28s}"
    for name in ("fused", "eager", "liger", "compile"):
        if "forward" in row.get(name, {}) and "backward" in row[name]:
            f, b = row[name]["forward"], row[name]["backward"]
            line += f" | {name} {f['us']:6.0f} {f['of_copy']:4.0%} {b['us']:6.0f} {b['of_copy']:4.0%}"
            line += f" {row[name]['peak_mib']:5.0f}M" if "peak_mib" in row[name] else ""
    print(line + "".join(f"\n    {what}: {why}" for what, why in row.get("failed", {}).items()), flush=True)


def run_all(args: argparse.Namespace) -> dict[str, Any]:
    began, speed = time.monotonic(), copy_speed()
    keys = [(norm, cols, res) for norm in args.norm for res in (False, True) for cols in args.cols]
    print(f"copy {speed / 1e12:.2f} TB/s; microseconds and share of copy bandwidth, forward then backward, peak memory")
    rows = {}
    for norm, cols, res in keys:
        case = Case(norm, args.rows, cols, res)
        contenders = {"fused": case.fused, "eager": case.eager, "liger": case.liger()}
        row = run_case(case, {name: fn for name, fn in contenders.items() if fn is not None}, speed)
        row["error"] = worst_error(norm, cols, res)
        assert row["error"] <= 1.5, f"the fused result is less accurate than eager's: {row}"
        rows[norm, cols, res] = row
        show(row)
        save(args, {"copy_bytes_per_s": speed, "rows": list(rows.values())})  # what there is, should time run out
        del case, contenders
        clear()
    torch._functorch.config.donated_buffer = False  # a backward that is replayed keeps its buffers
    for norm, cols, res in keys if args.compile else ():
        if time.monotonic() - began > args.seconds:
            break
        torch._dynamo.reset()
        case = Case(norm, args.rows, cols, res)
        found = run_case(case, {"fused": case.fused, "compile": torch.compile(case.eager, dynamic=False)}, speed)
        show(found)
        rows[norm, cols, res]["compile"] = found.get("compile", {})
        del case
        clear()
    return {"copy_bytes_per_s": speed, "rows": list(rows.values())}


def candidates(cols: int, direction: str) -> list[_row_norm.Tile]:
    wide = next_power_of_2(cols)
    tiles = []
    for rows in (1, 2, 4):
        for warps in (1, 2, 4, 8, 16):
            each = rows * wide // (32 * warps)
            if direction == "forward" and 8 <= each <= 64:
                tiles.append(_row_norm.Tile(rows, wide, warps))
            elif direction == "backward" and 8 <= each <= 32 and wide >= 128 * warps:
                for stages in (1, 2, 3):
                    for blocks in (max(1, 16 // warps), 2 * max(1, 16 // warps)):
                        tiles.append(_row_norm.Tile(rows, wide, warps, 1, blocks, stages))
    return tiles


def usual_tile(cols: int, direction: str, residual: bool) -> _row_norm.Tile:
    if direction == "forward":
        return _row_norm.forward_tile(cols, 4, residual)
    return _row_norm.backward_tile(cols, 4, 2, _row_norm._shared_memory(torch.device("cuda")))


def sweep(args: argparse.Namespace) -> dict[str, Any]:
    direction, speed, found = args.sweep, copy_speed(), []
    print(f"copy {speed / 1e12:.2f} TB/s")
    for norm in args.norm:
        for cols in args.cols:
            case = Case(norm, args.rows, cols, args.residual)
            default = getattr(_row_norm, f"{direction}_tile")
            graphs = {}
            usual = usual_tile(cols, direction, args.residual)
            for tile in dict.fromkeys([usual, *candidates(cols, direction)]):
                setattr(_row_norm, f"{direction}_tile", lambda *_, tile=tile: tile)
                _row_norm._cached_call.cache_clear()
                try:
                    graphs[tile] = capture(case, case.fused, direction)
                except Exception as error:
                    print(f"{tile}: {type(error).__name__}: {error}"[:300])
            setattr(_row_norm, f"{direction}_tile", default)
            _row_norm._cached_call.cache_clear()
            times = {tile: us for tile, (_, us, _) in turns(graphs).items()}
            print(f"{case.name} {direction}")
            for tile in sorted(times, key=times.__getitem__)[: args.best]:
                share = case.bytes[direction] / (times[tile] / 1e6) / speed
                print(f"  {times[tile]:7.1f} us {share:4.0%} {tile}{' (default)' if tile == usual else ''}")
            found.append({"case": case.name, "us": {str(tile): us for tile, us in times.items()}})
            del case, graphs
            clear()
    return {"copy_bytes_per_s": speed, "sweep": direction, "cases": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where the JSON goes")
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--cols", type=int, nargs="+", default=[768, 1024, 4096, 8192])
    parser.add_argument("--norm", nargs="+", default=["layer_norm", "rms_norm"], choices=["layer_norm", "rms_norm"])
    parser.add_argument("--seconds", type=float, default=80, help="after these no further case is compiled")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--sweep", choices=["forward", "backward"], help="time tile choices instead")
    parser.add_argument("--residual", action="store_true", help="sweep with a residual")
    parser.add_argument("--best", type=int, default=8, help="how many of a sweep to print")
    args = parser.parse_args()
    with settings(route="triton"):
        results = sweep(args) if args.sweep else run_all(args)
    save(args, results)


def save(args: argparse.Namespace, results: dict[str, Any]) -> None:
    args.out.write_text(json.dumps({**report.origin(), "M": args.rows, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
