"""What running a forward on symbolic values may move outside them, and how that is noticed and put right."""

from __future__ import annotations

import collections
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


class Outside:
    """What running a forward may move besides its values: generators, which are put back, and autograd's count of
    functions, which tells that a `torch.autograd.Function` ran: only what is inside it was recorded."""

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
        self.numpy_state = self.numpy.get_state() if self.numpy else None
        self.begin()

    def begin(self) -> None:
        """Before each run; generators are as they were, or have been put back."""
        self.functions = torch._C._autograd._get_sequence_nr()

    def check(self) -> None:
        if torch._C._autograd._get_sequence_nr() != self.functions:
            raise Untraceable("forward runs a torch.autograd.Function")
        if self._moved() or random.getstate() != self.python:
            raise Untraceable("forward draws random numbers in Python")

    def _moved(self) -> bool:
        if self.numpy is None:
            return False
        now, before = self.numpy.get_state(), self.numpy_state
        return now[2:] != before[2:] or bool((now[1] != before[1]).any())

    def restore(self) -> None:
        if random.getstate() != self.python:
            random.setstate(self.python)
        if self._moved():
            self.numpy.set_state(self.numpy_state)
