"""`tune`: which fused sites pay, in the user's own model on the user's own inputs; those that do not are undone."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..kernels import ahead
from ..ops import _route
from ..ops._autograd import hooked
from . import analysis, apply
from .guards import MARK, STATE, Site, is_patched
from .inputs import Inputs
from .model import patch_model, unpatch_model
from .plan import PatchPlan
from .rewrite import Found
from .runs import as_found, restored

MARGIN = 1.02
"""How much slower than the original a site must be, by the median and by the best of its times, to be undone."""
ROUNDS, TURN_S = 9, 0.005


@dataclass(frozen=True)
class TuneRecord:
    """One fused site: what it cost with everything around it as it is, and without it. Milliseconds, medians."""

    name: str
    rule: str
    kept: bool
    reason: str
    fused_ms: float | None = None
    original_ms: float | None = None


@dataclass
class TuneReport:
    """What `tune` kept and undid, and why.

    Attributes:
        records: one a site.
        step_ms: the whole step: `original`, `patched` (as it was before) and `tuned` (where nothing was undone that of
            `patched`), medians.
        plan: what was kept, for `patch_model(plan=...)`.
    """

    records: list[TuneRecord] = field(default_factory=list)
    step_ms: dict[str, float] = field(default_factory=dict)
    plan: PatchPlan = field(default_factory=PatchPlan)

    @property
    def kept(self) -> list[TuneRecord]:
        return [r for r in self.records if r.kept]

    @property
    def undone(self) -> list[TuneRecord]:
        return [r for r in self.records if not r.kept]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON: the sites kept and the routes their ops took, to be repeated on every rank."""
        self.plan.save(path)

    def to_dict(self) -> dict[str, Any]:
        return {
            "step_ms": self.step_ms, "records": [asdict(r) for r in self.records], "plan": self.plan.to_dict(),
        }  # fmt: skip

    def __iter__(self) -> Iterator[TuneRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __str__(self) -> str:
        step = ", ".join(f"{name} {ms:.3g} ms" for name, ms in self.step_ms.items())
        lines = [f"{len(self.kept)} of {len(self)} fused sites kept; a step: {step or 'not timed'}"]
        width = max((len(r.name) for r in self), default=0)
        return "\n".join(
            lines + [f"  {'kept  ' if r.kept else 'undone'}  {r.name:<{width}}  {r.rule}: {r.reason}" for r in self]
        )


def tune(model: nn.Module, *inputs: Any, step: Callable[[], Any] | None = None, **kwinputs: Any) -> TuneReport:
    """Times each fused site of `model` against what it replaced, and undoes those that do not pay.

    Every patched module is run alone, on the inputs that it gets in a run of the model (each time as it first got them,
    where it edits them or adds to a cache), forward and (where gradients are on) backward, in the caller's autocast: as
    it is, as it was, and without each of its sites where it has several. The variants take turns. Modules of the same
    class with parameters and inputs of the same shapes are timed once. A site is undone only where it is slower by both
    the median and the best of its times, by more than 2%; one that did not run on these inputs stays. Parameters,
    gradients, buffers, random state and, without `step`, what `model` is called with are left as they were found, the
    last where it can be copied.

    Args:
        model: a patched model; an unpatched one is patched first.
        inputs, kwinputs: what the model is called with.
        step: runs forward and backward once, as training does, instead of `model(*inputs)` and the gradient of the sum
            of its outputs. What an optimizer inside it does to the parameters is undone; its own state is not.

    Raises:
        TypeError: `model` is not a module, or `step` no function.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if step is not None and not callable(step):
        raise TypeError(f"step must be a function without arguments, got {type(step).__name__}")
    if any(is_patched(m) for m in model.modules()):
        return _tune(model, inputs, kwinputs, step)
    patch_model(model, on_fallback="ignore")
    try:
        return _tune(model, inputs, kwinputs, step)
    except BaseException:
        unpatch_model(model)
        raise


def _tune(model: nn.Module, inputs: Any, kwinputs: Any, step: Callable[[], Any] | None) -> TuneReport:
    given = Inputs(inputs, kwinputs)
    run = step or (lambda: _forward_backward(model, given))
    targets = {name: m for name, m in model.named_modules() if is_patched(m)}
    report = TuneReport()
    # a hook may run the optimizer, and torch hangs its own where hooks are not seen
    in_backward = any(hasattr(p, "_in_backward_optimizers") for p in model.parameters())
    in_forward = any(m._forward_pre_hooks or m._forward_hooks or m._backward_hooks for m in model.modules())
    values = step is not None or in_backward or in_forward or hooked(*model.parameters())
    with as_found(model) as rewind, _parameters_kept(model, values), _quiet(targets.values()):
        seen = _inputs_of(targets, run)
        given.settle()
        rewind()
        original = _step_ms(run, targets.values(), rewind)
        before = _step_ms(run, (), rewind)
        decided: dict[Any, tuple[list[_Decision], dict[str, str]]] = {}
        for name, module in targets.items():
            call = seen.get(name)
            if call is not None and call.key not in decided:
                decided[call.key] = _decide(module, call, rewind)
            decisions, routes = ([], {}) if call is None else decided[call.key]
            _carry_out(report, name, module, decisions, routes)
        # where nothing was undone it is the same model, and another sample would tell of the machine
        tuned = before if all(r.kept for r in report.records) else _step_ms(run, (), rewind)
        report.step_ms = {"original": original, "patched": before, "tuned": tuned}
    return report


@dataclass
class _Call:
    """What a module was called with, in which autocast, and a key under which modules cost the same."""

    inputs: Inputs
    autocast: tuple[str, bool, torch.dtype]
    grad: bool
    key: Any


@dataclass(frozen=True)
class _Decision:
    found: Found
    kept: bool
    reason: str
    fused_ms: float | None = None
    original_ms: float | None = None


def _inputs_of(targets: dict[str, nn.Module], run: Callable[[], Any]) -> dict[str, _Call]:
    """The first call of each target in a run of the original model, where hooks disturb nothing: the first with
    gradients, if any has them, as a checkpoint's second.
    """
    seen: dict[str, _Call] = {}
    examples: dict[Any, _Call] = {}
    classes = {name: type(m) for name, m in targets.items()}

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            grad = torch.is_grad_enabled()
            if name in seen and (seen[name].grad or not grad):
                return
            leaves, spec = pytree.tree_flatten((args, kwargs))
            kind = next((t.device.type for t in leaves if isinstance(t, Tensor)), "cpu")
            autocast = (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            shapes = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters())
            modes = tuple(m.training for m in module.modules())
            key = (classes[name], shapes, modes, str(spec), tuple(map(_like, leaves)), autocast, grad)
            if key not in examples:  # the others cost the same, and holding their inputs would cost memory
                examples[key] = _Call(Inputs(args, kwargs, lasting=True), autocast, grad, key)
            seen[name] = examples[key]

        return note

    with restored(list(targets.values())):
        handles = [m.register_forward_pre_hook(hook(n), with_kwargs=True) for n, m in targets.items()]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
    return seen


def _like(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
    return type(value).__name__, repr(value)[:200]


def _decide(module: nn.Module, call: _Call, rewind: Callable[[], None]) -> tuple[list[_Decision], dict[str, str]]:
    """Which sites of one module pay, and the routes its ops take."""
    cls, site = type(module), module.__dict__[STATE]
    sites = [f for f in vars(cls)[MARK].found if f.status != "skipped"]
    with _recorded() as routes, _fallbacks_of(site) as fell_back:
        _run(module, call, call.inputs.fresh())
        call.inputs.settle()
    if fell_back:
        reason = f"not timed, its calls take the original path: {next(iter(fell_back))}"
        return [_Decision(f, True, reason) for f in sites], {}
    variants: list[type | None] = [cls, None]
    if len(sites) > 1:
        variants += [_without(module, [f], sites) for f in sites]
    times = _times([_as(module, v, site, call) for v in variants])
    rewind()
    fused, original = times[0], times[1]
    medians = [statistics.median(t) for t in times]
    if len(sites) == 1:
        slower = _slower(fused, original)
        why = _why(medians[0], medians[1], not slower)
        return [_Decision(sites[0], not slower, why, medians[0], medians[1])], routes
    decisions = []
    for f, variant, without, median in zip(sites, variants[2:], times[2:], medians[2:], strict=True):
        if variant is cls:  # a layer that two sites share: neither can be undone without the other
            decisions.append(_Decision(f, True, "not timed by itself, another site has the same members"))
            continue
        slower = _slower(fused, without)
        decisions.append(_Decision(f, not slower, _why(medians[0], median, not slower), medians[0], median))
    left = [d.found for d in decisions if d.kept]
    if left and len(left) < len(sites):  # together they may cost what none of them costs alone
        fused = _times([_as(module, _without(module, [f for f in sites if f not in left], sites), site, call)])[0]
        rewind()
    if left and _slower(fused, original):
        reason = f"together slower than the original module: {_why(statistics.median(fused), medians[1], False)}"
        decisions = [_Decision(d.found, False, reason, d.fused_ms, medians[1]) for d in decisions]
    return decisions, routes


def _why(fused_ms: float, other_ms: float, kept: bool) -> str:
    ratio = other_ms / fused_ms
    doubt = "; its best time is no slower" if kept and ratio * MARGIN < 1 else ""
    return f"{ratio:.2f} times as fast as without it ({fused_ms:.3g} against {other_ms:.3g} ms){doubt}"


def _slower(fused: Sequence[float], other: Sequence[float]) -> bool:
    return statistics.median(fused) > MARGIN * statistics.median(other) and min(fused) > MARGIN * min(other)


def _without(module: nn.Module, dropped: Sequence[Found], sites: Sequence[Found]) -> type | None:
    """The class of `module` with only the other sites fused; `None` when nothing would be."""
    left = [f for f in sites if f not in dropped]
    cls, site = type(module), module.__dict__[STATE]
    apply.restore(module)
    try:
        if left and apply.repatch(module, site, vars(cls)[MARK].rules, left, "undone by tune"):
            return type(module)
        return None
    finally:
        module.__class__ = cls
        module.__dict__[STATE] = site


def _carry_out(
    report: TuneReport, name: str, module: nn.Module, decisions: Sequence[_Decision], routes: dict[str, str]
) -> None:
    """Undoes what does not pay, and adds the sites of one module to the report and the plan."""
    sites = [f for f in vars(type(module))[MARK].found if f.status != "skipped"]
    if not decisions:
        decisions = [_Decision(f, True, "not timed, it did not run on these inputs") for f in sites]
    dropped = [d.found for d in decisions if not d.kept]
    if dropped:
        cls, site = _without(module, dropped, sites), module.__dict__[STATE]
        apply.restore(module)
        if cls is not None:
            apply.swap(module, cls, site)
    for d in decisions:
        record = analysis.record(name, d.found)
        report.records.append(TuneRecord(record.name, record.rule, d.kept, d.reason, d.fused_ms, d.original_ms))
        if d.kept:
            report.plan.sites.setdefault(record.name, []).append(record.rule)
    if routes and len(dropped) < len(sites):
        report.plan.routes[name] = dict(routes)


# running and timing


def _run(module: nn.Module, call: _Call, given: tuple[Any, Any]) -> None:
    kind, enabled, dtype = call.autocast
    args, kwargs = given
    with torch.set_grad_enabled(call.grad):
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            out = module(*args, **kwargs)
        if not call.grad:
            return
        roots = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
        wanted = [*call.inputs.wanted, *(p for p in module.parameters() if p.requires_grad)]
        if roots and wanted:
            torch.autograd.grad(roots, wanted, [t.detach() for t in roots], allow_unused=True)


Runs = Callable[[int], Callable[[], None]]
"""Prepares so many runs, which are then made by one call."""


def _as(module: nn.Module, cls: type | None, site: Site, call: _Call) -> Runs:
    """The module as one of its variants, `None` being the original."""

    def prepare(n: int) -> Callable[[], None]:
        given = [call.inputs.fresh() for _ in range(n)]

        def run() -> None:
            held = type(module)
            apply.restore(module)
            if cls is not None:
                apply.swap(module, cls, site)
            try:
                for arguments in given:
                    _run(module, call, arguments)
            finally:
                apply.swap(module, held, site)

        return run

    return prepare


def _times(calls: Sequence[Runs]) -> list[list[float]]:
    """Milliseconds a run of each, several rounds in which all take turns."""
    few = []
    for call in calls:
        call(2)()  # builds what is built once
        ahead.settle()
        few.append(max(1, min(50, int(TURN_S / max(_seconds(call(1)), 1e-6)))))
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for found, call, n in zip(samples, calls, few, strict=True):
            found.append(_seconds(call(n)) / n * 1e3)
    return samples


def _seconds(run: Callable[[], None]) -> float:
    _sync()
    begin = time.perf_counter()
    run()
    _sync()
    return time.perf_counter() - begin


def _step_ms(run: Callable[[], Any], unpatched: Any, rewind: Callable[[], None]) -> float:
    with restored(list(unpatched)):
        times = _times([lambda n: lambda: [run() for _ in range(n)]])
    rewind()
    return statistics.median(times[0])


def _forward_backward(model: nn.Module, given: Inputs) -> None:
    args, kwargs = given.fresh()
    grads = [(p, p.grad) for p in given.parameters]
    for p, _ in grads:
        p.grad = None
    out = model(*args, **kwargs)
    roots = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    if roots:
        sum(t.float().sum() for t in roots).backward()
    for t in given.wanted:
        t.grad = None
    for p, grad in grads:
        p.grad = grad


def _sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def _parameters_kept(model: nn.Module, values: bool) -> Iterator[None]:
    """Puts the gradients of the parameters back, and their values where asked to."""
    held = [(p, p.detach().clone() if values else p, p.grad) for p in model.parameters()]
    for p, _, _ in held:
        p.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value, grad in held:
                p.grad = grad
                if values and not torch.equal(p, value):
                    p.copy_(value)


@contextlib.contextmanager
def _quiet(modules: Any) -> Iterator[None]:
    """Neither warns of fallbacks nor counts them."""
    sites = [(m.__dict__[STATE], m.__dict__[STATE].on_fallback, m.__dict__[STATE].fallbacks.copy()) for m in modules]
    for site, _, _ in sites:
        site.on_fallback = "ignore"
    try:
        yield
    finally:
        for site, on_fallback, counts in sites:
            site.on_fallback, site.fallbacks = on_fallback, counts


@contextlib.contextmanager
def _fallbacks_of(site: Site) -> Iterator[dict[str, int]]:
    before, found = site.fallbacks.copy(), {}
    yield found
    found.update(site.fallbacks - before)


@contextlib.contextmanager
def _recorded() -> Iterator[dict[str, str]]:
    """Which route each op takes meanwhile in this thread; an op that takes several has none."""
    taken: dict[str, set[str]] = {}
    routes: dict[str, str] = {}
    me = threading.get_ident()

    def noting(op: str, *args: Any, **kwargs: Any) -> Any:
        found = pick(op, *args, **kwargs)
        if threading.get_ident() == me:
            taken.setdefault(op, set()).add(found[0])
        return found

    with _recording:  # another thread that tunes would put this one's `noting` back when it ends
        pick, _route.pick = _route.pick, noting
        try:
            yield routes
        finally:
            _route.pick = pick
            routes.update({op: found.pop() for op, found in taken.items() if len(found) == 1})


_recording = threading.Lock()
