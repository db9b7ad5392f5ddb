"""`scale_residual` against eager under the accuracy rule; its masks, their replay, and what it keeps."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers import kernels
from fusedlayers.functional import scale_residual
from fusedlayers.ops import _dropout, _route, _table
from fusedlayers.ops import scale_residual as op
from tests.harness import FLOATS, LAYOUTS, RAGGED, assert_accurate, compare, laid_out, randn

pytestmark = pytest.mark.usefixtures("forced")

# (shape of x, shape of the scale): LayerScale, NCHW LayerScale, gates a sample, AdaLN gates, scalars, full size
PATTERNS = [
    ((5, 7), (7,)),
    ((2, 9, 6), (6,)),
    ((2, 9, 6), (2, 1, 6)),
    ((2, 6, 3, 3), (6, 1, 1)),
    ((2, 6, 3, 3), (2, 6, 1, 1)),
    ((3, 8, 4), (3, 1, 1)),
    ((33, 17), ()),
    ((4, 6), (4, 6)),
    ((7,), (7,)),
    ((5, 1), (1,)),
]
PATHS = [pattern for pattern in PATTERNS if pattern != ((4, 6), (4, 6)) and len(pattern[0]) > 1]


def eager(x, residual, scale=None, drop_path_p=0.0):
    """What a block writes: LayerScale's product, timm's DropPath, the add."""
    z = x if scale is None else scale * x
    if drop_path_p:
        keep = 1 - drop_path_p
        random = z.new_empty((z.shape[0],) + (1,) * (z.dim() - 1)).bernoulli_(keep)
        z = z * random.div_(keep)
    return residual + z


def seeded(fn, seed=5):
    def call(*args):
        torch.manual_seed(seed)
        return fn(*args)

    return call


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_every_scale(pattern, dtype, device):
    x, residual, scale = (
        randn(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate((pattern[0], pattern[0], pattern[1]))
    )
    compare(scale_residual, eager, (x, residual, scale))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_number_as_scale(dtype, device):
    x, residual = (randn(9, 12, dtype=dtype, device=device, seed=i) for i in range(2))
    compare(lambda x, r: scale_residual(x, r, 0.3), lambda x, r: r + 0.3 * x, (x, residual))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pattern", [*PATHS, ((6, 5), None), ((4, 3, 5), None)], ids=str)
def test_drop_path(pattern, dtype, device):
    """Factors drawn by torch from the same seed; 1 / 0.75 in the dtype, so float64 differs by that rounding alone."""
    shape, scale_shape = pattern
    inputs = [randn(*shape, dtype=dtype, device=device, seed=i) for i in range(2)]
    if scale_shape is not None:
        inputs.append(randn(*scale_shape, dtype=dtype, device=device, seed=2))
    torch.manual_seed(5)
    keep = torch.empty((shape[0],) + (1,) * (len(shape) - 1), device=device, dtype=dtype).bernoulli_(0.75).div_(0.75)

    def given(x, residual, scale=None):
        return residual + (x if scale is None else scale * x) * keep.to(x.dtype)

    fused = seeded(lambda x, r, s=None: scale_residual(x, r, s, drop_path_p=0.25, training=True))
    compare(fused, given, inputs)
    torch.manual_seed(5)
    expected = eager(*inputs, *(() if scale_shape is not None else (None,)), 0.25)
    assert_accurate(fused(*inputs), expected, given(*(t.double() for t in inputs)))


def test_drop_path_of_channels_last(device):
    x = randn(3, 6, 4, 5, device=device).detach().to(memory_format=torch.channels_last).requires_grad_()
    residual, scale = randn(3, 6, 4, 5, device=device, seed=1), randn(6, 1, 1, device=device)
    residual = residual.detach().to(memory_format=torch.channels_last).requires_grad_()
    fused = seeded(lambda *t: scale_residual(*t, drop_path_p=0.5, training=True))
    compare(fused, seeded(lambda *t: eager(*t, 0.5)), (x, residual, scale))
    assert fused(x, residual, scale).stride() == (residual + x).stride()


@pytest.mark.parametrize("scaled", [True, False])
def test_drop_path_where_samples_interleave_in_memory(scaled, device):
    """The first dim is not the slowest: seen to fail with that check of the plan removed."""
    x, residual = (randn(5, 3, 4, device=device, seed=i).detach().permute(2, 1, 0) for i in range(2))
    inputs = [x.requires_grad_(), residual.requires_grad_()]
    if scaled:
        inputs.append(randn(5, device=device))
    with fl.settings(route="auto"):
        fused = seeded(lambda x, r, s=None: scale_residual(x, r, s, drop_path_p=0.5, training=True))
        compare(fused, seeded(lambda x, r, s=None: eager(x, r, s, 0.5)), inputs)


@pytest.mark.parametrize("needs", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
@pytest.mark.parametrize("shape", [(9, 8), (2, 6, 3, 3)], ids=str)
def test_every_requires_grad(needs, shape, device):
    scale_shape = (8,) if len(shape) == 2 else (6, 1, 1)
    inputs = [
        randn(*s, device=device, grad=bool(n), seed=i)
        for i, (s, n) in enumerate(zip((shape, shape, scale_shape), needs, strict=True))
    ]
    compare(scale_residual, eager, inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_every_layout(layout, which, device):
    inputs = [randn(*s, device=device, seed=i) for i, s in enumerate([(6, 9, 8), (6, 9, 8), (6, 1, 8)])]
    inputs[which] = laid_out(inputs[which], layout)
    compare(scale_residual, eager, inputs)
    assert scale_residual(*inputs).stride() == eager(*inputs).stride()


@pytest.mark.parametrize("shape", [(m, n) for m in RAGGED for n in RAGGED if m * n < 30000])
def test_ragged(shape, device):
    x, residual, scale = (
        randn(*shape, device=device),
        randn(*shape, device=device, seed=1),
        randn(shape[1], device=device),
    )
    compare(scale_residual, eager, (x, residual, scale))


@pytest.mark.parametrize("shape", [(33, 17), (4, 3, 24), (513,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaled", [True, False])
def test_fast_dropout_replays_in_backward(scaled, dtype, shape, device, forced):
    """The forward shows which elements were kept, and the gradients must agree; on every draw alike."""
    inputs = [randn(*shape, dtype=dtype, device=device, seed=i) for i in range(2)]
    if scaled:
        inputs.append(randn(shape[-1], dtype=dtype, device=device, seed=2))
    with fl.settings(dropout="fast"):
        fused = seeded(lambda x, r, s=None: scale_residual(x, r, s, dropout_p=0.4, training=True))
        ones = torch.ones(shape, device=device, dtype=dtype)
        factor = fused(ones, torch.zeros_like(ones), *((torch.ones_like(inputs[2]),) if scaled else ()))
        assert 0 < (factor == 0).sum() < factor.numel()
        exact_scale = factor.float().max() if forced == "reference" else _dropout.fast_threshold(0.4)[1]

        def given(x, r, s=None):
            return r + (x if s is None else s * x) * ((factor != 0) * float(exact_scale)).to(x.dtype)

        compare(fused, given, inputs)


def test_fast_dropout_with_drop_path_and_a_gate(device):
    x, residual = (randn(6, 8, 16, device=device, seed=i) for i in range(2))
    gate = randn(6, 1, 16, device=device)
    with fl.settings(dropout="fast"):
        fused = seeded(lambda *t: scale_residual(*t, dropout_p=0.3, drop_path_p=0.5, training=True))
        ones = torch.ones_like(x.detach())
        factor = fused(ones, torch.zeros_like(ones), torch.ones_like(gate))
        compare(fused, lambda x, r, s: r + s * x * factor.to(x.dtype), (x, residual, gate))
        assert torch.equal(factor.abs().sum((1, 2)) == 0, (factor == 0).all(2).all(1))


def test_seeds_decide_the_mask(device):
    x, residual = (randn(8, 64, device=device, seed=i) for i in range(2))
    for dropout in ("fast", "eager"):
        with fl.settings(dropout=dropout, route="auto"):
            call = lambda: scale_residual(x, residual, dropout_p=0.5, training=True)  # noqa: E731
            torch.manual_seed(3)
            first, second = call(), call()
            torch.manual_seed(3)
            again = call()
        assert torch.equal(first, again) and not torch.equal(first, second)


def test_eager_masks_are_f_dropouts(device):
    """On every device: same seed, same mask, and the generator ends where F.dropout leaves it."""
    x, residual, scale = (randn(*s, device=device, seed=i) for i, s in enumerate([(8, 64), (8, 64), (64,)]))
    with fl.settings(route="auto"):
        torch.manual_seed(3)
        got = scale_residual(x, residual, scale, dropout_p=0.5, drop_path_p=0.2, training=True)
        after = torch.rand(4, device=device)
        torch.manual_seed(3)
        z = F.dropout(scale * x, 0.5, True)
        z = z * z.new_empty(8, 1).bernoulli_(0.8).div_(0.8)
        expected = residual + z
        assert torch.equal(after, torch.rand(4, device=device))
    torch.testing.assert_close(got, expected)


def test_a_bare_add_is_an_add(device):
    x, residual = randn(4, 8, device=device), randn(4, 8, device=device, seed=1)
    compare(scale_residual, eager, (x, residual))
    with fl.settings(route="auto"):
        assert type(scale_residual(x, residual).grad_fn).__name__ == "AddBackward0"


def test_eval_and_zero_probabilities_draw_nothing(device):
    x, residual, scale = (randn(*s, device=device, seed=i) for i, s in enumerate([(8, 16), (8, 16), (16,)]))
    state = torch.get_rng_state()
    compare(lambda *t: scale_residual(*t, dropout_p=0.5, drop_path_p=0.5), eager, (x, residual, scale))
    compare(lambda *t: scale_residual(*t, training=True), eager, (x, residual, scale))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("p", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)], ids=str)
def test_everything_dropped(p, device):
    x, residual, scale = (randn(*s, device=device, seed=i) for i, s in enumerate([(8, 16), (8, 16), (16,)]))
    with fl.settings(route="auto"):
        fused = lambda *t: scale_residual(*t, dropout_p=p[0], drop_path_p=p[1], training=True)  # noqa: E731
        compare(fused, lambda x, r, s: r + s * x * 0.0, (x, residual, scale))
        assert scale_residual(x * float("inf"), residual, dropout_p=p[0], drop_path_p=p[1], training=True).isnan().all()


def test_inf_times_a_dropped_factor_is_nan_as_in_torch(device):
    """Seen to fail with a kernel that selects 0 instead of multiplying by it."""
    x = torch.full((4, 64), float("inf"), device=device)
    with fl.settings(dropout="fast", route="auto"):
        y = scale_residual(x, torch.zeros_like(x), dropout_p=0.5, training=True)
    assert y.isnan().any() and y.isinf().any() and not y.isfinite().any()


def test_mixed_dtypes_promote_like_torch(device):
    low = randn(4, 8, dtype=torch.bfloat16, device=device)
    half = randn(4, 8, dtype=torch.float16, device=device)
    wide, scale = randn(4, 8, device=device), randn(8, device=device)
    for inputs in ((low, wide, scale), (low, low, scale), (wide, low, low[0].detach()), (low, half, scale[0])):
        compare(scale_residual, eager, inputs)
    with torch.autocast(device, dtype=torch.bfloat16):
        compare(scale_residual, eager, (low, wide, scale))


@pytest.mark.parametrize("drops", [(0.0, 0.0), (0.0, 0.5), (0.5, 0.0)], ids=str)
def test_higher_derivatives(drops, device):
    """float64 keeps its draws: kernels for DropPath, torch's own dropout."""
    x, residual, scale = (
        randn(*s, dtype=torch.float64, device=device, seed=i) for i, s in enumerate([(3, 4), (3, 4), (4,)])
    )
    with fl.settings(route="auto"):
        fused = seeded(lambda *t: scale_residual(*t, dropout_p=drops[0], drop_path_p=drops[1], training=True))
        assert torch.autograd.gradcheck(fused, (x, residual, scale))
        assert torch.autograd.gradgradcheck(fused, (x, residual, scale))


