"""LayerNorm and RMSNorm with the residual add before them, for checkpoints of `nn.LayerNorm` and `nn.RMSNorm`."""

from __future__ import annotations

from torch import Tensor, nn

from .. import functional as FF
from ._children import stored


class FusedLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm`, with an optional residual added to the input first.

    Same arguments, parameters and initialisation as `nn.LayerNorm`.

    Shape: `(*, *normalized_shape)`; the same out, or the pair `(norm, input + residual)` where a residual is given.

    >>> norm, total = FusedLayerNorm(8)(torch.ones(2, 8), residual=torch.ones(2, 8))
    """

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        weight, bias = stored(self, "weight", "bias")
        return FF.layer_norm(input, self.normalized_shape, weight, bias, self.eps, residual)


class FusedRMSNorm(nn.RMSNorm):
    """`nn.RMSNorm`, with an optional residual added to the input first.

    Same arguments, parameters and initialisation as `nn.RMSNorm`.

    Shape: `(*, *normalized_shape)`; the same out, or the pair `(norm, x + residual)` where a residual is given.

    >>> norm, total = FusedRMSNorm(8)(torch.ones(2, 8), residual=torch.ones(2, 8))
    """

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return FF.rms_norm(x, self.normalized_shape, self.weight, self.eps, residual)
