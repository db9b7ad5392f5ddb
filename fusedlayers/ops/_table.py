"""Which route pays, by op, device, direction, dtype and size: from a table, so that a call costs one lookup.

What a device decides is in the file shipped for it (`tables/<device>.json`). What the host decides, the size up to
which a call waits for it, differs from machine to machine: it comes from this machine's cache of earlier measurements,
or from one now (`_measure.py`, where `settings.autotune` allows it and nothing captures the stream). Where either sends
a size to another route, it goes there; else the op's own choice stands: a rule of thumb.

A table maps `op/direction/dtype` to runs `[bits, route]`: tensors of up to `bits` bits of size (`numel.bit_length()`)
take that route, `null` leaves it to the op. Only routes that compute the same up to rounding are ever exchanged.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..settings import settings

TABLES = Path(__file__).parent / "tables"
TRAIN, INFER = "train", "infer"
_PLAIN = (Tensor, nn.Parameter)
_BITS = 64
LARGEST = 1 << 25
"""No tensor above this size is worth a measurement: the device is the limit there."""
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}

Routes = tuple[str | None, ...]
"""The route for each bit length of a size."""

Entry = dict[torch.dtype, tuple[Routes, Routes]]
"""By dtype: without and with a backward. Empty: the op's own choice stands."""

_OWN: Routes = (None,) * (_BITS + 1)
REFERENCE: Entry = dict.fromkeys(NAMES, (("reference",) * (_BITS + 1),) * 2)

_entries: dict[tuple[str, int], Entry] = {}
_sources: dict[tuple[str, int], str] = {}


def known(op: str, tensors: Sequence[Tensor | None], draws: bool = False) -> str | None:
    """The route that a table already looked up has for a call; `tensors[0]` gives device, dtype and size.

    `draws`: it draws a mask. A checkpoint's two forwards, of which a reentrant one's first has no backward, must draw
    the same, so such a call counts as trained.
    """
    x = tensors[0] if tensors else None
    if type(x) not in _PLAIN:  # a proxy or a subclass would see its methods called
        return None
    entry = _entries.get((op, x.get_device()))
    if not entry or (pair := entry.get(x.dtype)) is None:
        return None
    numel = x.numel()
    if type(numel) is not int:  # torch.jit traces it
        return None
    bits = numel.bit_length()
    infer, train = pair[0][bits], pair[1][bits]
    if infer is train or draws:
        return train
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return train
    return infer


def trained(op: str, device: int, dtype: torch.dtype, numel: int) -> str | None:
    """Likewise for a call of this size with a backward, whose tensors there are not yet."""
    pair = _entries.get((op, device), {}).get(dtype)
    return None if pair is None else pair[1][numel.bit_length()]


def settled(op: str, x: Tensor) -> bool:
    """Whether the table for the device of `x` was already looked up, so that `known` has said all there is."""
    return (op, x.get_device()) in _entries


def choose(op: str, tensors: Sequence[Tensor | None], preferred: str, draws: bool = False) -> str:
    """The route of a call whose op prefers `preferred`, looked up or measured where it has not been."""
    x = tensors[0]
    if (op, x.get_device()) not in _entries:
        _resolve(op, x)
    return known(op, tensors, draws) or preferred


def explain(op: str, device: int = 0) -> str:
    """Where the routes of an op on a device come from, in words."""
    return _sources.get((op, device), "the op's own rule; nothing was looked up yet")


def sources() -> dict[str, str]:
    """By op, where its routes come from, of what was looked up for a CUDA device so far."""
    return {op: source for (op, device), source in sorted(_sources.items()) if device >= 0}


def forget() -> None:
    """Looks everything up again on next use, as after a change of `settings.cache` or `settings.autotune`."""
    _entries.clear()
    _sources.clear()
    _shipped.cache_clear()


@contextlib.contextmanager
def in_force(key: tuple[str, int], entry: Entry) -> Iterator[None]:
    """`entry` for this op and device, whatever the table says; for measuring, and for tests."""
    before = _entries.get(key)
    _entries[key] = entry
    try:
        yield
    finally:
        if before is None:
            del _entries[key]
        else:
            _entries[key] = before


def _resolve(op: str, x: Tensor) -> None:
    device = x.get_device()
    found: Mapping[str, Any] | None = {}
    shipped = None
    if not x.is_cuda:
        source = "the op's own rule: no measurements without a CUDA device"
    else:
        if x.numel() > LARGEST:
            return  # large enough that the device is the limit: the op's own rule, and no file read on each call
        name = torch.cuda.get_device_name(device)
        shipped = _shipped(name)
        if not settings.autotune:
            source = "the op's own rule: autotuning is off"
        else:
            from . import _measure

            found, source = _measure.look_up(op, x)
        if shipped is not None and found is not None:
            source = f"the table shipped for {name}, and {source}"
    if found is not None:  # else now is not the time, and a later call asks again
        _entries[op, device] = _joined(parse(op, found), parse(op, shipped or {}))
        _sources[op, device] = source


def _joined(first: Entry, second: Entry) -> Entry:
    """Both tables' routes; where both have one for a size, the first one's."""
    joined = dict(second)
    for dtype, (infer, train) in first.items():
        others = second.get(dtype, (_OWN, _OWN))
        joined[dtype] = _either(infer, others[0]), _either(train, others[1])
    return joined


def _either(first: Routes, second: Routes) -> Routes:
    return tuple(one or other for one, other in zip(first, second, strict=True))


@functools.lru_cache(maxsize=16)
def _shipped(device_name: str) -> Mapping[str, Any] | None:
    path = TABLES / f"{slug(device_name)}.json"
    return json.loads(path.read_text(encoding="utf-8"))["routes"] if path.exists() else None


def slug(device_name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def parse(op: str, routes: Mapping[str, Any]) -> Entry:
    """The entry of one op from a table's `routes`.

    Raises:
        ValueError: a table that cannot be read as the docstring above says.
    """
    if not isinstance(routes, Mapping):
        raise ValueError(f"not a route table: {reprlib.repr(routes)}")
    entry: Entry = {}
    for dtype, short in NAMES.items():
        infer, train = (_dense(routes.get(f"{op}/{direction}/{short}", ())) for direction in (INFER, TRAIN))
        if any(infer + train):
            entry[dtype] = infer, train
    return entry


def _dense(runs: Any) -> Routes:
    if not isinstance(runs, (list, tuple)):
        raise ValueError(f"not the runs of a route table: {reprlib.repr(runs)}")
    dense: list[str | None] = []
    for run in runs:
        bits, route = run if isinstance(run, (list, tuple)) and len(run) == 2 else (None, None)
        fits = type(bits) is int and max(0, len(dense) - 1) <= bits <= _BITS
        if not fits or route not in (None, "reference", "library", "triton"):
            raise ValueError(f"not a run of a route table: {reprlib.repr(run)}")
        dense += [route] * (bits + 1 - len(dense))
    return (*dense, *_OWN[len(dense) :])
