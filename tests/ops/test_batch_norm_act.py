"""`batch_norm_act` against eager under the accuracy rule: layouts, dtypes, statistics, gradients, residual."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import fusedlayers as fl
from fusedlayers.activations import get
from fusedlayers.functional import batch_norm_act
from fusedlayers.ops import _route, _table, _tiling
from fusedlayers.ops import batch_norm_act as op
from tests.harness import FLOATS, LAYOUTS, assert_accurate, compare, laid_out, randn

pytestmark = pytest.mark.usefixtures("forced")

# One chunk and several, ragged, 1d to 3d; the channels_last ones end in a memory format
SHAPES = [(9, 70), (3, 4, 10), (4, 5, 6, 7), (2, 3, 3, 4, 2), (2, 1, 5, 5), (5, 5, 9, 17), (1, 6, 4, 4)]
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def eager(act, training=True, eps=1e-5):
    def fn(x, weight, bias, residual=None, mean=None, var=None):
        mean, var = (None if t is None else t.to(x.dtype) for t in (mean, var))
        z = F.batch_norm(x, mean, var, weight, bias, training, 0.1, eps)
        return get(act)(z if residual is None else z + residual)

    return fn


def fused(act, training=True, eps=1e-5):
    def fn(x, weight, bias, residual=None, mean=None, var=None):
        mean, var = (None if t is None else t.to(x.dtype) for t in (mean, var))
        return batch_norm_act(x, mean, var, weight, bias, training, 0.1, eps, act, residual)

    return fn


def inputs(shape, dtype, device, residual=False, last=False, seed=0):
    x = randn(*shape, dtype=dtype, device=device, seed=seed)
    if last:
        x = x.detach().to(memory_format=CHANNELS_LAST[len(shape)]).requires_grad_()
    weight, bias = (randn(shape[1], dtype=dtype, device=device, seed=seed + s) for s in (1, 2))
    r = randn(*shape, dtype=dtype, device=device, seed=seed + 3) if residual else None
    return x, weight, bias, r


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("act", ["relu", "gelu", "tanh"])
@pytest.mark.parametrize("residual", [False, True])
def test_every_dtype(act, residual, dtype, device):
    for last in (False, True):
        compare(fused(act), eager(act), inputs((3, 5, 6, 7), dtype, device, residual, last))


@pytest.mark.parametrize("act", ["relu", "identity"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_and_memory_format(shape, act, device):
    for last, residual in itertools.product({False, len(shape) in CHANNELS_LAST}, (False, True)):
        given = inputs(shape, torch.float32, device, residual, last)
        compare(fused(act), eager(act), given)
        stats = randn(shape[1], grad=False, device=device), randn(shape[1], grad=False, device=device).abs()
        compare(fused(act, training=False), eager(act, training=False), (*given, *stats))
        if last:
            y = fused(act)(*given)
            assert y.is_contiguous(memory_format=CHANNELS_LAST[len(shape)])


@pytest.mark.parametrize("act", ["relu", "gelu", "silu", "tanh", "leaky_relu"])
def test_activations(act, device):
    for residual in (False, True):
        compare(fused(act), eager(act), inputs((33, 17), torch.float32, device, residual))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_half_precision_with_float32_parameters(dtype, training, device):
    x, _, _, r = inputs((4, 6, 5, 5), dtype, device, residual=True)
    weight, bias = randn(6, device=device, seed=1), randn(6, device=device, seed=2)
    mean, var = torch.zeros(6, device=device), torch.ones(6, device=device)
    given = (x, weight, bias, r)
    wide = [t.detach().double().requires_grad_() for t in given]
    g = randn(4, 6, 5, 5, dtype=dtype, device=device, seed=9, grad=False)

    def run(fn, ts, grad):
        y = fn(ts[0], mean.to(ts[1].dtype), var.to(ts[1].dtype), *ts[1:3], training, 0.1, 1e-5, ts[3])
        return [y, *torch.autograd.grad(y, ts, grad)]

    def plain(x, mean, var, w, b, training, momentum, eps, r):
        return F.relu(F.batch_norm(x, mean, var, w, b, training, momentum, eps) + r)

    def ours(*args):
        return batch_norm_act(*args[:-1], "relu", args[-1])

    rows = zip(run(ours, given, g), run(plain, given, g), run(plain, wide, g.double()), strict=True)
    for i, (f, e, x64) in enumerate(rows):
        assert_accurate(f, e, x64, f"result {i}", terms=100)


@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(6, 5, 9, 3), (40, 3), (5, 5, 9, 17)], ids=str)
def test_running_statistics(shape, dtype, momentum, device):
    last = len(shape) == 4
    x, weight, bias, _ = inputs(shape, dtype, device, last=last)
    C = shape[1]
    kept = [(randn(C, dtype=dtype, device=device, grad=False), torch.ones(C, dtype=dtype, device=device))]
    kept.append(tuple(t.clone() for t in kept[0]))
    for _ in range(2):
        batch_norm_act(x, *kept[0], weight, bias, True, momentum, 1e-5)
        F.batch_norm(x, *kept[1], weight, bias, True, momentum, 1e-5)
    for a, b in zip(*kept, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 if dtype == torch.float32 else 1e-13, atol=1e-6)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("outlier", [False, True])
def test_large_mean_small_deviation(last, outlier, device):
    """Mean 1e4, deviation 1. E[x*x] - E[x]**2 in float32 gives variances that are off by tens here.

    Smooth where the deviation is 1: the last bit of the mean then decides on which side of ReLU's kink values lie.
    """
    x = 1e4 + randn(16, 6, 17, 9, grad=False)
    if outlier:
        x[0, :, 0, 0] = 0.0
    if last:
        x = x.to(memory_format=torch.channels_last)
    x = x.to(device).requires_grad_()
    weight, bias = randn(6, device=device, seed=1), randn(6, device=device, seed=2)
    act = "relu" if outlier else "silu"
    compare(fused(act), eager(act), (x, weight, bias))
    mean, var = torch.zeros(6, device=device), torch.zeros(6, device=device)
    batch_norm_act(x, mean, var, None, None, True, 1.0, 1e-5)
    exact = x.detach().double().var((0, 2, 3))
    assert ((var.double() - exact).abs() / exact).max() < 1e-4


def test_constant_channel(device):
    """A dead channel normalises to exactly its bias, and its ReLU gradient is eager's."""
    x = randn(8, 3, 4, 4, device=device).detach()
    x[:, 1] = 3.3
    x.requires_grad_()
    weight, bias = torch.ones(3, device=device, requires_grad=True), torch.zeros(3, device=device, requires_grad=True)
    compare(fused("relu"), eager("relu"), (x, weight, bias))


