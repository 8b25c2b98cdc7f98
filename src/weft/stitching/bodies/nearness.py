"""Weights that are near those of another model, as both were made from one base: ``Reference`` finds them.

A product whose weights differ from the reference's by a low-rank part reads the reference's from then on, and keeps the
part. Models are brought near one after another, so that no more than one is held besides what comes of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from weft.stitching.bodies.body import BodyStep
from weft.stitching.bodies.low_rank import low_rank
from weft.stitching.net import Array
from weft.stitching.reading.onnx_program import Constants


class Reference:
    """The weights of one model, or of the base of all, by the number of a step."""

    def __init__(self, steps: Sequence[BodyStep], task: int, constants: Constants) -> None:
        self._constants = constants
        self._keys: Mapping[int, str] = {
            number: step.contents[task][1] for number, step in enumerate(steps) if _is_product(step, task)
        }

    def bring_near(self, steps: Sequence[BodyStep], task: int, tolerance: float) -> None:
        """Have products of *task* read the reference's weights, where all but *tolerance* of a weight is told so."""
        left = set()
        for number, step in enumerate(steps):
            if number not in self._keys or not _is_product(step, task):
                continue
            near, mine = self._weight(self._keys[number]), self._weight(step.contents[task][1])
            if near is None or mine is None or near.shape != mine.shape or step.contents[task][1] == self._keys[number]:
                continue
            part = low_rank(mine - near, tolerance * float(np.linalg.norm(mine)))
            if part is not None:
                left.add(step.contents[task][1])
                step.contents[task] = ("", self._keys[number])
                if part.rank:
                    step.parts[task] = part
        read = {key for step in steps for keys in step.contents.values() for key in keys}
        self._constants.forget(left - read - set(self._keys.values()))

    def _weight(self, key: str) -> Array | None:
        found = self._constants.arrays.get(key)
        return found if found is not None and found.ndim == 2 and found.dtype == np.float32 else None


def _is_product(step: BodyStep, task: int) -> bool:
    """Whether a step multiplies what it reads by weights."""
    return step.node.op == "MatMul" and task in step.contents and step.inputs[0] is not None and step.inputs[1] is None
