"""What reads a value in the end: whether all of it casts the value down under autocast, also inside child modules.

A product (a Linear, a convolution) casts what it is given; moving dims about and asking for sizes does not see the
dtype. A child module is a reader of this kind when its own forward, in every form and mode, does only that with the
argument. What this rests on is asked again on each call, by one function: `Readers.held`.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg

from . import effects, guards, trace
from .codegen import Generated, compile_source, identity
from .decorators import forward_of
from .guards import MARK, member_problem, original_class
from .pattern import Pattern, State, exactly, passes_through
from .rule import rules
from .shadow import Path, Untraceable
from .trace import SPLAT, Trace
from .uses import BLIND, called_with

PRODUCTS: tuple[type | str, ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
PRODUCTS += ("transformers.pytorch_utils.Conv1D", "transformers.modeling_utils.Conv1D")
"""Layers that hand what they are given to a product that autocast casts for."""
FUSED_PRODUCTS = ("mlp", "linear_act", "gated_mlp", "chunked_mlp", "chunked_mlp_gate_last", "conv1d_act", "conv1d_mlp")
"""Rules whose fused op begins with products of what it is given."""
GATED = "gated_mlp"
"""The rule whose op makes one product of two, so that it alone reads its input."""

_BUILT = "__built__"
_OURS = f"{__package__}.rules."
_LAYOUT = {"transpose", "permute", "reshape", "view", "flatten", "unflatten", "contiguous", "unsqueeze", "squeeze"}
_LAYOUT |= {"chunk", "split", "unbind", "movedim", "swapaxes", "swapdims"}
_LAYOUT_FUNCTIONS = {getattr(torch, name) for name in _LAYOUT if hasattr(torch, name)}


class Unfit(Exception):
    """Something reads the value that is not known to cast it; the message says what.

    `telling`: it might, but its code says too little.
    """

    def __init__(self, reason: str, telling: bool = False):
        super().__init__(reason)
        self.telling = telling


@dataclass(frozen=True)
class Readers:
    """What reads one value, all of which casts it down.

    `products` are how many products do, at most, in one call. `held(module)` says whether that is still so below the
    module whose graph holds the value; None where the guards of the fused op say it already. `blocked` names layers
    that would, but may not be relied on.
    """

    products: int
    held: Callable[[nn.Module], bool] | None
    blocked: tuple[str, ...] = ()


def readers(node: Node, module: nn.Module, gated: Pattern) -> Readers:
    """What reads `node`, a value in the graph of `module`'s forward; `gated` is what the rule `GATED` looks for.

    Raises:
        Unfit: not all of it casts the value down.
    """
    walk = _Walk(gated)
    products = walk.follow(node, module, ())
    return Readers(products, walk.check(), tuple(dict.fromkeys(walk.blocked)))


class _Walk:
    def __init__(self, gated: Pattern) -> None:
        self.gated = gated
        self.names = guards.Names()
        self.paths: dict[Path, None] = {}
        self.conditions: dict[str, None] = {}
        self.blocked: list[str] = []
        self.pending: set[int] = set()

    def follow(self, node: Node, module: nn.Module, at: Path) -> int:
        """How many products read `node` of the graph of `module`, which lies at the path `at`."""
        return sum(self._user(user, node, module, at) for user in node.users)

    def _user(self, user: Node, node: Node, module: nn.Module, at: Path) -> int:
        if user.op == "call_module":
            return self._called(user, node, module, at)
        if user.meta.get("fused") in FUSED_PRODUCTS and user.all_input_nodes == [node]:
            return 1
        if user.meta.get("fused") or not user.args or user.args[0] is not node or _times(user, node) != 1:
            raise Unfit(f"{user.name} reads it")
        if _is_blind(user):
            return 0
        if _is_layout(user):
            return self.follow(user, module, at)
        raise Unfit(f"{user.name} reads it")

    def _called(self, user: Node, node: Node, module: nn.Module, at: Path) -> int:
        child = effects.child(module, user.target)
        path = (*at, *user.target.split("."))
        if child is None or _times(user, node) != 1:
            raise Unfit(f"{user.target} takes it more than once")
        pins = passes_through(user, module)
        if pins is not None:
            self._member(child, path, pins)
            return self.follow(user, module, at)
        alone = user.args == (node,) and not user.kwargs
        if alone and _is_product(child):
            return self._product(child, path)
        return self._container(child, path, user, node)

    def _product(self, child: nn.Module, path: Path) -> int:
        label = ".".join(path)
        if not any(exactly(type(child), kind) for kind in PRODUCTS):
            cls = type(child)
            self.blocked.append(f"{label} is a {cls.__module__}.{cls.__qualname__}")
        elif getattr(child, "padding_mode", "zeros") != "zeros":
            raise Unfit(f"{label} pads its input")
        self._member(child, path, ("padding_mode",))
        return 1

    def _member(self, child: nn.Module, path: Path, pins: tuple[str, ...] = ()) -> None:
        problem = member_problem(child, ".".join(path))
        if problem is not None:
            self.blocked.append(problem)
        self._reach(path)
        self.conditions.update((g.expression, None) for g in guards.member(path, child, pins, self.names))

    def _container(self, child: nn.Module, path: Path, user: Node, node: Node) -> int:
        """Products that read `node` inside `child`, which `user` calls with it."""
        label, cls = ".".join(path), original_class(child)
        if id(child) in self.pending:
            raise Unfit(f"{label} calls itself")
        try:
            function = forward_of(cls)
        except Untraceable as reason:
            raise Unfit(f"{label}: {reason}") from None
        odd = [
            d for d in function.decorators if not d.__globals__.get("__name__", "").startswith("transformers.utils.")
        ]
        own_call = cls.__call__ is not nn.Module.__call__
        if odd or own_call or isinstance(child, (torch.jit.ScriptModule, torch.fx.GraphModule)):
            raise Unfit(f"{label} is not called in the usual way")
        problem = member_problem(child, label)
        if problem is not None:
            self.blocked.append(problem)
        self._reach(path)
        here, original = self.names.child(path), self.names.bind(as_built, "as_built")
        kind = self.names.bind(cls, cls.__name__)
        hooks = " or ".join(f"{here}.{name}" for name in guards.HOOKS)
        for held in (f"{original}(type({here})) is {kind}", f"not ({hooks})", f"'forward' not in {here}.__dict__"):
            self.conditions[held] = None
        self.conditions[f"{kind}.forward is {self.names.bind(cls.forward, 'forward')}"] = None
        argument = _argument(inspect.signature(function.function), user, node)
        self.pending.add(id(child))
        try:
            return self._inside(child, path, function.function, argument)
        finally:
            self.pending.discard(id(child))

    def _inside(self, child: nn.Module, path: Path, function: Any, argument: str) -> int:
        traces = trace.looked_at(child, original_class(child))
        refused = next((t.refused for t in traces if t.graph is None), None)
        if refused is not None:
            names = called_with(function, argument)
            if names is None:
                raise Unfit(f"{'.'.join(path)} reads it, whose {refused}", telling=len(path) == 1)
            return sum(self._by_code(child, path, name) for name in names)
        most = 0
        for traced in traces:
            for found in traced.reads.values():
                self._read(path, found)
            for node in traced.graph.nodes:
                if node.op == "placeholder" and node.target == argument:
                    most = max(most, self._forward(node, child, path, traced))
        return most

    def _forward(self, node: Node, child: nn.Module, path: Path, traced: Trace) -> int:
        """Two products of a gated MLP that is fused count as the one that they are then."""
        products = self.follow(node, child, path)
        if products == 2 and _is_gated(traced, node, child, self.gated):
            fused, here = self.names.bind(is_fused, "is_fused"), self.names.child(path)
            self.conditions[f"{fused}(type({here}), {GATED!r})"] = None
            return 1
        return products

    def _by_code(self, child: nn.Module, path: Path, name: str) -> int:
        """A product that the code of a forward calls; one that is not there must not come."""
        layer = child._modules.get(name)
        if layer is None:
            if hasattr(child, name):
                raise Unfit(f"{'.'.join((*path, name))} is no module")
            self.conditions[f"not hasattr({self.names.child(path)}, {name!r})"] = None
            return 0
        if not _is_product(layer):
            raise Unfit(f"{'.'.join((*path, name))} is a {type(layer).__qualname__}")
        return self._product(layer, (*path, name))

    def _read(self, at: Path, found: trace.Read) -> None:
        path = (*at, *found.path)
        self._reach(path)
        if found.kind == "child":
            self._reach((*path, found.name))
            return
        if found.kind == "type":
            kind = self.names.bind(as_built(found.value), "type")
            original = self.names.bind(as_built, "as_built")
            self.conditions[f"{original}(type({self.names.child(path)})) is {kind}"] = None
            return
        guard = guards.read(trace.Read(path, found.name, found.kind, found.value), self.names)
        if guard is not None:
            self.conditions[guard.expression] = None

    def _reach(self, path: Path) -> None:
        for n in range(1, len(path) + 1):
            self.paths[path[:n]] = None

    def check(self) -> Callable[[nn.Module], bool] | None:
        """A function that asks, of the module whose graph was followed, whether everything is as it was found."""
        if not self.paths:
            return None
        lines = ["def held(self):"]
        for path in self.paths:
            here, parent = self.names.child(path), self.names.child(path[:-1])
            lines += [f"    {here} = {parent}._modules.get({path[-1]!r})", f"    if {here} is None: return False"]
        conditions = [*self.conditions, guards.no_global_hooks(self.names).expression]
        lines += ["    return (", *(f"        {'and ' if n else ''}({c})" for n, c in enumerate(conditions)), "    )"]
        return _compiled("\n".join(lines) + "\n", self.names.values)


_numbers = itertools.count()
_checks: weakref.WeakValueDictionary[Any, Callable[[nn.Module], bool]] = weakref.WeakValueDictionary()


def _compiled(source: str, names: dict[str, Any]) -> Callable[[nn.Module], bool]:
    """One function for all modules that come out the same, so that they share their patched class."""
    generated = Generated(source, names, (source, tuple(identity(v) for v in names.values())))
    found = _checks.get(generated.key)
    if found is None:
        found = compile_source(generated, f"<fusedlayers readers {next(_numbers)}>", {})["held"]
        _checks[generated.key] = found
    return found


def as_built(cls: type) -> type:
    """The class before patching, if no rule but this library's own has a part in what it computes now."""
    own = vars(cls)
    return cls if MARK not in own else (own.get(_BUILT) or _learn(cls))[0]


