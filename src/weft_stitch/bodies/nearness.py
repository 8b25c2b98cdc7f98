"""Weights that are near those of another model, as both were made from one base: ``Reference`` finds them.

A product or table that differs from the reference's in few columns, rows or lines reads the reference's from then on,
and keeps what is its own; if something may be lost, also one that differs by a scale or a low-rank part. Models are
brought near one after another, so that no more than one is held besides what comes of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from weft_stitch.bodies.body import BodyStep
from weft_stitch.bodies.few import OwnLines, own_lines, replaced, scaled
from weft_stitch.bodies.low_rank import LowRank, low_rank
from weft_stitch.net import Array
from weft_stitch.reading.onnx_program import Constants


class Reference:
    """The weights of one model, or of the base of all, by the number of a step."""

    def __init__(self, steps: Sequence[BodyStep], task: int, constants: Constants) -> None:
        self._constants = constants
        self._keys: Mapping[int, str] = {
            number: step.contents[task][place]
            for number, step in enumerate(steps)
            if (place := _weight_place(step, task)) is not None
        }
        self._found: dict[tuple[str, str, int], LowRank | OwnLines | None] = {}
        """What was found of a weight beside the reference's."""

    def bring_near(self, steps: Sequence[BodyStep], task: int, tolerance: float) -> None:
        """Have *task* read the reference's weights, where all but *tolerance* of a weight is told so."""
        left = set()
        for number, step in enumerate(steps):
            place = _weight_place(step, task)
            if place is None or number not in self._keys:
                continue
            mine, near = step.contents[task][place], self._keys[number]
            part = self._part(near, mine, place, tolerance) if mine != near else None
            if part is None:
                continue
            left.add(mine)
            step.contents[task] = ("", near) if place else (near, "")
            if isinstance(part, OwnLines):
                step.lines[task] = part
            elif part.rank or part.kind != "low rank":
                step.parts[task] = part
        read = {key for step in steps for keys in step.contents.values() for key in keys}
        self._constants.forget(left - read - set(self._keys.values()))

    def _part(self, near: str, mine: str, place: int, tolerance: float) -> LowRank | OwnLines | None:
        key = near, mine, place
        if key not in self._found:
            one, other = self._weight(near), self._weight(mine)
            self._found[key] = None if one is None or other is None else _between(one, other, place, tolerance)
        return self._found[key]

    def _weight(self, key: str) -> Array | None:
        found = self._constants.arrays.get(key)
        return found if found is not None and found.ndim == 2 and found.dtype == np.float32 else None


def _between(near: Array, mine: Array, place: int, tolerance: float) -> LowRank | OwnLines | None:
    """What makes *mine* of *near*, the first that does."""
    if not place:
        return own_lines(near, mine)
    if near.shape != mine.shape:
        return None
    allowed = tolerance * float(np.linalg.norm(mine))
    found = replaced(near, mine)
    if found is None and tolerance:
        found = scaled(near, mine, allowed) or low_rank(mine - near, allowed)
    return found


def _weight_place(step: BodyStep, task: int) -> int | None:
    """Which input of a step is a weight that values are multiplied by, or a table that they are looked up in."""
    if task not in step.contents or len(step.inputs) != 2:
        return None
    place = {"MatMul": 1, "Gather": 0}.get(step.node.op)
    if place is None or step.inputs[place] is not None or step.inputs[1 - place] is None:
        return None
    return None if not place and step.node.attributes.get("axis", 0) else place
