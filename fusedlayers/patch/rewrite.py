"""Applies rules to one module: its traces in, rewritten variants and a record of each site out.

Larger patterns come first. What a rule matched but may not fuse is a near miss; if a later rule fuses a part of it,
that part is reported as reduced, otherwise the near miss is the reason the site was skipped.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.fx import Graph, Node

from ..activations import recognise
from . import effects, trace
from .codegen import Child, Variant
from .guards import member_problem, original_class
from .pattern import State, _exactly, _is_a, activation_of, passes_through
from .rule import NO_MATCH, Call, Match, Rule
from .shadow import Path, Untraceable
from .trace import Trace

Allow = Callable[[tuple[Path, ...], str], "str | None"]
"""Given the members of a site and the rule's name, why filters leave it out; None when they do not."""


@dataclass(frozen=True)
class Found:
    """One site in one module, members relative to it. `status` is fused, reduced or skipped."""

    status: str
    rule: str
    members: tuple[Path, ...]
    reason: str = ""
    index: int = 0
    """Which of several sites with the same members."""


@dataclass
class Counts:
    """How many activations, norms and residual adds a module's forward holds, and how many of them are fused."""

    total: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    fused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def __iadd__(self, other: Counts) -> Counts:
        for kind in KINDS:
            self.total[kind] += other.total[kind]
            self.fused[kind] += other.fused[kind]
        return self


KINDS = ("activation", "norm", "residual")


@dataclass
class Rewritten:
    variants: list[Variant]
    found: list[Found]
    counts: Counts
    signature: inspect.Signature | None = None
    touched: set[Path] = field(default_factory=set)
    """Children that a fused op has swallowed in some variant."""
    opened: set[Path] = field(default_factory=set)
    """Sequentials whose children are leaves here; their own sites are among these."""

    @property
    def fused(self) -> bool:
        return any(v.fused for v in self.variants)


def rewrite(module: nn.Module, cls: type, rules: Sequence[Rule], allow: Allow) -> Rewritten:
    """Everything the pattern rules make of `module`'s own forward.

    Where a Sequential that ends in a norm or a dropout feeds an add or an activation, what closes the Sequential and
    what follows it belong together: then its children are leaves of this forward too, if that fuses more.
    """
    traced = trace.traces(module, cls)
    tails = {path for t in traced if t.graph is not None for path in _open_tails(t.graph, module)}
    found = _rewrite(module, cls, rules, allow, traced)
    if tails:
        opened = _rewrite(module, cls, rules, allow, trace.traces(module, cls, tails), tails)
        if opened.counts.fused["residual"] > found.counts.fused["residual"]:
            return opened
    return found


def _open_tails(graph: Graph, module: nn.Module) -> Iterator[Path]:
    """Paths of plain Sequentials whose last layer may be fused with the add that reads them."""
    for node in graph.nodes:
        if kind_of(node, module) != "residual":
            continue
        for source in node.args:
            while passes_through(source, module) is not None:
                source = source.args[0]
            if source.op != "call_module" or len(source.users) != 1:
                continue
            path: Path = tuple(source.target.split("."))
            opened = []
            child = effects.child(module, source.target)
            while _is_sequential(child):
                opened.append(path)
                last = next(reversed(child._modules))
                path, child = (*path, last), child._modules[last]
            if isinstance(child, (nn.modules.batchnorm._BatchNorm, nn.Dropout)):
                yield from opened


def _is_sequential(module: nn.Module | None) -> bool:
    if not isinstance(module, nn.Sequential) or not module._modules:
        return False
    return original_class(module).forward is nn.Sequential.forward and member_problem(module, "") is None


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
        work = _Work(module, traced, rules, allow)
        variants.append(work.variant(opened))
        found.update(dict.fromkeys(work.found))
        touched |= work.touched
        if counts is None or sum(work.counts.fused.values()) > sum(counts.fused.values()):
            counts = work.counts
    kept = _settle(found)
    if counts is None:
        counts = Counts()
        for name, child in module._modules.items():
            kind = None if child is None else _kind_of_module(child)
            if kind is not None:
                counts.total[kind] += 1
                kept.append(Found("skipped", "", ((name,),), variants[0].refused or "forward cannot be traced"))
    try:
        signature = inspect.signature(trace.forward_of(cls).function)
    except Untraceable:
        signature = None
    return Rewritten(_merged(variants), kept, counts, signature, touched, set(inline))


