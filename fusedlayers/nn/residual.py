"""The end of a residual branch: LayerScale, dropout, DropPath and the add in one pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import functional as FF


class FusedScaleResidual(nn.Module):
    """`residual + drop_path(dropout(gamma * x))`.

    Args:
        dim: channels of a learned scale `gamma`, the size of `channel_dim`; `None`: no scale.
        init_values: what `gamma` starts at, in every channel.
        dropout_p: probability to zero an element, in training.
        drop_path_p: probability to zero a sample's whole branch, in training.
        channel_dim: the dim of the input along which channels lie.

    Shape: `x` and `residual` of one shape; the same out.

    >>> FusedScaleResidual(8, init_values=0.1, drop_path_p=0.2)
    FusedScaleResidual(8, init_values=0.1, dropout_p=0.0, drop_path_p=0.2)
    """

    def __init__(
        self,
        dim: int | None = None,
        init_values: float = 1e-5,
        dropout_p: float = 0.0,
        drop_path_p: float = 0.0,
        channel_dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, p in (("dropout", dropout_p), ("drop", drop_path_p)):
            if not 0.0 <= p <= 1.0:
                raise ValueError(f"{name} probability has to be between 0 and 1, but got {p}")
        super().__init__()
        self.dim, self.init_values, self.channel_dim = dim, init_values, channel_dim
        self.dropout_p, self.drop_path_p = dropout_p, drop_path_p
        if dim is None:
            self.register_parameter("gamma", None)
        else:
            self.gamma = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.gamma is not None:
            nn.init.constant_(self.gamma, self.init_values)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        scale = self.gamma
        if scale is not None and self.channel_dim not in (-1, x.dim() - 1):
            after = -self.channel_dim - 1 if self.channel_dim < 0 else x.dim() - 1 - self.channel_dim
            scale = scale.view(-1, *(1,) * after)
        return FF.scale_residual(
            x,
            residual,
            scale,
            dropout_p=self.dropout_p,
            drop_path_p=self.drop_path_p,
            training=self.training,
        )

    def extra_repr(self) -> str:
        shown = "" if self.dim is None else f"{self.dim}, init_values={self.init_values:g}, "
        axis = "" if self.channel_dim == -1 else f", channel_dim={self.channel_dim}"
        return f"{shown}dropout_p={self.dropout_p}, drop_path_p={self.drop_path_p}{axis}"
