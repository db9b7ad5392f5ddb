"""What only a device can show: sizes past 32 bits, streams, threads, graphs, TF32, alignment, other devices."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings

import pytest
import torch

from fusedlayers.activations import Activation
from fusedlayers.functional import affine_act, linear_act
from fusedlayers.nn import FusedLinear
from fusedlayers.ops import _route
from tests.harness import compare, randn, run
from tests.modes.matrix import pair
from tests.op_table import OPS, Op

pytestmark = [pytest.mark.usefixtures("forced"), pytest.mark.filterwarnings("ignore")]

CASES = [(op, "gelu" if op.activated else "-") for op in OPS.values()]
every_op = pytest.mark.parametrize(("op", "act"), CASES, ids=[op.name for op, _ in CASES])
ACROSS_ROWS = {"batch_norm_act", "batch_norm_add_act"}
CHANNELS_SECOND = {"affine_act_channels", "group_norm_act", *ACROSS_ROWS}
BIG_M, BIG_N = 1_048_577, 2_048  # more than 2**31 elements


def on_device(op: Op, lead, n, dtype, device="cuda"):
    """Operands made on the device itself."""
    g = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(s, generator=g, dtype=dtype, device=device).mul_(s[-1] ** -0.5 if i in op.fan_in else 1.0)
        for i, s in enumerate(op.shapes(lead, n))
    ]


@every_op
@pytest.mark.usefixtures("much_memory")
def test_offsets_past_32_bits(op: Op, act):
    """Fails when affine_act's row index is not widened to 64 bits before it is multiplied."""
    fused, eager = pair(op, act)
    inputs = [t.requires_grad_() for t in on_device(op, (BIG_M,), BIG_N, torch.bfloat16)]
    outs, _ = run(fused, inputs)
    incoming = [torch.randn(o.shape, dtype=o.dtype, device=o.device) for o in outs]
    grads = dict(enumerate(torch.autograd.grad(outs, inputs, incoming)))
    assert all(t.isfinite().all() for t in grads.values())
    rows = [slice(0, 3), slice(BIG_M // 2, BIG_M // 2 + 3), slice(BIG_M - 3, BIG_M)]
    if op.name in ACROSS_ROWS:  # statistics belong to all rows; ours of a few rows would differ
        mean, var = (
            f(inputs[0].detach(), 0, dtype=torch.float32) for f in (torch.mean, lambda t, d, **_: t.float().var(d))
        )
        for cut in rows:
            z = (inputs[0][cut].float() - mean) * (var + 1e-3).rsqrt() * inputs[1] + inputs[2]
            expected = torch.nn.functional.gelu(z + inputs[3][cut] if len(inputs) > 3 else z)
            torch.testing.assert_close(outs[0][cut].float(), expected, rtol=3e-2, atol=3e-2)
        return
    for cut in rows:
        few = [t.detach()[cut] if i in op.per_sample else t.detach() for i, t in enumerate(inputs)]
        few = [t.requires_grad_() for t in few]
        few_outs, few_grads = run(eager, few, [g[cut] for g in incoming])
        for a, b in zip(outs, few_outs, strict=True):
            torch.testing.assert_close(a[cut], b, rtol=3e-2, atol=3e-2)
        for i in op.per_sample:
            torch.testing.assert_close(grads[i][cut], few_grads[i], rtol=3e-2, atol=6e-2)


@every_op
@pytest.mark.parametrize(("rows", "n"), [(200_003, 5), (5, 200_003)])
def test_grids_past_65535(op: Op, act, rows, n):
    """Fails when a kernel puts rows, or columns, in the second dimension of its grid."""
    compare(*pair(op, act), [t.requires_grad_() for t in on_device(op, (rows,), n, torch.float32)], sums=op.sums)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@every_op
def test_a_device_that_is_not_current(op: Op, act):
    inputs = op.inputs((33, 5), 17, device="cuda:1")
    with torch.cuda.device(0):
        compare(*pair(op, act), inputs, sums=True)
        assert torch.cuda.current_device() == 0


@every_op
def test_a_side_stream(op: Op, act):
    """The stream is busy when the op is called. Fails when launches go to the default stream."""
    fused = pair(op, act)[0]
    source = op.inputs((33, 5), 17, device="cuda")
    expected = run(fused, source, [torch.ones_like(o) for o in run(fused, source)[0]])
    inputs = [torch.full_like(t, 7.0).requires_grad_() for t in source]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        with torch.no_grad():
            for t, s in zip(inputs, source, strict=True):
                t.copy_(s)
        outs, _ = run(fused, inputs)
        found = outs, list(torch.autograd.grad(outs, inputs, [torch.ones_like(o) for o in outs]))
    torch.cuda.synchronize()
    for a, b in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(a, b)


@every_op
def test_backward_in_a_thread_of_its_own(op: Op, act):
    inputs = op.inputs((33, 5), 17, device="cuda")
    outs, _ = run(pair(op, act)[0], inputs)
    total = sum((o * o).sum() for o in outs)
    expected = torch.autograd.grad(total, inputs, retain_graph=True)
    found = []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(total, inputs, retain_graph=True)))
    thread.start()
    thread.join()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)) and len(found) == len(expected)


