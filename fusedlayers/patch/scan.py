"""What a forward's code does that a trace cannot see, found in its bytecode before anything runs.

A trace sees operations on values. It does not see questions answered in Python without touching them: `x is None`,
the grad or autocast state, a global flag. Each such question would be answered once, at patching, and the other
branch silently dropped.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

AMBIENT = {
    "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled",
    "get_autocast_dtype", "get_autocast_gpu_dtype", "is_compiling", "is_dynamo_compiling", "is_torchdynamo_compiling",
    "is_exporting", "is_tracing", "is_torch_fx_proxy", "is_fx_tracing", "is_in_onnx_export", "environ", "getenv",
    "get_default_dtype", "get_default_device", "get_num_threads",
    "set_grad_enabled", "manual_seed", "set_rng_state", "get_rng_state", "is_tensor", "is_tensor_like",
    "has_torch_function", "has_torch_function_unary", "has_torch_function_variadic", "_getframe", "currentframe",
}  # fmt: skip
"""Names under which forwards ask for, or change, what belongs to the process or the thread, not to the module; and
questions about a value that symbolic ones answer wrongly."""

ANSWERED = {"isinstance", "issubclass", "type", "hasattr", "getattr", "callable", "print", "id"}
"""Builtins that the trace answers itself."""

_HANDLERS = ("BEFORE_WITH", "BEFORE_ASYNC_WITH", "SETUP_WITH", "PUSH_EXC_INFO", "SETUP_FINALLY")


@dataclass
class Scan:
    """What one code object asks: arguments compared with None, and reasons not to trust a trace of it."""

    none_tested: set[str] = field(default_factory=set)
    none_tested_outside: set[str] = field(default_factory=set)
    """Likewise of an enclosing function, from a comprehension or lambda in it."""
    builtins: set[str] = field(default_factory=set)
    """Those of `ANSWERED` that are called."""
    splats_only: bool = True
    """`**kwargs` is only ever passed on, never looked into."""
    refused: str | None = None
    globals_read: set[str] = field(default_factory=set)
    chains: set[tuple[str, ...]] = field(default_factory=set)
    """Globals that are read, with the attributes read of them: `config.flag` is `("config", "flag")`."""
    local_chains: set[tuple[str, ...]] = field(default_factory=set)
    """Likewise of arguments and of an enclosing function's variables."""
    imports: set[str] = field(default_factory=set)


def scan(function: types.FunctionType) -> Scan:
    return scan_code(function.__code__)


