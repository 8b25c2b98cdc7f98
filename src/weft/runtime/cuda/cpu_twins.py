"""Twins of GPUs: devices whose code runs on the CPU, for tests on machines without a GPU."""

from __future__ import annotations

TWIN = "cuda:twin"
UNCUT_TWIN = "cuda:uncut-twin"
"""The twin of a GPU with an old driver, which cannot be cut and has no gates."""
TORCH_TWIN = "cuda:torch-twin"
"""The twin of a GPU on a machine without onnxruntime-gpu."""


def is_twin(name: str) -> bool:
    """Whether the name of a device is that of a twin, which needs no GPU and no additional packages."""
    return name.endswith("twin")
