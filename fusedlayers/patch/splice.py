"""A forward that no trace gets through, attention mostly, with calls of some children replaced in its own source.

Everything else in it stays as its author wrote it and runs as before. Replaced are calls `self.q(x)`, `self.k(x)` of
several children with one local variable, in one block of code with only plain statements from the first to the last:
whoever comes to the first comes to all. The source is believed only where it compiles to the very code that runs.
"""

from __future__ import annotations
import __future__

import ast
import dis
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .rule import Rule
from .scan import AMBIENT

Group = tuple[str, ...]
"""Names of children."""

START, TAKE, HELD = "__start", "__take", "__held"
_PLAIN = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_REFUSED = (ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr, ast.Global, ast.Nonlocal, ast.ClassDef, ast.AsyncFor)
_REFUSED += (ast.AsyncWith, ast.Import, ast.ImportFrom)
_FUTURES = functools.reduce(lambda flags, name: flags | getattr(__future__, name).compiler_flag,
                            __future__.all_feature_names, 0)  # fmt: skip
_REFLECTION = {"locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe", "autocast"}
_FIELDS = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount")
_FIELDS += ("co_posonlyargcount", "co_stacksize", "co_name")


class SpliceRule(Rule):
    """A rule with a `target` that replaces calls inside a forward, and none of the rest: it takes all arguments as
    they are given, and what the forward holds besides is reported as if nothing were fused.
    """


@dataclass
class _Run:
    """Calls of different children with the local `argument`, one after the other."""

    argument: str
    calls: list[ast.Call] = field(default_factory=list)

    @property
    def names(self) -> Group:
        return tuple(c.func.attr for c in self.calls)  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=1024)
def groups(function: types.FunctionType) -> tuple[Group, ...]:
    """The children that a forward calls so, two or more in each group."""
    read = _parsed(function)
    return () if read is None else tuple(run.names for run in _runs(read))


