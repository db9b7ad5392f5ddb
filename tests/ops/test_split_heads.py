"""`split_heads` against eager: the very views, and bit for bit the gradients, wherever the parts' gradients lie."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusedlayers as fl
from fusedlayers import inspect
from fusedlayers.ops import _table
from fusedlayers.ops import split_heads as op
from fusedlayers.ops.split_heads import reference, split_heads
from tests.harness import FLOATS, RAGGED, compare, laid_out, randn

pytestmark = pytest.mark.usefixtures("forced")

SIZES = [(2, 5, 3, 2, 4), (1, 1, 3, 1, 1), (3, 1, 2, 1, 7), (2, 33, 3, 3, 24), (1, 17, 3, 5, 80), (2, 3, 2, 13, 64)]


def projected(B, N, parts, H, D, dtype=torch.float32, device="cpu", seed=0):
    """A projection's output: not a leaf."""
    x = randn(B, N, parts * H * D, dtype=dtype, device=device, seed=seed)
    return x, x * 1


def gradients(fn, sizes, grads, device, dtype=torch.float32):
    """What each function makes of the same incoming gradients, `None` for a part that is not used."""
    _, packed = projected(*sizes, dtype=dtype, device=device)
    used = [(o, g) for o, g in zip(fn(packed, *sizes), grads, strict=True) if g is not None]
    return torch.autograd.grad([o for o, _ in used], packed, [g for _, g in used])[0]


def incoming(sizes, device, dtype=torch.float32):
    B, N, parts, H, D = sizes
    return [randn(B, H, N, D, device=device, dtype=dtype, grad=False, seed=i) for i in range(parts)]


def assert_same_gradients(sizes, grads, device, dtype=torch.float32):
    fused, eager = (gradients(fn, sizes, grads, device, dtype) for fn in (split_heads, reference))
    assert torch.equal(fused, eager)
    assert (fused.dtype, fused.stride()) == (eager.dtype, eager.stride())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_dtype(sizes, dtype, device):
    compare(lambda x: split_heads(x, *sizes), lambda x: reference(x, *sizes), projected(*sizes, dtype, device)[:1])
    assert_same_gradients(sizes, incoming(sizes, device, dtype), device, dtype)


@pytest.mark.parametrize("N", RAGGED)
@pytest.mark.parametrize("heads", [(1, 3), (3, 17), (4, 64), (5, 72)], ids=str)
def test_ragged(N, heads, device):
    sizes = (2, N, 3, *heads)
    assert_same_gradients(sizes, incoming(sizes, device), device)


def test_views_are_eagers(device):
    """Fails where a part is a copy, or is no view of the projection to autograd."""
    for needs in (True, False):
        _, packed = projected(2, 5, 3, 2, 4, device=device)
        packed = packed if needs else packed.detach()
        for got, want in zip(split_heads(packed, 2, 5, 3, 2, 4), reference(packed, 2, 5, 3, 2, 4), strict=True):
            assert got.data_ptr() == want.data_ptr()
            assert (got.shape, got.stride(), got.requires_grad) == (want.shape, want.stride(), want.requires_grad)
            assert got._base is want._base is packed
            assert torch.equal(got, want)


def place(g, how):
    """The same values as attention's backwards leave them: heads beside tokens, a product's transpose, a sum's ..."""
    if how == "tokens_then_heads":
        return g.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "transposed_product":
        return g.transpose(2, 3).contiguous().transpose(2, 3)
    if how == "one_number":
        return g[:1, :1, :1, :1].expand_as(g)
    if how == "of_a_packed_tensor":
        return torch.stack([g, g], 2)[:, :, 1]
    return laid_out(g, how)


PLACES = ("contiguous", "tokens_then_heads", "transposed_product", "one_number", "of_a_packed_tensor", "sliced",
          "in_nan_buffer", "expanded")  # fmt: skip


