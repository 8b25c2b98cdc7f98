"""Devices that are none: their code runs on the CPU, for tests where there is no GPU."""

from __future__ import annotations

TWIN = "cuda:twin"
UNCUT_TWIN = "cuda:uncut-twin"
"""The twin of a GPU, or of a driver, that cannot be cut."""


def is_twin(name: str) -> bool:
    """Whether a device is a twin, which needs nothing that a GPU does."""
    return name.endswith("twin")
