"""Walks a model and decides what every module's forward becomes, changing nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..ops import _route
from . import effects, rewrite, trace
from .filters import Filters
from .guards import MARK, STATE, is_patched, original_class
from .records import Found, kind_of_module
from .report import PatchReport, Record
from .rewrite import Rewritten
from .rule import Rule
from .shadow import Path
from .sites import Allow


@dataclass
class Planned:
    """One module, by its dotted name, and what becomes of it."""

    name: str
    module: nn.Module
    rewritten: Rewritten


def one(module: nn.Module, rules: Sequence[Rule], allow: Allow) -> Rewritten | None:
    """What the rules make of one module; None for a bare layer that no rule names or a module without a forward."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    if isinstance(module, torch.fx.GraphModule):
        return rewrite.left_alone(module, "its container is a GraphModule, whose forward is its own")
    if "forward" in module.__dict__ and module._modules:
        return rewrite.left_alone(module, "its container has a forward of its own")
    cls = original_class(module)
    if cls.forward is nn.Module.forward:
        return None
    whole = rewrite.replace_whole(module, cls, rules, allow)
    if whole is not None and (whole.fused or not module._modules):
        return whole
    if not any(child is not None for child in module._modules.values()):
        return whole
    found = rewrite.rewrite(module, cls, rules, allow)
    if whole is not None:
        found.found[:0] = whole.found
    return found


def plan(
    model: nn.Module, rules: Sequence[Rule], filters: Filters, only: Callable[[str, str], str | None] | None = None
) -> Iterator[Planned]:
    """What becomes of each module of `model` that is not yet patched: containers first, then bare layers left over.

    `only(name, rule)` may give a reason to leave out a site, by its dotted name.
    """
    trace.forget()
    swallowed: set[int] = set()
    opened: set[int] = set()
    bare: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if is_patched(module):
            info = vars(type(module))[MARK]
            swallowed |= _below(module, info.touched)
            opened |= _below(module, info.opened)
            continue
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            continue
        if not any(child is not None for child in module._modules.values()):
            bare.append((name, module))
            continue
        if id(module) in swallowed | opened:  # said already, where its parent's forward takes its layers in
            continue
        rewritten = one(module, rules, _allow(name, filters, only))
        if rewritten is not None:
            swallowed |= _below(module, rewritten.touched)
            opened |= _below(module, rewritten.opened)
            yield Planned(name, module, rewritten)
    targeting = [r for r in rules if r.target is not None]
    for name, module in bare:
        if name and id(module) not in swallowed:
            rewritten = one(module, targeting, _allow(name, filters, only))
            if rewritten is not None:
                yield Planned(name, module, rewritten)
    trace.forget()


def _below(module: nn.Module, paths: Iterable[Path]) -> set[int]:
    """Ids of the descendants at `paths`."""
    return {id(m) for path in paths if path and (m := effects.child(module, ".".join(path))) is not None}


def _allow(container: str, filters: Filters, only: Callable[[str, str], str | None] | None) -> Allow:
    def allow(members: tuple[Path, ...], rule: str) -> str | None:
        names = [_dotted(container, path) for path in members]
        return filters.reason(names[0], names) or (only(names[0], rule) if only is not None else None)

    return allow


def _dotted(container: str, path: Path) -> str:
    return ".".join(filter(None, (container, *path)))


def record(container: str, found: Found, overruled: str | None = None) -> Record:
    names = tuple(_dotted(container, path) for path in found.members)
    status, reason = (found.status, found.reason) if overruled is None else ("skipped", overruled)
    return Record(names[0], found.rule, status, reason, names, found.kind)


def report(model: nn.Module, planned: Sequence[Planned]) -> PatchReport:
    """The report of a model: patched modules as they are, the rest as `planned`."""
    made = PatchReport(patched=any(is_patched(m) for m in model.modules()))
    tensor = next(iter(model.parameters()), None)
    made.device = str(tensor.device.type) if tensor is not None else "cpu"
    made.precision = str(tensor.dtype).removeprefix("torch.") if tensor is not None else ""
    made.dropouts = sum("drop" in type(m).__name__.lower() for m in model.modules())
    made.failures = dict(_route.failures)
    called: list[Record] = []  # what is said of a layer in its container's place
    whole: set[str] = set()  # what is replaced as a whole
    missed: set[str] = set()  # what a larger rule in a container would have taken in

    def add(name: str, found: Found, overruled: str | None = None) -> None:
        said = record(name, found, overruled)
        made.add(said)
        if found.kind and found.members != ((),):
            called.append(said)
        elif said.status == "skipped" and said.rule:
            missed.update(said.modules)
        elif said.status != "skipped" and found.members[:1] == ((),):
            whole.add(name)

    by_module = {id(p.module): p for p in planned}
    for name, module in model.named_modules():
        if is_patched(module):
            info = vars(type(module))[MARK]
            for found in info.found:
                add(name, found)
            made.counts += info.counts
            site = module.__dict__.get(STATE)
            if site is not None and site.fallbacks:
                made.fallbacks[name] = site.fallbacks.copy()
        elif id(module) in by_module:
            rewritten = by_module[id(module)].rewritten
            counts = rewritten.counts
            for found in rewritten.found:
                left_out = found.status != "skipped" and made.patched
                add(name, found, "left out when the model was patched" if left_out else None)
            if made.patched:
                counts.fused = dict.fromkeys(counts.fused, 0)
            made.counts += counts
    counted = _drop_leaf_doubles(made, called)
    for name in (missed & whole) - counted:
        kind = kind_of_module(model.get_submodule(name))
        if kind is not None:
            made.counts.fused[kind] += 1
    return made


def _drop_leaf_doubles(made: PatchReport, called: Sequence[Record]) -> set[str]:
    """A module replaced as a whole is no longer "with nothing to fuse it with" in its container. Gives the counted."""
    fused = {r.modules[0] for r in made.fused}
    doubled = [r for r in called if r.modules[0] in fused and len(r.modules) == 1]
    made.skipped = [r for r in made.skipped if r not in doubled or r.rule]  # what a larger rule has to say stays
    kinds = {r.modules[0]: r.kind for r in doubled}  # once, whatever several forms of call say of it
    for kind in kinds.values():
        made.counts.fused[kind] += 1
    return set(kinds)
