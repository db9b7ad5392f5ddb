"""What was fused, what was not, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ..ops import _route
from .records import Counts


@dataclass(frozen=True)
class Record:
    """One site: `status` is "fused", "reduced" or "skipped"; all names are dotted, from the model's root."""

    name: str
    rule: str
    status: str
    reason: str
    modules: tuple[str, ...]
    kind: str = ""


@dataclass
class PatchReport:
    """Records of every site, what they cover, and what has fallen back since patching.

    Iterating gives all records, fused ones first; `str()` is a table under one line to read.
    """

    fused: list[Record] = field(default_factory=list)
    reduced: list[Record] = field(default_factory=list)
    skipped: list[Record] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    fallbacks: dict[str, Counter[str]] = field(default_factory=dict)
    """Dotted module name to how often a call there took the original path, by reason."""
    patched: bool = False
    device: str = ""
    precision: str = ""
    dropouts: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    """Ops whose kernel could not be built or launched in this process, and why; they run as plain PyTorch."""

    def add(self, record: Record) -> None:
        {"fused": self.fused, "reduced": self.reduced, "skipped": self.skipped}[record.status].append(record)

    def __iter__(self) -> Iterator[Record]:
        yield from self.fused
        yield from self.reduced
        yield from self.skipped

    def __len__(self) -> int:
        return len(self.fused) + len(self.reduced) + len(self.skipped)

    @property
    def routes(self) -> dict[str, str]:
        """By op, how its calls choose between the kernels and eager's own ops here, as far as they had to yet."""
        return _route.chosen() if self.patched else {}

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and numbers, for JSON."""
        return {
            "summary": self.summary(),
            "patched": self.patched,
            "device": self.device,
            "precision": self.precision,
            "coverage": {k: {"fused": self.counts.fused[k], "total": n} for k, n in self.counts.total.items()},
            **{
                s: [asdict(r) | {"modules": list(r.modules)} for r in getattr(self, s)]
                for s in ("fused", "reduced", "skipped")
            },
            "fallbacks": {name: dict(reasons) for name, reasons in self.fallbacks.items()},
            "failures": dict(self.failures),
            "routes": self.routes,
        }

    def summary(self) -> str:
        """One line: where, how much is fused, what dropout does, and what to try next."""
        names = {"norm": "norms", "residual": "adds", "activation": "activations"}
        share = ", ".join(f"{self.counts.fused[k]}/{self.counts.total[k]} {name}" for k, name in names.items())
        where = " ".join(filter(None, (self.device, self.precision)))
        verb = "fused" if self.patched else "would be fused"
        sites = f"{len(self.fused)} sites {verb} ({share}), {len(self.reduced)} reduced, {len(self.skipped)} skipped"
        dropout = "; dropout keeps eager's masks" if self.dropouts else ""
        return f"{where}: {sites}{dropout}; next: {self._next()}"

    def _next(self) -> str:
        if self.fallbacks:
            return "see the fallbacks below"
        if not self.patched:
            return "fl.patch_model(model)" if self.fused or self.reduced else "nothing here can be fused"
        return "fl.verify(model, x)"

    def __str__(self) -> str:
        rows = [(r.status, r.name or "(root)", r.rule or "-", r.reason or _members(r)) for r in self]
        lines = [self.summary()]
        if rows:
            lines += ["", *_table(("", "site", "rule", "reason or members"), rows)]
        if self.fallbacks:
            counted = [
                (n or "(root)", str(c), why) for n, reasons in self.fallbacks.items() for why, c in reasons.items()
            ]
            lines += ["", "calls that took the original path:", *_table(("module", "calls", "reason"), counted)]
        if self.routes:
            lines += ["", "routes:", *_table(("op", "chosen"), list(self.routes.items()))]
        lines += [f"{op} runs as plain PyTorch: {why}" for op, why in self.failures.items()]
        return "\n".join(lines)


def _members(record: Record) -> str:
    stem = record.name.rpartition(".")[0]
    return ", ".join(m.removeprefix(stem + ".") if stem else m for m in record.modules)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    line = lambda row: "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()  # noqa: E731
    return [line(head), "  ".join("-" * w for w in widths), *map(line, rows)]
