"""Pictures of a run, made from its JSON alone: bars against the peers, and a roofline with each case on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .peers import over, ratio

COLOURS = {"fused": "#1b6ca8", "patched": "#1b6ca8", "compile": "#c46a1b", "liger": "#5c8a3a"}
COLOURS |= {"patched+compile": "#7a4b94", "eager again": "#999999", "eager": "#999999"}


def draw(run: dict[str, Any], path: str | Path) -> list[Path]:
    """Writes the PNGs of a run beside its JSON at `path`, and returns where they are.

    Raises:
        ImportError: matplotlib is not installed.
    """
    path = Path(path)
    found = [bars(run, path.with_suffix(".png"))]
    points = roofline_points(run)
    if points and run.get("ceilings"):
        found.append(roofline(points, run["ceilings"], path.with_name(f"{path.stem}-roofline.png"), _where(run)))
    return [f for f in found if f is not None]


def bars(run: dict[str, Any], path: Path) -> Path | None:
    """How many times faster than eager each contender is, one group of bars a case; a network by both clocks."""
    what = "device_ms" if run.get("ceilings") else "wall_ms"
    rows: list[tuple[str, dict[str, float]]] = []
    for r in run["results"]:
        if "variants" in r:
            shown = {
                f"{n}, {clock}": over(r["variants"], n, key)
                for n in r["variants"] if n != "eager"
                for clock, key in (("device", "device_ms"), ("wall", "step_ms"))
            }  # fmt: skip
        else:
            names = [n for n in r.get("peers", {}) if n in ("fused", "compile", "liger")]
            shown = {n: ratio(r, "eager", n, what) for n in names}
        shown = {n: v for n, v in shown.items() if not math.isnan(v)}
        if shown:
            rows.append((r["case"], shown))
    if not rows:
        return None
    plt = _pyplot()
    names = list(dict.fromkeys(n for _, shown in rows for n in shown))
    thick = 0.8 / len(names)
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.32 * len(rows) * max(1, len(names) / 2)))
    for i, name in enumerate(names):
        at = [k + (i - (len(names) - 1) / 2) * thick for k, (_, shown) in enumerate(rows) if name in shown]
        values = [shown[name] for _, shown in rows if name in shown]
        who, _, clock = name.partition(", ")
        drawn = axes.barh(at, values, thick, label=name, color=COLOURS.get(who), alpha=0.45 if clock == "wall" else 1)
        axes.bar_label(drawn, fmt="%.2f", fontsize=6, padding=2)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [case for case, _ in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("times faster than eager" + ("" if "models" in run["kind"] else f" ({what[:-3]} time)"))
    axes.set_title(_where(run), fontsize=8)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
    return _saved(figure, path)


def roofline_points(run: dict[str, Any]) -> list[tuple[str, float, float, float]]:
    """`(case, FLOP, least bytes, seconds)` of what was timed on the device."""
    points = []
    for r in run["results"]:
        time = r.get("peers", {}).get("fused", {}).get("device_ms")
        if time and r["least_bytes"]:
            size = 4 if r["case"].endswith("fp32") else 2
            points.append((r["case"], r["flops"] or r["least_bytes"] / size, r["least_bytes"], time["median"] / 1e3))
    return points


def roofline(
    points: Sequence[tuple[str, float, float, float]], ceilings: dict[str, float], path: str | Path, title: str = ""
) -> Path:
    """FLOP/s against FLOP per byte, under what the device reaches.

    Args:
        points: `(label, FLOP, least bytes, seconds)`; work without a matrix product counts one FLOP an element moved.
        ceilings: `copy_bytes_per_s` and `bf16_flop_per_s`, as `bench.timing.ceilings` measures them.
        path: where the PNG goes.
        title: written above.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plt = _pyplot()
    bandwidth, peak = ceilings["copy_bytes_per_s"], ceilings["bf16_flop_per_s"]
    intensities = [flop / nbytes for _, flop, nbytes, _ in points]
    left, right = min([0.1, *intensities]) / 2, max([4 * peak / bandwidth, *intensities]) * 2
    figure, axes = plt.subplots(figsize=(8, 5))
    knee = peak / bandwidth
    axes.plot([left, knee, right], [left * bandwidth, peak, peak], color="black", linewidth=1)
    groups: dict[str, list[tuple[float, float]]] = {}
    for label, flop, nbytes, seconds in points:
        groups.setdefault(label.partition("/")[0], []).append((flop / nbytes, flop / seconds))
    for name, found in groups.items():
        axes.scatter(*zip(*found, strict=True), s=18, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP a byte (element-wise work: one FLOP an element moved)")
    axes.set_ylabel("FLOP/s")
    axes.set_title(title, fontsize=8)
    axes.legend(fontsize=7, loc="lower right")
    axes.grid(alpha=0.2, which="both")
    return _saved(figure, Path(path))


def _where(run: dict[str, Any]) -> str:
    return f"{run['hardware']['name']}, torch {run['versions']['torch']}, {run['date']}"


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _saved(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    _pyplot().close(figure)
    return path
