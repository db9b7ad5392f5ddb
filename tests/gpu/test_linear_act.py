"""`tests/ops/test_linear_act.py` again, on a device."""

from tests.ops.test_linear_act import *  # noqa: F403
