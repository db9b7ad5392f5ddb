"""What is worked out once, on first use, happens apart from the user's call it happens in."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fusedlayers import kernels

FIRST_CALL = """
import torch, fusedlayers as fl
from torch.utils.checkpoint import checkpoint
w, b = torch.randn(4, 4, requires_grad=True), torch.randn(4, requires_grad=True)
with fl.settings(route="triton"):
    y = checkpoint(lambda x: fl.functional.linear_act(x, w, b, "gelu"), torch.randn(3, 4), use_reentrant=False)
y.sum().backward()
print(w.grad is not None)
"""


@pytest.mark.skipif(not kernels.interpreted(), reason="needs the interpreter (TRITON_INTERPRET=1)")
def test_inside_a_checkpoint():
    """Fails where a module of kernels asks autograd a question while the checkpoint counts what is saved."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "True", done.stderr[-1500:]


def test_errors_come_back():
    with pytest.raises(ZeroDivisionError):
        kernels.apart(lambda: 1 / 0)
    assert kernels.apart(lambda: 3) == 3
