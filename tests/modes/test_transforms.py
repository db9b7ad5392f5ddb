"""Whoever looks at single torch ops sees torch ops: `torch.func`, subclasses, DTensor, fake tensors, tracing."""

from __future__ import annotations

import functools
import gc
import importlib.util
import io
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.functional import affine_act
from fusedlayers.ops import _route
from tests.harness import compare, run
from tests.modes.matrix import pair, size
from tests.op_table import OPS, Op

pytestmark = [pytest.mark.usefixtures("forced"), pytest.mark.filterwarnings("ignore")]

CASES = [(op, "gelu" if op.activated else "-") for op in OPS.values()]
every_op = pytest.mark.parametrize(("op", "act"), CASES, ids=[op.name for op, _ in CASES])


def single(fn):
    """The first output alone."""

    def call(*tensors):
        out = fn(*tensors)
        return out[0] if isinstance(out, tuple) else out

    return call


def both(op: Op, act: str):
    return tuple(single(fn) for fn in pair(op, act))


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def unless_torch_fails(what, fused, eager):
    """`what(fused)`. Where it raises, and `what(eager)` raises the same, the fault is torch's: the test is skipped."""
    try:
        return what(fused)
    except AssertionError:
        raise
    except Exception as error:
        try:
            what(eager)
        except type(error) as own:
            pytest.skip(f"torch {torch.__version__} fails on its own function: {str(own)[:200]}")
        raise


@every_op
def test_func_grad(op: Op, act, device):
    inputs = [t.detach() for t in op.inputs(*size(op), device=device)]
    which = tuple(range(len(inputs)))
    found, expected = (torch.func.grad(lambda *t, fn=fn: fn(*t).sum(), which)(*inputs) for fn in both(op, act))
    same(found, expected)


@every_op
def test_what_left_a_finished_transform(op: Op, act, device):
    """Such a tensor shows no memory of its own: torch's ops look through it, and it disables no kernel for others."""
    left = []

    def leak(*tensors):
        left[:] = [t * 1.0 for t in tensors]
        return left[0].sum()

    fused, eager = both(op, act)
    torch.func.grad(leak)(*(t.detach() for t in op.inputs(*size(op), device=device)))
    with fl.settings(route="auto"):
        same(fused(*left), eager(*left))
        first, *_ = op.inputs(*size(op), device=device)  # one of them needs a gradient
        first, twin = (first.detach().requires_grad_() for _ in range(2))
        same(fused(first, *left[1:]), eager(twin, *left[1:]))
    assert not _route.failures


@every_op
def test_jvp_and_forward_ad(op: Op, act, device):
    inputs = tuple(t.detach() for t in op.inputs(*size(op), device=device))
    tangents = tuple(torch.ones_like(t) for t in inputs)
    same(*(torch.func.jvp(fn, inputs, tangents) for fn in both(op, act)))
    results = []
    for fn in both(op, act):
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(t, v) for t, v in zip(inputs, tangents, strict=True)]
            results.append(torch.autograd.forward_ad.unpack_dual(fn(*duals)).tangent)
    same(*results)


@every_op
def test_jacfwd_and_jacrev(op: Op, act, device):
    inputs = [t.detach() for t in op.inputs((max(op.least[0], 2), 1), max(op.least[1], 3), device=device)]
    same(*(torch.func.jacfwd(fn)(*inputs) for fn in both(op, act)))
    same(*(torch.func.jacrev(fn)(*inputs) for fn in both(op, act)))


class Model(nn.Module):
    """An op whose operands, but for those of the sample, are parameters."""

    def __init__(self, op: Op, fn, inputs):
        super().__init__()
        self.op, self.fn, self.count = op, fn, len(inputs)
        for i, t in enumerate(inputs):
            if i not in op.per_sample:
                self.register_parameter(f"p{i}", nn.Parameter(t.detach().clone()))

    def forward(self, *samples):
        given = iter(samples)
        return self.fn(*(next(given) if i in self.op.per_sample else getattr(self, f"p{i}") for i in range(self.count)))


def models(op: Op, act: str, device: str):
    inputs = op.inputs(*size(op), device=device)
    samples = [t.detach() for i, t in enumerate(inputs) if i in op.per_sample]
    return tuple(Model(op, fn, inputs).to(device) for fn in both(op, act)), samples


@every_op
def test_functional_call(op: Op, act, device):
    """With other parameters, and under `grad`: the gradient belongs to those."""
    pairs, samples = models(op, act, device)
    others = {name: p.detach() * 1.5 for name, p in pairs[0].named_parameters()}

    def loss(model, parameters):
        return torch.func.functional_call(model, parameters, tuple(samples)).sum()

    same(*(loss(m, others) for m in pairs))
    same(*(torch.func.grad(loss, argnums=1)(m, others) for m in pairs))


class Tagged(torch.Tensor):
    """A subclass that survives every torch op."""


