"""`norm(dropout(x) + residual)` in one pass: accuracy, masks, their replay, what is left to two steps."""

from __future__ import annotations

import contextlib
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers import kernels
from fusedlayers.ops import _drop_norm, _dropout, _route, _table
from fusedlayers.ops.layer_norm import dropout_layer_norm
from fusedlayers.ops.rms_norm import dropout_rms_norm
from tests.harness import LAYOUTS, compare, laid_out, randn

pytestmark = pytest.mark.usefixtures("forced")
interpreted = pytest.mark.skipif(not kernels.interpreted(), reason="runs kernels: needs TRITON_INTERPRET=1")

LOW = (torch.float32, torch.float16, torch.bfloat16)
SIZES = [(1, 3), (3, 17), (9, 24), (33, 64), (5, 513), (2, 1000), (70, 6)]
NEEDS = [tuple((n >> i) & 1 for i in range(4)) for n in range(16)]


def operands(m, n, dtype=torch.float32, device="cpu", needs=(1, 1, 1, 1)):
    """x, residual, weight and bias."""
    shapes = [(m, n), (m, n), (n,), (n,)]
    return [
        randn(*s, dtype=dtype, device=device, seed=i, grad=bool(g))
        for i, (s, g) in enumerate(zip(shapes, needs, strict=True))
    ]


def fused(x, residual, weight=None, bias=None, *, p=0.4, training=True, eps=1e-5, shift=None):
    """Every call from the same seed."""
    torch.manual_seed(5)
    return dropout_layer_norm(x, residual, p, training, x.shape[-1:], weight, bias, eps, shift=shift)


def eager(x, residual, weight=None, bias=None, *, p=0.4, training=True, eps=1e-5):
    torch.manual_seed(5)
    s = F.dropout(x, p, training) + residual
    return F.layer_norm(s, s.shape[-1:], weight, bias, eps), s


def factor_of(x, call=fused):
    """What the op multiplies each element of x by."""
    with torch.no_grad():
        return call(torch.ones_like(x), torch.zeros_like(x))[1]


def given(factor, norm=F.layer_norm, eps=1e-5):
    """The torch expression with this mask, kept elements scaled as exactly as the dtype of a call allows."""
    scale = float(factor.float().max())
    if fl.settings.route == "triton" and fl.settings.dropout == "fast":
        scale = _dropout.fast_threshold(0.4)[1]

    def expression(x, residual, *params):
        s = x * ((factor != 0) * scale).to(x.dtype) + residual
        return norm(s, s.shape[-1:], *(params or (None,)), eps), s

    return expression


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_size(size, dtype, device):
    """Seen to fail with a backward that draws for another row, and with one that scales dres as well."""
    inputs = operands(*size, dtype, device)
    with fl.settings(dropout="fast"):
        factor = factor_of(inputs[0])
        assert size[0] * size[1] < 20 or 0 < (factor == 0).sum() < factor.numel()
        eps = 1.0 if size[1] <= 3 else 1e-5
        compare(lambda *t: fused(*t, eps=eps), given(factor, eps=eps), inputs, sums=True)


@pytest.mark.parametrize("needs", NEEDS)
def test_every_requires_grad(needs, device):
    inputs = operands(9, 20, device=device, needs=needs)
    with fl.settings(dropout="fast"):
        expected, outs = given(factor_of(inputs[0])), fused(*inputs)
        assert [o.requires_grad for o in outs] == [o.requires_grad for o in expected(*inputs)]
        one = (lambda fn: fn) if needs[0] or needs[1] or not any(needs) else (lambda fn: lambda *t: fn(*t)[0])
        compare(one(fused), one(expected), inputs)


@pytest.mark.parametrize("which", ["norm", "sum"])
def test_one_result_alone_is_used(which, device):
    inputs = operands(9, 20, device=device)
    i = ("norm", "sum").index(which)
    with fl.settings(dropout="fast"):
        expected = given(factor_of(inputs[0]))
        compare(lambda *t: fused(*t)[i], lambda *t: expected(*t)[i], inputs)


