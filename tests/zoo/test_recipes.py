"""Each recipe for a library's class: what it gives, what it refuses, and that it is inert where the class changed."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers import kernels
from fusedlayers.patch.rules import rms_forms

from .compare import assert_alike, step

HALVES = (torch.float16,) if kernels.interpreted() else (torch.float16, torch.bfloat16)
"""The interpreter rounds to bfloat16 by cutting off, which is twice as far off as eager."""
IMAGE = torch.randn(4, 6, 5, 5, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(1))


def block(forward, **children):
    """A module whose class has this forward and these children."""
    module = type("Block", (nn.Module,), {"forward": forward})()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def randomized(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for t in [*model.parameters(), *model.buffers()]:
            if t.is_floating_point():
                t.copy_(torch.rand(t.shape, generator=generator) + 0.5)
    return model


def rules_of(model: nn.Module, status: str = "fused") -> list[str]:
    return [r.rule for r in getattr(fl.explain(model), status)]


def reasons(model: nn.Module) -> str:
    return "\n".join(r.reason for r in fl.explain(model).skipped)


def check(model: nn.Module, x: torch.Tensor, *expected: str) -> nn.Module:
    """Fused by these rules, and the same in both modes; the mixed dtypes of half precision too."""
    original = randomized(model)
    patched = fl.patch_model(copy.deepcopy(original), on_fallback="raise")
    assert rules_of(patched) == list(expected), str(fl.explain(patched))
    for training in (True, False):
        got, want = (step(m.train(training), {name_of(m): x}) for m in (patched, original))
        assert_alike(got, want, 1e-5)
        for dtype in HALVES:
            with torch.autocast("cpu", dtype=dtype):
                assert fl.verify(patched, x), str(fl.verify(patched, x))
            half, plain = (copy.deepcopy(m).to(dtype) for m in (patched, original))
            got, want = (step(m, {name_of(m): x.to(dtype)}) for m in (half, plain))
            assert_alike(got, want, 8 * torch.finfo(dtype).eps)
    return patched


def name_of(model: nn.Module) -> str:
    return "input" if isinstance(model, nn.Sequential) else "x"


def add_then(name: str):
    """A forward of `norm(x + fc(x))` where the sum is read on."""

    def forward(self, x):
        total = x + self.fc(x)
        return getattr(self, name)(total) * 2 + total

    return forward


# transformers


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("llama.LlamaRMSNorm", "rounds_first"),
        ("mistral.MistralRMSNorm", "rounds_first"),
        ("qwen2.Qwen2RMSNorm", "rounds_first"),
        ("phi3.Phi3RMSNorm", "rounds_first"),
        ("gemma.GemmaRMSNorm", "offset_weight"),
        ("gemma2.Gemma2RMSNorm", "offset_weight"),
        ("olmo2.Olmo2RMSNorm", "rounds_last"),
        ("t5.T5LayerNorm", "rounds_to_weight"),
    ],
)
def test_written_rms_norms(transformers, path, form):
    folder, _, name = path.partition(".")
    cls = getattr(pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}"), name)
    assert rms_forms.form_of(cls)[0].__name__ == form
    model = block(add_then("norm"), fc=nn.Linear(16, 16), norm=cls(16))
    check(model, ROWS, "add_written_norm")
    check(nn.Sequential(nn.Tanh(), cls(16, eps=0.1)), ROWS, "written_norm")


def test_a_forced_route_does_not_change_what_is_recognised(transformers):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    rms_forms.form_of.cache_clear()
    with fl.settings(route="triton"), torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        assert rms_forms.is_written_rms_norm(LlamaRMSNorm)


def test_a_class_that_computes_something_else_is_left_alone(transformers):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    class TwiceRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states):
            return 2 * super().forward(hidden_states)

    TwiceRMSNorm.__module__ = LlamaRMSNorm.__module__  # as if its library had changed it
    assert not rms_forms.is_written_rms_norm(TwiceRMSNorm)
    model = nn.Sequential(nn.Tanh(), TwiceRMSNorm(16))
    assert not rules_of(model) and "TwiceRMSNorm computes something other than the RMS norms known here" in reasons(
        model
    )


def test_gpt2_mlp(transformers):
    from transformers.activations import NewGELUActivation
    from transformers.pytorch_utils import Conv1D

    mlp = nn.Sequential(Conv1D(24, 16), NewGELUActivation(), Conv1D(16, 24))
    check(mlp, ROWS, "conv1d_mlp")
    check(nn.Sequential(Conv1D(24, 16), nn.ReLU(inplace=True)), ROWS, "conv1d_act")


@pytest.mark.parametrize("gated", [True, False])
def test_t5_feed_forwards(transformers, gated):
    from transformers.models.t5 import modeling_t5

    config = transformers.T5Config(d_model=16, d_ff=24, dropout_rate=0.3)
    config.dense_act_fn = "gelu_new"
    cls = modeling_t5.T5DenseGatedActDense if gated else modeling_t5.T5DenseActDense
    wrapped = lambda: block(lambda self, x: self.ff(x), ff=cls(config))  # noqa: E731
    check(wrapped(), ROWS, "t5_gated_mlp" if gated else "t5_mlp")
    kept = fl.patch_model(wrapped().bfloat16())
    kept.ff.wo.float()  # as transformers keeps it
    assert kept(ROWS.bfloat16()).dtype == torch.float32
    changed = wrapped()
    del changed.ff.dropout
    assert "it has no dropout" in reasons(changed)


def test_gates_from_one_projection(transformers):
    from transformers.models.phi3.modeling_phi3 import Phi3MLP

    config = transformers.Phi3Config(hidden_size=16, intermediate_size=24, pad_token_id=0)
    check(block(lambda self, x: self.mlp(x), mlp=Phi3MLP(config)), ROWS, "chunked_mlp")


def test_an_adapter_in_a_gated_mlp_leaves_the_gate_fused_and_says_so(transformers):
    from transformers.models.llama.modeling_llama import LlamaMLP

    class Adapted(nn.Linear):
        """A low-rank adapter on a frozen projection, as PEFT's."""

        def __init__(self, fc: nn.Linear):
            super().__init__(fc.in_features, fc.out_features, bias=False)
            self.weight = fc.weight.requires_grad_(False)
            self.a, self.b = nn.Linear(fc.in_features, 2, bias=False), nn.Linear(2, fc.out_features, bias=False)

        def forward(self, x):
            return super().forward(x) + self.b(self.a(x))

    def model() -> nn.Module:
        config = transformers.LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2)
        return randomized(block(lambda self, x: self.mlp(x), mlp=LlamaMLP(config)))

    before = model()
    before.mlp.up_proj = Adapted(before.mlp.up_proj)
    plain = copy.deepcopy(before)
    (site,) = fl.explain(fl.patch_model(before, on_fallback="raise")).reduced
    assert site.rule == "gated_act" and "Adapted, not exactly a Linear" in site.reason
    assert_alike(step(before, {"x": ROWS}), step(plain, {"x": ROWS}), 1e-5)

    after = fl.patch_model(model(), on_fallback="ignore")
    after.mlp.up_proj = Adapted(after.mlp.up_proj)
    after.mlp.up_proj.load_state_dict(plain.mlp.up_proj.state_dict())
    assert_alike(step(after, {"x": ROWS}), step(plain, {"x": ROWS}), 1e-5)
    assert fl.explain(after).fallbacks["mlp"]["up_proj has been replaced"] == 1


