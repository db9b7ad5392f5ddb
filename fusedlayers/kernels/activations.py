"""Value and gradient of every activation on the device, in the dtype of their argument (float32 or float64).

`<name>(z, P0, P1)` is the value; `<name>_grad(g, k, P0, P1)` the gradient for an incoming `g`, where `k` is what the
registry says is kept: the input `z`, or the output. Each does at kinks, NaN and infinities what torch's own kernel
does: NaN passes through (`tl.where(z < 0, 0, z)` keeps it where `tl.maximum` would not), masked gradients select
rather than multiply, and each comparison includes or excludes its bound as torch's does. Exponentials take -|z|, so
none overflows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..activations import Activation
from . import interpreted

# torch's CUDA kernels multiply by 1.0f / 6.0f in float64 too; its CPU kernels do so in hardsigmoid's gradient only
_FLOAT_SIXTH = tl.constexpr(0.1666666716337204)
_SIXTH = tl.constexpr(1.0 / 6.0 if interpreted() else 0.1666666716337204)
_OVERFLOWS = 80.0
"""Above this threshold torch's softplus lets exp overflow; such a setting is left to torch."""


def value(act: Activation, dtype: torch.dtype | None = None) -> Any:
    """The device function `(z, P0, P1) -> act(z)`. `dtype`: what the result is rounded to, where that is known."""
    return _function(_kernel(act), dtype)


def gradient(act: Activation, dtype: torch.dtype | None = None) -> Any:
    """The device function `(g, kept, P0, P1) -> g * act'`. `dtype`: that of what `act` itself returns."""
    return _function(_kernel(act) + "_grad", dtype)


def _function(name: str, dtype: torch.dtype | None) -> Any:
    from . import low_activations

    cheap = getattr(low_activations, name, None) if dtype in (torch.float16, torch.bfloat16) else None
    return globals()[name] if cheap is None else cheap


def from_output(act: Activation) -> bool:
    """Whether a gradient that recomputes must go on to the output: ReLU's reads input and output alike."""
    return act.keeps == "output" and act.name not in ("relu", "identity")


def supports(act: Activation) -> bool:
    """Whether the kernels below compute this activation with these settings."""
    return _kernel(act) + "_grad" in globals() and (act.name != "softplus" or act.params[1] <= _OVERFLOWS)


def constants(act: Activation) -> tuple[float, float]:
    """The activation's settings as the kernels' two constants."""
    return (*act.params, 0.0, 0.0)[:2]


def _kernel(act: Activation) -> str:
    name = act.spec.kernel or act.name
    return "hardswish_open" if name == "hardswish" and _hardswish_is_open() else name


@functools.cache
def _hardswish_is_open() -> bool:
    """Whether this torch lets hardswish's gradient through at exactly -3 and 3, as it did before 2.8."""
    z = torch.full((1,), -3.0, device="cpu")
    return torch.ops.aten.hardswish_backward(torch.ones_like(z), z).item() != 0.0


def _clamp_is_closed() -> bool:
    """Whether this torch lets clamp's gradient through at its very bounds, as it did before 2.14."""
    with torch.inference_mode(False), torch.enable_grad():
        z = torch.zeros(1, device="cpu", requires_grad=True)
        (dz,) = torch.autograd.grad(z.clamp(0.0, 1.0), z, torch.ones(1, device="cpu"))
    return dz.item() != 0.0


_CLOSED = tl.constexpr(_clamp_is_closed())
_APPROXIMATE = tl.constexpr(not interpreted())


@triton.jit
def reciprocal(z):
    """1 / z for 1 <= z <= 2**126: in float32 the device's own, right to 2 ulp there, without the care for the rest."""
    if _APPROXIMATE and z.dtype != tl.float64:
        inverse = libdevice.fast_dividef(1.0, z)
    else:
        inverse = 1.0 / z
    return inverse


@triton.jit
def _like(z, C: tl.constexpr):
    """A constant in the dtype of `z`: a bare number inside `tl.where` may be rounded to float32."""
    return tl.full(z.shape, C, z.dtype)


