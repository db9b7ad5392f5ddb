"""`tests/ops/test_split_linear.py` again, on a device."""

from tests.ops.test_split_linear import *  # noqa: F403
