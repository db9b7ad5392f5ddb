"""`y = act(scale * x + shift [+ residual])`, forward and backward, over dense memory.

Two families, by where the coefficients vary in memory order:

* `col`: `x` is `(A, T, C)`, coefficients `(A, C)` or `(C,)`: per channel of the last dim, channels_last, AdaLN.
* `row`: `x` is `(R, S)`, coefficients one a row with period `P`: NCHW, FiLM and SE gates, and scalars (`P = 1`).

Forward reads x (and residual) and writes y. Backward reads grad and x (or the kept activation) and writes dx, and
partial sums of the coefficients' gradients, one row a block, which `reduce.sum_partials` adds up: two stages, no
atomics, so every run gives the same bits.

`coef_ptr` (2, coefficients) is forward's private copy of scale and shift in the compute dtype: backward recomputes the
pre-activation from it, so a user may edit scale or shift in between, as eager allows.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What backward's activation gradient reads (the kernels' MASK)
NOTHING, RECOMPUTE, KEPT = 0, 1, 2


@triton.jit
def _affine(x, scale, shift, residual, HAS_RES: tl.constexpr):
    z = scale * x + shift
    if HAS_RES:
        z = z + residual
    return z


@triton.jit
def _coefficients(scale_ptr, shift_ptr, scale_value, shift_value, scale_at, shift_at, mask, CT: tl.constexpr,
                  HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr):  # fmt: skip
    """Loads scale and shift, or takes the Python scalars, in the compute dtype."""
    if HAS_SCALE:
        scale = tl.load(scale_ptr + scale_at, mask=mask, other=0.0).to(CT)
    else:
        scale = tl.zeros(mask.shape, dtype=CT) + scale_value
    if HAS_SHIFT:
        shift = tl.load(shift_ptr + shift_at, mask=mask, other=0.0).to(CT)
    else:
        shift = tl.zeros(mask.shape, dtype=CT) + shift_value
    return scale, shift


@triton.jit
def forward_col(
    x_ptr, res_ptr, scale_ptr, shift_ptr, y_ptr, z_ptr, coef_ptr,
    scale_value, shift_value, T, C, n_coef, scale_a, scale_c, shift_a, shift_c,
    CT: tl.constexpr, ACT: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_RES: tl.constexpr, WRITE_Z: tl.constexpr,
    WRITE_COEF: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Blocks (A * cdiv(T, BT) * cdiv(C, BC)). `scale_a`, `scale_c`: strides over A and C, 0 if it broadcasts."""
    pid = tl.program_id(0)
    blocks_c = tl.cdiv(C, BC)
    blocks_t = tl.cdiv(T, BT)
    pid_t = (pid // blocks_c) % blocks_t
    a = (pid // (blocks_c * blocks_t)).to(tl.int64)
    c = (pid % blocks_c) * BC + tl.arange(0, BC)
    in_c = c < C
    scale, shift = _coefficients(scale_ptr, shift_ptr, scale_value, shift_value, a * scale_a + c * scale_c,
                                 a * shift_a + c * shift_c, in_c, CT, HAS_SCALE, HAS_SHIFT)  # fmt: skip
    if WRITE_COEF:
        if pid_t == 0:
            tl.store(coef_ptr + a * C + c, scale, mask=in_c)
            tl.store(coef_ptr + n_coef + a * C + c, shift, mask=in_c)
    t = pid_t.to(tl.int64) * BT + tl.arange(0, BT)
    mask = (t < T)[:, None] & in_c[None, :]
    at = (a * T + t)[:, None] * C + c[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(CT)
    residual = x
    if HAS_RES:
        residual = tl.load(res_ptr + at, mask=mask, other=0.0).to(CT)
    z = _affine(x, scale[None, :], shift[None, :], residual, HAS_RES)
    if WRITE_Z:
        tl.store(z_ptr + at, z.to(z_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + at, ACT(z, P0, P1).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def forward_row(
    x_ptr, res_ptr, scale_ptr, shift_ptr, y_ptr, z_ptr, coef_ptr,
    scale_value, shift_value, R, S, P, scale_p, shift_p,
    CT: tl.constexpr, ACT: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_RES: tl.constexpr, WRITE_Z: tl.constexpr,
    WRITE_COEF: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Blocks (cdiv(R, BR) * cdiv(S, BS)). Row r takes coefficient r % P."""
    pid = tl.program_id(0)
    blocks_s = tl.cdiv(S, BS)
    pid_r = pid // blocks_s
    pid_s = pid % blocks_s
    r = pid_r.to(tl.int64) * BR + tl.arange(0, BR)
    in_r = r < R
    p = r % P
    scale, shift = _coefficients(scale_ptr, shift_ptr, scale_value, shift_value, p * scale_p, p * shift_p, in_r, CT,
                                 HAS_SCALE, HAS_SHIFT)  # fmt: skip
    if WRITE_COEF:
        if pid_s == 0:
            tl.store(coef_ptr + r, scale, mask=r < P)
            tl.store(coef_ptr + P + r, shift, mask=r < P)
    s = pid_s * BS + tl.arange(0, BS)
    mask = in_r[:, None] & (s < S)[None, :]
    at = r[:, None] * S + s[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(CT)
    residual = x
    if HAS_RES:
        residual = tl.load(res_ptr + at, mask=mask, other=0.0).to(CT)
    z = _affine(x, scale[:, None], shift[:, None], residual, HAS_RES)
    if WRITE_Z:
        tl.store(z_ptr + at, z.to(z_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + at, ACT(z, P0, P1).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _grad_z(g, x, kept, scale, shift, MASK: tl.constexpr, ACT: tl.constexpr, GRAD: tl.constexpr,
            KEEPS_OUTPUT: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr):  # fmt: skip
    """Gradient of the pre-activation, from what was kept or recomputed."""
    if MASK == 0:
        return g
    if MASK == 1:
        kept = scale * x + shift
        if KEEPS_OUTPUT:
            kept = ACT(kept, P0, P1)
    return GRAD(g, kept, P0, P1)


@triton.jit
def backward_col(
    g_ptr, x_ptr, kept_ptr, coef_ptr, dx_ptr, dres_ptr, partial_ptr,
    T, C, n_coef, rows_per_block, blocks_t,
    CT: tl.constexpr, ACT: tl.constexpr, GRAD: tl.constexpr, KEEPS_OUTPUT: tl.constexpr, P0: tl.constexpr,
    P1: tl.constexpr, MASK: tl.constexpr, NEED_DX: tl.constexpr, NEED_DRES: tl.constexpr,
    NEED_DSCALE: tl.constexpr, NEED_DSHIFT: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Blocks (A * blocks_t * cdiv(C, BC)): each walks `rows_per_block` rows of its BC columns.

    `partial_ptr` (2, blocks_t, n_coef): sums of dz * x, then of dz.
    """
    pid = tl.program_id(0)
    blocks_c = tl.cdiv(C, BC)
    pid_t = ((pid // blocks_c) % blocks_t).to(tl.int64)
    a = (pid // (blocks_c * blocks_t)).to(tl.int64)
    c = (pid % blocks_c) * BC + tl.arange(0, BC)
    in_c = c < C
    at_coef = a * C + c
    scale = tl.load(coef_ptr + at_coef, mask=in_c, other=0.0)
    shift = tl.load(coef_ptr + n_coef + at_coef, mask=in_c, other=0.0)
    sum_scale = tl.zeros((BT, BC), dtype=CT)
    sum_shift = tl.zeros((BT, BC), dtype=CT)
    begin = pid_t * rows_per_block
    end = tl.minimum(begin + rows_per_block, T)
    for start in range(begin, end, BT):
        t = start + tl.arange(0, BT)
        mask = (t < end)[:, None] & in_c[None, :]
        at = (a * T + t)[:, None] * C + c[None, :]
        g = tl.load(g_ptr + at, mask=mask, other=0.0).to(CT)
        x = g
        kept = g
        if NEED_DSCALE or MASK == 1:
            x = tl.load(x_ptr + at, mask=mask, other=0.0).to(CT)
        if MASK == 2:
            kept = tl.load(kept_ptr + at, mask=mask, other=0.0).to(CT)
        dz = _grad_z(g, x, kept, scale[None, :], shift[None, :], MASK, ACT, GRAD, KEEPS_OUTPUT, P0, P1)
        # lanes past the edge computed act'(shift) of nothing; 0 * inf must not reach the sums
        dz = tl.where(mask, dz, 0.0)
        if NEED_DX:
            tl.store(dx_ptr + at, (dz * scale[None, :]).to(dx_ptr.dtype.element_ty), mask=mask)
        if NEED_DRES:
            tl.store(dres_ptr + at, dz.to(dres_ptr.dtype.element_ty), mask=mask)
        if NEED_DSCALE:
            sum_scale += dz * x
        if NEED_DSHIFT:
            sum_shift += dz
    at_partial = pid_t * n_coef + at_coef
    if NEED_DSCALE:
        tl.store(partial_ptr + at_partial, tl.sum(sum_scale, axis=0), mask=in_c)
    if NEED_DSHIFT:
        tl.store(partial_ptr + tl.cast(blocks_t, tl.int64) * n_coef + at_partial, tl.sum(sum_shift, axis=0), mask=in_c)


@triton.jit
def backward_row(
    g_ptr, x_ptr, kept_ptr, coef_ptr, dx_ptr, dres_ptr, partial_ptr,
    R, S, P, cols_per_block, blocks_s, n_rows,
    CT: tl.constexpr, ACT: tl.constexpr, GRAD: tl.constexpr, KEEPS_OUTPUT: tl.constexpr, P0: tl.constexpr,
    P1: tl.constexpr, MASK: tl.constexpr, NEED_DX: tl.constexpr, NEED_DRES: tl.constexpr,
    NEED_DSCALE: tl.constexpr, NEED_DSHIFT: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Blocks (cdiv(R, BR) * blocks_s): each walks `cols_per_block` columns of its BR rows.

    `partial_ptr` (2, n_rows = R / P * blocks_s, P): row r, chunk k adds at ((r // P) * blocks_s + k, r % P).
    """
    pid = tl.program_id(0)
    pid_r = (pid // blocks_s).to(tl.int64)
    pid_s = (pid % blocks_s).to(tl.int64)
    r = pid_r * BR + tl.arange(0, BR)
    in_r = r < R
    p = r % P
    scale = tl.load(coef_ptr + p, mask=in_r, other=0.0)
    shift = tl.load(coef_ptr + P + p, mask=in_r, other=0.0)
    sum_scale = tl.zeros((BR, BS), dtype=CT)
    sum_shift = tl.zeros((BR, BS), dtype=CT)
    begin = pid_s * cols_per_block
    end = tl.minimum(begin + cols_per_block, S)
    for start in range(begin, end, BS):
        s = start + tl.arange(0, BS)
        mask = in_r[:, None] & (s < end)[None, :]
        at = r[:, None] * S + s[None, :]
        g = tl.load(g_ptr + at, mask=mask, other=0.0).to(CT)
        x = g
        kept = g
        if NEED_DSCALE or MASK == 1:
            x = tl.load(x_ptr + at, mask=mask, other=0.0).to(CT)
        if MASK == 2:
            kept = tl.load(kept_ptr + at, mask=mask, other=0.0).to(CT)
        dz = _grad_z(g, x, kept, scale[:, None], shift[:, None], MASK, ACT, GRAD, KEEPS_OUTPUT, P0, P1)
        dz = tl.where(mask, dz, 0.0)
        if NEED_DX:
            tl.store(dx_ptr + at, (dz * scale[:, None]).to(dx_ptr.dtype.element_ty), mask=mask)
        if NEED_DRES:
            tl.store(dres_ptr + at, dz.to(dres_ptr.dtype.element_ty), mask=mask)
        if NEED_DSCALE:
            sum_scale += dz * x
        if NEED_DSHIFT:
            sum_shift += dz
    at_partial = ((r // P) * blocks_s + pid_s) * P + p
    if NEED_DSCALE:
        tl.store(partial_ptr + at_partial, tl.sum(sum_scale, axis=1), mask=in_r)
    if NEED_DSHIFT:
        tl.store(partial_ptr + tl.cast(n_rows, tl.int64) * P + at_partial, tl.sum(sum_shift, axis=1), mask=in_r)