@pytest.mark.parametrize("how", PLACES)
@pytest.mark.parametrize("which", [(0,), (1, 2), (0, 1, 2)], ids=str)
def test_gradients_of_every_layout(how, which, device):
    """Fails where a part is read with the strides of another, or with those of its view."""
    sizes = (3, 19, 3, 2, 24)
    grads = [place(g, how) if i in which else g for i, g in enumerate(incoming(sizes, device))]
    assert_same_gradients(sizes, grads, device)


@pytest.mark.parametrize("unused", [(0,), (1,), (2,), (0, 1), (1, 2)], ids=str)
def test_parts_without_a_gradient_are_zeros(unused, device):
    sizes = (2, 9, 3, 2, 8)
    grads = [None if i in unused else g for i, g in enumerate(incoming(sizes, device))]
    assert_same_gradients(sizes, grads, device)


def test_nan_and_signed_zeros_pass(device):
    sizes = (1, 4, 2, 1, 4)
    grads = incoming(sizes, device)
    grads[0].view(-1)[:3] = torch.tensor([float("nan"), -float("inf"), -0.0], device=device)
    fused, eager = (gradients(fn, sizes, grads, device) for fn in (split_heads, reference))
    assert torch.equal(fused.view(torch.int32), eager.view(torch.int32))


