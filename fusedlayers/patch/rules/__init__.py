"""The built-in rules, one a file, registered by the same means a user's are. Importing this registers them."""

from . import linear_act  # noqa: F401
