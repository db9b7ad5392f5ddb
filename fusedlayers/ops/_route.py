"""Which way a call runs: `"reference"` (plain PyTorch), `"library"` (vendor epilogue) or `"triton"`.

Every op asks `pick` once per call. Whatever traces, transforms or intercepts a computation sees plain PyTorch ops.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels
from ..settings import settings
from . import _table

_PLAIN = (Tensor, nn.Parameter)
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_STRIDED = torch.strided
_INTERPRETED = kernels.interpreted()
_NOTHING = "no tensor"
is_compiling = torch.compiler.is_compiling
_is_tracing = torch._C._get_tracing_state
_functorch_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_forward_ad = torch.autograd.forward_ad
_unavailable = kernels.unavailable

failures: dict[str, str] = {}
"""Ops whose kernel could not be built or launched in this process, and why; they run as reference from then on."""

own_modes = 0
"""Dispatch modes that only count, set by `fusedlayers.inspect`: beside them a call takes its usual route."""


class _Held(threading.local):
    """The routes by op that a saved plan gives the patched module whose forward this thread is in."""

    routes: Mapping[str, str] | None = None


held = _Held()


def intercepted() -> str | None:
    """Who is looking at each torch op right now, if anyone: such calls take plain PyTorch ops."""
    if is_compiling():
        return "torch.compile or torch.export is tracing"
    if _is_tracing() is not None:
        return "torch.jit is tracing"
    if _functorch_active():
        return "a torch.func transform is active"
    if _forward_ad._current_level >= 0:
        return "forward-mode AD is active"
    if _dispatch_modes() > own_modes:
        return "a dispatch mode is active"
    return None


def obstacle(tensors: Sequence[Tensor | None]) -> str | None:
    """Why these tensors cannot go to a kernel; `None` when they can."""
    first = at = None
    keeps = torch.is_grad_enabled()
    for t in tensors:
        if t is not None:
            if type(t) not in _PLAIN:
                return f"{type(t).__name__} is a tensor subclass"
            if t.dtype not in _FLOATS:
                return f"{t.dtype} is not a float dtype the kernels take"
            if t.layout is not _STRIDED or t.is_neg():
                return f"layout {t.layout} is not dense"
            if keeps and t.is_inference():
                return "an inference tensor cannot be kept for backward"
            device = t.get_device()
            if first is None:
                first, at = t, device
            elif device != at:
                return f"tensors lie on {first.device} and {t.device}"
    if first is None:
        return _NOTHING
    if first.is_cuda:
        return "kernels are interpreted, on the CPU" if _INTERPRETED else None
    if not first.is_cpu:
        return f"no kernels for {first.device.type}"
    if not _INTERPRETED:
        return "the tensors lie on the CPU"
    return None if all(t is None or t.is_cpu for t in tensors) else "not all tensors lie on the CPU"


def pick(
    op: str,
    tensors: Sequence[Tensor | None],
    *,
    plan: Callable[[], Any],
    library: bool = False,
    auto: Callable[[Any], str] | None = None,
    draws: bool = False,
) -> tuple[str, Any]:
    """The route of this call, and the plan its kernels need.

    Args:
        op: name of the op, for messages and for `failures`.
        tensors: all tensor arguments, the input first (other `None` entries are skipped).
        plan: asked only where kernels could run; gives what they need to know, or a string: why they cannot.
        library: whether the op has a vendor-library route.
        auto: the op's own choice for a plan where nothing is forced (default: `"triton"`), which a table may overrule.
        draws: whether the call draws random numbers.

    Raises:
        RuntimeError: the Triton route is forced and cannot run, with the reason.
    """
    wanted = settings.route
    planned = routes = None
    if wanted == "auto":
        routes = held.routes
        planned = _table.known(op, tensors, draws) if routes is None else routes.get(op)
    # first of all, since here eager's own ops are the faster ones
    if planned == "reference" or wanted == "reference" or intercepted() is not None:
        return "reference", None
    # torch says better what is wrong with no input
    found = (tensors[0] is None and _NOTHING) or obstacle(tensors) or failures.get(op) or _unavailable() or plan()
    if type(found) is str:
        if wanted == "triton":
            raise RuntimeError(f"{op}: route 'triton' was forced and cannot run: {found}")
        return "reference", None
    if wanted == "library" or planned == "library":
        return ("library" if library else "reference"), found
    if wanted == "triton" or planned == "triton":
        return "triton", found
    preferred = "triton" if auto is None else auto(found)
    if routes is None and _table.settled(op, tensors[0]):  # and had nothing to say above
        return preferred, found
    return _table.choose(op, tensors, preferred, draws), found


def tables_choose() -> bool:
    """Whether neither the user nor a saved plan gives the route."""
    return settings.route == "auto" and held.routes is None


def chosen() -> dict[str, str]:
    """By op, how its calls choose their route in this process, as far as they had to; for reports."""
    found = {}
    if settings.route != "auto":
        found["(all)"] = f"{settings.route}, forced by settings"
    found.update({op: f"by {source}" for op, source in _table.sources().items()})
    found.update({op: f"plain PyTorch, {why}" for op, why in failures.items()})
    return found


def failed(op: str, error: Exception) -> None:
    """Records that an op's kernel cannot run here, warns once, and raises where the route was forced.

    What only this call's tensors are the reason for is not held against later ones.
    """
    if settings.route == "triton":
        raise error
    if isinstance(error, kernels.NoStorageError):
        return
    if op not in failures:
        failures[op] = str(error)
        warnings.warn(f"{op} runs as plain PyTorch from now on: {error}", RuntimeWarning, stacklevel=3)
