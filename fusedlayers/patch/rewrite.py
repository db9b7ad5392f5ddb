"""Applies rules to one module: its traces in, rewritten variants and a record of each site out."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.fx import Graph

from . import effects, openings, trace
from .codegen import Child, Variant
from .pattern import State, exactly, is_a
from .records import Counts, Found, kind_of_module
from .rule import NO_MATCH, Call, Match, Rule
from .shadow import Path, Untraceable
from .sites import Allow, Sites, checked, children_of, made_of
from .splice import SpliceRule
from .trace import SPLAT, Trace


@dataclass
class Rewritten:
    variants: list[Variant]
    found: list[Found]
    counts: Counts
    signature: inspect.Signature | None = None
    touched: set[Path] = field(default_factory=set)
    """Children that a fused op has swallowed in some variant."""
    opened: set[Path] = field(default_factory=set)
    """Children whose own children are leaves here; their own sites are among these."""

    @property
    def fused(self) -> bool:
        return any(v.fused for v in self.variants)


def rewrite(module: nn.Module, cls: type, rules: Sequence[Rule], allow: Allow) -> Rewritten:
    """Everything the pattern rules make of `module`'s own forward.

    Children that end or begin in a part of something larger are opened, their own children leaves of this forward
    too, if that fuses more.
    """
    traced = trace.taken(module, cls)
    graphs = [t.graph for t in traced if t.graph is not None]
    tails, pairs = openings.tails(graphs, module), openings.pairs(graphs, module)
    found = _rewrite(module, cls, rules, allow, traced)
    if tails:
        opened = _rewrite(module, cls, rules, allow, trace.traces(module, cls, tails), tails)
        if opened.counts.fused["residual"] > found.counts.fused["residual"]:
            return opened
    if pairs:
        again = trace.traces(module, cls, pairs)
        opened = _rewrite(module, cls, rules, allow, again, pairs)
        if all(t.graph is not None for t in again) and any(_spans(f, pairs) for f in opened.found):
            return opened
    return found


def _spans(found: Found, opened: Iterable[Path]) -> bool:
    """Whether something is fused across two of the children that were opened."""
    inside = (any(path[: len(child)] == child for path in found.members) for child in opened)
    return found.status != "skipped" and sum(inside) > 1


def _rewrite(
    module: nn.Module,
    cls: type,
    rules: Sequence[Rule],
    allow: Allow,
    all_traced: Sequence[Trace],
    inline: Collection[Path] = (),
) -> Rewritten:
    variants: list[Variant] = []
    found: dict[Found, None] = {}
    touched: set[Path] = set()
    counts: Counts | None = None
    opened = [Child(path, effects.child(module, ".".join(path))) for path in sorted(inline)]
    for traced in all_traced:
        if traced.graph is None:
            variants.append(Variant(traced.form, traced.training, refused=traced.refused))
            continue
        work = Sites(module, traced, rules, allow)
        variants.append(work.variant(opened))
        found.update(dict.fromkeys(work.found))
        touched |= work.touched
        if counts is None or sum(work.counts.fused.values()) > sum(counts.fused.values()):
            counts = work.counts
    kept = _settle(found)
    if alone := _one_mode(all_traced):
        kept = [
            f
            if f.status == "skipped"
            else replace(f, status="reduced", reason="; ".join(filter(None, (alone, f.reason))))
            for f in kept
        ]
    if counts is None:
        left = left_alone(module, variants[0].refused or "forward cannot be traced")
        kept, counts = [*kept, *left.found], left.counts
    try:
        signature = inspect.signature(trace.forward_of(cls).function)
    except Untraceable:
        signature = None
    return Rewritten(_merged(variants), kept, counts, signature, touched, set(inline))


def _one_mode(all_traced: Sequence[Trace]) -> str:
    """Why what is fused is so in training alone, or in evaluation; empty where both modes could be traced."""
    traced = {t.training for t in all_traced if t.graph is not None}
    refused = {t.training: t.refused for t in all_traced if t.graph is None and t.training not in traced}
    if not traced or not refused:
        return ""
    ((mode, why),) = refused.items()
    return f"in {'evaluation' if mode else 'training'} only: {why}"


def left_alone(module: nn.Module, why: str) -> Rewritten:
    """Nothing rewritten, with the reason for each child that would have counted."""
    left = Rewritten([], [], Counts())
    for name, child in module._modules.items():
        kind = None if child is None else kind_of_module(child)
        if kind is not None:
            left.counts.total[kind] += 1
            left.found.append(Found("skipped", "", ((name,),), why, kind=kind))
    return left


def replace_whole(module: nn.Module, cls: type, rules: Sequence[Rule], allow: Allow) -> Rewritten | None:
    """What the first `target` rule that fits makes of the module's whole forward; None when no rule names its class."""
    found: list[Found] = []
    for rule in rules:
        if rule.target is None:
            continue
        splices = isinstance(rule, SpliceRule)
        exact = any(exactly(cls, kind) for kind in rule.targets)
        if not exact and (splices or not any(is_a(module, kind) for kind in rule.targets)):
            continue
        try:
            forward = trace.forward_of(cls)
            reason = None if exact else f"{cls.__qualname__} is a subclass of the class this rule knows"
        except Untraceable as untraceable:
            reason = str(untraceable)
        reason = reason or _self_problem(module)
        made: Call | str
        if reason is None:
            signature = inspect.signature(forward.function)
            graph, form, inputs = Graph(), {}, {}
            for parameter in list(signature.parameters.values())[1:]:
                if splices and parameter.kind is parameter.VAR_KEYWORD:
                    inputs[SPLAT] = graph.placeholder(parameter.name)
                elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                    form[parameter.name] = trace.EMPTY
                elif parameter.default is parameter.empty or splices or parameter.name in rule.accepts:
                    inputs[parameter.name] = graph.placeholder(parameter.name)
                else:
                    form[parameter.name] = trace.Exactly(parameter.default)
            match = Match(module, State(module), module.training, inputs)
            objection = checked(rule, match)
            made = made_of(rule, match) if objection is None else objection
            members = children_of(made, match) if isinstance(made, Call) else []
            paths = tuple(dict.fromkeys(((), *(c.path for c in members))))
            made = (allow(paths, rule.name) or made) if isinstance(made, Call) else made
        else:
            made = reason
        if not isinstance(made, Call):
            if made != NO_MATCH:
                found.append(Found("skipped", rule.name, ((),), made))
            continue
        node = graph.call_function(made.op, made.args, made.kwargs)
        graph.output(node)
        variant = Variant(form, None, graph, (), members, fused=True)
        counts = _counts_of_members(members, rule)
        found.append(Found("fused", rule.name, paths))
        if splices:
            left = left_alone(module, next(t.refused for t in trace.looked_at(module, cls) if t.refused))
            found += left.found
            counts += left.counts
        return Rewritten([variant], found, counts, signature, {c.path for c in members})
    return Rewritten([], found, Counts()) if found else None