@lru_cache(maxsize=4096)
def scan_code(code: types.CodeType) -> Scan:
    found = Scan()
    arguments = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    varkw = varkw_of(code)
    steps = [
        i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG", "PRECALL", "RESUME", "NOP")
    ]
    stores: dict[str, list[int]] = {}
    for at, step in enumerate(steps):
        if step.opname.startswith(("STORE_FAST", "STORE_DEREF")):
            for name in _names(step):
                stores.setdefault(name, []).append(at)
    for at, step in enumerate(steps):
        name = step.argval if isinstance(step.argval, str) else None
        if name in AMBIENT and step.opname.startswith(("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "LOAD_NAME")):
            found.refused = f"forward asks {name}()"
        elif step.opname.startswith(("STORE_GLOBAL", "DELETE_GLOBAL")):
            found.refused = f"forward writes the global {name}"
        elif step.opname.startswith(("STORE_DEREF", "DELETE_DEREF")) and name in code.co_freevars:
            found.refused = found.refused or f"forward writes {name} of an enclosing function"
        elif step.opname == "IMPORT_NAME":
            found.imports.add(name)
        elif step.opname.startswith("STORE_ATTR"):
            found.refused = found.refused or f"forward sets .{name}"
        elif step.opname in _HANDLERS:
            found.refused = found.refused or "forward has a with or try block"
        elif step.opname == "IS_OP" and not _with_constant(steps, at):
            found.refused = found.refused or "forward compares identities"
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.globals_read.add(name)
            found.chains.add((name, *_attributes(steps, at + 1)))
            found.builtins |= {name} & ANSWERED
        elif varkw and step.opname.startswith("LOAD_FAST") and varkw in _names(step):
            after = steps[at + 1].opname if at + 1 < len(steps) else ""
            found.splats_only &= after.startswith(("DICT_MERGE", "CALL_FUNCTION_EX")) and step.argval == varkw
        if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            root = _names(step)[-1]
            if root in code.co_freevars or (root in arguments and root not in stores):
                found.local_chains.add((root, *_attributes(steps, at + 1)))
        tested = _none_test(steps, at)
        if tested is None:
            continue
        if tested == "":
            found.refused = found.refused or "forward compares a computed value with None"
        elif tested in stores:
            early = tested in arguments and all(s > at for s in stores[tested])
            if tested in arguments:
                found.none_tested.add(tested)
            if not early and not all(_harmless(steps, s - 1) for s in stores[tested]):
                found.refused = found.refused or f"forward compares a computed value, {tested}, with None"
        elif tested in arguments:
            found.none_tested.add(tested)
        elif tested in code.co_freevars:
            found.none_tested_outside.add(tested)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            nested = scan_code(inner)
            found.refused = found.refused or nested.refused
            found.builtins |= nested.builtins
            found.globals_read |= nested.globals_read
            found.chains |= nested.chains
            found.local_chains |= {
                c for c in nested.local_chains if c[0] in inner.co_freevars and c[0] in code.co_freevars
            }
            found.imports |= nested.imports
            for name in nested.none_tested_outside:
                if name in arguments:
                    found.none_tested.add(name)
                if name in code.co_freevars:
                    found.none_tested_outside.add(name)
                elif not all(_harmless(steps, s - 1) for s in stores.get(name, ())):
                    found.refused = found.refused or f"forward compares a computed value, {name}, with None"
            if varkw and varkw in inner.co_freevars:
                found.splats_only = False
    return found


def _attributes(steps: list[dis.Instruction], at: int) -> Iterator[str]:
    """Names of the attributes read of what the step before `at` leaves."""
    while at < len(steps) and steps[at].opname.startswith(("LOAD_ATTR", "LOAD_METHOD")):
        yield steps[at].argval
        at += 1


def _with_constant(steps: list[dis.Instruction], at: int) -> bool:
    """Whether `is` has None on its right, or on its left something that the trace sees for what it is."""
    right = steps[at - 1]
    if right.opname.startswith("LOAD_CONST") and right.argval is None:
        return True
    return right.opname.startswith(("LOAD_CONST", "LOAD_GLOBAL")) and _harmless(steps, at - 2)


def _none_test(steps: list[dis.Instruction], at: int) -> str | None:
    """The local a step compares with None; "" for something computed; None when it is no such test."""
    step = steps[at]
    if "IF_NONE" in step.opname or "IF_NOT_NONE" in step.opname:
        operand = at - 1
    elif step.opname == "IS_OP" and steps[at - 1].opname.startswith("LOAD_CONST") and steps[at - 1].argval is None:
        operand = at - 2
    else:
        return None
    load = steps[operand]
    if load.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE")):
        return _names(load)[-1]
    return None if _harmless(steps, operand) or load.opname.startswith("LOAD_GLOBAL") else ""


def _harmless(steps: list[dis.Instruction], at: int) -> bool:
    """Whether the value a step leaves is a constant, `self.a.b` or `getattr(self, ...)`: the trace sees those."""
    if steps[at].opname.startswith("LOAD_CONST"):
        return True
    if steps[at].opname.startswith("CALL"):
        called = [s for s in steps[max(0, at - 6) : at] if s.opname not in ("PUSH_NULL", "KW_NAMES")][-4:]
        names = [s.argval for s in called]
        return any(
            name == "getattr" and k + 1 < len(called) and _names(called[k + 1])[-1:] == ("self",)
            for k, name in enumerate(names)
        )
    while at > 0 and steps[at].opname.startswith("LOAD_ATTR"):
        at -= 1
    return steps[at].opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and _names(steps[at])[-1] == "self"


def _names(step: dis.Instruction) -> tuple[str, ...]:
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def varkw_of(code: types.CodeType) -> str | None:
    if not code.co_flags & 0x08:
        return None
    return code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 0x04)]
