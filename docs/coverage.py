"""Writes docs/coverage_models.md: how much of each model of the zoo is fused, and why the rest is not.

    python docs/coverage.py            # needs torchvision, timm and transformers
    python docs/coverage.py --check    # exits 1 when the file is not what would be written

Nothing is run or timed: what is fused does not depend on the device.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "coverage_models.md"
KINDS = {"activation": "activations", "norm": "norms", "residual": "residual adds"}
HEAD = """# Coverage of models

How many of the activations, norms and residual adds that each model's forward holds are fused by
`fl.patch_model(model)`. Written by `docs/coverage.py`, from random weights; the models are those of `tests/zoo`, at
their real depth, with dropout or DropPath where their authors train with it, so that sites may be more than a bare
`create_model` has. `sites`: the fused calls that take their place; `reduced`: those that hold only the part that is
safe. Percentages are rounded down. `tests/zoo` also holds every one of them, patched, to what it gives unpatched.
"""

LESS = """\
These count as fused above, and are; the reason is why a larger rule left them. "In float32 under autocast": it would
have written the norm in the dtype of the product that reads it, where now a pass of its own casts it, as in eager.
"""


def installed(library: str) -> str:
    return version(library).partition("+")[0]


def cell(fused: int, total: int) -> str:
    return f"{fused} of {total}" if total else "none"


def row(name: str, report) -> str:  # type: ignore[no-untyped-def]
    counts = report.counts
    cells = [cell(counts.fused[kind], counts.total[kind]) for kind in KINDS]
    return f"| `{name}` | {' | '.join(cells)} | {len(report.fused)} | {len(report.reduced)} |"


def alone_or_less(report):  # type: ignore[no-untyped-def]
    """The records of what is left alone; and of what is fused, where a larger rule would have fused more."""
    fused = {module for r in report.fused for module in r.modules}
    less = [r for r in report.skipped if r.kind == "norm" and r.rule and fused.issuperset(r.modules)]
    return [r for r in report.skipped if r not in less], [*report.reduced, *less]


def lines(name: str, records) -> list[str]:  # type: ignore[no-untyped-def]
    """One line for all sites of the same shape: blocks that differ by their number only."""
    alike = Counter((re.sub(r"\d+", "*", r.name or "(root)"), r.reason) for r in records)
    return [f"| `{name}` | `{site}` | {n} | {reason} |" for (site, reason), n in alike.items()]


def render() -> str:
    sys.path.insert(0, str(ROOT))
    import fusedlayers as fl
    from tests.zoo.models import ZOO

    rows, alone, less, total, fused = [], [], [], Counter(), Counter()
    for name, zoo in ZOO.items():
        report = fl.explain(zoo.make())
        rows.append(row(name, report))
        left, part = alone_or_less(report)
        alone += lines(name, left)
        less += lines(name, part)
        total.update(report.counts.total)
        fused.update(report.counts.fused)
    libraries = [f"{name} {installed(name)}" for name in dict.fromkeys(zoo.library for zoo in ZOO.values())]
    shares = {k: f"{int(1000 * fused[k] / total[k]) / 10}%" for k in KINDS}  # rounded down
    share = ", ".join(f"{shares[k]} of the {total[k]} {label}" for k, label in KINDS.items())
    table = [f"| model | {' | '.join(KINDS.values())} | sites | reduced |", "|---|---|---|---|---|---|"]
    all_of_them = " | ".join(cell(fused[k], total[k]) for k in KINDS)
    head = ["| model | site | how many | reason |", "|---|---|---|---|"]
    parts = [
        HEAD,
        f"Versions: {', '.join(libraries)}.\n",
        f"Together: {share}.\n",
        "\n".join([*table, *rows, f"| together | {all_of_them} | | |"]) + "\n",
        "## What is left alone, and why\n",
        "Numbers in a site's name are shown as `*`.\n",
        "\n".join([*head, *alone]) + "\n",
        "## What is fused, but could be more, and why it is not\n",
        LESS,
        "\n".join([*head, *less]) + "\n",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    text = render()
    if "--check" in sys.argv[1:]:
        sys.exit(None if FILE.exists() and FILE.read_text(encoding="utf-8") == text else f"{FILE.name} is not current")
    FILE.write_text(text, encoding="utf-8")
