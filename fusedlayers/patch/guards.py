"""What must hold on a call for a fused path to be taken, as expressions of the generated forward, each with a reason.

At patch time `member_problem` asks the same questions of a child that is about to be fused into something else.
"""

from __future__ import annotations

import threading
import uuid
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from . import trace as tracing
from .shadow import Path
from .trace import Exactly, Read

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
MARK = "__fused__"
STATE = "_fusedlayers_site"
PLAIN = frozenset({nn.Parameter, torch.Tensor})


def original_class(module: nn.Module) -> type:
    """The class of `module` before patching; its own class when it is not patched."""
    info = vars(type(module)).get(MARK)
    return info.original if info is not None else type(module)


def is_patched(module: nn.Module) -> bool:
    return MARK in vars(type(module))


def member_problem(module: nn.Module, name: str) -> str | None:
    """Why `module`'s forward may not be replaced by a part of something else; None when it may."""
    if any(getattr(module, hooks, None) for hooks in HOOKS):
        return f"{name} has a hook"
    if "forward" in module.__dict__:
        return f"{name} has a forward of its own"
    if getattr(module, "parametrizations", None):
        return f"{name} is parametrized"
    for key, parameter in module._parameters.items():
        if parameter is not None and type(parameter) not in PLAIN:
            return f"{name}.{key} is a {type(parameter).__name__}"
    return None


def _overrides(cls: type) -> bool:
    """Whether tensors of this class compute torch's functions in a way of their own, as quantized weights do."""
    return getattr(cls, "__torch_function__", None) is not torch._C._disabled_torch_function_impl


_overrides._dynamo_marked_constant = True  # torch.compiler.assume_constant_result, as below


def _unpatched(cls: type) -> type:
    """The class that a patched one stands in for; what it asks of another class is what it asked of its own."""
    info = vars(cls).get(MARK)
    return info.original if info is not None else cls


_unpatched._dynamo_marked_constant = True
_NO_OTHER = PLAIN | {type(None)}
"""Absent too: in replicas of `nn.DataParallel` and under FSDP a weight is an ordinary attribute."""


@dataclass(frozen=True)
class Guard:
    expression: str
    reason: str


