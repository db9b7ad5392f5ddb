"""Stand-ins for a module and its children, on which its own forward can run without touching the real ones.

A shadow has the module's class as a base and a copy of its `__dict__`, so that methods, properties, `super()` and
`isinstance` behave. Calling it records a call of that child. What is read from it is either a value that can be
guarded later (and is recorded), a parameter (a graph value), another shadow, or a reason to give up. Nothing global
is replaced, so other threads and other models notice nothing.
"""

from __future__ import annotations

import enum
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

Path = tuple[str, ...]
STATE = "__shadow_state__"

_INTERNAL = {k for k in (*vars(nn.Module()), *vars(nn.Module)) if not callable(vars(nn.Module).get(k))} - {"training"}
ATOMS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device)
ATOMS += (torch.layout, torch.memory_format, torch.Size, enum.Enum, type, range)
CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type(torch.ops.aten.add))


class Untraceable(Exception):
    """This forward cannot be rewritten without risk; the message says why."""


class Session(Protocol):
    """What the shadows of one trace report to."""

    training: bool
    lent: list[tuple[str, Any, Any]]
    """Copies of lists and dicts given to the forward, each with its original, to see afterwards whether it wrote."""

    def read(self, path: Path, name: str, kind: str, value: Any) -> None: ...
    def call(self, shadow: Any, path: Path, args: tuple, kwargs: dict[str, Any]) -> Any: ...
    def tensor(self, path: Path, name: str, value: torch.Tensor) -> Any: ...
    def method(self, function: types.FunctionType) -> Callable[..., Any]: ...


def plain(value: Any) -> bool:
    """Whether a value can be compared later to see that it has not changed."""
    if isinstance(value, ATOMS):  # a number or string of a class of its own may carry more than compares
        return isinstance(value, (enum.Enum, type)) or not getattr(value, "__dict__", None)
    if type(value) in (tuple, list, set, frozenset):
        return all(plain(v) for v in value)
    if type(value) is dict:
        return all(plain(k) and plain(v) for k, v in value.items())
    return False


def copied(value: Any) -> Any:
    if type(value) in (list, set):
        return type(value)(copied(v) for v in value)
    if type(value) in (tuple, frozenset):
        return value if all(isinstance(v, ATOMS) for v in value) else type(value)(copied(v) for v in value)
    return {k: copied(v) for k, v in value.items()} if type(value) is dict else value


