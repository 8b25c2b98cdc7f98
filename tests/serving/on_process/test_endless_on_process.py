"""A request that never ends: it is stopped in the other process, and nothing else is."""

from tests.serving.contracts.endless import *  # noqa: F403
