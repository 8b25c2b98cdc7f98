"""Twins of GPUs: devices whose code runs on the CPU, for tests on machines without a GPU."""

from __future__ import annotations

TWIN = "cuda:twin"
UNCUT_TWIN = "cuda:uncut-twin"
"""The twin of a GPU, or of a driver, that cannot be cut."""


def is_twin(name: str) -> bool:
    """Whether a device is a twin, for which nothing has to be installed."""
    return name.endswith("twin")
