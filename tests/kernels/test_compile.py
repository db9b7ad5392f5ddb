"""Every kernel configuration compiles for sm_80, sm_89 and sm_90 and fits its shared memory. Needs no GPU.

Each family gives its entries; a new kernel adds a function to `FAMILIES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fusedlayers import kernels
from fusedlayers.activations import get
from fusedlayers.ops import _overlap
from fusedlayers.ops._layout import coefficients
from fusedlayers.ops.affine_act import _backward_tile
from tests.kernels.compiling import ARCHS, REGISTERS, SHARED_MEMORY, Entry, registers

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
        # the last one again for transposed operands of odd sizes
        odd = (*[f"*{kind}"] * 5, "i32", "i32", "i32", 1, "i32", 1, "i32", 1)
        constants = {**constants, "EVEN_K": False}
        yield Entry(f"linear-{unit}-odd", module.linear_forward, odd, constants, config.warps, config.stages,
                    aligned=False)  # fmt: skip


def act_bias() -> Iterator[Entry]:
    import triton.language as tl

    module, act = kernels.load("act_bias"), kernels.load("activations")
    common = {"CT": tl.float32, "ACT": act.value(get("gelu")), "P0": 0.0, "P1": 0.0}
    yield Entry("activate", module.activate, ("*bf16", "*bf16", "i32"), {**common, "BLOCK": 1024})
    for need_h in (False, True):
        constants = {
            **common, "GRAD": act.gradient(get("gelu")), "HAS_ACT": True, "NEED_DZ": True, "NEED_H": need_h,
            "NEED_DB": True, "BM": 8, "BN": 256, "STAGES": 2,
        }  # fmt: skip
        h = "*bf16" if need_h else None
        signature = ("*bf16", "*bf16", "*bf16", h, "*fp32", "i32", "i32", "i32", 1, "i32")
        yield Entry(f"act_bias_backward-{need_h}", module.act_bias_backward, signature, constants)
    for name in ("gelu", "gelu_tanh", "quick_gelu", "silu"):  # their forms for half precision
        low = {"ACT": act.value(get(name), torch.bfloat16), "GRAD": act.gradient(get(name), torch.bfloat16)}
        assert low["ACT"] is not act.value(get(name))
        yield Entry(f"act_bias_backward-low-{name}", module.act_bias_backward, signature, {**constants, **low})


def residual() -> Iterator[Entry]:
    import triton.language as tl

    module = kernels.load("residual")
    # DROP, VEC, GROUPED, RNG_PTR: none; eager's masks by vector width and one by one; fast ones
    draws = [(0, 1, False, False), (1, 8, True, False), (1, 4, True, False), (1, 1, False, False), (2, 8, True, True)]
    # the seed's words; scale_value, A, T, C, P, scale_a, scale_c, path_rows; threshold, threads, keep_scale
    numbers, last = ("i32",) * 4, ("i32", "i32", "fp32")
    for col, (drop, vec, grouped, rng) in [(True, draw) for draw in draws] + [(False, draw) for draw in draws[:2]]:
        constants = {
            "CT": tl.float32, "COL": col, "HAS_SCALE": True, "HAS_PATH": True, "RNG_PTR": rng,
            "DROP": drop, "VEC": vec, "GROUPED": grouped, "WIDE": False,
        }  # fmt: skip
        name = f"{'col' if col else 'row'}-{drop}-{vec}"
        sizes = ("fp32", "i32" if vec == 1 else 1, "i32", "i32", 1, "i32", 1, "i32")
        state = ("*i64", "*i64") if rng else (None, None)
        pointers = ("*bf16", "*bf16", "*fp32", "*bf16", *state, "*bf16")
        tile = {"HAS_RES": True, "BM": 4 if col else 1, "BN": 1024 if col else 4096}
        signature = (*pointers, *numbers, *sizes, *last)
        yield Entry(f"residual_forward-{name}", module.forward, signature, {**constants, **tile})
        if (col, vec) == (True, 1):
            at = len(pointers) + len(numbers) + 2  # T, of rows past 2**31
            signature = (*signature[:at], "i64", *signature[at + 1 :])
            yield Entry(f"residual_forward-{name}-large", module.forward, signature, {**constants, **tile})
            signature = (*pointers, *numbers, *sizes, *last)
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
            tile = _row_norm.forward_tile(N, 4, False)
            constants = {
                **common, "XT": tl.bfloat16 if kind == "bf16" else tl.float32, "EPS": 1e-5, "CAST": not center,
                "HAS_RES": True, "HAS_B": center, "WRITE_STATS": True, "BR": tile.rows, "BN": tile.cols,
            }  # fmt: skip
            signature = (data, data, data, bias, data, data, "*fp32", *sizes, "i32", "i32")
            name = f"norm-{kind}-{N}-{'layer' if center else 'rms'}"
            entry = module.forward if tile.rows else module.forward_long
            yield Entry(f"{name}-forward", entry, signature, constants, tile.warps)
            tile = _row_norm.backward_tile(N, 4, 2, SHARED_MEMORY[89])
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


def drop_norm() -> Iterator[Entry]:
    import triton.language as tl

    from fusedlayers.ops import _drop_norm

    module = kernels.load("drop_norm")
    # DROP, VEC, GROUPED, RNG_PTR: eager's masks by vector width and one by one; fast ones
    draws = [(1, 8, True, False), (1, 4, True, True), (1, 1, False, False), (2, 8, True, False)]
    for N, center in ((64, True), (768, True), (1024, False), (8192, True)):
        for drop, vec, grouped, rng in draws if N == 768 else draws[:1]:
            bias, state, words = "*bf16" if center else None, ("*i64", "*i64") if rng else (None, None), ("i32",) * 4
            common = {
                "CT": tl.float32, "OFFSET": 0.0, "CENTER": center, "HAS_W": True, "RNG_PTR": rng, "DROP": drop,
                "VEC": vec, "GROUPED": grouped, "WIDE": False, "V": 16,
            }  # fmt: skip
            name = f"drop_norm-{N}-{'layer' if center else 'rms'}-{drop}-{vec}"
            tile = _drop_norm.forward_tile(N, grouped)
            constants = {
                **common, "XT": tl.float32, "EPS": 1e-5, "CAST": False, "HAS_B": center, "WRITE_STATS": True,
                "BR": tile.rows, "BN": tile.cols,
            }  # fmt: skip
            pointers = ("*bf16", "*fp32", "*bf16", bias, *state, "*fp32", "*fp32", "*fp32")
            signature = (*pointers, *words, *["i32"] * 4, "i32", "i32", "fp32")
            yield Entry(f"{name}-forward", module.forward, signature, constants, tile.warps)
            tile = _drop_norm.backward_tile(N, 4, 4, SHARED_MEMORY[89])
            constants = {
                **common, "HAS_GSUM": True, "NEED_DX": True, "NEED_DRES": True, "NEED_DW": True, "NEED_DB": center,
                "NEED_SHIFT": rng, "BR": tile.rows, "BN": tile.cols, "AR": tile.sums, "STAGES": tile.stages,
            }  # fmt: skip
            pointers = ("*fp32", "*fp32", "*fp32", "*bf16", "*fp32", *state, "*bf16", "*fp32", "*fp32")
            signature = (*pointers, *words, *["i32"] * 5, "i32", "i32", "fp32")
            yield Entry(f"{name}-backward", module.backward, signature, constants, tile.warps)


def _norm_act() -> tuple[Any, ...]:
    """The compute dtype, the constants of ReLU's value and gradient, and constexpr values by name."""
    import triton.language as tl

    act = kernels.load("activations")
    relu = get("relu")
    value, gradient = (act.value(relu), 0.0, 0.0), (act.value(relu), act.gradient(relu), True, 0.0, 0.0)

    def constants(fn, values):
        return dict(zip([p.name for p in fn.params if p.is_constexpr], values, strict=True))

    return tl.float32, value, gradient, constants


