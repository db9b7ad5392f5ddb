"""`mlp` against eager under the accuracy rule: every route, size, dtype, gradient pattern, and what it keeps."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import fusedlayers as fl
from fusedlayers.activations import get
from fusedlayers.functional import mlp
from tests import harness
from tests.harness import FLOATS, laid_out, randn
from tests.ops.test_linear_act import check_edits, first_derivatives, kept_by, route, under_autocast  # noqa: F401

compare = functools.partial(harness.compare, sums=True)
ACTIVATIONS = ["relu", "gelu", "silu", "tanh"]


def eager(act):
    activation = get(act)
    return lambda x, w1, b1, w2, b2: F.linear(activation(F.linear(x, w1, b1)), w2, b2)


def operands(lead, K, H, N, dtype=torch.float32, device="cpu", needs=(1, 1, 1, 1, 1)):
    shapes = [(*lead, K), (H, K), (H,), (N, H), (N,)]
    inputs = [randn(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate(shapes)]
    with torch.no_grad():
        inputs[1].mul_(K**-0.5)
        inputs[3].mul_(H**-0.5)
    return [t.requires_grad_(bool(n)) for t, n in zip(inputs, needs, strict=True)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_and_dtypes(act, dtype, device):
    """Fails where backward takes the pre-activation for the hidden layer."""
    compare(lambda *t: mlp(*t, act), eager(act), operands((17,), 19, 33, 9, dtype, device))


@pytest.mark.parametrize("size", [(1, 1, 1, 1), (3, 17, 513, 1), (33, 1, 3, 17), (513, 3, 1, 33), (1, 33, 17, 513)])
@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_ragged(size, act, device):
    M, *rest = size
    compare(lambda *t: mlp(*t, act), eager(act), operands((M,), *rest, device=device))


def test_gradient_in_place_of_another(device):
    """Large enough that the hidden layer's gradient is written over the one it is made from."""
    compare(lambda *t: mlp(*t, "gelu"), eager("gelu"), operands((129,), 5, 65, 7, device=device))


@pytest.mark.parametrize("lead", [(), (2, 3), (2, 1, 3)], ids=str)
def test_leading_dims(lead, device):
    compare(lambda *t: mlp(*t, "gelu"), eager("gelu"), operands(lead, 5, 6, 7, device=device))


@pytest.mark.parametrize("needs", [tuple(i >> b & 1 for b in range(5)) for i in range(32)], ids=str)
@pytest.mark.parametrize("act", ["relu", "gelu", "identity"])
def test_every_requires_grad(needs, act, device):
    compare(lambda *t: mlp(*t, act), eager(act), operands((9,), 5, 6, 7, device=device, needs=needs))


@pytest.mark.parametrize("layout", ["transposed", "sliced", "in_nan_buffer", "expanded"])
@pytest.mark.parametrize("which", [0, 1, 3])
def test_every_layout(layout, which, device):
    inputs = operands((18,), 8, 6, 7, device=device)
    inputs[which] = laid_out(inputs[which], layout)
    compare(lambda *t: mlp(*t, "silu"), eager("silu"), inputs)


def test_without_biases(device):
    x, w1, _, w2, _ = operands((9,), 5, 6, 7, device=device)
    compare(lambda x, w1, w2: mlp(x, w1, None, w2, None), lambda x, w1, w2: eager("gelu")(x, w1, None, w2, None),
            (x, w1, w2))  # fmt: skip


