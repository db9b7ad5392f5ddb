"""`verify`: the patched model against the original on the same inputs, parameters, randomness and mode."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import apply
from .guards import STATE, Site, is_patched
from .replay import Recording, Replaying
from .runs import DIRECT, Results, as_found, restored, run

FACTOR = 1.5
ULPS = 4.0
LUCK = 2.0
"""The ratio of two equally good errors of n values scatters by about 1 / sqrt(n): how many times that is granted."""


class VerificationError(AssertionError):
    """The patched model does not compute what the original does."""


@dataclass(frozen=True)
class Comparison:
    """One tensor of both runs. Errors are relative, in the Frobenius norm, against `reference` of the report."""

    kind: str
    name: str
    error: float
    eager_error: float
    allowed: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return not self.note and self.error <= self.allowed

    @property
    def excess(self) -> float:
        """How large the error is as a share of what is allowed."""
        return float("inf") if self.note else self.error / self.allowed if self.allowed else 0.0


@dataclass
class VerifyReport:
    """Every output, gradient and buffer compared, worst first. True when all are within what is allowed.

    Attributes:
        reference: "float64" when both runs were measured against one, else "the original".
        worst: dotted name of the module whose tensor is furthest off, or which alone makes the comparison fail.
        modules: how many modules of the model are patched.
        fallbacks: patched modules that took their original path in this run, by reason.
        error: why nothing could be compared: the patched model raises, or the original gives other results each time.
        note: what was compared less than usual, and why: a model may refuse inputs that require a gradient.
    """

    comparisons: list[Comparison] = field(default_factory=list)
    reference: str = "float64"
    worst: str = ""
    modules: int = 0
    fallbacks: dict[str, Counter[str]] = field(default_factory=dict)
    error: str = ""
    note: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and all(c.ok for c in self.comparisons)

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_failed(self) -> None:
        """Raises `VerificationError` with the report when anything is off."""
        if not self.ok:
            raise VerificationError(str(self))

    def to_dict(self) -> dict[str, Any]:
        fallbacks = {name: dict(reasons) for name, reasons in self.fallbacks.items()}
        compared = [asdict(c) | {"ok": c.ok} for c in self.comparisons]
        head = {"ok": self.ok, "reference": self.reference, "worst": self.worst, "modules": self.modules}
        return {**head, "error": self.error, "note": self.note, "fallbacks": fallbacks, "comparisons": compared}

    def __str__(self) -> str:
        if self.error:
            return f"FAILED: {self.error}; worst: {self.worst or '-'}"
        if not self.modules:
            return "ok: no module of this model is patched, so there is nothing to compare"
        off = [c for c in self.comparisons if not c.ok]
        state = f"FAILED: {len(off)} of {len(self.comparisons)} tensors are off" if off else "ok"
        kinds = Counter(c.kind for c in self.comparisons)
        share = ", ".join(f"{n} {kind}s" for kind, n in kinds.items())
        against = f"against {self.reference}; worst: {self.worst or '(root)'}"
        lines = [f"{state}; {self.modules} patched modules, {share}, {against}"]
        for c in (off or self.comparisons)[:8]:
            detail = c.note or f"error {c.error:.2e}, eager's {c.eager_error:.2e}, allowed {c.allowed:.2e}"
            if c.ok and not _tells(c.kind, c.eager_error):
                detail += " (zero but for rounding)"
            lines.append(f"  {c.kind:<18} {c.name or '(root)':<40} {detail}")
        if self.note:
            lines.append(f"  note: {self.note}")
        for name, reasons in self.fallbacks.items():
            lines += [f"  ran unfused        {name or '(root)':<40} {why}" for why in reasons]
        return "\n".join(lines)


def verify(
    model: nn.Module, *inputs: Any, backward: bool = True, rtol: float | None = None, **kwinputs: Any
) -> VerifyReport:
    """Runs `model` fused and original, and compares outputs, input gradients, parameter gradients and buffers.

    Both runs start from the same inputs, parameters, buffers and random state, in the model's mode and the caller's
    autocast. Each is measured against the original in float64 where that can be had: the fused error may be 1.5 times
    the original's (more for a tensor of few values, whose error is a matter of luck), plus a few ulp. The float64 run
    is given the very draws of the original, dropout masks and noise. It cannot be had for a model that cannot be
    copied, or whose draws stay inside a kernel (fused attention with dropout); then the two are compared directly.

    Where they differ, or the original is further off float64 than rounding explains, the original is run once more: one
    that does not agree with itself fails, since it can be no measure. The model is left as it was found.

    Args:
        model: a patched model.
        inputs, kwinputs: what it is called with.
        backward: compare gradients too.
        rtol: the largest relative difference between fused and original to allow, instead of the rule above.

    Returns:
        A report, false when something is off; `raise_if_failed()` raises.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    patched = [m for m in model.modules() if is_patched(m)]
    report = VerifyReport(modules=len(patched))
    if not patched:
        return report
    sites = {name: m.__dict__.get(STATE) for name, m in model.named_modules() if is_patched(m)}
    counts = {id(s): s.fallbacks.copy() for s in sites.values() if s is not None}
    with as_found(model) as rewind:

        def some_fused(fused: Sequence[nn.Module] = (), mode: AbstractContextManager[Any] | None = None) -> Results:
            chosen = {id(m) for m in fused}
            rewind()
            with restored([m for m in patched if id(m) not in chosen]):
                return run(model, inputs, kwinputs, backward, mode, not report.note)

        try:
            try:
                eager = some_fused()
            except Exception as error:
                if not backward:
                    raise
                report.note = f"inputs that ask for no gradient were given none ({type(error).__name__}: {error})"
                eager = some_fused()
            try:
                fused = some_fused(patched)
            except Exception as error:
                report.error = f"only the patched model raises {type(error).__name__}: {error}"
                report.worst = _culprit(model, patched, some_fused, eager, None, rtol)
                return report
            report.fallbacks = _new_fallbacks(sites, counts)
            exact = None
            if rtol is None:
                exact = _reference(model, inputs, kwinputs, backward, eager, some_fused, rewind, not report.note)
            report.reference = "float64" if exact is not None else "the original"
            report.comparisons = _compare(fused, eager, exact, rtol)
            report.worst = _module_of(report.comparisons[0]) if report.comparisons else ""
            if not report.ok or _doubtful(report, eager):
                report.error, worst = _unsteady(some_fused(), eager, exact, rtol)
                if report.error:
                    report.worst = _restless(some_fused, model) or worst
                elif not report.ok:
                    shaken = None
                    if exact is None and rtol is None:
                        with _shaken(model, eager.dtype):
                            shaken = some_fused()
                        report.comparisons = _compare(fused, eager, exact, rtol, shaken)
                        report.worst = _module_of(report.comparisons[0])
                if not report.error and not report.ok:
                    report.worst = _culprit(model, patched, some_fused, eager, exact, rtol, shaken) or report.worst
        finally:
            for site in sites.values():
                if site is not None:
                    site.fallbacks = counts[id(site)]
    return report


