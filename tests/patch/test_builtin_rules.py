"""Each built-in rule on the smallest model with its pattern: found, equal to the original, refused where it must be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedlayers as fl

from .models import assert_same, twin

IMAGE, ROWS = torch.randn(4, 6, 5, 5), torch.randn(4, 7, 6)


def block(forward, **children):
    """A module whose class has this forward, with these children and parameters."""
    module = type("Block", (nn.Module,), {"forward": forward})()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def sites(model: nn.Module, kind: str = "fused") -> list[tuple[str, tuple[str, ...]]]:
    return [(r.rule, r.modules) for r in getattr(fl.explain(model), kind)]


def check(model: nn.Module, x: torch.Tensor, *expected: tuple[str, tuple[str, ...]]) -> nn.Module:
    patched = fl.patch_model(twin(model), on_fallback="raise")
    report = fl.explain(patched)
    assert sites(patched) == list(expected)
    assert "left out when the model was patched" not in [r.reason for r in report.skipped]
    fl.patch_model(patched)
    assert fl.explain(patched).to_dict() == report.to_dict(), "patching again changes nothing"
    for mode in (True, False):
        for m in (patched, model):
            m.train(mode)
            torch.manual_seed(0)
        torch.manual_seed(1)
        first = [patched(x), *[b.clone() for b in patched.buffers()]]
        torch.manual_seed(1)
        for got, want in zip(first, [model(x), *model.buffers()], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        report = fl.verify(patched, x)
        assert report, str(report)
    return patched


# batch norm


def conv(**options):
    return nn.Conv2d(6, 6, 3, padding=1, **{"bias": False, **options})


def test_batch_norm_then_activation():
    model = nn.Sequential(conv(), nn.BatchNorm2d(6), nn.ReLU(inplace=True), conv(), nn.BatchNorm2d(6), nn.SiLU())
    check(model, IMAGE, ("batch_norm_act", ("1", "2")), ("batch_norm_act", ("4", "5")))


def test_the_end_of_a_residual_block():
    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.down is None else self.down(x)
        return self.relu(out)

    for down in (None, nn.Sequential(conv(), nn.BatchNorm2d(6))):
        children = {"bn1": nn.BatchNorm2d(6), "bn2": nn.BatchNorm2d(6), "relu": nn.ReLU(inplace=True)}
        model = block(forward, conv1=conv(), conv2=conv(), down=down, **children)
        lone = [] if down is None else [("lone_batch_norm", ("down.1",))]
        check(model, IMAGE, ("batch_norm_act", ("bn1", "relu")), ("batch_norm_add_act", ("bn2", "relu")), *lone)


def test_an_identity_between_the_add_and_the_activation():
    def forward(self, x):
        return self.act(self.attn(self.norm(x) + x))

    def made(norm, attn):
        return block(forward, norm=norm, attn=attn, act=nn.ReLU())

    patched = check(made(nn.BatchNorm2d(6), nn.Identity()), IMAGE, ("batch_norm_add_act", ("norm", "act", "attn")))
    patched.attn = nn.Tanh()
    with pytest.raises(fl.patch.FallbackError, match="attn has been replaced"):
        patched(IMAGE)
    check(made(conv(), nn.Dropout(0.0)), IMAGE, ("add_act", ("act", "attn")))
    check(made(nn.BatchNorm2d(6), nn.Dropout(0.1)), IMAGE, ("batch_norm_add", ("norm",)))
    hooked = made(nn.BatchNorm2d(6), nn.Identity())
    hooked.attn.register_forward_hook(lambda module, args, out: out + 1)
    assert torch.equal(fl.patch_model(twin(hooked), on_fallback="raise")(IMAGE), twin(hooked)(IMAGE))
    assert sites(hooked) == []
    assert [(r.rule, r.modules, r.reason) for r in fl.explain(hooked).reduced] == [
        ("batch_norm_add", ("norm",), "not batch_norm_add_act: attn has a hook")
    ]

    def read_twice(self, x):
        y = self.attn(self.norm(x) + x)
        return self.act(y) + y

    twice = block(read_twice, norm=nn.BatchNorm2d(6), attn=nn.Identity(), act=nn.ReLU())
    assert torch.equal(fl.patch_model(twin(twice), on_fallback="raise")(IMAGE), twin(twice)(IMAGE))
    assert [(r.rule, r.modules) for r in fl.explain(twice).reduced] == [("batch_norm_add", ("norm",))]


def test_a_norm_of_a_larger_pattern_that_is_fused_by_itself_is_counted_once():
    Norm = type("Norm", (nn.BatchNorm2d,), {})
    model = block(lambda self, x: self.act(self.norm(x) + x), norm=Norm(6), act=nn.ReLU())
    assert fl.explain(model).counts.fused["norm"] == 0

    def overwritten(self, x, y):
        y += self.norm(x)
        return self.act(y)

    for found in (made := block(overwritten, norm=nn.BatchNorm2d(6), act=nn.ReLU()), fl.patch_model(twin(made))):
        report = fl.explain(found)
        assert [(r.rule, r.modules) for r in report.fused] == [("lone_batch_norm", ("norm",))]
        assert report.counts.fused == {"activation": 0, "norm": 1, "residual": 0}


def test_batch_norm_and_add_without_an_activation():
    model = block(lambda self, x: x + self.bn(self.conv(x)), conv=conv(), bn=nn.BatchNorm2d(6))
    check(model, IMAGE, ("batch_norm_add", ("bn",)))


@pytest.mark.parametrize(
    "bn",
    [
        nn.BatchNorm2d(6, momentum=None),
        nn.BatchNorm2d(6, affine=False),
        nn.BatchNorm2d(6, track_running_stats=False),
        nn.BatchNorm2d(6, eps=0.1, momentum=0.5),
        nn.BatchNorm2d(6).requires_grad_(False),
    ],
    ids=["cumulative", "no affine", "no tracking", "settings", "frozen"],
)
def test_batch_norms_of_every_setting(bn):
    model = nn.Sequential(conv(), bn, nn.GELU(), nn.Flatten())
    check(model, IMAGE, ("batch_norm_act", ("1", "2")))


def test_batch_norm_in_one_and_three_dims():
    check(nn.Sequential(nn.BatchNorm1d(6), nn.ReLU()), torch.randn(8, 6), ("batch_norm_act", ("0", "1")))
    check(nn.Sequential(nn.BatchNorm1d(6), nn.ReLU()), torch.randn(8, 6, 3), ("batch_norm_act", ("0", "1")))
    check(nn.Sequential(nn.BatchNorm3d(6), nn.ReLU()), torch.randn(2, 6, 3, 3, 3), ("batch_norm_act", ("0", "1")))


def test_a_frozen_batch_norm_in_a_training_block_keeps_its_own_mode():
    patched = fl.patch_model(nn.Sequential(conv(), nn.BatchNorm2d(6), nn.ReLU()), on_fallback="raise")
    patched.train()[1].eval()
    patched(IMAGE)
    assert patched[1].num_batches_tracked == 0 and (patched[1].running_mean == 0).all()


def test_wrong_dims_and_a_batch_of_one_value_raise_as_batch_norm_does():
    patched = fl.patch_model(nn.Sequential(nn.BatchNorm2d(6), nn.ReLU()))
    with pytest.raises(ValueError, match="expected 4D input"):
        patched(torch.randn(4, 6))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        patched(torch.randn(1, 6, 1, 1))


def test_one_batch_norm_called_twice_keeps_the_order_of_its_statistics():
    def forward(self, x, other):
        first = self.bn(x)
        second = self.bn(other)
        return self.act(first) + second

    model = block(forward, bn=nn.BatchNorm2d(6), act=nn.ReLU())
    patched = fl.patch_model(twin(model), on_fallback="ignore")
    assert [r.reason for r in fl.explain(patched).skipped if r.rule == "batch_norm_act"] == [
        "bn updates the same running statistics in between"
    ]
    for m in (model, patched):
        m(IMAGE, IMAGE * 3 + 1)
    torch.testing.assert_close(patched.bn.running_mean, model.bn.running_mean)


@pytest.mark.parametrize("name", ["running_mean", "num_batches_tracked"])
def test_a_forward_that_reads_the_statistics_of_its_norm(name):
    """Between norm and activation: seen to be given those of the step before."""

    def forward(self, x):
        h = self.bn(x)
        seen = getattr(self.bn, name) * 1.0
        return self.act(h), seen

    model = block(forward, bn=nn.BatchNorm2d(6), act=nn.ReLU())
    patched = fl.patch_model(twin(model), on_fallback="raise")
    assert f"the forward itself reads bn.{name}" in [r.reason for r in fl.explain(patched).skipped]
    for got, want in zip(patched(IMAGE), model(IMAGE), strict=True):
        torch.testing.assert_close(got, want)


def test_sync_and_quantized_batch_norms_are_left_alone():
    class Mine(nn.BatchNorm2d):
        """A subclass, which may do anything."""

    for bn in (nn.SyncBatchNorm(6), Mine(6)):
        assert not sites(nn.Sequential(conv(), bn, nn.ReLU()))


def test_a_hooked_batch_norm_leaves_the_add_and_says_so():
    def forward(self, x):
        return self.act(self.bn(self.conv(x)) + x)

    model = block(forward, conv=conv(), bn=nn.BatchNorm2d(6), act=nn.ReLU())
    model.bn.register_forward_hook(lambda *a: None)
    assert sites(model) == [("lone_batch_norm", ("bn",))], "its hook still sees the norm's own output"
    report = fl.explain(model)
    assert any("bn has a hook" in r.reason for r in (*report.reduced, *report.skipped))


# layer norm and RMS norm


def test_add_then_norm_where_the_sum_is_read_on():
    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    for kind in (nn.LayerNorm, nn.RMSNorm):
        model = block(forward, attn=nn.Linear(6, 6), mlp=nn.Linear(6, 6), norm1=kind(6), norm2=kind(6))
        check(model, ROWS, ("norm_for_product", ("norm1",)), ("add_norm_for_product", ("norm2",)))


def test_add_then_norm_where_only_the_norm_is_read():
    model = block(lambda self, x: self.norm(self.fc(x) + x), fc=nn.Linear(6, 6), norm=nn.LayerNorm(6))
    check(model, ROWS, ("add_norm", ("norm",)))


def test_norms_of_every_setting_and_a_broadcast_sum():
    for norm in (
        nn.LayerNorm(6, elementwise_affine=False),
        nn.LayerNorm(6, bias=False, eps=1e-3),
        nn.LayerNorm((7, 6)),
        nn.RMSNorm(6, eps=1e-3),
        nn.RMSNorm(6, elementwise_affine=False),
    ):
        model = block(lambda self, x: self.norm(self.fc(x) + x), fc=nn.Linear(6, 6), norm=norm)
        check(model, ROWS, ("add_norm", ("norm",)))
    model = block(
        lambda self, x: self.norm(self.fc(x) + x.mean(1, keepdim=True)), fc=nn.Linear(6, 6), norm=nn.LayerNorm(6)
    )
    check(model, ROWS, ("add_norm", ("norm",)))


def test_a_sum_overwritten_before_the_norm_is_left_alone():
    def forward(self, x):
        total = self.fc(x) + x
        total.mul_(2)
        return self.norm(total)

    model = block(forward, fc=nn.Linear(6, 6), norm=nn.LayerNorm(6))
    patched = fl.patch_model(twin(model), on_fallback="raise")
    assert [r for r, _ in sites(patched)] == ["lone_norm"]
    assert_same(patched, model, ROWS)


def test_a_lone_norm_subclass_stays():
    class Channels(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.transpose(-1, -2)).transpose(-1, -2)

    model = nn.Sequential(nn.Linear(6, 7), Channels(7))
    patched = fl.patch_model(twin(model))
    assert type(patched[1]) is Channels


# residual branches


def test_layer_scale_dropout_and_add():
    def gamma(self, x):
        return x + self.drop(self.gamma * self.fc(x))

    def functional(self, x):
        return F.dropout(self.fc(x), 0.5, self.training) + x

    model = block(gamma, fc=nn.Linear(6, 6), drop=nn.Dropout(0.3), gamma=nn.Parameter(torch.rand(6)))
    check(model, ROWS, ("scale_residual", ("drop",)))
    check(block(functional, fc=nn.Linear(6, 6)), ROWS, ("scale_residual", ("",)))


def test_a_gate_computed_by_the_model():
    def forward(self, x):
        gate = self.ada(x.mean(1)).unsqueeze(1)
        return x + gate * self.fc(x)

    check(block(forward, fc=nn.Linear(6, 6), ada=nn.Linear(6, 6)), ROWS, ("scale_residual", ("",)))


def test_dropout_at_zero_is_seen_through_and_pinned():
    def forward(self, x):
        return self.norm(self.drop(self.fc(x)) + x)

    model = block(forward, fc=nn.Linear(6, 6), drop=nn.Dropout(0.0), norm=nn.LayerNorm(6))
    patched = check(model, ROWS, ("add_norm", ("norm", "drop")))
    fl.unpatch_model(patched)
    fl.patch_model(patched, on_fallback="ignore")
    patched.drop.p = 0.9
    torch.manual_seed(0)
    got = patched.train()(ROWS)
    model.drop.p = 0.9
    torch.manual_seed(0)
    torch.testing.assert_close(got, model.train()(ROWS))
    assert fl.explain(patched).fallbacks[""] == {"drop.p has changed": 1}


def test_dropout_in_place_stays_torchs_own():
    """torch draws another mask for it on a GPU, so its own call stays, and what is around it is fused without it."""

    def forward(self, x):
        h = self.drop(self.norm(x))
        h += x
        return h

    for drop, kinds in ((nn.Dropout(0.3, inplace=True), []), (nn.Dropout(0.3), ["scale_residual"])):
        model = block(forward, norm=nn.LayerNorm(6), drop=drop)
        assert [kind for kind, _ in sites(model) if kind == "scale_residual"] == kinds
        check(model, ROWS, *sites(model))
    layer = nn.TransformerEncoderLayer(6, 2, 12, 0.1, batch_first=True)
    layer.dropout2.inplace = True
    assert not [kind for kind, _ in sites(layer) if kind == "transformer_encoder_layer"]
    layer.dropout2.inplace = False
    assert [kind for kind, _ in sites(layer) if kind == "transformer_encoder_layer"]


def test_dropout_of_what_is_no_floating_point():
    """As torch takes it or refuses it: seen to fail where nothing scales it."""

    def called(self, x):
        return self.fc(x.real.float()) + F.dropout(x, 0.5, self.training)

    for forward in (called, lambda self, x: self.fc(x.real.float()) + self.drop(x)):
        model = block(forward, fc=nn.Linear(6, 6), drop=nn.Dropout(0.5))
        patched = fl.patch_model(twin(model), on_fallback="raise")
        assert sites(patched) == [("scale_residual", ("drop",) if forward is not called else ("",))]
        x = torch.ones(7, 6, dtype=torch.int64)
        assert torch.equal(patched.eval()(x), model.eval()(x))
        for m in (patched.train(), model.train()):
            with pytest.raises(RuntimeError, match="can't be cast to the desired output type Long"):
                m(x)


def test_dropout_is_not_moved_past_other_randomness():
    def forward(self, x):
        a = self.drop(self.fc(x))
        b = self.other(x)
        return a + b

    model = block(forward, fc=nn.Linear(6, 6), drop=nn.Dropout(0.5), other=nn.Dropout(0.5))
    patched = fl.patch_model(twin(model), on_fallback="raise")
    assert sites(patched) == [("scale_residual", ("other",))]
    torch.manual_seed(0)
    want = model(ROWS)
    torch.manual_seed(0)
    torch.testing.assert_close(patched(ROWS), want)


OTHER_RANDOMNESS = {
    "gumbel": lambda self, x: self.drop(x) + F.gumbel_softmax(x),
    "poisson": lambda self, x: self.drop(x) + torch.poisson(x * x),
    "exponential": lambda self, x: self.drop(x) + (x * 0).exponential_(),
}


@pytest.mark.parametrize("name", OTHER_RANDOMNESS)
def test_nor_past_functions_that_draw(name):
    model = block(OTHER_RANDOMNESS[name], drop=nn.Dropout(0.5))
    patched = fl.patch_model(twin(model), on_fallback="raise")
    found = []
    for m in (patched, model):
        torch.manual_seed(0)
        found.append((m(ROWS), torch.get_rng_state()))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_an_in_place_add_into_the_input_is_left_alone():
    def forward(self, x):
        x += self.drop(self.fc(x))
        return x

    model = block(forward, fc=nn.Linear(6, 6), drop=nn.Dropout(0.5))
    assert [r.reason for r in fl.explain(model).skipped] == [
        "sum overwrites a value that others may read"
    ] or not sites(model)
    x = ROWS.clone()
    fl.patch_model(model)(x)
    assert not torch.equal(x, ROWS), "the caller's tensor is overwritten, as in the original"


# MLPs


def test_mlp_with_and_without_dropout_between():
    def forward(self, x):
        return self.drop2(self.fc2(self.drop1(self.act(self.fc1(x)))))

    for p, expected in ((0.0, [("mlp", ("fc1", "act", "fc2", "drop1"))]), (0.5, [("linear_act", ("fc1", "act"))])):
        children = {"fc1": nn.Linear(6, 9), "act": nn.GELU(), "fc2": nn.Linear(9, 6)}
        model = block(forward, drop1=nn.Dropout(p), drop2=nn.Dropout(p), **children)
        check(model, ROWS, *expected)


def test_gated_mlps_and_what_is_left_of_one_with_an_adapter():
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))

    children = {"act": nn.SiLU(), "gate": nn.Linear(6, 9, bias=False), "down": nn.Linear(9, 6, bias=False)}
    model = block(forward, up=nn.Linear(6, 9, bias=False), **children)
    check(model, ROWS, ("gated_mlp", ("up", "gate", "act", "down")))
    adapter = block(forward, up=nn.Sequential(nn.Linear(6, 9), nn.Identity()), **children)
    report = fl.explain(adapter)
    assert [(r.rule, r.modules) for r in report.reduced] == [("gated_act", ("act",))]
    assert "not exactly a Linear" in report.reduced[0].reason
    assert_same(fl.patch_model(twin(adapter), on_fallback="raise"), adapter, ROWS)


# Sequentials whose last layer belongs to the add after them


class Inverted(nn.Module):
    """torchvision's MobileNet block: the norm before the add is inside a Sequential in a Sequential."""

    def __init__(self):
        super().__init__()
        last = nn.Sequential(conv(), nn.BatchNorm2d(6))
        self.block = nn.Sequential(nn.Sequential(conv(), nn.BatchNorm2d(6), nn.ReLU6(inplace=True)), last)

    def forward(self, x):
        result = self.block(x)
        result += x
        return result


