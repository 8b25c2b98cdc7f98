"""A converted model in pieces for the compiler: where it is cut, and each piece as a program of its own.

Cuts are named by nodes of the exported program, which has the same nodes at all batch sizes. A cut is allowed where
every tensor that crosses it has a row for each sample, so that batches can be split and joined there. A model with
exits is always cut at them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from weft.base.errors import ModelError
from weft.runtime import cutting
from weft.runtime.cuda import node_costs
from weft.runtime.cuda.packages import CompiledPiece
from weft.runtime.cuda.torch_modules import PieceModule, without_gaps
from weft.runtime.cuda.torch_program import TorchProgram, without_writing

CROSSING = "cut."
"""Begins the names of tensors between pieces; the rest is the node in the exported program."""


class TracedPiece(NamedTuple):
    """A piece as the compiler takes it."""

    names: CompiledPiece
    shapes: tuple[tuple[int, ...], ...]  # of the inputs
    exported: Any


class CutProgram:
    """An exported model at one batch size, with a run on example inputs that shows its tensors."""

    def __init__(self, exported: Any, examples: Sequence[Any], names: CompiledPiece, *, exits: bool = False) -> None:
        """names: of the inputs and outputs in the model's file, in order. exits: whether its outputs are exits."""
        device = str(examples[0].device)
        self._program = TorchProgram(without_writing(exported), device, exits=exits)
        with torch.inference_mode():
            self._program.hold({name: weight.to(device) for name, weight in self._program.weights.items()})
            values = {tensor.name: value for tensor, value in zip(self._program.inputs, examples, strict=True)}
            self._tensors, self._guesses_s = self._program.observed_values(values)
        self._examples, self._rows = values, examples[0].shape[0] if examples[0].dim() else 1
        named = zip((*self._program.inputs, *self._program.outputs), (*names.inputs, *names.outputs), strict=True)
        self._file_names = {tensor.name: name for tensor, name in named}

    def choose_cuts(self, lengths_s: Sequence[float], grain_s: float, max_pieces: int) -> tuple[str, ...]:
        """The nodes before which to cut the model into pieces of at most *grain_s*, besides its cuts at exits.

        lengths_s: the seconds that it takes from exit to exit; one number for a model without exits.
        """
        exit_cuts = self._program.exit_cuts
        scaled = node_costs.scaled(self._guesses_s, exit_cuts, lengths_s)
        sizes_bytes = {name: _bytes(value) for name, value in self._tensors.items()}
        allowed = [
            None if rowless else crossing
            for rowless, crossing in zip(self._rowless_crossing(), self._program.crossing(sizes_bytes), strict=True)
        ]
        cuts = cutting.choose_cuts(scaled, allowed, grain_s, max_pieces, exit_cuts)
        return tuple(self._program.nodes[cut].name for cut in cuts if cut not in exit_cuts)

    def _rowless_crossing(self) -> list[int]:
        """For each cut, the number of tensors that cross it without a row for each sample."""
        nodes, last_use = self._program.nodes, self._program.last_use
        changes = [0] * (len(nodes) + 2)
        for index, node in enumerate(nodes):
            value = self._tensors[node.name]
            if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == self._rows:
                continue
            changes[index + 1] += 1
            changes[max(index, last_use.get(node.name, index)) + 1] -= 1
        counts = list(accumulate(changes))[: len(nodes) + 1]
        return [0, *counts[1:-1], 0]  # the ends are no cuts

    def pieces(self, cuts: Sequence[str]) -> Iterator[TracedPiece]:
        """Yield the pieces between *cuts* and exits; ``ModelError`` if the program has no such node."""
        positions = {node.name: position for position, node in enumerate(self._program.nodes)}
        if unknown := [name for name in cuts if name not in positions]:
            raise ModelError(f"its program for {self._rows} rows has no node {unknown[0]!r}, where others are cut")
        inner = {*self._program.exit_cuts, *(positions[name] for name in cuts)}
        for start, end in pairwise((0, *sorted(inner), len(self._program.nodes))):
            piece = self._program.piece(start, end)
            examples = tuple(self._example(name) for name in piece.inputs)
            names = CompiledPiece(inputs=self._names(piece.inputs), outputs=self._names(piece.outputs))
            shapes = tuple(tuple(example.shape) for example in examples)
            module = PieceModule(self._program, piece)
            yield TracedPiece(names, shapes, torch.export.export(module, examples, strict=False))

    def channels_last(self) -> frozenset[str]:
        """Names of the tensors whose channels come last in memory, as pieces call them."""
        return frozenset(self._names(self._program.channels_last))

    def _example(self, name: str) -> Any:
        """A value as it will be in memory between pieces."""
        if name in self._examples:
            return self._examples[name]
        return without_gaps(self._tensors[name], channels_last=name in self._program.channels_last)

    def _names(self, names: Any) -> tuple[str, ...]:
        return tuple(self._file_names.get(name, f"{CROSSING}{name}") for name in names)


def _bytes(value: Any) -> int:
    return int(value.numel() * value.element_size()) if isinstance(value, torch.Tensor) else 0
