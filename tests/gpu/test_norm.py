"""`tests/nn/test_norm.py` on a device."""

from tests.nn.test_norm import *  # noqa: F403