def test_gradient_penalty_through_a_recomputed_mask(device):
    """The composite backward draws the same mask as the kernel's. Seen to fail with a composite that draws none."""
    x, residual, scale = (randn(*s, device=device, seed=i) for i, s in enumerate([(8, 16), (8, 16), (16,)]))
    with fl.settings(dropout="fast"):
        y = seeded(lambda *t: scale_residual(*t, dropout_p=0.5, drop_path_p=0.25, training=True))(x, residual, scale)
        g = randn(8, 16, device=device, seed=4)
        plain = torch.autograd.grad(y, (x, residual, scale), g, retain_graph=True)
        graph = torch.autograd.grad(y, (x, residual, scale), g, create_graph=True)
        for a, b in zip(plain, graph, strict=True):
            torch.testing.assert_close(a, b)
        (second,) = torch.autograd.grad(graph[2].square().sum(), x)
    assert second.shape == x.shape and second.abs().sum() > 0


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", ["fast", "eager"])
def test_checkpointing_repeats_the_mask(dropout, reentrant, device):
    x, residual, scale = (randn(*s, device=device, seed=i) for i, s in enumerate([(8, 16), (8, 16), (16,)]))

    def block(*t):
        return scale_residual(*t, dropout_p=0.5, drop_path_p=0.25, training=True).tanh()

    with fl.settings(dropout=dropout, route="auto"):
        torch.manual_seed(1)
        expected = torch.autograd.grad(block(x, residual, scale).sum(), (x, residual, scale))
        torch.manual_seed(1)
        y = checkpoint(block, x, residual, scale, use_reentrant=reentrant)
        inputs = (x, residual, scale)
        y.sum().backward()
    for t, e in zip(inputs, expected, strict=True):
        torch.testing.assert_close(t.grad, e)


