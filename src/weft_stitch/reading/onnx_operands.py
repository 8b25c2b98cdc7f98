"""What a handler of an ONNX operator may know: ``Operands``, the node with the values and constants it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft.base.errors import ModelError
from weft_stitch.net import Array, finite
from weft_stitch.reading.draft import Foreign, NetDraft, Picture
from weft_stitch.reading.onnx_folding import float32
from weft_stitch.reading.onnx_source import SourceNode


@dataclass(frozen=True, eq=False)
class Operands:
    """What a handler may know: the node, what it reads, and the draft to write in."""

    node: SourceNode
    draft: NetDraft
    pictures: Mapping[str, Picture]
    constants: Mapping[str, Array]
    rows: int
    opset: int
    coarse: bool
    """Whether the file is in half precision."""

    @property
    def name(self) -> str:
        return self.node.name

    def given(self, index: int) -> bool:
        return index < len(self.node.inputs) and bool(self.node.inputs[index])

    def picture(self, index: int = 0) -> Picture:
        self._require(index)
        found = self.pictures.get(self.node.inputs[index])
        if found is None:
            raise Foreign(f"its input {self.node.inputs[index]} is a constant")
        return found

    def is_constant(self, index: int) -> bool:
        self._require(index)
        return self.node.inputs[index] in self.constants

    def array(self, index: int) -> Array:
        """A constant as it is stored."""
        if not self.is_constant(index):
            raise Foreign(f"its input {self.node.inputs[index]} is computed from the model's inputs")
        return self.constants[self.node.inputs[index]]

    def integers(self, index: int) -> tuple[int, ...]:
        found = self.array(index)
        if found.dtype.kind not in "iu":
            raise ModelError(f"{self.node.inputs[index]} should hold integers and holds {found.dtype}")
        return tuple(int(each) for each in found.reshape(-1))

    def weight(self, index: int) -> Array:
        """A constant as float32, every number of it finite."""
        tensor = self.node.inputs[index] if self.given(index) else ""
        array = float32(self.array(index), tensor)
        if not finite(array):
            raise ModelError(f"its tensor {tensor} holds numbers that are not finite in float32")
        return array

    def optional_weight(self, index: int) -> Array | None:
        return self.weight(index) if self.given(index) else None

    def _require(self, index: int) -> None:
        if not self.given(index):
            raise ModelError(f"its input {index + 1} is missing")


Handler = Callable[[Operands], Picture]
