"""From rewritten graphs to the forward of the patched class, as readable Python source."""

from __future__ import annotations

import builtins
import inspect
import keyword
import linecache
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node, Proxy

from . import guards
from .guards import Guard, Names
from .shadow import Path
from .trace import SPLAT, TOO_MANY_FORMS, Form, Read

_BINARY = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.matmul: "@", operator.mod: "%", operator.pow: "**", operator.eq: "==", operator.ne: "!=",
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
}  # fmt: skip


@dataclass(frozen=True)
class Child:
    """A module handed to a fused op; `path` is empty for the module being patched itself.

    `pins` are settings that were decided on when fusing: the fused path is taken only while they keep their values.
    """

    path: Path
    module: nn.Module = field(compare=False, repr=False)
    pins: tuple[str, ...] = ()


@dataclass
class Variant:
    """One call form in one mode (None: both): a rewritten graph with its guards, or why there is none."""

    form: Form
    training: bool | None
    graph: Graph | None = None
    reads: Sequence[Read] = ()
    members: Sequence[Child] = ()
    fused: bool = False
    refused: str | None = None


@dataclass
class Generated:
    source: str
    names: dict[str, Any]
    key: tuple[Any, ...]


def generate(signature: inspect.Signature, variants: Sequence[Variant]) -> Generated:
    """Source of `forward` and of `why`, which names the first guard that fails."""
    names = Names()
    declared, passed, probes = _signature(signature, names)
    original = f"(_forward if _original.forward is _class_forward else _original.forward)(self{passed})"
    branches: list[str] = []
    reasons: list[str] = []
    for variant in sorted(variants, key=lambda v: not v.fused):
        condition = guards.form(variant.form, variant.training, names)
        if not variant.fused:
            reasons.append(f"    if {condition}: return {variant.refused!r}")
            continue
        held = _guards(variant, names)
        test = " and ".join(f"({g.expression})" for g in (Guard(condition, ""), *held) if g.expression != "True")
        branches.append(f"    if {test or 'True'}:")
        branches += ["        " + line for line in _body(variant.graph, names)]
        reasons.append(f"    if {condition}:")
        reasons += [f"        if not ({g.expression}): return {g.reason!r}" for g in held]
        reasons.append("        return 'a guard failed'")
    many = any(v.refused == TOO_MANY_FORMS for v in variants)
    untraced = TOO_MANY_FORMS if many else "this form of call was not traced"
    fetch = [f"    {local} = {_fetch(path, names)}" for path, local in names.children.items()]
    modules = ["    _m = self._modules"] if fetch else []
    lines = [f"def forward(self{declared}):"]
    if probes:
        proxy = names.bind(Proxy, "Proxy")
        lines.append(f"    if {' or '.join(f'isinstance({p}, {proxy})' for p in probes)}:")
        lines.append(f"        return {original}")
    lines += [*modules, *fetch, *branches]
    lines += [f"    _note(self, _why(self{passed}))", f"    return {original}", ""]
    lines += [
        f"def _why(self{declared}):",
        *modules,
        *fetch,
        *reasons,
        f"    return {untraced!r}",
        "",
    ]
    source = "\n".join(lines)
    return Generated(source, names.values, (source, tuple(identity(v) for v in names.values.values())))


