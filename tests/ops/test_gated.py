"""`gated_act` and `gated_mlp` against eager under the accuracy rule: SwiGLU, GeGLU, ReGLU, in two tensors or one."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import fusedlayers as fl
from fusedlayers.activations import get
from fusedlayers.functional import gated_act, gated_mlp
from tests import harness
from tests.harness import FLOATS, LAYOUTS, RAGGED, compare, laid_out, randn
from tests.op_table import REPRESENTATIVE
from tests.ops.test_linear_act import check_edits, first_derivatives, kept_by, route, under_autocast  # noqa: F401

compare_sums = functools.partial(harness.compare, sums=True)
ACTIVATIONS = ["silu", "gelu", "relu", "sigmoid", "identity"]


def eager(act):
    activation = get(act)
    return lambda gate, up: activation(gate) * up


def eager_chunked(act, dim=-1, gate_first=True):
    def fn(x):
        first, second = x.chunk(2, dim)
        return eager(act)(first, second) if gate_first else eager(act)(second, first)

    return fn


def eager_mlp(act, gate_first=True):
    def fn(x, w_gate, w_up, w_down, b_gate=None, b_up=None, b_down=None):
        gate = F.linear(x, w_gate, b_gate)
        if w_up is None:
            return F.linear(eager_chunked(act, -1, gate_first)(gate), w_down, b_down)
        return F.linear(eager(act)(gate, F.linear(x, w_up, b_up)), w_down, b_down)

    return fn


@pytest.mark.parametrize("act", REPRESENTATIVE)  # all of them: tests/modes
def test_every_activation(act, device):
    pair = [randn(17, 33, device=device, seed=s) for s in (0, 1)]
    compare(lambda *t: gated_act(*t, act), eager(act), pair)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_dtype(act, dtype, device):
    pair = [randn(17, 33, dtype=dtype, device=device, seed=s) for s in (0, 1)]
    compare(lambda *t: gated_act(*t, act), eager(act), pair)


@pytest.mark.parametrize("shape", [(m, n) for m in RAGGED for n in RAGGED if m * n < 30000] + [(), (7,), (2, 3, 5)])
def test_ragged(shape, device):
    pair = [randn(*shape, device=device, seed=s) for s in (0, 1)]
    compare(lambda *t: gated_act(*t, "silu"), eager("silu"), pair)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=str)
def test_every_layout(layout, which, device):
    """Fails where both operands are read with the strides of one."""
    pair = [randn(6, 5, 8, device=device, seed=s) for s in (0, 1)]
    for i in which:
        pair[i] = laid_out(pair[i], layout)
    compare(lambda *t: gated_act(*t, "gelu"), eager("gelu"), pair)


@pytest.mark.parametrize("needs", [(0, 0), (0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_requires_grad(needs, act, device):
    pair = [randn(9, 5, device=device, grad=bool(n), seed=s) for s, n in enumerate(needs)]
    compare(lambda *t: gated_act(*t, act), eager(act), pair)


def test_mixed_dtypes_promote_like_torch(device):
    pair = [randn(9, 5, dtype=torch.bfloat16, device=device), randn(9, 5, device=device)]
    compare(lambda *t: gated_act(*t, "silu"), eager("silu"), pair)
    compare(lambda *t: gated_act(*t, "silu"), eager("silu"), pair[::-1])


def test_shapes_that_broadcast_are_eagers(device):
    pair = [randn(9, 1, device=device), randn(4, device=device)]
    with fl.settings(route="auto"):
        compare(lambda *t: gated_act(*t, "silu"), eager("silu"), pair)


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize(
    ("shape", "dim"), [((9, 10), -1), ((3, 5, 8), -1), ((2, 6, 3, 4), 1), ((4, 5), 0), ((6,), 0)], ids=str
)
def test_halves_of_one_tensor(shape, dim, gate_first, device):
    """Fails where the order of the halves is not followed."""
    x = randn(*shape, device=device)
    reference = eager_chunked("silu", dim, gate_first)
    compare(lambda t: gated_act(t, None, "silu", dim=dim, gate_first=gate_first), reference, (x,))
    compare(lambda t: gated_act(*(t.chunk(2, dim)[:: 1 if gate_first else -1]), "silu"), reference, (x,))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_halves_of_every_layout(layout, device):
    x = laid_out(randn(6, 5, 8, device=device), layout)
    compare(lambda t: gated_act(t, None, "relu"), eager_chunked("relu"), (x,))
    compare(lambda t: gated_act(t, None, "relu", dim=0), eager_chunked("relu", 0), (x,))


def test_halves_are_read_in_place(device):
    """Rows of a projection's halves are strided; nothing is copied, and channels_last stays."""
    if fl.settings.route == "reference":
        pytest.skip("eager's own strides")
    x = randn(2, 6, 4, 3, device=device).detach().to(memory_format=torch.channels_last)
    y = gated_act(x, None, "silu", dim=1)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, eager_chunked("silu", 1)(x))


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_higher_derivatives(act, device):
    pair = [randn(3, 4, dtype=torch.float64, device=device, seed=s) for s in (0, 1)]
    x = randn(3, 4, dtype=torch.float64, device=device)
    for fn, inputs in ((lambda *t: gated_act(*t, act), pair), (lambda t: gated_act(t, None, act, dim=0)[0], (x[:2],))):
        assert torch.autograd.gradcheck(fn, inputs)
        assert torch.autograd.gradgradcheck(fn, inputs)