def replace_whole(module: nn.Module, cls: type, rules: Sequence[Rule], allow: Allow) -> Rewritten | None:
    """What the first `target` rule that fits makes of the module's whole forward; None when no rule names its class."""
    found: list[Found] = []
    for rule in rules:
        if not any(_is_a(module, kind) for kind in rule.targets):
            continue
        exact = any(_exactly(cls, kind) for kind in rule.targets)
        try:
            forward = trace.forward_of(cls)
            reason = None if exact else f"{cls.__qualname__} is a subclass with a forward of its own to respect"
        except Untraceable as untraceable:
            reason = str(untraceable)
        reason = reason or _self_problem(module) or allow(((),), rule.name)
        made: Call | str
        if reason is None:
            signature = inspect.signature(forward.function)
            graph, form, inputs = Graph(), {}, {}
            for parameter in list(signature.parameters.values())[1:]:
                if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                    form[parameter.name] = trace.EMPTY
                elif parameter.default is parameter.empty:
                    inputs[parameter.name] = graph.placeholder(parameter.name)
                else:
                    form[parameter.name] = trace.Exactly(parameter.default)
            match = Match(module, State(module), module.training, inputs)
            checked = _checked(rule, match)
            made = _made(rule, match) if checked is None else checked
        else:
            made = reason
        if not isinstance(made, Call):
            if made != NO_MATCH:
                found.append(Found("skipped", rule.name, ((),), made))
            continue
        node = graph.call_function(made.op, made.args, made.kwargs)
        graph.output(node)
        members = _children(made, match)
        variant = Variant(form, None, graph, (), members, fused=True)
        counts = Counts()
        found.append(Found("fused", rule.name, tuple(dict.fromkeys(((), *(c.path for c in members))))))
        return Rewritten([variant], found, counts, signature, {c.path for c in members})
    return Rewritten([], found, Counts()) if found else None


def _checked(rule: Rule, match: Match) -> str | None:
    """What the rule has against the match. A rule that fails is a reason, not a crash."""
    try:
        return rule.check(match)
    except Exception as error:
        return f"rule {rule.name} failed ({type(error).__name__}: {error})"


def _made(rule: Rule, match: Match) -> Call | str:
    """What the rule puts in place of the match, likewise."""
    try:
        return rule.fuse(match)
    except Exception as error:
        return f"rule {rule.name} failed ({type(error).__name__}: {error})"


def _self_problem(module: nn.Module) -> str | None:
    if "forward" in module.__dict__:
        return "it has a forward of its own"
    return "it is parametrized" if getattr(module, "parametrizations", None) else None


