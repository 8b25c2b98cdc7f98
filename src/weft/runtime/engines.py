"""Engines of a model on a GPU, by the names that the setting ``engine`` takes; settings read them without numpy."""

from __future__ import annotations

from typing import Literal

Engine = Literal["onnxruntime", "compiled", "auto"]
"""``auto`` takes the compiled engine where it is right and faster."""
ONNXRUNTIME: Engine = "onnxruntime"
COMPILED: Engine = "compiled"
