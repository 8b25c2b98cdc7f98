"""Kernels of tuned models as codes: few different numbers, each in few bits, with a table of them: ``in_codes``.

Stitching takes apart and puts together the weights of its models, and what it makes of weights in few bits are arrays
of few different numbers. They are stored in as many bits as tell those apart, which loses nothing; operators that every
runtime has take them out again, once, when a session is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from weft_stitch.counts import kernel_names
from weft_stitch.graph import Graph, GraphStep
from weft_stitch.net import Array

MOST_BITS = 12
"""Several formats of 8 bits in one array are a little more than that."""
TOGETHER = 8
"""So many codes of n bits are n bytes."""
STEPS_BYTES = 1200
"""About what the operators take in a file."""
_INT32 = 6
"""The number of the type in ONNX."""


class CodedArray(NamedTuple):
    """An array as codes; eight of them fill a row of *octets*."""

    octets: Array
    table: Array
    shape: tuple[int, ...]

    @property
    def bits(self) -> int:
        return int(self.octets.shape[1])

    @property
    def nbytes(self) -> int:
        return int(self.octets.nbytes + self.table.nbytes)


def coded(array: Array) -> CodedArray | None:
    """*array* as codes, if that takes less room."""
    if array.dtype != np.float32 or array.nbytes <= STEPS_BYTES:
        return None
    table, places = np.unique(array, return_inverse=True)
    bits = max(1, int(len(table) - 1).bit_length())
    if bits > MOST_BITS:
        return None
    found = CodedArray(packed(places.reshape(-1), bits), table, array.shape)
    return found if found.nbytes + STEPS_BYTES < array.nbytes else None


def packed(codes: Array, bits: int) -> Array:
    """Codes without gaps, eight of them in a row of *bits* bytes; the last row is filled up with zeros.

    Bit i of code k is bit (k bits + i) mod 8 of byte (k bits + i) // 8, as ``weft tune`` packs them.
    """
    rows = np.zeros((-(-codes.size // TOGETHER), TOGETHER), np.uint16)  # wide enough for MOST_BITS
    rows.reshape(-1)[: codes.size] = codes
    unpacked = (rows[:, :, None] >> np.arange(bits, dtype=np.uint16)).astype(np.uint8) & 1
    return np.packbits(unpacked.reshape(len(rows), -1), axis=1, bitorder="little")


def coded_kernels(graph: Graph) -> dict[str, CodedArray]:
    """The weights of a graph of tuned models that are better kept as codes."""
    if not graph.tuned:
        return {}
    found = {name: coded(graph.constants[name]) for name in sorted(kernel_names(graph))}
    return {name: each for name, each in found.items() if each is not None}


def stored_bytes(graph: Graph) -> dict[str, int]:
    """What the weights that are kept as codes take."""
    return {name: each.nbytes for name, each in coded_kernels(graph).items()}


def in_codes(graph: Graph, kernels: Mapping[str, CodedArray]) -> Graph:
    """*graph* with *kernels* stored as codes, and the steps that make the weights of them before its own."""
    constants = {name: array for name, array in graph.constants.items() if name not in kernels}
    shapes, steps = dict(graph.shapes), list[GraphStep]()
    for name, each in kernels.items():
        decoding = _Decoding(name, each)
        constants |= decoding.constants
        steps += decoding.steps
        shapes |= dict.fromkeys((step.outputs[0] for step in decoding.steps), each.shape)
    weights = graph.weights & constants.keys()
    return replace(graph, constants=constants, weights=weights, steps=(*steps, *graph.steps), shapes=shapes)


def notes(graph: Graph, kernels: Mapping[str, CodedArray]) -> dict[str, str]:
    """What a file of tuned models says of the bits in it, for who prices it; nothing of others."""
    if not graph.tuned:
        return {}
    from weft.models.onnx_import.widths import Widths, noted

    read = ((step.outputs[0], step.inputs[1]) for step in graph.steps if len(step.inputs) > 1)
    return noted({node: Widths(kernels[name].bits) for node, name in read if name in kernels}, graph.rounded)


class _Decoding:
    """The steps from codes to an array. A code lies in two or three neighbouring bytes; a division and a remainder cut
    it out."""

    def __init__(self, name: str, codes: CodedArray) -> None:
        self.constants: dict[str, Array] = {f"{name}.codes": codes.octets, f"{name}.table": codes.table}
        self.steps: list[GraphStep] = []
        self._name, bits = name, codes.bits
        begins = bits * np.arange(TOGETHER)
        octets = self._do("Cast", f"{name}.codes", to=_INT32)
        whole = ""
        for place in range(2 if bits <= 9 else 3):
            each = self._do("Gather", octets, self._whole(np.minimum(begins // 8 + place, bits - 1)), axis=1)
            high = self._do("Mul", each, self._whole(256**place)) if place else each
            whole = self._do("Add", whole, high) if whole else high
        cut = self._do("Div", whole, self._whole(2 ** (begins % 8)))
        numbers = self._do("Gather", f"{name}.table", self._do("Mod", cut, self._whole(1 << bits)), axis=0)
        flat = self._do("Reshape", numbers, self._whole([-1], np.int64))
        exact = self._do("Slice", flat, self._whole([0]), self._whole([prod(codes.shape)]))
        self._do("Reshape", exact, self._whole(list(codes.shape), np.int64), output=name)

    def _do(self, op: str, *inputs: str, output: str = "", **attributes: int) -> str:
        made = output or f"{self._name}.{op.lower()}{len(self.steps)}"
        self.steps.append(GraphStep(op, inputs, (made,), attributes))
        return made

    def _whole(self, values: object, kind: type[np.signedinteger] = np.int32) -> str:
        array = np.asarray(values, kind)
        name = f"codes.{array.dtype}.{'x'.join(map(str, array.reshape(-1)))}.{array.ndim}"
        self.constants[name] = array
        return name
