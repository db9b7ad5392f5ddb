"""`tests/ops/test_split_heads.py` again, on a device."""

from tests.ops.test_split_heads import *  # noqa: F403