def test_expanded_and_transposed_gradients(device):
    pair = [randn(9, 5, device=device, seed=s) for s in (0, 1)]
    for g in (torch.ones((), device=device).expand(9, 5), randn(5, 9, device=device, grad=False).t()):
        both = (torch.autograd.grad(fn(*pair), pair, g) for fn in (lambda *t: gated_act(*t, "silu"), eager("silu")))
        for a, b in zip(*both, strict=True):
            torch.testing.assert_close(a, b)


def test_nan_and_inf_as_eager(device):
    gate, up = randn(4, 6, device=device), randn(4, 6, device=device, seed=1)
    with torch.no_grad():
        gate[0, 0], gate[1, 1], gate[2, 2] = float("nan"), float("inf"), -float("inf")
        up[0, 1], up[1, 1], up[2, 3] = float("nan"), 0.0, float("inf")
    for act in ("relu", "silu"):
        compare(lambda *t, act=act: gated_act(*t, act), eager(act), (gate, up))


def test_errors(device):
    gate = randn(4, 5, device=device)
    with fl.settings(route="auto"):
        with pytest.raises(RuntimeError, match="must match the size"):
            gated_act(gate, randn(4, 3, device=device))
        with pytest.raises(RuntimeError, match="Halving dimension must be even, but dimension -1 is size 5"):
            gated_act(gate)
        with pytest.raises(IndexError, match="out of range"):
            gated_act(gate, dim=2)
        with pytest.raises(ValueError, match="did you mean 'silu'"):
            gated_act(gate, gate, "sillu")
        assert gated_act(randn(0, 4, device=device)).shape == (0, 2)


def operands(lead, K, H, N, dtype=torch.float32, device="cpu", chunked=False, needs=(1,) * 7):
    """x, w_gate, w_up, w_down, b_gate, b_up, b_down; of a chunked projection `w_up` and `b_up` are `None`."""
    wide = 2 * H if chunked else H
    shapes = [(*lead, K), (wide, K), (H, K), (N, H), (wide,), (H,), (N,)]
    inputs = [randn(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate(shapes)]
    with torch.no_grad():
        for i, fan_in in ((1, K), (2, K), (3, H)):
            inputs[i].mul_(fan_in**-0.5)
    inputs = [t.requires_grad_(bool(n)) for t, n in zip(inputs, needs, strict=True)]
    if chunked:
        inputs[2] = inputs[5] = None
    return inputs


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("act", ["silu", "gelu", "relu"])
def test_mlp_activations_and_dtypes(act, dtype, chunked, device):
    inputs = operands((17,), 19, 33, 9, dtype, device, chunked)
    compare_sums(lambda *t: gated_mlp(*t, act), eager_mlp(act), inputs)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [(1, 1, 1, 1), (3, 17, 257, 1), (33, 1, 3, 17), (129, 3, 65, 33)])
