"""A small language for what a rule looks for in a container's graph.

    act("act")(leaf("fc", nn.Linear)(value("x")))            # act(fc(x))
    act("act")(add("sum")(leaf("bn", nn.BatchNorm2d)(value("x")), value("residual")))

Every element is named; what it matched is the attribute of that name on the `Match` a rule gets: a graph value for
`value`, a `Child` for `leaf`, an `Activation` for `act`. A match has the right shape; what else stands in the way of
fusing (a subclass, a hook, another reader) is collected as `problems`, the reasons that `explain` shows.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from ..activations import Activation, is_inplace, recognise
from . import effects
from .codegen import Child
from .guards import member_problem, original_class


@dataclass(frozen=True)
class State:
    """What has been matched so far."""

    module: nn.Module
    bound: tuple[tuple[str, Any], ...] = ()
    children: tuple[Child, ...] = ()
    nodes: tuple[tuple[str, Node], ...] = ()
    """Nodes that the fused op replaces, with the element that matched each."""
    writes: tuple[tuple[Node, Node], ...] = ()
    """In-place nodes among them, with the value each overwrites."""
    swapped: tuple[Node, ...] = ()
    """Sums and products among them whose operands the forward has in the other order than the pattern."""
    problems: tuple[str, ...] = ()

    def get(self, name: str) -> Any:
        return next((value for known, value in self.bound if known == name), _UNBOUND)

    def bind(self, name: str | None, value: Any) -> State | None:
        """With `name` bound; None where it already is something else."""
        if name is None:
            return self
        known = self.get(name)
        if known is not _UNBOUND:
            return self if known is value or known == value else None
        return self.but(bound=(*self.bound, (name, value)))

    def take(self, name: str | None, node: Node) -> State:
        return self.but(nodes=(*self.nodes, (name or "", node)))

    def problem(self, *reasons: str | None) -> State:
        found = [r for r in reasons if r]
        return self.but(problems=(*self.problems, *found)) if found else self

    def but(self, **changes: Any) -> State:
        """`dataclasses.replace`, which takes its time, for the many steps of a match."""
        made = object.__new__(State)
        made.__dict__.update(self.__dict__, **changes)
        return made


_UNBOUND: Any = object()
Kind = type | str | Callable[[type], bool]
"""A class, the dotted name of one, or a question asked of a class."""


CALLS = frozenset({"call_module", "call_function", "call_method"})


@dataclass(frozen=True)
class Content:
    """What there is in a graph: classes of the modules it calls, functions and methods, and whether activations."""

    classes: frozenset[type]
    called: frozenset[Any]
    activations: bool


_ADD, _MUL = (operator.add, operator.iadd, torch.add), (operator.mul, operator.imul, torch.mul)
ADDITIONS = frozenset((*_ADD, "add", "add_"))
SUMS = frozenset((*ADDITIONS, *_MUL, "mul", "mul_"))
"""What `add` and `mul` match."""


class Pattern:
    """Base of all elements. Calling one gives it its inputs: `act("act")(x)`."""

    ops: frozenset[str] = CALLS
    """The kinds of node a site may end in, so that no others are looked at."""

    def __init__(self, name: str | None = None):
        self.name, self.inputs = name, ()

    def __call__(self, *inputs: Pattern) -> Pattern:
        called = copy.copy(self)
        called.inputs = inputs
        return called

    def match(self, node: Any, state: State) -> Iterator[State]:
        raise TypeError(f"{type(self).__name__} does not say what it matches")

    def may_end_in(self, graph: Content) -> bool:
        """Whether a graph may have a node that `match` takes, so that most patterns are never looked for."""
        return True

    def _follow(
        self, values: tuple[Any, ...], state: State, inputs: tuple[Pattern, ...] | None = None
    ) -> Iterator[State]:
        wanted = self.inputs if inputs is None else inputs
        if not wanted:
            yield state
        elif len(values) == len(wanted):
            for found in wanted[0].match(values[0], state):
                yield from self._follow(values[1:], found, wanted[1:])


class _Value(Pattern):
    def match(self, node: Any, state: State) -> Iterator[State]:
        if isinstance(node, Node):
            found = state.bind(self.name, node)
            if found is not None:
                yield found


class _Leaf(Pattern):
    ops = frozenset({"call_module"})

    def __init__(self, name: str, *types: Kind, pins: tuple[str, ...] = (), stand_in: bool = False):
        super().__init__(name)
        self.types, self.pins, self.stand_in = types, pins, stand_in

    def match(self, node: Any, state: State) -> Iterator[State]:
        if not isinstance(node, Node) or node.op != "call_module" or len(node.args) != len(self.inputs) or node.kwargs:
            return
        module = effects.child(state.module, node.target)
        if module is None or not self._is_for(type(module)):
            return
        found = state.bind(self.name, Child(tuple(node.target.split(".")), module, self.pins))
        if found is None:
            return
        cls = original_class(module)
        if not any(exactly(cls, t) for t in self.types):
            names = (t.rpartition(".")[2] if isinstance(t, str) else t.__name__ for t in self.types)
            wanted = " or ".join(dict.fromkeys(names))
            found = found.problem(f"{node.target} is a {cls.__module__}.{cls.__qualname__}, not exactly a {wanted}")
        found = found.but(children=(*found.children, found.get(self.name))).take(self.name, node)
        yield from self._follow(node.args, found.problem(member_problem(module, node.target)))

    def may_end_in(self, graph: Content) -> bool:
        return any(map(self._is_for, graph.classes))

    def _is_for(self, cls: type) -> bool:
        """An adapter or a quantized layer may stand in; a norm or a dropout has a place of its own."""
        if self.stand_in and not any(part in cls.__name__.lower() for part in ("norm", "drop", "identity")):
            return True
        return any(is_kin(cls, t) for t in self.types)


def required_kinds(pattern: Pattern) -> Iterator[tuple[Kind, ...]]:
    """For every leaf without which the pattern cannot match, the classes it may be."""
    if isinstance(pattern, _Leaf):
        yield pattern.types
    for inner in pattern.inputs:
        yield from required_kinds(inner)


def is_a(module: nn.Module, kind: Kind) -> bool:
    return is_kin(type(module), kind)


def is_kin(cls: type, kind: Kind) -> bool:
    """Whether a class or one of its bases is of this kind."""
    if isinstance(kind, type):
        return kind in cls.__mro__
    if isinstance(kind, str):
        names = _dotted.get(cls)
        if names is None:
            names = _dotted[cls] = frozenset(f"{c.__module__}.{c.__qualname__}" for c in cls.__mro__)
        return kind in names
    return any(kind(c) for c in cls.__mro__)


_dotted: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


def exactly(cls: type, kind: Kind) -> bool:
    if isinstance(kind, str):
        return f"{cls.__module__}.{cls.__qualname__}" == kind
    return cls is kind if isinstance(kind, type) else kind(cls)


class _Act(Pattern):
    def may_end_in(self, graph: Content) -> bool:
        return graph.activations

    def match(self, node: Any, state: State) -> Iterator[State]:
        seen = activation_of(node, state.module)
        if seen is None:
            return
        activation, module, inplace = seen
        found = state.bind(self.name, activation)
        if found is None:
            return
        if module is not None:
            child = Child(tuple(node.target.split(".")), module, settings_of(module))
            found = found.but(children=(*found.children, child)).problem(member_problem(module, node.target))
        if inplace:
            found = replace(found, writes=(*found.writes, (node, node.args[0])))
        yield from self._follow(node.args[:1], found.take(self.name, node))


def settings_of(activation: nn.Module) -> tuple[str, ...]:
    """Names of the settings of an activation module, all of which are baked into the `Activation` it gives."""
    settings = (k for k, v in vars(activation).items() if isinstance(v, (bool, int, float, str, type(None))))
    return tuple(k for k in settings if not k.startswith("_") and k not in ("training", "inplace"))


def activation_of(node: Any, root: nn.Module) -> tuple[Activation, nn.Module | None, bool] | None:
    """The activation a node computes (identity excepted), its module if it is one, and whether it is in place."""
    if not isinstance(node, Node) or not node.args or not isinstance(node.args[0], Node):
        return None
    if "activation" not in node.meta:  # every rule asks
        node.meta["activation"] = _activation_of(node, root)
    return node.meta["activation"]


def _activation_of(node: Node, root: nn.Module) -> tuple[Activation, nn.Module | None, bool] | None:
    if node.op == "call_module":
        module = effects.child(root, node.target)
        if module is None or len(node.args) != 1 or node.kwargs:
            return None
        found = recognise(module) if original_class(module) is type(module) else None
        return None if found is None or found.name == "identity" else (found, module, is_inplace(module))
    if node.op not in ("call_function", "call_method") or node.meta.get("fused"):
        return None
    rest, kwargs = node.args[1:], node.kwargs
    found = recognise(node.target, rest, kwargs)
    if found is None or found.name == "identity":
        return None
    return found, None, is_inplace(node.target, rest, kwargs)


class _Call(Pattern):
    """A call of one of several functions or tensor methods with exactly the inputs given."""

    ops = CALLS - {"call_module"}

    def __init__(
        self, name: str | None, functions: tuple[Callable[..., Any], ...], methods: tuple[str, ...], swap: bool = False
    ):
        super().__init__(name)
        self.functions, self.methods, self.swap = functions, methods, swap

    def may_end_in(self, graph: Content) -> bool:
        return any(called in graph.called for called in (*self.functions, *self.methods))

    def match(self, node: Any, state: State) -> Iterator[State]:
        if not isinstance(node, Node) or node.kwargs or len(node.args) != len(self.inputs) or node.meta.get("fused"):
            return
        wanted = self.functions if node.op == "call_function" else self.methods if node.op == "call_method" else ()
        if node.target not in wanted:
            return
        found = state.bind(self.name, node)
        if found is None:
            return
        found = found.take(self.name, node)
        written = effects.overwrites(node, state.module)
        if written:
            found = replace(found, writes=(*found.writes, *((node, w) for w in written)))
        yield from self._follow(node.args, found)
        if self.swap and len(node.args) == 2:
            yield from self._follow(node.args[::-1], replace(found, swapped=(*found.swapped, node)))


class _Maybe(Pattern):
    """The element, or its input directly (then its name is bound to None)."""

    def __init__(self, element: Pattern):
        super().__init__(element.name)
        self.element = element

    def match(self, node: Any, state: State) -> Iterator[State]:
        yield from self.element(*self.inputs).match(node, state)
        found = state.bind(self.name, None)
        if found is not None:
            yield from self.inputs[0].match(node, found)


class _Either(Pattern):
    def __init__(self, *choices: Pattern):
        super().__init__()
        self.choices = choices

    def match(self, node: Any, state: State) -> Iterator[State]:
        for choice in self.choices:
            yield from (choice(*self.inputs) if self.inputs else choice).match(node, state)


class _Item(Pattern):
    """`input[index]`."""

    def __init__(self, index: int):
        super().__init__()
        self.index = index

    def match(self, node: Any, state: State) -> Iterator[State]:
        if isinstance(node, Node) and node.target is operator.getitem and node.args[1] == self.index:
            yield from self._follow(node.args[:1], state.take(None, node))


class _Constant(Pattern):
    def match(self, node: Any, state: State) -> Iterator[State]:
        if not isinstance(node, Node):
            found = state.bind(self.name, node)
            if found is not None:
                yield found


class _Parameter(Pattern):
    """A parameter or buffer read by the forward itself; bound to its graph value."""

    def match(self, node: Any, state: State) -> Iterator[State]:
        if isinstance(node, Node) and node.op == "get_attr":
            found = state.bind(self.name, node)
            if found is not None:
                yield found


class _Through(Pattern):
    """Its input, seen through any number of modules that return what they are given."""

    def match(self, node: Any, state: State) -> Iterator[State]:
        pins = passes_through(node, state.module)
        if pins is not None:
            child = Child(tuple(node.target.split(".")), effects.child(state.module, node.target), pins)
            found = replace(state, children=(child, *state.children)).take(None, node)  # named after the others
            yield from self.match(node.args[0], found.problem(member_problem(child.module, node.target)))
        call = dropout_call(node)
        if call is not None and call[1] == 0.0:
            yield from self.match(call[0], state.take(None, node))
        yield from self.inputs[0].match(node, state)


INACTIVE_AT_ZERO: dict[type | str, str] = {
    nn.Dropout: "p",
    nn.Dropout1d: "p",
    nn.Dropout2d: "p",
    nn.Dropout3d: "p",
    "timm.layers.drop.DropPath": "drop_prob",
    "torchvision.ops.stochastic_depth.StochasticDepth": "p",
}
"""Modules that return their input while this setting is zero."""


def may_pass_through(node: Any, root: nn.Module) -> bool:
    """Whether a node calls a module that returns its input, at some setting."""
    return _passing(node, root) is not None


def passes_through(node: Any, root: nn.Module) -> tuple[str, ...] | None:
    """The settings because of which a node's module returns its input, none for Identity; None when it does not."""
    found = _passing(node, root)
    if found is None:
        return None
    module, setting = found
    if setting is None:
        return ()
    return (setting,) if getattr(module, setting, None) == 0 else None


