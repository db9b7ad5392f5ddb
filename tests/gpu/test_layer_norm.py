"""`tests/ops/test_layer_norm.py` on a device."""

from tests.ops.test_layer_norm import *  # noqa: F403
