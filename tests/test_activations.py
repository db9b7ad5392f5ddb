"""The registry of activations: what is recognised, what is refused, and every value and slope as eager has it."""

from __future__ import annotations

import functools
import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedlayers as fl
from fusedlayers import kernels
from fusedlayers.activations import Activation, Spec, get, is_inplace, names, recognise, refusal, register
from fusedlayers.activations.recognition import _forget
from fusedlayers.activations.registry import SPECS
from fusedlayers.functional import affine_act
from tests.harness import assert_accurate
from tests.op_table import SETTINGS, activation

MODULES = [
    (nn.ReLU(), "relu"), (nn.ReLU6(), "relu6"), (nn.LeakyReLU(0.3), "leaky_relu(negative_slope=0.3)"),
    (nn.RReLU(0.1, 0.5).eval(), "rrelu(lower=0.1, upper=0.5)"), (nn.ELU(2.0), "elu(alpha=2)"),
    (nn.CELU(2), "celu(alpha=2)"), (nn.SELU(), "selu"), (nn.GELU(), "gelu"), (nn.GELU(approximate="tanh"), "gelu_tanh"),
    (nn.SiLU(), "silu"), (nn.Mish(), "mish"), (nn.Sigmoid(), "sigmoid"), (nn.LogSigmoid(), "logsigmoid"),
    (nn.Tanh(), "tanh"), (nn.Hardtanh(-2, 0.5), "hardtanh(min_val=-2, max_val=0.5)"), (nn.Hardsigmoid(), "hardsigmoid"),
    (nn.Hardswish(), "hardswish"), (nn.Hardshrink(0.25), "hardshrink(lambd=0.25)"),
    (nn.Softshrink(0.25), "softshrink(lambd=0.25)"), (nn.Tanhshrink(), "tanhshrink"),
    (nn.Softplus(2, 9), "softplus(beta=2, threshold=9)"), (nn.Softsign(), "softsign"),
    (nn.Threshold(0.5, -1), "threshold(threshold=0.5, value=-1)"), (nn.Identity(), "identity"),
]  # fmt: skip

CALLS = [
    (F.relu, (), {}, "relu"),
    (F.relu, (True,), {}, "relu"),
    (torch.relu, (), {}, "relu"),
    (Tensor.relu_, (), {}, "relu"),
    ("relu", (), {}, "relu"),
    ("sigmoid_", (), {}, "sigmoid"),
    (torch.special.expit, (), {}, "sigmoid"),
    (F.gelu, (), {}, "gelu"),
    (F.gelu, (), {"approximate": "tanh"}, "gelu_tanh"),
    (functools.partial(F.gelu, approximate="tanh"), (), {}, "gelu_tanh"),
    (F.leaky_relu, (0.3, True), {}, "leaky_relu(negative_slope=0.3)"),
    (F.relu6, (), {"inplace": True}, "relu6"),
    (F.elu, (), {"alpha": 2.0}, "elu(alpha=2)"),
    (F.elu_, (2,), {}, "elu(alpha=2)"),
    (torch.selu_, (), {}, "selu"),
    (torch.celu, (2.0,), {}, "celu(alpha=2)"),
    (F.hardtanh, (-2.0, 2.0), {}, "hardtanh(min_val=-2, max_val=2)"),
    (F.hardtanh, (), {"max_val": 3.0}, "hardtanh(min_val=-1, max_val=3)"),
    (F.softplus, (2, 9), {}, "softplus(beta=2, threshold=9)"),
    (F.threshold, (0.5, -1.0), {}, "threshold(threshold=0.5, value=-1)"),
    ("hardshrink", (0.25,), {}, "hardshrink(lambd=0.25)"),
    (F.rrelu, (), {}, "rrelu(lower=0.125, upper=0.333333)"),
    (F.silu, (), {"inplace": True}, "silu"),
    (F.mish, (), {}, "mish"),
]

