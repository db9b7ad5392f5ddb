"""`group_norm_act` against eager under the accuracy rule: group sizes, layouts, dtypes, gradients, autocast."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedlayers as fl
from fusedlayers.activations import get
from fusedlayers.functional import group_norm_act
from fusedlayers.ops.group_norm_act import Sizes, tiling
from fusedlayers.ops.group_norm_act import group_norm_act as ops_group_norm_act
from tests.harness import FLOATS, LAYOUTS, compare, laid_out, randn

pytestmark = pytest.mark.usefixtures("forced")

# (shape, groups): groups of 1 value a channel to 37,500, held in registers and not, (N, C) to 3d
CASES = [
    ((9, 70), 7),
    ((33, 17), 1),
    ((3, 4, 10), 4),
    ((4, 6, 6, 7), 3),
    ((1, 12, 1, 1), 2),
    ((2, 6, 2, 3, 4), 2),
    ((2, 6, 33, 33), 2),
    ((1, 30, 50, 50), 2),
]
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def fused(groups, act="silu", eps=1e-5):
    return lambda x, weight=None, bias=None: group_norm_act(x, groups, weight, bias, eps, act)


def eager(groups, act="silu", eps=1e-5):
    return lambda x, weight=None, bias=None: get(act)(F.group_norm(x, groups, weight, bias, eps))


def inputs(shape, dtype, device, last=False):
    x = randn(*shape, dtype=dtype, device=device)
    if last:
        x = x.detach().to(memory_format=CHANNELS_LAST[len(shape)]).requires_grad_()
    return x, *(randn(shape[1], dtype=dtype, device=device, seed=s) for s in (1, 2))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("act", ["silu", "identity"])
def test_every_size_and_memory_format(case, act, device):
    shape, groups = case
    for last in {False, len(shape) in CHANNELS_LAST}:
        given = inputs(shape, torch.float32, device, last)
        compare(fused(groups, act), eager(groups, act), given)
        if last:
            assert fused(groups)(*given).is_contiguous(memory_format=CHANNELS_LAST[len(shape)])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("act", ["silu", "relu", "gelu"])
def test_every_dtype(act, dtype, device):
    for last in (False, True):
        compare(fused(3, act), eager(3, act), inputs((2, 6, 5, 7), dtype, device, last))


# torch's own CPU backward crashes for a channels_last input that needs no gradient
@pytest.mark.parametrize(
    ("needs", "last"), [(n, last) for n in itertools.product((0, 1), repeat=3) for last in (0, 1) if n[0] or not last]
)
def test_every_requires_grad(needs, last, device):
    given = inputs((2, 6, 3, 4), torch.float32, device, last)
    given = tuple(t.detach().requires_grad_(bool(n)) for t, n in zip(given, needs, strict=True))
    compare(fused(2), eager(2), given)


@pytest.mark.parametrize("which", ["weight", "bias", "neither"])
def test_without_parameters(which, device):
    x, weight, bias = inputs((2, 6, 3, 4), torch.float32, device)
    given = (x, weight if which == "weight" else None, bias if which == "bias" else None)
    # torch itself cannot take a gradient with a bias and no weight
    compare(fused(2), eager(2), given, backward=which != "bias")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_every_layout(layout, which, device):
    given = list(inputs((4, 6, 5, 3), torch.float32, device))
    given[which] = laid_out(given[which], layout)
    compare(fused(3), eager(3), given)


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2), (0, 1, 3, 2), (3, 1, 0, 2), (0, 3, 1, 2, 4)], ids=str)
def test_results_lie_contiguous_where_the_input_has_no_format(order, device):
    """As torch's do, for views that follow: seen to keep the order of a Linear's transposed result."""
    shape = [4, 6, 2, 5, 3][: len(order)]
    x = torch.randn([shape[d] for d in order], device=device).permute([order.index(d) for d in range(len(order))])
    x = x[:, :4]
    got = fused(2)(x, *inputs((4, 4), torch.float32, device)[1:])
    want = eager(2)(x, *inputs((4, 4), torch.float32, device)[1:])
    torch.testing.assert_close(got, want, check_stride=True)


@pytest.mark.parametrize("stride", [(12, 1, 4, 1), (12, 1, 4, 4), (12, 1, 4, 12), (12, 3, 1, 1)], ids=str)
def test_images_one_pixel_wide_lie_as_eagers(stride, device):
    """Tokens that were made an image by `unsqueeze`: seen to stay channels last where torch's are contiguous."""
    x = torch.randn(24, device=device).as_strided((2, 4, 3, 1), stride)
    weight, bias = inputs((2, 4), torch.float32, device)[1:]
    got, want = ops_group_norm_act(x, 2, weight, bias, 1e-5, get("silu"), True), eager(2)(x, weight, bias)
    torch.testing.assert_close(got, want)
    assert got.stride()[:3] == want.stride()[:3]


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
def test_results_lie_as_eagers_where_asked(kind, contiguous, device, monkeypatch):
    """On a GPU torch's are contiguous whatever the input; elsewhere the kernels are told that they are."""
    if device == "cpu" and contiguous:
        monkeypatch.setattr("fusedlayers.ops.group_norm_act._makes_contiguous", lambda x: True)
    given = inputs((2, 6, 5, 7), torch.float32, device, last=True)
    given = (given[0] if kind is torch.Tensor else nn.Parameter(given[0].detach()), *given[1:])
    got = ops_group_norm_act(given[0], 3, *given[1:], 1e-5, get("silu"), True)
    want = eager(3)(*given)
    assert got.stride() == (want.contiguous() if contiguous else want).stride()
    ours, theirs = (torch.autograd.grad(y.sum(), given) for y in (got, want))
    for a, b in zip((got, *ours), (want, *theirs), strict=True):
        torch.testing.assert_close(a, b)


