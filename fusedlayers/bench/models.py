"""Training steps of whole networks: as they are, patched, compiled, and patched then compiled."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..patch import explain
from . import first_step, lengths, report
from .peers import clear
from .timing import Budget, Spread, one_cpu, peak_memory, seconds, spread, sync
from .workloads import Workload, training_step, variant, workloads

NEEDS_S = {"eager": 30.0, "compile": 100.0}
"""Seconds that must be left on a GPU to start measuring one model: build, warm-up (twice if compiled), timing."""

BESIDE = ("first-step", "lengths")
"""What is measured beside the steps of the models, when `--only` names it."""


def main(args: argparse.Namespace, peers: Sequence[str], device: str, budget: Budget) -> int:
    """Measures every chosen model: for the peer `eager` plain and patched, then for `compile` in all four variants.

    Compiling comes last, with the time that is left. With `--resume` what the JSON has is not measured again.
    """
    chosen = [w for w in workloads() if fnmatch.fnmatch(w.name, args.only)]
    if args.only not in BESIDE:
        if not chosen:
            raise SystemExit(f"bench: no case matches {args.only!r}")
        if not set(peers) & set(NEEDS_S):
            raise SystemExit(f"bench: --peers {args.peers!r} has none that models have ({', '.join(NEEDS_S)})")
    kept = report.earlier(args, {w.name for w in chosen})
    torch.backends.cudnn.benchmark = True
    run = report.envelope(args, device)
    run["results"] = kept
    by_name = {r["case"]: r for r in kept}

    def emit(result: dict[str, Any]) -> None:
        by_name[result["case"]] = result
        run["results"] = list(by_name.values())
        report.save(run, args.json)
        print(one_line(result), flush=True)

    passes = {}
    if "eager" in peers:
        passes["eager"] = ("eager", "patched")
    if "compile" in peers:
        fresh_compile_cache()
        passes["compile"] = ("eager", "patched", "compile", "patched+compile")
    for peer, variants in passes.items():
        for workload in chosen:
            before = by_name.get(workload.name, {})
            if set(variants) <= set(before.get("variants", {})):
                continue
            if args.device_lost and {"error", "compile_error"} & set(before):  # it may be what lost the device
                continue
            if budget.left < (NEEDS_S[peer] if device == "cuda" else 0):
                if not before:
                    emit({"case": workload.name, "skipped": "the time budget was used up"})
                continue
            result = attempt(workload, variants, device)
            if "error" in result and before:
                result = {**before, "compile_error": result["error"]}
            emit(result)
            clear(device)
    if args.only in BESIDE:
        before = by_name.get(args.only, {"case": args.only})
        try:
            for found in beside(args.only, before, device, peers, budget):
                emit({"case": args.only, **found})
        except Exception as error:
            emit({**before, "error": f"{type(error).__name__}: {error}"[:1500]})
    if args.plot:
        from . import plots

        print(*plots.draw(run, args.json), sep="\n")
    print(f"written: {args.json}")
    return 1 if any("error" in r for r in run["results"]) else 0


def beside(
    name: str, before: dict[str, Any], device: str, peers: Sequence[str], budget: Budget
) -> Iterator[dict[str, Any]]:
    if name == "first-step":
        yield first_step.measure(device, peers, budget)
    else:
        yield from lengths.measure(device, peers, budget, before.get("lengths", {}))


def attempt(workload: Workload, variants: Sequence[str], device: str) -> dict[str, Any]:
    """A model's measurements, or why there are none."""
    try:
        found = measure(workload, variants, device)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"[:1500]}
    torch._dynamo.reset()
    return {"case": workload.name, **found}


