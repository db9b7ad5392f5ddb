"""Cheaper forms of the costly activations, for results that are rounded to half precision anyway.

In float32 these are right to 3e-5 of the result, a sixteenth of float16's ulp and less of bfloat16's: nothing is left
of that after rounding, and the arithmetic no longer outlasts the memory traffic. Signatures, and what happens at NaN
and infinities, are those of `activations.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activations import reciprocal


@triton.jit
def _normal(z):
    """Phi(z) and exp(-z*z/2), in the form of `activations._normal` with five coefficients (minimax, relative)."""
    e = tl.exp2(z * z * -0.7213475204444817)
    t = reciprocal(1.0 + 0.375 * tl.abs(z))
    q = 1.0 - t
    poly = q * -0.0909848448074881 + 0.16289682642475564
    poly = q * (q * poly + 0.1401931440157701) + -0.5630573245057613
    poly = q * poly + 0.49999334207271035
    tail = e * (t * poly)
    return tl.where(z < 0, tail, 1.0 - tail), e


@triton.jit
def _sigmoids(z):
    """sigmoid(z) and 1 - sigmoid(z), the latter without its cancellation."""
    e = tl.exp(-tl.abs(z))
    larger = reciprocal(1.0 + e)
    smaller = e * larger
    return tl.where(z < 0, smaller, larger), tl.where(z < 0, larger, smaller)


@triton.jit
def gelu(z, P0: tl.constexpr, P1: tl.constexpr):
    cdf, _ = _normal(z)
    return z * cdf


@triton.jit
def gelu_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    cdf, e = _normal(z)
    return g * (cdf + z * e * 0.3989422804014327)


@triton.jit
def _gelu_by_tanh(z, TWICE: tl.constexpr):
    s, _ = _sigmoids(z * (TWICE + (TWICE * 0.044715) * z * z))
    return z * s


@triton.jit
def _gelu_by_tanh_grad(g, z, TWICE: tl.constexpr):
    square = z * z
    s, rest = _sigmoids(z * (TWICE + (TWICE * 0.044715) * square))
    return g * (s + z * s * rest * (TWICE + (TWICE * 0.134145) * square))


@triton.jit
def gelu_tanh(z, P0: tl.constexpr, P1: tl.constexpr):
    return _gelu_by_tanh(z, 1.5957691216057308)


@triton.jit
def gelu_tanh_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    return _gelu_by_tanh_grad(g, z, 1.5957691216057308)


@triton.jit
def quick_gelu(z, P0: tl.constexpr, P1: tl.constexpr):
    s, _ = _sigmoids(1.702 * z)
    return z * s


@triton.jit
def quick_gelu_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    s, rest = _sigmoids(1.702 * z)
    return g * (s + 1.702 * (z * s * rest))


@triton.jit
def silu(z, P0: tl.constexpr, P1: tl.constexpr):
    s, _ = _sigmoids(z)
    return z * s


@triton.jit
def silu_grad(g, z, P0: tl.constexpr, P1: tl.constexpr):
    s, rest = _sigmoids(z)
    return g * (s + z * s * rest)