# timm


@pytest.fixture
def layers():
    return pytest.importorskip("timm.layers")


def test_batch_norm_with_its_own_activation(layers):
    norm = layers.BatchNormAct2d(6, act_layer=nn.LeakyReLU, act_kwargs={"negative_slope": 0.3}, inplace=False)
    patched = check(nn.Sequential(nn.Conv2d(6, 6, 1), norm), IMAGE, "timm_norm_act")
    with pytest.raises(AssertionError, match="expected 4D input"):
        patched[1](ROWS)
    patched[1].act.negative_slope = 0.1
    with pytest.raises(fl.patch.FallbackError, match="negative_slope has changed"):
        patched(IMAGE)


def test_batch_norm_without_activation_then_add(layers):
    def forward(self, x):
        return self.bn(self.conv(x)) + x

    bare = layers.BatchNormAct2d(6, apply_act=False)
    check(block(forward, conv=nn.Conv2d(6, 6, 1), bn=bare), IMAGE, "timm_norm_add")
    acting = layers.BatchNormAct2d(6, inplace=False)
    check(block(forward, conv=nn.Conv2d(6, 6, 1), bn=acting), IMAGE, "timm_norm_act")


def test_batch_norm_that_drops_or_is_synchronized_is_left_alone(layers):
    dropping = layers.BatchNormAct2d(6, drop_layer=nn.Dropout)
    assert "it drops between norm and activation" in reasons(nn.Sequential(nn.Conv2d(6, 6, 1), dropping))
    synced = layers.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(6, 6, 1), layers.BatchNormAct2d(6)))
    assert not rules_of(synced)


