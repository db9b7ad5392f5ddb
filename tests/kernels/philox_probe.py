"""A kernel that shows what `kernels.philox.philox` returns."""

import triton
import triton.language as tl

from fusedlayers.kernels.philox import philox


@triton.jit
def _word(ptr, place):
    return tl.load(ptr + place * 0).to(tl.uint32, bitcast=True)


@triton.jit
def write_words(key_ptr, counter_ptr, out_ptr):
    """`out_ptr` (4, 2) int32: the four words, twice, for a key (2,) and a counter (4,) of int32."""
    place = tl.arange(0, 2)
    a, b, c, d = philox(
        _word(key_ptr, place), _word(key_ptr + 1, place), _word(counter_ptr, place), _word(counter_ptr + 1, place),
        _word(counter_ptr + 2, place), _word(counter_ptr + 3, place), 10,
    )  # fmt: skip
    tl.store(out_ptr + place, a.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2 + place, b.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 4 + place, c.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 6 + place, d.to(tl.int32, bitcast=True))