def _new_fallbacks(sites: dict[str, Site | None], before: dict[int, Counter[str]]) -> dict[str, Counter[str]]:
    found = {name: site.fallbacks - before[id(site)] for name, site in sites.items() if site is not None}
    return {name: reasons for name, reasons in found.items() if reasons}


def _reference(
    model: nn.Module,
    inputs: Sequence[Any],
    kwinputs: dict[str, Any],
    backward: bool,
    eager: Results,
    some_fused: Callable[..., Results],
    rewind: Callable[[], None],
    input_gradients: bool,
) -> Results | None:
    """The original in float64, with the draws of the original; `None` where that is not to be had."""
    try:
        if not eager.drew:
            rewind()
            exact = _in_double(model, inputs, kwinputs, backward, input_gradients)
            return None if exact.drew else exact
        if len({t.device for t in (*model.parameters(), *model.buffers())}) > 1:
            return None  # the backwards of several devices draw in no certain order
        recording = Recording()
        again = some_fused(mode=recording)
        replaying = Replaying(recording)
        rewind()
        exact = _in_double(model, inputs, kwinputs, backward, input_gradients, replaying)
        # an op that drew unseen, or a recorded run that was not the original's: no reference rather than a wrong one
        faithful = replaying.finished and not exact.drew and not _unsteady(again, eager, exact, None)[0]
        return exact if faithful else None
    except Exception:  # a model that cannot be copied, recorded or run in float64 is compared directly
        return None


