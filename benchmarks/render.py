"""Tables and pictures from the JSON files of `benchmarks/results`, and the README's block of figures.

python benchmarks/render.py            # writes RESULTS.md and the PNGs beside the JSON files, and the README's block
python benchmarks/render.py --check    # fails where the README's block is not what the JSON files say
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

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
KINDS = {"models": "Training steps of whole networks", "layers": "Whole layers", "ops": "Ops"}
OTHERS = {
    "models-compile": "Training steps beside torch.compile",
    "batch-norm": "Batch norms of ResNet-50",
    "row-norms": "Layer and RMS norms, forward and backward apart",
    "residual": "Residual branches, forward and backward apart",
    "grid": "Eight ops from one row to 65536",
    "grid-triton": "The same, every op held to its kernels",
}
ABOUT = {
    "models": "Forward, loss and backward under bf16 autocast. `full step x`: with gradient clipping and fused AdamW.",
    "models-compile": "`compile pays after`: steps until the time that compiling took is earned back.",
    "batch-norm": "Milliseconds, bf16, channels_last, batch 256; `both`: forward and backward. `count`: how often "
    "ResNet-50 has this norm; `limit`: its bytes at copy speed; `error`: fused over eager, both against float64.",
    "row-norms": "bf16, 65536 rows. `us`: microseconds; `of_copy`: share of the speed of a copy.",
    "residual": "bf16, 65536 rows of 1024. `how`: by replays of a CUDA graph, the call and the copy beside it.",
    "grid": "With the routes that a user gets. `x eager again`: eager against itself, which is the noise.",
    "grid-triton": "Not what a user gets: the routes that lose here are what the shipped table sends to eager.",
}


def load(folder: Path) -> dict[str, dict]:
    found = {}
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        if isinstance(data, dict) and any(isinstance(v, list) for v in data.values()):
            found[path.stem] = data
    return found


LEGEND = """\
Columns: `x eager`, `x compile`, `x liger`: how many times as fast as these by device time, forward and backward
together unless the case says forward. `wall`: by the wall clock, one call after another. `host`: microseconds until a
call is queued. `of copy speed`: the least bytes the case must move, over its time, as a share of what a copy reaches.
`GEMMs alone`: its matrix products and nothing else; `removed`: the share of (eager - GEMMs) that fusing took away,
negative where it is slower. `peak`, `kept`: memory on top of the inputs, and what is kept for backward.
"""


def page(runs: dict[str, dict]) -> str:
    """Everything measured on one device, as one Markdown page."""
    parts = [LEGEND]
    titles = KINDS | OTHERS
    for name, run in sorted(runs.items(), key=lambda item: [*titles, item[0]].index(item[0])):
        title = titles.get(name) or name.replace("_", " ").replace("-", " ").capitalize()
        parts.append(f"## {title}\n\n{ABOUT.get(name, '')}\n\n{report.markdown(run)}")
        if run.get("arguments", {}).get("grid"):
            parts.append("```\n" + "\n".join(report.grid_summary(run["results"])) + "\n```\n")
    return "\n".join(parts)


def readme_block(runs: dict[str, dict], device: Path) -> str:
    """The widest thing measured on a device, as a table and a picture: what a reader of the README looks for first."""
    kind = next((k for k in KINDS if k in runs), None)
    if kind is None:
        return ""
    where = device.relative_to(ROOT).as_posix()
    return (
        f"{report.markdown(runs[kind])}\n![{KINDS[kind]}, patched against eager]({where}/{kind}.png)\n\n"
        f"All figures: [{where}/RESULTS.md]({where}/RESULTS.md).\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--no-plots", action="store_true", help="leave the PNGs as they are")
    args = parser.parse_args()
    folders = [f for f in sorted((ROOT / report.RESULTS).glob("*")) if f.is_dir() and load(f)]
    blocks = []
    for folder in folders:
        runs = load(folder)
        blocks.append(readme_block(runs, folder))
        if args.check:
            continue
        (folder / "RESULTS.md").write_text(page(runs))
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
        return int(made != text)
    readme.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
