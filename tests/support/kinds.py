"""A kind of model files of another package, registered for a test."""

from __future__ import annotations

from typing import Any

import pytest

from weft.base.registry import Entry, Tool, registered
from weft.runtime import metadata


def register(patch: pytest.MonkeyPatch, target: str, **about: Any) -> None:
    """Have another package's kind beside those there are."""
    tool = Tool("other", "other", "", "other[gpu]", (), False, {})
    kinds = {**registered("model_kinds"), "other": Entry(tool, "other", target, {"devices": ["cuda"], **about})}
    patch.setattr(metadata, "registered", {"model_kinds": kinds}.__getitem__)
