"""Group norm with its activation: `nn.GroupNorm`'s parameters, initialisation and state dict."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import activations
from .. import functional as FF


class FusedGroupNormAct(nn.GroupNorm):
    """`act(group_norm(x))`; parameters, initialisation and checkpoints are those of `nn.GroupNorm`.

    Args:
        num_groups, num_channels, eps, affine, device, dtype: as in `nn.GroupNorm`.
        activation: a name, an `Activation` or a torch activation module.

    Shape: `(N, num_channels, *)`; the same out.

    >>> FusedGroupNormAct(2, 4)(torch.zeros(3, 4, 5)).shape
    torch.Size([3, 4, 5])
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: FF.ActivationLike = "silu",
    ) -> None:
        known = activations.get(activation)
        super().__init__(num_groups, num_channels, eps, affine, device=device, dtype=dtype)
        self.activation = known

    def forward(self, input: Tensor) -> Tensor:
        return FF.group_norm_act(input, self.num_groups, self.weight, self.bias, self.eps, self.activation)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"
