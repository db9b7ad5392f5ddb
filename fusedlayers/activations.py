"""The one list of activations: what each computes, what its backward keeps, and how it is recognised in a model.

Adding an activation is one `Spec` here (and, for the Triton route, its value and gradient in `kernels/activations.py`
under the same name). Every op, layer and patching rule then knows it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    kernel: str | None = None
    """Name in `kernels/activations.py`; the entry's own name unless two entries share one."""
    autocast_fp32: frozenset[str] = frozenset()
    """Device types on which autocast runs this activation in float32 and returns float32."""


_SPECS: dict[str, Spec] = {}


def register(spec: Spec) -> Spec:
    """Adds an activation to the registry.

    Raises:
        ValueError: the name is taken, or an output-keeping entry comes without its `backward`.
    """
    if spec.name in _SPECS:
        raise ValueError(f"activation {spec.name!r} is already registered")
    if spec.keeps == "output" and spec.backward is None:
        raise ValueError(f"activation {spec.name!r} keeps its output, so it needs a backward")
    _SPECS[spec.name] = spec
    _forget_lookups()
    return spec


def names() -> list[str]:
    """Names of all registered activations, sorted."""
    return sorted(_SPECS)


@dataclass(frozen=True)
class Activation:
    """An activation with its settings: hashable, comparable, callable as its torch reference.

    >>> Activation("leaky_relu", (0.2,))(torch.tensor([-1.0, 1.0]))
    tensor([-0.2000,  1.0000])
    """

    name: str
    params: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        spec = _spec(self.name)
        defaults = tuple(spec.params.values())
        if len(self.params) > len(defaults):
            raise ValueError(f"activation {self.name!r} takes {len(defaults)} parameters, got {len(self.params)}")
        filled = tuple(float(p) for p in self.params) + defaults[len(self.params) :]
        object.__setattr__(self, "params", filled)

    @property
    def spec(self) -> Spec:
        return _SPECS[self.name]

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
        return _SPECS[name]
    except KeyError:
        near = difflib.get_close_matches(name, _SPECS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown activation {name!r}{hint} (known: {', '.join(names())})") from None


def get(activation: str | Activation | nn.Module | None) -> Activation:
    """The `Activation` for a name, an `Activation`, or a torch activation module; `None` is the identity.

    Raises:
        ValueError: no activation of that name, or a module whose settings cannot be represented.
        TypeError: something else.
    """
    if type(activation) is str:
        found = _BY_NAME.get(activation)
        if found is None:
            found = _BY_NAME[activation] = Activation(activation)
        return found
    if isinstance(activation, Activation):
        return activation
    if activation is None:
        return get("identity")
    if isinstance(activation, nn.Module):
        found = recognise(activation)
        if found is None:
            raise ValueError(
                f"{activation!r} is not an activation this library can represent (known: {', '.join(names())})"
            )
        return found
    raise TypeError(
        f"activation must be a name, an Activation or a torch activation module, not {type(activation).__name__}"
    )


def recognise(what: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> Activation | None:
    """The activation that a module, or a call `what(z, *args, **kwargs)`, computes; `None` when it is not one.

    `what` is a module (exact type only), a function such as `F.gelu`, or the name of a tensor method. Settings that
    cannot be represented (a tensor, an unknown mode, randomness in training) give `None`, never a guess.
    """
    if isinstance(what, nn.Module):
        cls = type(what)
        specs = _BY_TYPE.get(cls) or _BY_TYPE.get(f"{cls.__module__}.{cls.__qualname__}") or ()
        return _match(specs, lambda name, default: getattr(what, name, default))
    specs = _BY_METHOD.get(what, ()) if isinstance(what, str) else _by_function(what)
    if not specs:
        return None
    given = dict(kwargs or {})
    settings = list(specs[0].params) or list(specs[0].requires)
    given.update(zip([*settings, "inplace"], args, strict=False))
    if len(args) > len(settings) + 1 or set(given) - {*settings, "inplace"}:
        return None
    return _match(specs, lambda name, default: given.get(name, default))


def is_inplace(what: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether the module, function call or method call recognised above overwrites its input."""
    if isinstance(what, nn.Module):
        return bool(getattr(what, "inplace", False))
    name = what if isinstance(what, str) else getattr(what, "__name__", "")
    if name.endswith("_"):
        return True
    given = dict(kwargs or {})
    if "inplace" in given:
        return bool(given["inplace"])
    found = recognise(what, args, kwargs)
    return found is not None and len(args) > len(found.params) and bool(args[len(found.params)])


def _match(specs: tuple[Spec, ...], setting: Callable[[str, Any], Any]) -> Activation | None:
    for spec in specs:
        if any(setting(name, _DEFAULTS.get(name)) != wanted for name, wanted in spec.requires.items()):
            continue
        values = [setting(name, default) for name, default in spec.params.items()]
        if all(isinstance(v, (int, float)) for v in values):
            return Activation(spec.name, tuple(float(v) for v in values))
    return None


def _by_function(function: Any) -> tuple[Spec, ...]:
    try:
        return _BY_FUNCTION.get(function, ())
    except TypeError:  # an unhashable callable is nobody's activation
        return ()


def _forget_lookups() -> None:
    _BY_NAME.clear()
    for table, keys in ((_BY_TYPE, "module_types"), (_BY_FUNCTION, "functions"), (_BY_METHOD, "methods")):
        table.clear()
        for spec in _SPECS.values():
            for key in getattr(spec, keys):
                table[key] = (*table.get(key, ()), spec)


_DEFAULTS: dict[str, Any] = {"approximate": "none", "training": False}
_BY_NAME: dict[str, Activation] = {}
_BY_TYPE: dict[Any, tuple[Spec, ...]] = {}
_BY_FUNCTION: dict[Any, tuple[Spec, ...]] = {}
_BY_METHOD: dict[str, tuple[Spec, ...]] = {}

aten = torch.ops.aten

register(Spec("identity", lambda z: z, keeps="output", backward=lambda g, y: g, module_types=(nn.Identity,)))
register(
    Spec(
        "relu",
        F.relu,
        keeps="output",
        backward=lambda g, y: aten.threshold_backward(g, y, 0),
        module_types=(nn.ReLU,),
        functions=(F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_),
        methods=("relu", "relu_"),
    )
)
register(
    Spec(
        "leaky_relu",
        F.leaky_relu,
        params={"negative_slope": 0.01},
        module_types=(nn.LeakyReLU,),
        functions=(F.leaky_relu, F.leaky_relu_),
    )
)
register(Spec("gelu", F.gelu, requires={"approximate": "none"}, module_types=(nn.GELU,), functions=(F.gelu,)))
register(
    Spec(
        "gelu_tanh",
        lambda z: F.gelu(z, approximate="tanh"),
        requires={"approximate": "tanh"},
        module_types=(nn.GELU,),
        functions=(F.gelu,),
    )
)
register(Spec("silu", F.silu, module_types=(nn.SiLU,), functions=(F.silu,)))
register(
    Spec(
        "sigmoid",
        torch.sigmoid,
        keeps="output",
        backward=aten.sigmoid_backward,
        module_types=(nn.Sigmoid,),
        functions=(torch.sigmoid, F.sigmoid, torch.sigmoid_, Tensor.sigmoid, Tensor.sigmoid_),
        methods=("sigmoid", "sigmoid_"),
    )
)
register(
    Spec(
        "tanh",
        torch.tanh,
        keeps="output",
        backward=aten.tanh_backward,
        module_types=(nn.Tanh,),
        functions=(torch.tanh, F.tanh, torch.tanh_, Tensor.tanh, Tensor.tanh_),
        methods=("tanh", "tanh_"),
    )
)
