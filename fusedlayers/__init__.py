"""Faster, lighter PyTorch models with one line: `model = fusedlayers.patch_model(model)`."""

from . import activations as _activations
from . import functional, nn
from .activations import Activation
from .nn import *  # noqa: F403
from .patch import PatchReport, Rule, explain, patch_model, register_rule, rules, tune, unpatch_model, verify
from .settings import settings

__version__ = "0.1.0"


def activations() -> list[str]:
    """Names of all registered activations."""
    return _activations.names()


__all__ = ["Activation", "activations", "functional", "settings"]
__all__ += nn.__all__
__all__ += ["PatchReport", "Rule", "explain", "patch_model", "register_rule", "rules", "tune", "unpatch_model"]
__all__ += ["verify"]