@pytest.mark.parametrize("params", ["none", "weight", "bias"])
def test_absent_parameters(params, device):
    x, residual, w, b = operands(6, 33, device=device)
    w, b = w if params == "weight" else None, b if params == "bias" else None
    with fl.settings(dropout="fast"):
        compare(fused, given(factor_of(x)), (x, residual, w, b))


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_rms_norm(dtype, device):
    x, residual, w, _ = operands(9, 40, dtype, device)

    def call(x, residual, w=None):
        torch.manual_seed(5)
        return dropout_rms_norm(x, residual, 0.4, True, x.shape[-1:], w, 1e-5)

    with fl.settings(dropout="fast"):
        compare(call, given(factor_of(x, call), F.rms_norm), (x, residual, w))


def test_mixed_dtypes(device):
    """A branch in half precision over a wide stream, and the other way round: each gradient in its own dtype."""
    low, wide = randn(9, 24, dtype=torch.bfloat16, device=device), randn(9, 24, device=device, seed=1)
    w, b = (randn(24, device=device, seed=i) for i in (2, 3))
    double = [t.detach().double().requires_grad_() for t in (wide, w, b)]
    with fl.settings(dropout="fast"):
        for inputs in ((low, wide, w, b), (wide, low, w, b), (wide, *double)):
            compare(fused, given(factor_of(inputs[0])), inputs)


def test_written_in_the_dtype_of_the_product_behind_it(device):
    inputs = operands(9, 24, device=device)

    def call(*t):
        torch.manual_seed(5)
        return dropout_layer_norm(t[0], t[1], 0.4, True, (24,), *t[2:], out_dtype=torch.bfloat16)

    def expected(*t, plain=None):
        y, s = plain(*t)
        return y.to(torch.bfloat16 if y.dtype != torch.float64 else y.dtype), s

    with fl.settings(dropout="fast"):
        compare(call, functools.partial(expected, plain=given(factor_of(inputs[0]))), inputs)


def with_shift(call):
    """`call` on x and the shift that was added to it out of autograd's sight; the shift comes last."""
    return lambda x, *t: call(x + t[-1].detach(), *t[:-1], shift=t[-1])


def in_sight(call):
    return lambda x, *t: call(x + t[-1], *t[:-1])


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("size", [*SIZES, (2, 5, 24)], ids=str)
def test_gradient_of_a_shift(size, dtype, device):
    """Of what was added to x: the sums over that of x, whatever the parameters."""
    x, residual, w, b = operands(size[0], math.prod(size[1:]), dtype, device)
    x, residual = (t.detach().reshape(size).requires_grad_() for t in (x, residual))
    n = size[-1]
    shift, w, b = (t.detach()[:n].requires_grad_() for t in (randn(n, dtype=dtype, device=device, seed=9), w, b))
    eps = 1.0 if n <= 3 else 1e-5
    with fl.settings(dropout="fast"):
        factor = factor_of(x)
        for params in ((), (w,), (w, b)):
            pad = (None,) * (2 - len(params))
            wide = lambda call, pad=pad: lambda *t: call(*t[:-1], *pad, t[-1])  # noqa: E731
            compare(
                wide(with_shift(functools.partial(fused, eps=eps))), wide(in_sight(given(factor, eps=eps))),
                (x, residual, *params, shift), sums=True,
            )  # fmt: skip


@pytest.mark.parametrize("needs", [tuple((n >> i) & 1 for i in range(5)) for n in range(32)], ids=str)
def test_gradient_of_a_shift_every_requires_grad(needs, device):
    inputs = [*operands(9, 20, device=device, needs=needs[:4]), randn(20, device=device, seed=9, grad=bool(needs[4]))]
    with fl.settings(dropout="fast"):
        expected = in_sight(given(factor_of(inputs[0])))
        flags = [[o.requires_grad for o in fn(*inputs)] for fn in (with_shift(fused), expected)]
        assert flags[0] == flags[1]
        one = (lambda fn: fn) if all(flags[0]) or not any(needs) else (lambda fn: lambda *t: fn(*t)[0])
        compare(one(with_shift(fused)), one(expected), inputs)


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_a_shift_from_one_result_alone(which, device):
    inputs = [*operands(9, 20, device=device), randn(20, device=device, seed=9)]
    with fl.settings(dropout="fast"):
        expected = in_sight(given(factor_of(inputs[0])))
        compare(lambda *t: with_shift(fused)(*t)[which], lambda *t: expected(*t)[which], inputs)


