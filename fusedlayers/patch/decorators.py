"""A forward without its decorators, and its decorators around another function."""

from __future__ import annotations

import functools
import inspect
import types
from dataclasses import dataclass
from typing import Any

from .shadow import Untraceable

_OURS = {"self", "type", "isinstance", "getattr", "hasattr", "tuple", "slice", "Ellipsis"}
"""Names that the code generated in a forward's place uses, besides those that begin with an underscore."""
_VARIABLE = inspect.CO_VARARGS, inspect.CO_VARKEYWORDS


@dataclass(frozen=True)
class Forward:
    """A class's forward without its decorators, and the decorators to put around its replacement."""

    function: types.FunctionType
    decorators: tuple[types.FunctionType, ...] = ()

    def decorate(self, replacement: types.FunctionType) -> types.FunctionType:
        """The same decorators, each with the function it closes over replaced."""
        for decorator in self.decorators:
            cells = tuple(
                types.CellType(replacement) if _content(cell) is decorator.__wrapped__ else cell
                for cell in decorator.__closure__ or ()
            )
            copy = types.FunctionType(
                decorator.__code__, decorator.__globals__, decorator.__name__, decorator.__defaults__, cells
            )
            copy.__kwdefaults__ = decorator.__kwdefaults__
            replacement = functools.wraps(replacement)(copy)
        return replacement


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def forward_of(cls: type) -> Forward:
    """The function to trace, to replace and to fall back on.

    What a base's `__init_subclass__` wrapped is unwrapped for good: the class made for the patched module is a
    subclass too, so its forward is wrapped again (transformers' GradientCheckpointingLayer).
    """
    forward = cls.forward
    hook = getattr(cls.__init_subclass__, "__func__", None)
    if hasattr(forward, "__wrapped__") and hook is not None and forward.__code__ in hook.__code__.co_consts:
        forward = forward.__wrapped__
    decorators: list[types.FunctionType] = []
    while hasattr(forward, "__wrapped__"):
        closed = [_content(cell) for cell in getattr(forward, "__closure__", None) or ()]
        ours = isinstance(forward, types.FunctionType) and any(c is forward.__wrapped__ for c in closed)
        if not ours or forward.__globals__.get("__name__", "").startswith("torch._dynamo"):
            raise Untraceable("forward is wrapped by something that cannot be taken off and put back")
        decorators.insert(0, forward)
        forward = forward.__wrapped__
    if not isinstance(forward, types.FunctionType):
        raise Untraceable("forward is not a Python function")
    code = forward.__code__
    count = code.co_argcount + code.co_kwonlyargcount + sum(bool(code.co_flags & flag) for flag in _VARIABLE)
    for name in code.co_varnames[1:count]:
        if name in _OURS or name.startswith("_"):
            raise Untraceable(f"an argument is named {name}")
    return Forward(forward, tuple(decorators))
