"""The coverage table of the docs is what the tests hold now."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.modes import matrix, test_matrix
from tests.op_table import OPS, cells

ROOT = Path(__file__).resolve().parent.parent


def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_is_current():
    made = generator()
    assert made.TARGET.read_text(encoding="utf-8") == made.document(), "run: python docs/generate.py"


def test_every_cell_has_its_test():
    for mode, dtypes in matrix.MODES.items():
        test = getattr(test_matrix, f"test_{mode}")
        (mark,) = (m for m in test.pytestmark if m.name == "parametrize")
        held = {p.id for p in mark.args[1]}
        assert held == {f"{op.name}-{act}-{matrix.short(dtype)}" for op, act, dtype, _ in cells(dtypes)}


def test_every_function_is_in_the_table():
    from fusedlayers import functional

    named = {name.removesuffix("_channels") for name in OPS}
    aliases = {"batch_norm_add_act": "batch_norm_act", "add_layer_norm": "layer_norm"}
    assert set(functional.__all__) - {"fused_relu"} <= {aliases.get(name, name) for name in named}