def _passing(node: Any, root: nn.Module) -> tuple[nn.Module, str | None] | None:
    if not isinstance(node, Node) or node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    module = effects.child(root, node.target)
    if module is None or not isinstance(node.args[0], Node):
        return None
    cls = original_class(module)
    if cls is nn.Identity:
        return module, None
    setting = INACTIVE_AT_ZERO.get(cls) or INACTIVE_AT_ZERO.get(f"{cls.__module__}.{cls.__qualname__}")
    return None if setting is None else (module, setting)


class _Dropout(Pattern):
    """Element-wise dropout as a module or as `F.dropout`; bound to the `Child`, or to the probability in effect.

    Not in place: torch draws another mask there on a GPU.
    """

    def match(self, node: Any, state: State) -> Iterator[State]:
        if isinstance(node, Node) and node.op == "call_module":
            module = effects.child(state.module, node.target)
            if isinstance(module, nn.Dropout) and not module.inplace:
                yield from _Leaf(self.name, nn.Dropout, pins=("inplace",))(*self.inputs).match(node, state)
        else:
            call = dropout_call(node)
            found = None if call is None else state.bind(self.name, call[1])
            if found is not None:
                yield from self._follow((call[0],), found.take(self.name, node))


def dropout_call(node: Any) -> tuple[Node, float] | None:
    """What `F.dropout` is called on and the probability in effect, where both are plain and it is not in place."""
    if not isinstance(node, Node) or node.op != "call_function" or node.target is not F.dropout:
        return None
    given = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | dict(node.kwargs)
    p, training, inplace = given.get("p", 0.5), given.get("training", True), given.get("inplace", False)
    if type(p) not in (int, float) or training not in (True, False) or inplace is not False:
        return None
    return given["input"], float(p) if training else 0.0