def test_a_norm_that_closes_a_sequential_before_an_add():
    inner = ("batch_norm_act", ("block.0.1", "block.0.2"))
    patched = check(Inverted(), IMAGE, ("batch_norm_add", ("block.1.1",)), inner)
    report = fl.explain(patched)
    assert report.counts.total == {"activation": 1, "norm": 2, "residual": 1} == report.counts.fused


def test_what_is_done_to_such_a_sequential_later_acts_as_on_the_original():
    patched = fl.patch_model(Inverted().eval(), on_fallback="ignore")
    torch.testing.assert_close(patched.block(IMAGE), fl.unpatch_model(twin(patched)).block(IMAGE))
    seen = []
    handle = patched.block[1].register_forward_hook(lambda mod, args, out: seen.append(out.clone()))
    original = fl.unpatch_model(twin(patched))
    torch.testing.assert_close(patched(IMAGE), original(IMAGE))
    assert len(seen) == 2
    handle.remove()
    patched.block.append(nn.Tanh())
    torch.testing.assert_close(patched(IMAGE), fl.unpatch_model(twin(patched))(IMAGE))
    assert set(fl.explain(patched).fallbacks[""]) == {"block.1 has a hook", "children of block have changed"}


# group norm, convolutions, modulation


def test_group_norm_with_and_without_an_activation():
    check(nn.Sequential(nn.GroupNorm(3, 6), nn.SiLU(), conv()), IMAGE, ("group_norm_act", ("0", "1")))
    check(nn.Sequential(nn.GroupNorm(2, 6, affine=False), conv()), IMAGE, ("lone_group_norm", ("0",)))


