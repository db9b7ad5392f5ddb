"""Dropout masks recomputed from a seed: eager's own on CUDA, or the cheaper ones of `settings(dropout="fast")`.

torch's CUDA dropout draws from a known generator in a known order (`kernels/philox.py`). Its kernel's shape is worked
out here from the device and the tensor, and held against `F.dropout` itself once per device and dtype before it is
trusted: where the two differ, dropout is left to torch.
"""

from __future__ import annotations

import functools
import struct
import threading
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import KernelError, cdiv, load
from ..settings import settings

BLOCK = 256  # threads of a block in torch's kernel
UNROLL = 4  # numbers a call gives, and the generator's unit
OFF, EAGER, FAST = 0, 1, 2

_checked: dict[tuple[int, torch.dtype], int | str] = {}
_check_lock = threading.Lock()


@dataclass(frozen=True)
class Dropout:
    """How one call draws its mask.

    Attributes:
        mode: `OFF`, `EAGER` or `FAST`.
        vec: elements a thread of torch's kernel takes at once.
        threads: how many threads torch's kernel starts.
        increment: by how much the generator's offset advances.
        threshold: an element is kept where its word is below.
        keep_scale: what kept elements are multiplied by.
    """

    mode: int = OFF
    vec: int = 1
    threads: int = 1
    increment: int = 0
    threshold: int = 0
    keep_scale: float = 1.0


NONE = Dropout()
Rng = tuple[int, int] | Tensor
"""`(seed, offset)`, or a `(2,)` int64 tensor on the device that holds them."""


def layout(numel: int, itemsize: int, address: int, widest: int, max_blocks: int) -> tuple[int, int, int]:
    """`(vec, threads, increment)` of torch's dropout over `numel` dense elements that begin at `address`."""
    threads = min(max_blocks, cdiv(numel, BLOCK)) * BLOCK
    vec = widest
    while vec > 1 and (address % (vec * itemsize) or numel % vec):
        vec //= 2
    return vec, threads, cdiv(numel, threads * UNROLL) * UNROLL


@functools.lru_cache(maxsize=256)
def eager_threshold(p: float) -> tuple[int, float]:
    """`(threshold, keep_scale)`: an element is kept where `uniform(word) < 1 - p`, in torch's float32 arithmetic.

    The uniform is `word * 2**-32 + 2**-33`, which never falls as the word grows, so one unsigned comparison decides
    the same.
    """
    keep = _float32(1.0 - p)
    low, high = 0, 2**32 - 1
    while low < high:
        middle = (low + high) // 2
        if _float32(_float32(float(middle)) * 2.0**-32 + 2.0**-33) < keep:
            low = middle + 1
        else:
            high = middle
    return low, _float32(1.0 / keep)


def fast_threshold(p: float) -> tuple[int, float]:
    """The same for 16-bit numbers: p to the nearest 2**-16, and the scale that leaves the mean as it is."""
    kept = min(max(round((1.0 - p) * 65536), 1), 65536)
    return kept, 65536 / kept


def _float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def setting(device: torch.device) -> str:
    """Which masks are wanted, and whether a CUDA graph is being captured: a prepared call is kept under both."""
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return settings.dropout + " captured" if captured else settings.dropout


def plan(p: float, numel: int, dtype: torch.dtype, address: int, device: torch.device, setting: str) -> Dropout | str:
    """How to draw the mask of `F.dropout(z, p, True)` for a dense `z`, or why it must be left to torch."""
    if p == 1.0:
        return "with p = 1 dropout draws nothing"
    if dtype == torch.float64:
        return "dropout in float64 is left to torch"
    if setting.startswith("fast"):
        threshold, keep_scale = fast_threshold(p)
        return Dropout(FAST, 8, 1, UNROLL, threshold, keep_scale)
    if device.type != "cuda":
        return "eager's masks are drawn by torch's CUDA generator"
    if setting.endswith("captured"):
        return "a CUDA graph is being captured: the generator's state lies on the device, so dropout is left to torch"
    widest = eager_vector(device, dtype)
    if isinstance(widest, str):
        return widest
    vec, threads, increment = layout(numel, dtype.itemsize, address, widest, _max_blocks(device.index))
    threshold, keep_scale = eager_threshold(p)
    return Dropout(EAGER, vec, threads, increment, threshold, keep_scale)


def draw(spec: Dropout, device: torch.device) -> Rng | None:
    """The generator's state for this mask; the generator moves on as torch's own call would move it.

    Host state only: no device is waited for. While a CUDA graph is captured, fast masks take a seed drawn on the
    device, so that every replay has a new one.
    """
    if spec.mode == OFF:
        return None
    if device.type == "cpu":
        return int(torch.empty((), dtype=torch.int64).random_()), 0
    if torch.cuda.is_current_stream_capturing():
        return torch.empty(2, dtype=torch.int64, device=device).random_()
    generator = torch.cuda.default_generators[device.index]
    offset = generator.get_offset()
    generator.set_offset(offset + spec.increment)
    return generator.initial_seed(), offset


