"""The matrix, the property suite and all that autograd users do, again on a device."""

from tests.modes.test_autograd import *  # noqa: F403
from tests.modes.test_buffers import *  # noqa: F403
from tests.modes.test_matrix import *  # noqa: F403
from tests.modes.test_transforms import *  # noqa: F403
from tests.properties.test_properties import *  # noqa: F403
