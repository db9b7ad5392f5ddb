"""What graph nodes do besides returning a value: which overwrite an argument, return one, or draw random numbers."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node
from torch.nn.modules import activation, batchnorm, conv, instancenorm, linear, normalization, pooling

from ..activations import is_inplace, recognise
from .guards import original_class

_FRESH_MODULES = (linear.Linear, linear.Bilinear, conv._ConvNd, batchnorm._BatchNorm, instancenorm._InstanceNorm)
_FRESH_MODULES += (normalization.LayerNorm, normalization.GroupNorm, nn.Embedding, pooling._AdaptiveAvgPoolNd)
_FRESH_MODULES += (pooling._AvgPoolNd, pooling._MaxPoolNd) + ((nn.RMSNorm,) if hasattr(nn, "RMSNorm") else ())
_ACTIVATIONS = tuple(
    c
    for c in vars(activation).values()
    if isinstance(c, type) and c.__module__ == activation.__name__ and c not in (nn.MultiheadAttention, nn.RReLU)
)
_QUIET_NAMES = ("torchvision.ops.misc.FrozenBatchNorm2d", "transformers.pytorch_utils.Conv1D")
_PROJECTIONS = (
    "peft.tuners.lora.layer.Linear",
    "peft.tuners.lora.bnb.Linear4bit",
    "peft.tuners.lora.bnb.Linear8bitLt",
    "bitsandbytes.nn.modules.Linear4bit",
    "bitsandbytes.nn.modules.Linear8bitLt",
)
"""Layers known to return a new tensor and to leave their input alone; an adapter's dropout may draw."""
_QUIET = (*_FRESH_MODULES, *_ACTIVATIONS, nn.Identity, nn.Flatten, nn.Sequential)
_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.truediv, operator.matmul, operator.pow, operator.neg}
_ARITHMETIC |= {torch.add, torch.sub, torch.mul, torch.div, torch.matmul, torch.cat, torch.stack, F.linear, F.conv2d}
_ARITHMETIC |= {
    torch.sigmoid,
    torch.tanh,
    torch.exp,
    F.silu,
    F.softplus,
    F.layer_norm,
    F.group_norm,
    F.batch_norm,
    F.gelu,
    F.softmax,
    torch.bmm,
}
_RANDOM = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu}
_RANDOM_NAMES = ("rand", "drop", "bernoulli", "normal", "uniform", "multinomial", "stochastic", "attention", "gumbel")
_RANDOM_NAMES += ("poisson", "binomial", "exponential", "cauchy", "geometric", "fractional", "rrelu")
_AUGMENTED = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod}
_AUGMENTED |= {operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor}
_AUGMENTED |= {operator.ilshift, operator.irshift}


def child(root: nn.Module, target: str) -> nn.Module | None:
    """The module at a dotted path, or None."""
    for name in target.split("."):
        root = root._modules.get(name) if root is not None else None  # type: ignore[assignment]
    return root


def is_fresh(node: Node, root: nn.Module) -> bool:
    """Whether the value is surely a new tensor that nothing else holds."""
    if node.meta.get("fused"):
        return not node.meta.get("views")
    if node.op == "call_module":
        module = child(root, node.target)
        if module is not None and _name(module) in (*_QUIET_NAMES, *_PROJECTIONS):
            return True
        if module is None or not original_class(module).__module__.startswith("torch.nn."):
            return False
        return isinstance(module, _FRESH_MODULES) or (isinstance(module, _ACTIVATIONS) and not is_inplace(module))
    return node.op == "call_function" and node.target in _ARITHMETIC and not overwrites(node, root)


def overwrites(node: Node, root: nn.Module) -> list[Node]:
    """Arguments that the node may change in place: surely, or because it is a module not known to leave them alone."""
    inputs = node.all_input_nodes
    if node.op == "call_module":
        module = child(root, node.target)
        quiet = module is not None and (_is_quiet(module) or _name(module) in _PROJECTIONS)
        return [] if quiet else inputs
    if node.op == "call_method":
        inplace = (node.target.endswith("_") and not node.target.endswith("__")) or node.target == "__setitem__"
        return inputs[:1] if inplace else []
    if node.op != "call_function" or node.meta.get("fused"):
        return []
    name = getattr(node.target, "__name__", "")
    if node.target is operator.setitem or node.target in _AUGMENTED:
        return inputs[:1]
    if name.endswith("_") or node.kwargs.get("inplace") or "out" in node.kwargs:
        return inputs
    if recognise(node.target, node.args[1:], node.kwargs) is None and any(a is True for a in node.args[1:]):
        return inputs  # may be a positional inplace=True
    return []


def _is_quiet(module: nn.Module) -> bool:
    """Known to change neither its inputs nor any generator."""
    return all(
        (original_class(m).__module__.startswith("torch.nn.") and isinstance(m, _QUIET) and not is_inplace(m))
        or _name(m) in _QUIET_NAMES
        for m in module.modules()
    )


def _name(module: nn.Module) -> str:
    cls = original_class(module)
    return f"{cls.__module__}.{cls.__qualname__}"


def is_data(node: Any) -> bool:
    """Something computed from an input: not a parameter, a shape or a size."""
    if not isinstance(node, Node) or node.op == "get_attr":
        return False
    if node.op in ("call_function", "call_method") and (node.target is getattr or node.target == "size"):
        return False
    if node.op == "call_function" and node.target is operator.getitem:
        return is_data(node.args[0])
    return True


def is_random(node: Node, root: nn.Module) -> bool:
    """Whether the node may draw from a generator."""
    if node.op == "call_module":
        module = child(root, node.target)
        return module is None or not _is_quiet(module)
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        return node.target in _RANDOM or any(part in name for part in _RANDOM_NAMES)
    return node.op == "call_method" and any(part in str(node.target) for part in _RANDOM_NAMES)


def roots(node: Node, root: nn.Module) -> set[Node]:
    """The values whose memory `node` may share."""
    found: set[Node] = set()
    pending = [node]
    while pending:
        node = pending.pop()
        if node in found:  # values meet again and again where blocks follow one another
            continue
        found.add(node)
        if is_fresh(node, root) or node.op in ("placeholder", "get_attr"):
            continue
        first = node.target in _AUGMENTED or (node.op == "call_method" and str(node.target).endswith("_"))
        pending += node.all_input_nodes[:1] if first else node.all_input_nodes
    return found


def disturbed(operands: Iterable[Node], between: Iterable[Node], root: nn.Module) -> Node | None:
    """The first node of `between`, in order, that may overwrite memory of one of `operands` that is there by then, or a
    parameter or buffer: whose else that is, and which children read it, the graph does not say."""
    between, operands = list(between), list(operands)
    for at, node in enumerate(between):
        written = {m for w in overwrites(node, root) for m in roots(w, root)}
        if any(w.op == "get_attr" for w in written):
            return node
        if written and any(roots(o, root) & written for o in operands if o not in between[at:]):
            return node
    return None
