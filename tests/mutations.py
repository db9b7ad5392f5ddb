"""Breaks the library on purpose and sees the test that holds the kind of fault fail: `python -m tests.mutations`.

Each entry names a kind of fault, what is broken, and the test. The work happens in a copy; a fault no test notices is
an error. `-k WORD` takes only the entries whose kind has that word in it; `--device` those that only a GPU shows.
"""

# ruff: noqa: E501  (code, quoted as it stands)
from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AFFINE, AFFINE_KERNEL, ACT, ROUTE = (
    f"fusedlayers/{name}.py" for name in ("ops/affine_act", "kernels/affine", "kernels/activations", "ops/_route")
)
LINEAR, LINEAR_KERNEL, DTYPES = (
    f"fusedlayers/{name}.py" for name in ("ops/linear_act", "kernels/linear", "ops/_dtypes")
)
AUTOGRAD, BUFFERS, MATRIX, TRANSFORMS = (
    f"tests/modes/test_{name}.py::test_" for name in ("autograd", "buffers", "matrix", "transforms")
)


@dataclass(frozen=True)
class Fault:
    kind: str
    path: str
    right: str
    wrong: str
    test: str


_LOAD = "    mask = (t < T)[:, None] & in_c[None, :]\n"
_SAVE = "ctx.save_for_backward(x if need_x else None, kept, coef)"
FAULTS = [
    Fault("a shift edited before backward", AFFINE, _SAVE,
          _SAVE[:-1] + ", *((shift,) if isinstance(shift, Tensor) else ()))",
          AUTOGRAD + "edits_between_forward_and_backward[affine_act-gelu]"),
    Fault("a saved tensor edited", LINEAR, "saved = x if need_weight", "saved = x.data if need_weight",
          AUTOGRAD + "edits_between_forward_and_backward[linear_act-gelu]"),
    Fault("neighbours of outputs", AFFINE_KERNEL, _LOAD, _LOAD.replace("t < T)", "t < T + 1)"),
          BUFFERS + "neighbours_of_outputs_stay[((3, 5), 7)-affine_act]"),
    Fault("ragged sizes", AFFINE_KERNEL, "dz = tl.where(mask, dz, 0.0)", "dz = dz + tl.where(mask, 0.0, 1.0)",
          BUFFERS + "ragged_sizes[17-33-affine_act]"),
    Fault("one feature, one row", LINEAR_KERNEL, "in_n = (n < N)[None, :]", "in_n = (n < N + 1)[None, :]",
          BUFFERS + "neighbours_of_outputs_stay[((5, 1), 1)-linear_act]"),
    Fault("float64 never drops", DTYPES, "return torch.float32 if dtype in _LOW else dtype\n\n\n@functools.cache\ndef triton",
          "return torch.float32\n\n\n@functools.cache\ndef triton", MATRIX + "forward[affine_act-gelu-fp64]"),
    Fault("NaN in relu", ACT, "def relu(z, P0: tl.constexpr, P1: tl.constexpr):\n    return tl.where(z < 0, 0.0, z)",
          "def relu(z, P0: tl.constexpr, P1: tl.constexpr):\n    return tl.maximum(z, 0.0)",
          "tests/test_activations.py::test_odd_values_and_kinks_as_eager[relu-float32]"),
    Fault("a zero weight times infinity", AFFINE_KERNEL, "    z = scale * x + shift\n", "    z = tl.where(scale == 0, 0.0, scale * x) + shift\n",
          BUFFERS + "values_that_eager_makes_nan[affine_act]"),
    Fault("overflow", ACT, "_log1p(_exp(-tl.abs(b)))) * (1.0 / P0)", "_log1p(_exp(-tl.abs(b))) * tl.exp(b) * tl.exp(-b)) * (1.0 / P0)",
          "tests/test_activations.py::test_odd_values_and_kinks_as_eager[softplus-float32]"),
    Fault("a kink", ACT, "tl.where((z <= P0) | (z >= P1), 0.0, g)", "tl.where((z < P0) | (z > P1), 0.0, g)",
          "tests/test_activations.py::test_odd_values_and_kinks_as_eager[hardtanh-float32]"),
    Fault("rounding once", LINEAR_KERNEL, "ACT(acc, P0, P1)", "ACT(acc.to(y_ptr.dtype.element_ty).to(CT), P0, P1)",
          AUTOGRAD + "rounding_happens_once[linear_act-torch.float16]"),
    Fault("GELU none and tanh", "fusedlayers/activations/table.py", 'lambda z: F.gelu(z, approximate="tanh")', "F.gelu",
          "tests/test_activations.py::test_modules[GELU1]"),
    Fault("GELU none and tanh in a kernel", ACT, "return _gelu_by_tanh(z, 1.5957691216057308)", "return gelu(z, 0.0, 0.0)",
          MATRIX + "forward[affine_act-gelu_tanh-fp32]"),
    Fault("inputs of any stride", "fusedlayers/ops/_layout.py", "    if t.stride() == stride:\n", "    if t.numel():\n",
          AUTOGRAD + "inputs_of_any_stride[0-affine_act-gelu]"),
    Fault("gradients of any stride", AFFINE, "g = with_strides(g, self.shape, plan.x_stride)", "g = g + 0",
          AUTOGRAD + "gradients_of_any_stride[affine_act-gelu]"),
    Fault("empty batches", AFFINE, '    if 0 in shape:\n        return "the batch is empty"\n', "",
          AUTOGRAD + "empty_batch[affine_act-gelu]"),
    Fault("autocast", "fusedlayers/ops/_gemm.py", "    if autocast and dtype is not torch.float64:", "    if False:",
          MATRIX + "autocast[linear_act-gelu-bf16]"),
    Fault("requires_grad", AFFINE_KERNEL, "        if NEED_DSHIFT:\n            sum_shift += dz\n    at_partial = pid_t",
          "        if NEED_DSHIFT and NEED_DSCALE:\n            sum_shift += dz\n    at_partial = pid_t",
          AUTOGRAD + "every_requires_grad[affine_act-gelu]"),
    Fault("a product without a use", LINEAR, "need_x, need_weight, need_bias = ctx.needs_input_grad[:3]",
          "need_x, need_weight, need_bias = True, True, ctx.needs_input_grad[2]",
          AUTOGRAD + "no_product_without_a_use[linear_act]"),
    Fault("incoming gradients are written", AFFINE, "dx = torch.empty_like(g) if g.dtype is self.x_dtype",
          "dx = g if g.dtype is self.x_dtype", AUTOGRAD + "gradients_of_any_stride[affine_act-gelu]"),
    Fault("backward twice", AFFINE, "        saved, call, needs = ctx.saved_tensors, ctx.call, ctx.needs_input_grad[:4]\n",
          "        saved, call, needs = ctx.saved_tensors, ctx.call, ctx.needs_input_grad[:4]\n        saved[2].add_(1.0)\n",
          AUTOGRAD + "backward_twice_gives_the_same_bits[affine_act-gelu]"),
    Fault("double backward", AFFINE, "dz = act.backward(g, kept.to(ct))", "dz = act.backward(g, kept.to(ct).detach())",
          MATRIX + "double_backward[affine_act-gelu-fp64]"),
    Fault("torch.func", ROUTE, "    if _functorch_active():\n", "    if False:\n", TRANSFORMS + "func_grad[affine_act]"),
    Fault("forward AD", ROUTE, "    if _forward_ad._current_level >= 0:\n", "    if False:\n", TRANSFORMS + "jvp_and_forward_ad[affine_act]"),
    Fault("subclasses", ROUTE, "        if type(t) not in _PLAIN:", "        if not isinstance(t, Tensor):",
          TRANSFORMS + "tensor_subclasses[affine_act]"),
    Fault("compile", ROUTE, "is_compiling = torch.compiler.is_compiling", "is_compiling = bool", MATRIX + "compile[affine_act-gelu-fp32]"),
    Fault("jit.trace", ROUTE, "    if _is_tracing() is not None:\n", "    if False:\n", TRANSFORMS + "jit_trace[affine_act]"),
    Fault("memory flat", AFFINE, _SAVE, _SAVE + "\n        _route.failures.setdefault('leak', []).append(coef)",
          TRANSFORMS + "memory_is_flat_over_many_steps[True-affine_act]"),
    Fault("a mask drawn again", "fusedlayers/kernels/drop_norm.py", "                keep = keep_tile(rows, N", "                keep = keep_tile(rows + 1, N",
          "tests/ops/test_drop_norm.py::test_every_size[(33, 64)-torch.float32]"),
    Fault("products of one value: what it was overwritten by", "fusedlayers/patch/rules/projections.py", "version == new_version", "True",
          "tests/patch/test_projections.py::test_what_is_overwritten_between[triton-Between]"),
    Fault("products of one value: cut at the wrong rows", "fusedlayers/ops/projections.py", "begins[run[0]], begins[run[-1]]", "0, begins[run[-1]] - begins[run[0]]",
          "tests/ops/test_projections.py::test_frozen_ones_of_three[(1, 0, 1, 1)]"),
    Fault("source that is not the code's", "fusedlayers/patch/splice.py", "return read if same else None", "return read",
          "tests/patch/test_splice.py::test_source_that_is_not_the_codes[reference]"),
    Fault("saved more than eager", AFFINE, _SAVE, _SAVE[:-1] + ", y, y + 0)", AUTOGRAD + "what_is_saved[affine_act-gelu]"),
]  # fmt: skip

