"""`Rule`: what to look for, what to check, what to run instead. Built-in rules are registered like a user's own."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn
from torch.fx import Node

from . import effects
from .codegen import Child
from .pattern import Kind, Pattern, State

NO_MATCH = ""
"""What `Rule.check` returns for a match that the report need not mention."""


@dataclass(frozen=True)
class Call:
    """What a rule puts in place of what it matched: `op(*args, **kwargs)`."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Match:
    """What a rule matched: each named element is an attribute (see `pattern`)."""

    module: nn.Module
    """The container whose forward is being rewritten."""
    state: State
    training: bool
    inputs: dict[str, Node | Any] = field(default_factory=dict)
    """For a rule with `target`: the arguments of that forward."""
    extra: list[Child] = field(default_factory=list)
    passes: bool = False
    """Whether the fused op is to return the value named by the rule's `passes` as well."""
    noted: Any = None
    """What `check` notes down for `fuse`; each rule as it likes."""

    def __getattr__(self, name: str) -> Any:
        for known, value in self.__dict__["state"].bound:
            if known == name:
                return value
        raise AttributeError(f"this rule's pattern has no element {name!r}")

    def child(self, *path: str, pins: Iterable[str] = ()) -> Child:
        """A child the fused op may use, by name; guarded like any other member."""
        module = effects.child(self.module, ".".join(path)) if path else self.module
        if module is None:
            raise AttributeError(f"{type(self.module).__name__} has no child {'.'.join(path)!r}")
        made = Child(tuple(path), module, tuple(pins))
        self.extra.append(made)
        return made

    def own(self, *pins: str) -> Child:
        """The module being rewritten itself; `pins` are its settings that must stay what they are now."""
        return self.child(pins=pins)

    def call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
        """`op(*args, **kwargs)`; children arrive as modules, graph values as tensors, the rest as it is."""
        return Call(op, args, kwargs)


class Rule:
    """Subclass it, set `pattern` or `target`, write `fuse`, and decorate with `fl.register_rule`.

    Attributes:
        name: how it is named in reports and filters; the class's name in snake_case when not set.
        pattern: what to look for in a container's graph (see `fusedlayers.patch.pattern`).
        target: instead of a pattern, a class (or dotted name, for a library that may be absent) whose whole forward is
            replaced: exact type only.
        accepts: for a rule with `target`, arguments with a default that the op takes as they are given. Where others
            do not have their default the original forward runs.
        residuals: for a rule with `target`, how many residual adds that forward holds.
        outputs: names of the pattern's elements whose values the fused op returns as a tuple; by default only the
            outermost element's value, returned as it is.
        passes: name of a `value` that additions may read after the pattern. Where they do, `m.passes` is true and the
            fused op returns that value too, behind its result: its gradient then comes in with the op's own, and
            autograd has nothing to add up.
        priority: higher is tried first. Larger patterns need a higher one than the parts they contain.
        random: the pattern draws random numbers, so nothing that may draw is allowed to run in its middle.
        views: the fused op returns views of its inputs, as what it replaces does; otherwise it must return new tensors.
    """

    name: str = ""
    pattern: Pattern | None = None
    target: Kind | tuple[Kind, ...] | None = None
    accepts: tuple[str, ...] = ()
    residuals: int = 0
    outputs: tuple[str, ...] = ()
    passes: str = ""
    priority: int = 0
    random: bool = False
    views: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = "".join(f"_{c.lower()}" if c.isupper() else c for c in cls.__name__).lstrip("_")

    def check(self, m: Match) -> str | None:
        """Why this match must be left alone; None to fuse it; `NO_MATCH` when it is not what the rule is about."""
        return None

    def fuse(self, m: Match) -> Call:
        """What to run instead; usually `return m.call(op, m.fc, m.act, m.x)`."""
        raise TypeError(f"rule {self.name!r} does not say what to fuse to")

    @property
    def targets(self) -> tuple[Kind, ...]:
        return self.target if isinstance(self.target, tuple) else (self.target,) if self.target is not None else ()

    def __repr__(self) -> str:
        return f"<Rule {self.name}>"


_rules: dict[str, Rule] = {}
_Registered = TypeVar("_Registered", bound="type[Rule] | Rule")


def register_rule(rule: _Registered) -> _Registered:
    """Adds a rule to those `patch_model` uses; works as a class decorator.

    Raises:
        TypeError: not a `Rule`, or one with neither or both of `pattern` and `target`.
        ValueError: another rule has the name.
    """
    made = rule() if inspect.isclass(rule) and issubclass(rule, Rule) else rule
    if not isinstance(made, Rule):
        raise TypeError(f"register_rule takes a Rule or a subclass of it, not {rule!r}")
    if (made.pattern is None) == (made.target is None):
        raise TypeError(f"rule {made.name!r} needs either a pattern or a target")
    known = _rules.get(made.name)
    if known is not None and _defined(known) != _defined(made):
        raise ValueError(f"a rule named {made.name!r} is already registered ({_defined(known)})")
    _rules[made.name] = made
    return rule


def _defined(rule: Rule) -> str:
    return f"{type(rule).__module__}.{type(rule).__qualname__}"


def rules() -> dict[str, Rule]:
    """All registered rules by name, in the order they are tried."""
    return {r.name: r for r in sorted(_rules.values(), key=lambda r: -r.priority)}


def choose(wanted: Iterable[str | Rule] | str | Rule | None) -> list[Rule]:
    """The rules to use, in the order they are tried.

    Raises:
        ValueError: a name that no rule has.
    """
    known = rules()
    if wanted is None:
        return list(known.values())
    chosen = []
    for rule in [wanted] if isinstance(wanted, (str, Rule)) else wanted:
        if inspect.isclass(rule) and issubclass(rule, Rule):
            rule = rule()
        if isinstance(rule, Rule):
            chosen.append(rule)
        elif rule in known:
            chosen.append(known[rule])
        else:
            near = difflib.get_close_matches(str(rule), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(known)})"
            raise ValueError(f"no rule is named {rule!r}{hint}")
    return sorted(chosen, key=lambda r: -r.priority)
