"""Two or three Linears that read one value, as attention's `q`, `k` and `v` do."""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from ...nn._children import plain, stored
from ...ops import _route
from ...ops import projections as op
from .. import effects, trace
from ..decorators import forward_of
from ..guards import member_problem, original_class
from ..pattern import Pattern, State, is_a, leaf, value
from ..rule import NO_MATCH, Call, Match, Rule, register_rule
from ..shadow import Untraceable
from ..splice import Group, SpliceRule, groups, spliced
from ..trace import SPLAT


def projections(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    weights, biases = zip(*(stored(layer, "weight", "bias") for layer in layers), strict=True)
    return op.projections(x, weights, biases)


class _Siblings(Pattern):
    """Calls of its inputs, which are children, with one value, in the order of the forward; found at the last."""

    def match(self, node: Any, state: State) -> Iterator[State]:
        if not _is_linear(node, state.module):
            return
        calls = [user for user in node.args[0].users if _is_linear(user, state.module)]
        if len(calls) < len(self.inputs):
            return
        order = {n: i for i, n in enumerate(node.graph.nodes)}
        before = sorted((n for n in calls if order[n] < order[node]), key=lambda n: -order[n])
        for chosen in itertools.combinations(before, len(self.inputs) - 1):
            found = (node, *chosen)
            if len({n.target for n in found}) == len(found):
                yield from self._follow(found, state, self.inputs[::-1])  # a site is named after what matches last


def _is_linear(node: Any, module: nn.Module) -> bool:
    if not isinstance(node, Node) or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    child = effects.child(module, node.target)
    return isinstance(node.args[0], Node) and child is not None and is_a(child, nn.Linear)


class _Projections(Rule):
    def fuse(self, m: Match) -> Call:
        return m.call(projections, m.x, *(getattr(m, name) for name in self.outputs))


def _siblings(*names: str) -> Pattern:
    return _Siblings()(*(leaf(name, nn.Linear)(value("x")) for name in names))


@register_rule
class Projections(_Projections):
    """`q(x), k(x), v(x)`: under autocast backward is one pass over their gradients and two products."""

    outputs = ("q", "k", "v")
    pattern = _siblings(*outputs)
    priority = -1  # what takes one of them into something larger comes first


@register_rule
class TwoProjections(_Projections):
    """`k(x), v(x)`: under autocast backward is one pass over their gradients and two products."""

    outputs = ("k", "v")
    pattern = _siblings(*outputs)
    priority = -2


class Shared:
    """What the products of one tensor gave, each until it is taken."""

    __slots__ = ("made",)

    def __init__(self, x: Tensor, layers: tuple[nn.Linear, ...], outputs: tuple[Tensor, ...]):
        self.made: list[tuple[Any, ...] | None] = [
            (output, *_operands(x, layer)) for output, layer in zip(outputs, layers, strict=True)
        ]

    def take(self, at: int, layer: nn.Linear, x: Tensor) -> Tensor | None:
        """The product, unless something that ran since it was made has changed what it is a product of."""
        made, self.made[at] = self.made[at], None  # the forward may let go of it, and of x
        if made is None or not plain(layer):
            return None
        output, operands, version = made
        now, new_version = _operands(x, layer)
        return output if version == new_version and all(map(operator.is_, operands, now)) else None


def _operands(x: Tensor, layer: nn.Linear) -> tuple[tuple[Any, ...], int]:
    """What `layer(x)` reads, and a number that grows as any of it is edited in place."""
    weight, bias = stored(layer, "weight", "bias")
    version = x._version + weight._version
    return (x, layer, weight, bias), version if bias is None else version + bias._version


def start(x: Tensor, *layers: nn.Linear) -> Shared | None:
    """The products, where they are fused."""
    if _route.is_compiling() or not isinstance(x, Tensor):
        return None
    weights, biases = zip(*(stored(layer, "weight", "bias") for layer in layers), strict=True)
    outputs = op.fused(x, weights, biases)
    return None if outputs is None else Shared(x, layers, outputs)


def take(shared: Shared | None, at: int, layer: nn.Linear, x: Tensor) -> Tensor:
    """`layer(x)`: the product that is there, if it still is that."""
    output = None if shared is None else shared.take(at, layer, x)
    return layer(x) if output is None else output


def _has_groups(cls: type) -> bool:
    try:
        return issubclass(cls, nn.Module) and bool(groups(forward_of(cls).function))
    except Untraceable:
        return False


@register_rule
class ProjectionsInPlace(SpliceRule):
    """`self.q(x)`, `self.k(x)`, `self.v(x)` in a forward that no trace gets through."""

    target = (_has_groups,)
    priority = -3

    def check(self, m: Match) -> str | None:
        if any(t.graph is not None for t in trace.looked_at(m.module, original_class(m.module))):
            return NO_MATCH
        parts, problems = _parts(m.module)
        return None if any(parts) else problems[0] if problems else NO_MATCH

    def fuse(self, m: Match) -> Call:
        function = forward_of(original_class(m.module)).function
        parts, _ = _parts(m.module)
        for name in itertools.chain(*parts):
            m.child(name)
        kinds = inspect.signature(function).parameters
        named = {k: v for k, v in m.inputs.items() if k == SPLAT or kinds[k].kind is inspect.Parameter.KEYWORD_ONLY}
        rest = [v for k, v in m.inputs.items() if k not in named]
        return m.call(spliced(function, parts, start, take), m.own(), *rest, **named)


def _parts(module: nn.Module) -> tuple[tuple[Group, ...], list[str]]:
    """Of each group in the forward the children that may be fused, none where they are fewer than two; and why not."""
    parts: list[Group] = []
    problems: list[str] = []
    for group in groups(forward_of(original_class(module)).function):
        part: list[str] = []
        linears = {n: c for n in group if (c := module._modules.get(n)) is not None and is_a(c, nn.Linear)}
        for name, child in linears.items():
            cls = original_class(child)
            problem = member_problem(child, name)
            if cls is not nn.Linear:
                problem = f"{name} is a {cls.__module__}.{cls.__qualname__}, not exactly a Linear"
            if problem is None:
                part.append(name)
            elif len(linears) > 1:
                problems.append(problem)
        parts.append(tuple(part[: max(op.PARTS)]) if len(part) > 1 else ())
    return tuple(parts), problems
