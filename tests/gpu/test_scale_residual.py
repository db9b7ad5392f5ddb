"""The tests of `scale_residual` and its layer again, on a device."""

from tests.ops.test_scale_residual import *  # noqa: F403
