"""`group_norm_act`'s tests again, on a device."""

from tests.ops.test_group_norm_act import *  # noqa: F403
