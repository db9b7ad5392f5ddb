"""What a forward's code does with one argument, for forwards that no trace gets through: attention, mostly.

Only the plainest code is understood: the argument is never assigned to, and wherever it stands it is asked for its
shape, or is all that a child is called with. That holds for every form of call at once.
"""

from __future__ import annotations

import dis
import types
from functools import lru_cache

from .scan import AMBIENT

BLIND = {"shape", "ndim", "device", "size", "dim", "ndimension", "numel", "nelement"}
"""Attributes and methods of a tensor that do not depend on its dtype."""

_NOT_STEPS = ("CACHE", "EXTENDED_ARG", "PRECALL", "RESUME", "NOP", "PUSH_NULL", "NOT_TAKEN")
_CALLS = ("CALL", "CALL_FUNCTION", "CALL_METHOD")
_REFLECTION = {"locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe"}


@lru_cache(maxsize=1024)
def called_with(function: types.FunctionType, argument: str) -> tuple[str, ...] | None:
    """Names of the children called with `argument`, one for each place in the code; None where that is not all."""
    code = function.__code__
    names = {*code.co_names}
    alters = names & ((AMBIENT - {"is_tensor"}) | _REFLECTION) or any("autocast" in name for name in names)
    blocks = any(s.opname.startswith(("SETUP_WITH", "BEFORE_WITH", "LOAD_SPECIAL")) for s in dis.get_instructions(code))
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if alters or blocks or argument not in parameters[1:] or {argument, parameters[0]} & {*code.co_cellvars}:
        return None
    if code.co_flags & (0x20 | 0x80 | 0x200):  # a generator or a coroutine
        return None
    steps = [s for s in dis.get_instructions(code) if s.opname not in _NOT_STEPS]
    children: list[str] = []
    for at, step in enumerate(steps):
        stored, loaded = _locals(step)
        if {argument, parameters[0]} & {*stored}:
            return None
        if argument not in loaded:
            continue
        if loaded.index(argument) + 1 != len(loaded) or at + 1 == len(steps):
            return None
        after = steps[at + 1]
        if after.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")) and after.argval in BLIND:
            continue
        child = _child(steps, at, parameters[0])
        if child is None:
            return None
        children.append(child)
    return tuple(children)


def _locals(step: dis.Instruction) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Locals that a step stores or deletes, and those it loads, the last on top of the stack."""
    if "_FAST" not in step.opname:
        return (), ()
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    if step.opname.startswith("STORE_FAST_LOAD_FAST"):
        return names[:1], names[1:]
    return ((), names) if step.opname.startswith("LOAD_FAST") else (names, ())


def _child(steps: list[dis.Instruction], at: int, own: str) -> str | None:
    """The name of the child in `self.child(x)` where step `at` loads x."""
    if at < 2 or at + 1 >= len(steps):
        return None
    owner, attribute, load, call = steps[at - 2 : at + 2]
    whole = not any(s.is_jump_target for s in (attribute, load, call)) and load.argval == _locals(load)[1][0]
    fetched = _locals(owner)[1][-1:] == (own,) and attribute.opname.startswith(("LOAD_ATTR", "LOAD_METHOD"))
    return attribute.argval if whole and fetched and call.opname in _CALLS and call.arg == 1 else None