def mark(device: torch.device) -> int | None:
    """Where the generator stands, for `rewind`: a kernel that failed must not have drawn."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.default_generators[device.index].get_offset()


def rewind(device: torch.device, offset: int | None) -> None:
    if offset is not None:
        torch.cuda.default_generators[device.index].set_offset(offset)


def numbers(rng: Rng | None) -> tuple[int, int, int, int]:
    """Seed and offset in four int32 words, whatever their value, so that one compiled kernel serves them all."""
    if isinstance(rng, tuple):
        seed, offset = rng
        return _signed(seed), _signed(seed >> 32), _signed(offset), _signed(offset >> 32)
    return 0, 0, 0, 0


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - 2**32 if word >= 2**31 else word


def eager_vector(device: torch.device, dtype: torch.dtype) -> int | str:
    """The most elements a thread of torch's dropout takes at once on this device, or why its masks cannot be had."""
    key = (device.index, dtype)
    with _check_lock:
        found = _checked.get(key)
        if found is None:
            found = _checked[key] = _check(device, dtype)
    return found


@functools.cache
def _max_blocks(index: int) -> int:
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count * (properties.max_threads_per_multi_processor // BLOCK)


@torch.no_grad()
def _check(device: torch.device, dtype: torch.dtype) -> int | str:
    """Draws with `F.dropout` and with the kernel from one state, which is put back, and compares bits and offsets."""
    if torch.version.hip is not None:
        return "the masks of torch's ROCm dropout are not known"
    generator = torch.cuda.default_generators[device.index]
    if not hasattr(generator, "get_offset"):
        return "this torch does not show its generator's offset"
    before = generator.get_state()
    try:
        with torch.cuda.device(device):
            # newer versions take 16 bytes at once, older ones four elements
            for widest in dict.fromkeys((16 // dtype.itemsize, 4)):
                if all(_agrees(generator, device, dtype, widest, *case) for case in _cases(device.index)):
                    return widest
    except (RuntimeError, KernelError) as error:
        return f"torch's dropout could not be checked: {error}"
    finally:
        generator.set_state(before)
    return f"torch {torch.__version__} draws its dropout masks in another order"


def _cases(index: int) -> list[tuple[int, int, float]]:
    """`(elements, elements skipped in memory before them, p)`: every vector width, one lap of the threads and more."""
    lap = _max_blocks(index) * BLOCK
    return [(8 * lap + 8008, 0, 0.3), (8 * lap + 4, 0, 0.5), (4 * lap + 2, 0, 0.1), (4 * lap + 1001, 0, 0.3),
            (4 * lap + 8, 1, 0.3), (1000, 0, 0.9)]  # fmt: skip


def _agrees(
    generator: torch.Generator, device: torch.device, dtype: torch.dtype, widest: int, numel: int, skip: int, p: float
) -> bool:
    seed, offset = 0x5DEECE66D1234567, 2**34 - 4
    generator.manual_seed(seed)
    generator.set_offset(offset)
    ones = torch.ones(numel + skip, dtype=dtype, device=device)[skip:]
    expected = F.dropout(ones, p, True)
    vec, threads, increment = layout(numel, dtype.itemsize, ones.data_ptr(), widest, _max_blocks(device.index))
    spec = Dropout(EAGER, vec, threads, increment, *eager_threshold(p))
    if generator.get_offset() != offset + increment:
        return False
    return torch.equal(factor(ones, spec, (seed, offset)), expected)


def factor(ones: Tensor, spec: Dropout, rng: Rng) -> Tensor:
    """What dropout multiplies each element of a dense tensor by: `ones` of that layout in, 0 or the scale out."""
    out = torch.empty_like(ones)
    n = ones.numel()
    rng_ptr = rng if isinstance(rng, Tensor) else None
    tl = load("launch").tl
    flags = (tl.float32, False, False, False, False, rng_ptr is not None)
    rest = (1.0, 1, 1, n, 1, 0, 0, 1, *constants(spec), *flags, *drawn(spec, n, n), 1, 4096)
    run = load("launch").Launch(load("residual").forward, (cdiv(n, 4096),), rest)
    run(ones, None, None, None, rng_ptr, out, numbers=numbers(rng))
    return out


def constants(spec: Dropout) -> tuple[int, int, float]:
    """The kernels' threshold, threads and keep_scale."""
    return _signed(spec.threshold), spec.threads, spec.keep_scale


def drawn(spec: Dropout, numel: int, columns: int) -> tuple[int, int, bool, bool]:
    """The kernels' DROP, VEC, GROUPED and WIDE, for rows of so many columns."""
    if spec.mode == OFF:
        return OFF, 1, False, False
    grouped = spec.vec >= 4 and columns % spec.vec == 0
    return spec.mode, spec.vec, grouped, numel >= 2**32
