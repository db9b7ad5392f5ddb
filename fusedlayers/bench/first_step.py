"""What patching adds to the first training step of a fresh process, with cold and with warm caches.

`python -m fusedlayers.bench.first_step eager|patched` is one such process; it prints its seconds.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

from .timing import Budget
from .workloads import training_step, workloads


def measure(device: str, peers: Sequence[str], budget: Budget) -> dict[str, Any]:
    """Seconds from a model on its device to the end of its first step, each in a process of its own."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as caches:
        for name, what in (
            ("eager", "eager"),
            ("patched, cold cache", "patched"),
            ("patched, warm cache", "patched"),
            ("eager again", "eager"),
        ):
            if budget.left < 10:
                found[name] = None
                continue
            env = {**os.environ, "TRITON_CACHE_DIR": f"{caches}/triton", "FUSEDLAYERS_CACHE": f"{caches}/fusedlayers"}
            command = [sys.executable, "-m", "fusedlayers.bench.first_step", what]
            limit = None if budget.left == math.inf else max(budget.left, 30)
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit)
            if done.returncode:
                return {"error": done.stderr[-1500:], **found}
            found[name] = json.loads(done.stdout.splitlines()[-1])
    eager = [found[n]["first_step_s"] for n in ("eager", "eager again") if found[n]]
    for kind in ("cold", "warm"):
        one = found[f"patched, {kind} cache"]
        if one and eager:
            found[f"added_{kind}_s"] = one["first_step_s"] + one["patching_s"] - min(eager)
    return found


def once(patched: bool) -> dict[str, float]:
    """Builds resnet50, patches it if asked, and takes one step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    workload = workloads()[0]
    model, batch = workload.build(device, device == "cpu")
    times = {"patching_s": 0.0}
    if patched:
        begin = time.perf_counter()
        from ..patch import patch_model

        model = patch_model(model)
        times["patching_s"] = time.perf_counter() - begin
    if device == "cuda":
        torch.cuda.synchronize()
    for name in ("first_step_s", "second_step_s"):
        begin = time.perf_counter()
        training_step(model, workload.loss, batch, device)
        if device == "cuda":
            torch.cuda.synchronize()
        times[name] = time.perf_counter() - begin
    return times


if __name__ == "__main__":
    print(json.dumps(once(sys.argv[1] == "patched")))
