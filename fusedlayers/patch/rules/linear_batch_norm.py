"""A Linear or convolution with a bias, and the batch norm behind it.

Where the norm takes the batch's own mean off again, the bias has no part in the result: its gradient is 0, for which
eager reads the gradient of the product's result once more, and finds rounding.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...activations import Activation
from ...nn._children import stored
from ...nn.batch_norm import batch_norm_act
from ..pattern import act, leaf, through, value
from ..rule import NO_MATCH, Call, Match, Rule, register_rule
from ._left_bias import SMALLEST, may_leave_bias
from .batch_norm import BATCH_NORMS
from .conv_act import CONVOLUTIONS

PRODUCTS = (nn.Linear, *CONVOLUTIONS)


def product_norm_act(fc: nn.Module, bn: _BatchNorm, activation: Activation, x: Tensor) -> Tensor:
    """`act(bn(fc(x)))`."""
    weight, bias = stored(fc, "weight", "bias")
    of_batch = bn.training or (bn.running_mean is None and bn.running_var is None)
    # one bias a channel of the norm: not that of a Linear over a last dim of its own, nor one image without a batch
    fits = x.dim() == weight.dim() and x.numel() >= SMALLEST
    shift = bias if of_batch and fits and may_leave_bias(x, weight, bias) else None
    added = bias if shift is None else bias.detach()
    y = F.linear(x, weight, added) if isinstance(fc, nn.Linear) else fc._conv_forward(x, weight, added)
    return batch_norm_act(bn, y, activation, shift=shift)


@register_rule
class ProductNormAct(Rule):
    """`act(bn(fc(x)))` with a bias in `fc`, a Linear or convolution: its gradient is known to be 0 in training."""

    # no rule of this kind without an activation: such a norm may close a branch, whose add it takes in
    pattern = act("act")(through(leaf("bn", *BATCH_NORMS)(through(leaf("fc", *PRODUCTS)(value("x"))))))
    priority = 11  # behind what asks for a product that it would take in

    def check(self, m: Match) -> str | None:
        return NO_MATCH if m.fc.module.bias is None else None

    def fuse(self, m: Match) -> Call:
        return m.call(product_norm_act, m.fc, m.bn, m.act, m.x)
