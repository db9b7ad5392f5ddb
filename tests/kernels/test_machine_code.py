"""What must be seen in the machine code, since results tell it only on a device, or by a little. Needs no GPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fusedlayers import kernels
from fusedlayers.activations import get
from tests.kernels.test_compile import batch_norm, drop_norm, group_norm, linear, row_norm, split_heads


def test_float32_products_add_each_step_up_from_zero():
    """One long chain loses more than the library's sums. Fails where the compiler joins the two sums."""
    entry = next(e for e in linear() if e.name == "linear-ieee-64x64x16")
    plain = {"HAS_BIAS": False, "WRITE_Z": False, "ACT": kernels.load("activations").value(get("identity"))}
    ptx = replace(entry, constants={**entry.constants, **plain}).compile(90).asm["ptx"]
    assert len(re.findall(r"add\.(?:rn\.)?f32", ptx)) >= 64 * 64 // 128


def test_tf32_operands_are_rounded():
    """To nearest, as the vendor's are. Cut off by the tensor cores, errors are nearly three times as large."""
    assert "cvt.rna.tf32.f32" in next(e for e in linear() if e.name.startswith("linear-tf32")).compile(90).asm["ptx"]


@pytest.mark.parametrize("family", [row_norm, drop_norm, group_norm], ids=lambda f: f.__name__)
def test_no_mean_is_folded_into_what_follows(family):
    """The approximate division's product would be, but only where no statistics are stored: then bits differ."""
    for entry in family():
        if "WRITE_STATS" in entry.constants and entry.constants.get("CENTER", True):
            ptx = entry.compile(90).asm["ptx"]
            assert "div.rn.f32" in ptx or "fp64" in str(entry.signature), entry.name


def tiny(entry):
    """The kernel on a tile that gives each thread one value at most."""
    small = {"BR": 4, "BN": 16, "BG": 2, "BD": 4, "BS": 4}
    return replace(entry, constants={k: small.get(k, v) for k, v in entry.constants.items()})


@pytest.mark.parametrize("family", [row_norm, drop_norm, group_norm, batch_norm], ids=lambda f: f.__name__)
def test_no_product_is_fused_into_a_sum_over_lanes(family):
    """Two lanes would round differently, and one sum have two values. Fails with `tl.sum(x * x)`."""
    entries = list(family())
    entries += [tiny(e) for e in entries if e.fn.__name__ in ("forward", "backward_resident", "forward_resident")]
    for entry in entries:
        ptx = entry.compile(90).asm["ptx"]
        shuffled = set(re.findall(r"shfl\.sync\.\w+\.b32\s+(%\w+)", ptx))
        assert not shuffled & set(re.findall(r"fma\.rn\.f\d+\s+%\w+, %\w+, %\w+, (%\w+);", ptx)), entry.name


def test_heads_are_moved_16_bytes_at_a_time():
    """Fails where the compiler no longer sees that a head's elements are neighbours."""
    for entry in split_heads():
        if entry.name in ("pack-heads", "pack-heads-fp32"):
            moves = re.findall(r"(?:ld|st)\.global\S*", entry.compile(90).asm["ptx"])
            assert moves and all(".v4.b32" in move for move in moves), entry.name
