"""Modules: subclasses of the layer they replace, so that parameters and checkpoints fit by construction."""

from .affine import FusedAffine, FusedAffineReLU
from .batch_norm import FusedBatchNormAct1d, FusedBatchNormAct2d, FusedBatchNormAct3d
from .gated import FusedGatedMLP
from .group_norm import FusedGroupNormAct
from .linear import FusedLinear, FusedLinearGELU, FusedLinearReLU, FusedLinearSiLU
from .mlp import FusedMLP
from .norm import FusedLayerNorm, FusedRMSNorm
from .residual import FusedScaleResidual

__all__ = [
    "FusedAffine",
    "FusedAffineReLU",
    "FusedBatchNormAct1d",
    "FusedBatchNormAct2d",
    "FusedBatchNormAct3d",
    "FusedGatedMLP",
    "FusedGroupNormAct",
    "FusedLayerNorm",
    "FusedLinear",
    "FusedLinearGELU",
    "FusedLinearReLU",
    "FusedLinearSiLU",
    "FusedMLP",
    "FusedRMSNorm",
    "FusedScaleResidual",
]
