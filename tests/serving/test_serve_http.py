"""What only a client over HTTP sees, with models in the server's process."""

from tests.serving.contracts.http import *  # noqa: F403
