"""Batch norm with an optional residual and its activation: `nn.BatchNorm*d`'s parameters, buffers and state dict."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .. import activations
from .. import functional as FF
from ..ops import batch_norm_act as op
from ._children import stored

TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def batch_norm_act(
    bn: _BatchNorm, x: Tensor, activation: FF.ActivationLike | None, residual: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`nn.BatchNorm*d.forward` with its statistics kept in the same way, then the rest; `shift`: see the op."""
    bn._check_input_dim(x)
    training, track, momentum = bn.training, bn.track_running_stats, bn.momentum
    weight, bias, mean, var, count = stored(bn, *TENSORS)
    if not (training and track):
        count = None
    if count is not None and momentum is None:  # a cumulative average
        count.add_(1)
        momentum, count = 1.0 / float(count), None
    batch = training or (mean is None and var is None)
    if training and not track:
        mean = var = None
    momentum = 0.0 if momentum is None else momentum
    act = activations.get(activation)
    return op.batch_norm_act(x, mean, var, weight, bias, batch, momentum, bn.eps, act, residual, shift, count)


class _FusedBatchNormAct(_BatchNorm):
    """`act(batch_norm(x) + residual)`; parameters, buffers, initialisation and checkpoints are torch's.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as in `nn.BatchNorm*d`.
        activation: a name, an `Activation` or a torch activation module.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: FF.ActivationLike = "relu",
    ) -> None:
        known = activations.get(activation)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.activation = known

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return batch_norm_act(self, input, self.activation, residual)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"


class FusedBatchNormAct1d(_FusedBatchNormAct, nn.BatchNorm1d):
    """`act(batch_norm(x) + residual)` over `(N, C)` or `(N, C, L)`; else as `nn.BatchNorm1d`.

    >>> FusedBatchNormAct1d(3, activation="silu")(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """


class FusedBatchNormAct2d(_FusedBatchNormAct, nn.BatchNorm2d):
    """`act(batch_norm(x) + residual)` over `(N, C, H, W)`; else as `nn.BatchNorm2d`.

    >>> x = torch.zeros(2, 3, 4, 4)
    >>> FusedBatchNormAct2d(3)(x, residual=x).shape
    torch.Size([2, 3, 4, 4])
    """


class FusedBatchNormAct3d(_FusedBatchNormAct, nn.BatchNorm3d):
    """`act(batch_norm(x) + residual)` over `(N, C, D, H, W)`; else as `nn.BatchNorm3d`.

    >>> FusedBatchNormAct3d(3)(torch.zeros(2, 3, 2, 4, 4)).shape
    torch.Size([2, 3, 2, 4, 4])
    """
