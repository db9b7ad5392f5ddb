"""`norm(dropout(fc(x)) + residual)`, with an MLP for `fc` too, and `act(bn(fc(x)))`: the gradient of the bias of `fc`
comes from the norm.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedlayers as fl
from fusedlayers.ops import _route, _table
from fusedlayers.patch.rules import _left_bias, linear_batch_norm, linear_norm

from .models import assert_same, twin
from .test_builtin_rules import block, check, sites

ROWS = torch.randn(4, 7, 6)


def post_norm(self, x):
    """BERT's output layers."""
    return self.norm(self.drop(self.fc(x)) + x)


def post_norm_mlp(self, x):
    return self.norm(self.drop(self.fc(F.gelu(self.fc1(x)))) + x)


@pytest.fixture(params=["linear", "mlp"])
def original(request) -> nn.Module:
    return model() if request.param == "linear" else model(post_norm_mlp, fc1=nn.Linear(6, 6))


def model(forward=post_norm, **children) -> nn.Module:
    children = {"fc": nn.Linear(6, 6), "drop": nn.Dropout(0.3), "norm": nn.LayerNorm(6), **children}
    return block(forward, **children)


@pytest.fixture(autouse=True)
def on_every_size(monkeypatch):
    """As on a device, and on results of any size; the op itself then runs as it does on a CPU."""
    for rules in (linear_norm, linear_batch_norm):
        monkeypatch.setattr(rules, "SMALLEST", 0)
    monkeypatch.setattr(_left_bias, "_kernels_take", lambda *tensors: True)


@pytest.mark.parametrize("norm", [nn.LayerNorm(6), nn.LayerNorm(6, elementwise_affine=False), nn.RMSNorm(6)], ids=str)
def test_the_end_of_a_post_norm_block(norm):
    patched = check(model(norm=norm), ROWS, ("linear_drop_add_norm", ("fc", "drop", "norm")))
    report = fl.explain(patched)
    assert not report.skipped and not report.reduced
    assert "(1/1 norms, 1/1 adds, 0/0 activations)" in str(report)


def test_before_a_product(joined):
    def forward(self, x):
        return self.next(post_norm(self, x))

    original = model(forward, next=nn.Linear(6, 3))
    patched = fl.patch_model(twin(original), on_fallback="raise")
    assert sites(patched) == [("linear_drop_add_norm_for_product", ("fc", "drop", "norm"))]
    grads = []
    for m in (patched, original):
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            y = m(ROWS)
        y.float().square().sum().backward()
        grads.append({n: p.grad for n, p in m.named_parameters()})
    assert [shift is patched.fc.bias for _, shift in joined] == [True]
    for name, grad in grads[1].items():
        assert grads[0][name].dtype == grad.dtype
        torch.testing.assert_close(grads[0][name], grad, rtol=2e-2, atol=2e-2 * float(grad.abs().max()))


def test_what_takes_part(joined):
    """The bias of a Linear that is trained, while the dropout is on; nothing else."""
    original = model()
    patched = fl.patch_model(twin(original), on_fallback="raise")

    def given(m=patched, x=ROWS):
        del joined[:]
        m(x)
        return [shift is not None for _, shift in joined]

    assert given() == [True]
    with torch.no_grad():
        assert given() == [False]
    patched.fc.bias.requires_grad_(False)
    assert given() == [False]
    patched.fc.bias.requires_grad_(True)
    patched.drop.p = 0.0
    assert given() == []
    patched.drop.p = 0.3
    patched.eval()
    assert given() == []
    assert given(fl.patch_model(model(fc=nn.Linear(6, 6, bias=False)))) == [False]


def test_small_results_keep_their_pass(monkeypatch, joined):
    monkeypatch.setattr(linear_norm, "SMALLEST", ROWS.numel() + 1)
    fl.patch_model(model())(ROWS)
    assert [shift for _, shift in joined] == [None]


