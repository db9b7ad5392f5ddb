"""Results as files: one JSON a run, and the Markdown tables made from it."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import re
from collections.abc import Collection, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from .peers import over, ratio
from .timing import ceilings

RESULTS = Path("benchmarks") / "results"

_FUSED = "milliseconds of this library, forward and backward together unless the case says forward"
_TIMES = "how many times as fast as these, by the same clock; - where one has no such op"
_STEPS = "how many times as fast as eager by the wall clock"
_FULL = "likewise, of the patched model, gradient clipping and fused AdamW included in both"
_ONE_CPU = "with the process's threads on one CPU, where none sleeps and wakes at a lower clock"
_KERNELS = "how many times as fast as eager by the sum of the step's kernels"
COLUMNS = {
    "case": "op, what of it, sizes, dtype",
    "fused, device ms": _FUSED,
    "fused, wall ms": _FUSED,
    "x eager": _TIMES,
    "x compile": _TIMES,
    "x liger": _TIMES,
    "x eager again": "a second copy of eager in place of the first: what the two columns differ by is noise",
    "wall x eager": f"how many times as fast as eager by the wall clock, one call after another, {_ONE_CPU}",
    "host µs (eager's)": "until a call is queued, likewise",
    "of copy speed": "the least bytes that the case must move, over its time, as a share of what a large copy reaches",
    "GEMMs alone, ms": "its matrix products and nothing else",
    "removed": "the share of (eager - GEMMs) that fusing took away, negative where it is slower",
    "peak MiB (eager's)": "the most memory that a step takes on top of its inputs",
    "kept MiB (eager's)": "what is kept for backward, without parameters",
    "model": "library, name, batch",
    "eager, ms": "a step of the model as it is, by the wall clock",
    "patched x": _STEPS,
    "compile x": _STEPS,
    "patched+compile x": _STEPS,
    "full step x": _FULL,
    "patched x (one CPU)": f"{_STEPS}, {_ONE_CPU}",
    "full step x (one CPU)": f"{_FULL}, {_ONE_CPU}",
    "compile x (one CPU)": f"{_STEPS}, {_ONE_CPU}",
    "patched x (device)": _KERNELS,
    "compile x (device)": _KERNELS,
    "peak memory x": "the most memory of the patched model over that of eager, parameters included; below 1 is less",
    "compile peak memory x": "likewise of the compiled one",
    "compile pays after": "steps until the time that compiling took is earned back; - where it is no faster",
}
"""What each column of a run's table means."""


def envelope(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """What a result must say about where it comes from."""
    return {
        "kind": args.kind,
        "date": now(),
        "hardware": hardware(device),
        "versions": versions(),
        "arguments": {k: v for k, v in vars(args).items() if k in ("peers", "only", "budget", "grid", "route")},
        "ceilings": ceilings(device),
        "results": [],
    }


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def origin() -> dict[str, Any]:
    """The same in short, for a script's own JSON of what it measured on the GPU."""
    found = versions()
    return {"device": device_name("cuda"), "torch": found["torch"], "triton": found["triton"], "date": now()}


def hardware(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"name": device_name(device), "host": platform.processor() or platform.machine()}
    if device == "cuda":
        p = torch.cuda.get_device_properties(torch.cuda.current_device())
        found.update(
            capability=f"{p.major}.{p.minor}", memory_bytes=p.total_memory, multiprocessors=p.multi_processor_count
        )
    return found


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "fusedlayers": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for name in ("triton", "timm", "transformers", "liger_kernel"):
        try:
            module = __import__(name)
            found[name] = str(getattr(module, "__version__", None) or metadata.version(name))
        except Exception:
            found[name] = None
    return found


def folder(name: str) -> Path:
    """`benchmarks/results/<device>` of a device's name."""
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def save(run: dict[str, Any], path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_rounded(run), indent=1, allow_nan=False) + "\n")
    return path


