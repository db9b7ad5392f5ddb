"""Two linear layers with an activation between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import activations
from .. import functional as FF
from ._children import plain


class FusedMLP(nn.Module):
    """`fc2(act(fc1(x)))`, keeping one hidden tensor for backward where eager keeps two.

    Args:
        in_features: size of the last dim of the input.
        hidden_features: default: `4 * in_features`.
        out_features: default: `in_features`.
        activation: a name, an `Activation` or a torch activation module.
        bias: whether both layers have one.

    Shape: `(*, in_features)` to `(*, out_features)`.

    `fc1` and `fc2` are `nn.Linear`s, as in timm and transformers. What takes their place (an adapter, a quantized
    layer) or hooks them is called as usual.

    >>> FusedMLP(16, 64).fc1
    Linear(in_features=16, out_features=64, bias=True)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: FF.ActivationLike = "gelu",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        known = activations.get(activation)
        super().__init__()
        hidden = 4 * in_features if hidden_features is None else hidden_features
        out = in_features if out_features is None else out_features
        self.activation = known
        self.fc1 = nn.Linear(in_features, hidden, bias, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, out, bias, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        fc1, fc2 = self.fc1, self.fc2
        if plain(fc1, fc2):
            return FF.mlp(input, fc1.weight, fc1.bias, fc2.weight, fc2.bias, self.activation)
        return fc2(self.activation(fc1(input)))

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
