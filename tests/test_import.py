"""Importing asks for nothing: no GPU, no Triton, no output; and without Triton everything still works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusedlayers import kernels

ROOT = Path(__file__).resolve().parent.parent

NO_TRITON = """
import sys
from pathlib import Path

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_importing_prints_nothing_and_starts_no_cuda():
    code = """
import sys, torch, fusedlayers
assert not torch.cuda.is_initialized()
assert "triton.language" not in sys.modules
"""
    assert run(code, TRITON_INTERPRET="0") == ""


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_the_textbook_kernel(interpret):
    if interpret == "1" and kernels.unavailable():
        interpret = "0"
    code = "import fusedlayers as fl, torch; print(fl.functional.fused_relu(torch.tensor([3.,-4.]), 2, 1))"
    assert run(code, TRITON_INTERPRET=interpret) == "tensor([7., 0.])\n"


def test_a_triton_that_is_too_old_is_named(monkeypatch):
    triton = pytest.importorskip("triton")
    found = []
    for version in ("3.3.1+git1", "3.4.0", "3.10.0.post1", "4.0"):
        monkeypatch.setattr(triton, "__version__", version)
        found.append(kernels.unavailable.__wrapped__())
    assert found == ["Triton 3.3.1+git1 is too old: the kernels need 3.4 or newer", None, None, None]


def test_without_triton_import_patch_train_and_unpatch_work():
    code = """
import copy, warnings
import torch
from torch import nn
import fusedlayers as fl

assert "cannot be imported" in fl.kernels.unavailable()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU())
plain, cls = copy.deepcopy(model), type(model)
assert fl.patch_model(model) is model and fl.explain(model).fused
x = torch.randn(16, 6)
for m in (plain, model):
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        m(x).square().mean().backward()
        optimizer.step()
fl.unpatch_model(model)
assert type(model) is cls and not fl.explain(model).patched
for (name, a), (_, b) in zip(plain.state_dict().items(), model.state_dict().items(), strict=True):
    torch.testing.assert_close(a, b, msg=name)
with fl.settings(route="triton"):
    try:
        fl.functional.fused_relu(x, 2, 1)
    except RuntimeError as error:
        assert "cannot run" in str(error)
    else:
        raise SystemExit("a forced route must raise")
"""
    assert run(NO_TRITON + code, TRITON_INTERPRET="0") == ""


def test_importing_takes_no_library_of_a_model_along():
    code = """
import sys, fusedlayers
print(sorted({"timm", "torchvision", "transformers", "lightning"} & set(sys.modules)))
"""
    assert run(code) == "[]\n"
