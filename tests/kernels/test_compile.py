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


def residual() -> Iterator[Entry]:
    import triton.language as tl

    module = kernels.load("residual")
    # DROP, VEC, GROUPED, RNG_PTR: none; eager's masks by vector width and one by one; fast ones
    draws = [(0, 1, False, False), (1, 8, True, False), (1, 4, True, False), (1, 1, False, False), (2, 8, True, True)]
    # the seed's words; scale_value, A, T, C, P, scale_a, scale_c, path_rows; threshold, threads, keep_scale
    numbers, sizes, last = ("i32",) * 4, ("fp32", 1, "i32", "i32", 1, "i32", 1, "i32"), ("i32", "i32", "fp32")
    for col, (drop, vec, grouped, rng) in [(True, draw) for draw in draws] + [(False, draw) for draw in draws[:2]]:
        constants = {
            "CT": tl.float32, "COL": col, "HAS_SCALE": True, "HAS_PATH": True, "RNG_PTR": rng,
            "DROP": drop, "VEC": vec, "GROUPED": grouped, "WIDE": False,
        }  # fmt: skip
        name = f"{'col' if col else 'row'}-{drop}-{vec}"
        state = ("*i64", "*i64") if rng else (None, None)
        pointers = ("*bf16", "*bf16", "*fp32", "*bf16", *state, "*bf16")
        tile = {"HAS_RES": True, "BM": 4 if col else 1, "BN": 1024 if col else 4096}
        signature = (*pointers, *numbers, *sizes, *last)
        yield Entry(f"residual_forward-{name}", module.forward, signature, {**constants, **tile})
        if drop != 2 and vec != 4:
            tile = {"NEED_DX": True, "BM": 8 if col else 2, "BN": 256 if col else 1024}
            signature = (*pointers, "*fp32", *numbers, *sizes, "i32", "i32", *last)
            yield Entry(f"residual_backward-{name}", module.backward, signature, {**constants, **tile})


def gated() -> Iterator[Entry]:
    import triton.language as tl

    module, act = kernels.load("gated"), kernels.load("activations")
    common = {"CT": tl.float32, "ACT": act.value(get("silu")), "P0": 0.0, "P1": 0.0}
    signature = ("*bf16", "*bf16", "*bf16", "i32", "i32", "i32", "i32")
    yield Entry("gated_forward", module.gated_forward, signature, {**common, "BM": 1, "BN": 1024})
    for sums in (False, True):
        constants = {
            **common, "GRAD": act.gradient(get("silu")), "KEEPS_OUTPUT": False, "NEED_DGATE": True, "NEED_DUP": True,
            "NEED_H": sums, "NEED_SUMS": sums, "BM": 8 if sums else 1, "BN": 256 if sums else 1024,
        }  # fmt: skip
        signature = (*["*bf16"] * 5, *(("*bf16", "*fp32") if sums else (None, None)), *["i32"] * 8)
        yield Entry(f"gated_backward-{sums}", module.gated_backward, signature, constants)


def row_norm() -> Iterator[Entry]:
    import triton.language as tl

    from fusedlayers.ops import _row_norm

    module = kernels.load("norm")
    for kind, N in [("bf16", 64), ("bf16", 768), ("bf16", 8192), ("fp32", 8192), ("bf16", 16384), ("bf16", 20000)]:
        for center in (True, False):
            data, bias = f"*{kind}", f"*{kind}" if center else None
            sizes = ("i32",) * 2
            common = {"CT": tl.float32, "OFFSET": 0.0, "CENTER": center, "HAS_W": True, "V": 16}
            tile = _row_norm.forward_tile(N, 4)
            constants = {
                **common, "XT": tl.bfloat16 if kind == "bf16" else tl.float32, "EPS": 1e-5, "CAST": not center,
                "HAS_RES": True, "HAS_B": center, "WRITE_STATS": True, "BR": tile.rows, "BN": tile.cols,
            }  # fmt: skip
            signature = (data, data, data, bias, data, data, "*fp32", *sizes, "i32", "i32")
            name = f"norm-{kind}-{N}-{'layer' if center else 'rms'}"
            entry = module.forward if tile.rows else module.forward_long
            yield Entry(f"{name}-forward", entry, signature, constants, tile.warps)
            tile = _row_norm.backward_tile(N, 4)
            constants = {
                **common, "HAS_GSUM": True, "NEED_DX": True, "NEED_DRES": True, "NEED_DW": True, "NEED_DB": center,
                "BR": tile.rows, "BN": tile.cols, "AR": tile.sums, "STAGES": tile.stages,
            }  # fmt: skip
            signature = (data, data, data, data, "*fp32", data, "*fp32")
            if tile.rows:
                signature = (*signature, "*fp32", *sizes, "i32", "i32", "i32")
                yield Entry(f"{name}-backward", module.backward, signature, constants, tile.warps)
            else:
                signature = (*signature, *sizes, "i32", "i32", "i32")
                yield Entry(f"{name}-backward", module.backward_long, signature, constants, tile.warps)
                signature = (data, data, "*fp32", "*fp32", *sizes, "i32", "i32", "i32", "i32")
                yield Entry(f"{name}-params", module.backward_params, signature, {**constants, "BR": 16, "BN": 128})


FAMILIES = (act_bias, gated, linear, residual, row_norm)
ENTRIES = [entry for family in FAMILIES for entry in family()]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_compiles_and_fits(entry, arch):
    compiled = entry.compile(arch)
    assert "ptx" in compiled.asm
    assert compiled.metadata.shared <= SHARED_MEMORY[arch]
