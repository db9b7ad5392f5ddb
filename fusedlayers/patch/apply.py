"""Puts rewritten forwards into a model by swapping classes, and takes them out again.

The patched class is a subclass of the module's own, with the same name; nothing of the module itself changes but its
`__class__` and one private entry of its `__dict__` (the site's name and fallback counts). Copies and pickles carry the
original class and are patched again where they arrive, so that a file loads where this library's version differs.
"""

from __future__ import annotations

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
from .guards import MARK, STATE, Site, is_patched
from .records import Found
from .rewrite import Rewritten
from .shadow import Path, Untraceable


@dataclass(frozen=True)
class ClassInfo:
    """What a patched class is made of."""

    original: type
    source: str
    found: tuple[Found, ...]
    rules: tuple[str, ...]
    counts: Any
    token: str
    touched: frozenset[Path] = frozenset()
    opened: frozenset[Path] = frozenset()

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
    routes = dict(routes or {})
    key = (original, original.forward, generated.key, tuple(rewritten.found), tuple(sorted(routes.items())))
    cls = _classes.get(key)
    if cls is None:
        number = next(_numbers)
        extra = {
            "_forward": forward.function,
            "_original": original,
            "_class_forward": original.forward,
            "_note": guards.note,
        }
        scope = compile_source(generated, f"<fusedlayers {original.__qualname__} {number}>", extra)
        made = _on_routes(scope["forward"], routes) if routes else scope["forward"]
        for name in ("__module__", "__qualname__", "__doc__", "__annotations__"):
            setattr(made, name, getattr(forward.function, name))
        if not routes:
            made.__kwdefaults__ = forward.function.__kwdefaults__
        info = ClassInfo(
            original,
            generated.source,
            tuple(rewritten.found),
            tuple(rules),
            rewritten.counts,
            f"{_process}-{number}",
            frozenset(rewritten.touched),
            frozenset(rewritten.opened),
        )
        namespace = {
            "forward": forward.decorate(made),
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
    fused, original = vars(type(module))["forward"], vars(type(module))[MARK].original
    module.__class__ = original
    module.__dict__.pop(STATE, None)
    for name, held in module.__dict__.items():  # where a later library keeps the forward that it wraps
        if isinstance(held, types.MethodType) and held.__func__ is fused:
            module.__dict__[name] = types.MethodType(original.forward, held.__self__)


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
