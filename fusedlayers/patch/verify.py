"""`verify`: the patched model against the original on the same inputs, parameters, randomness and mode."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import apply
from .guards import STATE, Site, is_patched

FACTOR = 1.5
ULPS = 4.0
DIRECT = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Relative difference allowed where there is no float64 reference, by the coarsest dtype the model computes in."""


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
        sites: how many modules of the model are patched.
        fallbacks: patched modules that took their original path in this run, by reason.
    """

    comparisons: list[Comparison] = field(default_factory=list)
    reference: str = "float64"
    worst: str = ""
    sites: int = 0
    fallbacks: dict[str, Counter[str]] = field(default_factory=dict)
    error: str = ""

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
        head = {"ok": self.ok, "reference": self.reference, "worst": self.worst, "sites": self.sites}
        return {**head, "error": self.error, "fallbacks": fallbacks, "comparisons": compared}

    def __str__(self) -> str:
        if self.error:
            return f"FAILED: {self.error}; worst: {self.worst or '-'}"
        if not self.sites:
            return "ok: no module of this model is patched, so there is nothing to compare"
        off = [c for c in self.comparisons if not c.ok]
        state = f"FAILED: {len(off)} of {len(self.comparisons)} tensors are off" if off else "ok"
        kinds = Counter(c.kind for c in self.comparisons)
        share = ", ".join(f"{n} {kind}s" for kind, n in kinds.items())
        lines = [
            f"{state}; {self.sites} patched modules, {share}, against {self.reference}; worst: {self.worst or '-'}"
        ]
        for c in (off or self.comparisons)[:8]:
            detail = c.note or f"error {c.error:.2e}, eager's {c.eager_error:.2e}, allowed {c.allowed:.2e}"
            lines.append(f"  {c.kind:<18} {c.name or '(root)':<40} {detail}")
        for name, reasons in self.fallbacks.items():
            lines += [f"  ran unfused        {name or '(root)':<40} {why}" for why in reasons]
        return "\n".join(lines)


def verify(
    model: nn.Module, *inputs: Any, backward: bool = True, rtol: float | None = None, **kwinputs: Any
) -> VerifyReport:
    """Runs `model` fused and original, and compares outputs, input gradients, parameter gradients and buffers.

    Both runs start from the same inputs, parameters, buffers and random state, in the model's mode and the caller's
    autocast. Each is measured against the original in float64 where that can be had (the model can be copied, and draws
    no random numbers on a GPU, whose draws depend on the dtype): the fused error may be 1.5 times the original's,
    plus a few ulp. Without it the two are compared directly. The model is left as it was found.

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
    report = VerifyReport(sites=len(patched))
    if not patched:
        return report
    sites = {name: m.__dict__.get(STATE) for name, m in model.named_modules() if is_patched(m)}
    counts = {id(s): s.fallbacks.copy() for s in sites.values() if s is not None}
    with _as_found(model) as rewind:
        try:
            with _unpatched(patched):
                eager = _run(model, inputs, kwinputs, backward)
            drew = eager.random
            rewind()
            try:
                fused = _run(model, inputs, kwinputs, backward)
            except Exception as error:
                report.error = f"only the patched model raises {type(error).__name__}: {error}"
                report.worst = _culprit(model, patched, inputs, kwinputs, eager, None, rtol, rewind)
                return report
            report.fallbacks = _new_fallbacks(sites, counts)
            exact = None
            if rtol is None and not (drew and _on_gpu(model)):
                rewind()
                exact = _reference(model, inputs, kwinputs, backward)
            report.reference = "float64" if exact is not None else "the original"
            report.comparisons = _compare(fused, eager, exact, rtol)
            report.worst = _module_of(report.comparisons[0]) if report.comparisons else ""
            if not report.ok:
                report.worst = _culprit(model, patched, inputs, kwinputs, eager, exact, rtol, rewind) or report.worst
        finally:
            for site in sites.values():
                if site is not None:
                    site.fallbacks = counts[id(site)]
    return report


def _new_fallbacks(sites: dict[str, Site | None], before: dict[int, Counter[str]]) -> dict[str, Counter[str]]:
    found = {name: site.fallbacks - before[id(site)] for name, site in sites.items() if site is not None}
    return {name: reasons for name, reasons in found.items() if reasons}


@dataclass
class _Results:
    tensors: dict[tuple[str, str], Tensor | None]
    random: bool
    dtype: torch.dtype


def _run(model: nn.Module, inputs: Sequence[Any], kwinputs: dict[str, Any], backward: bool) -> _Results:
    before = _random_state()
    leaves: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.detach().clone().requires_grad_(backward)
            leaves.append(value)
        return value

    args, kwargs = pytree.tree_map(leaf, (tuple(inputs), dict(kwinputs)))
    with torch.enable_grad() if backward else torch.no_grad():
        flat = [t for t in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(t, Tensor)]
        found: dict[tuple[str, str], Tensor | None] = {("output", str(i)): t.detach() for i, t in enumerate(flat)}
        if backward:
            named = [(("input gradient", str(i)), t) for i, t in enumerate(leaves)]
            named += [(("parameter gradient", n), p) for n, p in model.named_parameters() if p.requires_grad]
            roots = [t for t in flat if t.requires_grad]
            pulls = [_cotangent(t, i) for i, t in enumerate(roots)]
            grads = _gradients(model, roots, pulls, [t for _, t in named])
            found.update((key, grad) for (key, _), grad in zip(named, grads, strict=True))
    buffers = [(n, b) for n, b in model.named_buffers() if b is not None]
    found.update({("buffer", n): b.detach().clone() for n, b in buffers})
    return _Results(found, not _same_random(before, _random_state()), _coarsest(model, flat))


