"""A norm that one product alone reads, under autocast.

On a GPU autocast computes the norm in float32, writes that, and then casts it down for the product. Written in the low
dtype at once the value is rounded once, as before, its gradient comes back in the same dtype, and two passes are saved.

The product is seen wherever it is: in the same forward, or at the bottom of child modules (attention, an MLP) that do
nothing else with their argument. With several products eager adds up their gradients in float32. Added in the low
dtype, the input's gradient is 1.3 times as far off for two products and 1.45 times for three, in its worst element two
to three times: norms with several products behind them stay as they are. A fused gated MLP adds its two up itself,
in the low dtype, whatever it is given: it counts as one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops import _route
from ...ops.rms_norm import rms_norm
from .. import effects
from ..pattern import Pattern, add, leaf, through, value
from ..readers import Unfit, readers
from ..rule import NO_MATCH, Call, Match, Rule, register_rule
from .layer_norm import NORMS, _obstacle, after_dropout, dropout_problem, dropped_norm, norm
from .layer_norm_2d import LAYER_NORMS_2D
from .mlp import GatedMlp
from .residual import rate
from .rms_forms import _problem, form_of, is_written_rms_norm, rounds_to_weight

Held = Callable[[nn.Module], bool] | None
WIDE = "in float32 under autocast"


def low_norm(layer: Any, x: Tensor, module: nn.Module, held: Held) -> Tensor:
    """The norm of x in the dtype of the product; as eager gives it where `held(module)` no longer is true."""
    return norm(layer, x, out_dtype=_product_dtype(module, held, x))


def low_norm_passing(layer: Any, x: Tensor, module: nn.Module, held: Held) -> tuple[Tensor, Tensor]:
    """`low_norm` of x, and x itself for the additions that read it after the norm."""
    return norm(layer, x, out_dtype=_product_dtype(module, held, x), passes=True)


def add_low_norm(layer: Any, x: Tensor, residual: Tensor, module: nn.Module, held: Held) -> tuple[Tensor, Tensor]:
    """Likewise of `x + residual`, and that sum."""
    if x.shape != residual.shape:
        total = x + residual
        return low_norm(layer, total, module, held), total
    return norm(layer, x, residual, out_dtype=_product_dtype(module, held, x, residual))


def drop_add_low_norm(
    layer: Any, x: Tensor, residual: Tensor, drop: nn.Module | float, module: nn.Module, held: Held
) -> tuple[Tensor, Tensor]:
    """Likewise of `drop(x) + residual`."""
    p = rate(drop)
    if not p:
        return add_low_norm(layer, x, residual, module, held)
    if x.shape != residual.shape:
        total = F.dropout(x, p, True) + residual
        return low_norm(layer, total, module, held), total
    return dropped_norm(layer, x, residual, p, _product_dtype(module, held, x, residual))


def low_norm_2d(layer: Any, x: Tensor, module: nn.Module, held: Held) -> Tensor:
    """`low_norm` over the channels of images."""
    return low_norm(layer, x.permute(0, 2, 3, 1), module, held).permute(0, 3, 1, 2)


def low_written_norm(form: Any, eps: str, layer: Any, x: Tensor, module: nn.Module, held: Held) -> Tensor:
    """`low_norm` of an RMS norm as transformers writes it."""
    return form(layer, x, None, getattr(layer, eps), _writing(_product_dtype(module, held, x)))


def add_low_written_norm(
    form: Any, eps: str, layer: Any, x: Tensor, residual: Tensor, module: nn.Module, held: Held
) -> tuple[Tensor, Tensor]:
    """`add_low_norm` of an RMS norm as transformers writes it."""
    if x.shape != residual.shape:
        total = x + residual
        return low_written_norm(form, eps, layer, total, module, held), total
    dtype = _product_dtype(module, held, x, residual)
    return form(layer, x, residual, getattr(layer, eps), _writing(dtype))


def _product_dtype(module: nn.Module, held: Held, *tensors: Tensor) -> torch.dtype | None:
    """What autocast casts these down to for a product; None where it does not, or something else reads them now."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # torch knows no autocast of meta tensors
        return None
    low = torch.get_autocast_dtype(device)
    if not all(t.dtype in (torch.float32, low) for t in tensors):
        return None
    # a compiler sees the cast by itself, and would have to guard all that is asked here
    return low if held is None or (not _route.is_compiling() and held(module)) else None


def _writing(out_dtype: torch.dtype | None) -> Callable[..., Any]:
    return rms_norm if out_dtype is None else functools.partial(_rms_norm_in, out_dtype)


