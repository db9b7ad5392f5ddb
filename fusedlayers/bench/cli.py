"""The command line of `python -m fusedlayers bench`."""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ..settings import ROUTES, settings
from . import ops, report
from .peers import PEERS, Case, DeviceLost, run_cases
from .timing import QUICK, Budget, Effort


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one kind of benchmark; returns the exit code: 1 where a case failed."""
    args = _parser().parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    budget = Budget(args.budget)
    peers = [p for p in args.peers.split(",") if p]
    unknown = set(peers) - set(PEERS)
    if unknown:
        raise SystemExit(f"bench: unknown peers {', '.join(sorted(unknown))} (known: {', '.join(PEERS)})")
    if "liger" in peers and args.kind != "models" and importlib.util.find_spec("liger_kernel") is None:
        print("liger is left out: liger-kernel is not installed", flush=True)
        peers.remove("liger")
        args.peers = ",".join(peers)
    if args.plot and importlib.util.find_spec("matplotlib") is None:  # said before anything is measured, not after
        raise SystemExit("bench: --plot needs matplotlib: pip install 'fusedlayers[bench]'")
    if args.grid and args.kind != "ops":
        raise SystemExit("bench: --grid is for ops")
    args.json = args.json or report.folder(report.device_name(device)) / f"{file_name(args)}.json"
    if os.path.isdir(args.json):
        raise SystemExit(f"bench: --json names a folder: {args.json}")
    try:
        with settings(route=args.route):
            if args.kind == "models":
                from . import models

                return models.main(args, peers, device, budget)
            return run(args, peers, device, budget)
    except DeviceLost as lost:
        print(f"the device is lost ({lost}); going on in a new process", flush=True)
        left = [] if args.budget is None else ["--budget", f"{max(budget.left, 0):.0f}"]
        given = sys.argv[1:] if argv is None else argv
        command = [sys.executable, "-m", "fusedlayers.bench", *given, *left, "--resume", "--device-lost"]
        os.execv(sys.executable, command)


def run(args: argparse.Namespace, peers: list[str], device: str, budget: Budget) -> int:
    """The kinds that are made of cases: ops and layers."""
    cases = chosen(args, device)
    if not cases:
        raise SystemExit(f"bench: no case matches {args.only!r}")
    kept = report.earlier(args, {c.name for c in cases})
    done = {r["case"] for r in kept}
    cases = [c for c in cases if c.name not in done]
    found = report.envelope(args, device)
    found["results"] = kept
    effort = (Effort(rounds=40, turn_ms=1.0) if args.grid else Effort()) if device == "cuda" else QUICK

    def emit(result: dict[str, Any]) -> None:
        found["results"].append(result)
        report.save(found, args.json)  # after each case, so that a run that is cut off leaves what it had
        print(one_line(result), flush=True)

    run_cases(cases, peers, device, effort, budget, emit, control=args.grid)
    if args.grid:
        print("\n".join(report.grid_summary(found["results"])))
    if args.plot:
        from . import plots

        print(*plots.draw(found, args.json), sep="\n")
    print(f"written: {args.json}")
    return 1 if any("error" in r for r in found["results"]) else 0


def file_name(args: argparse.Namespace) -> str:
    """What a run is called where nobody names it; a forced route is not what users get, and so never overwrites it."""
    return ("grid" if args.grid else args.kind) + ("" if args.route == "auto" else f"-{args.route}")


def chosen(args: argparse.Namespace, device: str) -> list[Case]:
    if args.kind == "layers":
        from . import layers

        cases = layers.cases(device)
    elif device == "cpu":
        cases = ops.small_cases()
    else:
        cases = ops.grid_cases() if args.grid else ops.key_cases()
    return [c for c in cases if fnmatch.fnmatch(c.name, args.only)]


def one_line(result: dict[str, Any]) -> str:
    """A case in one line, for whoever watches the run."""
    if "peers" not in result:
        return f"{result['case']}: {result.get('error') or result.get('skipped')}"
    parts = []
    for name, timing in result["peers"].items():
        time = timing["device_ms"] or timing["wall_ms"]
        if time is None:
            parts.append(f"{name}: {'; '.join(timing['notes'])}")
        else:
            host = timing["host_us"]["median"] if timing["host_us"] else float("nan")
            parts.append(f"{name} {time['median']:.4g} ms, host {host:.0f} µs")
    return f"{result['case']}: " + " | ".join(parts)


def _parser() -> argparse.ArgumentParser:
    about = "Measure ops, layers and models against their peers; on a CPU at tiny sizes, to see that it runs."
    parser = argparse.ArgumentParser(prog="python -m fusedlayers bench", description=about)
    parser.add_argument("kind", choices=("ops", "layers", "models"))
    parser.add_argument("--peers", default="eager,compile,liger", help="comma-separated: eager, compile, liger")
    default = "benchmarks/results/<device>/, as ops.json, grid.json, grid-triton.json, ..."
    parser.add_argument("--json", metavar="PATH", help=f"where the results go (default: {default})")
    parser.add_argument("--plot", action="store_true", help="also draw PNGs beside the JSON")
    parser.add_argument(
        "--only", default="*", metavar="GLOB", help="only cases that match; of models also first-step, lengths"
    )
    parser.add_argument("--budget", type=seconds, metavar="SECONDS", help="start no case after this time")
    parser.add_argument("--grid", action="store_true", help="ops: many sizes against eager and a second copy of it")
    parser.add_argument("--route", choices=ROUTES, default="auto", help="the route the library is held to")
    parser.add_argument(
        "--resume", action="store_true", help="keep what the JSON has, run only what is missing or failed"
    )
    parser.add_argument("--device-lost", action="store_true", help=argparse.SUPPRESS)  # a process after `DeviceLost`
    return parser


def seconds(text: str) -> float:
    """An option's value; argparse names the function where it complains."""
    value = float(text)
    if math.isnan(value):  # neither used up nor left
        raise ValueError
    return value
