"""Compiles a kernel to machine code with no GPU, as a launch on that architecture would."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ARCHS = (80, 89, 90)
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory a block may have. sm_86 has as little as sm_89."""
REGISTERS = 65536
"""Of a multiprocessor."""


@dataclass(frozen=True)
class Entry:
    """A kernel in one configuration.

    `signature`: the types of its parameters that are not `tl.constexpr`, in order: `"*bf16"`, `"i32"`, `"fp32"`; a
    `None` pointer is `None`, a size that is 1 is `1` (Triton compiles both in). `constants`: its constexpr parameters.
    """

    name: str
    fn: Any
    signature: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    aligned: bool = field(default=True, kw_only=True)
    """Whether pointers are 16-byte aligned and sizes multiples of 16."""
    maxnreg: int | None = field(default=None, kw_only=True)

    def compile(self, arch: int) -> Any:
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.maxnreg}
        return compile_kernel(self.fn, self.signature, self.constants, arch, aligned=self.aligned, **options)


def compile_kernel(
    fn: Any,
    signature: tuple[Any, ...],
    constants: dict[str, Any],
    arch: int,
    *,
    aligned: bool = True,
    num_warps: int = 4,
    num_stages: int = 2,
    maxnreg: int | None = None,
) -> Any:
    """The compiled kernel for compute capability `arch` (80, 89, 90): see its `.asm["ptx"]` and `.metadata.shared`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types: dict[str, str] = {}
    values: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    given = iter(signature)
    for i, parameter in enumerate(fn.params):
        kind = constants[parameter.name] if parameter.is_constexpr else next(given)
        if parameter.is_constexpr or not isinstance(kind, str):
            types[parameter.name], values[(i,)] = "constexpr", kind
            continue
        types[parameter.name] = kind
        specialized = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        if aligned and specialized and not kind.startswith("fp"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    assert next(given, None) is None, "more types than parameters"
    if getattr(fn, "is_gluon", bool)():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    source = ASTSource(fn, types, values, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def registers(compiled: Any) -> int:
    """Registers that each thread of a compiled kernel takes, as they are handed out: by eights."""
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton brings no cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = int(re.search(r"REG:(\d+)", shown.stdout + shown.stderr)[1])
    return -(-found // 8) * 8