class _Work:
    """The rewriting of one trace's graph."""

    def __init__(self, module: nn.Module, traced: Trace, rules: Sequence[Rule], allow: Allow):
        self.module, self.traced, self.allow = module, traced, allow
        self.graph = traced.graph
        self.members: dict[Path, Child] = {}
        self.position = {n: i for i, n in enumerate(self.graph.nodes)}
        self.placed: list[tuple[int, Found]] = []
        self.touched: set[Path] = set()
        self.missed: list[tuple[Rule, set[Node], tuple[Path, ...], str]] = []
        self.gone: set[Node] = set()
        self.fused = False
        self.counts = self._count()
        for rule in rules:
            if rule.pattern is not None:
                self._apply(rule)
        self._report_misses()
        self.found = self._in_order()
        for node, kind in self.kinds.items():
            self.counts.fused[kind] += node in self.gone

    def _in_order(self) -> list[Found]:
        """Records by where they are in the forward, those with the same members numbered."""
        seen: Counter[tuple[object, ...]] = Counter()
        found = []
        for _, f in sorted(self.placed, key=lambda placed: placed[0]):
            key = (f.members, f.status == "skipped" and not f.rule)
            found.append(replace(f, index=seen[key]))
            seen[key] += 1
        return found

    def variant(self, opened: Sequence[Child]) -> Variant:
        """`opened` are Sequentials whose own forward does not run, so that nothing may be hooked to it."""
        reads = list(self.traced.reads.values())
        members = [*opened, *self.members.values()]
        return Variant(self.traced.form, self.traced.training, self.graph, reads, members, self.fused)

    def _count(self) -> Counts:
        counts = Counts()
        self.kinds = {n: k for n in self.graph.nodes if (k := kind_of(n, self.module)) is not None}
        for kind in self.kinds.values():
            counts.total[kind] += 1
        return counts

    def _apply(self, rule: Rule) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node not in self.gone:
                self._apply_at(rule, node)

    def _apply_at(self, rule: Rule, root: Node) -> None:
        """Fuses the first match that may be; else keeps the near miss with the fewest problems."""
        missed: tuple[int, State, str] | None = None
        for state in rule.pattern.match(root, State(self.module)):
            match = Match(self.module, state, self.traced.training)
            checked = _checked(rule, match)
            if checked == NO_MATCH:
                continue
            reason = state.problems[0] if state.problems else self._obstacle(rule, root, state)
            paths = self._paths(state)
            made = reason or checked or self.allow(paths, rule.name) or _made(rule, match)
            if isinstance(made, Call):
                self._replace(rule, root, match, made, {n for _, n in state.nodes}, paths)
                return
            if missed is None or len(state.problems) < missed[0]:
                missed = len(state.problems), state, made
        if missed is not None:
            _, state, reason = missed
            self.missed.append((rule, {n for _, n in state.nodes}, self._paths(state), reason))

    def _paths(self, state: State) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(c.path for c in reversed(state.children))) or ((),)

    def _obstacle(self, rule: Rule, root: Node, state: State) -> str | None:
        """What in the data flow around a match forbids computing it in one place."""
        inside = {n for _, n in state.nodes}
        outputs = self._outputs(rule, root, state)
        for name, node in state.nodes:
            if node not in outputs and not set(node.users) <= inside:
                return f"{_say(node, name)} is also read elsewhere"
        for node, written in state.writes:
            if written not in inside:
                return f"{_say(node)} overwrites a value that others may read"
            if not all(n in inside or n is written for n in effects.roots(written, self.module)):
                return f"{_say(node)} overwrites a value that others may read"
            if written in outputs and written is not root:
                return f"{_say(node)} overwrites a value that is read again"
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        span = sorted(order[n] for n in inside)
        between = [n for n, i in order.items() if span[0] < i < span[-1] and n not in inside and n.op != "get_attr"]
        operands = {used for n in inside for used in n.all_input_nodes if used not in inside}
        watched = operands | {n for n in outputs if n is not root}
        disturber = effects.disturbed(watched, between, self.module)
        if disturber is not None:
            return f"{_say(disturber)} may overwrite a value in between"
        if rule.random and any(effects.is_random(n, self.module) for n in between):
            return "something in between may draw random numbers"
        norms = {c.module for c in state.children if isinstance(c.module, nn.modules.batchnorm._NormBase)}
        for node in between:
            called = effects.child(self.module, node.target) if node.op == "call_module" else None
            if norms and called is not None and norms & set(called.modules()):
                return f"{_say(node)} updates the same running statistics in between"
        if len(outputs) > 1:
            first_reader = min((order[u] for o in outputs for u in o.users if u not in inside), default=len(order))
            if max((order[o] for o in operands), default=-1) > first_reader:
                return "its values are needed in another order"
        return None

    def _outputs(self, rule: Rule, root: Node, state: State) -> list[Node]:
        if not rule.outputs:
            return [root]
        named = dict(reversed(state.nodes))
        return [named[name] for name in rule.outputs]

    def _replace(
        self, rule: Rule, root: Node, match: Match, made: Call, nodes: set[Node], paths: tuple[Path, ...]
    ) -> None:
        outputs = self._outputs(rule, root, match.state)
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        readers = [u for o in outputs for u in o.users if u not in nodes]
        before = min([root.next, *readers], key=lambda n: order.get(n, len(order)))
        with self.graph.inserting_before(before):
            fused = self.graph.create_node("call_function", made.op, made.args, made.kwargs)
            fused.meta["fused"] = rule.name
            results = [fused]
            if rule.outputs:
                results = [self.graph.call_function(operator.getitem, (fused, i)) for i in range(len(outputs))]
                for result in results:
                    result.meta["fused"] = rule.name
        for old, new in zip(outputs, results, strict=True):
            old.replace_all_uses_with(new)
        for node in sorted(nodes, key=lambda n: -order[n]):
            self.graph.erase_node(node)
        self.gone |= nodes
        self.fused = True
        for child in _children(made, match):
            self.members[child.path] = _with_pins(self.members.get(child.path), child)
            self.touched.add(child.path)
        reduced = next((m for m in self.missed if m[1] & nodes and m[0].priority > rule.priority), None)
        made_of = Found("fused", rule.name, paths)
        if reduced is not None:
            made_of = Found("reduced", rule.name, paths, f"not {reduced[0].name}: {reduced[3]}")
        self._place(nodes, made_of)

    def _place(self, nodes: Iterable[Node], found: Found) -> None:
        self.placed.append((min(self.position.get(n, len(self.position)) for n in nodes), found))

    def _report_misses(self) -> None:
        said: set[Node] = set()
        for rule, nodes, paths, reason in self.missed:
            if not nodes & (self.gone | said):
                self._place(nodes, Found("skipped", rule.name, paths, reason))
                said |= nodes
        for node, kind in self.kinds.items():
            if node not in self.gone and node not in said:
                where = (tuple(node.target.split(".")),) if node.op == "call_module" else ((),)
                reason = f"{kind} with nothing to fuse it with: {self._around(node)}"
                self._place([node], Found("skipped", "", where, reason))

    def _around(self, node: Node) -> str:
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if source is None:
            return "it has no input"
        if source.op == "call_module":
            kind = type(effects.child(self.module, source.target)).__name__
            return f"follows {source.target} ({kind})"
        return f"follows {source.name}"


