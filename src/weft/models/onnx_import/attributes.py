"""The plain attributes of a node, read by the type the caller needs: files do not always keep to theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from weft.errors import ModelError


@dataclass(frozen=True, slots=True)
class Attributes:
    """Integers, lists of them and texts by name; tensors and graphs are read where they are needed."""

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

    def _find(self, name: str, kind: int) -> Any:
        for each in self.node.attribute:
            if each.name == name:
                # The oldest files leave the type out.
                if each.type not in (kind, onnx.AttributeProto.UNDEFINED):
                    raise ModelError(f"its attribute {name!r} has the wrong type")
                return each
        return None