def test_mlp_ragged(size, chunked, device):
    """The last size is large enough that a gradient is written over the one it is made from."""
    M, *rest = size
    compare_sums(lambda *t: gated_mlp(*t), eager_mlp("silu"), operands((M,), *rest, device=device, chunked=chunked))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("lead", [(), (2, 3)], ids=str)
def test_mlp_leading_dims_and_order(lead, gate_first, chunked, device):
    inputs = operands(lead, 5, 6, 7, device=device, chunked=chunked)
    compare_sums(lambda *t: gated_mlp(*t, gate_first=gate_first), eager_mlp("silu", gate_first), inputs)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("needs", [tuple(i >> b & 1 for b in range(7)) for i in range(1, 128, 9)], ids=str)
def test_mlp_every_requires_grad(needs, chunked, device):
    inputs = operands((9,), 5, 6, 7, device=device, chunked=chunked, needs=needs)
    compare_sums(lambda *t: gated_mlp(*t), eager_mlp("silu"), inputs)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("needs", [(1,) * 7, (0, 1, 1, 1, 0, 1, 0), (1, 1, 1, 0, 1, 0, 1), (1, 1, 0, 1, 1, 1, 1)])
def test_mlp_one_product_for_both_weights(needs, autocast, device):
    """Sizes from which on the gradients of gate and up lie side by side."""
    inputs = operands((65,), 5, 80, 7, device=device, needs=needs)
    pair = gated_mlp, eager_mlp("silu")
    compare_sums(
        *(under_autocast(fn, device) for fn in pair) if autocast else pair, inputs,
        computed=torch.bfloat16 if autocast else None,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mlp_weight_gradients_are_tensors_of_their_own(dtype, device):
    inputs = operands((2, 65), 8, 32, 7, dtype, device)
    compare_sums(lambda *t: gated_mlp(*t, gate_first=False), eager_mlp("silu", False), inputs)
    for fn in (gated_mlp, eager_mlp("silu")):
        fn(*inputs).sum().backward()
        gate, up = inputs[1].grad, inputs[2].grad
        kept = up.clone()
        assert gate.stride() == inputs[1].stride() and up.stride() == inputs[2].stride()
        gate.zero_()
        torch._foreach_add_([gate], 1.0)
        assert torch.equal(up, kept)
        for t in inputs:
            t.grad = None


def test_mlp_without_biases(device):
    inputs = operands((9,), 5, 6, 7, device=device)[:4]
    compare_sums(lambda *t: gated_mlp(*t, activation="relu"), eager_mlp("relu"), inputs)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("act", ["silu", "relu"])
def test_mlp_higher_derivatives(act, chunked, device):
    inputs = operands((2,), 3, 2, 2, torch.float64, device, chunked)
    assert torch.autograd.gradcheck(lambda *t: gated_mlp(*t, act), inputs)
    assert torch.autograd.gradgradcheck(lambda *t: gated_mlp(*t, act), inputs)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunked", [False, True])
def test_mlp_autocast(chunked, low, device):
    inputs = operands((33,), 16, 65, 48, device=device, chunked=chunked)

    def under(fn):
        return under_autocast(fn, device, low)

    assert under(gated_mlp)(*inputs).dtype == low
    compare_sums(under(gated_mlp), under(eager_mlp("silu")), inputs, computed=low)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    "needs", [(1,) * 7, (1, 0, 0, 0, 0, 0, 0), (0, 1, 0, 1, 0, 1, 0), (0, 0, 1, 0, 1, 0, 1)], ids=str
)
def test_mlp_autocast_second_derivatives(needs, chunked, device):
    """Fails where a cast inside the op is lost to autograd."""
    inputs = operands((9,), 5, 6, 7, device=device, chunked=chunked, needs=needs)
    pair = (first_derivatives(under_autocast(fn, device)) for fn in (gated_mlp, eager_mlp("silu")))
    if any(t is not None and t.requires_grad for t in inputs):
        compare_sums(*pair, inputs, computed=torch.bfloat16)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("needs", [tuple(i >> b & 1 for b in range(7)) for i in range(1, 128, 9)], ids=str)
