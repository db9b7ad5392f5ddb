"""What autograd users do, on every op: each test names the kind of fault it holds, and how it was seen to fail."""

from __future__ import annotations

import itertools
import re
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from tests.harness import compare, laid_out, run
from tests.modes.matrix import pair, size
from tests.op_table import OPS, Op

pytestmark = [pytest.mark.usefixtures("forced"), pytest.mark.filterwarnings("ignore")]

BOTH = [(op, act) for op in OPS.values() for act in (("relu", "gelu") if op.activated else ("-",))]
ONE = [(op, act) for op, act in BOTH if act != "relu"]
every_op, every_op_keeping_either = (
    pytest.mark.parametrize(("op", "act"), cases, ids=[f"{op.name}-{act}" for op, act in cases])
    for cases in (ONE, BOTH)
)

STRICTER = {("gated_act", "relu", 0)}
"""Edits eager allows and the op refuses: eager keeps relu(gate), the op gate itself, which saves writing the other."""


def grads_of(fn, inputs, seed=0):
    """Outputs and gradients for incoming gradients that do not depend on `fn`."""
    outs, _ = run(fn, inputs)
    g = torch.Generator().manual_seed(seed)
    incoming = [torch.randn(o.shape, generator=g).to(o) for o in outs]
    return outs, torch.autograd.grad(outs, [t for t in inputs if t.requires_grad], incoming, retain_graph=True)


@every_op
def test_every_requires_grad(op: Op, act, device):
    fused, eager = pair(op, act)
    count = len(op.shapes(*size(op)))
    for needs in itertools.product((0, 1), repeat=count):
        if op.name == "add_layer_norm" and not needs[0] and not needs[3]:
            continue  # eager's second output then has no gradient to take
        compare(fused, eager, op.inputs(*size(op), device=device, needs=needs), sums=True)


