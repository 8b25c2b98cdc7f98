"""Islands for any number of rows: ``follow`` finds where the rows are in every tensor, and frees what reshapes ask for.

A file that was exported for some number of rows has it in the shapes it reshapes to. Where the rows are outermost, the
number can be left to whoever runs the island; where they are not, the island is tied to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx
from onnx import helper

from weft_stitch.graph import DYNAMIC
from weft_stitch.net import Array
from weft_stitch.reading.draft import Shape


class Followed(NamedTuple):
    """The nodes of an island, fit for any number of rows as far as that goes."""

    nodes: list[onnx.NodeProto]
    constants: dict[str, Array]
    shapes: dict[str, Shape]
    """Shapes of what is written, as far as they are known; the rows are ``DYNAMIC``."""
    tied: str
    """The first node that works for the file's number of rows only, with its operator; empty if there is none."""


def follow(
    nodes: Sequence[onnx.NodeProto],
    constants: Mapping[str, Array],
    inputs: Sequence[str],
    shape_of: Callable[[str], Shape | None],
    rows: int,
) -> Followed:
    """Follow the rows of *inputs*, where they come first, through *nodes*, which are in order."""
    walk = _RowsWalk(dict(constants), shape_of, rows, dict.fromkeys(inputs, 0))
    kept = [walk.over(node) for node in nodes]
    return Followed(kept, walk.constants, walk.shapes, walk.tied)


class _RowsWalk:
    def __init__(
        self,
        constants: dict[str, Array],
        shape_of: Callable[[str], Shape | None],
        rows: int,
        places: dict[str, int | None],
    ) -> None:
        self.constants = constants
        self.shapes: dict[str, Shape] = {}
        self.tied = ""
        self._shape_of = shape_of
        self._rows = rows
        self._places = places
        """Tensor -> the dimension whose outermost part are the rows; none where it cannot be told."""

    def over(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """*node*, freed if it has to be."""
        read = next((each for each in node.input if each in self._places), None)
        if read is None:
            place = None
        elif node.op_type == "Reshape" and node.input[1] in self.constants:
            node, place = self._reshape(node)
        elif node.op_type == "Expand" and node.input[1] in self.constants:
            node, place = self._expand(node)
        else:
            place = self._moved(node, read)
        for name in filter(None, node.output):
            if read is not None:
                self._places[name] = place
            self._keep_shape(name, place)
        return node

    def _keep_shape(self, name: str, place: int | None) -> None:
        shape = self._shape_of(name)
        if shape is not None:
            sizes = enumerate(shape)
            self.shapes[name] = tuple(DYNAMIC if at == place and size == self._rows else size for at, size in sizes)

    def _reshape(self, node: onnx.NodeProto) -> tuple[onnx.NodeProto, int | None]:
        target = self.constants[node.input[1]].astype(np.int64).ravel()
        place, before = self._places.get(node.input[0]), self._shape_of(node.input[0])
        exact = any(each.name == "allowzero" and each.i for each in node.attribute)
        if place is None or before is None or not len(target):
            return node, None
        keeps = target[0] == 0 and not exact
        if place == 0 and (target[0] == -1 or keeps):
            return node, 0
        if place == 0 and target[0] == before[0] == self._rows and not (exact and (target == 0).any()):
            return self._aimed(node, 0, 0), 0
        if place == 0 and target[0] % self._rows == 0 and (target > 0).all():
            return self._aimed(node, 0, -1), 0
        if (target > 0).all():
            self.tied = self.tied or f"{node.name or node.output[0]} (Reshape)"
        return node, None

    def _expand(self, node: onnx.NodeProto) -> tuple[onnx.NodeProto, int | None]:
        place, before = self._places.get(node.input[0]), self._shape_of(node.input[0])
        target = self.constants[node.input[1]]
        if place is None or before is None:
            return node, None
        place += max(0, len(target) - len(before))
        at = place - max(0, len(before) - len(target))
        return (self._aimed(node, at, 1) if at >= 0 and target[at] == self._rows else node), place

    def _aimed(self, node: onnx.NodeProto, at: int, size: int) -> onnx.NodeProto:
        """*node* with another size in the shape it asks for."""
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        del copy.attribute[:]
        copy.input[1] = f"{node.input[1]}.{node.output[0]}"
        target = self.constants[node.input[1]].astype(np.int64).ravel()
        target[at] = size
        self.constants[copy.input[1]] = target
        return copy

    def _moved(self, node: onnx.NodeProto, read: str) -> int | None:
        """Where other operators have the rows that *read* brings them."""
        place, before = self._places[read], self._shape_of(read)
        settings = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        if place is None or before is None:
            return None
        rank = len(before)
        if node.op_type == "Transpose":
            order = list(settings.get("perm", reversed(range(rank))))
            return order.index(place) if place in order else None
        if node.op_type == "Gather":
            axis = settings.get("axis", 0) % rank
            taken = self.constants.get(node.input[1])
            if taken is None or axis == place:
                return None
            return place + (taken.ndim - 1 if axis < place else 0)
        if node.op_type == "Unsqueeze":
            axes = {each % (rank + len(self._axes(node, settings))) for each in self._axes(node, settings)}
            free = [at for at in range(rank + len(axes)) if at not in axes]
            return free[place]
        if node.op_type == "Squeeze" or (node.op_type.startswith("Reduce") and not settings.get("keepdims", 1)):
            axes = {each % rank for each in self._axes(node, settings)}
            return None if place in axes or not axes else place - sum(each < place for each in axes)
        after = self._shape_of(node.output[0])
        return None if after is None or len(after) < rank else place + len(after) - rank

    def _axes(self, node: onnx.NodeProto, settings: Mapping[str, Sequence[int]]) -> list[int]:
        stored = self.constants.get(node.input[1]) if len(node.input) > 1 else None
        return list(settings.get("axes", ())) if stored is None else [int(each) for each in stored.ravel()]
