"""Gated linear units: SwiGLU, GeGLU, ReGLU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import activations
from .. import functional as FF
from ._children import plain


class FusedGatedMLP(nn.Module):
    """`down_proj(act(gate_proj(x)) * up_proj(x))`, keeping x, gate and up for backward.

    Args:
        in_features: size of the last dim of the input.
        hidden_features: width of the gate.
        out_features: default: `in_features`.
        activation: a name, an `Activation` or a torch activation module.
        bias: whether the layers have one.
        chunked: one layer `gate_up_proj` of width `2 * hidden_features` in place of `gate_proj` and `up_proj`.
        gate_first: with `chunked`, whether the gate is the first half.

    Shape: `(*, in_features)` to `(*, out_features)`.

    The layers are `nn.Linear`s, named as in transformers. What takes their place (an adapter, a quantized layer) or
    hooks them is called as usual.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        activation: FF.ActivationLike = "silu",
        bias: bool = False,
        *,
        chunked: bool = False,
        gate_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        known = activations.get(activation)
        super().__init__()
        out = in_features if out_features is None else out_features
        self.activation, self.chunked, self.gate_first = known, chunked, gate_first
        if chunked:
            self.gate_up_proj = nn.Linear(in_features, 2 * hidden_features, bias, device=device, dtype=dtype)
        else:
            self.gate_proj = nn.Linear(in_features, hidden_features, bias, device=device, dtype=dtype)
            self.up_proj = nn.Linear(in_features, hidden_features, bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(hidden_features, out, bias, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        act, down = self.activation, self.down_proj
        if self.chunked:
            both = self.gate_up_proj
            if plain(both, down):
                return FF.gated_mlp(
                    input, both.weight, None, down.weight, both.bias, None, down.bias, act, gate_first=self.gate_first
                )
            return down(FF.gated_act(both(input), None, act, gate_first=self.gate_first))
        gate, up = self.gate_proj, self.up_proj
        if plain(gate, up, down):
            weights, biases = (gate.weight, up.weight, down.weight), (gate.bias, up.bias, down.bias)
            return FF.gated_mlp(input, *weights, *biases, act)
        return down(FF.gated_act(gate(input), up(input), act))

    def extra_repr(self) -> str:
        halves = f", chunked=True, gate_first={self.gate_first}" if self.chunked else ""
        return f"activation={self.activation}{halves}"