def test_who_looks_at_each_op_sees_eagers_alone(monkeypatch):
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            names.append(op.overloadpacket.__name__)
            return op(*args, **(kwargs or {}))

    names: list[str] = []
    monkeypatch.setattr("fusedlayers.ops.group_norm_act._makes_contiguous", lambda x: True)
    x, weight, bias = (t.detach() for t in inputs((2, 6, 5, 7), torch.float32, "cpu", last=True))
    with fl.settings(route="auto"), Seen():
        ops_group_norm_act(x, 3, weight, bias, 1e-5, get("silu"), True)
    assert names == ["native_group_norm", "silu"]


def test_gradients_of_any_stride(device):
    given = inputs((4, 6, 5, 3), torch.float32, device)
    for g in (
        torch.ones((), device=device).expand(4, 6, 5, 3),
        randn(3, 5, 6, 4, device=device).detach().permute(3, 2, 1, 0),
    ):
        ours, theirs = (torch.autograd.grad(fn(3)(*given), given, g) for fn in (fused, eager))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 7, 9), (1, 8, 70, 60)], ids=str)
def test_large_mean_small_deviation(shape, last, device):
    x = (1e4 + randn(*shape, grad=False)).to(device)
    if last:
        x = x.to(memory_format=torch.channels_last)
    compare(fused(2), eager(2), (x.requires_grad_(), *(randn(shape[1], device=device, seed=s) for s in (1, 2))))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("last", [False, True])
def test_nan_and_inf(value, last, device):
    given = inputs((2, 6, 3, 4), torch.float32, device, last)
    with torch.no_grad():
        given[0][1, 2, 1, 0] = value
    compare(fused(3, "relu"), eager(3, "relu"), given)