NOT_ONES = [
    (F.rrelu, (0.1, 0.3, True), {}),
    (F.gelu, ("tanh",), {}),
    (F.gelu, (), {"approximate": "quick"}),
    (F.leaky_relu, (torch.tensor(0.1),), {}),
    (F.leaky_relu, (math.nan,), {}),
    (F.celu, (0.0,), {}),
    (F.hardtanh, (1.0, -1.0), {}),
    (F.softshrink, (-1.0,), {}),
    (F.softplus, (0.0,), {}),
    (F.leaky_relu, (0.1, False, 3), {}),
    (F.relu, (), {"out": 1}),
    (F.elu, (1.0,), {"alpha": 2.0}),
    (F.elu, (True,), {}),
    (F.prelu, (), {}),
    (torch.clamp, (0, 6), {}),
    ("clamp", (), {"min": 0}),
    ("softmax", (-1,), {}),
    (F.softmax, (-1,), {}),
    (torch.square, (), {}),
    ("tan", (), {}),
    ("tanh__", (), {}),
    (torch.erf, (), {}),
    ([], (), {}),
    (None, (), {}),
]


@pytest.mark.parametrize(("module", "expected"), MODULES, ids=[type(m).__name__ for m, _ in MODULES])
def test_modules(module, expected):
    found = recognise(module)
    if isinstance(module, nn.RReLU):  # its flag may change
        assert found is None
        found = get(module)
    assert str(found) == expected and get(module) == found
    z = torch.linspace(-4, 4, 33)
    assert torch.equal(found(z), module(z))


@pytest.mark.parametrize(("what", "args", "kwargs", "expected"), CALLS, ids=[str(c[3]) for c in CALLS])
def test_functions_and_methods(what, args, kwargs, expected):
    assert str(recognise(what, args, kwargs)) == expected
    z = torch.linspace(-4, 4, 33)
    call = getattr(Tensor, what) if isinstance(what, str) else what
    assert torch.equal(recognise(what, args, kwargs)(z), call(z.clone(), *args, **kwargs))


@pytest.mark.parametrize(("what", "args", "kwargs"), NOT_ONES, ids=lambda v: getattr(v, "__name__", None) or str(v))
def test_what_cannot_be_represented_is_no_activation(what, args, kwargs):
    assert recognise(what, args, kwargs) is None


def test_in_place_forms():
    for what, args, kwargs in [
        (F.relu, (True,), {}),
        (F.relu, (), {"inplace": True}),
        ("relu_", (), {}),
        (F.elu_, (), {}),
        (F.hardtanh, (-1.0, 1.0, True), {}),
        (F.rrelu, (0.1, 0.3, False, True), {}),
        (functools.partial(F.silu, inplace=True), (), {}),
        (nn.ReLU6(inplace=True), (), {}),
    ]:
        assert is_inplace(what, args, kwargs), what
    for what, args, kwargs in [
        (F.relu, (), {}),
        ("relu", (), {}),
        (F.leaky_relu, (1.0,), {}),
        (F.elu, (True,), {}),
        (F.relu, (False,), {}),
        (nn.ReLU(), (), {}),
        (F.softplus, (1, 20), {}),
    ]:
        assert not is_inplace(what, args, kwargs), what


def test_exact_type_only():
    class Mine(nn.GELU):
        def forward(self, z):
            return z

    assert recognise(Mine()) is None
    with pytest.raises(ValueError, match="not an activation this library can represent"):
        get(Mine())
    replaced = nn.ReLU()
    replaced.forward = lambda z: z + 1  # an instance's own forward hides its class's
    assert recognise(replaced) is None
    assert recognise(nn.ReLU(), (1,)) is None
    odd = nn.GELU()
    odd.approximate = "other"
    assert recognise(odd) is None