@pytest.mark.parametrize("route", ["auto", "reference"])
@pytest.mark.parametrize("how", [{"p": 0.0}, {"training": False}, {"p": 1.0}, {}], ids=str)
def test_gradient_of_a_shift_whatever_the_route(how, route, device):
    """Where dropout is off too, and where torch alone can draw the mask."""
    inputs = [*operands(9, 20, device=device), randn(20, device=device, seed=9)]
    grads = []
    with fl.settings(route=route, dropout="eager"):
        for fn in (with_shift(functools.partial(fused, **how)), in_sight(functools.partial(eager, **how))):
            y, s = fn(*inputs)
            grads.append(torch.autograd.grad(y.square().sum() + s.sum(), inputs))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_gradient_of_a_shift_under_a_norm_of_two_dims(device):
    x, residual = randn(9, 4, 8, device=device), randn(9, 4, 8, device=device, seed=1)
    w, shift = randn(4, 8, device=device, seed=2), randn(8, device=device, seed=3)

    def call(x, residual, w, shift=None):
        torch.manual_seed(5)
        return dropout_layer_norm(x, residual, 0.4, True, (4, 8), w, shift=shift)

    with fl.settings(dropout="fast"):
        factor = factor_of(x, call=lambda *t: call(*t, None))
        scale = _dropout.fast_threshold(0.4)[1] if fl.settings.route == "triton" else float(factor.max())
        s = lambda x, r: x * ((factor != 0) * scale).to(x.dtype) + r  # noqa: E731
        plain = lambda x, r, w: (F.layer_norm(s(x, r), (4, 8), w), s(x, r))  # noqa: E731
        compare(with_shift(call), in_sight(plain), (x, residual, w, shift))


def test_gradient_of_a_shift_twice(device):
    """As a gradient that can itself be differentiated."""
    inputs = [*operands(8, 16, device=device), randn(16, device=device, seed=9)]
    with fl.settings(dropout="fast"):
        expected, found = in_sight(given(factor_of(inputs[0]))), []
        for fn in (with_shift(fused), expected):
            y, s = fn(*inputs)
            graph = torch.autograd.grad(y.square().sum() + s.square().sum(), inputs, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in graph), inputs)
            found.append((*graph, *second))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [0, 1])
def test_every_layout(which, layout, device):
    inputs = operands(6, 16, device=device)
    inputs[which] = laid_out(inputs[which], layout)
    with fl.settings(dropout="fast"):
        compare(fused, given(factor_of(inputs[0])), inputs)


def test_results_lie_in_rows_of_any_number_of_dims(device):
    x, residual = (randn(2, 3, 4, 8, device=device, seed=i) for i in range(2))
    w = randn(4, 8, device=device, seed=2)
    with fl.settings(dropout="fast"):
        y, s = dropout_layer_norm(x, residual, 0.4, True, (4, 8), w)
        torch.testing.assert_close(y, F.layer_norm(s, (4, 8), w))
    assert y.shape == s.shape == x.shape


# masks


class Eager:
    """The plan of a GPU of `blocks * 256` threads on the CPU, whose generator gives the seed."""

    def __init__(self, monkeypatch, widest, blocks=2):
        self.drop = None

        def plan(p, numel, dtype, address, device, setting):
            vec, threads, increment = _dropout.layout(numel, dtype.itemsize, address, widest, blocks)
            self.drop = _dropout.Dropout(_dropout.EAGER, vec, threads, increment, *_dropout.eager_threshold(p))
            return self.drop

        monkeypatch.setattr(_dropout, "plan", plan)
        _drop_norm._cached_call.cache_clear()

    def factor(self, x):
        torch.manual_seed(5)
        rng = _dropout.draw(self.drop, x.device)
        return _dropout.factor(torch.ones(x.shape, dtype=torch.float32), self.drop, rng).to(x.dtype)


