"""Models with one body: their samples are mixed in the other process."""

from tests.serving.contracts.stitched import *  # noqa: F403
