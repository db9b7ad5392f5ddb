"""Which activation a name, a module, a function call or a method call stands for; `None` rather than a guess."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from . import libraries
from .registry import SPECS, Activation, Spec, names, on_change

_DEFAULTS: dict[str, Any] = {"approximate": "none", "training": False}
_BY_NAME: dict[str, Activation] = {}
_BY_TYPE: dict[Any, tuple[Spec, ...]] = {}
_BY_FUNCTION: dict[Any, tuple[Spec, ...]] = {}
_BY_METHOD: dict[str, tuple[Spec, ...]] = {}
_CONFIRMED: dict[tuple[type, Activation], bool] = {}

_LEARNED = "has learned parameters, which an elementwise kernel with fixed settings cannot hold"
_NOT_ELEMENTWISE = "is not elementwise: one output depends on several inputs"
REFUSED: dict[str, str] = {
    "PReLU": _LEARNED,
    "XIELUActivation": _LEARNED,
    **dict.fromkeys(("GLU", "Softmax", "Softmax2d", "LogSoftmax", "Softmin", "MultiheadAttention"), _NOT_ELEMENTWISE),
}
"""Activations that are refused on purpose, by class name, and why."""


def get(activation: str | Activation | nn.Module | None) -> Activation:
    """The `Activation` for a name, an `Activation`, or a torch activation module; `None` is the identity.

    Raises:
        ValueError: no activation of that name, or a module whose settings cannot be represented.
        TypeError: something else.
    """
    if type(activation) is str:
        found = _BY_NAME.get(activation)
        if found is None:
            found = _BY_NAME[activation] = _named(activation)
        return found
    if isinstance(activation, Activation):
        return activation
    if activation is None:
        return get("identity")
    if isinstance(activation, nn.Module):
        found = _of_module(activation)
        if found is None:
            raise ValueError(f"{activation!r} {refusal(activation)}")
        return found
    raise TypeError(
        f"activation must be a name, an Activation or a torch activation module, not {type(activation).__name__}"
    )


def recognise(what: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> Activation | None:
    """The activation that a module, or a call `what(z, *args, **kwargs)`, computes; `None` when it is not one.

    `what` is a module (exact type only), a function such as `F.gelu`, a `functools.partial` of one, or the name of a
    tensor method. Settings that cannot be represented (a tensor, an unknown mode, randomness in training) give
    `None`, never a guess; so does a module whose meaning follows its `training` flag, which may change (`get` takes it
    as it is now). A class of another library is believed only once it has been seen, on a small float64
    probe, to compute what its entry says.
    """
    if isinstance(what, nn.Module):
        found = None if args or kwargs else _of_module(what)  # no activation is called with more than z
        return None if found is None or "training" in found.spec.requires else found
    if isinstance(what, functools.partial):
        return recognise(what.func, (*what.args, *args), {**what.keywords, **(kwargs or {})})
    specs = _BY_METHOD.get(what, ()) if isinstance(what, str) else _by_function(what)
    if not specs:
        return None
    order = specs[0].call_order
    given = dict(zip(order, args, strict=False))
    if len(args) > len(order) or given.keys() & (kwargs or {}).keys():
        return None
    given.update(kwargs or {})
    if given.keys() - {*order, *specs[0].params, *specs[0].requires, "inplace"}:
        return None
    return _match(specs, lambda name, default: given.get(name, default))


def is_inplace(what: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether the module, function call or method call recognised above overwrites its input."""
    if isinstance(what, nn.Module):
        return bool(getattr(what, "inplace", False))
    if isinstance(what, functools.partial):
        return is_inplace(what.func, (*what.args, *args), {**what.keywords, **(kwargs or {})})
    name = what if isinstance(what, str) else getattr(what, "__name__", "")
    if name.endswith("_"):
        return True
    if kwargs and "inplace" in kwargs:
        return bool(kwargs["inplace"])
    specs = _BY_METHOD.get(what, ()) if isinstance(what, str) else _by_function(what)
    given = dict(zip(specs[0].call_order, args, strict=False)) if specs else {}
    return bool(given.get("inplace", False))


def refusal(activation: nn.Module) -> str:
    """Why `recognise` does not take this module, as the second half of a sentence about it."""
    cls = type(activation)
    for base in cls.__mro__:
        if base.__name__ in REFUSED:
            return REFUSED[base.__name__]
    if cls is nn.RReLU and activation.training:
        return "draws random slopes in training; call .eval() on it first"
    return f"is not an activation this library can represent (known: {', '.join(names())})"


def _named(name: str) -> Activation:
    if name not in SPECS:
        for refused, reason in REFUSED.items():
            if name.lower().replace("_", "") == refused.lower().removesuffix("activation"):
                raise ValueError(f"activation {name!r} {reason}")
    return Activation(name)


def _attribute(module: nn.Module, name: str, default: Any) -> Any:
    return getattr(module, name, default)


def _match(specs: tuple[Spec, ...], setting: Callable[[str, Any], Any]) -> Activation | None:
    for spec in specs:
        if any(setting(name, _DEFAULTS.get(name)) != wanted for name, wanted in spec.requires.items()):
            continue
        values = [setting(name, default) for name, default in spec.params.items()]
        if all(type(v) in (int, float) for v in values) and spec.takes(tuple(map(float, values))):
            return Activation(spec.name, tuple(map(float, values)))
    return None


def _by_function(function: Any) -> tuple[Spec, ...]:
    try:
        return _BY_FUNCTION.get(function, ())
    except TypeError:  # an unhashable callable is nobody's activation
        return ()


def _of_module(module: nn.Module) -> Activation | None:
    if "forward" in module.__dict__:  # not its class's
        return None
    cls = type(module)
    specs = _BY_TYPE.get(cls)
    if specs is not None:
        return _match(specs, functools.partial(_attribute, module))
    return _of_library(module, f"{cls.__module__}.{cls.__qualname__}")


def _of_library(module: nn.Module, path: str) -> Activation | None:
    specs = _BY_TYPE.get(path)
    if specs is not None:
        found = _match(specs, functools.partial(_attribute, module))
    else:
        found = libraries.activation_of(module, path)
    if found is None or not _is_confirmed(module, found):
        return None
    return found


def _is_confirmed(module: nn.Module, found: Activation) -> bool:
    key = (type(module), found)
    known = _CONFIRMED.get(key)
    if known is None:
        if torch.compiler.is_compiling():  # nothing to look at while tracing
            return True
        known = _CONFIRMED[key] = libraries.computes(module, found)
    return known


def _forget() -> None:
    _BY_NAME.clear()
    for table, keys in ((_BY_TYPE, "module_types"), (_BY_FUNCTION, "functions"), (_BY_METHOD, "methods")):
        table.clear()
        for spec in SPECS.values():
            for key in getattr(spec, keys):
                table[key] = (*table.get(key, ()), spec)


on_change(_forget)
_forget()
