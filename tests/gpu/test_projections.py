"""`tests/ops/test_projections.py` again, on a device."""

from tests.ops.test_projections import *  # noqa: F403
