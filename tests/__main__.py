"""The whole suite on the CPU, in two passes: `python -m tests [pytest options]`.

The first runs every test, on plain PyTorch. The second runs the tests that reach a kernel once more, with the kernels
in Triton's interpreter: a process of its own, since Triton reads `TRITON_INTERPRET` when it is imported. What needs a
device is in `tests/gpu`, run by `pytest tests/gpu`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ("ops", "kernels", "nn", "properties", "modes", "test_activations.py", "test_inspect.py")
NO_TESTS = 5
"""pytest's exit status where its options select nothing, as `-k` may in one of the passes."""


def run(title: str, *options: str, **env: str) -> int:
    print(f"\n== {title}", flush=True)
    workers = str(min(os.cpu_count() or 1, 8))
    command = [sys.executable, "-m", "pytest", "-n", workers, "--dist", "worksteal", "--durations", "5", *options]
    # Workers share the cores among them; one thread each is faster than all of them fighting for all.
    return subprocess.run(command, cwd=ROOT, env={"OMP_NUM_THREADS": "1", **os.environ, **env}).returncode


def main(options: list[str]) -> int:
    codes = [run("Pass 1 of 2: every test, on plain PyTorch", "--ignore", "tests/gpu", *options, TRITON_INTERPRET="0")]
    if importlib.util.find_spec("triton") is None:
        print("\n== Pass 2 of 2 is left out: there is no Triton for this platform, so no kernel to interpret")
    else:
        paths = [f"tests/{name}" for name in KERNELS if (ROOT / "tests" / name).exists()]
        # Compiling for a real target and interpreting exclude each other within one process.
        skip = ("--ignore", "tests/kernels/test_compile.py")
        codes.append(run("Pass 2 of 2: kernels, interpreted", *paths, *skip, *options, TRITON_INTERPRET="1"))
    failed = [code for code in codes if code not in (0, NO_TESTS)]
    return failed[0] if failed else min(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
