"""Ops x activations x dtypes x modes: every activation on `affine_act`, three on each other op, the rest `slow`.

`docs/coverage_ops.md` is made from the same cells; each names the test here that backs it.
"""

from __future__ import annotations

import pytest
import torch

from tests.harness import compare, run
from tests.modes import matrix
from tests.op_table import NO_VMAP, activation

pytestmark = [pytest.mark.usefixtures("forced"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(("op", "act", "dtype"), matrix.parameters("forward"))
def test_forward(op, act, dtype, device):
    matrix.forward(op, act, dtype, device)


@pytest.mark.parametrize(("op", "act", "dtype"), matrix.parameters("backward"))
def test_backward(op, act, dtype, device):
    matrix.backward(op, act, dtype, device)


@pytest.mark.parametrize(("op", "act", "dtype"), matrix.parameters("double_backward"))
def test_double_backward(op, act, dtype, device):
    matrix.double_backward(op, act, dtype, device)


@pytest.mark.parametrize(("op", "act", "dtype"), matrix.parameters("autocast"))
def test_autocast(op, act, dtype, device):
    matrix.autocast(op, act, dtype, device)


@pytest.mark.parametrize(("op", "act", "dtype"), matrix.parameters("compile"))
def test_compile(op, act, dtype, device):
    """No graph break, and one graph for every batch size."""
    fused, eager = matrix.pair(op, act)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(fused, fullgraph=True, dynamic=True, backend=backend)
    lead, n = matrix.size(op)
    for batch in (lead[0], lead[0] + 2, lead[0] + 3):
        inputs = op.inputs((batch, *lead[1:]), n, dtype, device)
        compare(compiled, eager, inputs, sums=op.sums)
    assert len(graphs) == 1


@pytest.mark.parametrize(("op", "act", "dtype"), matrix.parameters("vmap"))
def test_vmap(op, act, dtype, device):
    """Over a dim of x, and of gradients: one a sample."""
    fused, eager = matrix.pair(op, act)
    inputs = [t.detach() for t in op.inputs(*matrix.size(op), dtype, device)]
    stacked = [torch.stack([t, t + 0.5]) if i in op.per_sample else t for i, t in enumerate(inputs)]
    dims = tuple(0 if i in op.per_sample else None for i in range(len(inputs)))

    def per_sample(fn):
        def total(*tensors):
            out = fn(*tensors)
            return sum(o.sum() for o in out) if isinstance(out, tuple) else out.sum()

        mapped = torch.func.vmap(fn, in_dims=dims)
        sample_grads = torch.func.vmap(torch.func.grad(total, argnums=tuple(range(len(dims)))), in_dims=dims)

        def both(*tensors):
            out = mapped(*tensors)
            return (*(out if isinstance(out, tuple) else (out,)), *sample_grads(*tensors))

        return both

    if act in NO_VMAP:
        for fn in (fused, eager):
            with pytest.raises(RuntimeError, match="vmap: we do not yet support"):
                per_sample(fn)(*stacked)
    else:
        compare(per_sample(fused), per_sample(eager), stacked, sums=True)


@pytest.mark.parametrize(("op", "act", "dtype"), matrix.parameters("export"))
def test_export(op, act, dtype, device):
    """With a dynamic batch; the exported program holds torch ops alone and computes what eager does."""

    class Model(torch.nn.Module):
        def forward(self, *tensors):
            return op.fused(activation(act) if op.activated else None, *tensors)

    _, eager = matrix.pair(op, act)
    lead, n = matrix.size(op)
    inputs = op.inputs(lead, n, dtype, device, needs=None)
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = {"tensors": tuple({0: batch} if i in op.per_sample else None for i in range(len(inputs)))}
    program = torch.export.export(Model(), tuple(t.detach() for t in inputs), dynamic_shapes=shapes)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert all(name.startswith(("aten.", "<built-in function", "<function sym")) for name in called), called
    other = [t.detach() for t in op.inputs((lead[0] + 2, *lead[1:]), n, dtype, device)]
    for a, b in zip(run(program.module(), other)[0], run(eager, other)[0], strict=True):
        torch.testing.assert_close(a, b)
