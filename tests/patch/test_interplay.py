"""A patched model under what a user may do to the original: compile, export, trace, checkpoint, functional use."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.patch.guards import is_patched

from .models import MLP, Pair, assert_same, network, twin

X = torch.randn(5, 8)


@pytest.fixture
def models() -> tuple[nn.Module, nn.Module]:
    original = network()
    return fl.patch_model(twin(original), on_fallback="raise"), original


def test_compile_without_a_graph_break_and_with_a_changing_batch(models):
    torch.compiler.reset()
    patched, original = models
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (5, 3, 7):
        torch.testing.assert_close(compiled(torch.ones(batch, 8)), original(torch.ones(batch, 8)))


def test_compile_of_a_patched_model_whose_guard_fails_is_a_whole_graph_too():
    torch.compiler.reset()
    model = fl.patch_model(network(), on_fallback="warn")
    model[2].act = nn.Tanh()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.warns(fl.patch.FallbackWarning):
        got = compiled(X)
    torch.testing.assert_close(got, fl.unpatch_model(twin(model))(X))
    assert fl.explain(model).fallbacks["2"], "a fallback while compiling must be counted"


def test_a_hook_added_after_compiling_acts_as_on_the_original_compiled_or_not():
    """torch runs what it compiled; the patched model's guards may make it compile again, and the hook is heard."""
    torch.compiler.reset()
    original = network()
    patched = fl.patch_model(twin(original), on_fallback="ignore")
    compiled = [torch.compile(m, backend="aot_eager") for m in (patched, original)]
    torch.testing.assert_close(*(c(X) for c in compiled))
    for model in (patched, original):
        model[2].fc.register_forward_hook(lambda mod, args, out: out * 0)
    got, *allowed = *(c(X) for c in compiled), original(X)
    assert any(torch.allclose(got, want) for want in allowed)


@pytest.mark.parametrize("strict", [True, False])
def test_export(models, strict):
    patched, original = models
    program = torch.export.export(patched.eval(), (X,), strict=strict)
    torch.testing.assert_close(program.module()(X), original.eval()(X))


def test_jit_trace(models):
    patched, original = models
    torch.testing.assert_close(torch.jit.trace(patched, X)(X), original(X))


def test_symbolic_trace_gives_the_original_graph(models):
    patched, original = models
    got, want = torch.fx.symbolic_trace(patched), torch.fx.symbolic_trace(original)
    assert [(n.op, n.target) for n in got.graph.nodes] == [(n.op, n.target) for n in want.graph.nodes]
    assert not fl.explain(patched).fallbacks


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(models, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    patched, original = models
    assert_same(Checkpointed(patched), original, X)


def test_functional_call_and_transforms(models):
    patched, original = models
    state = {k: v.detach() * 0.5 for k, v in patched.state_dict().items()}
    call = torch.func.functional_call
    torch.testing.assert_close(call(patched, state, (X,)), call(original, state, (X,)))

    def loss(model):
        return lambda state, x: call(model, state, (x,)).square().sum()

    for transform in (
        lambda f: torch.func.grad(f)(state, X),
        lambda f: torch.func.vmap(torch.func.grad(f), (None, 0))(state, X),
        lambda f: torch.func.jvp(lambda x: f(state, x), (X,), (torch.ones_like(X),))[1],
    ):
        got, want = transform(loss(patched)), transform(loss(original))
        for a, b in zip(*(torch.utils._pytree.tree_leaves(t) for t in (got, want)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_double_backward(models):
    def penalty(model):
        x = X.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), list(model.parameters()))

    for got, want in zip(*map(penalty, models), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(models, dtype):
    outs = []
    for model in models:
        with torch.autocast("cpu", dtype):
            outs.append(model(X))
        model.zero_grad()
        outs[-1].float().square().sum().backward()
    assert outs[0].dtype == outs[1].dtype
    torch.testing.assert_close(outs[0], outs[1], rtol=2e-2, atol=2e-2)
    assert all(p.grad.dtype == torch.float32 for p in models[0].parameters())


def test_data_parallel_replicas_use_their_own_weights(models):
    patched, _ = models
    replica = patched[2]._replicate_for_data_parallel()
    replica._modules = {name: child._replicate_for_data_parallel() for name, child in patched[2]._modules.items()}
    for name, child in replica._modules.items():
        for key, parameter in patched[2]._modules[name].named_parameters():
            setattr(child, key, torch.zeros_like(parameter.detach()))
    assert (replica(X) == 0).all() and not (patched[2](X) == 0).all()


def test_a_branch_that_is_skipped_leaves_its_gradients_none():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Pair(nn.Linear(8, 8), nn.ReLU()), Pair(nn.Linear(8, 8), nn.ReLU())

        def forward(self, x, second=False):
            return self.b(x) if second else self.a(x)

    model = fl.patch_model(Branch(), on_fallback="raise")
    model(X).sum().backward()
    assert model.b.fc.weight.grad is None and model.a.fc.weight.grad is not None


def test_a_class_put_on_top_by_a_later_library_is_not_taken_off():
    model = fl.patch_model(nn.Sequential(MLP()), on_fallback="raise")
    ours = type(model[0])
    model[0].__class__ = type("Sharded", (ours,), {})
    want = model(X)
    fl.unpatch_model(model)
    assert type(model[0]).__name__ == "Sharded" and torch.equal(model(X), want)
    model[0].__class__ = ours
    fl.unpatch_model(model)
    assert type(model[0]) is MLP


def test_parametrizations_on_the_container_itself():
    class Gain(Pair):
        def __init__(self):
            super().__init__(nn.Linear(8, 8), nn.ReLU())
            self.gain = nn.Parameter(torch.rand(8))

        def forward(self, x):
            return self.act(self.fc(x)) * self.gain

    class Double(nn.Module):
        def forward(self, w):
            return w * 2

    patched = fl.patch_model(Gain(), on_fallback="raise")
    original = fl.unpatch_model(twin(patched))
    for model in (patched, original):
        nn.utils.parametrize.register_parametrization(model, "gain", Double())
    assert_same(patched, original, X)


def test_sync_batch_norm_conversion_after_patching():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8))
    fl.patch_model(model, on_fallback="ignore")
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(model[2]) is nn.SyncBatchNorm
    model.eval()(X)


def test_moved_and_cast_after_patching(models):
    patched, original = models
    torch.testing.assert_close(patched.double()(X.double()), original.double()(X.double()))
    assert is_patched(patched.to("meta"))


def test_in_a_model_list_and_shared_between_parents():
    shared = MLP()
    model = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)])
    fl.patch_model(model, on_fallback="raise")
    assert model[0][0] is model[1][0] and is_patched(shared)
    assert torch.equal(model[0](X), copy.deepcopy(fl.unpatch_model(model))[1](X))


@pytest.fixture
def _one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
def test_ddp(models):
    patched, original = models
    wrapped = nn.parallel.DistributedDataParallel(patched)
    wrapped(X).square().sum().backward()
    original(X).square().sum().backward()
    for got, want in zip(patched.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_one_process")
def test_fsdp2_puts_its_class_on_top_and_stays_fused(models):
    from torch.distributed.fsdp import fully_shard

    patched, original = models
    for part in (patched[2], patched[3], patched):
        fully_shard(part)
    patched(X).square().sum().backward()
    original(X).square().sum().backward()
    for got, want in zip(patched.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=1e-5, atol=1e-5)
    assert not fl.explain(patched).fallbacks
    fl.unpatch_model(patched)
    torch.testing.assert_close(patched(X), original(X))
