"""Every entry of the registry.

Names without an underscore inside a word (`hardswish`) are torch's own ops; `hard_swish`, `swish`, `gelu_new`, ... are
what libraries compose from several ops. They compute the same values, but differ from torch's op in what eager does at
a kink, at NaN, or under autocast (`pow` and `softplus` run in float32 there), so each is an entry of its own.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import Spec, register

aten = torch.ops.aten
_CUDA = frozenset({"cuda"})
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


def _gelu_new(z: Tensor) -> Tensor:
    return 0.5 * z * (1.0 + torch.tanh(_SQRT_2_OVER_PI * (z + 0.044715 * torch.pow(z, 3.0))))


def _gelu_fast(z: Tensor) -> Tensor:
    return 0.5 * z * (1.0 + torch.tanh(z * 0.7978845608 * (1.0 + 0.044715 * z * z)))


def _laplace(z: Tensor, mu: float, sigma: float) -> Tensor:
    return 0.5 * (1.0 + torch.erf((z - mu).div(sigma * math.sqrt(2.0))))


register(Spec("identity", lambda z: z, keeps="output", backward=lambda g, y: g, module_types=(nn.Identity,)))
register(
    Spec(
        "relu",
        F.relu,
        keeps="output",
        backward=lambda g, y: aten.threshold_backward(g, y, 0),
        module_types=(nn.ReLU,),
        functions=(F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_),
        methods=("relu", "relu_"),
    )
)
register(Spec("relu6", F.relu6, module_types=(nn.ReLU6,), functions=(F.relu6,)))
register(Spec("relu_squared", lambda z: torch.square(F.relu(z)), autocast_fp32=_CUDA))
register(
    Spec(
        "leaky_relu",
        F.leaky_relu,
        params={"negative_slope": 0.01},
        module_types=(nn.LeakyReLU,),
        functions=(F.leaky_relu, F.leaky_relu_),
    )
)
register(
    Spec(
        "rrelu",
        F.rrelu,
        params={"lower": 1.0 / 8.0, "upper": 1.0 / 3.0},
        requires={"training": False},
        positional=("lower", "upper", "training", "inplace"),
        module_types=(nn.RReLU,),
        functions=(F.rrelu, F.rrelu_, torch.rrelu, torch.rrelu_),
    )
)
register(
    Spec(
        "elu",
        F.elu,
        params={"alpha": 1.0},
        module_types=(nn.ELU,),
        functions=(F.elu, F.elu_),
    )
)
register(
    Spec(
        "celu",
        F.celu,
        params={"alpha": 1.0},
        accepts=lambda alpha: alpha != 0,
        module_types=(nn.CELU,),
        functions=(F.celu, F.celu_, torch.celu, torch.celu_),
    )
)
register(Spec("selu", F.selu, module_types=(nn.SELU,), functions=(F.selu, F.selu_, torch.selu, torch.selu_)))
register(
    Spec(
        "hardtanh",
        F.hardtanh,
        params={"min_val": -1.0, "max_val": 1.0},
        accepts=lambda low, high: low <= high,
        module_types=(nn.Hardtanh,),
        functions=(F.hardtanh, F.hardtanh_),
    )
)
register(
    Spec(
        "threshold",
        F.threshold,
        params={"threshold": 0.0, "value": 0.0},
        module_types=(nn.Threshold,),
        functions=(F.threshold, F.threshold_, torch.threshold, torch.threshold_),
    )
)
register(
    Spec(
        "gelu",
        F.gelu,
        requires={"approximate": "none"},
        positional=(),
        module_types=(nn.GELU,),
        functions=(F.gelu,),
    )
)
register(
    Spec(
        "gelu_tanh",
        lambda z: F.gelu(z, approximate="tanh"),
        requires={"approximate": "tanh"},
        positional=(),
        module_types=(nn.GELU,),
        functions=(F.gelu,),
    )
)
register(Spec("gelu_python", lambda z: z * 0.5 * (1.0 + torch.erf(z / math.sqrt(2.0))), kernel="gelu"))
register(Spec("gelu_new", _gelu_new, kernel="gelu_tanh", autocast_fp32=_CUDA))
register(Spec("gelu_fast", _gelu_fast))
register(
    Spec(
        "gelu_clipped",
        lambda z, low, high: torch.clip(F.gelu(z), low, high),
        params={"min": -10.0, "max": 10.0},
        accepts=lambda low, high: low <= high,
    )
)
register(Spec("quick_gelu", lambda z: z * torch.sigmoid(1.702 * z)))
register(Spec("laplace", _laplace, params={"mu": 0.707107, "sigma": 0.282095}, accepts=lambda mu, sigma: sigma > 0))
register(Spec("silu", F.silu, module_types=(nn.SiLU,), functions=(F.silu,)))
register(Spec("swish", lambda z: z.mul(z.sigmoid()), kernel="silu"))
register(Spec("mish", F.mish, module_types=(nn.Mish,), functions=(F.mish,)))
register(Spec("mish_softplus", lambda z: z.mul(F.softplus(z).tanh()), kernel="mish", autocast_fp32=_CUDA))
register(
    Spec(
        "sigmoid",
        torch.sigmoid,
        keeps="output",
        backward=aten.sigmoid_backward,
        module_types=(nn.Sigmoid,),
        functions=(torch.sigmoid, torch.special.expit, F.sigmoid, torch.sigmoid_, Tensor.sigmoid, Tensor.sigmoid_),
        methods=("sigmoid", "sigmoid_"),
        positional=(),
    )
)
register(Spec("logsigmoid", F.logsigmoid, positional=(), module_types=(nn.LogSigmoid,), functions=(F.logsigmoid,)))
register(
    Spec(
        "tanh",
        torch.tanh,
        keeps="output",
        backward=aten.tanh_backward,
        module_types=(nn.Tanh,),
        functions=(torch.tanh, F.tanh, torch.tanh_, Tensor.tanh, Tensor.tanh_),
        methods=("tanh", "tanh_"),
        positional=(),
    )
)
register(Spec("tanhshrink", F.tanhshrink, positional=(), module_types=(nn.Tanhshrink,), functions=(F.tanhshrink,)))
register(
    Spec(
        "softplus",
        F.softplus,
        params={"beta": 1.0, "threshold": 20.0},
        accepts=lambda beta, threshold: beta != 0,
        positional=("beta", "threshold"),
        module_types=(nn.Softplus,),
        functions=(F.softplus,),
        autocast_fp32=_CUDA,
    )
)
register(Spec("softsign", F.softsign, positional=(), module_types=(nn.Softsign,), functions=(F.softsign,)))
register(
    Spec(
        "hardshrink",
        F.hardshrink,
        params={"lambd": 0.5},
        positional=("lambd",),
        module_types=(nn.Hardshrink,),
        functions=(F.hardshrink, torch.hardshrink, Tensor.hardshrink),
        methods=("hardshrink",),
    )
)
register(
    Spec(
        "softshrink",
        F.softshrink,
        params={"lambd": 0.5},
        accepts=lambda lambd: lambd >= 0,
        positional=("lambd",),
        module_types=(nn.Softshrink,),
        functions=(F.softshrink,),
    )
)
register(Spec("hardsigmoid", F.hardsigmoid, module_types=(nn.Hardsigmoid,), functions=(F.hardsigmoid,)))
register(Spec("hard_sigmoid", lambda z: F.relu6(z + 3.0) / 6.0))
register(Spec("hardswish", F.hardswish, module_types=(nn.Hardswish,), functions=(F.hardswish,)))
register(Spec("hard_swish", lambda z: z.mul(F.relu6(z + 3.0).div(6.0))))
register(Spec("hard_mish", lambda z: 0.5 * z * (z + 2).clamp(min=0, max=2)))
