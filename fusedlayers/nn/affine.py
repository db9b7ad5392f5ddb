"""A learned scale and shift a channel, and an activation: `act(weight * x + bias)`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import activations
from .. import functional as FF


class FusedAffine(nn.Module):
    """`act(weight * x + bias)` with one weight and bias a channel; starts as the bare activation.

    Args:
        num_features: channels, the size of `dim`.
        activation: a name, an `Activation` or a torch activation module.
        dim: the dim of the input along which channels lie.

    Shape: any, with `num_features` along `dim`; the same out.

    >>> FusedAffine(8, "silu", dim=1)
    FusedAffine(8, activation=silu, dim=1)
    """

    def __init__(
        self,
        num_features: int,
        activation: FF.ActivationLike = "relu",
        dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        known = activations.get(activation)
        super().__init__()
        self.num_features, self.activation, self.dim = num_features, known, dim
        self.weight = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return FF.affine_act(input, self.weight, self.bias, self.activation, dim=self.dim)

    def extra_repr(self) -> str:
        return f"{self.num_features}, activation={self.activation}, dim={self.dim}"


class FusedAffineReLU(FusedAffine):
    """`relu(weight * x + bias)` with one weight and bias a channel."""

    def __init__(
        self,
        num_features: int,
        dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, "relu", dim, device, dtype)