def measure(workload: Workload, variants: Sequence[str], device: str) -> dict[str, Any]:
    """Wall and device time, full step, peak memory and warm-up of each variant, taking turns in every round."""
    torch.manual_seed(0)
    model, batch = workload.build(device, device == "cpu")
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], Any]] = {}
    models: dict[str, nn.Module] = {}
    for name in variants:
        record: dict[str, Any] = {}
        made = models[name] = variant(name, model, record)
        steps[name] = lambda made=made: training_step(made, workload.loss, batch, device)
        record["first_step_s"] = seconds(steps[name], device)
        record["warm_up_s"] = record["first_step_s"] + sum(seconds(steps[name], device) for _ in range(2))
        if name == "compile":  # once more, with the caches on disk now warm; this one is then timed
            torch._dynamo.reset()
            made = models[name] = torch.compile(made._orig_mod)
            steps[name] = lambda made=made: training_step(made, workload.loss, batch, device)
            record["warm_cache_first_step_s"] = seconds(steps[name], device)
        if device == "cuda":
            own = sum(t.nbytes for t in (*made.parameters(), *made.buffers()))
            drop_gradients(made)
            record["peak_bytes"] = own + peak_memory(steps[name])
        drop_gradients(made)
        found[name] = record
    full = {name: full_step(models[name], steps[name]) for name in steps}
    places = {"": contextlib.nullcontext()} | ({"one_cpu_": one_cpu(device)} if device == "cuda" else {})
    for where, place in places.items():
        with place:
            for what, timed, rounds in (("step_ms", steps, 8), ("full_ms", full, 4)):
                for name, times in in_turns(timed, device, rounds).items():
                    found[name][where + what] = vars(times)
    for name, step in steps.items():  # last: a process that was profiled launches more slowly from then on
        if device == "cuda":
            found[name].update(device_share(step))
            found[name]["host_bound"] = found[name]["device_ms"] < 0.9 * found[name]["step_ms"]["median"]
    if "patched" in models:
        found["patched"]["fallbacks"] = {n: dict(c) for n, c in explain(models["patched"]).fallbacks.items()}
    for name in set(found) & {"compile", "patched+compile"}:
        saved = found["eager"]["step_ms"]["median"] - found[name]["step_ms"]["median"]
        spent = found[name]["warm_up_s"] * 1e3 - 3 * found[name]["step_ms"]["median"]
        found[name]["breaks_even_after"] = spent / saved if saved > 0 else None
        if saved > 0 and "warm_cache_first_step_s" in found[name]:
            warm = found[name]["warm_cache_first_step_s"] * 1e3 - found[name]["step_ms"]["median"]
            found[name]["breaks_even_after_warm"] = warm / saved
    return {"variants": found}


def in_turns(steps: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, Spread]:
    """Milliseconds a step, synchronised around some steps, every variant in every round.

    Enough steps for the host to run ahead, as it does in training, where nothing waits for a step's end.
    """
    few = {}
    for name, step in steps.items():
        few[name] = max(1, min(20, int(0.25 / max(seconds(step, device), 1e-4)))) if device == "cuda" else 1
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds if device == "cuda" else 2):
        for name, step in steps.items():
            begin = time.perf_counter()
            for _ in range(few[name]):
                step()
            sync(device)
            samples[name].append((time.perf_counter() - begin) / few[name] * 1e3)
    return {name: spread(found) for name, found in samples.items()}


def full_step(model: nn.Module, step: Callable[[], Any]) -> Callable[[], None]:
    """The step with gradient clipping and a fused AdamW."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    def full() -> None:
        step()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()

    return full


def device_share(step: Callable[[], Any], steps: int = 2) -> dict[str, Any]:
    """Milliseconds of device work a step and kernels started, summed over a profile, and the heaviest kernels."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kind = torch.autograd.DeviceType.CUDA  # ops on the host list their kernels' time once more
    rows = [e for e in profiled.key_averages() if e.device_type == kind and not getattr(e, "is_user_annotation", False)]
    rows.sort(key=lambda e: -e.self_device_time_total)
    return {
        "device_ms": sum(e.self_device_time_total for e in rows) / steps / 1e3,
        "launches": sum(e.count for e in rows) // steps,
        "kernels": [[e.key[:90], e.self_device_time_total / steps / 1e3, e.count // steps] for e in rows[:14]],
    }


def one_line(result: dict[str, Any]) -> str:
    if "variants" not in result:
        return f"{result['case']}: " + str(result.get("error") or result.get("skipped") or result)[:400]
    shown = []
    for name, v in result["variants"].items():
        more = [f"one CPU {v['one_cpu_step_ms']['median']:.2f}"] if "one_cpu_step_ms" in v else []
        more += [f"device {v['device_ms']:.2f}"] if "device_ms" in v else []
        shown.append(f"{name} {v['step_ms']['median']:.2f} ms" + (f" ({', '.join(more)})" if more else ""))
    return f"{result['case']}: " + " | ".join(shown)


def fresh_compile_cache() -> None:
    """So that a warm-up that is reported as cold is cold."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")


def drop_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None
