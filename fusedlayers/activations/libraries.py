"""Activation classes of transformers and timm, by dotted name (neither need be installed) and by what they compute.

Left out on purpose: XIELU and PReLU (learned), SqrtSoftplus (its gradient is NaN where exp underflows, which the
kernels' arithmetic does not repeat) and timm's `*Me` classes (their own autograd Functions, with their own edges).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from .registry import Activation

_Find = Callable[[Any], Activation | None]


def _always(name: str) -> _Find:
    return lambda module: Activation(name)


def _gelu_erf(module: Any) -> Activation | None:
    if module.act is F.gelu:
        return Activation("gelu")
    return Activation("gelu_python") if getattr(module.act, "__name__", "") == "_gelu_python" else None


def _gelu_tanh(module: Any) -> Activation | None:
    act = module.act
    if isinstance(act, functools.partial):
        plain = act.func is F.gelu and not act.args and act.keywords == {"approximate": "tanh"}
        return Activation("gelu_tanh") if plain else None
    return Activation("gelu_new") if getattr(act, "__name__", "") == "_gelu_tanh_python" else None


def _mish(module: Any) -> Activation | None:
    if module.act is F.mish:
        return Activation("mish")
    return Activation("mish_softplus") if getattr(module.act, "__name__", "") == "_mish_python" else None


def _clipped(module: Any) -> Activation | None:
    return Activation("gelu_clipped", (module.min, module.max))


_TRANSFORMERS: dict[str, _Find] = {
    "AccurateGELUActivation": _always("gelu_new"),
    "ClippedGELUActivation": _clipped,
    "FastGELUActivation": _always("gelu_fast"),
    "GELUActivation": _gelu_erf,
    "GELUTanh": _gelu_tanh,
    "LaplaceActivation": _always("laplace"),
    "LinearActivation": _always("identity"),
    "MishActivation": _mish,
    "NewGELUActivation": _always("gelu_new"),
    "PytorchGELUTanh": _always("gelu_tanh"),
    "QuickGELUActivation": _always("quick_gelu"),
    "ReLUSquaredActivation": _always("relu_squared"),
    "SiLUActivation": _always("silu"),
}
_TIMM: dict[str, _Find] = {
    "GELU": _always("gelu"),
    "GELUTanh": _always("gelu_tanh"),
    "HardMish": _always("hard_mish"),
    "HardSigmoid": _always("hard_sigmoid"),
    "HardSwish": _always("hard_swish"),
    "Mish": _always("mish_softplus"),
    "QuickGELU": _always("quick_gelu"),
    "Sigmoid": _always("sigmoid"),
    "Swish": _always("swish"),
    "Tanh": _always("tanh"),
}
_FOLDERS = {
    "transformers.activations": _TRANSFORMERS,
    "timm.layers.activations": _TIMM,
    "timm.models.layers.activations": _TIMM,  # where it was before timm 0.8
}


def activation_of(module: nn.Module, path: str) -> Activation | None:
    """The activation a library's class stands for with this module's settings, if it is one of those above."""
    folder, _, name = path.rpartition(".")
    find = _FOLDERS.get(folder, {}).get(name)
    if find is None:
        return None
    try:
        return find(module)
    except (AttributeError, TypeError, ValueError):  # another version of the class: not the one known here
        return None


def computes(module: nn.Module, act: Activation) -> bool:
    """Whether the module's forward gives the values and gradients of `act` on a small float64 probe.

    The probe holds the kinks of every entry above and both tails.
    """
    values = [-40.0, -10.0, -6.0, -3.5, -3.0, -2.0, -1.0, -0.5, -1e-3, 0.0, 1e-3, 0.7, 1.0, 2.0, 3.0, 3.5, 6.0, 10.0]
    try:
        with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
            z = torch.tensor([*values, 21.0, 40.0], dtype=torch.float64, device="cpu", requires_grad=True)
            seen = [fn(z.clone()) for fn in (functools.partial(type(module).forward, module), act)]
            slopes = [torch.autograd.grad(y.sum(), z)[0] for y in seen]
            pairs = (seen, slopes)
            return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in pairs)
    except Exception:  # a class that cannot take the probe is not the one known here
        return False
