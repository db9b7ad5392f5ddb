"""What the autograd Functions share: when one is needed, and a backward that can itself be differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for a backward of a call on these tensors."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def hooked(*parameters: Tensor | None) -> bool:
    """Whether anyone may wait for the gradient of one of these, or of what one was computed from.

    A Function of several results would tell them even where the result that it belongs to was not used: `None`.
    """
    return any(
        p is not None and (p._backward_hooks or p.grad_fn is not None or p._post_accumulate_grad_hooks)
        for p in parameters
    )


def direct(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without the Python around it, which serves functorch: `_route.pick` has ruled that out.

    Nor is there any around its backward: what torch puts there looks for a `vjp`, which none of ours has.
    """
    if hasattr(function, "_backward_cls"):
        function._backward_cls.apply = function.backward
    return super(torch.autograd.Function, function).apply


def composite_backward(
    reference: Callable[..., Any], inputs: Sequence[Any], needs: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of `reference(*inputs)` in plain torch ops, differentiable when grad mode is on.

    Each input is seen through a view of its own: where one input was computed from another, only its direct
    contribution counts, as in any backward.

    Args:
        reference: the op's plain-PyTorch composition; returns a tensor or a tuple of tensors.
        inputs: its arguments; those that are not tensors pass through.
        needs: which of them need a gradient (`ctx.needs_input_grad`).
        grads: incoming gradients, one an output; `None` where an output was not used.

    Returns:
        One gradient an input, `None` where none is needed.
    """
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        seen = [_alias(t) if need else t for t, need in zip(inputs, needs, strict=True)]
        outputs = reference(*seen)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        used = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        wanted = [t for t, need in zip(seen, needs, strict=True) if need]
        if not used:
            return [None] * len(inputs)
        found = iter(
            torch.autograd.grad(
                [o for o, _ in used], wanted, [g for _, g in used], create_graph=create, allow_unused=True
            )
        )
    return [next(found) if need else None for need in needs]


def _alias(t: Tensor) -> Tensor:
    return t.view_as(t) if t.requires_grad else t.detach().requires_grad_()
