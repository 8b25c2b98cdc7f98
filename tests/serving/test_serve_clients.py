"""What every client of the protocol sees, with models in the server's process."""

from tests.serving.contracts.clients import *  # noqa: F403
