"""`include` and `exclude`: which sites of a model may be fused."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from torch import nn

Filter = str | Iterable[str] | Callable[[str, nn.Module], bool] | None


class Filters:
    """Dotted names that are in and out. A match covers its subtree.

    Raises:
        ValueError: a pattern that matches no module, naming the nearest.
        TypeError: something that is neither a glob, several of them, nor a callable.
    """

    def __init__(self, model: nn.Module, include: Filter = None, exclude: Filter = None):
        modules = dict(model.named_modules(remove_duplicate=False))
        self._included = None if include is None else _matched("include", include, modules)
        self._excluded = _matched("exclude", exclude, modules) if exclude is not None else set()

    def reason(self, name: str, members: Iterable[str]) -> str | None:
        """Why a site is left out: its own name is not included, or a member is excluded; None when it is in."""
        if self._included is not None and not _covered(name, self._included):
            return "not included"
        excluded = next((m for m in (name, *members) if _covered(m, self._excluded)), None)
        return None if excluded is None else f"{excluded or 'the model'} is excluded"


def _covered(name: str, matched: set[str]) -> bool:
    parts = name.split(".") if name else []
    return "" in matched or any(".".join(parts[: n + 1]) in matched for n in range(len(parts)))


def _matched(option: str, wanted: Filter, modules: dict[str, nn.Module]) -> set[str]:
    if callable(wanted):
        return {name for name, module in modules.items() if wanted(name, module)}
    globs = wanted if isinstance(wanted, Iterable) and not isinstance(wanted, str) else [wanted]
    found: set[str] = set()
    for glob in globs:
        if not isinstance(glob, str):
            raise TypeError(f"{option} takes globs over module names or a callable(name, module), not {glob!r}")
        hits = {name for name in modules if fnmatchcase(name, glob)}
        if not hits:
            near = difflib.get_close_matches(glob, [n for n in modules if n], n=1, cutoff=0.3)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"{option}={glob!r} matches no module of this model{hint}")
        found |= hits
    return found
