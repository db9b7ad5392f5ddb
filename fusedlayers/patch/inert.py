"""Says, once a process, which rules a library's upgrade has made inert: the class they are about is gone."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .pattern import Kind, required_kinds

if TYPE_CHECKING:
    from .rule import Rule

_said: set[str] = set()


def say(rules: Iterable[Rule]) -> None:
    """Warns of each rule that needs a class which a library that is loaded no longer has."""
    for rule in rules:
        if rule.name in _said:
            continue
        for kinds in (rule.targets,) if rule.pattern is None else required_kinds(rule.pattern):
            gone = _gone(kinds)
            if gone is not None:
                _said.add(rule.name)
                library = gone.partition(".")[0]
                message = f"rule {rule.name!r} is inert: this version of {library} has no {gone}"
                warnings.warn(message, stacklevel=4)


def _gone(kinds: Iterable[Kind]) -> str | None:
    """The first of these classes, if all are of libraries, none is there and one is known to be gone."""
    missing = None
    for kind in kinds:
        if not isinstance(kind, str):
            return None
        folder, _, name = kind.rpartition(".")
        module = sys.modules.get(folder)
        if module is not None and hasattr(module, name):
            return None
        if module is None and not _removed(folder):
            return None  # not loaded, so no model of it is here
        missing = missing or kind
    return missing


def _removed(folder: str) -> bool:
    """Whether a module is known not to exist: its package is loaded and has none of that name."""
    parent = folder.rpartition(".")[0]
    if parent not in sys.modules:
        return False
    try:
        return importlib.util.find_spec(folder) is None
    except (ImportError, AttributeError, ValueError):
        return True
