"""What running a forward on symbolic values may move outside them, and how that is noticed and put right."""

from __future__ import annotations

import collections
import ctypes
import random
import sys
from typing import Any

import torch

from .shadow import Untraceable, plain


def written(given: Any, value: Any) -> bool:
    """Whether a list, dict, set or tuple lent to the forward no longer holds what the original does."""
    if type(given) is not type(value):
        return True
    if isinstance(given, dict):
        return given.keys() != value.keys() or any(written(given[k], v) for k, v in value.items())
    if isinstance(given, (list, tuple, collections.deque)):
        return len(given) != len(value) or any(written(g, v) for g, v in zip(given, value, strict=True))
    return given != value if isinstance(given, (set, frozenset)) else given is not value and not plain(given)


_MERSENNE = 624 * 4 + 4
"""Bytes of the state of numpy's MT19937: its words, and how many of them are used."""


class _Numpy:
    """The state of numpy's global generator. Asking numpy takes longer than tracing a small forward does: memory that
    the generator shows its users is read instead, and numpy asked where that differs."""

    _last: tuple[Any, bytes, Any] | None = None

    def __init__(self, module: Any) -> None:
        self.module = module
        before, last = self._look(), _Numpy._last
        if before is None or last is None or last[:2] != before:
            state = module.get_state(legacy=False)
            # a normal number that it has in store is not in that memory: it may be used up unseen
            before = None if before is not None and state["has_gauss"] else before
            _Numpy._last = None if before is None else (*before, state)
        else:
            state = last[2]
        self.before, self.state = before, state

    def _look(self) -> tuple[Any, bytes] | None:
        """The generator and its memory; None where it is another than numpy's own."""
        source = getattr(self.module, "get_bit_generator", lambda: None)()
        if type(source) is not getattr(self.module, "MT19937", None):
            return None
        return source, ctypes.string_at(source.ctypes.state_address, _MERSENNE)

    def moved(self) -> bool:
        if self.before is not None and self._look() == self.before:
            return False
        return not _alike(self.module.get_state(legacy=False), self.state)

    def restore(self) -> None:
        self.module.set_state(self.state)


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[k], b[k]) for k in a)
    return type(a) is type(b) and bool(sys.modules["numpy"].all(a == b))


class Outside:
    """What running a forward may move besides its values: generators, which are put back, and autograd's count of
    functions, which tells that a `torch.autograd.Function` ran: only what is inside it was recorded."""

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy = _Numpy(sys.modules["numpy"].random) if "numpy" in sys.modules else None
        self.begin()

    def begin(self) -> None:
        """Before each run; generators are as they were, or have been put back."""
        self.functions = torch._C._autograd._get_sequence_nr()
        self.settled = False

    def check(self) -> None:
        if torch._C._autograd._get_sequence_nr() != self.functions:
            raise Untraceable("forward runs a torch.autograd.Function")
        if (self.numpy is not None and self.numpy.moved()) or random.getstate() != self.python:
            raise Untraceable("forward draws random numbers in Python")
        self.settled = True

    def restore(self) -> None:
        """After each run, whose last step but this is `check`."""
        if self.settled:
            return
        if random.getstate() != self.python:
            random.setstate(self.python)
        if self.numpy is not None and self.numpy.moved():
            self.numpy.restore()