@interpreted
@pytest.mark.parametrize("widest", [8, 4, 1])
@pytest.mark.parametrize("size", [(4, 24), (9, 17), (5, 514), (3, 1028), (40, 64)], ids=str)
def test_eagers_order_of_numbers(size, widest, monkeypatch):
    """By rows as over memory at once, through several laps of the threads, whatever the vectors; both ways."""
    plan = Eager(monkeypatch, widest)
    x, residual, w, b = operands(*size)
    try:
        torch.manual_seed(5)
        y, s = dropout_layer_norm(x, residual, 0.3, True, size[1:], w, b)
        (dx,) = torch.autograd.grad(s.sum() + y.sum() * 0, x)
        factor = plan.factor(x)
    finally:
        _drop_norm._cached_call.cache_clear()
    assert plan.drop.vec == widest or size[1] * size[0] % widest
    assert torch.equal(dx, factor) and 0 < (factor == 0).sum() < factor.numel()
    torch.testing.assert_close(s, x * factor + residual)
    torch.testing.assert_close(y, F.layer_norm(s, size[1:], w, b))


def test_eager_masks_are_f_dropouts(device):
    """On every device: same seed, same mask, and the generator ends where F.dropout leaves it."""
    inputs = operands(8, 64, device=device)
    with fl.settings(route="auto"):
        got = fused(*inputs, p=0.5)
        after = torch.rand(4, device=device)
        expected = eager(*inputs, p=0.5)
        assert torch.equal(after, torch.rand(4, device=device))
        assert torch.equal(got[1] == inputs[1], expected[1] == inputs[1])
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_eval_and_zero_probabilities_draw_nothing(device):
    inputs = operands(8, 24, device=device)
    plain = lambda x, r, w, b: (F.layer_norm(x + r, (24,), w, b), x + r)  # noqa: E731
    state = torch.get_rng_state()
    for p, training in ((0.5, False), (0.0, True), (1.0, False)):
        call = lambda x, r, w, b, p=p, t=training: dropout_layer_norm(x, r, p, t, (24,), w, b)  # noqa: E731
        compare(call, plain, inputs)
    assert torch.equal(state, torch.get_rng_state())


def test_everything_dropped(device):
    inputs = operands(8, 24, device=device)
    with fl.settings(route="auto"):
        compare(lambda *t: fused(*t, p=1.0), lambda x, r, w, b: (F.layer_norm(x * 0.0 + r, (24,), w, b), x * 0.0 + r),
                inputs)  # fmt: skip
        assert fused(inputs[0] * float("inf"), *inputs[1:], p=1.0)[1].isnan().all()


def test_inf_times_a_dropped_factor_is_nan_as_in_torch(device):
    """Seen to fail with a kernel that selects 0 instead of multiplying by it."""
    x = torch.full((4, 64), float("inf"), device=device)
    with fl.settings(dropout="fast", route="auto"):
        s = fused(x, torch.zeros_like(x))[1]
    assert s.isnan().any() and s.isinf().any() and not s.isfinite().any()


# higher derivatives, recomputation


