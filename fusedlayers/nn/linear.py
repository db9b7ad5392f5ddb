"""Linear layers with their activation: `nn.Linear`'s parameters, initialisation and state dict."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import activations
from .. import functional as FF
from ._children import stored


class FusedLinear(nn.Linear):
    """`act(x @ weight.T + bias)`; parameters, initialisation and checkpoints are those of `nn.Linear`.

    Args:
        in_features, out_features, bias, device, dtype: as in `nn.Linear`.
        activation: a name, an `Activation` or a torch activation module.

    Shape: `(*, in_features)` to `(*, out_features)`.

    >>> FusedLinear(3, 2, activation="gelu")
    FusedLinear(in_features=3, out_features=2, bias=True, activation=gelu)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: FF.ActivationLike = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        known = activations.get(activation)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.activation = known

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = stored(self, "weight", "bias")
        return FF.linear_act(input, weight, bias, self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


class FusedLinearReLU(FusedLinear):
    """`relu(x @ weight.T + bias)`: `nn.Linear` and the `nn.ReLU` that follows it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, "relu", device, dtype)


class FusedLinearGELU(FusedLinear):
    """`gelu(x @ weight.T + bias)`: `nn.Linear` and the `nn.GELU(approximate)` that follows it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        approximate: str = "none",
    ) -> None:
        super().__init__(in_features, out_features, bias, nn.GELU(approximate), device, dtype)


class FusedLinearSiLU(FusedLinear):
    """`silu(x @ weight.T + bias)`: `nn.Linear` and the `nn.SiLU` that follows it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, "silu", device, dtype)
