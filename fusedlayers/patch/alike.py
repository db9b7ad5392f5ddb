"""Which modules a forward cannot tell apart: layers repeated many times are traced once.

A trace is made of the forward's code and the answers it got when it asked its module something. Two modules of one
kind that answer alike have the same trace.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .shadow import CODE, Path
from .watch import reached

_ASKED = {"training", "_parameters", "_buffers", "_modules"}
"""Attributes that a trace has an answer for, whatever the module's own."""
_ATOMS = (bool, int, float, str, type(None))
_NOTHING = object()


@dataclass(frozen=True)
class Read:
    """Something a trace took for granted: `kind` is value, absent, none, tensor, child, keys, type, method, global."""

    path: Path
    name: str
    kind: str
    value: Any = field(default=None, compare=False)


def holds(read: Read, module: nn.Module, cls: type) -> bool:
    """Whether `module`, of class `cls` before patching, would have answered the same."""
    owner: nn.Module | None = module
    for name in read.path:
        owner = owner._modules.get(name)
        if owner is None:
            return False
    kind, name = (type(owner) if read.path else cls), read.name
    if read.kind == "value":
        return _same(getattr(owner, name, _NOTHING), read.value)
    if read.kind == "absent":
        return not hasattr(owner, name)
    if read.kind == "none":
        return getattr(owner, name, _NOTHING) is None
    if read.kind == "tensor":
        return getattr(owner, name, None) is not None
    if read.kind == "child":
        return owner._modules.get(name) is not None
    if read.kind == "keys":
        return tuple(vars(owner)[name]) == read.value
    if read.kind == "type":
        return kind is read.value
    if read.kind == "method":
        return getattr(kind, name, None) is read.value and name not in owner.__dict__
    return read.kind == "global" and _same(reached(read.value.owner, read.value.chain), read.value.value)


def _same(a: Any, b: Any) -> bool:
    """Exactly: 1 is neither True nor 1.0, inside a tuple either, and 0.0 is not -0.0."""
    return a is b if isinstance(b, CODE) else type(a) is type(b) and bool(a == b) and repr(a) == repr(b)


def kind(module: nn.Module, cls: type, function: types.FunctionType) -> tuple[Any, ...]:
    """What two modules have in common whose forwards do the same on symbolic values: the settings that code named in
    the forward could read, theirs and those of the modules below. What is not sure to be the same counts as another."""
    below = list(module.named_modules(remove_duplicate=False))[1:]
    if any(map(_answers_itself, {cls, *(type(m) for _, m in below)})):
        return cls, id(module)
    names = _named(function, (cls, *dict.fromkeys(type(m) for _, m in below)))

    def settings(m: nn.Module) -> tuple[Any, ...]:
        own = ((k, _sure(v)) for k, v in vars(m).items() if k in names and k not in _ASKED)
        held = ((n, t is None) for group in (m._parameters, m._buffers, m._modules) for n, t in group.items())
        return (*own, *held)

    return cls, settings(module), tuple((name, m.training, type(m), settings(m)) for name, m in below)


def _answers_itself(cls: type) -> bool:
    """Whether attributes of its modules may come from anywhere."""
    own = (vars(c) for c in cls.__mro__ if not c.__module__.startswith("torch.") and c is not object)
    return any("__getattr__" in c or "__getattribute__" in c for c in own)


@functools.lru_cache(maxsize=1024)
def _named(function: types.FunctionType, classes: tuple[type, ...]) -> frozenset[str]:
    """Every name and string in a function's code, and in the code of what has such a name: in its globals, its
    closure and these classes."""
    seen: set[types.CodeType] = set()
    names: set[str] = set()
    scopes: list[Mapping[str, Any]] = [function.__globals__]
    scopes += [vars(c) for cls in classes for c in cls.__mro__ if not c.__module__.startswith("torch.")]
    pending = [function.__code__, *(c for cell in function.__closure__ or () for c in _codes(cell.cell_contents))]
    while pending:
        code = pending.pop()
        if code in seen:
            continue
        seen.add(code)
        new = {*code.co_names, *(c for c in code.co_consts if type(c) is str)} - names
        names |= new
        pending += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        pending += [c for scope in scopes for n in new if n in scope for c in _codes(scope[n])]
    return frozenset(names)


def _codes(value: Any) -> Iterator[types.CodeType]:
    for f in (value, *(getattr(value, n, None) for n in ("fget", "__func__", "__wrapped__"))):
        if isinstance(f, types.FunctionType) and not is_torch(f):
            yield f.__code__


def _sure(value: Any) -> Any:
    """A value to compare by; its identity where its contents may be anything."""
    flat = value.items() if type(value) is dict else value if type(value) in (tuple, list, set, frozenset) else None
    if type(value) in _ATOMS:
        return type(value), repr(value)  # 0.0 is not -0.0
    if flat is not None and all(type(v) in _ATOMS for e in flat for v in (e if type(value) is dict else (e,))):
        return repr(value)
    return id(value)


def is_torch(function: types.FunctionType) -> bool:
    module = function.__module__ or ""
    return module == "torch" or module.startswith("torch.")
