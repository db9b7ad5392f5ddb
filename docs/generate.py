"""Writes `docs/coverage_ops.md` from the cells of the test matrix, and the table of rules in `docs/patching.md`.

python docs/generate.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "coverage_ops.md"
PATCHING = ROOT / "docs" / "patching.md"
sys.path.insert(0, str(ROOT))

import fusedlayers as fl  # noqa: E402
from tests.modes.matrix import MODES, short  # noqa: E402
from tests.op_table import NO_VMAP, NOT_TWICE, OPS, cells  # noqa: E402

HEAD = """# Ops, activations, dtypes and modes

Each cell names the dtypes in which that op, with that activation, is held to eager in that mode by a test. **Bold**
ones run in every `make test`; the others with `pytest -m slow tests/modes`. The test of a cell is

    tests/modes/test_matrix.py::test_<mode>[<op>-<activation>-<dtype>]

for example `test_matrix.py::test_backward[affine_act-gelu-bf16]`. Forward, backward and autocast compare with float64
under the accuracy rule of `tests/harness.py`: off by at most 1.5 times eager's own error, plus a few ulp. Compiling has
no graph break and one graph for every batch size; exporting has a dynamic batch; vmap includes gradients by sample.

{legend}

Made by `python docs/generate.py`; a test holds it current.
"""


def document() -> str:
    """The whole file."""
    lines = [HEAD.format(legend=legend())]
    found: dict[tuple[str, str, str], list[str]] = {}
    for mode, dtypes in MODES.items():
        for op, act, dtype, slow in cells(dtypes):
            name = short(dtype) if slow else f"**{short(dtype)}**"
            found.setdefault((op.name, act, mode), []).append(name)
    for op in OPS.values():
        lines += [f"\n## {op.name}\n", "| activation | " + " | ".join(m.replace("_", " ") for m in MODES) + " |"]
        lines.append("|" + "---|" * (len(MODES) + 1))
        for act in op.activations:
            row = [" ".join(found[op.name, act, mode]) + mark(act, mode) for mode in MODES]
            lines.append(f"| {'none' if act == '-' else act} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def mark(act: str, mode: str) -> str:
    return "¹" if mode == "double_backward" and act in NOT_TWICE else "²" if mode == "vmap" and act in NO_VMAP else ""


def legend() -> str:
    once, unbatched = ", ".join(sorted(NOT_TWICE)), ", ".join(sorted(NO_VMAP))
    held = "there the test holds torch's own error"
    return f"¹ torch has no second derivative of {once}, ² and no batching rule for {unbatched}: {held}."


def with_rules(text: str) -> str:
    """`docs/patching.md` with the rules there are, each by the first line of its docstring."""
    about = {name: (type(rule).__doc__ or "").split("\n")[0].rstrip(".") for name, rule in fl.rules().items()}
    rows = "".join(f"| `{name}` | {line} |\n" for name, line in about.items())
    return re.sub(r"(?<=\| rule \| finds \|\n\|---\|---\|\n)(\|.*\n)*", lambda _: rows, text)


if __name__ == "__main__":
    PATCHING.write_text(with_rules(PATCHING.read_text(encoding="utf-8")), encoding="utf-8")
    TARGET.write_text(document(), encoding="utf-8")