def test_layer_norm_over_channels(layers):
    model = nn.Sequential(nn.Conv2d(6, 6, 1), layers.LayerNorm2d(6, eps=0.1))
    check(model, IMAGE, "layer_norm2d")
    model[1]._fast_norm = True
    assert "timm's fast norm is on" in reasons(model)


def test_timm_rms_norm_and_group_norm(layers):
    from timm.layers.norm import RmsNorm

    check(block(add_then("norm"), fc=nn.Linear(16, 16), norm=RmsNorm(16, eps=0.1)), ROWS, "add_timm_rms_norm")
    check(nn.Sequential(nn.Tanh(), RmsNorm(16, affine=False)), ROWS, "timm_rms_norm")
    norm = layers.GroupNormAct(6, num_groups=3, act_layer=nn.SiLU, inplace=False)
    check(nn.Sequential(nn.Conv2d(6, 6, 1), norm), IMAGE, "timm_group_norm_act")


@pytest.mark.parametrize("kind", ["GluMlp", "SwiGLU", "SwiGLUPacked"])
def test_timm_gated_mlps(layers, kind):
    mlp = getattr(layers, kind)(16, 24, drop=0.0)
    expected = {"GluMlp": "chunked_mlp_gate_last", "SwiGLU": "gated_mlp", "SwiGLUPacked": "chunked_mlp"}[kind]
    check(block(lambda self, x: self.mlp(x), mlp=mlp), ROWS, expected)
    with_norm = block(lambda self, x: self.mlp(x), mlp=getattr(layers, kind)(16, 24, norm_layer=nn.LayerNorm))
    first = ["two_projections"] if kind == "SwiGLU" else []
    assert rules_of(with_norm) == [*first, "gated_act", "norm_for_product"]


# torchvision


def test_frozen_batch_norm_alone_and_with_what_follows():
    frozen = pytest.importorskip("torchvision.ops").FrozenBatchNorm2d

    def forward(self, x):
        out = self.act(self.bn1(self.conv(x)))
        out = self.bn2(self.conv(out))
        out += self.bn3(x)
        return self.act(out)

    children = {f"bn{i}": frozen(6, eps=0.1) for i in (1, 2, 3)}
    model = block(forward, conv=nn.Conv2d(6, 6, 1), act=nn.ReLU(inplace=True), **children)
    check(model, IMAGE, "frozen_norm_act", "frozen_norm_add_act", "lone_frozen_norm")


def test_layer_norm_over_channels_of_torchvision():
    norm = pytest.importorskip("torchvision.models.convnext").LayerNorm2d(6)
    check(nn.Sequential(nn.Conv2d(6, 6, 1), norm), IMAGE, "layer_norm2d")


# any library


def test_an_add_that_no_norm_takes_in():
    def forward(self, x):
        return self.act(self.fc(x) + x)

    check(block(forward, fc=nn.Linear(16, 16), act=nn.GELU()), ROWS, "add_act")
    broadcast = block(lambda self, x: self.act(self.fc(x) + x[:1]), fc=nn.Linear(16, 16), act=nn.GELU())
    check(broadcast, ROWS, "add_act")


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_that_one_product_reads_is_written_in_its_dtype(norm, monkeypatch):
    def forward(self, x):
        total = x + self.fc(self.first(x))
        return self.fc(self.second(total)) + total + self.fc(x)

    children = {"first": norm(16), "second": norm(16), "fc": nn.Linear(16, 16)}
    original = randomized(block(forward, **children))
    patched = check(copy.deepcopy(original), ROWS, "norm_for_product", "add_norm_for_product")
    seen = []
    monkeypatch.setattr(torch.nn.functional, "linear", spied(torch.nn.functional.linear, seen))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = step(patched, {"x": ROWS})
        dtypes, seen[:] = [t.dtype for t in seen], []
        want = step(original, {"x": ROWS})
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32] and {t.dtype for t in seen} == {torch.float32}
    if not kernels.interpreted():
        assert all(torch.equal(got[name], want[name]) for name in want), "it is rounded once, as before"


def spied(function, seen):
    def linear(x, *args):
        seen.append(x)
        return function(x, *args)

    return linear


