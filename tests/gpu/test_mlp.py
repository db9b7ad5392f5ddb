"""`tests/ops/test_mlp.py` again, on a device."""

from tests.ops.test_mlp import *  # noqa: F403