def test_what_the_table_leaves_to_eager_keeps_its_bias(joined):
    """Its norm runs apart, and a bias left to that would cost a function of its own."""
    with _table.in_force(("scale_residual", -1), _table.REFERENCE):
        fl.patch_model(model())(ROWS)
        assert [shift for _, shift in joined] == [None]
        del joined[:]
        with fl.settings(route="library"):
            fl.patch_model(model())(ROWS)
        assert [shift is not None for _, shift in joined] == [True]


def test_a_residual_that_broadcasts(joined):
    def forward(self, x):
        return self.norm(self.drop(self.fc(x)) + x[:1])

    original = model(forward)
    patched = fl.patch_model(twin(original), on_fallback="raise")
    for m in (patched, original):
        torch.manual_seed(3)
        m(ROWS).square().sum().backward()
    assert joined == []
    for a, b in zip(patched.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("first", [True, False])
def test_results_lie_in_memory_as_eagers_do(first):
    """As the left operand of the sum; the result of a Linear has its rows one after another."""

    def forward(self, x):
        h = self.drop(self.fc(x))
        s = x + h if first else h + x
        return self.norm(s), s

    original = model(forward)
    patched = fl.patch_model(twin(original), on_fallback="raise")
    x = ROWS.transpose(0, 1)
    for a, b in zip(patched(x), original(x), strict=True):
        assert a.stride() == b.stride()


def test_a_whole_mlp_in_front():
    original = model(post_norm_mlp, fc1=nn.Linear(6, 6))
    patched = check(original, ROWS, ("mlp_drop_add_norm", ("fc1", "fc", "drop", "norm")))
    assert "(1/1 norms, 1/1 adds, 1/1 activations)" in str(fl.explain(patched))


def test_a_result_that_is_read_on_is_left_to_the_rule_for_less():
    def forward(self, x):
        h = self.fc(x)
        return self.norm(self.drop(h) + x) * h

    original = model(forward)
    patched = fl.patch_model(twin(original), on_fallback="raise")
    assert sites(patched, "reduced") == [("drop_add_norm", ("drop", "norm"))]


def test_gradients_of_every_parameter_and_input(original):
    patched = fl.patch_model(twin(original), on_fallback="raise")
    for frozen in ((), ("fc.weight",), ("norm.weight", "norm.bias"), ("fc.weight", "norm.weight", "norm.bias")):
        for m in (patched, original):
            m.zero_grad()
            for name, p in m.named_parameters():
                p.requires_grad_(name not in frozen)
        for grad in (True, False):
            found = []
            for m in (patched, original):
                x = ROWS.clone().requires_grad_(grad)
                torch.manual_seed(3)
                m(x).square().sum().backward()
                found.append([x.grad, *(p.grad for p in m.parameters())])
            for a, b in zip(*found, strict=True):
                assert (a is None) == (b is None)
                if b is not None:
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_hooks(original):
    """On the bias one that is told once; on the Linear one that keeps it out, at once and later."""
    patched = fl.patch_model(original, on_fallback="ignore")
    seen = []
    patched.fc.bias.register_hook(seen.append)
    patched.fc.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    patched(ROWS).square().sum().backward()
    assert len(seen) == 2 and torch.equal(*seen)
    patched.fc.register_forward_hook(lambda *_: seen.append("called"))
    patched(ROWS)
    assert seen[-1] == "called" and sum(sum(c.values()) for c in fl.explain(patched).fallbacks.values()) == 1
    hooked = model()
    hooked.fc.register_forward_hook(lambda *_: None)
    assert sites(fl.patch_model(hooked), "reduced") == [("drop_add_norm", ("drop", "norm"))]


def test_gradients_of_gradients(original):
    original.double()
    patched = fl.patch_model(twin(original), on_fallback="raise")
    found = []
    for m in (patched, original):
        x = ROWS.double().requires_grad_()
        torch.manual_seed(3)
        params = list(m.parameters())
        grads = torch.autograd.grad(m(x).tanh().sum(), [x, *params], create_graph=True)
        found.append([*grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), [x, *params])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant, original):
    patched = fl.patch_model(twin(original), on_fallback="raise")
    for m in (patched, original):
        x = ROWS.clone().requires_grad_()
        torch.manual_seed(3)
        checkpoint(m, x, use_reentrant=reentrant).square().sum().backward()
    for a, b in zip(patched.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_transforms_and_compile_see_the_plain_layer(joined, original):
    original.drop.p = 1e-9
    patched = fl.patch_model(twin(original), on_fallback="raise")
    found = []
    for m in (patched, original):
        params = dict(m.named_parameters())

        def loss(params, m=m):
            return torch.func.functional_call(m, params, (ROWS,)).square().sum()

        found.append(torch.func.grad(loss)(params))
    for name, grad in found[1].items():
        torch.testing.assert_close(found[0][name], grad, rtol=1e-4, atol=1e-4)
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    compiled(ROWS).square().sum().backward()
    original(ROWS).square().sum().backward()
    torch.testing.assert_close(patched.fc.bias.grad, original.fc.bias.grad, rtol=1e-4, atol=1e-4)
    assert all(shift is None for _, shift in joined)


def test_a_forced_reference_route_is_right_too(original):
    patched = fl.patch_model(twin(original), on_fallback="raise")
    with fl.settings(route="reference"):
        assert_same(copy.deepcopy(patched).eval(), copy.deepcopy(original).eval(), ROWS)
        for m in (patched, original):
            torch.manual_seed(3)
            m(ROWS).square().sum().backward()
    for a, b in zip(patched.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert not _route.failures


# batch norm


def normed(self, x):
    return self.act(self.bn(self.fc(x)))


KINDS = {
    "linear": (lambda: nn.Linear(6, 5), lambda: nn.BatchNorm1d(5), torch.randn(9, 6)),
    "1d": (
        lambda: nn.Conv1d(6, 5, 3, padding=1, padding_mode="reflect"),
        lambda: nn.BatchNorm1d(5),
        torch.randn(4, 6, 8),
    ),
    "2d": (lambda: nn.Conv2d(6, 5, 3, groups=1, stride=2), lambda: nn.BatchNorm2d(5), torch.randn(4, 6, 9, 9)),
    "3d": (lambda: nn.Conv3d(6, 5, 2), lambda: nn.BatchNorm3d(5), torch.randn(2, 6, 3, 4, 4)),
}


@pytest.fixture(params=KINDS)
def product(request):
    """A model, and what it takes."""
    fc, bn, x = KINDS[request.param]
    return block(normed, fc=fc(), bn=bn(), act=nn.ReLU()), x


def test_batch_norm_behind_a_product_with_a_bias(product):
    original, x = product
    check(original, x, ("product_norm_act", ("fc", "bn", "act")))


def test_every_state_of_the_norm_and_the_bias(product):
    original, x = product
    patched = fl.patch_model(twin(original), on_fallback="raise")

    def state(m, training, frozen, tracked):
        m.train().zero_grad()
        m.bn.train(training)
        m.fc.bias.requires_grad_(not frozen)
        m.bn.track_running_stats = tracked

    for training in (True, False):
        for frozen in (False, True):
            for tracked in (True, False):
                found = []
                for m in (patched, original):
                    state(m, training, frozen, tracked)
                    given = x.clone().requires_grad_()
                    m(given).square().sum().backward()
                    found.append([given.grad, *(p.grad for p in m.parameters()), *(b.clone() for b in m.buffers())])
                for a, b in zip(*found, strict=True):
                    assert (a is None) == (b is None)
                    if b is not None:
                        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-4)


def test_batch_norm_without_a_bias_in_front_or_with_another_reader():
    def read_on(self, x):
        h = self.fc(x)
        return self.act(self.bn(h)) + h

    fc, bn, x = nn.Linear(6, 6), nn.BatchNorm1d(6), torch.randn(9, 6)
    without = block(normed, fc=nn.Linear(6, 6, bias=False), bn=bn, act=nn.ReLU())
    check(without, x, ("batch_norm_act", ("bn", "act")))
    patched = fl.patch_model(block(read_on, fc=fc, bn=bn, act=nn.ReLU()))
    assert sites(patched, "reduced") == [("batch_norm_act", ("bn", "act"))]


def test_a_norm_in_front_of_the_product_comes_first():
    def forward(self, x):
        return normed(self, self.norm(x + x))

    original = block(forward, norm=nn.LayerNorm(6), fc=nn.Linear(6, 6), bn=nn.BatchNorm1d(6), act=nn.ReLU())
    check(original, torch.randn(9, 6), ("add_norm_for_product", ("norm",)), ("product_norm_act", ("fc", "bn", "act")))


def test_batch_norm_transforms_and_compile_see_the_plain_layer(product):
    original, x = product
    patched = fl.patch_model(twin(original), on_fallback="raise")
    expected = original(x)
    torch.testing.assert_close(torch.compile(patched, backend="aot_eager", fullgraph=True)(x), expected)
    found = []
    for m in (patched.eval(), original.eval()):
        params = dict(m.named_parameters())
        loss = lambda params, m=m: torch.func.functional_call(m, params, (x,)).square().sum()  # noqa: E731
        found.append(torch.func.grad(loss)(params))
    for name, grad in found[1].items():
        torch.testing.assert_close(found[0][name], grad, rtol=1e-4, atol=1e-4)


OTHER_DIMS = {
    "linear over time": (lambda: nn.Linear(6, 5), lambda: nn.BatchNorm1d(4), torch.randn(9, 4, 6)),
    "linear over as many": (lambda: nn.Linear(6, 6), lambda: nn.BatchNorm1d(6), torch.randn(9, 6, 6)),
    "linear over images": (lambda: nn.Linear(6, 5), lambda: nn.BatchNorm2d(4), torch.randn(2, 4, 3, 6)),
    "one row": (lambda: nn.Conv1d(6, 5, 3), lambda: nn.BatchNorm1d(7), torch.randn(6, 9)),
    "one image": (lambda: nn.Conv2d(6, 5, 3), lambda: nn.BatchNorm1d(7), torch.randn(6, 9, 9)),
}


@pytest.mark.parametrize("name", OTHER_DIMS)
def test_biases_along_another_dim_than_the_norms(name):
    """Seen to fail with gradients of 0, and of the wrong size."""
    fc, bn, x = OTHER_DIMS[name]
    original = block(normed, fc=fc(), bn=bn(), act=nn.GELU())
    patched = fl.patch_model(twin(original), on_fallback="raise")
    assert sites(patched) == [("product_norm_act", ("fc", "bn", "act"))]
    grad = torch.randn_like(original(x))
    patched(x)
    for m in (patched, original):
        m(x).backward(grad)
    for a, b in zip(patched.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
def test_sums_in_place_are_left_to_the_rule_for_less(low, autocast):
    """In the dtype of their left operand: of the Linear's result, or of what that is added to."""

    def into_product(self, x, r):
        h = self.drop(self.fc(x))
        h += r
        return self.norm(h.float()), h

    def onto_product(self, x, r):
        r = r * 1
        r += self.drop(self.fc(x))
        return self.norm(r), r

    for forward in (into_product, onto_product):
        original = model(forward, norm=nn.LayerNorm(6, elementwise_affine=False))
        patched = fl.patch_model(twin(original), on_fallback="raise")
        assert "linear_drop_add_norm" not in [rule for rule, _ in sites(patched)]
        found = []
        for m in (patched, original):
            torch.manual_seed(3)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found.append(m(ROWS, ROWS.to(low)))
        for a, b in zip(*found, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=2e-2, atol=4e-2)