def test_gradient_penalty_through_a_recomputed_mask(device):
    """Seen to fail with a composite that draws no mask."""
    inputs = operands(8, 16, device=device)
    with fl.settings(dropout="fast"):
        factor = factor_of(inputs[0])
        outs = fused(*inputs)
        grads = [randn(8, 16, device=device, seed=i, grad=False) for i in (4, 5)]
        plain = torch.autograd.grad(outs, inputs, grads, retain_graph=True)
        graph = torch.autograd.grad(outs, inputs, grads, create_graph=True)
        for a, b in zip(plain, graph, strict=True):
            torch.testing.assert_close(a, b)
        second = torch.autograd.grad(graph[0].square().sum(), inputs[:3])
        expected = given(factor)(*inputs)
        graph = torch.autograd.grad(expected, inputs, grads, create_graph=True)
        for a, b in zip(second, torch.autograd.grad(graph[0].square().sum(), inputs[:3]), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


def test_higher_derivatives_in_float64(device):
    """Whose dropout is torch's own."""
    inputs = operands(3, 4, torch.float64, device)
    with fl.settings(route="auto"):
        call = lambda *t: fused(*t, eps=0.1)  # noqa: E731
        assert torch.autograd.gradcheck(call, inputs)
        assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", ["fast", "eager"])
def test_checkpointing_repeats_the_mask(dropout, reentrant, device):
    inputs = operands(8, 16, device=device)

    def block(*t):
        y, s = dropout_layer_norm(t[0], t[1], 0.5, True, (16,), *t[2:])
        return y.tanh() + s

    with fl.settings(dropout=dropout, route="auto"):
        torch.manual_seed(1)
        expected = torch.autograd.grad(block(*inputs).sum(), inputs)
        torch.manual_seed(1)
        checkpoint(block, *inputs, use_reentrant=reentrant).sum().backward()
    for t, e in zip(inputs, expected, strict=True):
        torch.testing.assert_close(t.grad, e)


def test_backward_twice_is_identical(device):
    inputs = operands(33, 24, device=device)
    with fl.settings(dropout="fast"):
        outs = fused(*inputs)
        grads = [randn(33, 24, device=device, grad=False, seed=i) for i in (3, 4)]
        first = torch.autograd.grad(outs, inputs, grads, retain_graph=True)
        torch.manual_seed(99)
        second = torch.autograd.grad(outs, inputs, grads)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("edited", ["x", "residual", "weight", "bias", "norm", "sum"])
def test_edits_before_backward_are_as_legal_as_eagers(edited, device):
    outcomes = []
    for fn in (fused, eager):
        leaves = operands(5, 8, device=device)
        tensors = dict(zip(("x", "residual", "weight", "bias"), (t * 1 for t in leaves), strict=True))
        with fl.settings(dropout="fast"):
            outs = fn(*tensors.values(), p=0.0 if fl.settings.route == "reference" else 0.4)
            tensors.update(norm=outs[0], sum=outs[1])
            with torch.no_grad():
                tensors[edited].mul_(3.0)
            try:
                outcomes.append(len(torch.autograd.grad([o.sum() for o in outs], leaves)))
            except RuntimeError as error:
                outcomes.append(str(error).split(":")[0])
    assert outcomes[0] == outcomes[1]


def test_keeps_no_mask(device, forced):
    """Kept: the sum, weight and bias, as by eager's norm, and two numbers a row."""
    inputs = operands(8, 64, device=device)
    kept: list[torch.Tensor] = []
    pack = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with fl.settings(dropout="fast"), pack:
        fused(*inputs, p=0.4 if forced == "triton" else 0.0)
    assert sorted(t.numel() for t in kept if t.numel() > 16) == [64, 64, 512]


# what one kernel cannot do


def test_rows_too_long_are_done_in_two_steps(device):
    """9,000 columns stay in registers on the way forward only."""
    inputs = operands(2, 9000, device=device)
    with fl.settings(dropout="fast"):
        outs = fused(*inputs)
        if fl.settings.route == "triton":
            assert type(outs[1].grad_fn).__name__ == "_ScaleResidualBackward"
        compare(fused, given(factor_of(inputs[0])), inputs)


def test_float64_takes_torchs_dropout_and_the_kernel_of_the_norm(device):
    inputs = operands(5, 24, torch.float64, device)
    with fl.settings(route="auto"):
        compare(fused, eager, inputs)


def test_broadcast_and_empty_inputs(device):
    x, residual = randn(4, 1, 6, device=device), randn(1, 5, 6, device=device)
    with fl.settings(route="auto"):
        compare(lambda x, r: fused(x, r, p=0.0), lambda x, r: eager(x, r, p=0.0), (x, residual))
        empty = randn(0, 6, device=device)
        y, s = fused(empty, empty)
        assert y.shape == s.shape == (0, 6)


def test_bad_input_raises_what_torch_raises(device):
    x, residual, w, b = operands(4, 6, device=device)
    with fl.settings(route="auto"):
        for p in (1.5, -0.1):
            with pytest.raises(ValueError) as torchs:
                F.dropout(x, p)
            for training in (True, False):
                with pytest.raises(ValueError) as ours:
                    fused(x, residual, p=p, training=training)
                assert str(ours.value) == str(torchs.value)
        for bad in ((x, residual[:, :5], w, b), (x, residual, w[:5], b)):
            with pytest.raises(RuntimeError) as ours:
                fused(*bad)
            with pytest.raises(RuntimeError) as torchs:
                eager(*bad)
            assert str(ours.value) == str(torchs.value)


@interpreted
@pytest.mark.parametrize("broken", ["forward", "backward"])
def test_a_kernel_that_fails(broken, monkeypatch):
    """Forward: torch's ops with a draw of their own. Backward: raises, since the mask is only its seed."""

    def fail(*_, **__):
        raise kernels.KernelError("no such kernel")

    inputs = operands(4, 16)
    monkeypatch.setattr(_drop_norm._Call, broken, fail)
    monkeypatch.setattr(_route, "failures", {})
    with fl.settings(dropout="fast"):
        if broken == "forward":
            with fl.settings(route="auto"), pytest.warns(RuntimeWarning, match="dropout_layer_norm runs as plain"):
                assert type(fused(*inputs)[1].grad_fn).__name__ == "AddBackward0"
        else:
            y, _ = fused(*inputs)
            with pytest.raises(kernels.KernelError):
                y.sum().backward()


def test_compiles_without_a_graph_break(device):
    """Traced as torch's own ops."""
    inputs = operands(8, 24, device=device)
    compiled = torch.compile(
        lambda x, r, *params: dropout_layer_norm(x, r, 0.4, True, (24,), *params), backend="aot_eager", fullgraph=True
    )
    with fl.settings(route="auto"):
        y, s = compiled(*inputs)
    torch.testing.assert_close(y, F.layer_norm(s, (24,), *inputs[2:]))
    assert (s == inputs[1]).any()


def test_tiles_fit_every_gpu():
    """Threads, and the memory of the smallest: what `tests/kernels/test_compile.py` compiles, for all sizes."""
    for n in (1, 7, 64, 255, 768, 1024, 3000, 8192):
        tile = _drop_norm.backward_tile(n, 4, 4, 99 * 1024)
        assert tile.rows * tile.cols >= 1024 and tile.cols >= n and tile.sums in (1, tile.rows) and tile.warps <= 16


def test_small_sizes_follow_the_dropout_alone(device, forced, monkeypatch):
    """Where the table leaves a dropout and its add to eager, so is this one, and the norm takes its own route."""
    if forced != "triton":
        pytest.skip("no kernels here")
    prepared = []
    monkeypatch.setattr(_drop_norm, "_prepare", lambda *a, right=_drop_norm._prepare: prepared.append(1) or right(*a))
    x, residual = (torch.randn(4, 16, device=device, requires_grad=True) for _ in range(2))
    for entry, norm, total in (
        (_table.REFERENCE, "_RowNormBackward", "AddBackward0"), ({}, "_DropNormBackward", "_DropNormBackward"),
    ):  # fmt: skip
        prepared.clear()
        tables = (_table.in_force((op, x.get_device()), e) for op, e in (("scale_residual", entry), ("layer_norm", {})))
        with contextlib.ExitStack() as stack:
            for context in (fl.settings(route="auto", dropout="fast"), *tables):
                stack.enter_context(context)
            y, s = dropout_layer_norm(x, residual, 0.5, True, (16,))
        assert (y.grad_fn.name(), s.grad_fn.name()) == (norm, total) and len(prepared) == (not entry)


@pytest.mark.parametrize("operand", ["x", "residual"])
def test_parts_that_run_apart_lie_in_memory_as_eagers(operand, device):
    """The sum as its left operand, what was dropped: seen to lie as the residual."""
    x, residual = (torch.randn(7, 4, 6, device=device) for _ in range(2))
    turned = torch.randn(4, 7, 6, device=device).transpose(0, 1)
    x, residual = (turned, residual) if operand == "x" else (x, turned)
    weight = torch.ones(6, device=device)
    weight.requires_grad_().register_hook(lambda grad: grad)  # which keeps the parts apart
    y, total = dropout_layer_norm(x, residual, 0.3, True, (6,), weight, None, 1e-5)
    expected = F.dropout(x, 0.3, True) + residual
    assert total.stride() == expected.stride()
    assert y.stride() == F.layer_norm(expected, (6,), weight).stride()
