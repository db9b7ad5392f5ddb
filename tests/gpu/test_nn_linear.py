"""`tests/nn/test_linear.py` again, on a device."""

from tests.nn.test_linear import *  # noqa: F403