def test_refusals_say_why():
    for module, why in [(nn.PReLU(), "learned"), (nn.GLU(), "not elementwise"), (nn.Softmax(-1), "not elementwise"),
                        (nn.RReLU(), r"\.eval\(\)"), (nn.Linear(2, 2), "known: celu, elu")]:  # fmt: skip
        with pytest.raises(ValueError, match=why):
            get(module)
        assert refusal(module)
    for name, why in [("prelu", "learned"), ("xielu", "learned"), ("log_softmax", "not elementwise")]:
        with pytest.raises(ValueError, match=why):
            get(name)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("gelo", "gelu"),
        ("relu_6", "relu6"),
        ("gelu_tan", "gelu_tanh"),
        ("soft_plus", "softplus"),
        ("leakyrelu", "leaky_relu"),
    ],
)
def test_near_miss_names(name, near):
    with pytest.raises(ValueError, match=f"did you mean '{near}'"):
        get(name)


def test_wrong_kinds():
    for wrong in (3, F.relu, nn.ReLU, b"relu"):
        with pytest.raises(TypeError, match="must be a name, an Activation or a torch activation module"):
            get(wrong)
    assert get(None) == get("identity") and get(Activation("relu")) is not None


def test_settings():
    assert Activation("leaky_relu") == Activation("leaky_relu", (0.01,)) != Activation("leaky_relu", (0.02,))
    assert hash(Activation("hardtanh", (-1, 1))) == hash(Activation("hardtanh"))
    with pytest.raises(ValueError, match="takes 1 parameters"):
        Activation("elu", (1.0, 2.0))
    for name, bad in [("celu", (0.0,)), ("hardtanh", (2.0, 1.0)), ("softshrink", (-1.0,)), ("elu", (math.nan,))]:
        with pytest.raises(ValueError, match="has no meaning for"):
            Activation(name, bad)
    assert fl.activations() == sorted(fl.activations()) == names()


@pytest.fixture
def library(monkeypatch):
    """Makes a module of classes of a library that is not installed, by its dotted name."""

    def make(path, **classes):
        found = types.ModuleType(path)
        for name, cls in classes.items():
            cls.__module__, cls.__qualname__, cls.__name__ = path, name, name
            setattr(found, name, cls)
        monkeypatch.setitem(sys.modules, path, found)
        return found

    return make


def composed(forward, **attributes):
    cls = type("C", (nn.Module,), {"forward": lambda self, z: forward(self, z)})

    def build():
        module = cls()
        module.__dict__.update(attributes)
        return module

    return cls, build


GELU_NEW = "0.5 * z * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * torch.pow(z, 3.0))))"
LIBRARY = [
    ("transformers.activations", "NewGELUActivation", lambda _, z: eval(GELU_NEW), {}, "gelu_new"),
    ("transformers.activations", "AccurateGELUActivation", lambda _, z: eval(GELU_NEW), {}, "gelu_new"),
    ("transformers.activations", "QuickGELUActivation", lambda _, z: z * torch.sigmoid(1.702 * z), {}, "quick_gelu"),
    ("transformers.activations", "GELUActivation", lambda s, z: s.act(z), {"act": F.gelu}, "gelu"),
    ("transformers.activations", "ClippedGELUActivation", lambda s, z: torch.clip(F.gelu(z), s.min, s.max),
     {"min": -10, "max": 10}, "gelu_clipped(min=-10, max=10)"),
    ("transformers.activations", "ReLUSquaredActivation", lambda _, z: torch.square(F.relu(z)), {}, "relu_squared"),
    ("transformers.activations", "LinearActivation", lambda _, z: z, {}, "identity"),
    ("transformers.activations", "PytorchGELUTanh", lambda _, z: F.gelu(z, approximate="tanh"), {}, "gelu_tanh"),
    ("timm.layers.activations", "Swish", lambda _, z: z.mul(z.sigmoid()), {}, "swish"),
    ("timm.layers.activations", "HardMish", lambda _, z: 0.5 * z * (z + 2).clamp(min=0, max=2), {}, "hard_mish"),
    ("timm.layers.activations", "HardSwish", lambda _, z: z.mul(F.relu6(z + 3.0).div_(6.0)), {}, "hard_swish"),
    ("timm.layers.activations", "Sigmoid", lambda _, z: z.sigmoid_(), {"inplace": True}, "sigmoid"),
    ("timm.models.layers.activations", "GELU", lambda _, z: F.gelu(z), {}, "gelu"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "name", "forward", "attributes", "expected"), LIBRARY, ids=[c[1] for c in LIBRARY])
