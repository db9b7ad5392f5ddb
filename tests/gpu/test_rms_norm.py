"""`tests/ops/test_rms_norm.py` on a device."""

from tests.ops.test_rms_norm import *  # noqa: F403
