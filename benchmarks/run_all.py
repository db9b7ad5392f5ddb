"""Everything that needs a GPU, in one go and within a time limit: the device tests, then the benchmarks.

    python benchmarks/run_all.py --out results --budget 540 --parts tests:240,ops,layers,grid

A part is a name, or `name:seconds` for its own limit. Each runs in a process of its own, so one that crashes or loses
the device costs only itself. All output goes to `run.log`, each benchmark's figures to a JSON beside it, and a compact
summary is printed last.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PYTHON = [sys.executable]
BENCH = [*PYTHON, "-m", "fusedlayers.bench"]
SCRIPTS = {"batch-norm": "batch_norm_sites", "row-norms": "row_norms", "residual": "residual_ops"}


def commands(out: Path) -> dict[str, list[str]]:
    """Each part's command; `{left}` stands for the seconds it may take."""
    scripts = {
        name: [*PYTHON, f"benchmarks/{script}.py", str(out / f"{name}.json")] for name, script in SCRIPTS.items()
    }

    def bench(kind: str, file: str, *more: str) -> list[str]:
        return [*BENCH, kind, "--json", str(out / f"{file}.json"), "--budget", "{left}", *more]

    tests = [*PYTHON, "-m", "pytest", "tests/gpu", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    return {
        "tests": [*tests, "--maxfail=20"],
        "sanitizer": ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9",
                      *tests, "-k", "ragged or layout"],
        "ops": bench("ops", "ops"),
        "ops-eager": bench("ops", "ops", "--peers", "eager,liger"),
        "grid": bench("ops", "grid", "--grid", "--peers", "eager"),
        "grid-triton": bench("ops", "grid-triton", "--grid", "--peers", "eager", "--route", "triton"),
        "layers": bench("layers", "layers"),
        "models": bench("models", "models", "--peers", "eager"),
        "compile": bench("models", "models-compile", "--peers", "compile", "--resume"),
        "first-step": bench("models", "models", "--peers", "", "--only", "first-step", "--resume"),
        "lengths": bench("models", "models", "--peers", "", "--only", "lengths", "--resume"),
        "lengths-compile": bench("models", "models", "--peers", "compile", "--only", "lengths", "--resume"),
        **scripts,
    }  # fmt: skip


def run(command: list[str], limit: float, log: Path) -> tuple[int | None, str, float]:
    """Exit code (`None`: stopped at the limit), output and seconds; stops the whole process group at the limit."""
    begin = time.monotonic()
    with log.open("a") as sink:
        sink.write(f"\n$ {' '.join(command)}\n")
        sink.flush()
        offset = log.stat().st_size
        process = subprocess.Popen(command, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    with log.open("rb") as source:
        source.seek(offset)
        text = source.read().decode(errors="replace")
    return code, text, time.monotonic() - begin


def summary(out: Path, outputs: dict[str, str]) -> str:
    """What to read first: failed tests, then each benchmark's figures, shortest form."""
    from fusedlayers.bench import report

    lines = []
    for part in ("tests", "sanitizer"):
        if part in outputs:
            shown = [x for x in outputs[part].splitlines() if re.match(r"FAILED|ERROR|\d+ (passed|failed|error)", x)]
            lines += [f"== {part}", *(x[:230] for x in shown[-24:])]
    for part in SCRIPTS:
        if part in outputs:
            lines += [f"== {part}", *(x[:200] for x in outputs[part].splitlines()[-28:])]
    for path in sorted(out.glob("*.json")):
        try:
            data = json.loads(path.read_text())
            if "kind" in data:
                lines += [f"== {path.stem}", *report.brief(data)]
        except Exception as error:
            lines.append(f"== {path.stem}: no summary ({type(error).__name__}: {error})")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the log and the JSON files")
    parser.add_argument("--parts", default="tests,ops,layers,grid,models", help="comma-separated, in order")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for everything")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    known = commands(args.out.resolve())
    end = time.monotonic() + args.budget
    outputs: dict[str, str] = {}
    codes = []
    for part in args.parts.split(","):
        name, _, own = part.partition(":")
        if name not in known:
            raise SystemExit(f"unknown part {name!r} (known: {', '.join(known)})")
        left = min(end - time.monotonic(), float(own or "inf"))
        if left < 5:
            print(f"{name}: not run, the time is used up", flush=True)
            continue
        command = [word.replace("{left}", f"{max(left - 15, 5):.0f}") for word in known[name]]
        code, outputs[name], took = run(command, left, args.out / "run.log")
        codes.append(code)
        print(f"{name}: {'stopped at its limit' if code is None else f'exit {code}'} after {took:.0f} s", flush=True)
        if code and name != "tests":
            print("\n".join(outputs[name].splitlines()[-6:])[-900:], flush=True)
    print(summary(args.out, outputs), flush=True)
    return 0 if all(code == 0 for code in codes) else 1


if __name__ == "__main__":
    sys.exit(main())