def test_mlp_autocast_every_requires_grad(needs, chunked, device):
    inputs = operands((9,), 5, 6, 7, device=device, chunked=chunked, needs=needs)
    pair = (under_autocast(fn, device) for fn in (gated_mlp, eager_mlp("silu")))
    compare_sums(*pair, inputs, computed=torch.bfloat16)


def test_mlp_autocast_operands_may_change_before_backward(device):
    check_edits(under_autocast(gated_mlp, device), operands((9,), 5, 6, 7, device=device))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_mlp_keeps_x_as_the_products_read_it(autocast, chunked, device):
    """Never an operand in float32 where it was cast, and one copy where x is no matrix, which both products read."""
    if fl.settings.route == "reference":
        pytest.skip("what eager keeps is eager's affair")
    fused, plain = (under_autocast(fn, device) if autocast else fn for fn in (gated_mlp, eager_mlp("silu")))
    x = randn(3, 5, 4, device=device).detach().transpose(1, 2).requires_grad_()
    inputs = [x, *operands((9,), 5, 6, 7, device=device, chunked=chunked)[1:]]
    kept = kept_by(fused, *inputs)
    assert all(t.dtype is (torch.bfloat16 if autocast else torch.float32) and t.is_contiguous() for t in kept)
    assert len(kept) == (4 if chunked else 6) and sum(t.shape == x.shape for t in kept) == 1
    check_edits(lambda x: fused(x, *inputs[1:]), [x])
    compare_sums(fused, plain, inputs, computed=torch.bfloat16 if autocast else None)


@pytest.mark.parametrize("chunked", [False, True])
def test_mlp_keeps_gate_and_up_only(chunked, device):
    if fl.settings.route == "reference":
        pytest.skip("what eager keeps is eager's affair")
    inputs = operands((9,), 5, 6, 7, device=device, chunked=chunked)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        gated_mlp(*inputs)
    hidden = [(9, 12), (12, 5)] if chunked else [(9, 6), (9, 6), (6, 5), (6, 5)]
    assert sorted(kept) == sorted([(9, 5), (7, 6), *hidden])


@pytest.mark.parametrize("which", [0, 1, 3, 4])
def test_mlp_edits_before_backward(which, device):
    """x and weights may not change, as in eager; biases may."""
    inputs = operands((9,), 5, 6, 7, device=device)
    expected = torch.autograd.grad(eager_mlp("silu")(*inputs).sum(), inputs)
    y = gated_mlp(*inputs)
    with torch.no_grad():
        inputs[which].add_(1.0)
    if which < 4:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    else:
        for a, b in zip(torch.autograd.grad(y.sum(), inputs), expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("chunked", [False, True])
def test_mlp_backward_twice_is_identical(chunked, device):
    inputs = operands((65,), 5, 66, 7, device=device, chunked=chunked)
    wanted = [t for t in inputs if t is not None]
    y = gated_mlp(*inputs)
    first = torch.autograd.grad(y, wanted, torch.ones_like(y), retain_graph=True)
    second = torch.autograd.grad(y, wanted, torch.ones_like(y))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_mlp_empty_batch(device):
    inputs = operands((0,), 5, 6, 7, device=device)
    with fl.settings(route="auto"):
        grads = torch.autograd.grad(gated_mlp(*inputs).sum(), inputs)
    assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, inputs, strict=True))


def test_mlp_bad_input_raises_what_linear_raises(device):
    x, w_gate, w_up, w_down, *_ = operands((4,), 5, 6, 7, device=device)
    bad = [(x, w_gate[:, :3], w_up, w_down), (x, w_gate, w_up[:4], w_down), (x, w_gate, w_up, w_down[:, :2]),
           (x.double(), w_gate, w_up, w_down), (x, w_gate, None, w_down)]  # fmt: skip
    with fl.settings(route="auto"):
        for inputs in bad:
            with pytest.raises(RuntimeError) as expected:
                eager_mlp("silu")(*inputs)
            with pytest.raises(RuntimeError) as got:
                gated_mlp(*inputs)
            assert str(got.value) == str(expected.value)
        with pytest.raises(RuntimeError, match="Halving dimension must be even"):
            gated_mlp(x, randn(7, 5, device=device), None, w_down)
