"""Children whose own children may be leaves of their container's forward, for what belongs together across them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.fx import Graph, Node

from . import effects, trace
from .decorators import forward_of
from .guards import is_patched, member_problem, original_class
from .pattern import activation_of, is_a, may_pass_through
from .records import kind_of
from .shadow import Path, Untraceable
from .trace import Inline


def tails(graphs: Iterable[Graph], module: nn.Module) -> Inline:
    """Sequentials that end in a norm or a dropout, where an add reads what they give."""
    return dict.fromkeys((path for graph in graphs for path in _tails(graph, module)), nn.Sequential.forward)


def _tails(graph: Graph, module: nn.Module) -> Iterator[Path]:
    for node in graph.nodes:
        if kind_of(node, module) != "residual":
            continue
        for source in node.args:
            while may_pass_through(source, module):
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
    cls = original_class(module)
    return cls.forward is nn.Sequential.forward and _just_runs(cls) and member_problem(module, "") is None


def _just_runs(cls: type) -> bool:
    """Whether calling a module of this class does nothing but run its forward, and its hooks."""
    return cls.__call__ is nn.Module.__call__


def pairs(graphs: Iterable[Graph], module: nn.Module) -> Inline:
    """Two children that are an MLP together, as transformers divides it: one ends in an activation, and a Linear at the
    beginning of the other is all that reads it.
    """
    found: dict[Path, Any] = {}
    for node in (n for graph in graphs for n in graph.nodes):
        reader = next(iter(node.users), None)
        if len(node.users) == 1 and node.op == reader.op == "call_module" and node.target != reader.target:
            first, second = (effects.child(module, name) for name in (node.target, reader.target))
            if _ends_in_activation(first) and _begins_in_linear(second, reader, node):
                found[tuple(node.target.split("."))] = _forward(first)
                found[tuple(reader.target.split("."))] = _forward(second)
    return found


def _forward(module: nn.Module | None) -> types.FunctionType | None:
    """The forward of a container that may be opened; None where it may not."""
    if module is None or not module._modules or is_patched(module) or member_problem(module, "") is not None:
        return None
    try:
        forward = forward_of(type(module))
    except Untraceable:
        return None
    whole = type(module).forward is forward.function  # nothing taken off that would be around no replacement
    return forward.function if whole and _just_runs(type(module)) else None


def _graphs(module: nn.Module | None) -> list[Graph]:
    """Of a container that may be opened, where every trace got through."""
    if _forward(module) is None:
        return []
    traced = trace.looked_at(module, type(module))
    return [] if any(t.graph is None for t in traced) else [t.graph for t in traced]


def _ends_in_activation(module: nn.Module | None) -> bool:
    graphs = _graphs(module)
    ends = [list(graph.nodes)[-1].args[0] for graph in graphs]
    return bool(graphs) and all(isinstance(end, Node) and activation_of(end, module) is not None for end in ends)


def _begins_in_linear(module: nn.Module | None, call: Node, value: Node) -> bool:
    """Whether Linears are all that reads the argument that is `value` in this call."""
    graphs = _graphs(module)
    if not graphs:
        return False
    names = list(inspect.signature(_forward(module)).parameters)[1:]
    given = [name for name, arg in (*zip(names, call.args, strict=False), *call.kwargs.items()) if arg is value]
    heads = [n for graph in graphs for n in graph.nodes if n.op == "placeholder" and n.target in given]
    users = [u for head in heads for u in head.users]
    return (
        len(given) == 1
        and bool(users)
        and all(u.op == "call_module" and is_a(effects.child(module, u.target), nn.Linear) for u in users)
    )