def test_library_classes_by_name_and_by_what_they_compute(path, name, forward, attributes, expected, library):
    cls, build = composed(forward, **attributes)
    library(path, **{name: cls})
    assert str(recognise(build())) == expected
    # the same name, computing something else (in value, or in slope alone): another version, not recognised
    for changed in (lambda s, z: forward(s, z) * 1.001, lambda s, z: forward(s, z.clone()).detach() + (z - z.detach())):
        if expected != "identity" or changed(None, torch.ones(1)).item() != 1.0:
            other, build_other = composed(changed, **attributes)
            library(path, **{name: other})
            assert recognise(build_other()) is None


def test_library_classes_with_other_insides(library):
    """Known names whose attributes are not those known: no guess, and no error."""
    for name in ("GELUActivation", "GELUTanh", "MishActivation", "ClippedGELUActivation"):
        cls, build = composed(lambda _, z: F.gelu(z))
        library("transformers.activations", **{name: cls})
        assert recognise(build()) is None
    unknown, build = composed(lambda _, z: F.relu(z))
    library("transformers.activations", SqrtSoftplusActivation=unknown)
    assert recognise(build()) is None


def test_registering(library):
    spec = Spec("mirror", lambda z, by: by - z, params={"by": 1.0}, module_types=("my.net.Mirror",))
    try:
        register(spec)
        cls, build = composed(lambda s, z: s.by - z, by=3.0)
        library("my.net", Mirror=cls)
        assert str(recognise(build())) == "mirror(by=3)"
        with fl.settings(route="auto"):  # no kernel of that name: plain PyTorch
            assert affine_act(torch.ones(2), 1.0, 0.0, Activation("mirror", (3.0,))).tolist() == [2.0, 2.0]
        with pytest.raises(ValueError, match="already registered"):
            register(spec)
        with pytest.raises(ValueError, match="needs a backward"):
            register(Spec("mirror2", torch.tanh, keeps="output"))
    finally:
        SPECS.pop("mirror", None)
        _forget()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act", fl.activations())
def test_autocast_dtype_on_the_cpu(act, dtype):
    """CPU autocast runs none of them in float32; `tests/gpu` asks CUDA's."""
    with torch.autocast("cpu", dtype=dtype):
        expected = torch.float32 if "cpu" in get(act).spec.autocast_fp32 else dtype
        assert get(act)(torch.randn(4, dtype=dtype)).dtype == expected


@pytest.mark.parametrize("act", fl.activations())
def test_what_backward_keeps(act):
    """What eager saves of a float32 input, as the entry says; the composite gradient from it is eager's own."""
    found = activation(act)
    z = torch.linspace(-4, 4, 33, dtype=torch.float64, requires_grad=True)
    y = found(z)
    kept = (y if found.keeps == "output" else z).detach()
    g = torch.linspace(-1, 1, 33, dtype=torch.float64)
    if act == "identity":
        assert found.backward(g, kept) is g
    else:
        torch.testing.assert_close(found.backward(g, kept), torch.autograd.grad(y, z, g)[0], rtol=1e-12, atol=1e-14)
    if found.keeps == "output" and act != "identity":
        assert "result" in "".join(dir(y.grad_fn)), "eager keeps something else"


needs_kernels = pytest.mark.skipif(not kernels.interpreted(), reason="needs the interpreter (TRITON_INTERPRET=1)")
ODD = [math.nan, math.inf, -math.inf, 1e4, -1e4, 1e30, -1e30, 0.0, -0.0]
KINKS = [-3.0, 3.0, -2.0, 2.0, -1.0, 1.0, 0.5, -0.5, 6.0, -0.75, 1.25, 0.25, 10.0, -10.0, 4.0, 2.6666667, 20.0]


