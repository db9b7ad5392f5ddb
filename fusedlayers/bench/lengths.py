"""A language model on a hundred batches of random length: does any later step wait for a kernel to be built?"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..kernels import load
from .timing import Budget, one_cpu, seconds
from .workloads import Workload, training_step, variant, workloads

STEPS, SETTLED = 100, 10
LATE = "the time budget was used up"


def measure(
    device: str, peers: Sequence[str], budget: Budget, found: dict[str, Any]
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Steps of BERT-base on 8 sequences of 16 to 512 tokens, never warmed up, plain, patched and compiled.

    Gives what there is after each of them; those in `found` are not measured again.
    """
    workload = next(w for w in workloads() if "bert" in w.name)
    found, ran = dict(found), []
    for name in ("eager", "patched", *(("compile",) if "compile" in peers else ())):
        if name not in found or "skipped" in found[name]:
            late = budget.left < 30
            found[name] = {"skipped": LATE} if late else _steps(workload, name, device, budget)
            found[name]["after"] = list(ran)  # whoever ran before met what the libraries look for once a length
            ran.append(name)
        yield {"lengths": dict(found)}


def _steps(workload: Workload, name: str, device: str, budget: Budget) -> dict[str, Any]:
    """The steps in their order, within two thirds of the time that is left; then each length again for its median.

    From the eleventh on all threads are on one CPU: two that wake each other differ by more than builds would show.
    """
    until = budget.left / 3
    model, _ = workload.build(device, device == "cpu")
    model = torch.compile(model, dynamic=True) if name == "compile" else variant(name, model, {})
    draw = random.Random(0)
    longest, steps = (512, STEPS) if device == "cuda" else (32, 12)
    lengths = [draw.randint(16, longest) for _ in range(steps)]

    def step(length: int) -> float:
        ids = torch.randint(1000, (8, length), device=device)
        return 1e3 * seconds(lambda: training_step(model, workload.loss, (ids,), device), device)

    first: list[float] = []

    def go_on(to: int) -> None:
        while len(first) < to and budget.left >= until:
            first.append(step(lengths[len(first)]))

    go_on(SETTLED)
    with one_cpu(device):
        built = kernels_built()
        go_on(steps)
        built = kernels_built() - built
        del lengths[len(first) :]
        cut_off = {"steps": len(first), "first_ten_steps_s": sum(first) / 1e3, "skipped": LATE}
        if len(first) <= SETTLED:
            return cut_off
        usual: dict[int, float] = {}
        for n in sorted(set(lengths)):
            if budget.left < 0:
                return cut_off
            usual[n] = statistics.median(step(n) for _ in range(4))
    late = [t / usual[n] for t, n in zip(first[SETTLED:], lengths[SETTLED:], strict=True)]
    return {
        "steps": len(first),
        "one_cpu": device == "cuda",
        "kernels_built_after_ten_steps": built,
        "first_ten_steps_s": sum(first[:SETTLED]) / 1e3,
        "worst_step_over_its_median": max(late),
        "steps_above_twice": sum(r > 2 for r in late),
        "mean_step_ms": statistics.mean(usual[n] for n in lengths),
    }


def kernels_built() -> int:
    """How many kernels this process has built and keeps ready."""
    return load("launch").kernels_built()
