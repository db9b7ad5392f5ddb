"""Random draws of one run of a model, told again to another run that computes in another dtype.

What a generator gives depends on the dtype drawn in, so a float64 run from the same random state would drop other
elements. `Recording` notes what every random op of a run drew; `Replaying` hands that to the same ops of the next run,
which then touches no generator. Where the two runs do not draw alike, or a draw never leaves its kernel, they raise:
there is a faithful replay or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_dropout = torch.ops.aten.native_dropout.default
_which_attention = torch.ops.aten._fused_sdp_choice.default

PLAIN = frozenset(
    [
        "bernoulli",
        "binomial",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "multinomial",
        "normal",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "randperm",
        "random",
        "uniform",
    ]
)
"""Ops that give a draw and nothing else: the values of one run can stand in another."""

_NOT_DROPPING = {"dropout_p": 0, "dropout": 0, "train": False, "training": False}
"""Arguments by which an op that can draw says that it does not."""


class CannotReplay(RuntimeError):
    """A draw that cannot be told apart from what was computed with it, or one that the other run did not make."""


class Recording(TorchDispatchMode):
    """Notes the draws of what runs under it, in order; every op runs as it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[tuple[Any, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draws = _draws(func, args, kwargs)
        result = func(*args, **kwargs)
        if draws:
            drawn = result[1] if func is _dropout else result
            # cloned, since noise is scaled in place afterwards
            kept = drawn.to(torch.bool) if _name(func) == "bernoulli" else drawn.detach().clone()
            self.draws.append((_signature(func, args, kwargs), kept))
        return result


class Replaying(TorchDispatchMode):
    """Gives the ops under it the draws of a `Recording`, in the dtype they are asked for in."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._draws = list(recording.draws)
        self._next = 0

    @property
    def finished(self) -> bool:
        """Whether every draw has been used."""
        return self._next == len(self._draws)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        signature = _signature(func, args, kwargs)
        if self.finished or self._draws[self._next][0] != signature:
            raise CannotReplay(f"{func} draws here, which it did not in the run recorded")
        drawn = self._draws[self._next][1]
        self._next += 1
        if func is _dropout:
            x, p = args[:2]
            return x * drawn * (0.0 if p == 1 else 1.0 / (1.0 - p)), drawn
        into = kwargs.get("out", args[0] if _in_place(func) else None)
        if into is not None:
            return into.copy_(drawn)
        return drawn.to(_dtype(drawn, args, kwargs), copy=True)


def _name(func: Any) -> str:
    if getattr(func, "namespace", "") != "aten":
        return ""
    return func.overloadpacket.__name__.removesuffix("_")


def _in_place(func: Any) -> bool:
    return func.overloadpacket.__name__.endswith("_")


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call draws.

    Raises:
        CannotReplay: it does, and what it drew does not show.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()) or func is _which_attention:
        return False
    given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    given.update(zip((a.name for a in func._schema.arguments), args, strict=False))
    given.update(kwargs)
    # `None` for `train` means training
    if any(given.get(key) is not None and given[key] == value for key, value in _NOT_DROPPING.items()):
        return False
    # a normal draw around a tensor of means is no plain one
    plain = _name(func) in PLAIN and not func._overloadname.startswith(("Tensor_", "float_Tensor"))
    if func is not _dropout and not plain:
        raise CannotReplay(f"what {func} draws does not show")
    return True


def _signature(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What two calls that draw alike have in common: everything but dtypes, places and the tensors' values."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return tuple(value.shape)
        if isinstance(value, (list, tuple)):
            return tuple(map(plain, value))
        return value if isinstance(value, (bool, int, float)) else None

    return func, plain(args), tuple((key, plain(value)) for key, value in sorted(kwargs.items()))


def _dtype(drawn: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype:
    """The dtype the call would have given: what it asks for, else that of the tensor it is like."""
    if kwargs.get("dtype") is not None:
        return kwargs["dtype"]
    like = args[0].dtype if args and isinstance(args[0], Tensor) else drawn.dtype
    # indices are int64 whatever they are drawn from
    return like if drawn.dtype is torch.bool or drawn.is_floating_point() else drawn.dtype