@pytest.mark.parametrize("last", [False, True])
def test_backward_twice_gives_the_same_bits(last, device):
    given = inputs((2, 6, 33, 33), torch.float32, device, last)
    y = fused(1)(*given)
    g = torch.ones_like(y)
    first, again = (torch.autograd.grad(y, given, g, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("act", ["silu", "relu", "sigmoid", "identity"])
def test_higher_derivatives(act, device):
    given = inputs((2, 4, 3), torch.float64, device)
    assert torch.autograd.gradcheck(fused(2, act), given, fast_mode=True)
    assert torch.autograd.gradgradcheck(fused(2, act), given, fast_mode=True)
    strided = laid_out(randn(2, 4, 3, dtype=torch.float64, device=device), "sliced")
    assert torch.autograd.gradgradcheck(fused(2, act), (strided,), fast_mode=True)


def test_edits_before_backward(device):
    """The bias may change before backward; x and weight may not. As in eager."""
    for edited in range(3):
        raised = []
        for fn in (fused, eager):
            given = inputs((2, 4, 3), torch.float32, device)
            y = fn(2)(*given)
            with torch.no_grad():
                given[edited].add_(1.0)
            try:
                torch.autograd.grad(y.sum(), given)
                raised.append(False)
            except RuntimeError as error:
                raised.append("modified by an inplace operation" in str(error))
        assert raised[0] == raised[1], edited
    x, weight, bias = inputs((2, 4, 3), torch.float32, device)
    y = fused(2)(x, weight, bias)
    expected = torch.autograd.grad(y.sum(), (x, weight, bias), retain_graph=True)
    with torch.no_grad():
        bias.add_(1.0)
    assert all(
        torch.equal(a, b) for a, b in zip(torch.autograd.grad(y.sum(), (x, weight, bias)), expected, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_autocast_gives_eagers_dtypes(dtype, act, device):
    given = [t.detach().requires_grad_() for t in inputs((2, 6, 3, 4), torch.float32, device)]
    given[0] = given[0].detach().to(dtype).requires_grad_()
    with fl.settings(route="auto"):
        for low in (torch.bfloat16, torch.float16):
            found = []
            for fn in (fused, eager):
                with torch.autocast(device, dtype=low):
                    y = fn(2, act)(*given)
                grads = torch.autograd.grad(y, given, torch.ones_like(y))
                found.append([y, *grads])
            for a, b in zip(*found, strict=True):
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_bad_input_raises_what_torch_raises(device):
    x = randn(4, 6, 3, device=device)
    cases = [
        (x, 4, None, None),
        (x, 2, randn(5, device=device), None),
        (x, 2, None, randn(5, device=device)),
        (randn(1, 6, device=device), 6, None, None),
        (randn(6, device=device), 2, None, None),
    ]
    with fl.settings(route="auto"):
        for case in cases:
            with pytest.raises(Exception) as expected:
                F.group_norm(*case)
            with pytest.raises(type(expected.value)) as raised:
                group_norm_act(*case)
            assert str(raised.value) == str(expected.value)


def test_empty_batch(device):
    x, weight = randn(0, 6, 3, device=device), randn(6, device=device)
    with fl.settings(route="auto"):
        y, e = fused(2)(x, weight), eager(2)(x, weight)
        grads = [torch.autograd.grad(t.sum(), weight)[0] for t in (y, e)]
    assert y.shape == e.shape == (0, 6, 3) and torch.equal(*grads)


@pytest.mark.parametrize(
    ("N", "C", "S", "D"), [(1, 3, 1, 1), (2, 320, 4096, 10), (65536, 64, 1, 2), (1, 512, 2**18, 16)]
)
def test_tiles_cover_everything(N, C, S, D):
    for row, itemsize in itertools.product((True, False), (2, 4, 8)):
        t = tiling(Sizes(row, N, C, S, D, 1), itemsize)
        assert t.chunks * t.per_chunk >= S > (t.chunks - 1) * t.per_chunk
        assert t.blocks * t.per_block >= S
        assert t.tile[0] * t.tile[1] <= 4096
        if t.resident is not None:
            assert t.resident[1] >= D and t.resident[2] >= S
