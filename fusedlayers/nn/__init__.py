"""Modules: subclasses of the layer they replace, so that parameters and checkpoints fit by construction."""

from .affine import FusedAffine, FusedAffineReLU
from .linear import FusedLinear, FusedLinearGELU, FusedLinearReLU, FusedLinearSiLU
from .residual import FusedScaleResidual

__all__ = [
    "FusedAffine",
    "FusedAffineReLU",
    "FusedLinear",
    "FusedLinearGELU",
    "FusedLinearReLU",
    "FusedLinearSiLU",
    "FusedScaleResidual",
]