DEVICE = "tests/gpu/test_device_only.py::test_"
LAUNCH = "fusedlayers/kernels/launch.py"
DEVICE_FAULTS = [
    Fault("offsets past 32 bits", AFFINE_KERNEL, ".to(tl.int64)", "", DEVICE + "offsets_past_32_bits[affine_act]"),
    Fault("a side stream", LAUNCH, "_current_stream(device)", "0", DEVICE + "a_side_stream[affine_act]"),
    Fault("TF32 flag", LINEAR_KERNEL, "input_precision=PRECISION", "input_precision='tf32'", DEVICE + "tf32_flag_is_followed[gelu]"),
    Fault("misaligned storage", LAUNCH, "key = device if not bits & 15 else", "key = device if True else",
          DEVICE + "misaligned_storage[dtype0-affine_act]"),
    Fault("NaN in relu", ACT, "def relu(z, P0: tl.constexpr, P1: tl.constexpr):\n    return tl.where(z < 0, 0.0, z)",
          "def relu(z, P0: tl.constexpr, P1: tl.constexpr):\n    return tl.maximum(z, 0.0)", DEVICE + "nan_in_relu"),
]  # fmt: skip


def caught(fault: Fault, copy: Path, interpret: str) -> str | None:
    """Breaks the copy, runs the one test, mends the copy; what went wrong, if the test did not fail as it should."""
    path = copy / fault.path
    text = path.read_text()
    if text.count(fault.right) < 1:
        return f"{fault.path} no longer holds {fault.right!r}"
    path.write_text(text.replace(fault.right, fault.wrong))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", fault.test]
        env = {**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)
    finally:
        path.write_text(text)
    return None if done.returncode == 1 else f"the test ended with {done.returncode}: {done.stdout[-300:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", default="", metavar="WORD", help="only faults of which the kind holds this word")
    parser.add_argument("--device", action="store_true", help="the faults that only tests on a GPU can notice")
    options = parser.parse_args()
    faults = [f for f in (DEVICE_FAULTS if options.device else FAULTS) if options.k in f.kind]
    if not faults:
        parser.error(f"no fault has {options.k!r} in its kind")
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repo"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "results"))
        for fault in faults:
            problem = caught(fault, copy, "0" if options.device else "1")
            missed += problem is not None
            said = f"caught  {fault.kind}" if problem is None else f"MISSED  {fault.kind}: {problem}"
            print(f"{said}: {fault.test}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