def test_a_norm_with_several_readers_keeps_its_dtype():
    def forward(self, x):
        y = self.norm(x)
        return self.fc(y) + self.other(y)

    model = block(forward, norm=nn.LayerNorm(16), fc=nn.Linear(16, 16), other=nn.Linear(16, 16))
    check(model, ROWS, "two_projections", "lone_norm")


def test_a_product_that_is_replaced_later_gets_what_it_always_got():
    model = fl.patch_model(
        block(lambda self, x: self.fc(self.norm(x)), norm=nn.LayerNorm(16), fc=nn.Linear(16, 16)), on_fallback="ignore"
    )
    model.fc = nn.Identity()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(ROWS).dtype == torch.float32
    assert not fl.explain(model).fallbacks, "all else stays fused"


def test_a_rule_whose_class_is_gone_says_so_once(layers, monkeypatch):
    from fusedlayers.patch import inert

    monkeypatch.setattr(inert, "_said", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fl.patch_model(nn.Sequential(nn.Linear(3, 3)))
        assert not caught, "all are there"
        monkeypatch.delattr(layers.norm_act, "BatchNormAct2d")
        for _ in range(2):
            fl.patch_model(nn.Sequential(nn.Linear(3, 3)))
    assert sorted(str(w.message) for w in caught) == [
        f"rule '{name}' is inert: this version of timm has no timm.layers.norm_act.BatchNormAct2d"
        for name in ("timm_norm_act", "timm_norm_add")
    ]


def test_the_kernel_of_an_add_and_activation_keeps_the_sign_of_zero():
    from fusedlayers.ops.affine_act import reference

    zeros = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    residual = torch.tensor([-0.0, -0.0, 0.0, 0.0])
    got = reference(zeros, 1.0, -0.0, fl.Activation("identity"), None, residual)
    assert torch.equal(got.signbit(), (zeros + residual).signbit())


# which norms of the networks people have are written low


def _timm(name, **options):
    timm = pytest.importorskip("timm")
    return timm.create_model(name, pretrained=False, num_classes=5, **options), {"x": torch.randn(2, 3, 32, 32)}


def _transformers(name, config, **options):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 2}
    made = getattr(transformers, config)(**({**sizes, "vocab_size": 40, "use_cache": False} | options))
    return getattr(transformers, name)(made).eval(), {"input_ids": torch.arange(14).view(2, 7)}


def _mixer():
    mixer = pytest.importorskip("timm.models.mlp_mixer").MlpMixer
    return mixer(img_size=32, num_blocks=2, embed_dim=16, num_classes=5), {"x": torch.randn(2, 3, 32, 32)}


_GPT2 = {"n_embd": 24, "n_head": 2, "n_layer": 2}
_LOW = {  # norms in all, and those that are written in the product's dtype
    "vit": (lambda: _timm("vit_tiny_patch16_224", img_size=32, depth=2), 5, 5),
    "mixer": (_mixer, 5, 4),
    "convnext": (lambda: _timm("convnext_atto", depths=(1, 1, 1, 1)), 9, 7),
    "convnext of linears": (lambda: _timm("convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 8, 8, 8)), 9, 7),
    "gpt2": (lambda: _transformers("GPT2Model", "GPT2Config", **_GPT2), 5, 4),
    "llama": (lambda: _transformers("LlamaModel", "LlamaConfig"), 5, 2),
    "phi3": (lambda: _transformers("Phi3Model", "Phi3Config", pad_token_id=0), 5, 4),
    "bert": (lambda: _transformers("BertModel", "BertConfig"), 5, 0),
}


@pytest.mark.parametrize("name", _LOW)
def test_norms_whose_product_lies_in_a_child(name, monkeypatch):
    from fusedlayers.patch.rules import low_norm

    make, norms, low = _LOW[name]
    original, inputs = make()
    patched = fl.patch_model(copy.deepcopy(original), on_fallback="raise")
    sites = [r for r in fl.explain(patched).fused if r.rule.endswith("_for_product")]
    assert len(sites) == low, str(fl.explain(patched))
    assert sum("Norm" in type(m).__name__ for m in patched.modules() if not m._modules) == norms
    given, real = [], low_norm._product_dtype
    monkeypatch.setattr(low_norm, "_product_dtype", lambda *args: given.append(real(*args)) or given[-1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = (step(m, inputs) for m in (patched, original))
    assert given == [torch.bfloat16] * low
    # rounded once, as before: the same bits, but for a gated MLP, which adds up its two gradients in another dtype
    assert_alike(got, want, 0.02 if name == "llama" else 0.0)