@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_expanded_gradient(act, device):
    inputs = operands((2, 5), 4, 6, 3, device=device)
    for a, b in zip(*(torch.autograd.grad(f(*inputs).sum(), inputs) for f in (lambda *t: mlp(*t, act), eager(act))),
                    strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("act", ["relu", "gelu", "identity"])
def test_higher_derivatives(act, device):
    """Fails where the composite leaves the activation out."""
    inputs = operands((2,), 3, 3, 2, torch.float64, device)
    assert torch.autograd.gradcheck(lambda *t: mlp(*t, act), inputs)
    assert torch.autograd.gradgradcheck(lambda *t: mlp(*t, act), inputs)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_autocast(act, low, device):
    inputs = operands((33,), 16, 65, 48, device=device)

    def under(fn):
        return under_autocast(fn, device, low)

    assert under(lambda *t: mlp(*t, act))(*inputs).dtype == low
    compare(under(lambda *t: mlp(*t, act)), under(eager(act)), inputs, computed=low)


@pytest.mark.parametrize("act", ["relu", "gelu", "softplus"])
@pytest.mark.parametrize("needs", [(1, 1, 1, 1, 1), (1, 0, 0, 0, 0), (0, 0, 1, 1, 0), (0, 1, 0, 0, 1)], ids=str)
def test_autocast_second_derivatives(act, needs, device):
    """Fails where a cast inside the op is lost to autograd."""
    inputs = operands((9,), 5, 6, 7, device=device, needs=needs)
    pair = (first_derivatives(under_autocast(fn, device)) for fn in (lambda *t: mlp(*t, act), eager(act)))
    compare(*pair, inputs, computed=torch.bfloat16)


@pytest.mark.parametrize("needs", [tuple(i >> b & 1 for b in range(5)) for i in range(32)], ids=str)
def test_autocast_every_requires_grad(needs, device):
    inputs = operands((9,), 5, 6, 7, device=device, needs=needs)
    pair = (under_autocast(fn, device) for fn in (lambda *t: mlp(*t, "gelu"), eager("gelu")))
    compare(*pair, inputs, computed=torch.bfloat16)


@pytest.mark.parametrize("low", [tuple(i >> b & 1 for b in range(5)) for i in range(0, 32, 3)], ids=str)
def test_autocast_of_some_operands(low, device):
    """Gradients come in each operand's own dtype; those in autocast's dtype are kept as they are."""
    inputs = operands((9,), 5, 6, 7, device=device)
    inputs = [t.detach().bfloat16().requires_grad_() if n else t for t, n in zip(inputs, low, strict=True)]
    fused, plain = (under_autocast(fn, device) for fn in (lambda *t: mlp(*t, "gelu"), eager("gelu")))
    compare(fused, plain, inputs, computed=torch.bfloat16)
    if fl.settings.route != "reference":
        kept = {t.data_ptr() for t in kept_by(fused, *inputs)}
        assert [inputs[i].data_ptr() in kept for i in (0, 1, 3)] == [bool(low[i]) for i in (0, 1, 3)]


@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_autocast_operands_may_change_before_backward(act, device):
    check_edits(under_autocast(lambda *t: mlp(*t, act), device), operands((9,), 5, 6, 7, device=device))


@pytest.mark.parametrize("needs", [(1, 1, 1, 1, 1), (1, 0, 0, 0, 0), (0, 1, 0, 0, 0), (0, 0, 1, 0, 0)], ids=str)
def test_what_backward_keeps_under_autocast(needs, device):
    """Never an operand in float32."""
    if fl.settings.route == "reference":
        pytest.skip("what eager keeps is eager's affair")
    inputs = operands((9,), 5, 6, 7, device=device, needs=needs)
    kept = kept_by(under_autocast(lambda *t: mlp(*t, "gelu"), device), *inputs)
    expected = [(9, 6), (7, 6), *[(9, 5)] * needs[1], *[(6, 5)] * needs[0]]
    assert sorted((tuple(t.shape), t.dtype) for t in kept) == sorted((s, torch.bfloat16) for s in expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_what_is_no_matrix_is_copied_once(autocast, device):
    """As in MLP-Mixer, whose first MLP runs over the transposed tokens. See `linear_act`'s test of this name."""
    if fl.settings.route == "reference":
        pytest.skip("what eager keeps is eager's affair")
    fused, plain = (under_autocast(fn, device) if autocast else fn for fn in (lambda *t: mlp(*t), eager("gelu")))
    x = randn(3, 5, 4, device=device).detach().transpose(1, 2).requires_grad_()
    inputs = [x, *operands((9,), 5, 6, 7, device=device)[1:]]
    (kept,) = (t for t in kept_by(fused, *inputs) if t.shape == x.shape)
    assert kept.is_contiguous()
    check_edits(lambda x: fused(x, *inputs[1:]), [x])
    compare(fused, plain, inputs, computed=torch.bfloat16 if autocast else None)


@pytest.mark.parametrize("which", [2, 4])
def test_biases_may_change_before_backward(which, device):
    inputs = operands((9,), 5, 6, 7, device=device)
    expected = torch.autograd.grad(eager("gelu")(*inputs).sum(), inputs)
    y = mlp(*inputs)
    with torch.no_grad():
        inputs[which].add_(3.0)
    for a, b in zip(torch.autograd.grad(y.sum(), inputs), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("which", [0, 1, 3])
def test_operands_may_not_change_before_backward(which, device):
    inputs = operands((9,), 5, 6, 7, device=device)
    y = mlp(*inputs)
    with torch.no_grad():
        inputs[which].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("lead", [(9,), (3, 3)], ids=str)
def test_output_may_change(lead, device):
    inputs = operands(lead, 5, 6, 7, device=device)
    mlp(*inputs).add_(1.0).sum().backward()
    assert all(t.grad is not None for t in inputs)


@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_backward_twice_is_identical(act, device):
    inputs = operands((65,), 5, 66, 7, device=device)
    y = mlp(*inputs, act)
    first = torch.autograd.grad(y, inputs, torch.ones_like(y), retain_graph=True)
    second = torch.autograd.grad(y, inputs, torch.ones_like(y))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_what_backward_keeps(act, device):
    """x, both weights and one hidden tensor: half of eager's hidden activations for GELU."""
    if fl.settings.route == "reference":
        pytest.skip("what eager keeps is eager's affair")
    inputs = operands((9,), 5, 6, 7, device=device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        mlp(*inputs, act)
    assert sorted(kept) == sorted([(9, 5), (6, 5), (7, 6), (9, 6)])


def test_nan_and_inf_as_eager(device):
    inputs = operands((6,), 5, 4, 3, device=device)
    with torch.no_grad():
        inputs[0][0, 0], inputs[0][1, 1] = float("nan"), float("inf")
        inputs[1][1], inputs[3][1] = 0.0, 0.0
    compare(lambda *t: mlp(*t, "gelu"), eager("gelu"), inputs)


def test_empty_batch(device):
    inputs = operands((0,), 5, 6, 7, device=device)
    with fl.settings(route="auto"):
        y = mlp(*inputs)
        grads = torch.autograd.grad(y.sum(), inputs)
    assert y.shape == (0, 7)
    assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, inputs, strict=True))


def test_bad_input_raises_what_linear_raises(device):
    x, w1, b1, w2, b2 = operands((4,), 5, 6, 7, device=device)
    bad = [(x, w1, b1, w2[:, :4], b2), (x, w2, b1, w2, b2), (x.double(), w1, b1, w2, b2), (x, w1, b2, w2, b2)]
    with fl.settings(route="auto"):
        for inputs in bad:
            with pytest.raises(RuntimeError) as expected:
                eager("gelu")(*inputs)
            with pytest.raises(RuntimeError) as got:
                mlp(*inputs)
            assert str(got.value) == str(expected.value)
