"""A saved plan: which sites of a model are fused and by which route each runs, to be repeated exactly."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..settings import ROUTES

VERSION = 1
HELD = tuple(route for route in ROUTES if route != "auto")
"""The routes that a plan may hold an op to."""


@dataclass
class PatchPlan:
    """Sites by dotted name with the rules that fuse each, and by patched module the route of each op it calls."""

    sites: dict[str, list[str]] = field(default_factory=dict)
    routes: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def load(cls, source: PatchPlan | Mapping[str, Any] | str | os.PathLike[str]) -> PatchPlan:
        """From a plan, its dict, or a path to its JSON.

        Raises:
            ValueError: not a plan, or one of a version this library does not know.
        """
        data = source.to_dict() if isinstance(source, PatchPlan) else source
        if not isinstance(data, Mapping):
            data = json.loads(Path(data).read_text(encoding="utf-8"))
        if not isinstance(data, Mapping) or not isinstance(data.get("sites"), Mapping):
            raise ValueError("a plan has 'sites': names of sites, each with the rules that fuse it")
        if data.get("version") != VERSION:
            raise ValueError(f"this plan has version {data.get('version')!r}; this library reads version {VERSION}")
        sites = {str(name): _rules(name, rules) for name, rules in data["sites"].items()}
        routes = data.get("routes", {})
        if not isinstance(routes, Mapping):
            raise ValueError(f"a plan's 'routes' are those of each patched module by its name, not {routes!r}")
        return cls(sites, {str(name): _routes(name, by_op) for name, by_op in routes.items()})

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, "sites": self.sites, "routes": self.routes}

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def reason(self, name: str, rule: str) -> str | None:
        return None if rule in self.sites.get(name, ()) else "not in the plan"

    def missing(self, fused: Mapping[str, set[str]]) -> list[str]:
        """Sites of this plan that the model did not give."""
        return [f"{n} ({r})" for n, rules in self.sites.items() for r in rules if r not in fused.get(n, set())]


def _rules(site: str, rules: Any) -> list[str]:
    if not isinstance(rules, (list, tuple)) or not all(isinstance(r, str) for r in rules):
        raise ValueError(f"a plan's sites[{site!r}] is a list of the names of rules, not {rules!r}")
    return list(rules)


def _routes(module: str, routes: Any) -> dict[str, str]:
    if not isinstance(routes, Mapping):
        raise ValueError(f"a plan's routes[{module!r}] are the routes of its ops by their names, not {routes!r}")
    for op, route in routes.items():
        if route not in HELD:
            raise ValueError(
                f"a plan's routes[{module!r}][{op!r}] must be one of {', '.join(map(repr, HELD))}, not {route!r}"
            )
    return dict(routes)
