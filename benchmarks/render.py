"""Tables and pictures from the JSON files of `benchmarks/results`, and the README's block of figures.

python benchmarks/render.py            # writes RESULTS.md and the PNGs beside the JSON files, and the README's block
python benchmarks/render.py --check    # fails where RESULTS.md or the README's block is not what the JSON files say
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fusedlayers.bench import plots, report  # noqa: E402

COMPARED = ("model", "patched x", "compile x", "patched x (device)", "compile x (device)", "peak memory x",
            "compile peak memory x", "compile pays after")  # fmt: skip
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
KINDS = {"models": "Training steps of whole networks", "layers": "Whole layers", "ops": "Ops"}
OTHERS = {
    "models-again": "Four of the networks in another run, on a faster host",
    "models-compile": "Training steps beside torch.compile",
    "batch-norm": "Batch norms of ResNet-50",
    "row-norms": "Layer and RMS norms, forward and backward apart",
    "residual": "Residual branches, forward and backward apart",
    "grid": "Eight ops from one row to 65536",
    "grid-triton": "The same, every op held to its kernels",
}
ABOUT = {
    "models": "Forward, loss and backward under bf16 autocast.",
    "layers": "Other processes kept the host busy: `wall` and `host` are too high, device times are not.",
    "ops": "Likewise: `wall` and `host` are too high.",
    "models-again": "On another machine of the same kind, whose host was faster; older than the run of all networks.",
    "models-compile": "By the code and the routes of the dates below; most are newer than those above.",
    "batch-norm": """\
Milliseconds, bf16, channels_last, batch 256.

- `channels`, `height`: of its square maps
- `kind`: what follows the norm; `count`: how often ResNet-50 has it
- `error`: of `fused` over that of `eager`, both against float32, the worst of outputs and gradients
- `limit`: the least bytes of both directions, at the speed of a large copy
- `fused`, `eager`, `compile`: `forward` alone, and `both` directions""",
    "row-norms": """\
bf16, 65536 rows.

- `fused`, `eager`, `liger` (- where it has no such op): `forward` and `backward` alone
- `us`: microseconds, the median; `quartiles`: theirs
- `of_copy`: the least bytes, over that time, as a share of what a large copy reaches
- `peak_mib`: the most memory that both directions take on top of the inputs
- `error`: of `fused` over that of `eager`, both against float64, the worst of outputs and gradients""",
    "residual": """\
bf16, 65536 rows of 1024, and a gate beside them; of 2026-11-29, before the tiles of today (`NOTES.md`). `fast` draws
masks of its own, where the others draw eager's.

- `contender`: who computes the `case`
- `phase`: forward alone; or backward: both directions less forward (`host_us`, `peak_bytes`: both)
- `ms`: device time, as `how` says: replays of a CUDA graph, or events around calls, in forward and in both directions
- `percent_of_copy`: the least bytes at the speed of a large copy, over `ms`
- `host_us`: until the call is queued; `peak_bytes`: the most memory on top of the inputs
- `notes`: what failed""",
    "grid": "With the routes that a user gets. Below: the smallest ratios to eager, by the best of the rounds.",
    "grid-triton": """\
Not what a user gets: norms and residuals that lose here are what the shipped table sends to eager; linear layers take
the vendor's product by themselves.""",
}


def load(folder: Path) -> dict[str, dict]:
    found = {}
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        if isinstance(data, dict) and any(isinstance(v, list) for v in data.values()):
            found[path.stem] = data
    return found


def page(runs: dict[str, dict]) -> str:
    """Everything measured on one device, as one Markdown page; a column is explained where it comes first."""
    parts, known = [], set()
    titles = KINDS | OTHERS
    for name, run in sorted(runs.items(), key=lambda item: [*titles, item[0]].index(item[0])):
        title = titles.get(name) or name.replace("_", " ").replace("-", " ").capitalize()
        about = filter(None, (ABOUT.get(name), report.legend(run, known)))
        parts += [f"## {title}", *about, report.markdown(run).rstrip()]
        known.update(report.table_rows(run)[0])
        if run.get("arguments", {}).get("grid"):
            parts.append("```\n" + "\n".join(report.grid_summary(run["results"])) + "\n```")
    return "\n\n".join(parts) + "\n"


def readme_block(runs: dict[str, dict], device: Path) -> str:
    """The widest thing measured on a device, as a table and a picture: what a reader of the README looks for first."""
    kind = next((k for k in KINDS if k in runs), None)
    if kind is None:
        return ""
    where = device.relative_to(ROOT).as_posix()
    parts = [report.markdown(runs[kind]), f"![{KINDS[kind]}, patched against eager]({where}/{kind}.png)\n"]
    if "models-compile" in runs:
        parts += ["Beside `torch.compile`, in runs of their own:\n", report.markdown(runs["models-compile"], COMPARED)]
    return "\n".join([*parts, f"All figures: [{where}/RESULTS.md]({where}/RESULTS.md).\n"])


def main() -> int | str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--no-plots", action="store_true", help="leave the PNGs as they are")
    args = parser.parse_args()
    folders = [f for f in sorted((ROOT / report.RESULTS).glob("*")) if f.is_dir() and load(f)]
    blocks = []
    for folder in folders:
        runs, results = load(folder), folder / "RESULTS.md"
        blocks.append(readme_block(runs, folder))
        if args.check:
            if not results.exists() or results.read_text() != page(runs):
                sys.exit(f"{results.relative_to(ROOT)} is not what the JSON files say: run benchmarks/render.py")
            continue
        results.write_text(page(runs))
        if not args.no_plots:
            for name, run in runs.items():
                if "kind" in run:
                    plots.draw(run, folder / f"{name}.json")
    readme = ROOT / "README.md"
    text = readme.read_text() if readme.exists() else ""
    if BEGIN not in text:
        return 0
    block = "\n".join(filter(None, blocks)).strip()
    made = re.sub(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: f"{BEGIN}\n{block}\n{END}", text, count=1, flags=re.DOTALL
    )
    if args.check:
        return 0 if made == text else "README.md is not what the JSON files say: run benchmarks/render.py"
    readme.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