def batch_norm() -> Iterator[Entry]:
    from fusedlayers.ops._tiling import tiling

    module = kernels.load("batch_norm")
    ct, value, gradient, constants = _norm_act()
    # rows, channels, positions: large maps with few channels, small ones with many, one block's own, contiguous
    for row, M, C, S in [
        (False, 802816, 64, 1),
        (False, 802816, 256, 1),
        (False, 200704, 72, 1),
        (False, 12544, 2048, 1),
        (False, 64, 1024, 1),
        (True, 256, 64, 3136),
        (True, 256, 512, 49),
        (True, 64, 512, 49),
    ]:
        loops = ("i32", "i32", "i32" if row else 1, "i32", "i32" if row else 1, "i32")
        for residual in (False, True):
            name, r = f"{'row' if row else 'col'}-{C}-{'add' if residual else 'alone'}", "*bf16" if residual else None
            t = tiling(row, M, C, S, 2, 132, False)
            layout, source = t.layout, t.source
            own, counts = source != 0, "*i64" if residual else None
            if not own and not residual:
                values = (ct, *layout, *t.sum_tile, t.sum_full)
                fn = module.forward_sums
                yield Entry(f"bn_sums-{name}", fn, ("*bf16", "*fp32", *loops), constants(fn, values), t.sum_warps)
            flags = (True, True, residual, own, False, own)
            values = (
                ct,
                *value,
                1e-5,
                source,
                *flags,
                *layout,
                *t.apply_tile,
                t.apply_full,
                t.apply_stages,
                *t.sum_tile,
                t.sum_full,
            )
            fn = module.forward_apply
            signature = ("*bf16", r, *["*fp32"] * 4, counts, "*fp32", "*bf16", None, "fp32", "fp32", *loops, "i32")
            yield Entry(f"bn_apply-{name}", fn, signature, constants(fn, values), t.apply_warps)
            t = tiling(row, M, C, S, 2, 132, True)
            layout, source, mask = t.layout, t.source, 2 if residual else 1
            own = source != 0
            if not own:
                values = (ct, *gradient, mask, True, residual, False, *layout, *t.sum_tile, t.sum_full)
                fn = module.backward_sums
                signature = ("*bf16", "*bf16", r, "*fp32", "*fp32", r, None, "*fp32", *loops)
                yield Entry(f"bn_backward_sums-{name}", fn, signature, constants(fn, values), t.sum_warps)
            flags = (mask if own else 0 if residual else 1, source, True, residual and own, own, own)
            values = (
                ct,
                *gradient,
                *flags,
                *layout,
                *t.apply_tile,
                t.apply_full,
                t.apply_stages,
                *t.sum_tile,
                t.sum_full,
            )
            fn = module.backward_apply
            signature = ("*bf16", "*bf16", r, *["*fp32"] * 3, "*bf16", r, "*fp32", "*fp32", *loops, "i32")
            yield Entry(f"bn_backward_apply-{name}", fn, signature, constants(fn, values), t.apply_warps)
    fn = module.forward_combine
    for counts in ("*i64", None):
        pointers = "*bf16", *["*fp32"] * 4, counts, "*fp32"
        signature = (*pointers, "fp32", "fp32", "i32", "i32", 1, "i32", 1, "i32", "i32")
        yield Entry(f"bn_combine-{counts}", fn, signature, constants(fn, (ct, 1e-5, True, True, False, 256, 16)))
    fn = module.backward_combine
    values = (True, True, True, False, 256, 16)
    yield Entry("bn_backward_combine", fn, (*["*fp32"] * 5, "i32", "i32", "i32"), constants(fn, values))


