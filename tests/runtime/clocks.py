"""Clocks of the tests' own: what a model is measured to take, and so how it is cut, is said by the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from weft.runtime.onnxruntime_cpu import preparing

ANY_LENGTH_S = 1e-9
"""A grain that every model is longer than, on any machine: it is cut wherever it can be, or into the most pieces."""
NO_LENGTH_S = 1e6
"""A grain that no model reaches: it stays whole."""


_said: list[float] = []


def said() -> float | None:
    """What segments are said to take now; for those who measure elsewhere."""
    return _said[-1] if _said else None


@contextmanager
def said_times(segment_s: float = 0.001) -> Iterator[None]:
    """A model prepared in here, and each segment of it, takes *segment_s* at any batch size; its nodes are alike."""
    profile = preparing.profile

    def alike(*args: Any) -> Any:
        found = profile(*args)
        return replace(found, times_s=(segment_s,) * len(found.times_s))

    def clock(_: int) -> Callable[[], float]:
        readings = count()
        return lambda: next(readings) * segment_s

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "clock_for", clock)
        patch.setattr(preparing, "profile", alike)
        _said.append(segment_s)
        try:
            yield
        finally:
            _said.pop()