FIRST = """
import torch
from fusedlayers import settings
from tests.op_table import OPS
from tests.modes.matrix import pair
from tests.harness import run
settings(route="triton")
op = OPS["affine_act"]
inputs = op.inputs((33, 5), 17, device="cuda")
outs, _ = run(pair(op, "gelu")[0], inputs)
outs[0].sum().backward()  # on autograd's own thread, which has run nothing yet
torch.cuda.synchronize()
print(all(t.grad.isfinite().all().item() for t in inputs))
"""


def test_backward_as_the_first_work_of_autograds_thread():
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "True", done.stderr


def captured(fn, inputs):
    """A graph of forward and backward, and what it writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs, _ = run(fn, inputs)
        grads = torch.autograd.grad(outs, inputs, [torch.ones_like(o) for o in outs])
    return graph, (*outs, *grads)


def replayed_as_eager(graph, found, eager, inputs):
    with torch.no_grad():
        for t in inputs:
            t.add_(0.25)
    graph.replay()
    torch.cuda.synchronize()
    outs, _ = run(eager, inputs)
    grads = torch.autograd.grad(outs, inputs, [torch.ones_like(o) for o in outs])
    for a, b in zip(found, (*outs, *grads), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


@every_op
def test_graph_capture_warm(op: Op, act):
    fused, eager = pair(op, act)
    inputs = op.inputs((33, 5), 17, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run(fused, inputs, [torch.ones_like(o) for o in run(fused, inputs)[0]])
    torch.cuda.synchronize()
    replayed_as_eager(*captured(fused, inputs), eager, inputs)


def test_graph_capture_cold():
    """Kernels that were never built before the capture: it holds the right work, whatever route that took."""
    act = Activation("elu", (1.2345,))
    inputs = OPS["affine_act"].inputs((33, 5), 19, device="cuda")
    torch.ones(1, device="cuda").sum().item()
    before = dict(_route.failures)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph, found = captured(lambda *t: affine_act(*t, act), inputs)
        replayed_as_eager(graph, found, lambda x, a, b: act(a * x + b), inputs)
    finally:
        _route.failures.clear()
        _route.failures.update(before)


@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_tf32_flag_is_followed(act):
    """fp32 is IEEE under "highest". Fails when the kernel's `tl.dot` takes its default, TF32."""
    x, weight, bias = (randn(*s, device="cuda", seed=i) for i, s in enumerate([(257, 511), (129, 511), (129,)]))
    eager = lambda *t: Activation(act)(torch.nn.functional.linear(*t))  # noqa: E731
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        compare(lambda *t: linear_act(*t, act), eager, (x, weight, bias), sums=True)
        exact = eager(*(t.detach().double() for t in (x, weight, bias)))
        ieee = (linear_act(x, weight, bias, act) - exact).abs().max().item()
        torch.set_float32_matmul_precision("high")
        loose = (linear_act(x, weight, bias, act) - exact).abs().max().item()
        eager_loose = (eager(x, weight, bias) - exact).abs().max().item()
    finally:
        torch.set_float32_matmul_precision(before)
    assert ieee < 1e-4 and loose <= 2 * max(eager_loose, ieee)


@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_misaligned_storage(op: Op, act, dtype):
    """Operands that begin one element into their storage, after aligned ones have built the kernel."""
    fused, eager = pair(op, act)
    inputs = op.inputs((33, 2), 16, dtype, device="cuda")
    run(fused, inputs, [torch.ones_like(o) for o in run(fused, inputs)[0]])
    shifted = []
    for t in inputs:
        buffer = torch.full((t.numel() + 1,), float("nan"), dtype=dtype, device="cuda")
        buffer[1:] = t.detach().reshape(-1)
        shifted.append(buffer[1:].view(t.shape).requires_grad_())
    compare(fused, eager, shifted, sums=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_grad_scaler_sees_infs(dtype):
    """A step whose gradients overflow is skipped and the scale halved; the next one is taken."""
    layer = FusedLinear(33, 17, activation="gelu", device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16)
    x = randn(9, 33, device="cuda", grad=False)
    for huge in (True, False):
        before = [p.detach().clone() for p in layer.parameters()]
        scale = scaler.get_scale()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype):
            loss = layer(x).sum()
        scaler.scale(loss * (1e38 if huge else 1e-3)).backward()
        assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
        assert same is huge and (scaler.get_scale() < scale) is huge


def test_nan_in_relu():
    x = torch.tensor([float("nan"), -1.0, 2.0], device="cuda", requires_grad=True)
    y = affine_act(x, 1.0, 0.0, "relu")
    (g,) = torch.autograd.grad(y.sum(), x)
    assert y[0].isnan() and y[1:].tolist() == [0.0, 2.0] and g.tolist() == [1.0, 0.0, 1.0]