def group_norm() -> Iterator[Entry]:
    from fusedlayers.ops.group_norm_act import Sizes, tiling

    module = kernels.load("group_norm")
    ct, value, gradient, constants = _norm_act()
    gradient = (*gradient, 1, True)
    data = "*bf16"
    # whole groups in registers, large ones, channels_last
    for sizes in (
        Sizes(True, 8, 1280, 256, 40, 16),
        Sizes(True, 64, 512, 49, 16, 1),
        Sizes(True, 8, 320, 4096, 10, 16),
        Sizes(False, 8, 320, 4096, 10, 1),
    ):
        t, name = tiling(sizes, 2), f"{'row' if sizes.row else 'col'}-{sizes.C}x{sizes.S}"
        if t.resident is not None:
            tile, fn = (sizes.align, *t.resident), module.forward_resident
            values = (ct, *value, 1e-5, True, True, True, *tile)
            signature = (data, data, data, "*fp32", data, *["i32"] * 4)
            yield Entry(f"gn-{name}", fn, signature, constants(fn, values), t.warps)
            fn, values = module.backward_resident, (ct, *gradient, True, True, *tile)
            signature = (data, data, data, "*fp32", data, "*fp32", *["i32"] * 4)
            yield Entry(f"gn_backward-{name}", fn, signature, constants(fn, values), t.warps)
            continue
        layout = (sizes.row, sizes.align, *t.tile)
        for fn, pointers, ints, values in (
            (module.forward_moments, (data, "*fp32"), 5, (ct, *layout)),
            (module.forward_apply, (data, data, "*fp32", data), 6, (ct, *value, True, *layout)),
            (module.backward_sums, (data, data, data, "*fp32", "*fp32"), 6, (ct, *gradient, *layout)),
            (module.backward_apply, (data, data, data, "*fp32", "*fp32", data), 6, (ct, *gradient, *layout)),
        ):
            entry = f"gn_{fn.__name__}-{name}"
            yield Entry(entry, fn, (*pointers, *["i32"] * ints), constants(fn, values), 8)
    fn = module.forward_combine
    yield Entry("gn_combine", fn, ("*fp32", data, "*fp32", *["i32"] * 6), constants(fn, (ct, 1e-5, True, 1024)))
    fn = module.backward_combine
    yield Entry("gn_backward_combine", fn, ("*fp32", data, "*fp32", *["i32"] * 5), constants(fn, (ct, True, 1024)))