def earlier(args: argparse.Namespace, names: Collection[str]) -> list[dict[str, Any]]:
    """What `--resume` keeps of the results in its file, each with the date it is from.

    Without those that never ran, and of the cases with these `names` without those that failed: they are measured
    again, but where one may have taken the device along, which it would do once more.
    """
    path = Path(args.json)
    if not args.resume or not path.exists():
        return []
    run = _read(path)
    for what, before, now in (("kind", run["kind"], args.kind), ("route", run["arguments"]["route"], args.route)):
        if before != now:
            raise SystemExit(f"bench: --resume would mix runs: {path} is of {what} {before!r}, this run of {now!r}")
    again = () if args.device_lost else names
    results = [r for r in run["results"] if "skipped" not in r and not ("error" in r and r["case"] in again)]
    return [{"date": run.get("date"), **r} for r in results]


def _read(path: Path) -> dict[str, Any]:
    """A file that `save` wrote."""
    try:
        run = json.loads(path.read_text())
        if isinstance(run["kind"], str) and isinstance(run["arguments"]["route"], str):
            if all(isinstance(r["case"], str) for r in run["results"]):
                return run
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise SystemExit(f"bench: --resume cannot read {path} as the results of a run")


def _rounded(value: Any) -> Any:
    """Six figures are more than any of them is good for."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    return value


def markdown(run: dict[str, Any], columns: Sequence[str] = ()) -> str:
    """The table of a run, or these `columns` of it, with where it was measured above it."""
    if "kind" not in run:
        told = {"device": "", "torch": "torch ", "triton": "Triton ", "date": ""}
        at = ", ".join(f"{word}{run[name]}" for name, word in told.items() if run.get(name))
        return f"{at}\n\n{table(table_rows(run))}\n"
    versions = run["versions"]
    at = f"{run['hardware']['name']}, torch {versions['torch']}, Triton {versions['triton']}, {run['date']}"
    lines = [*older(run), *(model_notes(run) if run["kind"] == "models" else ())]
    notes = "".join(f"\n- {line}" for line in lines)
    rows = table_rows(run)
    at_columns = [rows[0].index(column) for column in columns or rows[0]]
    rows = [[row[i] for i in at_columns] for row in rows]
    return f"{at}\n\n{table(rows)}\n{notes}\n".rstrip() + "\n"


def table_rows(run: dict[str, Any]) -> list[list[str]]:
    """The table of a run; the first row is the head."""
    if "kind" not in run:
        return flat_rows(run)
    return model_rows(run) if run["kind"] == "models" else case_rows(run)


def legend(run: dict[str, Any], known: Collection[str] = ()) -> str:
    """What the columns of a run's table mean, as a list, those `known` already left out."""
    names: dict[str, list[str]] = {}
    for column in table_rows(run)[0] if "kind" in run else ():
        if column not in known:
            names.setdefault(COLUMNS[column], []).append(f"`{column}`")
    return "\n".join(f"- {', '.join(columns)}: {text}" for text, columns in names.items())


def older(run: dict[str, Any]) -> list[str]:
    """Which results an earlier run left in the file."""
    dates: dict[str, list[str]] = {}
    for r in run["results"]:
        if r.get("date", run["date"]) != run["date"]:
            dates.setdefault(r["date"], []).append(r["case"])
    return [f"From a run at {date}: {', '.join(cases)}." for date, cases in dates.items()]


def table(rows: list[list[str]]) -> str:
    """A Markdown table; the first row is the head, the first column is text."""
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join(["---"] + ["---:"] * (len(head) - 1)) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


