"""`tests/ops/test_gated.py` again, on a device."""

from tests.ops.test_gated import *  # noqa: F403
