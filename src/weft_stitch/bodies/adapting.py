"""Which weights of a base are which parameters of torch, and models that have adapters there: ``AdaptedBase``.

Exporters keep the names of parameters, or of the modules that nodes come from, but not always both: the weight of a
linear layer is often stored transposed, under a number. Names may begin deeper or less deep than those of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import NamedTuple

from weft.base.errors import StitchError
from weft_stitch.bodies.adapters import LoraAdapter
from weft_stitch.bodies.body import BodyStep
from weft_stitch.bodies.low_rank import LowRank
from weft_stitch.net import Array
from weft_stitch.reading.onnx_program import Constants, ModelProgram, ProgramNode

_PRODUCTS = ("MatMul", "Gemm")


class ReadPlace(NamedTuple):
    """Where a node reads a parameter."""

    node: int
    place: int
    turned: bool
    """Whether it lies there transposed."""


class AdaptedBase:
    """A base model, of which others have all but what their adapters hold."""

    def __init__(self, program: ModelProgram, walked: Sequence[int], constants: Constants) -> None:
        self._program, self._walked, self._constants = program, walked, constants
        self._places: dict[str, list[ReadPlace]] = {}
        for name, place in _named(program):
            self._places.setdefault(name, []).append(place)

    def named(self, name: str) -> ModelProgram:
        """The base as another model."""
        return replace(self._program, name=name)

    def adapt(self, steps: Sequence[BodyStep], task: int, adapter: LoraAdapter) -> None:
        """Have a model, so far the base, hold what its adapter does."""
        for parameter, array in adapter.weights.items():
            for each in self._found(parameter):
                self._put(steps, task, each, array.T if each.turned else array)
        for module, part in adapter.parts.items():
            for each in self._found(f"{module}.weight"):
                self._add(steps, task, each, part, module)

    def _found(self, parameter: str) -> list[ReadPlace]:
        """All places of a parameter, which may be called by the end of its name."""
        if parameter in self._places:
            return self._places[parameter]
        near = [each for each in self._places if "." in each and _ends_alike(each, parameter)]
        if len(near) != 1:
            like = near or get_close_matches(parameter, self._places, n=3, cutoff=0.4)
            has = f"it has {', '.join(like[:3])}" if like else "names of torch's modules are lost in it"
            way = "dynamo = False, which keeps biases of zeros" if parameter.endswith(".bias") else "torch.onnx"
            raise StitchError(f"{parameter} is not found in {self._program.name}: {has}; export the base by {way}")
        return self._places[near[0]]

    def _add(self, steps: Sequence[BodyStep], task: int, at: ReadPlace, part: LowRank, module: str) -> None:
        step = steps[self._walked[at.node]]
        key = step.contents[task][at.place]
        held = self._constants.arrays.get(key)
        if step.node.op not in _PRODUCTS or at.place != 1 or held is None:
            raise StitchError(f"{module} has an adapter, but {step.node.where} is no product with a stored weight")
        across = _is_across(step.node)
        shape = held.shape[::-1] if across else held.shape
        if shape != (len(part.down), part.up.shape[1]):
            made = f"{len(part.down)}x{part.up.shape[1]}"
            raise StitchError(f"the adapter of {module} is for a weight of {made}, not {shape[0]}x{shape[1]}")
        if step.node.op == "MatMul":
            step.parts[task] = part
            return
        whole = part.down @ part.up
        self._put(steps, task, at, held + (whole.T if across else whole))

    def _put(self, steps: Sequence[BodyStep], task: int, at: ReadPlace, array: Array) -> None:
        step = steps[self._walked[at.node]]
        contents = list(step.contents[task])
        contents[at.place] = self._constants.keep(array)
        step.contents[task] = tuple(contents)


def _ends_alike(one: str, other: str) -> bool:
    return one.endswith(f".{other}") or other.endswith(f".{one}")


def _named(program: ModelProgram) -> Iterator[tuple[str, ReadPlace]]:
    """The parameters that nodes read, by the names that torch has for them."""
    for number, node in enumerate(program.nodes):
        for place, name in enumerate(node.inputs):
            if name in program.constants:
                yield program.turned.get(name, name), ReadPlace(number, place, name in program.turned)
        if _is_nameless(node, program):
            yield f"{node.module}.weight", ReadPlace(number, 1, not _is_across(node))


def _is_nameless(node: ProgramNode, program: ModelProgram) -> bool:
    """Whether a product of a module reads a weight that has lost its name."""
    if node.op not in _PRODUCTS or not node.module or node.inputs[1] not in program.constants:
        return False
    return not program.turned.get(node.inputs[1], node.inputs[1]).endswith(".weight")


def _is_across(node: ProgramNode) -> bool:
    """Whether a product reads its weight as torch stores it, a row for each number that it makes."""
    return node.op == "Gemm" and bool(node.attributes.get("transB"))
