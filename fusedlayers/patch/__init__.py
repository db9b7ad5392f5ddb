"""Patching: find what can be fused in a model, swap it in, explain it, take it out again."""

from . import rules as _builtin_rules  # noqa: F401  registers them; below, `rules` is the function
from .guards import FallbackError, FallbackWarning
from .model import explain, patch_model, unpatch_model
from .plan import PatchPlan
from .report import PatchReport, Record
from .rule import NO_MATCH, Match, Rule, register_rule, rules
from .tune import TuneRecord, TuneReport, tune
from .verify import VerificationError, VerifyReport, verify

__all__ = [
    "NO_MATCH", "FallbackError", "FallbackWarning", "Match", "PatchPlan", "PatchReport", "Record", "Rule", "TuneRecord",
    "TuneReport", "VerificationError", "VerifyReport", "explain", "patch_model", "register_rule", "rules", "tune",
    "unpatch_model", "verify",
]  # fmt: skip