def _coarsest(model: nn.Module, outputs: Sequence[Tensor]) -> torch.dtype:
    used = {t.dtype for t in (*model.parameters(), *outputs) if t.is_floating_point()} & DIRECT.keys()
    for device in {p.device.type for p in model.parameters()}:
        if torch.is_autocast_enabled(device):
            used.add(torch.get_autocast_dtype(device))
    return max(used, key=lambda d: DIRECT.get(d, 1.0), default=torch.float32)


def _cotangent(t: Tensor, seed: int) -> Tensor:
    """The same in every run and dtype, from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(t.shape, generator=generator, dtype=torch.float32)
    return drawn.to(torch.bfloat16).to(t.device, t.dtype)


def _gradients(model: nn.Module, roots: list[Tensor], pulls: list[Tensor], wanted: list[Tensor]) -> list[Tensor | None]:
    if not roots or not wanted:
        return [None] * len(wanted)
    try:
        return list(torch.autograd.grad(roots, wanted, pulls, allow_unused=True))
    except RuntimeError as error:
        if "checkpoint" not in str(error).lower() or any(
            getattr(p, "_post_accumulate_grad_hooks", None) for p in wanted
        ):
            raise
    kept = [(p, p.grad) for p in model.parameters()]  # reentrant checkpointing knows only backward()
    try:
        for p, _ in kept:
            p.grad = None
        torch.autograd.backward(roots, pulls)
        return [t.grad for t in wanted]
    finally:
        for p, grad in kept:
            p.grad = grad


def _reference(model: nn.Module, inputs: Sequence[Any], kwinputs: dict[str, Any], backward: bool) -> _Results | None:
    def double(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    try:
        exact = copy.deepcopy(model)
        for module in exact.modules():
            apply.restore(module)
        exact.double()
        with contextlib.ExitStack() as stack:
            for device in {p.device.type for p in model.parameters()} | {"cpu"}:
                stack.enter_context(torch.autocast(device, enabled=False))
            return _run(exact, *pytree.tree_map(double, (tuple(inputs), dict(kwinputs))), backward)
    except Exception:  # a model that cannot be copied or run in float64 is compared directly
        return None


def _compare(fused: _Results, eager: _Results, exact: _Results | None, rtol: float | None) -> list[Comparison]:
    rows: list[tuple[str, str, float, float, str, float]] = []
    for key, want in eager.tensors.items():
        got, ref = fused.tensors.get(key), want
        if exact is not None:
            ref = exact.tensors.get(key)
        note = _difference(got, want)
        if note or want is None or not want.is_floating_point():
            rows.append((*key, 0.0, 0.0, note, 0.0))
            continue
        ref = want if ref is None else ref
        eps = torch.finfo(want.dtype if want.dtype != torch.float64 else torch.float64).eps
        rows.append((*key, _off(got, ref), _off(want, ref), "", eps))
    typical: dict[str, float] = {}
    for kind in {row[0] for row in rows}:
        errors = sorted(row[3] for row in rows if row[0] == kind)
        typical[kind] = errors[len(errors) // 2]
    made = []
    for kind, name, error, eager_error, note, eps in rows:
        if rtol is not None:
            allowed = rtol
        elif exact is not None:
            # an eager error that happens to cancel is no measure: the typical one of its kind counts too
            allowed = FACTOR * max(eager_error, typical[kind]) + ULPS * eps
        else:
            allowed = max(DIRECT[eager.dtype], ULPS * eps)
        made.append(Comparison(kind, name, error, eager_error, allowed, note))
    return sorted(made, key=lambda c: -c.excess)


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


def _culprit(
    model: nn.Module,
    patched: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwinputs: dict[str, Any],
    eager: _Results,
    exact: _Results | None,
    rtol: float | None,
    rewind: Callable[[], None],
) -> str:
    """Halves the patched modules until one is left whose patching alone fails."""
    backward = any(kind.endswith("gradient") for kind, _ in eager.tensors)

    def fails(some: list[nn.Module]) -> bool:
        rewind()
        chosen = {id(m) for m in some}
        with _unpatched([m for m in patched if id(m) not in chosen]):
            try:
                got = _run(model, inputs, kwinputs, backward)
            except Exception:
                return True
        return not all(c.ok for c in _compare(got, eager, exact, rtol))

    left = list(patched)
    while len(left) > 1:
        half = left[: len(left) // 2]
        left = half if fails(half) else left[len(left) // 2 :]
    name = next(n for n, m in model.named_modules() if m is left[0])
    return name if fails(left) else ""


@contextlib.contextmanager
def _unpatched(modules: Sequence[nn.Module]) -> Iterator[None]:
    held = [(m, type(m), m.__dict__.get(STATE)) for m in modules]
    try:
        for m, _, _ in held:
            apply.restore(m)
        yield
    finally:
        for m, cls, site in held:
            apply.swap(m, cls, site)


@contextlib.contextmanager
def _as_found(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Gives a function that puts buffers and generators back; done once more at the end."""
    buffers = [
        (m, name, b, None if b is None else b.detach().clone())
        for m in model.modules()
        for name, b in m._buffers.items()
    ]
    state = _random_state()

    def rewind() -> None:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                if buffer is not None and not _unchanged(buffer, value):
                    buffer.copy_(value)
        _set_random_state(state)

    try:
        yield rewind
    finally:
        rewind()


def _unchanged(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _on_gpu(model: nn.Module) -> bool:
    return any(p.device.type != "cpu" for p in model.parameters())


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])


def _same_random(a: dict[str, Any], b: dict[str, Any]) -> bool:
    same = torch.equal(a["cpu"], b["cpu"]) and a["python"] == b["python"]
    return same and all(torch.equal(x, y) for x, y in zip(a.get("cuda", ()), b.get("cuda", ()), strict=False))