def _rms_norm_in(low: torch.dtype, /, *args: Any, **settings: Any) -> Any:
    """`rms_norm` written in `low`, whatever dtype its form asks for."""
    return rms_norm(*args, **{**settings, "out_dtype": low})


def _objection(m: Match) -> str | None:
    """What is wrong with the readers, where they are products, or may be. Notes them down."""
    try:
        m.noted = found = readers(dict(m.state.nodes)["norm"], m.module, GatedMlp.pattern)
    except Unfit as unfit:
        return f"{WIDE}: {unfit}" if unfit.telling else NO_MATCH
    if found.blocked:
        return f"{WIDE}: {found.blocked[0]}"
    if found.products > 1:
        return f"{WIDE}: {found.products} products read it, whose gradients are added up in float32"
    return None if found.products else NO_MATCH


class _ForProduct(Rule):
    """What these rules have in common: the norm's class, and whether it is one that may be written so."""

    def fits(self, layer: nn.Module) -> bool:
        return _obstacle(layer) is None

    def check(self, m: Match) -> str | None:
        added = [v for name in ("x", "residual") if isinstance(v := getattr(m, name, None), torch.fx.Node)]
        if not self.fits(m.norm.module) or (self.outputs and not all(map(effects.is_data, added))):
            return NO_MATCH
        return _objection(m)


def _after_add(norm: Pattern) -> Pattern:
    return norm(add("sum")(through(value("x")), through(value("residual"))))


@register_rule
class AddNormForProduct(_ForProduct):
    """`fc(norm(x + residual))`, `fc` maybe inside child modules: under autocast the norm is written in its dtype."""

    pattern = _after_add(leaf("norm", *NORMS, pins=("_fast_norm",)))
    outputs = ("norm", "sum")
    priority = 12

    def fuse(self, m: Match) -> Call:
        return m.call(add_low_norm, m.norm, m.x, m.residual, m.own(), m.noted.held)


@register_rule
class DropAddNormForProduct(_ForProduct):
    """`fc(norm(dropout(x) + residual))`: under autocast the norm is written in the dtype of the product."""

    pattern = after_dropout(leaf("norm", *NORMS, pins=("_fast_norm",)), value("x"))
    outputs = ("norm", "sum")
    priority = 24
    random = True

    def check(self, m: Match) -> str | None:
        problem = dropout_problem(m)
        return super().check(m) if problem is None else problem

    def fuse(self, m: Match) -> Call:
        return m.call(drop_add_low_norm, m.norm, m.x, m.residual, m.drop, m.own(), m.noted.held)


@register_rule
class NormForProduct(_ForProduct):
    """`fc(norm(x))`: under autocast the norm is written in the dtype of the product."""

    pattern = leaf("norm", *NORMS, pins=("_fast_norm",))(value("x"))
    passes = "x"
    priority = 4

    def fuse(self, m: Match) -> Call:
        return m.call(low_norm_passing if m.passes else low_norm, m.norm, m.x, m.own(), m.noted.held)


@register_rule
class Norm2dForProduct(_ForProduct):
    """`conv(norm(x))`, a layer norm over dim 1 of `(N, C, H, W)`: written in the dtype of the product."""

    pattern = leaf("norm", *LAYER_NORMS_2D, pins=("_fast_norm",))(value("x"))
    priority = 4

    def fuse(self, m: Match) -> Call:
        return m.call(low_norm_2d, m.norm, m.x, m.own(), m.noted.held)


class _WrittenForProduct(_ForProduct):
    def fits(self, layer: nn.Module) -> bool:
        # T5's comes out in the dtype of its weight, whatever reads it
        return _problem(layer) is None and form_of(type(layer))[0] is not rounds_to_weight


@register_rule
class AddWrittenNormForProduct(_WrittenForProduct):
    """`fc(norm(x + residual))`, an RMS norm as transformers writes it: written in the dtype of the product."""

    pattern = _after_add(leaf("norm", is_written_rms_norm))
    outputs = ("norm", "sum")
    priority = 12

    def fuse(self, m: Match) -> Call:
        form = form_of(type(m.norm.module))
        return m.call(add_low_written_norm, *form, m.norm, m.x, m.residual, m.own(), m.noted.held)


@register_rule
class WrittenNormForProduct(_WrittenForProduct):
    """`fc(norm(x))`, an RMS norm as transformers writes it: written in the dtype of the product."""

    pattern = leaf("norm", is_written_rms_norm)(value("x"))
    priority = 4

    def fuse(self, m: Match) -> Call:
        return m.call(low_written_norm, *form_of(type(m.norm.module)), m.norm, m.x, m.own(), m.noted.held)