def split_heads() -> Iterator[Entry]:
    import triton.language as tl

    pack = kernels.load("split_heads").pack
    heads, tokens, odd = ("i32", "i32", "i32", 1), ("i32", "i32", 1, "i32"), ("i32",) * 4  # strides over B, H, N, D
    for name, kind, parts, strides, D, tile in [
        ("heads", "bf16", 3, (heads,) * 3, 64, (16, 256)),
        ("heads-fp32", "fp32", 3, (heads,) * 3, 72, (16, 256)),
        ("heads-fp64", "fp64", 2, (heads, heads, odd), 5, (1, 8)),
        ("tokens", "fp16", 3, (heads, tokens, heads), 64, (64, 64)),
        ("unused", "bf16", 3, (heads, None, odd), 64, (16, 256)),
    ]:
        pointers = [None if s is None or i >= parts else f"*{kind}" for i, s in enumerate(strides)]
        sums = "*fp32" if name == "tokens" else None
        signature = (*pointers, f"*{kind}", sums, "i32", "i32", *(n for s in strides for n in (s or odd)))
        constants = {"CT": tl.float64 if kind == "fp64" else tl.float32, "PARTS": parts, "D": D}
        constants |= {"BN": tile[0], "BC": tile[1]}
        yield Entry(f"pack-{name}", pack, signature, constants)


def projections() -> Iterator[Entry]:
    import triton.language as tl

    fn = kernels.load("projections").pack_sum
    rows, columns, odd = ("i32", 1), (1, "i32"), ("i32", "i32")  # strides over M, N
    for name, kind, strides, packed, sums in [
        ("three", "bf16", (rows,) * 3, True, True),
        ("two", "fp16", (rows, rows), True, True),
        ("one", "bf16", (columns,), True, True),
        ("odd", "fp32", (rows, columns, odd), True, True),
        ("no-bias", "bf16", (rows,) * 3, True, False),
        ("biases", "fp64", (rows, odd, rows), False, True),
    ]:
        ct, none = ("fp64", tl.float64) if kind == "fp64" else ("fp32", tl.float32), 3 - len(strides)
        given = [f"*{kind}"] * len(strides) + [None] * none
        outs = (f"*{kind}" if packed else None, f"*{ct[0]}" if sums else None)
        numbers = ("i32",) * 4 + tuple(n for s in strides for n in s) + ("i32",) * (2 * none) + ("i32",)
        constants = {"CT": ct[1], "BM": 16, "BN": 128, "STAGES": 3}
        yield Entry(f"pack_sum-{name}", fn, (*given, *outs, *numbers), constants)