def value(name: str | None = None) -> Pattern:
    """Any graph value; the same name twice is the same value."""
    return _Value(name)


def constant(name: str | None = None) -> Pattern:
    """A Python constant in the call."""
    return _Constant(name)


def parameter(name: str) -> Pattern:
    """A parameter or buffer that the container's forward reads itself, such as `self.gamma`."""
    return _Parameter(name)


def leaf(name: str, *types: Kind, pins: tuple[str, ...] = (), stand_in: bool = False) -> Pattern:
    """A call of a child whose type is exactly one of `types`: a class, a library's dotted name, or `fn(cls) -> bool`.

    `pins` are settings a rule decides on in `check`; the fused path is then taken only while they are unchanged. With
    `stand_in`, any other module in this place makes a near miss, so that a smaller rule's match reports as reduced.
    """
    return _Leaf(name, *types, pins=pins, stand_in=stand_in)


def act(name: str = "act") -> Pattern:
    """A registered activation in any form: module, function or method. Identity does not count."""
    return _Act(name)


def add(name: str | None = None) -> Pattern:
    """`a + b` in any form and either order, in place or not."""
    return _Call(name, _ADD, ("add", "add_"), swap=True)


def mul(name: str | None = None) -> Pattern:
    """`a * b` in any form and either order."""
    return _Call(name, _MUL, ("mul", "mul_"), swap=True)


def call(name: str | None, *functions: Callable[..., Any] | str) -> Pattern:
    """A call of one of `functions` (strings are tensor methods), with exactly the inputs given."""
    methods = tuple(f for f in functions if isinstance(f, str))
    return _Call(name, tuple(f for f in functions if not isinstance(f, str)), methods)


def item(index: int) -> Pattern:
    return _Item(index)


def through(inner: Pattern) -> Pattern:
    """`inner`, seen through Identity modules and dropouts whose probability is zero (and has to stay so)."""
    return _Through()(inner)


def dropout(name: str) -> Pattern:
    """Element-wise dropout, not in place, bound to its module, or to the probability where `F.dropout` is called."""
    return _Dropout(name)


def maybe(element: Pattern) -> Pattern:
    return _Maybe(element)


def either(*choices: Pattern) -> Pattern:
    return _Either(*choices)
