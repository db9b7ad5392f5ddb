"""What every test measures with: the accuracy rule, ragged sizes, dtypes, and awkward ways to lay out a tensor.

The rule: against a float64 evaluation, a fused result is at most 1.5 times as far off as eager's own, plus a few ulp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
RAGGED = (1, 3, 17, 33, 513)
FACTOR = 1.5
ULPS = {torch.float16: 3.0, torch.bfloat16: 3.0, torch.float32: 3.0, torch.float64: 16.0}
"""Slack beside the factor. In float64 eager is its own reference, so all of a difference in summation order shows."""


@dataclass(frozen=True)
class Ratio:
    """How far a result is off float64, as a multiple of eager's own error."""

    what: str
    fused: float
    eager: float

    @property
    def value(self) -> float:
        return self.fused / self.eager if self.eager > 0 else (0.0 if self.fused == 0 else math.inf)


def assert_accurate(
    fused: Tensor,
    eager: Tensor,
    exact: Tensor,
    what: str = "result",
    terms: int = 1,
    computed: torch.dtype | None = None,
    steepness: float = 1.0,
) -> Ratio:
    """Holds one tensor to the accuracy rule, in the Frobenius norm and in the largest single error.

    `terms` standard normal values were added up for each element: where they cancel by luck, a few ulp means a few
    ulp of their usual sum, sqrt(terms), not of what happened to be left. `computed`: the dtype whose ulp these are,
    where autocast computes in a lower one than that of the result. `steepness`: by how much the function multiplies
    an ulp of what it is computed from.
    """
    assert fused.shape == eager.shape, f"{what}: shape {tuple(fused.shape)}, eager has {tuple(eager.shape)}"
    assert fused.dtype == eager.dtype, f"{what}: {fused.dtype}, eager has {eager.dtype}"
    assert fused.device == eager.device, f"{what}: on {fused.device}, eager on {eager.device}"
    f, e, x = (t.detach().to("cpu", torch.float64) for t in (fused, eager, exact))
    finite = e.isfinite() & x.isfinite()
    odd = ~e.isfinite()
    assert torch.equal(f[odd].nan_to_num(7e77), e[odd].nan_to_num(7e77)), f"{what}: NaN and inf differ from eager's"
    f, e, x = f[finite], e[finite], x[finite]
    if f.numel() == 0:
        return Ratio(what, 0.0, 0.0)
    computed = computed or fused.dtype
    eps = torch.finfo(computed).eps
    for norm in (lambda t: t.norm().item(), lambda t: t.abs().max().item()):
        size = max(norm(x), math.sqrt(terms) * steepness * norm(torch.ones_like(x)) if terms > 1 else 0.0)
        slack = ULPS[computed] * eps * size + torch.finfo(fused.dtype).tiny
        off, allowed = norm(f - x), FACTOR * norm(e - x) + slack
        assert off <= allowed, (
            f"{what} ({fused.dtype}): off by {off:.3g}, eager by {norm(e - x):.3g}, allowed {allowed:.3g}"
        )
    return Ratio(what, (f - x).norm().item(), (e - x).norm().item())


def run(fn: Callable[..., Any], inputs: Sequence[Any], grads: Sequence[Tensor] | None = None) -> tuple[list, list]:
    """Outputs of `fn(*inputs)` and the gradients of every input that requires one.

    `grads` are the incoming gradients, one an output; without them only the forward runs.
    """
    out = fn(*inputs)
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    if grads is None:
        return outs, []
    wanted = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    return outs, list(torch.autograd.grad(outs, wanted, list(grads), allow_unused=True))


def compare(
    fused: Callable[..., Any],
    eager: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    backward: bool = True,
    seed: int = 0,
    sums: bool = False,
    computed: torch.dtype | None = None,
    steepness: float = 1.0,
) -> list[Ratio]:
    """Holds every output and every input gradient of `fused` to the accuracy rule against `eager` on the same inputs.

    Inputs that require a gradient get one compared; `None` must be `None` on both sides. Inputs must not be written.
    `sums`: elements of the outputs are sums as well, of about unit size, which may cancel by luck. `steepness`: see
    `assert_accurate`.
    """
    before = [t.detach().clone() if isinstance(t, Tensor) else t for t in inputs]
    doubles = [_double(t) for t in inputs]
    eager_outs, _ = run(eager, inputs)
    grads = doubled = None
    if backward and any(o.requires_grad for o in eager_outs):
        g = torch.Generator().manual_seed(seed)
        grads = [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.device, o.dtype) for o in eager_outs]
        doubled = [t.double() for t in grads]
    results = [run(fused, inputs, grads), run(eager, inputs, grads), run(eager, doubles, doubled)]
    for t, was in zip(inputs, before, strict=True):
        if isinstance(t, Tensor):
            assert torch.equal(t.detach().nan_to_num(), was.nan_to_num()), "an input was written"
    ratios = []
    for kind, rows in zip(("output", "gradient"), zip(*results, strict=True), strict=True):
        assert len(rows[0]) == len(rows[1])
        for i, (f, e, x) in enumerate(zip(*rows, strict=True)):
            assert (f is None) == (e is None), f"{kind} {i}: {f} where eager has {e}"
            if f is not None:
                added = sum(g.numel() for g in grads or ()) // max(f.numel(), 1) if kind == "gradient" else 1
                ratios.append(
                    assert_accurate(f, e, x, f"{kind} {i}", max(added, 2 if sums else 1), computed, steepness)
                )
    return ratios


def _double(t: Any) -> Any:
    if not isinstance(t, Tensor) or not t.is_floating_point():
        return t
    return t.detach().double().requires_grad_(t.requires_grad)


def randn(
    *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", grad: bool = True, seed: int = 0
) -> Tensor:
    """Standard normal values, the same on every device."""
    g = torch.Generator().manual_seed(seed + 7919 * sum((i + 1) * n for i, n in enumerate(shape)))
    return torch.randn(shape, generator=g, dtype=torch.float64).to(device, dtype).requires_grad_(grad)


LAYOUTS = ("contiguous", "transposed", "sliced", "in_nan_buffer", "expanded")


def laid_out(t: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout; an expanded one repeats the first slice of the first dim."""
    grad, t = t.requires_grad, t.detach()
    if layout == "transposed" and t.dim() > 1:
        t = t.transpose(0, -1).contiguous().transpose(0, -1)
    elif layout == "sliced":
        t = t.repeat_interleave(2, dim=-1)[..., ::2]
    elif layout == "in_nan_buffer":
        buffer = t.new_full([n + 2 for n in t.shape], float("nan"))
        inner = buffer[tuple(slice(1, n + 1) for n in t.shape)]
        inner.copy_(t)
        t = inner
    elif layout == "expanded" and t.shape[0] > 0:
        t = t[:1].expand_as(t)
    return t.requires_grad_(grad)
