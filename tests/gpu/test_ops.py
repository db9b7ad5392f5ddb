"""The op tests again, on a device."""

from tests.ops.test_affine_act import *  # noqa: F403
