"""When a module may read its children's weights itself instead of calling them, and how it reads weights at all."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_global_hooks = nn.modules.module
_is_compiling = torch.compiler.is_compiling


def stored(module: nn.Module, *names: str) -> list[Tensor | None]:
    """The parameters and buffers of these names, as attributes give them.

    `nn.Module.__getattr__` is Python that costs more than all else a small layer does. Where an attribute is something
    else, as under a parametrization, it has left these dicts.
    """
    if _is_compiling():
        return [getattr(module, name) for name in names]
    own = module.__dict__
    parameters, buffers = own["_parameters"], own["_buffers"]
    found = []
    for name in names:
        if name in own:
            found.append(own[name])
        elif name in parameters:
            found.append(parameters[name])
        elif name in buffers:
            found.append(buffers[name])
        else:
            found.append(getattr(module, name))
    return found


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