def test_convolution_then_activation():
    for layer, x in (
        (nn.Conv2d(6, 3, 1), IMAGE),
        (nn.Conv1d(6, 3, 1), ROWS.mT),
        (nn.Conv3d(6, 3, 1), IMAGE[..., None]),
    ):
        check(nn.Sequential(layer, nn.ReLU(inplace=True), nn.Flatten()), x, ("conv_act", ("0", "1")))
    report = fl.explain(nn.Sequential(conv(bias=False), nn.ReLU()))
    assert [r.reason for r in report.skipped] == ["0 has no bias: its activation alone is one pass already"]


def test_modulation_and_gates_of_every_shape():
    def adaln(self, x):
        shift, scale = self.ada(x.mean(1)).unsqueeze(1).chunk(2, -1)
        return self.norm(x) * (1 + scale) + shift

    def film(self, x):
        return self.scale(x.mean(1))[:, None] * x + self.ada(x.mean(1))[:, None, :6]

    norm = nn.LayerNorm(6, elementwise_affine=False)
    model = block(adaln, norm=norm, ada=nn.Linear(6, 12))
    check(model, ROWS, ("scale_residual", ("",)), ("lone_norm", ("norm",)))
    check(block(film, scale=nn.Linear(6, 1), ada=nn.Linear(6, 12)), ROWS, ("scale_residual", ("",)))


