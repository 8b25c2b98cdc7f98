"""Engines of a model on a GPU, by the names that the setting ``engine`` takes; settings read them without numpy."""

from __future__ import annotations

from typing import Literal

Engine = Literal["onnxruntime", "compiled", "auto"]
"""``auto``: the compiled engine if its answers are right and it is faster, else ONNX Runtime."""
ONNXRUNTIME: Engine = "onnxruntime"
COMPILED: Engine = "compiled"
AUTO: Engine = "auto"