@functools.lru_cache(maxsize=1024)
def spliced(
    function: types.FunctionType, wanted: tuple[Group, ...], start: Callable[..., Any], take: Callable[..., Any]
) -> types.FunctionType:
    """The forward with the calls of the children in `wanted` replaced, which are parts of `groups(function)` in order.

    The first of a part becomes `take(held := start(x, self.q, self.k), 0, self.q, x)`, the second
    `take(held, 1, self.k, x)`.
    """
    read = _parsed(function)
    assert read is not None
    made: dict[int, ast.expr] = {}
    own = read.args.args[0].arg
    for number, (run, group) in enumerate(zip(_runs(read), wanted, strict=True)):
        calls = [c for c in run.calls if c.func.attr in group]  # type: ignore[attr-defined]
        held = f"{HELD}_{number}"
        layers = [ast.Attribute(ast.Name(own, ast.Load()), c.func.attr, ast.Load()) for c in calls]  # type: ignore[attr-defined]
        for at, call in enumerate(calls):
            shared: ast.expr = ast.Name(held, ast.Load())
            if at == 0:
                begun = ast.Call(ast.Name(START, ast.Load()), [call.args[0], *layers], [])
                shared = ast.NamedExpr(ast.Name(held, ast.Store()), begun)
            made[id(call)] = ast.Call(
                ast.Name(TAKE, ast.Load()), [shared, ast.Constant(at), call.func, call.args[0]], []
            )
    changed = ast.fix_missing_locations(_Replace(made).visit(read))
    code = _compiled(changed, function, (START, TAKE))
    known = {START: types.CellType(start), TAKE: types.CellType(take)}
    known.update(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(known[name] for name in code.co_freevars)
    found = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    found.__kwdefaults__, found.__qualname__ = function.__kwdefaults__, function.__qualname__
    return found


class _Replace(ast.NodeTransformer):
    def __init__(self, made: dict[int, ast.expr]):
        self.made = made

    def visit_Call(self, node: ast.Call) -> ast.AST:
        found = self.made.get(id(node))
        return self.generic_visit(node) if found is None else ast.copy_location(found, node)


def _parsed(function: types.FunctionType) -> ast.FunctionDef | None:
    """The source of a function, without decorators, defaults and annotations; None where it is not surely its own."""
    code = function.__code__
    if {*code.co_names} & (AMBIENT - {"is_tensor"} | _REFLECTION):
        return None
    try:
        source = inspect.getsource(function)
        (read,) = ast.parse(f"if 1:\n{source}" if source[:1].isspace() else source).body
        read = read.body[0] if isinstance(read, ast.If) else read
    except (OSError, TypeError, SyntaxError, ValueError):  # no source, or more than a function
        return None
    if not isinstance(read, ast.FunctionDef) or not read.args.args or any(isinstance(n, _REFUSED) for n in _all(read)):
        return None
    ast.increment_lineno(read, code.co_firstlineno - (read.decorator_list or [read])[0].lineno)
    read.decorator_list, read.returns, read.name = [], None, function.__name__
    arguments = read.args
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if a is not None:
            a.annotation = None
    names = {n.id for n in ast.walk(read) if isinstance(n, ast.Name)}
    names |= {n.attr for n in ast.walk(read) if isinstance(n, ast.Attribute)}
    if any(n.startswith("__") and not n.endswith("__") for n in names):  # a class would have changed it
        return None
    try:
        same = _same(_compiled(read, function), code)
    except (SyntaxError, ValueError):
        return None
    return read if same else None


def _all(read: ast.FunctionDef) -> Iterator[ast.AST]:
    return (n for statement in read.body for n in ast.walk(statement))


def _compiled(read: ast.FunctionDef, function: types.FunctionType, more: Sequence[str] = ()) -> types.CodeType:
    """The code of a function among the variables of the enclosing ones of `function`, and `more`."""
    code = function.__code__
    outer = ast.parse(f"def enclosing({', '.join((*code.co_freevars, *more))}): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [read]
    imports = [ast.ImportFrom("_", [ast.alias(name)], 0) for name in _imported(code)]
    module = ast.fix_missing_locations(ast.Module([*imports, outer], type_ignores=[]))
    whole = compile(module, code.co_filename, "exec", flags=code.co_flags & _FUTURES, dont_inherit=True)
    enclosing = next(c for c in whole.co_consts if isinstance(c, types.CodeType))
    return next(c for c in enclosing.co_consts if isinstance(c, types.CodeType) and c.co_name == code.co_name)


def _imported(code: types.CodeType) -> list[str]:
    """Names that the module imports, as far as that shows: a method of theirs is called as a plain attribute is."""
    steps = list(dis.get_instructions(code))
    read: dict[str, set[bool]] = {}
    for step, after in itertools.pairwise(s for s in steps if s.opname not in ("CACHE", "EXTENDED_ARG", "PRECALL")):
        if step.opname == "LOAD_GLOBAL" and after.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            method = after.opname == "LOAD_METHOD" or "NULL" in after.argrepr
            read.setdefault(step.argval, set()).add(method)
    return sorted(name for name, kinds in read.items() if kinds == {False})


def _same(a: types.CodeType, b: types.CodeType) -> bool:
    """Whether two pieces of code do the same, wherever they were written."""
    if any(getattr(a, name) != getattr(b, name) for name in _FIELDS):
        return False
    if (a.co_flags ^ b.co_flags) & ~inspect.CO_NESTED or len(a.co_consts) != len(b.co_consts):
        return False
    if getattr(a, "co_exceptiontable", b"") != getattr(b, "co_exceptiontable", b""):
        return False
    return all(
        _same(x, y) if isinstance(x, types.CodeType) and isinstance(y, types.CodeType) else repr(x) == repr(y)
        for x, y in zip(a.co_consts, b.co_consts, strict=True)
    )


def _runs(read: ast.FunctionDef) -> list[_Run]:
    """All runs of two calls or more."""
    own = read.args.args[0].arg
    outside = {n for inner in _all(read) if isinstance(inner, (*_SCOPES, ast.FunctionDef)) for n in _names(inner)}
    found: list[_Run] = []
    for block in _blocks(read):
        open_runs: list[_Run] = []
        for statement in block:
            calls = _calls(statement, own) if isinstance(statement, _PLAIN) else []
            if not isinstance(statement, _PLAIN):
                open_runs = []
            for call in calls:
                argument, child = call.args[0].id, call.func.attr  # type: ignore[attr-defined]
                run = next((r for r in open_runs if r.argument == argument and child not in r.names), None)
                if run is None:
                    run = _Run(argument)
                    open_runs.append(run)
                    found.append(run)
                run.calls.append(call)
            written = [n for n in ast.walk(statement) if isinstance(getattr(n, "ctx", None), (ast.Store, ast.Del))]
            names = {n.id for n in written if isinstance(n, ast.Name)}
            # `.data` lets a tensor be edited where its version does not tell
            behind = any(isinstance(n, ast.Attribute) and n.attr == "data" for n in ast.walk(statement))
            if behind or any(isinstance(n, (ast.Attribute, ast.Subscript)) for n in written) or own in names:
                open_runs = []
            open_runs = [r for r in open_runs if r.argument not in names | outside]
    return [run for run in found if len(run.calls) > 1]


def _names(node: ast.AST) -> set[str]:
    """Names that a scope of its own may assign to for the forward."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, (ast.Store, ast.Del))}


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements, but for those of functions inside."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block
            for statement in block:
                if not isinstance(statement, ast.FunctionDef):
                    yield from _blocks(statement)
    for handler in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield from _blocks(handler)


def _calls(node: ast.AST, own: str) -> list[ast.Call]:
    """Calls `self.child(local)` that a statement surely makes, in order."""
    if isinstance(node, _SCOPES):
        return []
    if isinstance(node, ast.IfExp):
        return _calls(node.test, own)
    if isinstance(node, ast.BoolOp):
        return _calls(node.values[0], own)
    if isinstance(node, ast.Compare):
        return _calls(node.left, own) + _calls(node.comparators[0], own)
    found = [c for inner in _evaluated(node) for c in _calls(inner, own)]
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return found
    func, argument = node.func, node.args[0]
    owned = isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == own
    return [*found, node] if owned and isinstance(argument, ast.Name) and argument.id != own else found


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """What a node is made of, values before the targets they go to."""
    inner = list(ast.iter_child_nodes(node))
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        inner = [n for n in inner if n not in targets]
    return iter(inner)