def _in_double(
    model: nn.Module,
    inputs: Sequence[Any],
    kwinputs: dict[str, Any],
    backward: bool,
    input_gradients: bool,
    mode: AbstractContextManager[Any] | None = None,
) -> Results:
    def double(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    exact = copy.deepcopy(model)
    for module in exact.modules():
        apply.restore(module)
    exact.double()
    with contextlib.ExitStack() as stack:
        for device in {p.device.type for p in model.parameters()} | {"cpu"}:
            stack.enter_context(torch.autocast(device, enabled=False))
        given = pytree.tree_map(double, (tuple(inputs), dict(kwinputs)))
        return run(exact, *given, backward, mode, input_gradients)


def _compare(
    fused: Results, eager: Results, exact: Results | None, rtol: float | None, shaken: Results | None = None
) -> list[Comparison]:
    """Every tensor, worst first. `shaken`: where there is no `exact`, what is left of the original's own results when
    its parameters move by less than rounding; no more can be asked of a tensor that does not survive that."""
    rows: list[tuple[str, str, float, float, str, float, float]] = []
    for key, want in eager.tensors.items():
        got, ref = fused.tensors.get(key), want
        if exact is not None:
            ref = exact.tensors.get(key)
        note = _difference(got, want)
        if note or want is None or not want.is_floating_point():
            rows.append((*key, 0.0, 0.0, note, 0.0, FACTOR))
            continue
        ref = want if ref is None else ref
        # the gradients of one channel's weights share its error
        n = len(want) if key[0] == "parameter gradient" and want.dim() else want.numel()
        factor = FACTOR * (1.0 + LUCK / max(n, 1) ** 0.5)
        rows.append((*key, _off(got, ref), _off(want, ref), "", torch.finfo(want.dtype).eps, factor))
    typical: dict[str, float] = {}
    for kind in {row[0] for row in rows}:
        errors = sorted(row[3] for row in rows if row[0] == kind)
        typical[kind] = errors[len(errors) // 2]
    made = []
    for kind, name, error, eager_error, note, eps, factor in rows:
        if rtol is not None:
            allowed = rtol
        elif exact is not None:
            # an eager error that happens to cancel is no measure: the typical one of its kind counts too
            allowed = factor * max(eager_error, typical[kind]) + ULPS * eps
        else:
            allowed = max(DIRECT[eager.dtype], ULPS * eps)
            moved = shaken.tensors.get((kind, name)) if shaken is not None else None
            if moved is not None and not note:
                allowed = max(allowed, factor * _off(moved, eager.tensors[kind, name]))
        made.append(Comparison(kind, name, error, eager_error, allowed, note))
    return sorted(made, key=lambda c: -c.excess)


@contextlib.contextmanager
def _shaken(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The model with every parameter moved by up to half an ulp of `dtype`, at random; none of torch's generators
    moves."""
    held = [(p, p.detach().clone()) for p in model.parameters() if p.is_floating_point()]
    half = torch.finfo(dtype).eps / 2
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p, was in held:
                by = torch.rand(p.shape, generator=generator, dtype=torch.float64) * 2 - 1
                p.copy_(was.double() * (1 + half * by.to(p.device)))
        yield
    finally:
        with torch.no_grad():
            for p, was in held:
                p.copy_(was)


def _difference(got: Tensor | None, want: Tensor | None) -> str:
    if (got is None) != (want is None):
        return "None on one side only"
    if want is None:
        return ""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype} {tuple(got.shape)}, original {want.dtype} {tuple(want.shape)}"
    if not want.is_floating_point():
        return "" if torch.equal(got, want) else "values differ"
    if not torch.equal(got.isfinite(), want.isfinite()):
        return "NaN or infinity in other places"
    return ""


def _off(got: Tensor, ref: Tensor) -> float:
    keep = ref.isfinite() & got.isfinite()
    g, r = got.double()[keep], ref.double()[keep]
    if not g.numel():
        return 0.0
    size = max(r.norm().item(), g.norm().item())  # where the true value is zero, both are off by all they have
    return (g - r).norm().item() / size if size else 0.0


def _module_of(c: Comparison) -> str:
    return c.name.rpartition(".")[0] if c.kind in ("parameter gradient", "buffer") else ""


def _doubtful(report: VerifyReport, eager: Results) -> bool:
    """Whether the original is further off float64 than rounding explains."""
    return any(_tells(c.kind, c.eager_error) and c.eager_error > DIRECT[eager.dtype] for c in report.comparisons)


def _tells(kind: str, eager_error: float) -> bool:
    """A gradient that is zero but for rounding, as a bias before a batch norm has, may well be another each time."""
    return kind == "output" or eager_error < 0.5


def _unsteady(again: Results, eager: Results, exact: Results | None, rtol: float | None) -> tuple[str, str]:
    """What is wrong with two runs of the original that do not agree, and the module; empty where they do."""
    worst, found = 0.0, ("", "")
    for key, want in eager.tensors.items():
        got, ref = again.tensors.get(key), None if exact is None else exact.tensors.get(key)
        off, error = float("inf"), 0.0
        if not _difference(got, want):
            if got is None or want is None or not want.is_floating_point():
                continue
            off, error = _off(got, want), 0.0 if ref is None else _off(want, ref)
        # sums in another order differ as well, by less than rounding does
        if off > max(DIRECT[eager.dtype] if rtol is None else rtol, error / 2, worst) and _tells(key[0], error):
            worst = off
            detail = "has another shape, dtype or place of NaN" if off == float("inf") else f"differs by {off:.1e}"
            say = f"the original does not repeat its own results: {' '.join(key)} {detail} from one run to the next"
            found = (f"{say}, so that nothing can be judged", _module_of(Comparison(*key, 0.0, 0.0, 0.0)))
    return found


def _restless(original: Callable[[], Any], model: nn.Module) -> str:
    """The innermost module of the original that is first to give another output for the same run."""
    seen: list[list[tuple[str, Tensor]]] = [[], []]

    def note(into: list[tuple[str, Tensor]], name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            for t in pytree.tree_leaves(out):
                if isinstance(t, Tensor):
                    flat = t.detach().flatten()
                    into.append((name, flat[:: max(1, flat.numel() // 4096)].clone()))  # a sample will do

        return hook

    for into in seen:
        handles = [m.register_forward_hook(note(into, name)) for name, m in model.named_modules()]
        try:
            original()
        finally:
            for handle in handles:
                handle.remove()
    for (name, a), (_, b) in zip(*seen, strict=False):
        if _difference(a, b) or (a.is_floating_point() and _off(a, b) > DIRECT.get(a.dtype, 0.0)):
            return name
    return ""


def _culprit(
    model: nn.Module,
    patched: Sequence[nn.Module],
    some_fused: Callable[..., Results],
    eager: Results,
    exact: Results | None,
    rtol: float | None,
    shaken: Results | None = None,
) -> str:
    """The module whose patching makes the difference, after those before it: found by halving."""

    def fails(some: list[nn.Module]) -> bool:
        try:
            got = some_fused(some)
        except Exception:
            return True
        return not all(c.ok for c in _compare(got, eager, exact, rtol, shaken))

    right, wrong = 0, len(patched)  # so many of them patched
    if not fails(list(patched)):
        return ""
    while wrong - right > 1:
        half = (right + wrong) // 2
        right, wrong = (right, half) if fails(list(patched[:half])) else (half, wrong)
    return next(n for n, m in model.named_modules() if m is patched[wrong - 1])
