"""Value and gradient of every activation on the device, in the dtype of their argument (float32 or float64).

`<name>(z, P0, P1)` is the value; `<name>_grad(g, k, P0, P1)` the gradient for an incoming `g`, where `k` is what the
registry says is kept: the input `z`, or the output. NaN passes through everywhere: `tl.where(z < 0, 0, z)` keeps it
where `tl.maximum` would not, and masked gradients select rather than multiply, as torch does.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..activations import Activation


def value(act: Activation) -> Any:
    """The device function `(z, P0, P1) -> act(z)`."""
    return globals()[act.spec.kernel or act.name]


def gradient(act: Activation) -> Any:
    """The device function `(g, kept, P0, P1) -> g * act'`."""
    return globals()[(act.spec.kernel or act.name) + "_grad"]


def supports(act: Activation) -> bool:
    return (act.spec.kernel or act.name) + "_grad" in globals()


def constants(act: Activation) -> tuple[float, float]:
    """The activation's settings as the kernels' two constants."""
    return (*act.params, 0.0, 0.0)[:2]


@triton.jit
def _erf_half(z):
    """Phi(z), the standard normal distribution, and exp(-z*z/2), which the density needs as well.

    float32: Abramowitz & Stegun 7.1.26, one exponential, relative accuracy kept for z < 0. float64: erf itself.
    """
    if z.dtype == tl.float64:
        e = tl.exp(-0.5 * z * z)
        cdf = 0.5 * (1.0 + tl.math.erf(z * 0.7071067811865476))
    else:
        e = tl.exp(-0.5 * z * z)
        t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(z))
        poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
        tail = 0.5 * poly * e
        cdf = tl.where(z < 0, tail, 1.0 - tail)
    return cdf, e


@triton.jit
def _sigmoid(z):
    e = tl.exp(-tl.abs(z))
    return tl.where(z < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _tanh(z):
    """tanh by exp(-2|z|), and by its series near zero, where 1 - e cancels."""
    a = tl.abs(z)
    e = tl.exp(-2.0 * a)
    far = (1.0 - e) / (1.0 + e)
    s = a * a
    if z.dtype == tl.float64:
        # a < 0.02: the next term, 62/2835 * 9th power, is under 1e-17
        near = a * (1.0 - s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0 - s * (62.0 / 2835.0)))))
        y = tl.where(a < 0.02, near, far)
    else:
        near = a * (1.0 - s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0 - s * (62.0 / 2835.0)))))
        y = tl.where(a < 0.25, near, far)
    return tl.where(z < 0, -y, y)


@triton.jit
def identity(z, P0: tl.constexpr, P1: tl.constexpr):
    return z


@triton.jit
def identity_grad(g, y, P0: tl.constexpr, P1: tl.constexpr):
    return g


@triton.jit
def relu(z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z < 0, 0.0, z)


@triton.jit
def relu_grad(g, y, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(y <= 0, 0.0, g)


@triton.jit
def leaky_relu(z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z > 0, z, z * P0)


@triton.jit
def leaky_relu_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z > 0, g, g * P0)


@triton.jit
def gelu(z, P0: tl.constexpr, P1: tl.constexpr):
    cdf, _ = _erf_half(z)
    return z * cdf


@triton.jit
def gelu_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    cdf, e = _erf_half(z)
    return g * (cdf + z * e * 0.3989422804014327)


@triton.jit
def gelu_tanh(z, P0: tl.constexpr, P1: tl.constexpr):
    # z * sigmoid(2u) is 0.5 * z * (1 + tanh(u)) without its cancellation
    return z * _sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))


@triton.jit
def gelu_tanh_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    s = _sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    slope = 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    return g * (s + z * s * (1.0 - s) * slope)


@triton.jit
def silu(z, P0: tl.constexpr, P1: tl.constexpr):
    return z * _sigmoid(z)


@triton.jit
def silu_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    s = _sigmoid(z)
    return g * (s * (1.0 + z * (1.0 - s)))


@triton.jit
def sigmoid(z, P0: tl.constexpr, P1: tl.constexpr):
    return _sigmoid(z)


@triton.jit
def sigmoid_grad(g, y, P0: tl.constexpr, P1: tl.constexpr):
    return g * (y * (1.0 - y))


@triton.jit
def tanh(z, P0: tl.constexpr, P1: tl.constexpr):
    return _tanh(z)


@triton.jit
def tanh_grad(g, y, P0: tl.constexpr, P1: tl.constexpr):
    return g * (1.0 - y * y)
