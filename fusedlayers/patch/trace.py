"""One module's own forward as a graph, with all its children as leaves.

Data flow inside a container becomes visible without tracing the whole model, and a container that cannot be traced
costs only itself. `traces(module)` gives one trace per call form and mode: forwards test which arguments are given
(`mask is None`) and whether they train. What a trace took for granted is recorded with it, to be guarded on each call.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import operator
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import Attribute, TraceError, TracerBase
from torch.utils._python_dispatch import TorchDispatchMode

from . import alike, shadow
from .alike import Read, is_torch
from .decorators import forward_of
from .outside import Outside, written
from .scan import scan
from .shadow import Path, Untraceable
from .watch import CONTAINERS, SPLAT, Watch

MAX_FORMS = 16
TOO_MANY_FORMS = "forward has too many forms of call"

NONE, GIVEN, TENSOR, LIST, EMPTY = "is None", "is given", "is a tensor", "is a list", "is empty"
_KINDS = {TENSOR: torch.Tensor, LIST: list}


@dataclass(frozen=True)
class Exactly:
    """A call form in which an argument has this very value."""

    value: Any


Inline = Mapping[Path, Any]
"""Paths of children that are not leaves, and the forward of each."""

Form = Mapping[str, Any]
"""Argument name to NONE, GIVEN, TENSOR, LIST, EMPTY or Exactly; arguments not named may be anything."""


@dataclass
class Trace:
    """A graph, the call form it holds for, and what it read; `graph` is None where `refused` says why."""

    form: Form
    training: bool
    graph: Graph | None = None
    reads: dict[tuple[Path, str, str], Read] = field(default_factory=dict)
    refused: str | None = None

    def copy(self) -> Trace:
        """With a graph of its own, to be rewritten."""
        if self.graph is None:
            return self
        graph, made = Graph(), {}
        for node in self.graph.nodes:
            args, kwargs = map_arg((node.args, node.kwargs), made.__getitem__)
            made[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
        return replace(self, graph=graph)


class _Undecided(Exception):
    """The forward asks about an argument that this form says nothing of."""

    def __init__(self, name: str, choices: tuple[Any, ...] | None = None):
        self.name, self.choices = name, choices


@functools.lru_cache(maxsize=4096)
def _unpacked(code: types.CodeType, at: int) -> int | None:
    """How many names the instruction there unpacks into; None when it iterates in another way."""
    step = next((i for i in dis.get_instructions(code) if i.offset == at), None)
    return step.argval if step is not None and step.opname == "UNPACK_SEQUENCE" else None


class Value(Proxy):
    """fx's proxy, except that in-place operators stay in place."""

    _slots = ("tracer", "node")

    def _inplace(self, operator_name: str, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", getattr(operator, operator_name), (self, other), {})

    def __iter__(self) -> Iterator[Any]:
        frame = sys._getframe(1)
        count = _unpacked(frame.f_code, frame.f_lasti)
        return self.tracer.iter(self) if count is None else (self[i] for i in range(count))

    def __getattr__(self, name: str) -> _Attribute:
        return _Attribute(self, name)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise Untraceable("forward assigns into a tensor")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._slots:
            raise Untraceable(f"forward sets .{name} of a value")
        super().__setattr__(name, value)

    def __len__(self) -> int:
        raise Untraceable("forward asks the length of a value")

    def __contains__(self, item: Any) -> bool:
        raise Untraceable("forward searches in a value")


_INPLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor")
for _name in (*_INPLACE, "ilshift", "irshift"):
    setattr(Value, f"__{_name}__", lambda self, other, _name=_name: self._inplace(_name, other))


class _Attribute(Value, Attribute):
    """An attribute of a value, in the graph only if it is not just called."""

    _slots = ("root", "attr", "tracer", "_node")


class _NoRealTensors(TorchDispatchMode):
    """Any operation on real tensors while tracing would be baked into the graph: refuse it before it runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Untraceable(f"forward computes {getattr(func, '_opname', func)} on something other than its inputs")


class _Tracer(TracerBase):
    def __init__(
        self,
        module: nn.Module,
        cls: type,
        function: types.FunctionType,
        form: dict[str, Any],
        training: bool,
        inline: Inline,
    ):
        self.graph = Graph()
        self.module, self.cls, self.function = module, cls, function
        self.form, self.training = form, training
        self.optional = _optional(function)
        self.reads: dict[tuple[Path, str, str], Read] = {}
        self.lent: list[tuple[str, Any, Any]] = []
        self.inline = inline
        self.helpers: set[Callable[..., Any]] = set()
        self.watch = Watch(
            self._none_asked, lambda name, found: self.read((), name, "global", found), function.__code__
        )

    # what shadows report

    def read(self, path: Path, name: str, kind: str, value: Any) -> None:
        self.reads[path, name, kind] = Read(path, name, kind, value)

    def tensor(self, path: Path, name: str, value: torch.Tensor) -> Proxy:
        return self.create_proxy("get_attr", ".".join((*path, name)), (), {})

    def call(self, shadow: Any, path: Path, args: tuple, kwargs: dict[str, Any]) -> Any:
        if path in self.inline:
            function = self.inline[path]
            self.read(path, "forward", "method", function)
            return (function if is_torch(function) else self.method(function))(shadow, *args, **kwargs)
        frame = sys._getframe(2)
        while frame is not None and frame.f_code is not _trace.__code__:
            module = frame.f_globals.get("__name__", "")
            if module.startswith("torch.") and not module.startswith("torch.nn."):
                raise Untraceable(f"forward runs a child through {module}")
            frame = frame.f_back
        if SPLAT in kwargs and sys._getframe(2).f_code is not self.function.__code__:
            raise Untraceable("forward passes **kwargs through a helper")
        return self.create_proxy("call_module", ".".join(path), args, kwargs)

    def method(self, function: Any) -> Callable[..., Any]:
        """`function`, checked, with `isinstance` and `type` answered by this trace."""
        if not isinstance(function, types.FunctionType):
            return function
        asked = scan(function)
        if asked.refused:
            raise Untraceable(asked.refused)
        if function is not self.function and hasattr(function, "__wrapped__"):
            raise Untraceable(f"{function.__qualname__} is decorated")
        self.watch.admit(function)
        names: dict[str, Any] = {}
        for name in asked.globals_read:
            helper = function.__globals__.get(name)
            if isinstance(helper, types.FunctionType) and not is_torch(helper):
                names[name] = self._helper(helper)
            elif type(helper) in CONTAINERS:
                names[name] = copy.copy(helper)
                self.lent.append((name, names[name], helper))
        names.update({name: getattr(self, f"_{name}") for name in asked.builtins})
        local = function
        if names:
            names = {**function.__globals__, **names}
            local = types.FunctionType(
                function.__code__, names, function.__name__, function.__defaults__, function.__closure__
            )
            local.__kwdefaults__ = function.__kwdefaults__
        if function is self.function or not asked.none_tested:
            return local
        signature = inspect.signature(function)

        def checked(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            for name in asked.none_tested & given.keys():
                self._none_asked(given[name])
            return local(*args, **kwargs)

        return checked

    def _helper(self, function: types.FunctionType) -> Callable[..., Any]:
        """A helper from the forward's module, checked only if it is really called."""

        def helper(*args: Any, **kwargs: Any) -> Any:
            return self.method(function)(*args, **kwargs)

        self.helpers.add(helper)
        return helper

    def _none_asked(self, value: Any) -> None:
        if not isinstance(value, Proxy) or value.node.op == "get_attr":
            return
        if value.node.op != "placeholder":
            raise Untraceable("forward compares a computed value with None")
        if value.node.target not in self.form:
            raise _Undecided(value.node.target)

    def _isinstance(self, value: Any, kinds: Any) -> bool:
        if shadow.is_shadow(value):
            path = shadow.path_of(value)
            self.read(path, "", "type", type(value).__bases__[1])
            return issubclass(type(value).__bases__[1], kinds)
        if not isinstance(value, Proxy):
            return isinstance(value, kinds)
        node = value.node
        if node.op == "get_attr" and kinds is torch.Tensor:
            return True
        if node.op == "placeholder":
            kind = self.form.get(node.target, GIVEN)
            if kind == GIVEN:
                raise _Undecided(node.target, (TENSOR, LIST))
            return issubclass(_KINDS[kind], kinds)
        raise Untraceable("forward asks the type of a value")

    def _hasattr(self, value: Any, name: str) -> bool:
        if isinstance(value, Proxy):
            raise Untraceable("forward asks which attributes a value has")
        return hasattr(value, name)

    def _getattr(self, value: Any, name: str, *default: Any) -> Any:
        if isinstance(value, Proxy) and default:
            raise Untraceable("forward asks which attributes a value has")
        return getattr(value, name, *default)

    def _callable(self, value: Any) -> bool:
        if isinstance(value, Proxy):
            raise Untraceable("forward asks the type of a value")
        return callable(value)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise Untraceable("forward asks for exact types, prints, or compares identities")

    _type = _issubclass = _print = _id = _refuse

    # what the graph may hold

    def create_node(self, kind, target, args, kwargs, name=None, type_expr=None) -> Node:  # type: ignore[override]
        return self.graph.create_node(kind, target, args, kwargs, name, type_expr)

    def proxy(self, node: Node) -> Proxy:
        return Value(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Proxy):
            if a.tracer is not self:
                raise Untraceable("forward mixes values of two traces")
            return a.node
        if type(a) in (tuple, list):
            return type(a)(self.create_arg(v) for v in a)
        if type(a) is dict:
            return {k: self.create_arg(v) for k, v in a.items()}
        if type(a) is slice:
            return slice(self.create_arg(a.start), self.create_arg(a.stop), self.create_arg(a.step))
        if shadow.plain(a) or (isinstance(a, shadow.CODE) and a not in self.helpers):
            return a
        if isinstance(a, torch.Tensor):
            raise Untraceable("forward makes a tensor of its own")
        if shadow.is_shadow(a):
            raise Untraceable("forward hands a child to a function")
        raise Untraceable(f"forward makes a {type(a).__name__}")

    def to_bool(self, obj: Proxy) -> bool:
        pending, seen = [obj.node], set()
        while pending:  # an argument with a default, or something computed from one: its value becomes part of the form
            node = pending.pop()
            if node.op == "placeholder" and node.target in self.optional and node.target not in self.form:
                raise _Undecided(node.target)
            seen.add(node)
            pending += [n for n in node.all_input_nodes if n not in seen]
        raise Untraceable("forward branches on a value")

    def iter(self, obj: Proxy) -> Iterator[Any]:
        raise Untraceable("forward iterates over a value")

    def keys(self, obj: Proxy) -> Any:
        raise Untraceable("forward reads keys of a value")


_kept: dict[int, tuple[nn.Module, list[Trace]]] = {}
"""By the id of a module, beside it: what is equal to it is for its class to say."""
_known: dict[Any, list[Trace]] = {}
"""By class and settings, what came of a module: its like are traced no more."""


def looked_at(module: nn.Module, cls: type) -> list[Trace]:
    """`traces`, to be looked at only: kept for whoever asks next, until `taken` or `forget`."""
    if id(module) not in _kept:
        _kept[id(module)] = module, traces(module, cls)
    return _kept[id(module)][1]


def taken(module: nn.Module, cls: type) -> list[Trace]:
    """`traces`, to be rewritten: those kept, if there are any, and no longer kept."""
    _, found = _kept.pop(id(module), (module, None))
    return traces(module, cls) if found is None else found


def forget() -> None:
    """Drops what is kept: modules may change from one patching to the next."""
    _kept.clear()
    _known.clear()


def traces(module: nn.Module, cls: type, inline: Inline = MappingProxyType({})) -> list[Trace]:
    """All call forms of `module`'s forward (of class `cls`), each for training and for evaluation.

    Children at the paths in `inline` are not leaves: their children are.
    """
    try:
        function = forward_of(cls).function
    except Untraceable as reason:
        return [Trace({}, True, refused=str(reason))]
    signature = inspect.signature(function)
    kind = (alike.kind(module, cls, function), frozenset(inline.items()))
    known = _known.get(kind, ())
    if known and all(alike.holds(read, module, cls) for t in known for read in t.reads.values()):
        return [t.copy() for t in known]
    asked, outside = scan(function), Outside()
    found: list[Trace] = []
    for training in (True, False):
        start: list[dict[str, Any]] = [{}]
        for name in (n for n in signature.parameters if n in asked.none_tested):  # in the same order in every process
            start = [{**form, name: choice} for form in start for choice in _choices(signature.parameters[name])]
        pending, done = start, 0
        while pending:
            form = pending.pop(0)
            if done + len(pending) >= MAX_FORMS:
                found.append(Trace(form, training, refused=TOO_MANY_FORMS))
                break
            try:
                found.append(_trace(module, cls, function, signature, form, training, inline, outside))
                done += 1
            except _Undecided as question:
                parameter = signature.parameters[question.name]
                choices = question.choices or _choices(parameter, asked=True)
                if not choices:
                    found.append(Trace(form, training, refused=f"forward branches on {question.name}"))
                pending += [{**form, question.name: choice} for choice in choices]
    _known[kind] = [t.copy() for t in found]
    return found


@functools.lru_cache(maxsize=1024)
def _optional(function: types.FunctionType) -> set[str]:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return {p.name for p in parameters if _choices(p, asked=True)}


def _choices(parameter: inspect.Parameter, asked: bool = False) -> list[Any]:
    """The forms to try for an argument that the forward compares with None or, if `asked`, takes the truth of."""
    default = parameter.default
    if default is None:
        return [NONE, GIVEN]
    if isinstance(default, bool):
        return [Exactly(default), Exactly(not default)]
    if default is not inspect.Parameter.empty and shadow.plain(default):
        return [Exactly(default)]
    if asked:
        return []
    return [GIVEN, NONE] if default is inspect.Parameter.empty else [GIVEN]


def _trace(
    module: nn.Module,
    cls: type,
    function: types.FunctionType,
    signature: inspect.Signature,
    form: dict[str, Any],
    training: bool,
    inline: Inline,
    outside: Outside,
) -> Trace:
    form = dict(form)
    tracer = _Tracer(module, cls, function, form, training, inline)
    trace = Trace(form, training)
    outside.begin()
    try:
        root = shadow.make(module, tracer, cls=cls)
        args, kwargs = _arguments(tracer, signature, form, scan(function).splats_only)
        local = tracer.method(function)
        with _NoRealTensors(), tracer.watch:
            result = local(root, *args, **kwargs)
        tracer.create_node("output", "output", (tracer.create_arg(result),), {})
        if (name := shadow.written(root, module)) is not None:
            raise Untraceable(f"forward sets self.{name}")
        for where, given, value in tracer.lent:
            if written(given, value):
                raise Untraceable(f"forward writes into {where}")
        outside.check()
    except _Undecided:
        raise
    except (Untraceable, TraceError) as reason:
        trace.refused = str(reason).split("\n")[0]
    except Exception as error:  # whatever a user's forward does on symbolic values is a reason, never a crash
        trace.refused = f"forward fails on symbolic values ({type(error).__name__}: {_in_brief(error)!r})"
    else:
        trace.graph = tracer.graph
    finally:
        outside.restore()
    trace.reads = tracer.reads
    return trace


def _in_brief(error: Exception) -> str:
    return textwrap.shorten(str(error), 120, placeholder=" ...")


def _arguments(tracer: _Tracer, signature: inspect.Signature, form: dict[str, Any], splats: bool) -> tuple[list, dict]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    kinds = inspect.Parameter
    for parameter in list(signature.parameters.values())[1:]:
        name = parameter.name
        if parameter.kind is kinds.VAR_POSITIONAL:
            form[name] = EMPTY
        elif parameter.kind is kinds.VAR_KEYWORD:
            if splats:
                kwargs[SPLAT] = tracer.create_proxy("placeholder", name, (), {})
            else:
                form[name] = EMPTY
        else:
            wanted = form.get(name)
            if wanted == NONE:
                value: Any = None
            elif isinstance(wanted, Exactly):
                value = wanted.value
            else:
                number = type(parameter.default) in (bool, int, float)
                value = tracer.create_proxy("placeholder", name, (parameter.default,) if number else (), {})
            if parameter.kind is kinds.KEYWORD_ONLY:
                kwargs[name] = value
            else:
                args.append(value)
    return args, kwargs