def test_backward_twice_is_identical(device):
    x, residual, scale = (randn(*s, device=device, seed=i) for i, s in enumerate([(33, 24), (33, 24), (24,)]))
    with fl.settings(dropout="fast"):
        y = scale_residual(x, residual, scale, dropout_p=0.3, training=True)
        g = randn(33, 24, device=device, grad=False, seed=3)
        first = torch.autograd.grad(y, (x, residual, scale), g, retain_graph=True)
        torch.manual_seed(99)
        second = torch.autograd.grad(y, (x, residual, scale), g)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("edited", ["x", "residual", "scale"])
@pytest.mark.parametrize("needs", [(1, 1, 1), (1, 1, 0), (0, 1, 1), (1, 0, 0)])
def test_edits_before_backward_are_as_legal_as_eagers(edited, needs, device):
    """In place between forward and backward: right where eager allows it, eager's error where it keeps the tensor.

    Seen to fail with a backward that keeps a copy of the scale.
    """
    outcomes = []
    for fn in (scale_residual, eager):
        leaves = [
            randn(*s, device=device, grad=bool(n), seed=i)
            for i, (s, n) in enumerate(zip([(5, 8), (5, 8), (8,)], needs, strict=True))
        ]
        tensors = dict(zip(("x", "residual", "scale"), (t * 1 for t in leaves), strict=True))
        y = fn(*tensors.values())
        with torch.no_grad():
            tensors[edited].mul_(3.0)
        wanted = [t for t in leaves if t.requires_grad]
        try:
            outcomes.append(torch.autograd.grad(y.sum(), wanted))
        except RuntimeError as error:
            outcomes.append(str(error).split(":")[0])
    fused, expected = outcomes
    if isinstance(expected, str):
        assert fused == expected and "modified by an inplace operation" in fused
    else:
        for a, b in zip(fused, expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("needs", [(1, 1, 0), (1, 1, 1)])
def test_keeps_no_mask_and_no_more_than_eager(needs, device, forced):
    """Kept: scale where x needs a gradient, x where scale does. Nothing of the size of x for dropout."""
    inputs = [
        randn(*s, device=device, grad=bool(n), seed=i)
        for i, (s, n) in enumerate(zip([(5, 8), (5, 8), (8,)], needs, strict=True))
    ]
    kept: list[torch.Tensor] = []
    pack = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with fl.settings(dropout="fast"), pack:
        scale_residual(*inputs, dropout_p=0.5 if forced == "triton" else 0.0, training=True)
    assert sorted({t.data_ptr() for t in kept}) == sorted(
        {t.data_ptr() for t in ([inputs[2], inputs[0]][: 1 + needs[2]])}
    )


def test_gradient_of_the_residual_is_passed_on_uncopied(device):
    x, residual, scale = (randn(*s, device=device, seed=i) for i, s in enumerate([(8, 16), (8, 16), (16,)]))
    g = randn(8, 16, device=device, grad=False)
    y = scale_residual(x, residual, scale)
    assert torch.autograd.grad(y, residual, g)[0].data_ptr() == g.data_ptr()
    y = scale_residual(x, residual, scale)
    expanded = torch.autograd.grad(y.sum(), (x, residual, scale))
    for a, b in zip(expanded, torch.autograd.grad(eager(x, residual, scale).sum(), (x, residual, scale)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("given", [None, 2.5, [1.0], "x"], ids=str)
def test_what_is_no_tensor_is_torchs_to_take_or_refuse(given, device):
    """Seen to be asked for its shape."""
    x, scale = randn(4, 8, device=device), randn(8, device=device)
    with fl.settings(route="auto"):
        for args in ((given, x, scale), (given, x, None), (x, given, scale), (given, given, scale)):
            found = []
            for fn in (scale_residual, op.reference):
                try:
                    found.append(fn(*args))
                except Exception as error:
                    found.append((type(error), str(error)))
            if isinstance(found[1], torch.Tensor):
                torch.testing.assert_close(*found)
            else:
                assert found[0] == found[1], args


def test_bad_input_raises_what_torch_raises(device):
    x = randn(4, 6, device=device)
    with fl.settings(route="auto"):
        with pytest.raises(ValueError) as torchs:
            F.dropout(x, 1.5)
        with pytest.raises(ValueError) as ours:
            scale_residual(x, x, dropout_p=1.5)
        assert str(ours.value) == str(torchs.value)
        with pytest.raises(ValueError, match=r"between 0 and 1, but got -0\.1"):
            scale_residual(x, x, drop_path_p=-0.1)
        with pytest.raises(RuntimeError, match=r"size of tensor a .* must match"):
            scale_residual(x, randn(4, 5, device=device))
        with pytest.raises(RuntimeError, match=r"size of tensor a .* must match"):
            scale_residual(x, x, randn(4, device=device), dropout_p=0.5, training=True)


def test_shapes_that_broadcast_are_torchs(device):
    x, residual = randn(4, 1, 6, device=device), randn(1, 5, 6, device=device)
    with fl.settings(route="auto"):
        compare(scale_residual, eager, (x, residual, randn(6, device=device)))
        compare(scale_residual, eager, (x, randn(6, device=device), randn(3, 4, 1, 6, device=device)))


def test_empty_batch(device):
    x, residual, scale = randn(0, 6, device=device), randn(0, 6, device=device), randn(6, device=device)
    with fl.settings(route="auto"):
        y = scale_residual(x, residual, scale, dropout_p=0.5, drop_path_p=0.5, training=True)
        (g,) = torch.autograd.grad(y.sum(), scale)
    assert y.shape == (0, 6) and g.tolist() == [0.0] * 6


def test_transforms_and_compile_take_torchs_ops(device):
    x, residual, scale = (randn(*s, device=device, grad=False, seed=i) for i, s in enumerate([(3, 4), (3, 4), (4,)]))
    with fl.settings(route="auto"):
        mapped = torch.func.vmap(lambda a, b: scale_residual(a, b, scale))(x, residual)
        torch.testing.assert_close(mapped, eager(x, residual, scale))
        _, tangent = torch.func.jvp(lambda a: scale_residual(a, residual, scale), (x,), (torch.ones_like(x),))
        torch.testing.assert_close(tangent, scale.expand(3, 4))


def test_compiles_without_a_graph_break(device):
    """Traced as torch's own ops, also with another batch size and with dropout."""
    compiled = torch.compile(scale_residual, backend="aot_eager", fullgraph=True, dynamic=True)
    scale = randn(8, device=device)
    with fl.settings(route="auto"):
        for rows in (4, 6):
            x, residual = randn(rows, 8, device=device), randn(rows, 8, device=device, seed=1)
            torch.testing.assert_close(compiled(x, residual, scale), eager(x, residual, scale))
            dropped = compiled(x, residual, scale, dropout_p=0.5, drop_path_p=0.5, training=True)
            assert dropped.shape == x.shape


@pytest.mark.skipif(not kernels.interpreted(), reason="only in the interpreter can a CPU call take the kernels")
def test_why_dropout_is_left_to_torch_is_said(device):
    x = randn(4, 8, device=device)
    with pytest.raises(RuntimeError, match="eager's masks are drawn by torch's CUDA generator"):
        scale_residual(x, x, dropout_p=0.5, training=True)
    with fl.settings(dropout="fast"), pytest.raises(RuntimeError, match="p = 1"):
        scale_residual(x, x, dropout_p=1.0, training=True)


@pytest.mark.skipif(not kernels.interpreted(), reason="gives the kernels a seed of their own: needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("vec", "shape"),
    # torch takes vectors only where they leave no remainder
    [(v, s) for s in [(16, 24), (6, 10), (5, 7), (3, 4, 8, 8)] for v in (1, 2, 4, 8) if math.prod(s) % v == 0],
    ids=str,
)
def test_eagers_layout_through_forward_and_backward(vec, shape, device, monkeypatch):
    """With a given seed, offset and launch of torch's: every path of the kernels reads the one mask."""
    seed, offset = 0x0123456789ABCDEF, 44
    spec = _dropout.Dropout(_dropout.EAGER, vec, 256, 4, *_dropout.eager_threshold(0.3))
    numel = math.prod(shape)
    monkeypatch.setattr(_dropout, "plan", lambda *_: spec)
    monkeypatch.setattr(_dropout, "draw", lambda *_: (seed, offset))
    op._cached_call.cache_clear()
    mask = _dropout.factor(torch.ones(numel), spec, (seed, offset)).view(shape)
    inputs = [randn(*s, device=device, seed=i) for i, s in enumerate([shape, shape, shape[-1:]])]
    fused = seeded(lambda *t: scale_residual(*t, dropout_p=0.3, training=True))
    compare(fused, lambda x, r, s: r + s * x * mask.to(x.dtype), inputs)
    compare(lambda x, r: fused(x, r), lambda x, r: r + x * mask.to(x.dtype), inputs[:2])
    if len(shape) == 4:
        inputs[2] = randn(shape[1], 1, 1, device=device)
        compare(fused, lambda x, r, s: r + s * x * mask.to(x.dtype), inputs)
    op._cached_call.cache_clear()


def test_a_kernel_that_fails_draws_nothing(device, monkeypatch):
    x, residual, scale = (randn(*s, device=device, seed=i) for i, s in enumerate([(4, 8), (4, 8), (8,)]))

    def broken(*_):
        raise kernels.KernelError("no compiler")

    monkeypatch.setattr(op._Call, "forward", broken)
    monkeypatch.setattr(_route, "failures", {})
    # the op's own choice: a table may have eager's ops for so few elements, which cannot fail
    with fl.settings(route="auto"), _table.in_force((op.OP, x.get_device()), {}):
        if kernels.interpreted() or device == "cuda":
            with pytest.warns(RuntimeWarning, match="no compiler"):
                y = scale_residual(x, residual, scale)
        else:
            y = scale_residual(x, residual, scale)
    torch.testing.assert_close(y, eager(x, residual, scale))


@pytest.mark.parametrize(
    ("C", "T", "draws", "tile"),
    [
        (768, 65536, True, (8, 256)),  # a quarter of every row of 1024 would be drawn for nothing
        (768, 65536, False, (2, 1024)),
        (1024, 65536, True, (2, 1024)),
        (320, 65536, True, (4, 512)),
        (768, 4, True, (2, 1024)),  # too few rows to fill a tile
    ],
)
def test_tiles_of_a_forward_that_draws(C, T, draws, tile, device):
    loops = op._loops((T, C), (C, 1), (C, 1), ((C,), (1,)), False)
    (blocks,), found, _ = op._forward_tile(loops, draws)
    assert found == tile
    assert blocks == math.ceil(T / tile[0]) * math.ceil(C / tile[1])
