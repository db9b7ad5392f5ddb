"""A norm that one product alone reads, under autocast.

On a GPU autocast computes the norm in float32, writes that, and then casts it down for the product. Written in the low
dtype at once the value is rounded once, as before, its gradient comes back in the same dtype, and two passes are saved.
With several readers eager adds up their gradients in float32, so that those norms stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from ...ops.layer_norm import layer_norm
from ...ops.rms_norm import rms_norm
from .. import effects
from ..guards import member_problem, original_class
from ..pattern import add, leaf, through, value
from ..rule import NO_MATCH, Call, Match, Rule, register_rule
from .layer_norm import NORMS, _obstacle

PRODUCTS = ("mlp", "linear_act", "gated_mlp", "chunked_mlp", "chunked_mlp_gate_last")
"""Rules whose fused op begins with products of what it is given."""


def low_norm(layer: Any, x: Tensor) -> Tensor:
    return _norm(layer, x, None, _product_dtype(x))


def add_low_norm(layer: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of `x + residual` in the dtype of the product, and that sum."""
    if x.shape != residual.shape:
        total = x + residual
        return low_norm(layer, total), total
    return _norm(layer, x, residual, _product_dtype(x, residual))


def _product_dtype(*tensors: Tensor) -> torch.dtype | None:
    """What autocast casts these down to for a product; None where it does not."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return None
    low = torch.get_autocast_dtype(device)
    return low if all(t.dtype in (torch.float32, low) for t in tensors) else None


def _norm(layer: Any, x: Tensor, residual: Tensor | None, out_dtype: torch.dtype | None) -> Any:
    shape, weight, eps = layer.normalized_shape, layer.weight, layer.eps
    if isinstance(layer, nn.LayerNorm):
        return layer_norm(x, shape, weight, layer.bias, eps, residual, out_dtype=out_dtype)
    return rms_norm(x, shape, weight, eps, residual, out_dtype=out_dtype)


def _reader(m: Match) -> Node | None:
    """The one product that reads the norm, if that is what reads it."""
    node = dict(m.state.nodes)["norm"]
    reader = next(iter(node.users), None)
    if len(node.users) != 1 or reader.all_input_nodes != [node]:
        return None
    if reader.meta.get("fused") in PRODUCTS:
        return reader
    if reader.op != "call_module" or len(reader.args) != 1 or reader.kwargs:
        return None
    product = effects.child(m.module, reader.target)
    plain = product is not None and original_class(product) is nn.Linear
    return reader if plain and member_problem(product, reader.target) is None else None


def _hold(m: Match) -> None:
    """The fused path is for this product only: guards it, unless it is fused itself and so guarded already."""
    reader = _reader(m)
    if reader.op == "call_module":
        m.child(*reader.target.split("."))


@register_rule
class AddNormForProduct(Rule):
    """`fc(norm(x + residual))`: under autocast the norm is written in the product's dtype."""

    pattern = leaf("norm", *NORMS, pins=("_fast_norm",))(add("sum")(through(value("x")), through(value("residual"))))
    outputs = ("norm", "sum")
    priority = 12

    def check(self, m: Match) -> str | None:
        apt = effects.is_data(m.x) and effects.is_data(m.residual) and _obstacle(m.norm.module) is None
        return None if apt and _reader(m) is not None else NO_MATCH

    def fuse(self, m: Match) -> Call:
        _hold(m)
        return m.call(add_low_norm, m.norm, m.x, m.residual)


@register_rule
class NormForProduct(Rule):
    """`fc(norm(x))`: likewise."""

    pattern = leaf("norm", *NORMS, pins=("_fast_norm",))(value("x"))
    priority = 4

    def check(self, m: Match) -> str | None:
        return None if _obstacle(m.norm.module) is None and _reader(m) is not None else NO_MATCH

    def fuse(self, m: Match) -> Call:
        _hold(m)
        return m.call(low_norm, m.norm, m.x)
