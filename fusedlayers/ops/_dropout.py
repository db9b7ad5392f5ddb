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

from ..kernels import cdiv, load
from ..settings import settings

BLOCK = 256  # threads of a block in torch's kernel
UNROLL = 4  # numbers a call gives, and the generator's unit
OFF, EAGER, FAST = 0, 1, 2
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TILE = 1024  # of `factor`: small, so that it is compiled soon


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
Rng = tuple[int, int] | tuple[Tensor, Tensor]
"""`(seed, offset)`, as numbers or as int64 tensors on the device."""


@dataclass(frozen=True)
class _Known:
    """What was found out about a device: for each dtype the most elements a thread of torch's dropout takes at once,
    or why its masks cannot be had; and why the generator cannot be read inside a CUDA graph, if so."""

    widest: dict[torch.dtype, int | str]
    captured: str | None


_known: dict[int, _Known] = {}
_check_lock = threading.Lock()


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
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return settings.dropout
    return f"{settings.dropout} captured" if device.index in _known else f"{settings.dropout} captured, unchecked"


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
    if setting.endswith("unchecked"):
        return "a CUDA graph is being captured before eager's masks were checked on this device"
    known = knowledge(device)
    widest = known.widest[dtype]
    if isinstance(widest, str):
        return widest
    if setting.endswith("captured") and known.captured is not None:
        return known.captured
    vec, threads, increment = layout(numel, dtype.itemsize, address, widest, _max_blocks(device.index))
    threshold, keep_scale = eager_threshold(p)
    return Dropout(EAGER, vec, threads, increment, threshold, keep_scale)


def draw(spec: Dropout, device: torch.device) -> Rng | None:
    """The generator's state for this mask; the generator moves on as torch's own call would move it.

    No device is waited for. While a CUDA graph is captured the state lies on the device, other at every replay.
    """
    if spec.mode == OFF:
        return None
    if device.type == "cpu":
        return int(torch.empty((), dtype=torch.int64).random_()), 0
    if torch.cuda.is_current_stream_capturing():
        if spec.mode == EAGER:
            return _captured_state(device, spec.increment)
        seed = torch.empty((), dtype=torch.int64, device=device).random_()
        return seed, seed
    generator = torch.cuda.default_generators[device.index]
    offset = generator.get_offset()
    generator.set_offset(offset + spec.increment)
    return generator.initial_seed(), offset


def mark(device: torch.device, rng: Rng | None) -> int | None:
    """Where the generator stood before it gave `rng`, for `rewind`: a kernel that failed must not have drawn."""
    if device.type != "cuda":
        return None
    if rng is not None:
        return rng[1] if type(rng[1]) is int else None
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.default_generators[device.index].get_offset()


def rewind(device: torch.device, offset: int | None) -> None:
    if offset is not None:
        torch.cuda.default_generators[device.index].set_offset(offset)


@torch.no_grad()
def _captured_state(device: torch.device, increment: int) -> tuple[Tensor, Tensor]:
    """Seed and offset at this point of a graph, on the device; the graph's generator moves on by `increment`.

    torch tells them to Python through one op only: memory-efficient attention with dropout returns them for its own
    backward, and counts one number for each query and key. So: a tiny attention of `increment` queries and one key.
    """
    key = _key(device.index)
    query = key.expand(1, increment, 1, 8)
    nones = (None,) * 5  # bias, and what ragged batches need
    result = torch.ops.aten._efficient_attention_forward(query, key, key, *nones, 0.5, 0, False)
    return result[2], result[3]


@functools.cache
def _key(index: int) -> Tensor:
    return torch.zeros((1, 1, 1, 8), dtype=torch.float16, device=f"cuda:{index}")


def pointers(rng: Rng | None) -> tuple[Tensor | None, Tensor | None]:
    return rng if rng is not None and isinstance(rng[0], Tensor) else (None, None)


_64_BITS = 2**64 - 1
_both, _words = struct.Struct("<QQ").pack, struct.Struct("<4i").unpack


def numbers(rng: Rng | None) -> tuple[int, int, int, int]:
    """Seed and offset in four int32 words, whatever their value, so that one compiled kernel serves them all."""
    if rng is not None and not isinstance(rng[0], Tensor):
        seed, offset = rng
        return _words(_both(seed & _64_BITS, offset & _64_BITS))
    return 0, 0, 0, 0


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - 2**32 if word >= 2**31 else word


def knowledge(device: torch.device) -> _Known:
    """What is known of a CUDA device; finds it out on the first call, which must not be inside a capture."""
    found = _known.get(device.index)
    if found is None:
        with _check_lock:
            found = _known.get(device.index)
            if found is None:
                found = _known[device.index] = _check(device)
    return found


@functools.cache
def _max_blocks(index: int) -> int:
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count * (properties.max_threads_per_multi_processor // BLOCK)


@torch.no_grad()
def _check(device: torch.device) -> _Known:
    """Draws with `F.dropout` and with the kernel from one state, and compares bits and offsets; so too in a graph.

    The generator is put back as it was.
    """
    generator = torch.cuda.default_generators[device.index]
    before = generator.get_state()
    try:
        with torch.cuda.device(device):
            widest = {dtype: _widest(generator, device, dtype) for dtype in DTYPES}
            return _Known(widest, _why_not_captured(generator, device))
    finally:
        generator.set_state(before)


def _widest(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> int | str:
    if torch.version.hip is not None:
        return "the masks of torch's ROCm dropout are not known"
    try:
        # newer versions take 16 bytes at once, older ones four elements
        for widest in dict.fromkeys((16 // dtype.itemsize, 4)):
            if all(_agrees(generator, device, dtype, widest, *case) for case in _cases(device.index)):
                return widest
    except (AttributeError, RuntimeError) as error:
        return f"torch's dropout could not be checked: {type(error).__name__}: {error}"
    return f"torch {torch.__version__} draws its dropout masks in another order"


def _why_not_captured(generator: torch.Generator, device: torch.device) -> str | None:
    """Captures two draws in a graph and replays it from a known state."""
    seed, offset = 0x5DEECE66D1234567, 2**34 - 4
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    try:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            _captured_state(device, 4)
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                states = _captured_state(device, 8), _captured_state(device, 4)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        generator.manual_seed(seed)
        generator.set_offset(offset)
        graph.replay()
        found = [int(t) for state in states for t in state]
        if found == [seed, offset, seed, offset + 8] and generator.get_offset() == offset + 12:
            return None
        return "in a CUDA graph the generator's state is not what torch's attention says"
    except (AttributeError, RuntimeError, TypeError) as error:
        return f"in a CUDA graph the generator's state cannot be read: {type(error).__name__}: {error}"
    finally:
        graph.reset()


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
    # float32 whatever the dtype: the kernel is compiled once for each vector width
    found = factor(torch.ones(numel, device=device), spec, (seed, offset))
    return torch.equal(found.to(dtype), expected)


def factor(ones: Tensor, spec: Dropout, rng: Rng) -> Tensor:
    """What dropout multiplies each element of a dense tensor by: `ones` of that layout in, 0 or the scale out."""
    out = torch.empty_like(ones)
    n = ones.numel()
    in_memory = pointers(rng)
    flags = (load("launch").tl.float32, False, False, False, False, in_memory[0] is not None)
    rest = (1.0, 1, 1, n, 1, 0, 0, 1, *constants(spec), *flags, *drawn(spec, n, n), 1, _TILE)
    run = load("launch").Launch(load("residual").forward, (cdiv(n, _TILE),), rest)
    run(ones, None, None, None, *in_memory, out, numbers=numbers(rng))
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
