"""The example trains on the device, in each precision a user would ask for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_digits(precision):
    for package in ("lightning", "sklearn", "safetensors"):
        pytest.importorskip(package, reason=f"the example needs {package}")
    command = [sys.executable, "examples/train_digits.py", "--short", "--device", "cuda", "--precision", precision]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Failed" not in done.stdout and "equal to the last bit" in done.stdout
