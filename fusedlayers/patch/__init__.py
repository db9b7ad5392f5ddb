"""Patching: find what can be fused in a model, swap it in, explain it, take it out again."""

from . import rules as _builtin_rules  # noqa: F401  registers them; below, `rules` is the function
from .guards import FallbackError, FallbackWarning
from .model import explain, patch_model, unpatch_model
from .plan import PatchPlan
from .report import PatchReport, Record
from .rule import Match, Rule, register_rule, rules

__all__ = [
    "FallbackError", "FallbackWarning", "Match", "PatchPlan", "PatchReport", "Record", "Rule", "explain", "patch_model",
    "register_rule", "rules", "unpatch_model",
]  # fmt: skip
