"""`tests/nn/test_mlp.py` again, on a device."""

from tests.nn.test_mlp import *  # noqa: F403
