"""Samples that leave early: batches are cut and joined in the other process."""

from tests.serving.contracts.exits import *  # noqa: F403