def _counts_of_members(members: Iterable[Child], rule: Rule) -> Counts:
    """What a rule for a whole class fuses: its members, and the adds the rule says it holds."""
    counts = Counts()
    kinds = [kind_of_module(c.module) for c in members if c.path] + ["residual"] * rule.residuals
    for kind in filter(None, kinds):
        counts.total[kind] += 1
        counts.fused[kind] += 1
    return counts


def _self_problem(module: nn.Module) -> str | None:
    if "forward" in module.__dict__:
        return "it has a forward of its own"
    return "it is parametrized" if getattr(module, "parametrizations", None) else None


def _merged(variants: list[Variant]) -> list[Variant]:
    """Variants of one call form whose two modes came out the same, as one."""
    merged: list[Variant] = []
    for variant in variants:
        twin = next(
            (m for m in merged if m.training is not None and m.form == variant.form and _same(m, variant)), None
        )
        if twin is None:
            merged.append(variant)
        else:
            twin.training = None
    return merged


def _same(a: Variant, b: Variant) -> bool:
    if a.graph is None or b.graph is None:
        return a.graph is b.graph and a.refused == b.refused
    reads = [{(r, repr(r.value)) for r in v.reads} for v in (a, b)]
    if a.fused != b.fused or reads[0] != reads[1]:
        return False
    if [(c.path, c.pins) for c in a.members] != [(c.path, c.pins) for c in b.members]:
        return False
    return _canonical(a.graph) == _canonical(b.graph)


def _canonical(graph: Graph) -> list[tuple[object, ...]]:
    number = {n: i for i, n in enumerate(graph.nodes)}
    show = lambda value: torch.fx.node.map_arg(value, lambda n: number[n])  # noqa: E731
    return [(n.op, n.target, show(n.args), show(n.kwargs)) for n in graph.nodes]


def _settle(found: Iterable[Found]) -> list[Found]:
    """One record a site: fused in one mode or form outweighs skipped in another."""
    rank = {"fused": 2, "reduced": 1, "skipped": 0}
    best: dict[tuple[object, ...], Found] = {}
    for f in found:
        # an activation or add that the forward writes itself has no member to be known by
        key = (f.members, f.index, not f.rule and f.members == ((),))
        if key not in best or rank[f.status] > rank[best[key].status]:
            best[key] = f
    return list(best.values())
