"""When a module may read its children's weights itself instead of calling them."""

from __future__ import annotations

from torch import nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_global_hooks = nn.modules.module


def plain(*children: nn.Module) -> bool:
    """Whether calling each of these would be `F.linear` on its parameters and nothing else.

    Not so with adapters or quantized layers in their place, hooks, or a `forward` of their own.
    """
    for child in children:
        if type(child) is not nn.Linear or "forward" in child.__dict__:
            return False
        if any(getattr(child, hooks) for hooks in _HOOKS):
            return False
    return not _any_global_hooks()


def _any_global_hooks() -> bool:
    m = _global_hooks
    return bool(
        m._global_forward_pre_hooks
        or m._global_forward_hooks
        or m._global_backward_pre_hooks
        or m._global_backward_hooks
    )
