"""`patch_model`, `unpatch_model`, `explain`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from . import analysis, apply, inert
from .filters import Filter, Filters
from .guards import MARK, Site, is_patched
from .plan import PatchPlan
from .records import Found
from .report import PatchReport
from .rule import Rule, choose
from .shadow import Untraceable
from .watch import uncollected

Model = TypeVar("Model", bound=nn.Module)
Rules = Iterable[str | Rule] | str | Rule | None
Plan = PatchPlan | Mapping[str, Any] | str | os.PathLike[str] | None

ON_FALLBACK = ("warn", "raise", "ignore")


@uncollected()
def patch_model(
    model: Model,
    *,
    include: Filter = None,
    exclude: Filter = None,
    rules: Rules = None,
    plan: Plan = None,
    on_fallback: str = "warn",
) -> Model:
    """Fuses what can be fused in `model`, in place, and returns it.

    Structural: nothing is run or measured, and the outcome is the same on every device; which route a call takes is
    decided on each call. Parameters, buffers, names, hooks and classes (as `isinstance` sees them) stay what they are.
    What cannot be fused is left alone, with its reason in `explain(model)`. A patched model is patched no further.

    Args:
        model: any module. A bare layer stays as it is.
        include: glob(s) over dotted module names, or `callable(name, module) -> bool`. A match covers its subtree; only
            sites whose own name is covered are fused.
        exclude: likewise; no site with a member covered by it is fused.
        rules: names of rules, or `Rule` objects, to use instead of all that are registered.
        plan: a saved plan (a `PatchPlan`, its dict, or the path of its JSON) to repeat exactly. What is patched with
            the plan's sites already takes its routes.
        on_fallback: what a call does that must take its original path: "warn" (once a site), "raise" or "ignore".
            Fallbacks are counted in any case, and shown by `explain`.

    Raises:
        TypeError: `model` is not a module, or a filter is of the wrong kind.
        ValueError: a glob, rule name or `on_fallback` that matches nothing, or a plan that does not fit the model.
    """
    _check(model)
    if on_fallback not in ON_FALLBACK:
        raise ValueError(f"on_fallback must be one of {', '.join(map(repr, ON_FALLBACK))}, not {on_fallback!r}")
    filters, chosen = Filters(model, include, exclude), choose(rules)
    inert.say(chosen)
    saved = None if plan is None else PatchPlan.load(plan)
    planned = list(analysis.plan(model, chosen, filters, None if saved is None else saved.reason))
    if saved is not None:
        _require_all(saved, model, planned)
        for name, module in model.named_modules():
            if is_patched(module):
                apply.reroute(module, saved.routes.get(name, {}))
    for item in planned:
        if not item.rewritten.fused:
            continue
        routes = {} if saved is None else saved.routes.get(item.name, {})
        try:
            cls = apply.patched_class(type(item.module), item.rewritten, [r.name for r in chosen], routes)
        except Untraceable as reason:
            _give_up(item, str(reason))
            continue
        apply.swap(item.module, cls, Site(item.name, on_fallback, routes=routes))
    return model


def unpatch_model(model: Model) -> Model:
    """Gives every patched module of `model` its original class back, in place; parameters keep their values.

    A class that a later library put on top (a parametrization, FSDP) is not taken off, and what lies under it stays.
    """
    _check(model)
    for module in model.modules():
        apply.restore(module)
    return model


@uncollected()
def explain(model: nn.Module, *, include: Filter = None, exclude: Filter = None, rules: Rules = None) -> PatchReport:
    """What is fused in a patched model, or would be in an unpatched one; what is not, and why. Changes nothing."""
    _check(model)
    planned = list(analysis.plan(model, choose(rules), Filters(model, include, exclude)))
    return analysis.report(model, planned)


def _check(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")


def _require_all(saved: PatchPlan, model: nn.Module, planned: list[analysis.Planned]) -> None:
    fused: dict[str, set[str]] = {}
    already = [(n, vars(type(m))[MARK].found) for n, m in model.named_modules() if is_patched(m)]
    for container, found in [*((p.name, p.rewritten.found) for p in planned), *already]:
        for f in found:
            record = analysis.record(container, f)
            if f.status != "skipped":
                fused.setdefault(record.name, set()).add(record.rule)
    missing = saved.missing(fused)
    if missing:
        raise ValueError(f"the plan does not fit this model: it has no site {_few(missing)}")
    records = [analysis.record(container, f) for container, found in already for f in found if f.status != "skipped"]
    extra = [f"{r.name} ({r.rule})" for r in records if saved.reason(r.name, r.rule)]
    if extra:
        raise ValueError(f"the plan does not fit this model, unpatch it first: already fused are {_few(extra)}")
    modules = {p.name for p in planned if p.rewritten.fused} | {name for name, _ in already}
    strangers = [repr(name) for name in saved.routes if name not in modules]
    if strangers:
        raise ValueError(
            f"the plan does not fit this model: it has routes for what it does not patch, {_few(strangers)}"
        )


def _few(sites: list[str]) -> str:
    return ", ".join(sites[:3]) + (f" and {len(sites) - 3} more" if len(sites) > 3 else "")


def _give_up(item: analysis.Planned, reason: str) -> None:
    item.rewritten.found[:] = [
        f if f.status == "skipped" else Found("skipped", f.rule, f.members, reason, f.index)
        for f in item.rewritten.found
    ]
