"""What runs on this machine: versions, devices, Triton, compiler, routes, settings, and one kernel really run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import kernels
from .ops import _route
from .settings import settings

PACKAGES = ("fusedlayers", "torch", "triton", "lightning", "torchvision", "timm", "transformers", "numpy")


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and whether it is as it should be (`None`: worth knowing)."""

    what: str
    found: str
    ok: bool | None = True


@dataclass
class DoctorReport:
    """`ok` is false when kernels should run here and do not; a machine without a GPU or Triton is in order."""

    findings: list[Finding]

    @property
    def ok(self) -> bool:
        return all(f.ok is not False for f in self.findings)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        width = max(len(f.what) for f in self.findings)
        sign = {True: "ok  ", None: "note", False: "FAIL"}
        return "\n".join(f"{sign[f.ok]}  {f.what.ljust(width)}  {f.found}" for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "findings": [{"what": f.what, "found": f.found, "ok": f.ok} for f in self.findings]}


def examine() -> DoctorReport:
    """Looks at everything, runs one kernel where kernels can run, and changes nothing."""
    return DoctorReport(
        [_versions(), *_devices(), _triton(), _compiler(), *_routes(), _kernel(), _cache(), _settings()]
    )


def _versions() -> Finding:
    found = [f"python {platform.python_version()}"]
    for name in PACKAGES:
        if name == "torch":  # with its build, which the package's metadata may lack
            found.append(f"torch {torch.__version__}")
            continue
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return Finding("versions", ", ".join(found))


def _devices() -> list[Finding]:
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
        return [Finding("devices", f"no CUDA device ({built}): layers compute with PyTorch's own operators", None)]
    found = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        about = f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB, {p.multi_processor_count} SMs"
        found.append(Finding(f"cuda:{i}", about))
    return found


def _triton() -> Finding:
    why = kernels.unavailable()
    if why is not None:
        return Finding("triton", f"{why}; the same results come from plain PyTorch", None)
    how = "interpreted on the CPU (TRITON_INTERPRET)" if kernels.interpreted() else "imported"
    return Finding("triton", f"{importlib.metadata.version('triton')}, {how}")


def _compiler() -> Finding:
    """Triton builds a small C launcher for each kernel signature."""
    name = next(filter(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))), None)
    needed = torch.cuda.is_available() and kernels.unavailable() is None
    if name is None:
        return Finding("C compiler", "none (CC, cc, gcc, clang); Triton needs one", False if needed else None)
    try:
        said = subprocess.run([name, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:  # such as a file that may be executed and is no program
        return Finding("C compiler", f"{name} cannot be run: {error.strerror}", False if needed else None)
    return Finding("C compiler", said.partition("\n")[0] or name)


def _routes() -> list[Finding]:
    """Which route a plain call takes here, by device; a route that is forced and can run on none is a fault."""
    found = []
    devices = ("cpu", *(["cuda"] if torch.cuda.is_available() else []))
    for device in devices:
        why = _route.obstacle([torch.empty(1, device=device)]) or kernels.unavailable()
        if settings.route == "reference":
            found.append(Finding(f"route on {device}", "plain PyTorch: route 'reference' is forced", None))
            continue
        if settings.route == "triton":
            about = f"calls raise: route 'triton' is forced and cannot run: {why}" if why else "Triton: it is forced"
            here = device == devices[-1]  # beside a GPU, tensors on the CPU may be of no interest
            found.append(Finding(f"route on {device}", about, (False if here else None) if why else True))
            continue
        about = f"plain PyTorch: {why}" if why else "Triton, the vendor's library or plain PyTorch, by what is faster"
        found.append(Finding(f"route on {device}", about, None if why else True))
    return found


def _kernel() -> Finding:
    """One kernel, forward and backward, against eager."""
    device = "cuda" if torch.cuda.is_available() and not kernels.interpreted() else "cpu"
    if (device == "cpu" and not kernels.interpreted()) or kernels.unavailable() is not None:
        return Finding("a kernel", "not run: none can run here", None)
    from .functional import fused_relu

    x = torch.linspace(-3, 3, 1001, device=device, requires_grad=True)
    try:
        with settings(route="triton"):
            y = fused_relu(x, 2.0, 1.0)
        (dx,) = torch.autograd.grad(y.sum(), x)
    except Exception as error:
        return Finding("a kernel", f"{type(error).__name__}: {error}", False)
    expected = torch.relu(2 * x + 1)
    right = torch.allclose(y, expected) and torch.equal(dx, 2.0 * (expected > 0))
    return Finding("a kernel", f"built and run on {device}, " + ("right" if right else "WRONG RESULT"), right)


def _cache() -> Finding:
    folder = Path(settings.cache)
    try:
        nearest = next(p for p in (folder, *folder.parents) if p.exists())
    except OSError as error:  # a folder that may not be entered, a name that is too long
        return Finding("cache folder", f"{folder} (cannot be used: {error.strerror})", None)
    writable = os.access(nearest, os.W_OK)
    state = ("exists" if nearest == folder else "not made yet") + ("" if writable else ", cannot be written")
    return Finding("cache folder", f"{folder} ({state})", True if writable else None)


def _settings() -> Finding:
    names = sorted(n for n in os.environ if n.startswith("FUSEDLAYERS_") or n in ("TRITON_INTERPRET", "CC"))
    given = ", ".join(f"{n}={os.environ[n]}" for n in names)
    return Finding("settings", repr(settings) + (f"; from the environment: {given}" if given else ""))