def case_rows(run: dict[str, Any]) -> list[list[str]]:
    """One row a case: time, speed-ups, share of the copy bandwidth, memory."""
    results = [r for r in run["results"] if "peers" in r]
    peers = [p for p in ("eager", "compile", "liger", "eager again") if any(p in r["peers"] for r in results)]
    limit = run.get("ceilings", {}).get("copy_bytes_per_s")
    what = "device_ms" if limit else "wall_ms"
    head = ["case", f"fused, {what[:-3]} ms", *(f"x {p}" for p in peers), "wall x eager", "host µs (eager's)"]
    if limit:
        head += ["of copy speed", "GEMMs alone, ms", "removed", "peak MiB (eager's)", "kept MiB (eager's)"]
    rows = [head]
    for r in results:
        fused = r["peers"].get("fused", {})
        time = fused.get(what)
        said = ", forward" if r["direction"] == "forward" else ""
        row = [r["case"] + said, _number(time and time["median"])]
        row += [_ratio(ratio(r, p, what=what)) for p in peers]
        row += [_ratio(ratio(r, "eager", what="wall_ms")), _pair(r, "host_us", 1)]
        if limit:
            speed = r["least_bytes"] / (time["median"] / 1e3) / limit if time and not r["flops"] else math.nan
            gemms = r["peers"].get("gemms", {}).get("device_ms")
            row += [_share(speed), _number(gemms and gemms["median"])]
            row += [_share(removed(r)), _pair(r, "peak_bytes", 1 / 2**20), _pair(r, "kept_bytes", 1 / 2**20)]
        rows.append(row)
    rows += [[r["case"], r.get("error") or r.get("skipped", "")] + [""] * (len(head) - 2)
             for r in run["results"] if "peers" not in r]  # fmt: skip
    return rows


def flat_rows(run: dict[str, Any]) -> list[list[str]]:
    """The rows of a script's own JSON, whatever its columns: its first list of dicts, nested ones joined by dots."""
    listed = next(v for v in run.values() if isinstance(v, list) and v and isinstance(v[0], dict))
    flat = [_flat(row) for row in listed]
    head = list(dict.fromkeys(k for row in flat for k in row))
    return [head, *([_cell(row.get(k)) for k in head] for row in flat)]


def _flat(row: dict[str, Any], stem: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in row.items():
        found |= _flat(value, f"{stem}{key}.") if isinstance(value, dict) else {f"{stem}{key}": value}
    return found


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, list):
        return ", ".join(map(_cell, value)) or "-"
    return "-" if value is None else str(value)


def removed(result: dict[str, Any], by: str = "fused") -> float:
    """The share of what eager spends beyond the matrix products that `by` saves; NaN where there are none."""
    try:
        times = [result["peers"][p]["device_ms"]["median"] for p in ("eager", by, "gemms")]
    except (KeyError, TypeError):
        return math.nan
    return (times[0] - times[1]) / (times[0] - times[2])


def model_rows(run: dict[str, Any]) -> list[list[str]]:
    """One row a model: step time, speed-ups by wall and device, memory, and what compiling costs first."""
    variants = ("patched", "compile", "patched+compile")
    present = [v for v in variants if any(v in r.get("variants", {}) for r in run["results"])]
    head = ["model", "eager, ms", *(f"{v} x" for v in present), "full step x"]
    head += ["patched x (one CPU)", "full step x (one CPU)", "patched x (device)", "peak memory x"]
    if "compile" in present:
        head += ["compile x (one CPU)", "compile x (device)", "compile peak memory x", "compile pays after"]
    rows = [head]
    for r in (r for r in run["results"] if r["case"] not in ("first-step", "lengths")):
        v = r.get("variants", {})
        if "step_ms" not in v.get("eager", {}):
            rows.append([r["case"], r.get("error") or r.get("skipped", "")] + [""] * (len(head) - 2))
            continue
        eager = v["eager"]
        row = [r["case"], _number(eager["step_ms"]["median"])]
        row += [_ratio(over(v, p, "step_ms")) for p in present]
        row += [_ratio(over(v, "patched", w)) for w in ("full_ms", "one_cpu_step_ms", "one_cpu_full_ms", "device_ms")]
        row.append(_ratio(1 / over(v, "patched", "peak_bytes")))
        if "compile" in present:
            row += [_ratio(over(v, "compile", w)) for w in ("one_cpu_step_ms", "device_ms")]
            row.append(_ratio(1 / over(v, "compile", "peak_bytes")))
            after = v.get("compile", {}).get("breaks_even_after")
            row.append("-" if after is None else f"{after:.0f} steps")
        rows.append(row)
    return rows


