"""The one list of activations: what each computes, what its backward keeps, and how it is recognised in a model.

Adding an activation is one `Spec` (and, for the Triton route, its value and gradient in `kernels/activations.py` under
the same name). Every op, layer and patching rule then knows it. `registry` holds the mechanism, `recognition` finds
activations in models, `table` holds torch's own and those few that libraries compose, `libraries` their classes.
"""

from . import table as _entries  # noqa: F401  (importing it fills the registry)
from .recognition import get, is_inplace, recognise, refusal
from .registry import Activation, Keeps, Spec, names, register

__all__ = ["Activation", "Keeps", "Spec", "get", "is_inplace", "names", "recognise", "refusal", "register"]