@every_op
def test_gradients_of_any_stride(op: Op, act, device):
    """Stride 0 (`.sum().backward()`), transposed, cut from a NaN-filled buffer."""
    fused, eager = pair(op, act)
    inputs = op.inputs(*size(op), device=device)
    for layout in ("contiguous", "expanded", "transposed", "sliced", "in_nan_buffer"):
        found = []
        for fn in (fused, eager):
            outs, _ = run(fn, inputs)
            incoming = [laid_out(torch.linspace(-1, 1, o.numel(), device=device).view_as(o), layout) for o in outs]
            before = [g.clone() for g in incoming]
            found.append(torch.autograd.grad(outs, inputs, incoming))
            assert all(torch.equal(a, b) for a, b in zip(before, incoming, strict=True)), "a gradient was written"
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    sums = [torch.autograd.grad(sum(o.sum() for o in run(fn, inputs)[0]), inputs) for fn in (fused, eager)]
    for a, b in zip(*sums, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


@every_op
@pytest.mark.parametrize("which", range(5))
def test_inputs_of_any_stride(op: Op, act, which, device):
    """Transposed, sliced, expanded, and slices of NaN-filled buffers, as any operand."""
    inputs = op.inputs(*size(op), device=device)
    if which < len(inputs):
        for layout in ("transposed", "sliced", "in_nan_buffer", "expanded"):
            inputs[which] = laid_out(op.inputs(*size(op), device=device)[which], layout)
            compare(*pair(op, act), inputs, sums=True)


@every_op
@pytest.mark.parametrize("lead", [(), (1,), (4,), (2, 3), (2, 1, 3), (1, 3, 1, 2)], ids=str)
def test_leading_dims(op: Op, act, lead, device):
    rows = 1
    for n in lead:
        rows *= n
    channels_second = op.shapes((3, 5), 7)[0] == (3, 7, 5)
    if rows >= op.least[0] and (lead or not channels_second):
        compare(*pair(op, act), op.inputs(lead, max(op.least[1], 6), device=device), sums=True)


@every_op
def test_empty_batch(op: Op, act, device):
    """The right shape and zero, not uninitialised, gradients of the parameters; or the error eager raises."""
    inputs = op.inputs((0, 5), max(op.least[1], 7), device=device)
    found = []
    with fl.settings(route="auto"):
        for fn in pair(op, act):
            try:
                outs, _ = run(fn, inputs)
                grads = torch.autograd.grad(sum(o.sum() for o in outs), inputs)
                found.append([(t.shape, t.tolist()) for t in (*outs, *grads)])
            except (RuntimeError, ValueError) as error:
                found.append((type(error), str(error)))
    assert found[0] == found[1]


@every_op_keeping_either
def test_edits_between_forward_and_backward(op: Op, act, device):
    """An edit eager allows is allowed and gives eager's gradients; one it refuses is refused, or still gives those."""
    fused, eager = pair(op, act)
    count = len(op.shapes(*size(op)))
    expected = grads_of(eager, op.inputs(*size(op), device=device))[1]
    for victim in range(count + 1):
        outcomes = []
        for fn in (fused, eager):
            inputs = op.inputs(*size(op), device=device)
            outs, _ = run(fn, [t for t in inputs])
            g = torch.Generator().manual_seed(0)
            incoming = [torch.randn(o.shape, generator=g).to(o) for o in outs]
            with torch.no_grad():
                (inputs[victim] if victim < count else outs[0].detach()).add_(1.0)
            try:
                outcomes.append(torch.autograd.grad(outs, inputs, incoming))
            except RuntimeError as error:
                if not re.search(r"modified (by an )?inplace", str(error)):
                    raise
                outcomes.append(None)
        if (op.name, act, victim) in STRICTER and outcomes[0] is None:
            continue
        assert outcomes[1] is None or outcomes[0] is not None, f"eager allows an edit of tensor {victim}"
        for a, b in zip(outcomes[0] or (), expected, strict=outcomes[0] is not None):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


@every_op
def test_backward_twice_gives_the_same_bits(op: Op, act, device):
    inputs = op.inputs(*size(op), device=device)
    outs, _ = run(pair(op, act)[0], inputs)
    total = sum((o * o).sum() for o in outs)
    first = torch.autograd.grad(total, inputs, retain_graph=True)
    second = torch.autograd.grad(total, inputs, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_op
def test_deterministic_over_20_runs(op: Op, act, device):
    inputs = op.inputs((33, 5), 17, device=device)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [grads_of(pair(op, act)[0], inputs) for _ in range(20 if device == "cuda" else 2)]
    finally:
        torch.use_deterministic_algorithms(False)
    for outs, grads in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip((*outs, *grads), (*runs[0][0], *runs[0][1]), strict=True))


@every_op_keeping_either
def test_what_is_saved(op: Op, act, device):
    """Nothing without gradients, and never more than eager, but for a copy of the coefficients."""
    fused, eager = pair(op, act)
    lead, n = (64, 5), 96
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    totals = []
    for fn in (fused, eager):
        inputs = op.inputs(lead, n, device=device)
        own = {t.untyped_storage().data_ptr() for t in inputs}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            kept.clear()
            with torch.no_grad():
                fn(*inputs)
            assert not kept
            out = fn(*inputs)
            totals.append(sum(size for at, size in kept.items() if at not in own))
            del out
    small = 8 * 4 * n
    assert totals[0] <= totals[1] + small, f"keeps {totals[0]} bytes where eager keeps {totals[1]}"


@every_op
def test_an_input_from_inference_mode_beside_trained_ones(op: Op, act, device):
    """It cannot be kept for backward: where eager gets by without keeping it, so does a fused call."""
    results = []
    for fn in pair(op, act):
        inputs = op.inputs(*size(op), device=device)
        with torch.inference_mode():
            inputs[0] = inputs[0].detach().clone()
        try:
            with fl.settings(route="auto"):
                out = run(fn, inputs)[0][0]
                grads = torch.autograd.grad(out.sum(), [t for t in inputs if t.requires_grad], allow_unused=True)
            results.append([out, *(g for g in grads if g is not None)])
        except RuntimeError as error:
            results.append(type(error))
    if isinstance(results[1], type):
        assert results[0] is results[1]
        return
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


@every_op
def test_inference_mode(op: Op, act, device):
    fused, eager = pair(op, act)
    with torch.inference_mode():
        inputs = op.inputs(*size(op), device=device, needs=[0] * len(op.shapes(*size(op))))
        found, expected = run(fused, inputs)[0], run(eager, inputs)[0]
    for a, b in zip(found, expected, strict=True):
        assert a.is_inference() and not a.requires_grad
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


@every_op
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(op: Op, act, use_reentrant, device):
    fused = pair(op, act)[0]
    found = []
    for fn in (fused, lambda *t: checkpoint(fused, *t, use_reentrant=use_reentrant)):
        inputs = op.inputs(*size(op), device=device)
        outs, _ = run(fn, inputs)
        sum((o * o).sum() for o in outs).backward()
        found.append((*outs, *(t.grad for t in inputs)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@every_op
def test_threads_give_the_same_bits(op: Op, act, device):
    """Forward and backward from several threads at once, each backward being its thread's first work."""
    fused = pair(op, act)[0]
    inputs = op.inputs(*size(op), device=device)
    expected = grads_of(fused, inputs)[1]
    found: list = [None] * 3

    def work(i):
        own = [t.detach().clone().requires_grad_() for t in inputs]
        found[i] = grads_of(fused, own)[1]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for grads in found:
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize("name", ["linear_act", "mlp", "gated_mlp"])
def test_no_product_without_a_use(name, device):
    """As many matrix products in backward as eager starts, for every pattern of `requires_grad`."""
    op = OPS[name]
    for needs in itertools.product((0, 1), repeat=len(op.shapes(*size(op)))):
        if any(needs):
            counts = []
            for fn in pair(op, "gelu"):
                inputs = op.inputs(*size(op), device=device, needs=needs)
                outs, _ = run(fn, inputs)
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                    outs[0].sum().backward()
                products = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_addmm_activation")
                counts.append(sum(event.name in products for event in seen.events()))
            assert counts[0] <= counts[1], needs


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["affine_act", "linear_act", "batch_norm_act", "layer_norm", "gated_act"])
def test_rounding_happens_once(name, dtype, device, forced):
    """Scale, bias and activation apply to the accumulator: nearly every result is the exact one, rounded."""
    op = OPS[name]
    fused, eager = pair(op, "silu" if op.activated else "-")
    inputs = [t.detach() for t in op.inputs((64,), 96, torch.float16, device)]
    if forced == "triton" and dtype == torch.float16:
        exact = eager(*(t.double() for t in inputs)).to(dtype)
        assert (fused(*inputs) == exact).float().mean() > 0.97
    else:  # in float32 the order of a sum shows; then the rule alone holds
        compare(fused, eager, [t.to(dtype).requires_grad_() for t in inputs], sums=True)