@triton.jit
def _normal(z):
    """Phi(z), the standard normal distribution, and exp(-z*z/2), which the density needs as well.

    float32: with t = 1 / (1 + 0.4|z|), Phi(-|z|) = exp(-z*z/2) * t * (0.5 + a polynomial of 1 - t), the form of
    Abramowitz & Stegun 7.1.26. Their coefficients hold 1.5e-7 of 1; these (minimax, relative) hold 4e-7 of the tail
    itself, where 1 + erf cancels. float64: erf itself.
    """
    e = tl.exp(-0.5 * z * z)
    if z.dtype == tl.float64:
        cdf = 0.5 * (1.0 + tl.math.erf(z * 0.7071067811865476))
    else:
        t = reciprocal(1.0 + 0.4 * tl.abs(z))
        q = 1.0 - t
        poly = q * -0.023489881929052926 + 0.07555097682023139
        poly = q * (q * poly + -0.060029974227564335) + -0.008145809842468772
        poly = q * (q * poly + -0.02407981984456057) + 0.010531345285102202
        poly = q * (q * poly + 0.11894712538354923) + 0.06764351432605183
        poly = q * (q * poly + -0.49735058215381256) + 0.5
        tail = e * (t * poly)
        cdf = tl.where(z < 0, tail, 1.0 - tail)
    return cdf, e


@triton.jit
def _exp(z):
    """exp(z) for z <= 0, whose result is to be right to a few ulp of itself however small.

    The device's own multiplies by log2(e) first, and loses |z| / 2 ulp to that rounding. So n * ln 2 is taken off in
    two parts, of which the first is exact (Cody & Waite), and 2**n put back.
    """
    if z.dtype == tl.float64:
        return tl.exp(z)
    else:
        # from -126 on 2**n is no subnormal, which the device would flush to 0, and -inf does not meet inf
        n = tl.maximum(tl.floor(z * 1.4426950408889634 + 0.5), -126.0)
        return tl.exp((z - n * 0.693359375) + n * 2.1219444005469057e-4) * tl.exp2(n)


@triton.jit
def _sigmoid(z):
    e = _exp(-tl.abs(z))
    return tl.where(z < 0, e, 1.0) * reciprocal(1.0 + e)


@triton.jit
def _sigmoids(z):
    """sigmoid(z) and 1 - sigmoid(z), the latter without its cancellation."""
    e = _exp(-tl.abs(z))
    inverse = reciprocal(1.0 + e)
    return tl.where(z < 0, e, 1.0) * inverse, tl.where(z < 0, 1.0, e) * inverse


@triton.jit
def _expm1(z):
    """exp(z) - 1, by its nested series where that cancels (|z| < 1/2: the first term dropped is 1e-8 or 1e-18)."""
    s = 1.0 + z * (1.0 / 8.0)
    if z.dtype == tl.float64:
        s = 1.0 + z * (1.0 / 14.0) * (1.0 + z * (1.0 / 15.0) * (1.0 + z * (1.0 / 16.0)))
        s = 1.0 + z * (1.0 / 11.0) * (1.0 + z * (1.0 / 12.0) * (1.0 + z * (1.0 / 13.0) * s))
        s = 1.0 + z * (1.0 / 8.0) * (1.0 + z * (1.0 / 9.0) * (1.0 + z * (1.0 / 10.0) * s))
    s = 1.0 + z * (1.0 / 5.0) * (1.0 + z * (1.0 / 6.0) * (1.0 + z * (1.0 / 7.0) * s))
    s = 1.0 + z * (1.0 / 2.0) * (1.0 + z * (1.0 / 3.0) * (1.0 + z * (1.0 / 4.0) * s))
    return tl.where(tl.abs(z) < 0.5, z * s, tl.exp(z) - 1.0)


