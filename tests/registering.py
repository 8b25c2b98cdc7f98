"""A tool that exists in this process only, for tests of what tools register."""

from __future__ import annotations

from functools import cache

import pytest

from weft.base import registry
from weft.base.registry import Registry, Tool


def register(patch: pytest.MonkeyPatch, section: str, name: str, target: str, **about: str) -> None:
    """Have a tool named as its entry, which registers this one, until *patch* is undone."""
    before = registry.registry()
    tool = Tool("tests", f"tests {name}", "", "", (), False, {section: {name: {"target": target, **about}}})
    patch.setattr(registry, "registry", cache(lambda: Registry((*before.tools, tool), before.problems)))
