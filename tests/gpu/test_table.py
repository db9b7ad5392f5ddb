"""Routing by measurement, on a device: the probes really run."""

from tests.ops.test_table import *  # noqa: F403
