"""What an activation is: `Spec`, one entry of the registry, and `Activation`, an entry with its settings."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Keeps = Literal["input", "output"]


@dataclass(frozen=True)
class Spec:
    """One entry of the registry.

    `reference` is the very op eager calls, as `reference(z, *params)`. `keeps` names what eager's backward reads, so
    that later in-place edits are as legal here as there. `backward(grad, output, *params)` is needed only where the
    output is kept: a differentiable composite for higher derivatives. `module_types` are exact types, or dotted names
    of library classes (so that the library need not be importable); their settings are attributes named as `params`.
    """

    name: str
    reference: Callable[..., Tensor]
    keeps: Keeps = "input"
    backward: Callable[..., Tensor] | None = None
    params: Mapping[str, float] = field(default_factory=dict)
    module_types: tuple[type | str, ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()
    methods: tuple[str, ...] = ()
    requires: Mapping[str, Any] = field(default_factory=dict)
    """Settings that must have exactly this value for the entry to apply, such as `approximate="tanh"`."""
    positional: tuple[str, ...] | None = None
    """What functions and methods take by position after the input; default: the params, then `inplace`."""
    accepts: Callable[..., bool] | None = None
    """`accepts(*params)`: settings torch gives a meaning to; others raise, and are not recognised."""
    kernel: str | None = None
    """Name in `kernels/activations.py`; the entry's own name unless two entries share one."""
    autocast_fp32: frozenset[str] = frozenset()
    """Device types on which autocast runs this activation in float32 and returns float32."""

    @property
    def call_order(self) -> tuple[str, ...]:
        return (*self.params, "inplace") if self.positional is None else self.positional

    def takes(self, values: tuple[float, ...]) -> bool:
        """Whether these are settings this entry has a meaning for."""
        return not any(map(math.isnan, values)) and (self.accepts is None or self.accepts(*values))


SPECS: dict[str, Spec] = {}
_changed: list[Callable[[], None]] = []


def register(spec: Spec) -> Spec:
    """Adds an activation to the registry.

    Raises:
        ValueError: the name is taken, or an output-keeping entry comes without its `backward`.
    """
    if spec.name in SPECS:
        raise ValueError(f"activation {spec.name!r} is already registered")
    if spec.keeps == "output" and spec.backward is None:
        raise ValueError(f"activation {spec.name!r} keeps its output, so it needs a backward")
    SPECS[spec.name] = spec
    for forget in _changed:
        forget()
    return spec


def on_change(forget: Callable[[], None]) -> None:
    """Calls `forget` whenever an entry is added: tables derived from the registry are then out of date."""
    _changed.append(forget)


def names() -> list[str]:
    """Names of all registered activations, sorted."""
    return sorted(SPECS)


@dataclass(frozen=True)
class Activation:
    """An activation with its settings: hashable, comparable, callable as its torch reference.

    >>> Activation("leaky_relu", (0.2,))(torch.tensor([-1.0, 1.0]))
    tensor([-0.2000,  1.0000])

    Raises:
        ValueError: no activation of that name, too many settings, or settings torch gives no meaning to.
    """

    name: str
    params: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        spec = _spec(self.name)
        defaults = tuple(spec.params.values())
        if len(self.params) > len(defaults):
            raise ValueError(f"activation {self.name!r} takes {len(defaults)} parameters, got {len(self.params)}")
        filled = tuple(float(p) for p in self.params) + defaults[len(self.params) :]
        if not spec.takes(filled):
            shown = ", ".join(f"{k}={v:g}" for k, v in zip(spec.params, filled, strict=True))
            raise ValueError(f"activation {self.name!r} has no meaning for {shown}")
        object.__setattr__(self, "params", filled)

    @property
    def spec(self) -> Spec:
        return SPECS[self.name]

    @property
    def keeps(self) -> Keeps:
        return self.spec.keeps

    def __call__(self, z: Tensor) -> Tensor:
        return self.spec.reference(z, *self.params)

    def backward(self, grad: Tensor, kept: Tensor) -> Tensor:
        """Gradient with respect to the input, from what is kept, in differentiable torch ops."""
        spec = self.spec
        if spec.backward is not None:
            return spec.backward(grad, kept, *self.params)
        with torch.enable_grad():
            z = kept.view_as(kept) if kept.requires_grad else kept.detach().requires_grad_()
            (dz,) = torch.autograd.grad(self(z), z, grad, create_graph=True)
        return dz

    def __str__(self) -> str:
        shown = ", ".join(f"{k}={v:g}" for k, v in zip(self.spec.params, self.params, strict=True))
        return f"{self.name}({shown})" if shown else self.name


def _spec(name: str) -> Spec:
    try:
        return SPECS[name]
    except KeyError:
        near = difflib.get_close_matches(name, SPECS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown activation {name!r}{hint} (known: {', '.join(names())})") from None