@triton.jit
def _log1p(e):
    """log(1 + e) for 0 <= e <= 1, as 2 atanh(e / (2 + e)): accurate for tiny e, which 1 + e would lose."""
    r = e / (2.0 + e)
    s = r * r  # at most 1/9: the first term dropped is 9**-8 / 17 = 1e-9, or 9**-17 / 35 = 2e-18
    p = s * (1.0 / 15.0) + (1.0 / 13.0)
    if e.dtype == tl.float64:
        p = s * (s * (s * (1.0 / 33.0) + (1.0 / 31.0)) + (1.0 / 29.0)) + (1.0 / 27.0)
        p = s * (s * (s * (s * p + (1.0 / 25.0)) + (1.0 / 23.0)) + (1.0 / 21.0)) + (1.0 / 19.0)
        p = s * (s * (s * p + (1.0 / 17.0)) + (1.0 / 15.0)) + (1.0 / 13.0)
    p = s * (s * (s * p + (1.0 / 11.0)) + (1.0 / 9.0)) + (1.0 / 7.0)
    p = s * (s * (s * p + (1.0 / 5.0)) + (1.0 / 3.0)) + 1.0
    return 2.0 * r * p


@triton.jit
def _tanh_series(s):
    """1 - tanh(a) / a for s = a*a under 1/16: the first term dropped is 1e-8 of 1."""
    return s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0 - s * (62.0 / 2835.0))))


@triton.jit
def _tanh(z):
    """tanh by one exponential, and by a series near zero, where that cancels."""
    a = tl.abs(z)
    if z.dtype == tl.float64:
        m = _expm1(-2.0 * a)
        y = -m / (2.0 + m)
    else:
        e = tl.exp(-2.0 * a)
        y = tl.where(a < 0.25, a * (1.0 - _tanh_series(a * a)), 1.0 - 2.0 * e / (1.0 + e))
    return tl.where(z < 0, -y, y)


@triton.jit
def _tanh_softplus(z):
    """t = tanh(log(1 + exp(z))), 1 - t and sigmoid(z), all ratios of polynomials of exp(-|z|)."""
    e = _exp(-tl.abs(z))
    small = tl.where(z < 0, e * (e + 2.0), 1.0 + 2.0 * e)
    rest = tl.where(z < 0, 2.0, 2.0 * e * e)
    return small / (small + rest), rest / (small + rest), tl.where(z < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _ramp(z):
    """clamp(z + 3, 0, 6)"""
    u = z + 3.0
    return tl.where(u < 0.0, 0.0, tl.where(u > 6.0, 6.0, u))


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
def relu_squared(z, P0: tl.constexpr, P1: tl.constexpr):
    r = tl.where(z < 0, 0.0, z)
    return r * r


@triton.jit
def relu_squared_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z <= 0, 0.0, g * (2.0 * z))


@triton.jit
def leaky_relu(z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z > 0, z, z * P0)


@triton.jit
def leaky_relu_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z > 0, g, g * P0)


@triton.jit
def rrelu(z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z > 0, z, z * ((P0 + P1) / 2.0))


@triton.jit
def rrelu_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z > 0, g, g * ((P0 + P1) / 2.0))


@triton.jit
def hardtanh(z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z < P0, _like(z, P0), tl.where(z > P1, _like(z, P1), z))


@triton.jit
def hardtanh_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where((z <= P0) | (z >= P1), 0.0, g)


@triton.jit
def relu6(z, P0: tl.constexpr, P1: tl.constexpr):
    return hardtanh(z, 0.0, 6.0)


@triton.jit
def relu6_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return hardtanh_grad(g, z, 0.0, 6.0)


@triton.jit
def threshold(z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z <= P0, _like(z, P1), z)


@triton.jit
def threshold_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z <= P0, 0.0, g)


@triton.jit
def elu(z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z > 0, z, _expm1(z) * P0)


@triton.jit
def elu_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z <= 0, g * P0 * _exp(z), g)


@triton.jit
def celu(z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z > 0, z, _expm1(z * (1.0 / P0)) * P0)


@triton.jit
def celu_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z <= 0, g * _exp(z * (1.0 / P0)), g)


