"""When a product and its activation go to one kernel, and what happens where that fails. Its results: `tests/gpu`."""

from __future__ import annotations

import weakref

import pytest
import torch

import fusedlayers as fl
from fusedlayers.activations import get
from fusedlayers.kernels import KernelError
from fusedlayers.ops import _gemm, _overlap
from tests.harness import compare, randn

GELU = get("gelu")


@pytest.fixture
def hopper(monkeypatch):
    """A device for which the kernel is built, and results of any size."""
    monkeypatch.setattr(_overlap, "_built_for", lambda device: True)
    monkeypatch.setattr(_overlap, "SMALLEST", 0)
    monkeypatch.setattr(_overlap, "failures", {})


def takes(M=8, N=16, K=256, dtype=torch.bfloat16, a=None, b=None, c=None):
    a = torch.zeros(M, K, dtype=dtype) if a is None else a
    b = torch.zeros(N, K, dtype=dtype) if b is None else b
    c = torch.zeros(M, N, dtype=dtype) if c is None else c
    return _overlap._takes(M, N, K, a, b, c)


def test_what_the_kernel_takes(hopper):
    assert takes() and takes(dtype=torch.float16)
    assert takes(b=torch.zeros(256, 16, dtype=torch.bfloat16).t())
    assert takes(a=torch.zeros(8, 512, dtype=torch.bfloat16)[:, :256])
    assert not takes(dtype=torch.float32) and not takes(c=torch.zeros(8, 16))
    assert not takes(N=12) and not takes(K=260)
    assert not takes(a=torch.zeros(8, 257, dtype=torch.bfloat16)[:, :256]), "rows are not 16 bytes apart"
    assert not takes(a=torch.zeros(8, 264, dtype=torch.bfloat16)[:, 1:257]), "the first byte is not aligned"
    assert not takes(a=torch.zeros(256, 8, dtype=torch.bfloat16).t()), "rows do not lie in one piece"
    assert not takes(b=torch.zeros(16, 512, dtype=torch.bfloat16)[:, ::2])
    row = torch.zeros(256, dtype=torch.bfloat16)
    assert not takes(a=row.expand(8, 256)) and not takes(b=row.expand(16, 256)), "rows lie in one another"
    kept = torch.zeros(8 * 16 + 8, dtype=torch.bfloat16)
    assert takes(c=kept[8:].view(8, 16))
    assert not takes(c=kept[1:-7].view(8, 16)), "a hook on saved tensors has given it another place"
    assert not takes(c=torch.zeros(16, 8, dtype=torch.bfloat16).t())


def test_a_bias_with_gaps(hopper, monkeypatch):
    monkeypatch.setattr(_overlap, "_launched", lambda *a: pytest.fail("was launched"))
    x, w, y, b = (torch.zeros(*s, dtype=torch.bfloat16) for s in ((8, 256), (16, 256), (8, 16), (32,)))
    for bias in (b[::2], b[:1].expand(16)):
        assert _overlap.linear_act(x, w, bias, GELU, y) is None


def test_settings_and_sizes_that_keep_it_out(hopper, monkeypatch):
    for route in ("library", "triton", "reference"):
        with fl.settings(route=route):
            assert not takes()
    monkeypatch.setattr(_overlap, "SMALLEST", 8 * 16 + 1)
    assert not takes()


def test_what_it_is_not_worth(hopper, monkeypatch):
    monkeypatch.setattr(_overlap, "_launched", lambda *a: pytest.fail("was launched"))
    for name, K in (("relu", 256), ("mish", 256), ("gelu", 56)):
        x, w, y = (torch.zeros(*s, dtype=torch.bfloat16) for s in ((8, K), (16, K), (8, 16)))
        assert _overlap.linear_act(x, w, None, get(name), y) is None
        assert _overlap.act_backward(x, w.t(), y, get(name), None) is None
    x, w, y = (torch.zeros(*s, dtype=torch.bfloat16) for s in ((8, 184), (184, 16), (8, 16)))
    assert _overlap.act_backward(x, w, y, GELU, None) is None
    x, w = (torch.zeros(*s, dtype=torch.bfloat16) for s in ((8, 256), (256, 16)))
    assert _overlap.act_backward(x, w, y, get("gelu_tanh"), None) is None


def test_no_other_device():
    assert not _overlap._built_for(torch.device("cpu"))
    assert not takes(M=1 << 12, N=1 << 12)


@pytest.mark.parametrize("op", ["linear_act", "mlp"])
def test_a_kernel_that_fails_leaves_it_to_the_library(op, hopper, monkeypatch):
    """And is not tried again."""
    if not fl.kernels.interpreted():
        pytest.skip("only kernels that run ask for this one")
    asked = []

    def failing(*args):
        asked.append(args)
        raise KernelError("no memory")

    monkeypatch.setattr(_overlap, "_launch", lambda *a: failing)
    monkeypatch.setattr(_overlap, "_chain", lambda *a: failing)
    monkeypatch.setattr(_overlap.load("act_bias"), "BM", 128, raising=False)
    x, w1, b1 = (randn(*s, dtype=torch.bfloat16) for s in ((8, 256), (16, 256), (16,)))
    w2, b2 = randn(256, 16, dtype=torch.bfloat16), randn(256, dtype=torch.bfloat16)
    inputs = (x, w1, b1, "gelu") if op == "linear_act" else (x, w1, b1, w2, b2, "gelu")
    function = getattr(fl.functional, op)

    def eager(*args):
        *tensors, _ = args
        z = torch.nn.functional.gelu(torch.nn.functional.linear(*tensors[:3]))
        return z if op == "linear_act" else torch.nn.functional.linear(z, *tensors[3:])

    with pytest.warns(RuntimeWarning, match="run apart from now on: no memory"):
        compare(function, eager, inputs)
    assert len(asked) == 1 and list(_overlap.failures) == [x.device]


def test_the_hidden_activation_is_freed_before_the_last_products(hopper, monkeypatch):
    """It is recomputed for one product, and as large as its gradient: seen to be held until the end."""
    if not fl.kernels.interpreted():
        pytest.skip("only kernels that run ask for this one")
    held, later = [], []

    def both(g, weight, z, act, db_dtype):
        dz, h = act.backward(g @ weight, z), act(z)
        held.append(weakref.ref(h))
        return dz, dz.sum(0).to(db_dtype), h

    right = _gemm.input_grad
    monkeypatch.setattr(_overlap, "linear_act", lambda *a: None)
    monkeypatch.setattr(_overlap, "act_backward", both)
    monkeypatch.setattr(_gemm, "input_grad", lambda *a: later.append(held[0]() is None) or right(*a))
    tensors = [randn(*s, dtype=torch.bfloat16) for s in ((8, 64), (16, 64), (16,), (32, 16), (32,))]
    fl.functional.mlp(*tensors, "gelu").sum().backward()
    assert later == [True]
