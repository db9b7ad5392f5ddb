"""Finds the sites of one traced graph and rewrites them in place.

Larger patterns come first. What a rule matched but may not fuse is a near miss; if a later rule fuses a part of it,
that part is reported as reduced, otherwise the near miss is the reason the site was skipped.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from torch import nn
from torch.fx import Node

from . import effects
from .codegen import Child, Variant
from .guards import original_class
from .pattern import ADDITIONS, SUMS, Content, State, may_pass_through
from .records import Counts, Found, kind_of
from .rule import NO_MATCH, Call, Match, Rule
from .shadow import Path
from .trace import GIVEN, TENSOR, Trace
from .written import as_written

Allow = Callable[[tuple[Path, ...], str], "str | None"]
"""Given the members of a site and the rule's name, why filters leave it out; None when they do not."""


class Sites:
    """The rewriting of one trace's graph."""

    def __init__(self, module: nn.Module, traced: Trace, rules: Sequence[Rule], allow: Allow):
        self.module, self.traced, self.allow = module, traced, allow
        self.graph, self.start = traced.graph, State(module)
        self.members: dict[Path, Child] = {}
        self.position = {n: i for i, n in enumerate(self.graph.nodes)}
        self.placed: list[tuple[int, Found]] = []
        self.touched: set[Path] = set()
        self.missed: list[tuple[Rule, set[Node], tuple[Path, ...], str]] = []
        self.gone: set[Node] = set()
        self.fused = False
        self.form = dict(traced.form)
        self.counts = self._count()
        content = self._content()
        for rule in rules:
            if rule.pattern is not None and rule.pattern.may_end_in(content):
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
        """`opened` are children whose own forward does not run, so that nothing may be hooked to it."""
        reads = list(self.traced.reads.values())
        members = [*opened, *self.members.values()]
        return Variant(self.form, self.traced.training, self.graph, reads, members, self.fused)

    def _count(self) -> Counts:
        counts = Counts()
        self.kinds = {n: k for n in self.graph.nodes if (k := kind_of(n, self.module)) is not None}
        for kind in self.kinds.values():
            counts.total[kind] += 1
        return counts

    def _content(self) -> Content:
        """Of the graph as it was traced: what rules put in its place is nothing that patterns look for."""
        modules = (effects.child(self.module, n.target) for n in self.graph.nodes if n.op == "call_module")
        called = frozenset(n.target for n in self.graph.nodes if n.op in ("call_function", "call_method"))
        return Content(frozenset(map(type, modules)), called, "activation" in self.kinds.values())

    def _apply(self, rule: Rule) -> None:
        ops = rule.pattern.ops
        for node in reversed(list(self.graph.nodes)):
            if node.op in ops and node not in self.gone:
                self._apply_at(rule, node)

    def _apply_at(self, rule: Rule, root: Node) -> None:
        """Fuses the first match that may be; else keeps the near miss with the fewest problems."""
        missed: tuple[int, State, str] | None = None
        for state in rule.pattern.match(root, self.start):
            match = Match(self.module, state, self.traced.training)
            passed = self._passed(rule, root, state)
            match.passes = bool(passed)
            objection = checked(rule, match)
            if objection == NO_MATCH:
                continue
            reason = state.problems[0] if state.problems else self._obstacle(rule, root, state)
            paths = self._paths(state)
            inside = {n for _, n in state.nodes}
            made = reason or objection or self._number(inside) or self.allow(paths, rule.name) or made_of(rule, match)
            if isinstance(made, Call) and inside & {
                a for a in (*made.args, *made.kwargs.values()) if isinstance(a, Node)
            }:
                made = "it reads a value that it would take in"
            if isinstance(made, Call):
                self._replace(rule, root, match, made, inside, paths, passed)
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
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        for node, written in state.writes:
            # nobody may notice that the fused op leaves this value as it is
            for held in effects.roots(written, self.module) | {written}:
                unseen = held in inside or (effects.is_fresh(held, self.module) and set(held.users) <= inside)
                if not unseen or any(order[u] > order[node] for u in held.users):
                    return f"{_say(node)} overwrites a value that others may read"
            if written in outputs and written is not root:
                return f"{_say(node)} overwrites a value that is read again"
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
        for node in order if norms else ():
            owner, _, name = str(node.target).rpartition(".")
            held = effects.child(self.module, owner) if owner and node.op == "get_attr" else None
            if held in norms and name in held._buffers:  # which read comes before the update, and which after
                return f"the forward itself reads {node.target}"
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

    def _passed(self, rule: Rule, root: Node, state: State) -> list[Node]:
        """Who reads the value that the rule may pass on after it: additions, which neither keep nor overwrite it."""
        value = state.get(rule.passes) if rule.passes else None
        if not isinstance(value, Node) or not effects.is_data(value):
            return []
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        after = [n for n in order if order[n] > order[root]]
        if effects.disturbed([value], after, self.module) is not None:
            return []
        return [u for u in value.users if order[u] > order[root] and self._adds(u)]

    def _adds(self, node: Node) -> bool:
        return bool(node.meta.get("fused")) or (self.kinds.get(node) == "residual" and node.op == "call_function")

    def _replace(
        self, rule: Rule, root: Node, match: Match, made: Call, nodes: set[Node], paths: tuple[Path, ...],
        passed: list[Node],
    ) -> None:  # fmt: skip
        outputs = self._outputs(rule, root, match.state)
        members = children_of(made, match)
        made = as_written(made, match.state, outputs, bool(rule.outputs or passed))
        self._demand(nodes)
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        readers = [u for o in outputs for u in o.users if u not in nodes]
        before = min([root.next, *readers], key=lambda n: order.get(n, len(order)))
        with self.graph.inserting_before(before):
            fused = self.graph.create_node("call_function", made.op, made.args, made.kwargs)
            results = [fused]
            if rule.outputs or passed:
                count = len(outputs) + bool(passed)
                results = [self.graph.call_function(operator.getitem, (fused, i)) for i in range(count)]
            for result in (fused, *results):
                result.meta.update(fused=rule.name, views=rule.views)
        if passed:
            results[-1].meta["views"] = True  # it is the value itself
            match.state.get(rule.passes).replace_all_uses_with(results.pop(), passed.__contains__)
        for old, new in zip(outputs, results, strict=True):
            old.replace_all_uses_with(new)
        for node in sorted(nodes, key=lambda n: -order[n]):
            self.graph.erase_node(node)
        self.gone |= nodes
        self.fused = True
        for child in members:
            self.members[child.path] = _with_pins(self.members.get(child.path), child)
            self.touched.add(child.path)
        reduced = next((m for m in self.missed if m[1] & nodes and m[0].priority > rule.priority), None)
        site = Found("fused", rule.name, paths)
        if reduced is not None:
            site = Found("reduced", rule.name, paths, f"not {reduced[0].name}: {reduced[3]}")
        self._place(nodes, site)

    def _number(self, nodes: set[Node]) -> str | None:
        """Which argument is added that may be a number, if any."""
        added = (a for n, a in self._arguments(nodes) if a.args and n.op != "call_module" and n.target in ADDITIONS)
        return next((f"{_say(a)} is a number unless it is given" for a in added), None)

    def _demand(self, nodes: set[Node]) -> None:
        """Of arguments that a fused op adds, or hands to a kernel as a module's input, that they are tensors: else the
        call is eager's, to raise what eager does. One to multiply by may be a number. None is neither: ops are given
        it where there is nothing to add or multiply by."""
        for node, argument in self._arguments(nodes):
            if self.form.get(argument.target, GIVEN) == GIVEN:
                tensor = node.op == "call_module" or node.target in ADDITIONS
                self.form[argument.target] = TENSOR if tensor else GIVEN

    def _arguments(self, nodes: set[Node]) -> Iterator[tuple[Node, Node]]:
        """The sums, products and modules among these nodes, each with the arguments of the forward that it reads."""
        for node in sorted(nodes, key=lambda n: self.position.get(n, -1)):  # so that blocks alike come out the same
            module = node.op == "call_module" and not may_pass_through(node, self.module)
            for operand in node.args if module or (node.op != "call_module" and node.target in SUMS) else ():
                while operand in nodes and may_pass_through(operand, self.module):
                    operand = operand.args[0]
                if isinstance(operand, Node) and operand.op == "placeholder":
                    yield node, operand

    def _place(self, nodes: Iterable[Node], found: Found) -> None:
        self.placed.append((min(self.position.get(n, len(self.position)) for n in nodes), found))

    def _report_misses(self) -> None:
        said: set[Node] = set()
        for rule, nodes, paths, reason in self.missed:
            if not nodes & (self.gone | said):
                told = [n for n in nodes if n in self.kinds and (len(nodes) == 1 or n.op == "call_module")]
                kind = self.kinds[told[0]] if len(told) == 1 else ""
                self._place(nodes, Found("skipped", rule.name, paths, reason, kind=kind))
                said |= nodes
        for node, kind in self.kinds.items():
            if node not in self.gone and node not in said:
                where = (tuple(node.target.split(".")),) if node.op == "call_module" else ((),)
                reason = f"{kind} with nothing to fuse it with: {self._around(node)}"
                self._place([node], Found("skipped", "", where, reason, kind=kind))

    def _around(self, node: Node) -> str:
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        made = self.kinds.get(node) == "activation" and source is not None and source.op == "call_module"
        if node.users and all(u.op == "output" for u in node.users) and not made:
            return "what reads it is outside this module"
        if source is None:
            return "it has no input"
        if source.op == "call_module":
            cls = original_class(effects.child(self.module, source.target))
            own = "" if cls.__module__.startswith("torch.") else f"{cls.__module__}."
            return f"follows {source.target} ({own}{cls.__qualname__})"
        return f"follows {source.name}"


def checked(rule: Rule, match: Match) -> str | None:
    """What the rule has against the match. A rule that fails is a reason, not a crash."""
    try:
        return rule.check(match)
    except Exception as error:
        return f"rule {rule.name} failed ({type(error).__name__}: {error})"


def made_of(rule: Rule, match: Match) -> Call | str:
    """What the rule puts in place of the match, likewise."""
    try:
        return rule.fuse(match)
    except Exception as error:
        return f"rule {rule.name} failed ({type(error).__name__}: {error})"


def _with_pins(known: Child | None, child: Child) -> Child:
    if known is None:
        return child
    return Child(child.path, child.module, tuple(dict.fromkeys((*known.pins, *child.pins))))


def children_of(made: Call, match: Match) -> list[Child]:
    children = {c.path: c for c in match.state.children}
    for child in (*match.extra, *(a for a in (*made.args, *made.kwargs.values()) if isinstance(a, Child))):
        children[child.path] = _with_pins(children.get(child.path), child)
    return list(children.values())


def _say(node: Node, name: str = "") -> str:
    if node.op == "call_module":
        return str(node.target)
    return name or str(node.name)
