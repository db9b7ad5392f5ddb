"""RMS norms as libraries write them out: where they round, what they add to the weight, and what dtype comes out.

There is one such class in nearly every model of transformers. A class is recognised by what it computes: a small
instance of it must give, bit for bit, what one of the forms below gives.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ...ops.rms_norm import _RMSNorm, rms_norm
from .. import effects
from ..pattern import add, leaf, through, value
from ..rule import Call, Match, Rule, register_rule

EPS = ("variance_epsilon", "eps")
T5 = "T5LayerNorm"
Norm = Callable[..., Any]


def rounds_first(layer: Any, x: Tensor, residual: Tensor | None, eps: float, norm: Norm = rms_norm) -> Any:
    """Llama's: rounded to the dtype of x, then the weight."""
    return norm(x, layer.weight.shape, layer.weight, eps, residual, cast_before_weight=True)


def offset_weight(layer: Any, x: Tensor, residual: Tensor | None, eps: float, norm: Norm = rms_norm) -> Any:
    """Gemma's: `1 + weight`, rounded last."""
    return norm(x, layer.weight.shape, layer.weight, eps, residual, offset=1.0)


def rounds_last(layer: Any, x: Tensor, residual: Tensor | None, eps: float, norm: Norm = rms_norm) -> Any:
    """OLMo's: the weight in float32, rounded last to the dtype of x."""
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    return norm(x, layer.weight.shape, layer.weight, eps, residual, out_dtype=dtype)


def rounds_to_weight(layer: Any, x: Tensor, residual: Tensor | None, eps: float, norm: Norm = rms_norm) -> Any:
    """T5's: rounded only for a weight in half precision, and then to its dtype."""
    weight, dtype = layer.weight, x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    if weight.dtype == dtype:
        return norm(x, weight.shape, weight, eps, residual, cast_before_weight=True)
    wide = weight.dtype.itemsize > 2
    out = torch.promote_types(torch.float32, torch.promote_types(dtype, weight.dtype)) if wide else weight.dtype
    found = norm(x, weight.shape, weight if wide else None, eps, residual, out_dtype=out)
    if wide:
        return found
    return weight * found if residual is None else (weight * found[0], found[1])


FORMS = (rounds_first, offset_weight, rounds_last, rounds_to_weight)


def _is_named_so(cls: type) -> bool:
    named = cls.__name__.endswith("RMSNorm") or cls.__name__ == T5
    return named and cls.__module__.startswith("transformers.models.")


def is_written_rms_norm(cls: type) -> bool:
    """Whether a class of transformers is one of the forms known here."""
    return _is_named_so(cls) and form_of(cls) is not None


@functools.cache
def form_of(cls: type) -> tuple[Callable[..., Any], str] | None:
    """The form a class computes and the name of its eps; None for any other class."""
    for eps in EPS:
        for form in FORMS:
            if _computes(cls, form, eps):
                return form, eps
    return None


def _expression(
    x: Tensor,
    shape: torch.Size,
    weight: Tensor | None,
    eps: float,
    residual: None,
    *,
    offset: float = 0.0,
    cast_before_weight: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The torch expression of the op, whatever route is forced."""
    return _RMSNorm.of(shape, eps, out_dtype, offset, cast_before_weight).reference(x, weight)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the caller's autocast, and without torch's word on which dtypes its own fused kernel takes."""
    with torch.autocast("cpu", enabled=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _computes(cls: type, form: Callable[..., Any], eps: str) -> bool:
    """Whether the class gives what the form gives, values and dtype, for these dtypes of input and weight."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    generator = torch.Generator(device="cpu").manual_seed(0)
    try:
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad(), _quiet():
            x, w = torch.randn(2, 64, 32, dtype=torch.float64, device="cpu", generator=generator).unbind()
            layer = cls.__new__(cls)
            nn.Module.__init__(layer)
            setattr(layer, eps, 0.03)
            for x_dtype, w_dtype in [(a, b) for a in kinds for b in kinds]:
                layer.weight = nn.Parameter(w[0].to(w_dtype))
                got, want = cls.forward(layer, x.to(x_dtype)), form(layer, x.to(x_dtype), None, 0.03, _expression)
                if got.dtype != want.dtype or not torch.equal(got, want):
                    return False
    except Exception:  # it wants more than a weight and an eps, or cannot run here
        return False
    return True


def written_norm(form: Callable[..., Any], eps: str, layer: Any, x: Tensor) -> Tensor:
    return form(layer, x, None, getattr(layer, eps))


def add_written_norm(
    form: Callable[..., Any], eps: str, layer: Any, x: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual`, and that sum."""
    if x.shape != residual.shape:
        total = x + residual
        return form(layer, total, None, getattr(layer, eps)), total
    return form(layer, x, residual, getattr(layer, eps))


def _problem(layer: Any) -> str | None:
    if form_of(type(layer)) is None:
        return f"{type(layer).__name__} computes something other than the RMS norms known here"
    plain = isinstance(layer._parameters.get("weight"), nn.Parameter) and layer.weight.dim() == 1
    return None if plain and len(layer._parameters) == 1 else "its weight is not one value per feature"


@register_rule
class AddWrittenNorm(Rule):
    """`norm(x + residual)` with an RMS norm as transformers writes it, where the sum may be read on."""

    pattern = leaf("norm", is_written_rms_norm)(add("sum")(through(value("x")), through(value("residual"))))
    outputs = ("norm", "sum")
    priority = 10

    def check(self, m: Match) -> str | None:
        if not (effects.is_data(m.x) and effects.is_data(m.residual)):
            return "what is added is not a tensor computed from the input"
        return _problem(m.norm.module)

    def fuse(self, m: Match) -> Call:
        form, eps = form_of(type(m.norm.module))
        return m.call(add_written_norm, form, eps, m.norm, m.x, m.residual)


@register_rule
class WrittenNorm(Rule):
    """An RMS norm as transformers writes it, with no residual add to take in."""

    target = (_is_named_so,)

    def check(self, m: Match) -> str | None:
        return _problem(m.module)

    def fuse(self, m: Match) -> Call:
        (x,) = m.inputs.values()
        return m.call(written_norm, *form_of(type(m.module)), m.own(), x)
