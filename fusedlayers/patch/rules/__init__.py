"""The built-in rules, one a file, registered by the same means a user's are. Importing this registers them."""

from . import (  # noqa: F401
    add_act,
    batch_norm,
    batch_norm_act,
    chunked,
    conv1d,
    conv_act,
    frozen_batch_norm,
    group_norm,
    layer_norm,
    layer_norm_2d,
    linear_act,
    low_norm,
    mlp,
    projections,
    residual,
    rms_forms,
    split_heads,
    t5,
    timm_norms,
    transformer,
)