@pytest.mark.parametrize("sizes", [(2, 5, 3, 2, -1), (-1, 5, 3, 2, 4), (2, -1, 3, 2, 4), (10, 1, 3, 2, 4)], ids=str)
def test_sizes_as_reshape_takes_them(sizes, device):
    _, packed = projected(2, 5, 3, 2, 4, device=device)
    found = []
    for fn in (split_heads, reference):
        q, k, v = fn(packed, *sizes)
        found.append((q, *torch.autograd.grad((q * k).sum() + v.sum(), packed)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_what_reshape_copies(device):
    """No views then, in eager as here."""
    with fl.settings(route="auto"):
        base, sizes = randn(5, 2, 24, device=device), (1, 10, 3, 2, 4)
        for fn in (split_heads, reference):
            assert fn(base.transpose(0, 1), *sizes)[0].data_ptr() != base.data_ptr()
        compare(
            lambda x: split_heads(x.transpose(0, 1), *sizes), lambda x: reference(x.transpose(0, 1), *sizes), (base,)
        )


@pytest.mark.parametrize("layout", ["transposed", "sliced", "in_nan_buffer"])
def test_projections_of_every_layout(layout, device):
    packed = laid_out(randn(2, 5, 24, device=device), layout)
    grads = incoming((2, 5, 3, 2, 4), device)
    found = [torch.autograd.grad(fn(packed, 2, 5, 3, 2, 4), packed, grads)[0] for fn in (split_heads, reference)]
    assert torch.equal(*found)
    assert found[0].stride() == found[1].stride()


def test_other_numbers_of_parts_and_empty_batches_are_eagers(device):
    with fl.settings(route="auto"):
        for sizes in ((2, 5, 1, 2, 4), (2, 5, 4, 2, 4), (0, 5, 3, 2, 4)):
            x, _ = projected(*sizes, device=device)
            compare(lambda x, s=sizes: split_heads(x, *s), lambda x, s=sizes: reference(x, *s), (x,))


@pytest.mark.parametrize("sizes", [(2, 5, 3, 2, 5), (2, 5, 3, 8), (-1, -1, 3, 2, 4)], ids=str)
def test_sizes_that_do_not_fit_raise_as_reshape(sizes, device):
    with fl.settings(route="auto"):
        errors = []
        for fn in (split_heads, reference):
            with pytest.raises(RuntimeError) as caught:
                fn(projected(2, 5, 3, 2, 4, device=device)[1], *sizes)
            errors.append(str(caught.value))
        assert errors[0] == errors[1]


EDITS = {
    "a part": lambda packed, q: q.mul_(2),
    "a view of a part": lambda packed, q: q.transpose(1, 2).mul_(2),
    "the projection": lambda packed, q: packed.mul_(2) * q,
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_in_place_raise_as_in_eager(edit, device):
    """Fails where a part is not known to be one of several views."""
    for fn in (split_heads, reference):
        _, packed = projected(2, 5, 3, 2, 4, device=device)
        q, _, _ = fn(packed, 2, 5, 3, 2, 4)
        with pytest.raises(RuntimeError, match="a function that returns multiple views"):
            EDITS[edit](packed, q)


def test_a_saved_part_that_was_edited_is_noticed(device):
    for fn in (split_heads, reference):
        x, packed = projected(2, 5, 3, 2, 4, device=device)
        q, _, _ = fn(packed, 2, 5, 3, 2, 4)
        y = (q * q).sum()
        packed.detach().mul_(2)
        with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
            torch.autograd.grad(y, x)


def test_without_gradients_edits_reach_the_projection(device):
    with torch.no_grad():
        packed = projected(2, 5, 3, 2, 4, device=device)[1]
        q, _, _ = split_heads(packed, 2, 5, 3, 2, 4)
        q.zero_()
        assert packed.view(2, 5, 3, 2, 4)[:, :, 0].count_nonzero() == 0


def test_higher_derivatives(device):
    x = randn(2, 3, 12, dtype=torch.float64, device=device)
    for fn in (lambda t: split_heads(t, 2, 3, 3, 2, 2), lambda t: split_heads(t, 2, 3, 2, 3, 2)[1]):
        assert torch.autograd.gradcheck(fn, x)
        assert torch.autograd.gradgradcheck(fn, x)


def test_backward_twice_is_the_same(device):
    x, packed = projected(2, 9, 3, 2, 8, device=device)
    q, k, v = split_heads(packed, 2, 9, 3, 2, 8)
    y = (q * k + v).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_inside_attention(device):
    _, packed = projected(2, 9, 3, 2, 8, device=device)
    found = []
    for fn in (split_heads, reference):
        q, k, v = fn(packed, 2, 9, 3, 2, 8)
        attention = ((q * 0.5) @ k.transpose(-2, -1)).softmax(-1) @ v
        fast = F.scaled_dot_product_attention(q, k, v)
        found.append(torch.autograd.grad((attention * fast).sum(), packed)[0])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_one_launch_writes_the_gradient(device, forced):
    """Fails where a gradient is copied first."""
    if forced != "triton":
        pytest.skip("no kernels here")
    sizes = (2, 9, 3, 2, 8)
    grads = [place(g, how) for g, how in zip(incoming(sizes, device), PLACES[:3], strict=True)]
    _, packed = projected(*sizes, device=device)
    parts = split_heads(packed, *sizes)
    started = inspect.launches(lambda: torch.autograd.grad(parts, packed, grads, retain_graph=True))
    assert [k.name for k in started] == ["pack"]


@pytest.mark.parametrize("unused", [0, 1, 2])
def test_one_launch_without_the_gradient_of_a_part(unused, device, forced):
    """Seen to take eager's ops where that part was the first."""
    if forced != "triton":
        pytest.skip("no kernels here")
    sizes = (2, 9, 3, 2, 8)
    _, packed = projected(*sizes, device=device)
    used = [i for i in range(3) if i != unused]
    parts, grads = split_heads(packed, *sizes), incoming(sizes, device)
    given = [parts[i] for i in used], packed, [grads[i] for i in used]
    started = inspect.launches(lambda: torch.autograd.grad(*given, retain_graph=True))
    assert [k.name for k in started] == ["pack"]


def test_a_kernel_that_fails_leaves_eagers_backward(device, forced, monkeypatch):
    if forced != "triton":
        pytest.skip("no kernels here")
    sizes = (2, 9, 3, 2, 8)
    monkeypatch.setattr(op._route, "failures", {})
    _, packed = projected(*sizes, device=device)
    with fl.settings(route="auto"), _table.in_force((op.OP, packed.get_device()), {}):
        q, k, v = split_heads(packed, *sizes)

        def fails(*_):
            raise op.KernelError("no such device")

        monkeypatch.setattr(op, "_launch", fails)
        with pytest.warns(RuntimeWarning, match="no such device"):
            (got,) = torch.autograd.grad((q * k + v).sum(), packed)
    q, k, v = reference(packed, *sizes)
    assert torch.equal(got, torch.autograd.grad((q * k + v).sum(), packed)[0])
