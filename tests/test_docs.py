"""Every `python` block of the README and docs/ runs, in the order in which a reader meets them; links lead somewhere.

The blocks of one file share one namespace, and each file starts a new one, so that a reader can start at its top.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fusedlayers as fl
from fusedlayers.activations.recognition import _forget
from fusedlayers.activations.registry import SPECS
from fusedlayers.patch import rule as patch_rule

ROOT = Path(__file__).resolve().parent.parent
FILES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
ids = [str(path.relative_to(ROOT)) for path in FILES]


@pytest.fixture
def restored() -> Iterator[None]:
    """Takes back what a block registers or sets for the process."""
    tables = (SPECS, patch_rule._rules)
    before = [dict(table) for table in tables]
    with fl.settings(route=fl.settings.route, dropout=fl.settings.dropout, cache=fl.settings.cache):
        yield
    for table, was in zip(tables, before, strict=True):
        table.clear()
        table.update(was)
    _forget()


@pytest.mark.parametrize("path", FILES, ids=ids)
@pytest.mark.usefixtures("restored")
@pytest.mark.filterwarnings("ignore")
def test_blocks_run(path, tmp_path, monkeypatch):
    text = path.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"__name__": f"docs_{path.stem.replace('-', '_')}"}
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        exec(compile("\n" * line + found[1], str(path.relative_to(ROOT)), "exec"), names)


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_links_lead_somewhere(path):
    for found in LINK.finditer(path.read_text(encoding="utf-8")):
        target, _, anchor = (found[1] or found[2]).partition("#")
        if target.startswith(("http:", "https:")):
            continue
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{target} does not exist"
        if anchor:
            titles = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in HEADING.findall(file.read_text())]
            assert anchor in titles, f"{target} has no heading #{anchor}"


def names_in(file: str, heading: str, column: int | None = None) -> set[str]:
    """What stands in backticks in the tables below a heading: in one column, or in all."""
    section = (ROOT / "docs" / file).read_text(encoding="utf-8").partition(heading)[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!---).*$", section, re.MULTILINE)
    cells = rows if column is None else [row.split(" | ")[column] for row in rows]
    return set(re.findall(r"`(\w+)", "\n".join(cells)))


def test_every_rule_is_described_as_it_describes_itself():
    text = (ROOT / "docs" / "patching.md").read_text(encoding="utf-8")
    made = runpy.run_path(str(ROOT / "docs" / "generate.py"))["with_rules"](text)
    assert made == text, "run python docs/generate.py"


def test_every_function_and_layer_is_listed():
    layers = {re.sub("[23]d$", "1d", name) for name in fl.nn.__all__}
    assert set(fl.functional.__all__) | layers <= names_in("layers.md", "# Functions and layers")


def test_every_setting_is_listed_with_its_variable():
    known = set(vars(fl.settings))
    assert names_in("routes-and-settings.md", "## Settings", column=0) == known
    assert {f"FUSEDLAYERS_{name.upper()}" for name in known} <= names_in("routes-and-settings.md", "## Settings")


def test_the_figures_are_those_of_the_results():
    done = subprocess.run([sys.executable, "benchmarks/render.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "run benchmarks/render.py: README.md is not what the JSON files say"