def overlapped() -> Iterator[Entry]:
    """Hopper's alone, with the options that a launch gives it."""
    if not _overlap.available():
        return
    module, act = kernels.load("overlapped"), kernels.load("activations")
    kinds = [(name, False) for name in sorted(_overlap.FORWARD)] + [(name, True) for name in sorted(_overlap.BACKWARD)]
    for name, backward in kinds:
        config = module.config(name, backward)
        constants = {
            "ACT": act.value(get(name), torch.bfloat16), "GRAD": act.gradient(get(name), torch.bfloat16), "P0": 0.0,
            "P1": 0.0, "BM": module.BM, "BN": module.BN, "BK": module.BK, "STAGES": config.stages,
            "GROUP": module.GROUP, "WARPS": config.warps, "REGISTERS": config.registers,
        }  # fmt: skip
        for rows, last in ((True, "*fp32" if backward else "*bf16"), (False, None)):
            pointers = ("*bf16",) * 5 + (last,) if backward else ("*bf16", "*bf16", last, "*bf16", "*bf16")
            kernel = module.backward if backward else module.forward
            yield Entry(
                f"overlapped-{name}-{'backward' if backward else 'forward'}-{'rows' if rows else 'columns'}",
                kernel, (*pointers, *("i32",) * 5), {**constants, "W_ROWS": rows}, config.warps,
                maxnreg=config.average,
            )  # fmt: skip


FAMILIES = (act_bias, batch_norm, drop_norm, gated, group_norm, linear, projections, residual, row_norm, split_heads)
ENTRIES = [entry for family in FAMILIES for entry in family()]


def test_another_number_of_rows_is_no_other_kernel():
    """A kernel that only sequences of odd length needed was built in a late step, when one first came."""
    exempt = ("pack", "residual")  # whose gradients may lie by columns; where the masks of rows cost 3%
    launched = {e.fn for e in (*ENTRIES, *overlapped()) if not e.name.startswith(exempt)}
    counts = ("M", "blocks", "blocks_m")
    rows = [(fn.fn.__name__, p) for fn in launched for p in fn.params if p.name in counts]
    assert len(rows) > 20
    assert not [(name, p.name) for name, p in rows if not (p.do_not_specialize or p.do_not_specialize_on_alignment)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gelu", "mish", "tanh", "relu"])
def test_all_blocks_of_affines_backward_run_at_once(name, dtype):
    """With eight more registers a multiprocessor held three blocks of four, and the pass took half as long again."""
    import triton.language as tl

    module, act = kernels.load("affine"), kernels.load("activations")
    x = torch.empty(65536, 512, dtype=dtype, device="meta")
    (grid,), tile, warps, *_ = _backward_tile(coefficients(x.shape, x.stride(), ((512,), (1,)), ((512,), (1,))))
    kind = "*fp32" if dtype is torch.float32 else "*bf16"
    signature = (kind, kind, None, "*fp32", kind, None, "*fp32", *("i32",) * 5)
    constants = {
        "CT": tl.float32, "ACT": act.value(get(name), dtype), "GRAD": act.gradient(get(name), dtype),
        "KEEPS_OUTPUT": act.from_output(get(name)), "P0": 0.0, "P1": 0.0, "MASK": module.RECOMPUTE, "NEED_DX": True,
        "NEED_DRES": False, "NEED_DSCALE": True, "NEED_DSHIFT": True, "BT": tile[0], "BC": tile[1],
    }  # fmt: skip
    compiled = Entry(name, module.backward_col, signature, constants, warps).compile(90)
    resident = REGISTERS // (registers(compiled) * 32 * warps)
    assert resident * 132 >= grid


@pytest.mark.parametrize("entry", list(overlapped()), ids=lambda e: e.name)
def test_the_overlapped_product_compiles_for_hopper(entry):
    compiled = entry.compile(90)
    ptx = compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_MEMORY[90]
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    threads = 32 * compiled.metadata.num_warps
    assert threads * entry.maxnreg <= REGISTERS


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_compiles_and_fits(entry, arch):
    compiled = entry.compile(arch)
    assert "ptx" in compiled.asm
    assert compiled.metadata.shared <= SHARED_MEMORY[arch]


def in_float64(entry: Entry) -> Entry:
    """The same configuration on float64 tensors, computing in float64."""
    import triton.language as tl

    wide = {"*bf16": "*fp64", "*fp32": "*fp64"}
    signature = tuple(wide.get(kind, kind) if isinstance(kind, str) else kind for kind in entry.signature)
    constants = {k: tl.float64 if v is tl.float32 else v for k, v in entry.constants.items()}
    return dataclasses.replace(entry, signature=signature, constants=constants)


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if not e.name.startswith("linear")], ids=lambda entry: f"{entry.name}-float64"
)
def test_compiles_in_float64(entry):
    """Half and double take different branches of a kernel: some Tritons compile both where one returns early."""
    assert in_float64(entry).compile(90).asm["ptx"]