def model_notes(run: dict[str, Any]) -> list[str]:
    """What was measured beside the step times: a fresh process's first step, and batches of random length."""
    lines = []
    for r in run["results"]:
        if "added_cold_s" in r or "added_warm_s" in r:
            cold, warm = (_seconds(r.get(f"added_{kind}_s")) for kind in ("cold", "warm"))
            lines.append(
                f"Patching adds to resnet50's first step in a fresh process: {cold} with a cold cache, "
                f"{warm} with a warm one."
            )
        for name, found in r.get("lengths", {}).items():
            if "mean_step_ms" in found:
                line = f"BERT-base, {found.get('steps', 100)} batches of random length, {name}: "
                where = " on one CPU" if found.get("one_cpu") else ""
                line += f"{_number(found['mean_step_ms'])} ms a step, the mean of each length's median{where}"
                if found.get("after"):  # the first pays for what the libraries look for once a length
                    line += f"; its slowest step after ten took {found['worst_step_over_its_median']:.2f} times its "
                    line += f"length's median ({' and '.join(found['after'])} had run the same lengths)"
                if name == "patched":
                    line += f"; {found['kernels_built_after_ten_steps']} of this library's kernels were built after ten"
                lines.append(f"{line}.")
    return lines


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1f} s"


def brief(run: dict[str, Any]) -> list[str]:
    """A run in a few lines: for a grid its smallest ratios, else one line a case."""
    if "results" not in run:
        return [json.dumps(run)[:600]]
    if run.get("arguments", {}).get("grid"):
        return grid_summary(run["results"])
    if run["kind"] == "models":
        fallen = [
            f"{r['case']}: fallbacks {r['variants']['patched']['fallbacks']}"
            for r in run["results"]
            if r.get("variants", {}).get("patched", {}).get("fallbacks")
        ]
        return [" ".join(row) for row in model_rows(run)] + model_notes(run) + fallen
    ceilings = run.get("ceilings", {})
    lines = [f"ceilings: {', '.join(f'{k} {v:.3g}' for k, v in ceilings.items())}"] if ceilings else []
    limit = ceilings.get("copy_bytes_per_s")
    what = "device_ms" if limit else "wall_ms"
    for r in run["results"]:
        fused = r.get("peers", {}).get("fused", {}).get(what)
        if fused is None:
            lines.append(f"{r['case']}: {str(r.get('error') or r.get('skipped'))[:160]}")
            continue
        shown = [f"{p} x{ratio(r, p, what=what):.2f}" for p in r["peers"] if p not in ("fused", "gemms")]
        share = removed(r)
        if not math.isnan(share):
            shown.append(f"removed {share:.0%} (compile {_share(removed(r, 'compile'))})")
        elif limit and not r["flops"]:
            shown.append(f"{r['least_bytes'] / (fused['median'] / 1e3) / limit:.0%} of copy")
        shown.append(f"wall x{ratio(r, 'eager', what='wall_ms'):.2f}, host {_pair(r, 'host_us', 1)} us")
        lines.append(f"{r['case']}: {fused['median']:.4g} ms, {', '.join(shown)}")
    return lines


def grid_summary(results: list[dict[str, Any]]) -> list[str]:
    """The smallest ratios of a grid, beside what eager gives against itself."""
    lines = []
    for what in ("device_ms", "wall_ms"):
        found = sorted(
            (r, x["case"]) for x in results if not math.isnan(r := ratio(x, "eager", what=what, pick="best"))
        )
        if not found:  # no device times on a CPU
            continue
        control = [ratio(x, "eager", "eager again", what, "best") for x in results]
        control = [r for r in control if not math.isnan(r)] or [math.nan]
        resolved = f"eager against itself {min(control):.2f} to {max(control):.2f}"
        lines.append(f"{what[:-3]} time: {len(found)} cases, {resolved}; smallest:")
        lines += [f"  {r:.3f}  {name}" for r, name in found[:10]]
    failed = [x for x in results if "peers" not in x or "error" in x]
    return lines + [f"  {x['case']}: {str(x.get('error') or x.get('skipped'))[:120]}" for x in failed[:10]]


def _pair(result: dict[str, Any], what: str, factor: float) -> str:
    values = [result["peers"].get(p, {}).get(what) for p in ("fused", "eager")]
    shown = [("-" if v is None else f"{(v['median'] if isinstance(v, dict) else v) * factor:.0f}") for v in values]
    return f"{shown[0]} ({shown[1]})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0%}"


def _ratio(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
