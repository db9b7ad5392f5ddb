"""Values passed on by norms, again on a device."""

from tests.patch.test_passes import *  # noqa: F403
