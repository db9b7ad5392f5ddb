"""`batch_norm_act`'s tests again, on a device."""

from tests.ops.test_batch_norm_act import *  # noqa: F403