def is_fused(cls: type, rule: str) -> bool:
    """Whether a patched class has a site of this rule."""
    own = vars(cls)
    return MARK in own and rule in (own.get(_BUILT) or _learn(cls))[1]


def _learn(cls: type) -> tuple[type, frozenset[str]]:
    """What `as_built` and `is_fused` say of a patched class, kept on it."""
    info, registered = vars(cls)[MARK], rules()
    names = frozenset(f.rule for f in info.found if f.status != "skipped")
    ours = all(n in registered and type(registered[n]).__module__.startswith(_OURS) for n in names)
    known = (info.original if ours else cls, names)
    setattr(cls, _BUILT, known)
    return known


def _times(user: Node, node: Node) -> int:
    """How often `node` is among the arguments of `user`."""
    seen: list[Node] = []
    map_arg((user.args, user.kwargs), seen.append)
    return seen.count(node)


def _argument(signature: inspect.Signature, user: Node, node: Node) -> str:
    """The name under which a child's forward gets `node`."""
    try:
        given = {k: v for k, v in user.kwargs.items() if k != SPLAT}
        bound = signature.bind_partial(None, *user.args, **given).arguments
    except TypeError:
        bound = {}
    found = next((name for name, value in bound.items() if value is node), None)
    if found is None:
        raise Unfit(f"{user.target} does not take it as an argument of its own")
    return found


