"""`affine_act` against eager under the accuracy rule: every coefficient pattern, layout, dtype and gradient pattern."""

from __future__ import annotations

import pytest
import torch

import fusedlayers as fl
from fusedlayers.activations import get
from fusedlayers.functional import affine_act, fused_relu
from fusedlayers.ops.affine_act import affine_act as with_residual
from tests.harness import FLOATS, LAYOUTS, RAGGED, compare, laid_out, randn
from tests.op_table import REPRESENTATIVE

pytestmark = pytest.mark.usefixtures("forced")

# (shape of x, shape of the coefficients, dim): per channel on any dim, AdaLN, FiLM, SE gates, scalars
PATTERNS = [
    ((5, 7), (7,), None),
    ((4, 3, 5, 6), (3,), 1),
    ((4, 3, 5, 6), (4,), 0),
    ((2, 9, 6), (2, 1, 6), None),
    ((2, 6, 3, 3), (2, 6, 1, 1), None),
    ((2, 6, 3, 3), (6, 1, 1), None),
    ((33, 17), (), None),
    ((7,), (7,), None),
    ((5, 1), (1,), None),
]


def eager(act, dim=None):
    def fn(x, scale, shift):
        if dim is not None:
            shape = [1] * x.dim()
            shape[dim] = -1
            scale, shift = scale.view(shape), shift.view(shape)
        return get(act)(scale * x + shift)

    return fn


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("act", REPRESENTATIVE)  # all of them: tests/modes
def test_every_activation(act, dtype, device):
    x, scale, shift = (randn(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate([(17, 33), (33,), (33,)]))
    compare(lambda *t: affine_act(*t, act), eager(act), (x, scale, shift))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_every_pattern(pattern, act, dtype, device):
    x_shape, c_shape, dim = pattern
    x = randn(*x_shape, dtype=dtype, device=device)
    scale, shift = (randn(*c_shape, dtype=dtype, device=device, seed=s) for s in (1, 2))
    compare(lambda *t: affine_act(*t, act, dim=dim), eager(act, dim), (x, scale, shift))


@pytest.mark.parametrize("needs", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
@pytest.mark.parametrize("act", ["relu", "silu", "identity"])
def test_every_requires_grad(needs, act, device):
    x, scale, shift = (randn(*s, device=device, grad=bool(n)) for s, n in zip([(9, 5), (5,), (5,)], needs, strict=True))
    compare(lambda *t: affine_act(*t, act), eager(act), (x, scale, shift))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_every_layout(layout, which, device):
    inputs = [randn(*s, device=device, seed=i) for i, s in enumerate([(6, 9, 8), (8,), (6, 1, 8)])]
    inputs[which] = laid_out(inputs[which], layout)
    compare(lambda *t: affine_act(*t, "gelu"), eager("gelu"), inputs)


@pytest.mark.parametrize("shape", [(m, n) for m in RAGGED for n in RAGGED if m * n < 30000])
def test_ragged(shape, device):
    x, scale, shift = randn(*shape, device=device), randn(shape[1], device=device), randn(shape[1], device=device)
    compare(lambda *t: affine_act(*t, "relu"), eager("relu"), (x, scale, shift))


def test_channels_last_keeps_its_strides(device):
    x = randn(2, 5, 4, 3, device=device).detach().to(memory_format=torch.channels_last).requires_grad_()
    scale, shift = randn(5, device=device), randn(5, device=device)
    y = affine_act(x, scale, shift, dim=1)
    assert y.is_contiguous(memory_format=torch.channels_last)
    compare(lambda *t: affine_act(*t, "relu", dim=1), eager("relu", 1), (x, scale, shift))


@pytest.mark.parametrize("act", ["relu", "gelu", "tanh", "identity"])
@pytest.mark.parametrize("needs", [(1, 1, 1, 1), (1, 0, 0, 1), (0, 1, 0, 0), (1, 0, 1, 0)])
def test_residual(act, needs, device):
    shapes = [(9, 6), (6,), (6,), (9, 6)]
    inputs = [
        randn(*s, device=device, seed=i, grad=bool(n)) for i, (s, n) in enumerate(zip(shapes, needs, strict=True))
    ]
    activation = get(act)
    compare(
        lambda x, a, b, r: with_residual(x, a, b, activation, residual=r),
        lambda x, a, b, r: activation(a * x + b + r),
        inputs,
    )


def test_numbers_promote_like_torch(device):
    assert fused_relu(torch.tensor([3.0, -4.0], device=device), 2, 1).tolist() == [7.0, 0.0]
    low = randn(4, 6, dtype=torch.bfloat16, device=device)
    wide = randn(6, device=device)
    assert affine_act(low, 2, 1).dtype == torch.bfloat16
    assert affine_act(low, wide, wide).dtype == (wide * low + wide).dtype
    compare(lambda *t: affine_act(*t, "silu"), eager("silu"), (low, wide, wide))
    scalar = randn(device=device)
    compare(lambda *t: affine_act(*t, "silu"), eager("silu"), (low, scalar, scalar))


@pytest.mark.parametrize("act", REPRESENTATIVE)  # all of them: tests/modes
def test_higher_derivatives(act, device):
    x, scale, shift = (
        randn(*s, dtype=torch.float64, device=device, seed=i) for i, s in enumerate([(3, 4), (4,), (4,)])
    )
    assert torch.autograd.gradcheck(lambda *t: affine_act(*t, act), (x, scale, shift))
    assert torch.autograd.gradgradcheck(lambda *t: affine_act(*t, act), (x, scale, shift))
    assert torch.autograd.gradgradcheck(lambda t: affine_act(t, 2.0, 0.5, act), (x,))


@pytest.mark.parametrize("layout", ["sliced", "transposed"])
def test_higher_derivatives_of_a_strided_input(layout, device):
    """What is kept for the second derivative is the input itself, not a dense copy cut off from its graph."""
    x = laid_out(randn(3, 4, dtype=torch.float64, device=device), layout)
    scale, shift = randn(4, dtype=torch.float64, device=device), randn(4, dtype=torch.float64, device=device)
    assert torch.autograd.gradgradcheck(lambda *t: affine_act(*t, "silu"), (x, scale, shift))


def test_coefficients_may_change_before_backward(device):
    """Parameters edited between forward and backward: legal where eager allows it (the shift), and right."""
    x, scale, shift = randn(5, 4, device=device), randn(4, device=device), randn(4, device=device)
    expected = torch.autograd.grad(eager("gelu")(x, scale, shift).sum(), (x, scale, shift))
    y = affine_act(x, scale, shift, "gelu")
    with torch.no_grad():
        shift.add_(3.0)
    got = torch.autograd.grad(y.sum(), (x, scale, shift))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("given", [None, 2.5, [1.0], "x"], ids=str)
def test_an_input_that_is_no_tensor_raises_what_torch_raises(given, device):
    """Seen to be asked for its shape, or where it lies."""
    one, per_channel = torch.tensor(2.0), randn(8, device=device)
    with fl.settings(route="auto"):
        for scale, shift in ((2.0, 1.0), (one, 1.0), (per_channel, 1.0), (one, per_channel)):
            found = []
            for fn in (affine_act, eager("relu")):
                try:
                    found.append(fn(given, scale, shift))
                except Exception as error:
                    found.append((type(error), str(error)))
            if isinstance(found[1], torch.Tensor):
                torch.testing.assert_close(*found)
            else:
                assert found[0] == found[1], (scale, shift)


def test_bad_input_raises_what_torch_raises(device):
    x = randn(4, 6, device=device)
    with fl.settings(route="auto"):
        with pytest.raises(RuntimeError, match=r"size of tensor a .* must match"):
            affine_act(x, randn(5, device=device), 0.0)
        with pytest.raises(RuntimeError, match="must match"):
            affine_act(x, randn(4, device=device), 0.0, dim=1)
        with pytest.raises(IndexError, match="out of range"):
            affine_act(x, randn(4, device=device), 0.0, dim=2)
        with pytest.raises(ValueError, match="did you mean 'gelu'"):
            affine_act(x, 1.0, 0.0, "gelo")
        with pytest.raises(TypeError, match="activation must be"):
            affine_act(x, 1.0, 0.0, 3)


def test_empty_batch(device):
    x, scale = randn(0, 6, device=device), randn(6, device=device)
    with fl.settings(route="auto"):
        y = affine_act(x, scale, 1.0)
        (g,) = torch.autograd.grad(y.sum(), scale)
    assert y.shape == (0, 6) and g.tolist() == [0.0] * 6