def value_and_slope(fn, z, dtype, device):
    """One element at a time: torch's vectorised CPU loops treat NaN unlike its scalar ones, and unlike CUDA."""
    x = torch.full((1,), z, dtype=dtype, device=device, requires_grad=True)
    y = fn(x)
    return y.item(), torch.autograd.grad(y, x, torch.full_like(y, 0.75))[0].item()


CHEAPER = ("gelu", "gelu_tanh", "quick_gelu", "silu")
"""Activations with a form of their own for half precision."""
HALVES = (torch.bfloat16, torch.float16)
PRECISIONS = [(act, dtype) for act in fl.activations() for dtype in (torch.float32, torch.float64)]
PRECISIONS += [(act, dtype) for act in CHEAPER for dtype in HALVES]


def named(cases):
    return [pytest.param(act, dtype, id=f"{act}-{str(dtype).removeprefix('torch.')}") for act, dtype in cases]


@needs_kernels
@pytest.mark.parametrize(("act", "dtype"), named(PRECISIONS))
def test_odd_values_and_kinks_as_eager(act, dtype):
    """NaN, infinities, +-1e4, +-1e30 and every kink, value and slope.

    Fails when relu uses `tl.maximum` (NaN), when hardtanh's gradient excludes its bounds, when softplus takes
    `exp(z)`, when gelu_clipped's clip excludes its bounds.
    """
    with fl.settings(route="triton"):
        for found in {activation(act), get(act)}:
            for z in ODD + KINKS:
                fused = value_and_slope(lambda x, a=found: affine_act(x, 1.0, 0.0, a), z, dtype, "cpu")
                eager = value_and_slope(found, z, dtype, "cpu")
                for a, b in zip(fused, eager, strict=True):
                    if math.isfinite(b):
                        limit = 1e-13 if dtype == torch.float64 else 8 * torch.finfo(dtype).eps
                        assert abs(a - b) <= limit * max(1.0, abs(b)), (z, fused, eager)
                    else:
                        assert a == b or (math.isnan(a) and math.isnan(b)), (z, fused, eager)


# float64 formulas that keep the tails where torch's own cancel to 0
TAILS = {
    "gelu": lambda z: z * 0.5 * torch.erfc(-z / math.sqrt(2)),
    "gelu_tanh": lambda z: z * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)),
}


@needs_kernels
@pytest.mark.parametrize(
    ("act", "dtype"),
    named(
        [(act, torch.float32) for act in (*CHEAPER, "mish", "softplus", "elu", "tanh", "tanhshrink")]
        + [(act, dtype) for act in CHEAPER for dtype in HALVES]
    ),
)
def test_accuracy_over_a_wide_grid(act, dtype):
    """In windows of a unit each over [-40, 40], so that no large value hides a small one's error.

    In half precision over [-12, 12]: past it GELU is below the least normal bfloat16, which the interpreter loses.

    Fails with the coefficients of Abramowitz & Stegun 7.1.26 (gelu), with (1 - e) / (1 + e) for tanh, with
    log(1 + e) in place of `_log1p`.
    """
    found = get(act)
    with fl.settings(route="triton"):
        reach = 12 if dtype in HALVES else 40
        for low in range(-reach, reach):
            z = torch.linspace(low, low + 1, 257).to(dtype).requires_grad_()
            exact = TAILS.get(act, found)
            results = []
            for fn, x in (
                (lambda x: affine_act(x, 1.0, 0.0, found), z),
                (found, z),
                (exact, z.detach().double().requires_grad_()),
            ):
                y = fn(x)
                results.append((y, torch.autograd.grad(y.sum(), x)[0]))
            for what, rows in zip(("value", "slope"), zip(*results, strict=True), strict=True):
                assert_accurate(*rows, what=f"{what} in [{low}, {low + 1}]")


def test_rrelu_still_draws_once_patched():
    """Good for evaluation where it is given to a function, it is left alone in a model, whose flag may change."""
    model = fl.patch_model(nn.Sequential(nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 8)).eval())
    x = torch.randn(5, 8)
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


def test_settings_of_the_tests_are_not_the_defaults():
    assert all(Activation(name).params != Activation(name, given).params for name, given in SETTINGS.items())
