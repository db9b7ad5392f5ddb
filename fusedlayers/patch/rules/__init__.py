"""The built-in rules, one a file, registered by the same means a user's are. Importing this registers them."""

from . import batch_norm, conv_act, group_norm, layer_norm, linear_act, mlp, residual, transformer  # noqa: F401