def compile_source(generated: Generated, filename: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Runs the source; tracebacks and debuggers show its lines."""
    lines = generated.source.splitlines(keepends=True)
    linecache.cache[filename] = (len(generated.source), None, lines, filename)
    scope = {"__builtins__": builtins, **generated.names, **extra}
    exec(compile(generated.source, filename, "exec"), scope)
    return scope


def identity(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return ("id", id(value))
    return (type(value), value)


def _guards(variant: Variant, names: Names) -> list[Guard]:
    held: list[Guard | None] = [guards.read(r, names) for r in variant.reads if r.kind == "child"]
    for child in variant.members:
        held += guards.member(child.path, child.module, child.pins, names)
    held += [guards.read(r, names) for r in variant.reads if r.kind != "child"]
    if any(child.path for child in variant.members):
        held.append(guards.no_global_hooks(names))
    held.append(Guard("_original.forward is _class_forward", "its class has been given another forward"))
    return list(dict.fromkeys(g for g in held if g is not None))


def _fetch(path: Path, names: Names) -> str:
    if len(path) == 1:
        return f"_m.get({path[0]!r})"
    return f"{names.bind(_at, 'at')}(self, {path!r})"


def _at(module: nn.Module, path: Path) -> nn.Module | None:
    for name in path:
        if module is None:
            return None
        module = module._modules.get(name)
    return module


def _signature(signature: inspect.Signature, names: Names) -> tuple[str, str, list[str]]:
    """The parameter list as declared, the arguments that pass it on, and the arguments to look at for proxies."""
    kinds = inspect.Parameter
    declared, passed, probes = [], [], []
    parameters = list(signature.parameters.values())[1:]
    for at, p in enumerate(parameters):
        default = "" if p.default is kinds.empty else f"={guards.literal(p.default, names)}"
        if p.kind is kinds.VAR_POSITIONAL:
            declared.append(f"*{p.name}")
            passed.append(f"*{p.name}")
        elif p.kind is kinds.VAR_KEYWORD:
            declared.append(f"**{p.name}")
            passed.append(f"**{p.name}")
        elif p.kind is kinds.KEYWORD_ONLY:
            if not any(d.startswith("*") for d in declared):
                declared.append("*")
            declared.append(p.name + default)
            passed.append(f"{p.name}={p.name}")
        else:
            declared.append(p.name + default)
            passed.append(p.name)
            if p.kind is kinds.POSITIONAL_ONLY and (
                at + 1 == len(parameters) or parameters[at + 1].kind is not kinds.POSITIONAL_ONLY
            ):
                declared.append("/")
        if p.default is kinds.empty and p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD):
            probes.append(p.name)
    join = lambda parts: "".join(f", {part}" for part in parts)  # noqa: E731
    return join(declared), join(passed), probes


def _body(graph: Graph, names: Names) -> list[str]:
    taken = {"self", *keyword.kwlist, *dir(builtins)}
    called: dict[Node, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            called[node] = node.target
            taken.add(node.target)
    last = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            last[used] = node
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            lines.append(f"return {_show(node.args[0], called, names)}")
            continue
        name = node.name if not node.name.startswith("_") else "v" + node.name
        fresh, count = name, 2
        while fresh in taken:
            fresh, count = f"{name}_{count}", count + 1
        name = called[node] = fresh
        taken.add(name)
        lines.append(f"{name} = {_call(node, called, names)}")
        dead = [called[n] for n in dict.fromkeys(node.all_input_nodes) if last[n] is node]
        if node not in last:
            dead.append(name)
        if dead:
            lines[-1] += "; " + " = ".join(dead) + " = None"  # as eager's own rebinding would, free what is done with
    return lines


def _call(node: Node, called: dict[Node, str], names: Names) -> str:
    show = lambda value: _show(value, called, names)  # noqa: E731
    if node.op == "get_attr":
        *path, attribute = node.target.split(".")
        return _attribute(names.child(tuple(path)), attribute)
    args = [show(a) for a in node.args]
    given = {k: show(v) for k, v in node.kwargs.items()}
    listed = ", ".join(args + [_keyword(k, v) for k, v in given.items()])
    if node.op == "call_module":
        return f"{names.child(tuple(node.target.split('.')))}({listed})"
    if node.op == "call_method":
        rest = ", ".join(args[1:] + [_keyword(k, v) for k, v in given.items()])
        return f"{_attribute(args[0], node.target)}({rest})"
    target = node.target
    if target in _BINARY and len(args) == 2 and not given:
        left, right = (f"({a})" if a.startswith("-") else a for a in args)
        return f"{left} {_BINARY[target]} {right}"
    if target is operator.getitem:
        return f"{args[0]}[{args[1]}]"
    if target is getattr and len(args) == 2 and type(node.args[1]) is str:
        return _attribute(args[0], node.args[1])
    return f"{names.bind(target, getattr(target, '__name__', 'op'))}({listed})"


def _attribute(owner: str, name: str) -> str:
    return f"{owner}.{name}" if _is_name(name) else f"getattr({owner}, {name!r})"


def _keyword(name: str, value: str) -> str:
    if name == SPLAT:
        return f"**{value}"
    return f"{name}={value}" if _is_name(name) else f"**{{{name!r}: {value}}}"


def _is_name(name: str) -> bool:
    """Whether source may have it as it is: parameters may be named anything, and the parser makes one of some names."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def _show(value: Any, called: dict[Node, str], names: Names) -> str:
    if isinstance(value, Node):
        return called[value]
    if isinstance(value, Child):
        return names.child(value.path)
    if type(value) is float and math.isfinite(value):
        return repr(value)
    if type(value) is tuple or type(value).__name__ == "immutable_list" or type(value) is list:
        inner = ", ".join(_show(v, called, names) for v in value)
        return f"({inner}{',' if len(value) == 1 else ''})" if isinstance(value, tuple) else f"[{inner}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_show(k, called, names)}: {_show(v, called, names)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({', '.join(_show(v, called, names) for v in (value.start, value.stop, value.step))})"
    if isinstance(value, torch.Size):
        return f"{names.bind(torch.Size, 'Size')}({_show(tuple(value), called, names)})"
    return guards.literal(value, names)