def _with_pins(known: Child | None, child: Child) -> Child:
    if known is None:
        return child
    return Child(child.path, child.module, tuple(dict.fromkeys((*known.pins, *child.pins))))


def _children(made: Call, match: Match) -> list[Child]:
    children = {c.path: c for c in match.state.children}
    for child in (*match.extra, *(a for a in (*made.args, *made.kwargs.values()) if isinstance(a, Child))):
        children[child.path] = _with_pins(children.get(child.path), child)
    return list(children.values())


def _say(node: Node, name: str = "") -> str:
    if node.op == "call_module":
        return str(node.target)
    return name or str(node.name)


def kind_of(node: Node, root: nn.Module) -> str | None:
    """Whether a node is one of the things that `explain` counts."""
    if activation_of(node, root) is not None:
        return "activation"
    if node.op == "call_module":
        child = effects.child(root, node.target)
        kind = None if child is None else _kind_of_module(child)
        return kind if kind == "norm" else None
    if node.op not in ("call_function", "call_method") or len(node.args) != 2:
        return None
    if node.target not in (operator.add, operator.iadd, torch.add, "add", "add_"):
        return None
    return "residual" if all(effects.is_data(a) for a in node.args) else None


def _kind_of_module(module: nn.Module) -> str | None:
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return "norm"
    if "Norm" in type(module).__name__ and (module._parameters or module._buffers) and not module._modules:
        return "norm"
    found = recognise(module)
    return "activation" if found is not None and found.name != "identity" else None


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
        key = (f.members, f.index, f.rule if f.status == "skipped" and not f.rule else "")
        if key not in best or rank[f.status] > rank[best[key].status]:
            best[key] = f
    return list(best.values())
