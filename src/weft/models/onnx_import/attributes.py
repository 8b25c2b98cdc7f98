"""The plain attributes of a node, read by the type the caller needs: files do not always keep to theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from weft.base.errors import ModelError


@dataclass(frozen=True, slots=True)
class Attributes:
    """Numbers, lists of integers, texts and tensors by name; graphs are read where they are needed."""

    node: onnx.NodeProto

    def integer(self, name: str, default: int) -> int:
        found = self._find(name, onnx.AttributeProto.INT)
        return default if found is None else int(found.i)

    def integers(self, name: str, default: Sequence[int]) -> tuple[int, ...]:
        found = self._find(name, onnx.AttributeProto.INTS)
        return tuple(default) if found is None else tuple(found.ints)

    def text(self, name: str) -> str:
        found = self._find(name, onnx.AttributeProto.STRING)
        return "" if found is None else found.s.decode("utf-8", "replace")

    def number(self, name: str) -> float | None:
        found = self._find(name, onnx.AttributeProto.FLOAT)
        return None if found is None else float(found.f)

    def tensor(self, name: str) -> onnx.TensorProto | None:
        found: onnx.AttributeProto | None = self._find(name, onnx.AttributeProto.TENSOR)
        return None if found is None else found.t

    def length(self, name: str) -> int:
        """How many values a list holds, whatever they are."""
        found = next((each for each in self.node.attribute if each.name == name), None)
        return 0 if found is None else max(len(found.ints), len(found.floats), len(found.strings))

    def has(self, name: str) -> bool:
        return any(each.name == name for each in self.node.attribute)

    def _find(self, name: str, kind: int) -> Any:
        for each in self.node.attribute:
            if each.name == name:
                # The oldest files leave the type out.
                if each.type not in (kind, onnx.AttributeProto.UNDEFINED):
                    raise ModelError(f"its attribute {name!r} has the wrong type")
                return each
        return None