@pytest.mark.parametrize("needs", list(itertools.product((0, 1), repeat=4)), ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_every_requires_grad(needs, training, device):
    given = inputs((5, 4, 3, 3), torch.float32, device, residual=True)
    given = tuple(t.detach().requires_grad_(bool(n)) for t, n in zip(given, needs, strict=True))
    stats = () if training else (randn(4, grad=False, device=device), torch.ones(4, device=device))
    for act in ("relu", "silu"):
        compare(fused(act, training), eager(act, training), (*given, *stats))
        compare(fused(act, training), eager(act, training), (*given[:3], None, *stats))


@pytest.mark.parametrize("which", ["weight", "bias", "both"])
def test_without_parameters(which, device):
    x, weight, bias, _ = inputs((5, 4, 3, 3), torch.float32, device)
    weight, bias = None if which != "bias" else weight, None if which != "weight" else bias

    def expected(x, weight, bias):
        # torch's CUDA backward has no gradient for a bias without a weight: "tensor does not have a device"
        return eager("relu")(x, torch.ones_like(bias) if weight is None and bias is not None else weight, bias)

    compare(fused("relu"), expected, (x, weight, bias))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [0, 1, 3])
def test_every_layout(layout, which, device):
    given = list(inputs((6, 4, 5, 3), torch.float32, device, residual=True))
    given[which] = laid_out(given[which], layout)
    compare(fused("gelu"), eager("gelu"), given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((3, 6, 4), (0, 2, 1)),
        ((2, 6, 5, 7), (0, 3, 1, 2)),
        ((2, 6, 5, 7), (0, 2, 1, 3)),
        ((2, 6, 5, 7), (0, 1, 3, 2)),
        ((6, 4), (1, 0)),
        ((2, 3, 4, 5, 6), (0, 4, 1, 2, 3)),
        ((2, 3, 4, 5, 6), (0, 2, 1, 3, 4)),
        ((2, 1, 4, 3), (0, 1, 3, 2)),
    ],
    ids=str,
)
def test_results_lie_in_memory_as_eagers_do(shape, order, training, dtype, device):
    """What follows may view them."""
    x = randn(*shape, dtype=dtype, device=device).detach().permute(order).requires_grad_()
    C = x.shape[1]
    found = []
    for fn in (fused("relu", training=training), eager("relu", training=training)):
        ones, zeros = (make(C, device=device, dtype=dtype) for make in (torch.ones, torch.zeros))
        y = fn(x, ones, zeros, None, zeros.clone(), ones.clone())
        found.append((y, *torch.autograd.grad(y.square().sum(), x)))
    (ours, grad), (theirs, expected) = found
    assert ours.stride() == theirs.stride()
    torch.testing.assert_close(grad.float(), expected.float(), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
def test_asking_for_eagers_backend_takes_what_batch_norm_takes(affine, tracked, device):
    """Parameters and statistics may be absent, where torch's own question wants tensors."""
    x = randn(3, 6, 4, device=device).detach().transpose(1, 2)
    weight, bias = (randn(4, device=device).detach() if affine else None for _ in range(2))
    mean, var = (torch.ones(4, device=device) if tracked else None for _ in range(2))
    by_cudnn = op._by_cudnn(x, mean, var, weight, bias, True, 1e-5)
    assert by_cudnn == (affine and x.is_cuda and torch.backends.cudnn.enabled)
    y = op.batch_norm_act(x, mean, var, weight, bias, True, 0.1, 1e-5, get("relu"))
    mean, var = (None if t is None else torch.ones(4, device=device) for t in (mean, var))
    expected = F.relu(F.batch_norm(x, mean, var, weight, bias, True, 0.1, 1e-5))
    assert y.stride() == expected.stride()
    torch.testing.assert_close(y, expected)


def test_gradients_of_any_stride(device):
    x, weight, bias, r = inputs((6, 4, 5, 3), torch.float32, device, residual=True)
    wanted = (x, weight, bias, r)
    for g in (
        torch.ones((), device=device).expand(6, 4, 5, 3),
        randn(3, 5, 4, 6, device=device, grad=False).permute(3, 2, 1, 0),
    ):
        ours = torch.autograd.grad(fused("relu")(*wanted), wanted, g)
        for a, b in zip(ours, torch.autograd.grad(eager("relu")(*wanted), wanted, g), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf(value, device):
    x, weight, bias, r = inputs((4, 3, 5, 2), torch.float32, device, residual=True)
    with torch.no_grad():
        x[1, 1, 2, 0] = value
        r[0, 2, 0, 0] = value
    compare(fused("relu"), eager("relu"), (x, weight, bias, r))


def test_backward_twice_gives_the_same_bits(device):
    given = inputs((5, 5, 9, 17), torch.float32, device, residual=True, last=True)
    y = fused("relu")(*given)
    g = torch.ones_like(y)
    first, again = (torch.autograd.grad(y, given, g, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(y, fused("relu")(*given))


@pytest.mark.parametrize("act", ["relu", "gelu", "sigmoid", "identity"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_higher_derivatives(act, training, residual, device):
    x, weight, bias, r = inputs((3, 2, 2), torch.float64, device, residual)
    stats = randn(2, dtype=torch.float64, device=device, grad=False), torch.ones(2, dtype=torch.float64, device=device)
    given = (x, weight, bias) if r is None else (x, weight, bias, r)

    def fn(x, weight, bias, residual=None):
        return fused(act, training)(x, weight, bias, residual, *stats)

    assert torch.autograd.gradcheck(fn, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(fn, given, fast_mode=True)


def test_higher_derivatives_of_a_strided_input(device):
    x = laid_out(randn(3, 2, 3, dtype=torch.float64, device=device), "sliced")
    assert torch.autograd.gradgradcheck(lambda x: fused("silu")(x, None, None), (x,), fast_mode=True)


@pytest.mark.parametrize("training", [True, False])
def test_edits_before_backward(training, device):
    """The bias may change before backward; x, weight and the running statistics may not. As in eager."""
    stats = torch.zeros(4, device=device), torch.ones(4, device=device)
    for edited in ("bias", "x", "weight", "mean"):
        raised = []
        for fn in (fused, eager):
            x, weight, bias, _ = inputs((5, 4, 3, 3), torch.float32, device)
            mean, var = (t.clone() for t in stats)
            y = fn("gelu", training)(x, weight, bias, None, mean, var)
            expected = torch.autograd.grad(y.sum(), (x, weight, bias), retain_graph=True)
            with torch.no_grad():
                {"bias": bias, "x": x, "weight": weight, "mean": mean}[edited].add_(1.0)
            try:
                got = torch.autograd.grad(y.sum(), (x, weight, bias))
                raised.append(False)
                assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
            except RuntimeError as error:
                raised.append("modified by an inplace operation" in str(error))
        assert raised[0] == raised[1] == (edited != "bias"), edited


def test_two_forwards_then_both_backwards(device):
    """Updating the running statistics is not an edit: a shared norm may run twice before backward."""
    x, weight, bias, _ = inputs((5, 4, 3, 3), torch.float32, device)
    mean, var = torch.zeros(4, device=device), torch.ones(4, device=device)
    (
        fused("relu")(x, weight, bias, None, mean, var) + fused("relu")(2 * x, weight, bias, None, mean, var)
    ).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("act", ["relu", "gelu", "identity"])
def test_forward_begins_to_build_what_backward_launches(act, training, device, forced, monkeypatch):
    """Else it would build in vain, and backward again: the same launches, for the dtypes of the same pointers."""
    if forced != "triton":
        pytest.skip("no kernels")
    chain = fl.kernels.load("launch").Chain
    built, run = [], []

    def launched(self, *pointers, numbers=()):  # nothing is: it would take long, and change nothing
        run.append((self, tuple(None if p is None else p.dtype for p in pointers)))

    monkeypatch.setattr(chain, "build_ahead", lambda self, dtypes, device: built.append((self, dtypes)))
    monkeypatch.setattr(chain, "__call__", launched)
    fl.ops.batch_norm_act._cached_call.cache_clear()
    half, single = torch.bfloat16, torch.float32
    for needs, (dtype, added) in itertools.product(
        itertools.product([True, False], repeat=4), [(single, single), (half, half), (half, single)]
    ):
        given = [t.detach().to(dtype) for t in inputs((4, 6, 5, 2), single, device, residual=True)]
        given[3] = given[3].to(added) if needs[3] or act == "relu" else None
        wanted = [t.requires_grad_() for t, needed in zip(given, needs, strict=True) if needed]
        again = given[3] is None and added is not dtype
        if wanted and not again:
            mean, var = torch.zeros(6, device=device), torch.ones(6, device=device)
            y = fused(act, training)(*given, mean, var)
            run.clear()
            torch.autograd.grad(y, wanted, torch.ones_like(y))
            assert len(run) == 1 and built == run
            built.clear()


@contextlib.contextmanager
def cut_by(knobs: _tiling.Knobs) -> Iterator[None]:
    """With both passes cut as these knobs say."""
    before = _tiling.FORWARD, _tiling.BACKWARD

    def use(forward: _tiling.Knobs, backward: _tiling.Knobs) -> None:
        _tiling.FORWARD, _tiling.BACKWARD = forward, backward
        _tiling.tiling.cache_clear()
        fl.ops.batch_norm_act._cached_call.cache_clear()

    use(knobs, knobs)
    try:
        yield
    finally:
        use(*before)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("shape", [(5, 6, 7, 7), (33, 3, 5), (140, 64, 1, 3), (4, 5, 2, 3, 2)], ids=str)
def test_small_maps_are_walked_across_channels(shape, training, device):
    """Positions of contiguous maps as channels next to each other, whose sums are then of one channel again."""
    given = inputs(shape, torch.float32, device, residual=True)
    running = [randn(shape[1], device=device, grad=False), randn(shape[1], device=device, grad=False).abs() + 0.5]
    with cut_by(dataclasses.replace(_tiling.FORWARD, adjacent_from=0, adjacent_channels=1)):
        cut = _tiling.tiling(True, shape[0], shape[1], math.prod(shape[2:]), 4, 132, False)
        assert cut.adjacent and cut.features == shape[1]
        for given_now in (given, (*given[:3], None)):
            compare(
                lambda *args: fused("relu", training)(*args, *(t.clone() for t in running)),
                lambda *args: eager("relu", training)(*args, *(t.clone() for t in running)),
                given_now,
            )
        mine, theirs = ([t.clone() for t in running] for _ in range(2))
        fused("relu", training)(*given, *mine)
    eager("relu", training)(*given, *theirs)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_block_of_its_own_takes_all_of_its_chunk():
    """Or each of those that shared it would sum all of it."""
    for row, M, C, S in ((True, 256, 1024, 400), (True, 4, 2048, 49), (False, 64, 1024, 1)):
        for backward in (False, True):
            cut = _tiling.tiling(row, M, C, S, 2, 132, backward)
            assert cut.source == _tiling.OWN and cut.parts == 1


@pytest.mark.parametrize("channels", [128, 200])
def test_large_tensors_are_cut_wider(channels, device):
    """Where a multiprocessor has many rows, blocks take twice the channels; here, as if it had."""
    given = inputs((3, channels, 5, 7), torch.bfloat16, device, last=True)
    assert _tiling.tiling(False, 105, channels, 1, 2, 132, False).channels == 64
    with cut_by(_tiling.Knobs(wide_from=0)):
        assert _tiling.tiling(False, 105, channels, 1, 2, 132, False).channels == 128
        compare(fused("relu"), eager("relu"), given)


@pytest.mark.parametrize(("channels", "fold"), [(24, 8), (40, 8), (80, 4), (96, 2)])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_channels_that_fit_no_tile(training, channels, fold, device):
    """Several rows are walked as one: statistics, gradients and the running statistics are of the channels still."""
    given = inputs((8, channels, 16, 16), torch.float32, device, residual=channels == 40, last=True)
    running = torch.randn(channels, device=device), torch.rand(channels, device=device) + 0.5
    cut = _tiling.tiling(False, 2048, channels, 1, 4, 132, False)
    assert (cut.fold, cut.features) == (fold, channels) and cut.chunks > 1 and cut.sum_full
    mine, theirs = ([t.clone() for t in running] for _ in range(2))

    def kept(fn):
        return lambda *args: fn("relu", training)(*args, *(t.clone() for t in running))

    compare(kept(fused), kept(eager), given)
    fused("relu", training)(*given, *mine)
    eager("relu", training)(*given, *theirs)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("failing", ["forward_sums", "forward_combine", "forward_apply"])
def test_a_kernel_that_fails_moves_statistics_once(failing, grad, device, forced, monkeypatch):
    """Seen to fail: they had moved before the last launch could not be made, then eager moved them again."""
    if forced != "triton":
        pytest.skip("no kernels")
    launch = fl.kernels.load("launch").Launch
    given = inputs((8, 24, 16, 16), torch.float32, device, last=True)
    mine, theirs = ([torch.zeros(24, device=device), torch.ones(24, device=device)] for _ in range(2))
    count = torch.zeros((), dtype=torch.int64, device=device)

    def broken(self, *pointers, numbers=(), observed=False, made=launch.__call__):
        if self.kernel.__name__ == failing:
            raise fl.kernels.KernelError("no compiler")
        made(self, *pointers, numbers=numbers, observed=observed)

    monkeypatch.setattr(launch, "__call__", broken)
    monkeypatch.setattr(_route, "failures", {})
    op._cached_call.cache_clear()  # launches made before call no `__call__`
    with fl.settings(route="auto"), _table.in_force((op.OP, given[0].get_device()), {}):
        x, weight, bias, _ = (t if t is None else t.detach().requires_grad_(grad) for t in given)
        with pytest.warns(RuntimeWarning, match="no compiler"):
            y = op.batch_norm_act(x, *mine, weight, bias, True, 0.1, 1e-5, get("relu"), count=count)
    op._cached_call.cache_clear()
    torch.testing.assert_close(y, eager("relu")(x, weight, bias, None, *theirs))
    assert count == 1 and y.requires_grad == grad
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_follows_x(device):
    x, weight, bias, r = inputs((4, 3, 5, 2), torch.float32, device, residual=True)
    for dtype in (torch.float32, torch.bfloat16):
        for res in (torch.float32, torch.bfloat16):
            given = (x.detach().to(dtype), weight.detach(), bias.detach(), r.detach().to(res))
            with torch.autocast(device, dtype=torch.bfloat16):
                assert fused("gelu")(*given).dtype == eager("gelu")(*given).dtype
                assert fused("softplus" if "softplus" in fl.activations() else "silu")(*given).dtype in (
                    torch.float32,
                    torch.bfloat16,
                )


def test_bad_input_raises_what_torch_raises(device):
    def args(x=None, mean=None, var=None, weight=None, training=True):
        x = randn(4, 6, 3, device=device) if x is None else x
        return x, mean, var, weight, None, training, 0.1, 1e-5

    cases = [
        args(x=randn(1, 6, device=device)),
        args(weight=randn(5, device=device)),
        args(mean=torch.zeros(5, device=device), var=torch.ones(5, device=device)),
        args(training=False),
        args(x=randn(6, device=device)),
    ]
    with fl.settings(route="auto"):
        for case in cases:
            with pytest.raises(Exception) as expected:
                F.batch_norm(*case)
            with pytest.raises(type(expected.value)) as raised:
                batch_norm_act(*case)
            assert str(raised.value) == str(expected.value)
        with pytest.raises(ValueError, match="did you mean 'gelu'"):
            batch_norm_act(*args(), "gelo")
        with pytest.raises(RuntimeError, match="must match the size"):
            batch_norm_act(*args(), "relu", randn(4, 6, 2, device=device))


@pytest.mark.parametrize(("training", "eps"), [(True, 0.0), (True, -1.0), (False, -1.0)])
def test_an_eps_that_torch_refuses(training, eps, device):
    args = randn(4, 6, device=device), torch.zeros(6, device=device), torch.ones(6, device=device), None, None
    refused = None
    try:
        F.batch_norm(*args, training, 0.1, eps)
    except ValueError as error:
        refused = str(error)
    if refused is None:
        pytest.skip("this torch computes with it")
    with fl.settings(route="auto"), pytest.raises(ValueError) as raised:
        batch_norm_act(*args, training, 0.1, eps)
    assert str(raised.value) == refused
    assert torch.equal(args[1], torch.zeros_like(args[1]))


def test_empty_batch(device):
    x, weight = randn(0, 6, 3, device=device), randn(6, device=device)
    mean, var = torch.zeros(6, device=device), torch.ones(6, device=device)
    with fl.settings(route="auto"):
        for training in (True, False):
            y, e = (f("relu", training)(x, weight, None, None, mean, var) for f in (fused, eager))
            grads = [torch.autograd.grad(t.sum(), weight)[0] for t in (y, e)]
            assert y.shape == e.shape == (0, 6, 3) and torch.equal(*grads)


# a bias of the product in front


def with_shift(act, training, residual):
    """Of x, the shift that was added to it out of autograd's sight, and the rest."""

    def fn(x, shift, weight, bias, r, mean=None, var=None):
        near = shift.detach().view(-1, *[1] * (x.dim() - 2))
        mean, var = (None if t is None else t.to(x.dtype) for t in (mean, var))
        r = r if residual else None
        return op.batch_norm_act(x + near, mean, var, weight, bias, training, 0.1, 1e-5, get(act), r, shift)

    def plain(x, shift, weight, bias, r, mean=None, var=None):
        x = x + shift.view(-1, *[1] * (x.dim() - 2))
        return eager(act, training)(x, weight, bias, r if residual else None, mean, var)

    return fn, plain


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(9, 7), (3, 5, 6, 7)], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("residual", [False, True])
def test_gradient_of_a_shift(residual, training, shape, dtype, device):
    """Of what was added to each channel: none is left where the batch's mean is taken off, else the sums."""
    x, weight, bias, r = inputs(shape, dtype, device, True)
    shift = randn(shape[1], dtype=dtype, device=device, seed=8)
    stats = randn(shape[1], grad=False, device=device), randn(shape[1], grad=False, device=device).abs()
    pair = with_shift("relu", training, residual)
    compare(*pair, (x, shift, weight, bias, r if residual else None, *(() if training else stats)), sums=True)
    if training:
        (grad,) = torch.autograd.grad(pair[0](x, shift, weight, bias, r).square().sum(), shift)
        if fl.settings.route == "triton":
            assert not grad.any()
        assert grad.dtype == dtype and grad.shape == shift.shape


@pytest.mark.parametrize("needs", list(itertools.product((0, 1), repeat=3)), ids=str)
def test_gradient_of_a_shift_every_requires_grad(needs, device):
    x, weight, bias, _ = inputs((6, 4, 3, 3), torch.float32, device)
    shift = randn(4, device=device, seed=8)
    for t, need in zip((x, shift, weight), needs, strict=True):
        t.requires_grad_(bool(need))
    compare(*with_shift("silu", True, False), (x, shift, weight, bias, None), sums=True)


def test_gradient_of_a_shift_twice(device):
    x, weight, bias, _ = inputs((5, 4, 3), torch.float64, device)
    given = x, randn(4, dtype=torch.float64, device=device, seed=8), weight, bias, None
    found = []
    for fn in with_shift("tanh", True, False):
        grads = torch.autograd.grad(fn(*given).square().sum(), given[:4], create_graph=True)
        found.append([*grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), given[:4])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_gradient_of_a_shift_alone_twice(device):
    """Seen to fail: a 0 that nothing had led to."""
    x, weight, bias, _ = inputs((5, 4, 3), torch.float64, device)
    shift = randn(4, dtype=torch.float64, device=device, seed=8)
    for fn in with_shift("tanh", True, False):
        (grad,) = torch.autograd.grad(fn(x, shift, weight, bias, None).square().sum(), shift, create_graph=True)
        (again,) = torch.autograd.grad(grad.square().sum(), x)
        torch.testing.assert_close(grad, torch.zeros_like(grad))
        torch.testing.assert_close(again, torch.zeros_like(again))