class Wrapped(torch.Tensor):
    """A subclass whose values lie in another tensor, as a quantized or a sharded one's do."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


@every_op
def test_tensor_subclasses(op: Op, act, device):
    fused, eager = both(op, act)
    inputs = [t.detach() for t in op.inputs(*size(op), device=device)]
    with fl.settings(route="auto"):
        tagged = fused(inputs[0].as_subclass(Tagged), *inputs[1:])
        wrapped = fused(*map(Wrapped, inputs))
    assert type(tagged) is Tagged and type(wrapped) is Wrapped
    same([tagged.as_subclass(torch.Tensor), wrapped.inner], [eager(*inputs)] * 2)


@pytest.fixture(scope="module")
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["affine_act", "linear_act", "mlp", "gated_act", "scale_residual"])
def test_dtensor(name, mesh):
    """Sharded activations and replicated parameters, on CPU meshes: plain ops, which DTensor knows how to shard."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    op = OPS[name]
    fused, eager = both(op, "gelu")
    inputs = op.inputs(*size(op))
    spread = [
        distribute_tensor(t.detach(), mesh, [Shard(0) if i in op.per_sample else Replicate()]).requires_grad_()
        for i, t in enumerate(inputs)
    ]
    with fl.settings(route="auto"):
        found = fused(*spread)
    assert isinstance(found, DTensor)
    found.sum().backward()
    expected = eager(*inputs)
    same(found.full_tensor(), expected)
    same([t.grad.full_tensor() for t in spread], list(torch.autograd.grad(expected.sum(), inputs)))


@every_op
def test_meta_and_fake_tensors(op: Op, act, device):
    """Shapes, strides and dtypes without any data."""
    fused, eager = both(op, act)
    expected = eager(*op.inputs(*size(op), device=device))
    with fl.settings(route="auto"):
        meta = fused(*(t.detach().to("meta") for t in op.inputs(*size(op))))
    with FakeTensorMode() as mode:
        fake = fused(*(mode.from_tensor(t) for t in op.inputs(*size(op), device=device)))
    for found in (meta, fake):
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert fake.device == expected.device


@every_op
def test_jit_trace(op: Op, act, device):
    fused, eager = both(op, act)
    inputs = [t.detach() for t in op.inputs(*size(op), device=device)]
    traced = torch.jit.trace(fused, tuple(inputs))
    assert "PythonOp" not in str(traced.graph)
    other = [t.detach() for t in op.inputs(*size(op), device=device, seed=9)]
    same(traced(*other), eager(*other))


@every_op
def test_aot_compile_and_backward(op: Op, act, device):
    """Through AOTAutograd, backward included; the sizes change without a new graph for each."""
    fused, eager = both(op, act)
    lead, n = size(op)

    def compiled(fn):
        torch._dynamo.reset()
        fn = torch.compile(fn, fullgraph=True, dynamic=True, backend="aot_eager")
        for batch in (lead[0], lead[0] + 3):
            compare(fn, eager, op.inputs((batch, *lead[1:]), n, device=device), sums=True)

    unless_torch_fails(compiled, fused, eager)
    assert torch._dynamo.utils.counters["graph_break"] == {}


@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="the ONNX exporter needs onnxscript")
@every_op
def test_onnx(op: Op, act, device):
    pairs, samples = models(op, act, device)
    export = lambda model: torch.onnx.export(model.eval(), tuple(samples), dynamo=True, verbose=False)  # noqa: E731
    program = unless_torch_fails(export, *pairs)
    buffer = io.BytesIO()
    program.save(buffer)
    assert buffer.tell() > 0


@every_op
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_memory_is_flat_over_many_steps(op: Op, act, use_reentrant, device):
    """Steps with checkpointing leave no tensor behind; 1,000 of them on a GPU, where a step costs microseconds."""
    pairs, samples = models(op, act, device)
    model = pairs[0]

    def step():
        x = samples[0].clone().requires_grad_()
        checkpoint(model, x, *samples[1:], use_reentrant=use_reentrant).sum().backward()
        model.zero_grad()

    def alive():
        gc.collect()
        if device == "cuda":
            return torch.cuda.memory_allocated()
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    for _ in range(2):
        step()
    before = alive()
    for _ in range(1000 if device == "cuda" else 2):
        step()
    assert alive() <= before


def test_saving_for_backward_on_the_cpu(device):
    """`save_on_cpu` moves what an op keeps there and back."""
    inputs = OPS["affine_act"].inputs((4, 5), 7, device=device)
    expected = torch.autograd.grad(affine_act(*inputs, "gelu").sum(), inputs)
    with torch.autograd.graph.save_on_cpu():
        y = affine_act(*inputs, "gelu")
    for a, b in zip(torch.autograd.grad(y.sum(), inputs), expected, strict=True):
        assert torch.equal(a, b)


def test_no_reference_cycle_holds_a_graph(device):
    inputs = OPS["affine_act"].inputs((4, 5), 7, device=device)
    step = functools.partial(run, lambda *t: affine_act(*t, "gelu"), inputs, [torch.ones(4, 5, 7, device=device)])
    step()  # builds the kernels: Triton makes cycles of its own
    gc.collect()
    gc.disable()
    try:
        step()
        node = affine_act(*inputs, "gelu").grad_fn
        assert node is not None
        del node
        assert gc.collect() == 0 or os.environ.get("TRITON_INTERPRET")  # the interpreter makes cycles of its own
    finally:
        gc.enable()
