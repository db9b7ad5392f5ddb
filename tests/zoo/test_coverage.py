"""docs/coverage_models.md says what is so, and what it says is enough."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter

import pytest

import fusedlayers as fl

from .models import ZOO, Zoo

SPEC = importlib.util.spec_from_file_location("coverage", f"{__file__.rpartition('/tests/')[0]}/docs/coverage.py")
coverage = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(coverage)
TEXT = coverage.FILE.read_text(encoding="utf-8")
VERSIONS = dict(re.findall(r"(\w+) ([\d.]+\d)", re.search(r"^Versions: (.*)$", TEXT, re.MULTILINE)[1]))
ENOUGH = {"activation": 0.78, "norm": 0.90, "residual": 0.65}


def each(zoo: Zoo):
    marks = [pytest.mark.slow] if zoo.slow else []
    if zoo.missing():
        marks.append(pytest.mark.skip(reason=f"needs {zoo.library}"))
    elif coverage.installed(zoo.library).split(".")[:2] != VERSIONS[zoo.library].split(".")[:2]:
        marks.append(pytest.mark.skip(reason=f"the table is of {zoo.library} {VERSIONS[zoo.library]}"))
    return pytest.param(zoo, marks=marks, id=zoo.name)


@pytest.mark.parametrize("zoo", [each(zoo) for zoo in ZOO.values()])
def test_the_table_is_current(zoo):
    report = fl.explain(zoo.make())
    assert coverage.row(zoo.name, report) in TEXT, "run docs/coverage.py"
    left, less = (coverage.lines(zoo.name, records) for records in coverage.alone_or_less(report))
    alone, _, part = TEXT.partition(coverage.LESS)
    assert all(line in alone for line in left) and all(line in part for line in less), "run docs/coverage.py"


def test_every_model_is_in_it_and_enough_is_fused():
    rows = re.findall(r"^\| `([\w.]+)` \| (.* of .*|none) \| (.*) \| (.*) \| \d+ \| \d+ \|$", TEXT, re.MULTILINE)
    assert [name for name, *_ in rows] == list(ZOO)
    fused, total = Counter(), Counter()
    for _, *cells in rows:
        for kind, cell in zip(ENOUGH, cells, strict=True):
            done, _, held = cell.partition(" of ")
            fused[kind] += int(done) if held else 0
            total[kind] += int(held or 0)
    assert all(fused[kind] >= share * total[kind] for kind, share in ENOUGH.items()), (fused, total)