@triton.jit
def selu(z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z > 0, z * 1.0507009873554805, _expm1(z) * 1.7580993408473766)


@triton.jit
def selu_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z <= 0, g * 1.7580993408473766 * _exp(z), g * 1.0507009873554805)


@triton.jit
def gelu(z, P0: tl.constexpr, P1: tl.constexpr):
    cdf, _ = _normal(z)
    return z * cdf


@triton.jit
def gelu_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    cdf, e = _normal(z)
    return g * (cdf + z * e * 0.3989422804014327)


@triton.jit
def _unclamped(z, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Where clamp's gradient passes."""
    if _CLOSED:
        inside = (z >= LOW) & (z <= HIGH)
    else:
        inside = (z > LOW) & (z < HIGH)
    return inside


@triton.jit
def gelu_clipped(z, P0: tl.constexpr, P1: tl.constexpr):
    return hardtanh(gelu(z, 0.0, 0.0), P0, P1)


@triton.jit
def gelu_clipped_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    y = gelu(z, 0.0, 0.0)
    return gelu_grad(tl.where(_unclamped(y, P0, P1), g, 0.0), z, 0.0, 0.0)


@triton.jit
def _gelu_by_tanh(z, TWICE: tl.constexpr):
    # z * sigmoid(2u) is 0.5 * z * (1 + tanh(u)) without its cancellation; TWICE is 2 * sqrt(2 / pi)
    return z * _sigmoid(TWICE * (z + 0.044715 * z * z * z))


@triton.jit
def _gelu_by_tanh_grad(g, z, TWICE: tl.constexpr):
    s, rest = _sigmoids(TWICE * (z + 0.044715 * z * z * z))
    slope = TWICE * (1.0 + 0.134145 * z * z)
    return g * (s + z * s * rest * slope)


@triton.jit
def gelu_tanh(z, P0: tl.constexpr, P1: tl.constexpr):
    return _gelu_by_tanh(z, 1.5957691216057308)


@triton.jit
def gelu_tanh_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return _gelu_by_tanh_grad(g, z, 1.5957691216057308)


@triton.jit
def gelu_fast(z, P0: tl.constexpr, P1: tl.constexpr):
    return _gelu_by_tanh(z, 1.5957691216)


@triton.jit
def gelu_fast_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return _gelu_by_tanh_grad(g, z, 1.5957691216)


@triton.jit
def quick_gelu(z, P0: tl.constexpr, P1: tl.constexpr):
    return z * _sigmoid(1.702 * z)


@triton.jit
def quick_gelu_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    s, rest = _sigmoids(1.702 * z)
    return g * (s + 1.702 * (z * s * rest))


@triton.jit
def laplace(z, P0: tl.constexpr, P1: tl.constexpr):
    cdf, _ = _normal((z - P0) / P1)
    return cdf


@triton.jit
def laplace_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    _, e = _normal((z - P0) / P1)
    return g * e * (0.3989422804014327 / P1)


@triton.jit
def silu(z, P0: tl.constexpr, P1: tl.constexpr):
    return z * _sigmoid(z)


@triton.jit
def silu_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    s, rest = _sigmoids(z)
    return g * (s * (1.0 + z * rest))


@triton.jit
def sigmoid(z, P0: tl.constexpr, P1: tl.constexpr):
    return _sigmoid(z)


@triton.jit
def sigmoid_grad(g, y, P0: tl.constexpr, P1: tl.constexpr):
    return g * (y * (1.0 - y))


@triton.jit
def logsigmoid(z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z < 0, z, 0.0) - _log1p(_exp(-tl.abs(z)))


@triton.jit
def logsigmoid_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    e = _exp(-tl.abs(z))
    return g * (tl.where(z < 0, 1.0, e) / (1.0 + e))


@triton.jit
def softplus(z, P0: tl.constexpr, P1: tl.constexpr):
    b = z * P0
    soft = (tl.where(b < 0, 0.0, b) + _log1p(_exp(-tl.abs(b)))) * (1.0 / P0)
    return tl.where(b > P1, z, soft)


@triton.jit
def softplus_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    b = z * P0
    return tl.where(b > P1, g, g * _sigmoid(b))


@triton.jit
def mish(z, P0: tl.constexpr, P1: tl.constexpr):
    t, _, _ = _tanh_softplus(z)
    return z * t


@triton.jit
def mish_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    t, left, s = _tanh_softplus(z)
    return g * (t + z * s * (left * (1.0 + t)))


@triton.jit
def tanh(z, P0: tl.constexpr, P1: tl.constexpr):
    return _tanh(z)


@triton.jit
def tanh_grad(g, y, P0: tl.constexpr, P1: tl.constexpr):
    return g * (1.0 - y * y)


@triton.jit
def tanhshrink(z, P0: tl.constexpr, P1: tl.constexpr):
    y = z - _tanh(z)
    if z.dtype != tl.float64:
        y = tl.where(tl.abs(z) < 0.25, z * _tanh_series(z * z), y)
    return y


@triton.jit
def tanhshrink_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    t = _tanh(z)
    return g * (t * t)


@triton.jit
def softsign(z, P0: tl.constexpr, P1: tl.constexpr):
    return z / (tl.abs(z) + 1.0)


@triton.jit
def softsign_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    y = z / (tl.abs(z) + 1.0)
    r = 1.0 / (tl.abs(z) + 1.0)
    return tl.where(y != y, y, g * r * r)  # torch's is NaN where inf / inf is


@triton.jit
def hardshrink(z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where((z >= -P0) & (z <= P0), 0.0, z)


@triton.jit
def hardshrink_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where((z >= -P0) & (z <= P0), 0.0, g)


@triton.jit
def softshrink(z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z > P0, z - P0, tl.where(z < -P0, z + P0, tl.where(z != z, z, 0.0)))


@triton.jit
def softshrink_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where((z >= -P0) & (z <= P0), 0.0, g)


@triton.jit
def hardsigmoid(z, P0: tl.constexpr, P1: tl.constexpr):
    return _ramp(z) * _SIXTH


@triton.jit
def hardsigmoid_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where((z > -3.0) & (z < 3.0), g * _FLOAT_SIXTH, 0.0)


@triton.jit
def hard_sigmoid(z, P0: tl.constexpr, P1: tl.constexpr):
    return _ramp(z) * (1.0 / 6.0)


@triton.jit
def hard_sigmoid_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where((z + 3.0 <= 0.0) | (z + 3.0 >= 6.0), 0.0, g * (1.0 / 6.0))


@triton.jit
def hardswish(z, P0: tl.constexpr, P1: tl.constexpr):
    return z * _ramp(z) * _SIXTH


@triton.jit
def hardswish_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z <= -3.0, 0.0, tl.where(z < 3.0, g * (z * (1.0 / 3.0) + 0.5), g))


@triton.jit
def hardswish_open(z, P0: tl.constexpr, P1: tl.constexpr):
    return z * _ramp(z) * _SIXTH


@triton.jit
def hardswish_open_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return tl.where(z < -3.0, 0.0, tl.where(z <= 3.0, g * (z * (1.0 / 3.0) + 0.5), g))


@triton.jit
def hard_swish(z, P0: tl.constexpr, P1: tl.constexpr):
    return z * (_ramp(z) * (1.0 / 6.0))


@triton.jit
def hard_swish_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    inner = tl.where((z + 3.0 <= 0.0) | (z + 3.0 >= 6.0), 0.0, g * z * (1.0 / 6.0))
    return g * (_ramp(z) * (1.0 / 6.0)) + inner


@triton.jit
def hard_mish(z, P0: tl.constexpr, P1: tl.constexpr):
    return 0.5 * z * hardtanh(z + 2.0, 0.0, 2.0)


@triton.jit
def hard_mish_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    u = z + 2.0
    inner = tl.where(_unclamped(u, 0.0, 2.0), g * (0.5 * z), 0.0)
    return g * (0.5 * hardtanh(u, 0.0, 2.0)) + inner
