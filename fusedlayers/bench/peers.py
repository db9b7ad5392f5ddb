"""A case: one computation, as this library and as its peers do it, ready to be timed on the same inputs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .timing import Budget, Effort, compare, input_sets, kept_for_backward

PEERS = ("eager", "compile", "liger")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One computation.

    Attributes:
        name: `op/what/sizes/dtype`, unique; `--only` matches it.
        inputs: makes one set of arguments. Float tensors that require a gradient get one in each step.
        fused: the library's function of these arguments.
        eager: the torch expression it stands for.
        liger: Liger-Kernel's function, looked up when asked for; may return `None`.
        gemms: only the matrix products of the forward, then those of the backward: the least the device can do.
        moved: least bytes, forward and backward, if each tensor is read or written once a pass.
        flops: of the matrix products, forward and backward.
        training: whether there is a backward.
    """

    name: str
    inputs: Callable[[torch.device], tuple]
    fused: Callable[..., Any]
    eager: Callable[..., Any]
    liger: Callable[[], Callable[..., Any] | None] | None = None
    gemms: Callable[..., Any] | None = None
    moved: tuple[int, int] = (0, 0)
    flops: int = 0
    training: bool = True
    shared: tuple[int, ...] = field(default=())
    """Positions of arguments that are parameters: one for all input sets, and not counted as kept for backward."""


def run_case(case: Case, peers: Sequence[str], device: str, effort: Effort, control: bool = False) -> dict[str, Any]:
    """Times one case; the result is plain data.

    `control` adds a second copy of eager: the ratio of the two says how much this run can resolve.
    """
    torch.manual_seed(0)
    first = case.inputs(torch.device(device))
    sets = input_sets(sum(t.nbytes for t in _tensors(first))) if device == "cuda" else 1
    arguments = [first]
    for _ in range(sets - 1):
        fresh = case.inputs(torch.device(device))
        arguments.append(tuple(first[i] if i in case.shared else t for i, t in enumerate(fresh)))
    with torch.no_grad():
        out = _tensors(_as_tuple(case.eager(*first)))
        gradients = [torch.randn_like(t) for t in out]
    del out
    contenders = {name: _step(fn, arguments, gradients, case.training) for name, fn in functions(case, peers).items()}
    if control:
        contenders["eager again"] = _step(case.eager, arguments, gradients, case.training)
    if case.gemms is not None and device == "cuda":
        contenders["gemms"] = lambda i: case.gemms(*arguments[i], *gradients)
    timings = compare(contenders, sets, effort, device)
    if case.training:
        parameters = [first[i] for i in case.shared if isinstance(first[i], Tensor)]
        for name, fn in functions(case, [p for p in peers if p != "compile"]).items():
            if timings[name].wall_ms is not None:
                timings[name].kept_bytes = kept_for_backward(lambda fn=fn: fn(*first), parameters)
    failed = {} if timings["fused"].wall_ms else {"error": "; ".join(timings["fused"].notes)}
    return {
        "case": case.name,
        **failed,
        "direction": "forward+backward" if case.training else "forward",
        "elements": next(t.numel() for t in _tensors(first)),
        "input_sets": sets,
        "least_bytes": sum(case.moved) if case.training else case.moved[0],
        "flops": case.flops,
        "peers": {name: timing.to_dict() for name, timing in timings.items()},
    }


def functions(case: Case, peers: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """The contenders of a case by name, `fused` first."""
    found = {"fused": case.fused}
    if "eager" in peers:
        found["eager"] = case.eager
    if "compile" in peers:
        torch._dynamo.reset()
        found["compile"] = torch.compile(case.eager, dynamic=False)
    if "liger" in peers and case.liger is not None:
        try:
            fn = case.liger()
        except ImportError:
            fn = None
        if fn is not None:
            found["liger"] = fn
    return found


def run_cases(
    cases: Sequence[Case],
    peers: Sequence[str],
    device: str,
    effort: Effort,
    budget: Budget,
    emit: Callable[[dict[str, Any]], None],
    control: bool = False,
) -> None:
    """Times the cases in order and hands each result to `emit`. A failure is a result too, and so is a lack of time."""
    for case in cases:
        if budget.left <= 0:
            emit({"case": case.name, "skipped": "the time budget was used up"})
            continue
        try:
            emit(run_case(case, peers, device, effort, control))
        except Exception as error:
            emit({"case": case.name, "error": f"{type(error).__name__}: {error}"[:1000]})
        clear(device)


class DeviceLost(RuntimeError):
    """An earlier fault left the device unusable in this process."""


def clear(device: str) -> None:
    """Frees what the last case held.

    Raises:
        DeviceLost: after a fault such as an illegal address, nothing more can run in this process.
    """
    gc.collect()
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except Exception as error:
            raise DeviceLost(str(error)) from error
        torch.cuda.empty_cache()


def ratio(result: dict[str, Any], over: str, of: str = "fused", what: str = "device_ms", pick: str = "median") -> float:
    """How many times faster `of` is than `over` in a result; NaN where either is missing."""
    try:
        peers = result["peers"]
        a, b = peers[over][what], peers[of][what]
        a, b = (t if isinstance(t, dict) else vars(t) for t in (a, b))
        return a[pick] / b[pick]
    except (KeyError, TypeError, ZeroDivisionError):
        return float("nan")


def _step(
    fn: Callable[..., Any], arguments: Sequence[tuple], gradients: Sequence[Tensor], training: bool
) -> Callable[[int], Any]:
    if not training:

        def forward(i: int) -> Any:
            with torch.no_grad():
                return fn(*arguments[i])

        return forward
    wanted = [[t for t in args if isinstance(t, Tensor) and t.requires_grad] for args in arguments]

    def step(i: int) -> Any:
        out = fn(*arguments[i])
        outs = out if type(out) is tuple else (out,)
        return torch.autograd.grad(outs, wanted[i], gradients)

    return step


def _as_tuple(out: Any) -> tuple:
    return out if isinstance(out, tuple) else (out,)


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    return [t for t in args if isinstance(t, Tensor)]


def over(variants: dict[str, Any], name: str, what: str) -> float:
    """How many times as fast as eager a network's variant is, or how much less it takes; NaN where not measured."""
    try:
        a, b = variants["eager"][what], variants[name][what]
        return a["median"] / b["median"] if isinstance(a, dict) else a / b
    except (KeyError, TypeError, ZeroDivisionError):
        return float("nan")