def test_arithmetic_on_sizes_and_positions_stays_exact():
    def forward(self, x):
        return self.fc(x)[..., self.index * x.shape[0] + self.index // 6]

    model = block(forward, fc=nn.Linear(6, 6))
    model.register_buffer("index", torch.tensor([0, 1]))
    patched = fl.patch_model(twin(model), on_fallback="raise")
    assert torch.equal(patched(ROWS), model(ROWS))


# torch's encoder layer


@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", F.gelu, nn.SiLU()], ids=["relu", "gelu", "module"])
def test_encoder_layers_train_fused_and_keep_their_fast_path(p, norm_first, activation):
    layer = nn.TransformerEncoderLayer(6, 2, 9, p, activation, norm_first=norm_first, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    patched = fl.patch_model(twin(model), on_fallback="raise")
    assert [r.rule for r in fl.explain(patched).fused] == ["transformer_encoder_layer"] * 2
    mask, padding = torch.zeros(7, 7), torch.zeros(4, 7, dtype=torch.bool)
    padding[:, -1] = True
    for mode in (True, False):
        for options in ({}, {"mask": mask}, {"src_key_padding_mask": padding}):
            report = fl.verify(patched.train(mode), ROWS, **options)
            assert report, str(report)
    with torch.no_grad():
        assert torch.equal(patched.eval()(ROWS), model.eval()(ROWS)), "the fast path's own result"


def test_encoder_layers_with_other_parts_are_left_alone():
    layer = nn.TransformerEncoderLayer(6, 2, 9, activation=lambda x: x * 2, batch_first=True)
    reasons = [r.reason for r in fl.explain(layer).skipped if r.rule == "transformer_encoder_layer"]
    assert reasons == ["its activation is not one this library knows"]
    layer = nn.TransformerEncoderLayer(6, 2, 9, batch_first=True)
    layer.linear1 = nn.Sequential(nn.Linear(6, 9))
    reasons = [r.reason for r in fl.explain(layer).skipped if r.rule == "transformer_encoder_layer"]
    assert reasons == ["its linear1 is not exactly a Linear"]


def test_an_in_place_add_into_what_only_a_dropout_read():
    def forward(self, x):
        out = self.drop(self.bn(self.conv(x)))
        out += x
        return out

    model = block(forward, conv=conv(), bn=nn.BatchNorm2d(6), drop=nn.Dropout(0.5))
    check(model, IMAGE, ("scale_residual", ("drop",)), ("lone_batch_norm", ("bn",)))


def test_an_in_place_add_into_what_another_reads_too():
    def forward(self, x):
        y = self.bn(self.conv(x))
        out = self.drop(y)
        out += x
        return out * y

    model = block(forward, conv=conv(), bn=nn.BatchNorm2d(6), drop=nn.Dropout(0.5)).eval()
    patched = fl.patch_model(twin(model), on_fallback="raise")
    assert [r for r, _ in sites(patched)] == ["lone_batch_norm"]
    torch.testing.assert_close(patched(IMAGE), model(IMAGE))
