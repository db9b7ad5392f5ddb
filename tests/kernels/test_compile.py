"""Every kernel configuration compiles for sm_80, sm_89 and sm_90 and fits its shared memory. Needs no GPU.

Each family gives its entries; a new kernel adds a function to `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fusedlayers import kernels
from fusedlayers.activations import get
from tests.kernels.compiling import ARCHS, SHARED_MEMORY, Entry

if kernels.interpreted():
    pytest.skip("interpreted kernels are not compiled: run without TRITON_INTERPRET", allow_module_level=True)
if kernels.unavailable():
    pytest.skip(f"{kernels.unavailable()}", allow_module_level=True)


def linear() -> Iterator[Entry]:
    import triton.language as tl

    module, act = kernels.load("linear"), kernels.load("activations")
    units = {"half": ("bf16", "ieee"), "tf32": ("fp32", "tf32"), "ieee": ("fp32", "ieee"), "float64": ("fp64", "ieee")}
    for unit, configs in module.CONFIGS.items():
        kind, precision = units[unit]
        for config in configs:
            constants = {
                "CT": tl.float64 if kind == "fp64" else tl.float32,
                "ACT": act.value(get("gelu")), "P0": 0.0, "P1": 0.0,
                "HAS_BIAS": True, "WRITE_Z": True, "PRECISION": precision, "UPCAST": False, "EVEN_K": True,
                "BM": config.BM, "BN": config.BN, "BK": config.BK, "GROUP": config.GROUP,
            }  # fmt: skip
            # x, w, b, y, z, M, N, K, x_m, x_k, w_n, w_k, b_n
            signature = (*[f"*{kind}"] * 5, "i32", "i32", "i32", "i32", 1, "i32", 1, 1)
            name = f"linear-{unit}-{config.BM}x{config.BN}x{config.BK}"
            yield Entry(name, module.linear_forward, signature, constants, config.warps, config.stages)


def act_bias() -> Iterator[Entry]:
    import triton.language as tl

    module, act = kernels.load("act_bias"), kernels.load("activations")
    common = {"CT": tl.float32, "ACT": act.value(get("gelu")), "P0": 0.0, "P1": 0.0}
    yield Entry("activate", module.activate, ("*bf16", "*bf16", "i32"), {**common, "BLOCK": 1024})
    for need_h in (False, True):
        constants = {
            **common, "GRAD": act.gradient(get("gelu")), "HAS_ACT": True, "NEED_DZ": True, "NEED_H": need_h,
            "NEED_DB": True, "BM": 8, "BN": 256,
        }  # fmt: skip
        h = "*bf16" if need_h else None
        signature = ("*bf16", "*bf16", "*bf16", h, "*fp32", "i32", "i32", "i32", 1, "i32")
        yield Entry(f"act_bias_backward-{need_h}", module.act_bias_backward, signature, constants)


FAMILIES = (linear, act_bias)
ENTRIES = [entry for family in FAMILIES for entry in family()]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_compiles_and_fits(entry, arch):
    compiled = entry.compile(arch)
    assert "ptx" in compiled.asm
    assert compiled.metadata.shared <= SHARED_MEMORY[arch]