class _Shadow:
    """Placed before the module's own class in the shadow's bases."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keeps the class hooks of the module's bases from seeing shadows."""

    def __getattribute__(self, name: str) -> Any:
        get = object.__getattribute__
        own = get(self, "__dict__")
        session, path = own[STATE]
        if name == "__class__":
            return type(self).__bases__[1]
        if name == "__dict__" and _asked_by_user():
            raise Untraceable("forward looks into __dict__")
        if name in own:
            value = own[name]
            return value if name in _INTERNAL or name == "__dict__" else _plain_read(session, path, name, value)
        value = super().__getattribute__(name)
        if isinstance(value, types.FunctionType):  # a static method
            return session.method(value)
        if isinstance(value, types.MethodType) and value.__self__ is self and not hasattr(nn.Module, name):
            session.read(path, name, "method", value.__func__)
            return types.MethodType(session.method(value.__func__), self)
        if name == "forward" and isinstance(value, types.MethodType):
            if path:
                session.read(path, name, "method", value.__func__)
            return types.MethodType(session.method(value.__func__), self)
        if not name.startswith("__") and name not in _INTERNAL and _is_class_value(type(self), name):
            return _plain_read(session, path, name, value)
        return value

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            session, path = object.__getattribute__(self, "__dict__")[STATE]
            session.read(path, name, "absent", None)
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        raise Untraceable(f"forward sets self.{name}")

    def __delattr__(self, name: str) -> None:
        raise Untraceable(f"forward deletes self.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session, path = object.__getattribute__(self, "__dict__")[STATE]
        if not path:
            raise Untraceable("forward calls itself")
        return session.call(self, path, args, kwargs)


def _asked_by_user() -> bool:
    """Whether neither torch nor a `__getattr__` is what called the caller."""
    frame = sys._getframe(2)
    library = (frame.f_globals.get("__name__") or "").partition(".")[0] in ("torch", "fusedlayers")
    return not library and frame.f_code.co_name not in ("__getattr__", "__getattribute__")


def _is_class_value(cls: type, name: str) -> bool:
    for base in cls.__mro__:
        if name in vars(base):
            found = vars(base)[name]
            return not callable(found) and not hasattr(found, "__get__")
    return False


def _plain_read(session: Session, path: Path, name: str, value: Any) -> Any:
    if name == "training":
        if path:  # a child's own flag, which may differ from that of the module
            session.read(path, name, "value", value)
        return value
    if plain(value):
        given = copied(value)
        session.read(path, name, "value", copied(value))
        if given is not value:
            session.lent.append((".".join((*path, name)), given, value))
        return given
    if isinstance(value, CODE):
        session.read(path, name, "value", value)
        return value
    where = ".".join((*path, name))
    if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
        raise Untraceable(f"forward calls self.{where}, bound to a module")
    if isinstance(value, torch.Tensor):
        raise Untraceable(f"forward reads self.{where}, a tensor that is neither a parameter nor a buffer")
    raise Untraceable(f"forward reads self.{where} ({type(value).__name__}), whose later changes could not be seen")


class _Held(dict):
    """A module's `_modules`, `_parameters` or `_buffers`; which names it has is a read of its own."""

    __slots__ = ("field", "path", "session")

    def __init__(self, held: dict[str, Any], session: Session, path: Path, field: str):
        super().__init__(held)
        self.session, self.path, self.field = session, path, field

    def get(self, name: str, default: Any = None) -> Any:
        if super().__contains__(name):
            return self[name]
        self._listed()
        return default

    def __contains__(self, name: object) -> bool:
        if _asked_by_user():  # torch looks for each attribute
            self._listed()
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        self._listed()
        return super().__iter__()

    def __len__(self) -> int:
        self._listed()
        return super().__len__()

    def keys(self) -> Any:
        self._listed()
        return list(super().keys())

    def values(self) -> Any:
        return [self[name] for name in self.keys()]

    def items(self) -> Any:
        return [(name, self[name]) for name in self.keys()]

    def _listed(self) -> None:
        self.session.read(self.path, self.field, "keys", tuple(super().keys()))

    def _changed(self, *args: Any, **kwargs: Any) -> Any:
        raise Untraceable("forward changes what the module holds")

    __setitem__ = __delitem__ = pop = popitem = update = setdefault = clear = _changed


class _Children(_Held):
    """Giving out shadows."""

    __slots__ = ("made",)

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        module = super().__getitem__(name)
        if module is None:
            self.session.read(self.path, name, "none", None)
            return None
        if name not in self.made:
            self.made[name] = make(module, self.session, (*self.path, name))
        self.session.read(self.path, name, "child", None)
        return self.made[name]


class _Tensors(_Held):
    """Giving out graph values."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.session.read(self.path, name, "none" if value is None else "tensor", None)
        return None if value is None else self.session.tensor(self.path, name, value)


_classes: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()


def _shadow_class(cls: type) -> type:
    known = _classes.get(cls)
    made = known() if known is not None else None
    if made is None:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        made = type(cls)(cls.__name__, (_Shadow, cls), names)
        _classes[cls] = weakref.ref(made)
    return made


def make(module: nn.Module, session: Session, path: Path = (), cls: type | None = None) -> Any:
    """A shadow of `module`, which sits at `path` below the module being traced."""
    try:
        shadow = object.__new__(_shadow_class(cls or type(module)))
    except TypeError as error:
        raise Untraceable(f"{type(module).__name__} cannot be shadowed ({error})") from None
    own = dict(module.__dict__)
    for field, kind in (("_modules", _Children), ("_parameters", _Tensors), ("_buffers", _Tensors)):
        own[field] = kind(own[field], session, path, field)
    own["training"] = session.training
    own[STATE] = (session, path)
    object.__getattribute__(shadow, "__dict__").update(own)
    return shadow


def path_of(shadow: Any) -> Path:
    return object.__getattribute__(shadow, "__dict__")[STATE][1]


def is_shadow(value: Any) -> bool:
    return isinstance(value, _Shadow) if type(value).__mro__[1:2] == (_Shadow,) else False


def written(shadow: Any, module: nn.Module) -> str | None:
    """The first attribute of `module`, or of a child that was read, which code gave its shadow behind its back."""
    own = object.__getattribute__(shadow, "__dict__")
    given = {"_modules", "_parameters", "_buffers", "training", STATE}
    names = (own.keys() | module.__dict__.keys()) - given
    for name in sorted(n for n in names if own.get(n, own) is not module.__dict__.get(n, own)):
        return ".".join((*own[STATE][1], name))
    made = own["_modules"].made.items()
    return next((found for name, child in made if (found := written(child, module._modules[name]))), None)
