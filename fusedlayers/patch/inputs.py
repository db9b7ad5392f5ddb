"""What a module was called with, kept so that any number of runs find it as the first one did."""

from __future__ import annotations

import io
import pickle
import types
from typing import Any

import torch
from torch import Tensor, nn

_AS_IT_IS = (
    nn.Module, nn.Parameter, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    types.GeneratorType, torch.Generator,
)  # fmt: skip


class Inputs:
    """Arguments as they were when they were first given: containers and caches anew for each run, on tensors out of
    their graphs, modules and parameters as they are. What cannot be copied is the same in every run.

    Args:
        lasting: whether whoever gave the tensors may go on to edit them, so that they are cloned at once.

    Attributes:
        edited: whether runs write to the tensors, so that each is given its own. `settle` finds out.
    """

    def __init__(self, args: Any, kwargs: Any, lasting: bool = False) -> None:
        self.edited, self._made = True, dict[int, Any]()
        self._kept, self._pickled = _pickled((args, kwargs))
        for i, t in enumerate(self._kept):
            if _is_data(t):
                with torch.no_grad():
                    own = _clone(t) if lasting else t.detach()
                self._kept[i] = own.requires_grad_(t.requires_grad)

    def fresh(self) -> tuple[Any, Any]:
        """`(args, kwargs)` for one run; the gradient of a tensor's clone is that of the tensor."""
        with torch.enable_grad():
            given, self._made = _loaded(self._pickled, self._kept, self.edited)
        return given

    def settle(self) -> None:
        """Looks at what the first run was given: whether it wrote to any of it."""
        self.edited = any(_is_data(t) and _written(self._kept[i], t) for i, t in self._made.items())
        self._made = {}

    @property
    def wanted(self) -> list[Tensor]:
        """The tensors that get a gradient."""
        return [t for t in self._kept if _is_data(t) and t.requires_grad]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [t for t in self._kept if isinstance(t, nn.Parameter)]


def _is_data(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def _written(kept: Tensor, given: Tensor) -> bool:
    """Whether anything wrote to a clone since it was made."""
    if not given.is_inference() and given._version > 0:
        return True
    try:
        return not torch.equal(kept, given)  # torch counts no writes to inference tensors, nor through `data` and numpy
    except RuntimeError:  # of a layout that has no such comparison
        return True


def _clone(t: Tensor) -> Tensor:
    """A copy that lies as the original does, where that is expanded or has gaps too."""
    copy = t.clone()
    if type(t) is not Tensor or t.layout is not torch.strided or copy.stride() == t.stride() or not t.numel():
        return copy
    span = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((span,), (1,)).clone().as_strided(t.shape, t.stride())


def _pickled(value: Any) -> tuple[list[Any], bytes]:
    """What is kept as it is, and the rest; where something cannot be pickled, that is plain containers alone."""
    try:
        return _dumped(value, (Tensor, *_AS_IT_IS), ())
    except Exception:
        return _dumped(value, object, (tuple, list, dict))


def _dumped(value: Any, kept: Any, pickled: tuple[type, ...]) -> tuple[list[Any], bytes]:
    """`kept`: kinds that are kept as they are, but for those exactly of a type in `pickled`."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.kept, pickler.places, pickler.kinds, pickler.pickled = [], {}, kept, pickled
    pickler.dump(value)
    _loaded(buffer.getvalue(), pickler.kept, False)  # what comes back as nothing, or not at all, is seen now
    return pickler.kept, buffer.getvalue()


def _loaded(pickled: bytes, kept: list[Any], edited: bool) -> tuple[Any, dict[int, Any]]:
    """What was pickled, and which of the kept it was given."""
    loader = _Unpickler(io.BytesIO(pickled))
    loader.kept, loader.edited, loader.made = kept, edited, {}
    return loader.load(), loader.made


class _Pickler(pickle.Pickler):
    kept: list[Any]
    places: dict[int, int]
    kinds: Any
    pickled: tuple[type, ...]

    def persistent_id(self, value: Any) -> int | None:
        if type(value) in self.pickled or not (isinstance(value, self.kinds) or type(value) is object):
            return None  # a bare object is a mark, known by its identity
        place = self.places.setdefault(id(value), len(self.kept))
        if place == len(self.kept):
            self.kept.append(value)
        return place


class _Unpickler(pickle.Unpickler):
    kept: list[Any]
    edited: bool
    made: dict[int, Any]

    def persistent_load(self, place: int) -> Any:
        if place not in self.made:
            value = self.kept[place]
            self.made[place] = _clone(value) if self.edited and _is_data(value) else value
        return self.made[place]
