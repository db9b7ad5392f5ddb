"""Puts rewritten forwards into a model by swapping classes, and takes them out again.

The patched class is a subclass of the module's own, with the same name; nothing of the module itself changes but its
`__class__` and one private entry of its `__dict__` (the site's name and fallback counts). Copies and pickles carry the
original class and are patched again where they arrive, so that a file loads where this library's version differs.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import types
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..ops import _route
from . import guards, trace
from .codegen import compile_source, generate
from .decorators import Forward
from .guards import MARK, STATE, Site, is_patched
from .records import Found
from .rewrite import Rewritten
from .shadow import Path, Untraceable


@dataclass(frozen=True)
class ClassInfo:
    """What a patched class is made of; `rewritten` and `key` are without a plan's routes, which may be others later."""

    original: type
    source: str
    found: tuple[Found, ...]
    rules: tuple[str, ...]
    counts: Any
    token: str
    touched: frozenset[Path]
    opened: frozenset[Path]
    forward: Forward
    rewritten: Callable[..., Any]
    key: tuple[Any, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> ClassInfo:
        return self


_classes: weakref.WeakValueDictionary[tuple[Any, ...], type] = weakref.WeakValueDictionary()
_by_token: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
_process = f"{os.getpid()}-{uuid.uuid4().hex}"
_numbers = itertools.count()


def patched_class(
    original: type, rewritten: Rewritten, rules: Iterable[str], routes: Mapping[str, str] | None = None
) -> type:
    """The subclass of `original` with the rewritten forward; one class for all modules that come out the same.

    `routes` by op are those of a saved plan, which its calls then take.

    Raises:
        Untraceable: the class does not let itself be subclassed.
    """
    forward = trace.forward_of(original)
    generated = generate(rewritten.signature, rewritten.variants)
    key = (original, original.forward, generated.key, tuple(rewritten.found))
    cls = _classes.get((*key, _sorted(routes)))
    if cls is not None:
        return cls
    number = next(_numbers)
    extra = {
        "_forward": forward.function,
        "_original": original,
        "_class_forward": original.forward,
        "_note": guards.note,
    }
    scope = compile_source(generated, f"<fusedlayers {original.__qualname__} {number}>", extra)
    info = ClassInfo(
        original,
        generated.source,
        tuple(rewritten.found),
        tuple(rules),
        rewritten.counts,
        f"{_process}-{number}",
        frozenset(rewritten.touched),
        frozenset(rewritten.opened),
        forward,
        scope["forward"],
        key,
    )
    return _on(info, routes)


def _sorted(routes: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((routes or {}).items()))


def _on(info: ClassInfo, routes: Mapping[str, str] | None) -> type:
    """The class that `info` describes, with its calls on these routes."""
    key = (*info.key, _sorted(routes))
    cls = _classes.get(key)
    if cls is None:
        original, function = info.original, info.forward.function
        made = _on_routes(info.rewritten, dict(routes)) if routes else info.rewritten
        for name in ("__module__", "__qualname__", "__doc__", "__annotations__"):
            setattr(made, name, getattr(function, name))
        if not routes:
            made.__kwdefaults__ = function.__kwdefaults__
        namespace = {
            "forward": info.forward.decorate(made),
            "__reduce_ex__": _reduce_ex,
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            MARK: info,
        }
        try:
            cls = type(original)(original.__name__, (original,), namespace)
        except Exception as error:
            raise Untraceable(f"{original.__qualname__} cannot be subclassed ({error})") from error
        _classes[key] = _by_token[info.token] = cls
    return cls


def _on_routes(forward: Callable[..., Any], routes: dict[str, str]) -> Callable[..., Any]:
    """`forward` with its ops on these routes, in this thread and for this call."""

    def on_routes(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _route.is_compiling():  # which sees plain PyTorch in any case
            return forward(self, *args, **kwargs)
        before, _route.held.routes = _route.held.routes, routes
        try:
            return forward(self, *args, **kwargs)
        finally:
            _route.held.routes = before

    on_routes.__wrapped__ = forward  # its signature, for whoever inspects it
    return on_routes


def swap(module: nn.Module, cls: type, site: Site) -> None:
    module.__class__ = cls
    module.__dict__[STATE] = site


def restore(module: nn.Module) -> None:
    """Undoes `swap` where the module's class is ours and not something a later library put on top."""
    if not is_patched(module):
        return
    _become(module, vars(type(module))[MARK].original)
    module.__dict__.pop(STATE, None)


def reroute(module: nn.Module, routes: Mapping[str, str]) -> None:
    """Gives the calls of a patched module the routes of a plan, in place of those it had."""
    info: ClassInfo = vars(type(module))[MARK]
    cls = _on(dataclasses.replace(info, token=f"{_process}-{next(_numbers)}"), routes)
    if cls is not type(module):
        _become(module, cls)
    site = module.__dict__.get(STATE)
    if site is not None:
        site.routes = dict(routes)


def _become(module: nn.Module, cls: type) -> None:
    fused = vars(type(module))["forward"]
    module.__class__ = cls
    for name, held in module.__dict__.items():  # where a later library keeps the forward that it wraps
        if isinstance(held, types.MethodType) and held.__func__ is fused:
            module.__dict__[name] = types.MethodType(cls.forward, held.__self__)


# copying and pickling


def _reduce_ex(self: nn.Module, protocol: int) -> Any:
    cls = next(c for c in type(self).__mro__ if MARK in vars(c))
    info: ClassInfo = vars(cls)[MARK]
    reduced = super(cls, self).__reduce_ex__(protocol)
    if type(self) is not cls or isinstance(reduced, str):
        return reduced
    make, args, state, *rest = (*reduced, None, None, None)[: max(3, len(reduced))]
    make, *args = (info.original if a is cls else a for a in (make, *args))
    site = self.__dict__.get(STATE)
    if isinstance(state, dict):
        state = {k: v for k, v in state.items() if k != STATE}
    carried = (state, site, info.rules, tuple(f for f in info.found if f.status != "skipped"), info.token)
    return (_revive, (make, tuple(args)), carried, *rest)


def _revive(make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    """An empty module that patches itself when its state arrives."""
    module = make(*args)
    original = type(module)
    module.__class__ = type(original)(original.__name__, (_Reviving, original), {"__module__": original.__module__})
    return module


class _Reviving:
    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keeps class hooks of the module's bases from seeing this passing stage."""

    def __setstate__(self, carried: tuple[Any, ...]) -> None:
        state, site, rules, found, token = carried
        original = type(self).__bases__[1]
        self.__class__ = original
        if state is not None:
            if hasattr(self, "__setstate__"):
                self.__setstate__(state)
            else:
                self.__dict__.update(state)
        if site is None:
            return
        known = _by_token.get(token)
        if known is not None:
            swap(self, known, site)
        elif not repatch(self, site, rules, found):
            warnings.warn(f"{site.name or 'the model'} ({original.__name__}) was loaded unpatched", stacklevel=3)


def repatch(
    module: nn.Module,
    site: Site,
    rule_names: Iterable[str],
    found: Iterable[Found],
    others: str = "was not fused where the model was saved",
) -> bool:
    """Fuses just these sites of one module again; False when its rules or its class no longer allow that.

    `others` is the reason that the report gives for its other sites.
    """
    from . import analysis, rule

    known = rule.rules()
    chosen = [known[name] for name in rule_names if name in known]
    wanted = {(f.rule, f.members) for f in found}
    try:
        rewritten = analysis.one(module, chosen, lambda members, name: None if (name, members) in wanted else others)
        if rewritten is None or not rewritten.fused:
            return False
        swap(module, patched_class(type(module), rewritten, rule_names, site.routes), site)
    except Untraceable:
        return False
    finally:
        trace.forget()
    return True
