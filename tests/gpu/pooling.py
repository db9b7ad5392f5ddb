"""Several comparisons of one model taken together.

Of thousands of tensors a few are off by chance: one rounding moves a value over an activation's kink, or a mean lies so
near zero that its relative error says nothing. What is wrong is off on other batches too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

from fusedlayers.patch import VerifyReport

DRAWS = 4


def assert_verified(verified: Callable[[int], VerifyReport], note: str = "") -> VerifyReport:
    """`verified(seed)` compares on the batch of that seed. Where the first is off, several are judged as one."""
    report = verified(0)
    assert not report.error and report.comparisons, f"{report}\n{note}"
    if not report:
        off = pooled([report, *(verified(seed) for seed in range(1, DRAWS))])
        assert not off, f"{off}\n{report}\n{note}"
    return report


def pooled(reports: list[VerifyReport]) -> dict[tuple[str, str], float]:
    """The tensors whose mean square error over all reports is more than the mean square of what was allowed."""
    assert not any(c.note for report in reports for c in report.comparisons), "\n".join(map(str, reports))
    squares: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for report in reports:
        for c in report.comparisons:
            squares.setdefault((c.kind, c.name), []).append((c.error**2, c.allowed**2))
    means = {key: (fmean(e for e, _ in pairs), fmean(a for _, a in pairs)) for key, pairs in squares.items()}
    return {
        key: math.sqrt(error / allowed) if allowed else math.inf
        for key, (error, allowed) in means.items()
        if error > allowed
    }
