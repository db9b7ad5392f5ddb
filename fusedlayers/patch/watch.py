"""Sees every Python function that runs while a forward is traced, however the forward came by it.

A forward's own code and the helpers it names are read before they run (`scan`). What it reaches in another way (a
function of another module, in a closure, a table or an attribute, a property, a method of some object) is read here, as
its frame is entered: a question that only Python answers, a mode it sets or a counter it moves would be lost from the
graph. So would a change of a global setting that code has read: these are noted, to be guarded on each call.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import enum
import gc
import random
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from .scan import AMBIENT, scan_code, varkw_of
from .shadow import Untraceable, copied, plain

SPLAT = "**"
"""Name under which a forward's `**kwargs`, passed on unread, travels in node arguments."""
CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter)
_LIBRARIES = {"torch", "numpy", "fusedlayers", *sys.stdlib_module_names}
_MODES = {"torch.autograd.grad_mode", "torch.amp.autocast_mode", "torch.utils._contextlib", "torch.random"}
_CLOCKS = {f for f in vars(time).values() if isinstance(f, types.BuiltinFunctionType)}
_WRITES = {"append", "appendleft", "extend", "insert", "remove", "add", "discard", "update", "setdefault", "popitem"}
_WRITES |= {"pop", "popleft", "clear", "sort", "reverse", "rotate"}
_OPAQUE = (type, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Global:
    """A plain value that code found under `chain`, such as `("config", "flag")`, in `owner`."""

    owner: Any
    chain: tuple[str, ...]
    value: Any

    def __repr__(self) -> str:
        return f"{'.'.join(self.chain)}={self.value!r}"


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Garbage waits to be collected: what that calls, at any allocation, is no part of a forward that is traced."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Watch:
    """While entered, calls `none_asked` for each symbolic value that code compares with None, and `read` for each
    global setting that code may read; raises `Untraceable` where a trace of that code could not be trusted."""

    def __init__(
        self, none_asked: Callable[[Any], None], read: Callable[[str, Global], None], forward: types.CodeType
    ) -> None:
        self.none_asked, self.read, self.forward = none_asked, read, forward
        self.known: set[types.CodeType] = set()
        """Code that was read before it ran."""
        self.stopped: Exception | None = None
        # library code that there is nothing to ask about, by id: a code object's hash takes longer than the answer
        self._skipped: dict[int, types.CodeType] = {}

    def __enter__(self) -> Watch:
        self._uncollected = uncollected()
        self._uncollected.__enter__()
        self._before = sys.getprofile()
        skipped, look = self._skipped, self._profile

        def profile(frame: types.FrameType, event: str, called: Any) -> None:  # a million times a model: nothing else
            if id(frame.f_code) not in skipped:
                look(frame, event, called)

        sys.setprofile(profile)
        return self

    def __exit__(self, *error: Any) -> None:
        if hasattr(self._before, "enable"):  # cProfile's, which is no function
            self._before.enable()
        else:
            sys.setprofile(self._before)
        self._uncollected.__exit__(None, None, None)
        if self.stopped is not None and error[1] is not self.stopped:  # something caught it
            raise self.stopped

    def admit(self, function: types.FunctionType) -> None:
        """Notes a function whose code was read, and will be answered, before it runs."""
        self.known.update(_nested(function.__code__))
        self._globals(function.__code__, function.__globals__)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for root, *names in scan_code(function.__code__).local_chains:
            if root in cells and root != "__class__":
                self._setting(f"{function.__qualname__}.{root}", cells[root], ("cell_contents", *names))

    def _profile(self, frame: types.FrameType, event: str, called: Any) -> None:
        try:
            if event == "call":
                self._entered(frame)
            elif event == "c_call":
                self._called(frame, called)
        except Exception as error:
            self.stopped = error
            raise

    def _entered(self, frame: types.FrameType) -> None:
        code = frame.f_code
        module = frame.f_globals.get("__name__") or ""
        varkw = varkw_of(code)
        if varkw and code is not self.forward and SPLAT in frame.f_locals.get(varkw, ()) and _is_users(frame):
            raise Untraceable(f"forward passes **kwargs to {code.co_name}")  # which may know some of them by name
        if code in self.known:
            self._locals(frame)
            return
        if module.partition(".")[0] in _LIBRARIES:
            if module in _MODES:
                raise Untraceable("forward runs code that sets a mode of autograd, autocast or a generator")
            if module == "logging":
                raise Untraceable("forward logs")
            if module == "os" and (_is_users(frame.f_back) or _is_users(frame.f_back.f_back)):
                raise Untraceable("forward asks the environment")
            if code.co_name in AMBIENT and _is_users(frame.f_back):
                raise Untraceable(f"forward asks {code.co_name}()")
            if module != "os" and code.co_name not in AMBIENT:
                self._skipped[id(code)] = code
            return
        if code.co_name in ("__getattr__", "__getattribute__"):
            return
        asked = scan_code(code)
        building = code.co_name in ("__init__", "__post_init__") and (asked.refused or "").startswith("forward sets .")
        if asked.refused and not building:
            raise Untraceable(f"{asked.refused}, in {code.co_name}")
        values = list(frame.f_locals.values()) if asked.builtins else ()
        if any(isinstance(v, torch.fx.Proxy) for v in values):
            raise Untraceable(f"forward hands a value to {code.co_name}, which asks {min(asked.builtins)}()")
        for name in asked.none_tested:
            self.none_asked(frame.f_locals.get(name))
        self.known.update(_nested(code))
        self._locals(frame)
        self._globals(code, frame.f_globals)

    def _locals(self, frame: types.FrameType) -> None:
        """Settings that code reads of objects and classes it was given, such as `cls.flag`."""
        given = frame.f_locals
        for root, *names in scan_code(frame.f_code).local_chains:
            if not names or root in frame.f_code.co_freevars or isinstance(given.get(root), torch.fx.Proxy):
                continue
            owner = given.get(root)
            if names[0] == "__class__" and isinstance(owner, torch.nn.Module):
                owner, names = owner.__class__, names[1:]
            if isinstance(owner, (types.ModuleType, torch.nn.Module, torch.Tensor)) or not names:
                continue
            self._setting(getattr(type(owner), "__qualname__", root), owner, tuple(names))

    def _called(self, frame: types.FrameType, called: Any) -> None:
        if not _is_users(frame):
            return
        name = getattr(called, "__name__", "")
        if name in AMBIENT:
            raise Untraceable(f"forward asks {name}()")
        if called in (globals, locals, eval, exec) or isinstance(
            getattr(called, "__self__", None), contextvars.ContextVar
        ):
            raise Untraceable(f"forward calls {name}()")
        if called is warnings.warn:
            raise Untraceable("forward warns")
        if called in _CLOCKS:
            raise Untraceable("forward reads the clock")
        if isinstance(getattr(called, "__self__", None), random.Random) and called.__self__ is not random._inst:
            raise Untraceable("forward draws random numbers in Python")

    def _globals(self, code: types.CodeType, held: dict[str, Any]) -> None:
        where = held.get("__name__") or ""
        module = sys.modules.get(where)
        owner = module if module is not None and vars(module) is held else held
        asked = scan_code(code)
        if foreign := {name for name in asked.imports if name.partition(".")[0] not in _LIBRARIES}:
            raise Untraceable(f"forward imports {min(foreign)}")
        for chain in asked.chains:
            if chain[:2] == ("sys", "modules"):
                raise Untraceable("forward reads sys.modules")
            self._setting(where, owner, chain)

    def _setting(self, where: str, owner: Any, chain: tuple[str, ...]) -> None:
        """Notes what `chain` names in a module, class, object, cell or dict, if that is a plain value."""
        value, named = reached(owner, chain), ".".join(chain)
        if chain[-1] in _WRITES and type(reached(owner, chain[:-1])) in CONTAINERS:
            raise Untraceable(f"forward writes into {named.rpartition('.')[0]}")
        if isinstance(value, (Iterator, random.Random)) and not isinstance(value, types.ModuleType):
            raise Untraceable(f"forward reads {named}, which moves on when it is read")
        if plain(value) and not isinstance(value, _OPAQUE) and not chain[-1].startswith("__"):
            if not isinstance(owner, (dict, type, types.ModuleType, types.CellType)):
                owner = vars(owner) if chain[0] in vars(owner) else owner
            self.read(f"{where}.{named}", Global(owner, chain, copied(value)))


_NOTHING = object()


def reached(value: Any, chain: tuple[str, ...]) -> Any:
    """What `chain` names, found without running any code; an object that `plain` refuses when it is not a setting."""
    for name in chain:
        if isinstance(value, dict) and name is chain[0]:
            value = value.get(name, _NOTHING)
        elif isinstance(value, types.CellType):
            value = _content(value)
        elif isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] in _LIBRARIES:
                return _NOTHING
            value = vars(value).get(name, _NOTHING)
        elif isinstance(value, type):
            if issubclass(value, enum.Enum) or value.__module__.partition(".")[0] in _LIBRARIES:
                return _NOTHING
            value = next((vars(c)[name] for c in value.__mro__ if name in vars(c)), _NOTHING)
        elif isinstance(value, torch.nn.Module) or not hasattr(value, "__dict__"):
            return _NOTHING
        else:
            own = vars(value)
            value = own[name] if name in own else reached(type(value), (name,))
    return value


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _NOTHING


def _is_users(frame: types.FrameType | None) -> bool:
    return frame is not None and (frame.f_globals.get("__name__") or "").partition(".")[0] not in _LIBRARIES


@lru_cache(maxsize=4096)
def _nested(code: types.CodeType) -> frozenset[types.CodeType]:
    """A code object and all that are written inside it."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return frozenset({code}).union(*map(_nested, inner))