class Names:
    """Values the generated code refers to by name."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._known: dict[Any, str] = {}
        self.children: dict[Path, str] = {}

    def bind(self, value: Any, hint: str = "v") -> str:
        try:
            key: Any = (type(value), value)
            known = self._known.get(key)
        except TypeError:
            key = ("id", id(value))
            known = self._known.get(key)
        if known is None:
            stem = "".join(c if c.isalnum() else "_" for c in hint)
            known = self._known[key] = f"_{len(self.values)}_{stem}"
            self.values[known] = value
        return known

    def child(self, path: Path) -> str:
        """The local holding the child at `path`; the module itself for the empty path."""
        if not path:
            return "self"
        return self.children.setdefault(path, f"_c{len(self.children)}")


def literal(value: Any, names: Names) -> str:
    if value is None or value is Ellipsis or type(value) in (bool, int, str):
        return repr(value)
    return names.bind(value, type(value).__name__)


def form(conditions: tracing.Form, training: bool | None, names: Names) -> str:
    """Whether a call has this form and the module this mode."""
    parts = []
    for name, wanted in conditions.items():
        if wanted == tracing.NONE:
            parts.append(f"{name} is None")
        elif wanted == tracing.GIVEN:
            parts.append(f"{name} is not None")
        elif wanted == tracing.TENSOR:
            parts.append(f"isinstance({name}, {names.bind(torch.Tensor, 'Tensor')})")
        elif wanted == tracing.LIST:
            parts.append(f"type({name}) is list")
        elif wanted == tracing.EMPTY:
            parts.append(f"not {name}")
        elif isinstance(wanted, Exactly):
            parts.append(_same(name, wanted.value, names))
    if training is not None:
        parts.append("self.training" if training else "not self.training")
    return " and ".join(parts) or "True"


def _same(expression: str, value: Any, names: Names) -> str:
    code = (type, *tracing.shadow.CODE, torch.dtype)
    if value is None or isinstance(value, (bool, code)):
        return f"{expression} is {literal(value, names)}"
    kind = names.bind(type(value), type(value).__name__)
    return f"type({expression}) is {kind} and {expression} == {literal(value, names)}"


def read(found: Read, names: Names) -> Guard | None:
    """The guard for something a trace read; None for what member guards or the call itself already ensure."""
    owner = names.child(found.path)
    where = ".".join((*found.path, found.name))
    if found.kind == "value":
        held = f"getattr({owner}, {found.name!r}, {names.bind(_MISSING, 'missing')})"
        if found.value is None:
            return Guard(f"{held} is None", f"{where} has been set")
        return Guard(_same(held, found.value, names), f"{where} has changed")
    if found.kind == "absent":
        return Guard(f"not hasattr({owner}, {found.name!r})", f"{where} has been added")
    if found.kind == "none":
        return Guard(f"getattr({owner}, {found.name!r}, True) is None", f"{where} has been set")
    if found.kind == "tensor":
        return Guard(f"getattr({owner}, {found.name!r}, None) is not None", f"{where} has been removed")
    if found.kind == "child":
        return Guard(f"{names.child((*found.path, found.name))} is not None", f"{where} has been removed")
    if found.kind == "keys":
        keys, what = names.bind(found.value, "keys"), found.name.removeprefix("_").replace("modules", "children")
        reason = f"{what} of {'.'.join(found.path) or 'the module'} have changed"
        return Guard(f"tuple({owner}.{found.name}) == {keys}", reason)
    if found.kind == "type":
        kind, unpatched = names.bind(found.value, "type"), names.bind(_unpatched)
        where = ".".join(found.path)
        return Guard(f"type({owner}) is {kind} or {unpatched}(type({owner})) is {kind}", f"{where} has been replaced")
    if found.kind == "method":
        function, kind = names.bind(found.value, found.name), f"type({owner})"
        if found.name == "forward":  # a child's, which may be patched for who else calls it
            kind = f"{names.bind(_unpatched)}({kind})"
        same = f"getattr({kind}, {found.name!r}, None) is {function}"
        return Guard(f"{same} and {found.name!r} not in {owner}.__dict__", f"{where} has been replaced")
    if found.kind == "global":
        missing, (first, *rest) = names.bind(_MISSING, "missing"), found.value.chain
        holder = names.bind(found.value.owner, "globals")
        held = f"{holder}.get({first!r}, {missing})"
        if not isinstance(found.value.owner, dict):
            held = f"getattr({holder}, {first!r}, {missing})"
        for name in rest:
            held = f"getattr({held}, {name!r}, {missing})"
        return Guard(_same(held, found.value.value, names), f"the global {found.name} has changed")
    return None


def member(path: Path, module: nn.Module, pins: Iterable[str], names: Names) -> list[Guard]:
    """Guards for a child whose forward the fused path does not run."""
    at, label = names.child(path), ".".join(path)
    guards = []
    if path:
        kind = names.bind(type(module), type(module).__name__)
        guards.append(Guard(f"type({at}) is {kind}", f"{label} has been replaced"))
        hooks = " or ".join(f"{at}.{name}" for name in HOOKS)
        guards.append(Guard(f"not ({hooks})", f"{label} has a hook"))
        guards.append(Guard(f"'forward' not in {at}.__dict__", f"{label} has a forward of its own"))
    for key, parameter in module._parameters.items():
        if parameter is not None:
            found, plain, odd = f"type({at}._parameters.get({key!r}))", names.bind(_NO_OTHER), names.bind(_overrides)
            reason = f"{'.'.join((*path, key))} has become a tensor subclass"
            guards.append(Guard(f"{found} in {plain} or not {odd}({found})", reason))
    for pin in pins:
        if hasattr(module, pin):
            guards += filter(None, [read(Read(path, pin, "value", getattr(module, pin)), names)])
    return guards


def no_global_hooks(names: Names) -> Guard:
    held = [names.bind(getattr(torch_module, name), name) for name in GLOBAL_HOOKS if hasattr(torch_module, name)]
    return Guard(f"not ({' or '.join(held)})", "a hook on all modules is registered")


class _Missing:
    """Equal to nothing: what a guard sees where an attribute is gone."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


_MISSING = _Missing()


class FallbackError(RuntimeError):
    """A call could not take the fused path and `on_fallback="raise"` was asked for."""


class FallbackWarning(UserWarning):
    """A call of a patched module took its original path."""


_lock = threading.Lock()
_by_token: weakref.WeakValueDictionary[str, Site] = weakref.WeakValueDictionary()


class Site:
    """What a patched module carries: its name in the model, what a fallback does, and how often each happened."""

    def __init__(self, name: str, on_fallback: str = "warn", routes: dict[str, str] | None = None):
        self.name, self.on_fallback, self.routes = name, on_fallback, dict(routes or {})
        self.fallbacks: Counter[str] = Counter()
        self.token = uuid.uuid4().hex
        _by_token[self.token] = self

    def __reduce__(self) -> Any:
        """A copy counts for itself."""
        return (Site, (self.name, self.on_fallback, self.routes))

    def note(self, reason: str) -> None:
        with _lock:
            first = not self.fallbacks
            self.fallbacks[reason] += 1
        message = f"{self.name or 'the model'} runs unfused: {reason}"
        if self.on_fallback == "raise":
            raise FallbackError(message)
        if self.on_fallback == "warn" and first:
            warnings.warn(message, FallbackWarning, stacklevel=5)


def note(module: nn.Module, reason: str | None) -> None:
    """Counts a fallback. Slices and other objects made from a patched class are not sites: nothing to count."""
    site = module.__dict__.get(STATE)
    if site is None or reason is None:
        return
    if torch.compiler.is_compiling():
        _note_compiling(site.token, reason)
    else:
        site.note(reason)


def _note_compiling(token: str, reason: str) -> None:
    """Counts once for a compiled call: the compiler runs this while tracing and breaks no graph for it."""
    _by_token[token].note(reason)


_note_compiling._dynamo_marked_constant = True  # torch.compiler.assume_constant_result, without importing the compiler
