"""A bias whose gradient is left to the norm behind its product, which takes it as a shift: where that may be, and pays.

Eager reads the gradient of the product's result once more for it; the norm's backward has that in hand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import _route
from ...settings import settings

SMALLEST = 1 << 20
"""Elements of the result below which a pass over them is not worth what leaving it out costs."""


def may_leave_bias(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a bias needs a gradient, and one that an op's kernel gives will do: nothing looks at each torch op."""
    if bias is None or not bias.requires_grad or not torch.is_grad_enabled() or _route.intercepted() is not None:
        return False
    return settings.route != "reference" and _kernels_take(x, weight, bias)


def _kernels_take(x: Tensor, *parameters: Tensor) -> bool:
    return x is not None and _route.obstacle((x, *parameters)) is None
