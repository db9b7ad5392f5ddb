"""A convolution with a bias, and the activation that alone reads its output.

torch adds the bias of a GPU convolution in a pass of its own, so bias and activation together save one. On maps too
small for that to matter (squeeze-and-excitation), and elsewhere than on a GPU, the call runs eager's own layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ... import functional as fused
from ...activations import Activation
from ..pattern import act, leaf, through, value
from ..rule import Call, Match, Rule, register_rule

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SMALLEST = 1 << 18
"""Elements of the input below which the pass saved is less than its launch costs."""


def conv_act(conv: nn.Conv2d, activation: Activation, x: Tensor) -> Tensor:
    if conv.bias is None or not x.is_cuda or x.numel() < SMALLEST or torch.compiler.is_compiling():
        return activation(conv(x))
    z = conv._conv_forward(x, conv.weight, None)
    return fused.affine_act(z, 1.0, conv.bias.to(z.dtype), activation, dim=-1 - len(conv.kernel_size))


@register_rule
class ConvAct(Rule):
    """`act(conv(x))`: the bias and the activation in one pass."""

    pattern = act("act")(through(leaf("conv", *CONVOLUTIONS)(value("x"))))

    def check(self, m: Match) -> str | None:
        if m.conv.module.bias is None:
            return f"{'.'.join(m.conv.path)} has no bias: its activation alone is one pass already"
        return None

    def fuse(self, m: Match) -> Call:
        return m.call(conv_act, m.conv, m.act, m.x)
