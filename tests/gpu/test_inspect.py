"""What `fusedlayers.inspect` sees, on a device."""

from tests.kernels.test_observer import *  # noqa: F403
