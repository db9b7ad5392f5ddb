"""Draws of a float32 run told again to a float64 run: the same elements, no generator touched, or no replay at all."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fusedlayers.patch.replay import CannotReplay, Recording, Replaying

X = torch.randn(6, 40)


def both(f, x=X):
    """`f` in the dtype of `x`, recorded, and in float64, replayed."""
    torch.manual_seed(0)
    recording = Recording()
    with recording:
        first = f(x)
    state = torch.get_rng_state()
    replaying = Replaying(recording)
    with replaying:
        second = f(x.double())
    assert replaying.finished and torch.equal(torch.get_rng_state(), state), "no generator is touched"
    return first, second


@pytest.mark.parametrize(
    "f",
    [
        lambda x: F.dropout(x, 0.4),
        lambda x: F.dropout(x.clone(), 0.4, inplace=True),
        lambda x: F.dropout1d(x, 0.4),
        lambda x: F.alpha_dropout(x, 0.4),
        lambda x: torch.native_dropout(x, 0.4, True)[0],
        lambda x: torch.native_dropout(x, 1.0, True)[0],
        lambda x: torch.native_dropout(x, 0.4, None)[0],
        lambda x: x * torch.empty_like(x).bernoulli_(0.3),
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.3)),
        lambda x: x * torch.empty_like(x).bernoulli_(torch.full_like(x, 0.3)),
        lambda x: x + torch.rand_like(x),
        lambda x: x + torch.randn_like(x),
        lambda x: x + torch.rand(x.shape, dtype=x.dtype),
        lambda x: x + torch.randn(40),
        lambda x: x + torch.normal(1.0, 2.0, x.shape),
        lambda x: x + torch.empty_like(x).normal_().mul_(3),
        lambda x: x + torch.empty_like(x).exponential_(),
        lambda x: x + torch.rand(x.shape, dtype=x.dtype, out=torch.empty_like(x)),
        lambda x: x[torch.randperm(6)],
        lambda x: x[:, torch.randint(0, 40, (7,))],
        lambda x: x[:, torch.multinomial(x.abs()[0], 5)],
        lambda x: F.gumbel_softmax(x),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.2),
        lambda x: x @ torch.rand(40, 3, generator=torch.Generator().manual_seed(7)).to(x.dtype),
    ],
)
def test_draws_are_the_same_in_float64(f):
    first, second = both(f)
    assert first.dtype == torch.float32 and second.dtype == torch.float64
    torch.testing.assert_close(first.double(), second, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_from_every_dtype(dtype):
    first, second = both(lambda x: torch.native_dropout(F.dropout(x, 0.5), 0.5, True)[0], X.to(dtype))
    assert torch.equal(first == 0, second == 0)
    assert torch.equal(second, X.to(dtype).double() * 4 * (first != 0))


def test_recording_changes_nothing():
    def f(x):
        return torch.native_dropout(F.dropout(x, 0.4) + torch.randn_like(x), 0.3, True)[0]

    torch.manual_seed(0)
    plain, state = f(X), None
    state = torch.get_rng_state()
    torch.manual_seed(0)
    with Recording():
        assert torch.equal(f(X), plain)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("native", [True, False])
def test_gradients_have_the_mask(native):
    def gradient(x):
        x = x.clone().requires_grad_()
        y = torch.native_dropout(x, 0.4, True)[0] if native else F.dropout(x, 0.4)
        return torch.autograd.grad(y.sin().sum(), x)[0]

    first, second = both(gradient)
    assert (second == 0).any() and torch.equal(first == 0, second == 0)
    torch.testing.assert_close(first.double(), second, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_draws_again_in_backward(reentrant):
    def gradient(x):
        x = x.clone().requires_grad_()
        y = x
        for _ in range(3):
            y = checkpoint(lambda z: F.dropout(z.sin(), 0.4), y, use_reentrant=reentrant)
        y.square().sum().backward()
        return x.grad

    first, second = both(gradient)
    assert torch.equal(first == 0, second == 0)
    torch.testing.assert_close(first.double(), second, rtol=1e-5, atol=1e-6)


def test_masks_are_kept_as_booleans():
    recording = Recording()
    with recording:
        torch.native_dropout(F.dropout(X, 0.4), 0.4, True)
        F.dropout(X, 0.0), F.dropout(X, 0.4, training=False), torch.native_dropout(X, 0.4, False)
        F.scaled_dot_product_attention(X[None], X[None], X[None])
    assert [(kept.dtype, kept.shape) for _, kept in recording.draws] == [(torch.bool, X.shape)] * 2


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.normal(x, 0.1),
        lambda x: torch.normal(1.0, x.abs()),
        lambda x: F.rrelu(x, training=True),
        lambda x: torch._standard_gamma(x.abs()),
        lambda x: torch.distributions.Dirichlet(x.abs() + 1).rsample(),
    ],
)
def test_draws_that_do_not_show(f):
    with pytest.raises(CannotReplay, match="does not show"), Recording():
        f(X)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: F.dropout(x[:3], 0.4),
        lambda x: F.dropout(x, 0.5),
        lambda x: torch.rand_like(x),
        lambda x: F.dropout(F.dropout(x, 0.4), 0.4),
    ],
    ids=["shape", "probability", "op", "one more"],
)
def test_another_run_draws_otherwise(other):
    recording = Recording()
    with recording:
        F.dropout(X, 0.4)
    with pytest.raises(CannotReplay, match="not in the run recorded"), Replaying(recording):
        other(X.double())


def test_draws_left_over():
    recording = Recording()
    with recording:
        F.dropout(F.dropout(X, 0.4), 0.4)
    replaying = Replaying(recording)
    with replaying:
        F.dropout(X.double(), 0.4)
    assert not replaying.finished