def _is_product(module: nn.Module) -> bool:
    """A product, or something that stands in for one: an adapter, a quantized layer."""
    cls = original_class(module)
    kin = (
        isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
        or f"{cls.__module__}.{cls.__qualname__}" in effects._PROJECTIONS
    )
    return kin or any(exactly(cls, kind) for kind in PRODUCTS)


def _is_blind(user: Node) -> bool:
    if user.op == "call_method":
        return user.target in BLIND
    return user.op == "call_function" and user.target is getattr and user.args[1] in BLIND


def _is_layout(user: Node) -> bool:
    if "out" in user.kwargs:
        return False
    rest: list[Any] = []
    torch.fx.node.map_aggregate((user.args[1:], user.kwargs), rest.append)
    if any(isinstance(a, (torch.dtype, torch.Tensor)) for a in rest):
        return False
    if user.target is operator.getitem:
        return not any(isinstance(a, Node) for a in rest)
    if user.target == "view" and len(rest) == 1 and isinstance(rest[0], Node) and not _is_shape(rest[0]):
        return False  # may be a dtype
    if user.op == "call_method":
        return user.target in _LAYOUT
    return user.op == "call_function" and user.target in _LAYOUT_FUNCTIONS


def _is_shape(node: Node) -> bool:
    return node.target == "size" or (node.target is getattr and node.args[1] == "shape")


def _is_gated(traced: Trace, node: Node, child: nn.Module, gated: Pattern) -> bool:
    """Whether `node` is what a gated MLP of these products is given."""
    states = (s for n in traced.graph.nodes for s in gated.match(n, State(child)))
    return any(s.get("x") is node and not s.problems for s in states)
