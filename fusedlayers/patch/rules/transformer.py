"""`nn.TransformerEncoderLayer` while it trains; evaluation stays torch's, whose fast path decides for itself."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ... import functional as fused
from ...activations import Activation, recognise
from ..pattern import settings_of
from ..rule import Call, Match, Rule, register_rule
from .layer_norm import LAYER_NORMS, drop_add_norm, norm
from .residual import rate

FORWARD = nn.TransformerEncoderLayer.forward


def encoder_layer(
    layer: nn.TransformerEncoderLayer,
    activation: Activation,
    src: Tensor,
    src_mask: Tensor | None,
    src_key_padding_mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """The layer's forward, each residual add with its dropout and the norm after it."""
    if not layer.training:
        return FORWARD(layer, src, src_mask, src_key_padding_mask, is_causal)
    padding = F._canonical_mask(
        mask=src_key_padding_mask,
        mask_name="src_key_padding_mask",
        other_type=F._none_or_dtype(src_mask),
        other_name="src_mask",
        target_type=src.dtype,
    )
    mask = F._canonical_mask(
        mask=src_mask, mask_name="src_mask", other_type=None, other_name="", target_type=src.dtype, check_other=False
    )

    def attend(x: Tensor) -> Tensor:
        options: dict[str, Any] = {"attn_mask": mask, "key_padding_mask": padding, "is_causal": is_causal}
        return layer.self_attn(x, x, x, need_weights=False, **options)[0]

    def feed(x: Tensor) -> Tensor:
        first, second = layer.linear1, layer.linear2
        if rate(layer.dropout) == 0:
            return fused.mlp(x, first.weight, first.bias, second.weight, second.bias, activation)
        return second(layer.dropout(fused.linear_act(x, first.weight, first.bias, activation)))

    if layer.norm_first:
        attended = attend(norm(layer.norm1, src))
        normed, x = drop_add_norm(layer.norm2, attended, src, layer.dropout1)
        return _add(feed(normed), x, rate(layer.dropout2))
    x, _ = drop_add_norm(layer.norm1, attend(src), src, layer.dropout1)
    return drop_add_norm(layer.norm2, feed(x), x, layer.dropout2)[0]


def _add(x: Tensor, residual: Tensor, p: float) -> Tensor:
    return fused.scale_residual(x, residual, dropout_p=p, training=True) if p else residual + x


@register_rule
class TransformerEncoderLayer(Rule):
    """torch's encoder layer: its adds, norms and feed-forward, in training."""

    target = nn.TransformerEncoderLayer
    accepts = ("src_mask", "src_key_padding_mask", "is_causal")
    residuals = 2

    def check(self, m: Match) -> str | None:
        layer = m.module
        if recognise(layer.activation) is None:
            return "its activation is not one this library knows"
        kinds = {"linear1": nn.Linear, "linear2": nn.Linear, "norm1": LAYER_NORMS[0], "norm2": LAYER_NORMS[0]}
        kinds |= dict.fromkeys(("dropout", "dropout1", "dropout2"), nn.Dropout)
        odd = next((name for name, kind in kinds.items() if type(getattr(layer, name, None)) is not kind), None)
        if odd:
            return f"its {odd} is not exactly a {kinds[odd].__name__}"
        if layer.dropout1.inplace or layer.dropout2.inplace:
            return "a dropout in place draws another mask on a GPU"
        return None

    def fuse(self, m: Match) -> Call:
        layer = m.module
        for name in ("linear1", "linear2", "norm1", "norm2"):
            m.child(name)
        for name in ("dropout1", "dropout2"):
            m.child(name, pins=("inplace",))
        if isinstance(layer.activation, nn.Module):
            m.child("activation", pins=settings_of(layer.activation))
        arguments = [m.inputs[name] for name in ("src", *self.accepts)]
        return m.call(encoder_layer, m.own("activation", "norm_first"), recognise(layer.activation), *arguments)
