"""Cuts of a graph: at outputs that are exits, and at block ends.

An exit's subnet holds the nodes that its output needs and no earlier exit needed. At a block end, a single activation
is passed on to the later layers; there an exit can be placed (``weft.models.exits``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from weft.base.errors import ModelError
from weft.models.layer import Exit
from weft.models.onnx_graph import OnnxGraph, OnnxModel, metadata, names_read, producers
from weft.models.onnx_import.drafts import LayerDraft
from weft.models.onnx_import.tensors import Tensor

EXITS = "weft.exits"
"""Model metadata: the names of the outputs that are exits, from shallow to deep, separated by commas."""


def named_exits(proto: OnnxModel, exits: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the outputs that are exits: *exits*, by default the names in the file's metadata.

    Raises ModelError for an unknown or repeated name. Fewer than two names in the file mean no exits.
    """
    if isinstance(exits, str):
        raise ModelError(f"exits = {exits!r} must be a list of output names")
    names = _marked_exits(proto) if exits is None else tuple(exits)
    outputs = [output.name for output in proto.graph.output]
    for name in names:
        if name not in outputs:
            raise ModelError(f"no output is called {name!r} to be an exit; the outputs are: {', '.join(outputs)}")
        if names.count(name) > 1:
            raise ModelError(f"the exit {name!r} is named twice")
    if exits is not None and len(names) < 2:
        raise ModelError("exits need at least two outputs: an early one and, last, the end of the model")
    return names if len(names) > 1 else ()


def _marked_exits(proto: OnnxModel) -> tuple[str, ...]:
    """The names of exits in the file's metadata."""
    text = metadata(proto).get(EXITS, "")
    if not isinstance(text, str):  # protobuf returns bytes if a text is not UTF-8
        raise ModelError(f"its metadata {EXITS!r} is not text; the file is damaged, export or download it again")
    return tuple(name.strip() for name in text.split(",") if name.strip())


@dataclass(frozen=True, slots=True)
class Subnets:
    """The nodes of a graph divided among its exits."""

    names: tuple[str, ...]
    needs: tuple[frozenset[int], ...]
    """For each exit, the indices of all nodes that its output needs."""

    @classmethod
    def of(cls, graph: OnnxGraph, names: Sequence[str]) -> Subnets:
        return cls(tuple(names), tuple(_ancestors(graph, names)))

    def segments(self, nodes: int) -> dict[int, int]:
        """Node -> index of the first exit that needs it; nodes that no exit needs get the number of exits.

        nodes: the number of nodes in the graph.
        """
        segments = dict.fromkeys(range(nodes), len(self.names))
        for number, needed in reversed(list(enumerate(self.needs))):  # so that the first exit overwrites the later ones
            segments.update(dict.fromkeys(needed, number))
        return segments

    def exits(self, drafts: Sequence[LayerDraft]) -> tuple[Exit, ...]:
        """The early exits (without the end) of layers that are ordered by ``segments``.

        Raises ModelError if an exit adds no layer or exits are not named from shallow to deep.
        """
        counts = [sum(layer_draft.segment == number for layer_draft in drafts) for number in range(len(self.names))]
        for number, count in enumerate(counts):
            if not count:
                raise ModelError(self._no_layer_message(number, drafts))
        exit_macs = [
            sum(layer_draft.layer.macs for layer_draft in drafts if layer_draft.step in needed) for needed in self.needs
        ]
        for (early, early_macs), (late, late_macs) in pairwise(zip(self.names, exit_macs, strict=True)):
            if early_macs > late_macs:
                raise ModelError(
                    f"exits are out of order: {early!r} needs {early_macs} MACs and {late!r} after it {late_macs}; "
                    "name them from shallow to deep"
                )
        return tuple(map(Exit, self.names[:-1], accumulate(counts)))

    def _no_layer_message(self, number: int, drafts: Collection[LayerDraft]) -> str:
        """The error message for exit *number*, which adds no layer to the layers of the exit before."""
        name = self.names[number]
        if not number:
            return f"the exit {name!r} needs no layer: it hands out an input or a constant"
        # Layers of a nested graph are not cut, so two exits in one such graph have the same subnet.
        sealed = next(
            (layer_draft for layer_draft in drafts if layer_draft.sealed and layer_draft.step in self.needs[number]),
            None,
        )
        inside = (
            f"; both may come out of the body of {sealed.layer.name.split('/')[0]}, which cannot be cut"
            if sealed
            else ""
        )
        return (
            f"the exit {name!r} adds no layer to what {self.names[number - 1]!r} needs; "
            f"name exits from shallow to deep{inside}"
        )


def _ancestors(graph: OnnxGraph, names: Sequence[str]) -> list[frozenset[int]]:
    """For each of the values *names*, the indices of all nodes that it needs."""
    makers = producers(graph.node)
    ancestors = []
    for name in names:
        needed: set[int] = set()
        waiting = [makers[name]] if name in makers else []
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += [makers[tensor] for tensor in names_read(graph.node[node]) if tensor in makers]
        ancestors.append(frozenset(needed))
    return ancestors


class BlockEnd(NamedTuple):
    """A block end: the number of layers before, and the shape (positions, channels) of the activation passed on."""

    after: int
    shape: tuple[int, int]


def block_ends(drafts: Sequence[LayerDraft]) -> list[BlockEnd]:
    """Find the block ends, in order: after them, later layers read exactly one computed activation."""
    last_read, widths = _last_reads(drafts), _neighbour_widths(drafts)
    alive: set[Tensor] = set()  # computed activations that later layers read
    ends = []
    for after, (done, following) in enumerate(pairwise(drafts), start=1):
        alive.update(tensor for tensor in done.writes if tensor in last_read)
        alive.difference_update([tensor for tensor in _sources(done) if last_read.get(tensor, after) < after])
        inside_node = done.step == following.step  # of an operator with several layers, or of a nested graph
        if len(alive) == 1 and not inside_node:
            (crossing,) = alive
            ends.append(BlockEnd(after, _positions_and_channels(crossing, widths[after])))
    return ends


def _last_reads(drafts: Sequence[LayerDraft]) -> dict[Tensor, int]:
    """Computed activation -> index of the last layer that reads it.

    Values computed from inputs without a matrix product (a mask, an embedding) count as inputs and are left out.
    """
    computed: set[Tensor] = set()
    last: dict[Tensor, int] = {}
    for index, layer_draft in enumerate(drafts):
        computed_sources = [tensor for tensor in _sources(layer_draft) if tensor in computed]
        last.update(dict.fromkeys(computed_sources, index))
        if layer_draft.layer.macs or computed_sources:
            computed.update(layer_draft.writes)
    return last


def _sources(draft: LayerDraft) -> list[Tensor]:
    """The activations in memory that a layer reads, some of them through views."""
    return [origin for tensor in draft.reads for origin in tensor.origins]


def _neighbour_widths(drafts: Sequence[LayerDraft]) -> list[tuple[int, int]]:
    """Channels around a cut, by the number of layers before it: (input of the next product, output of the last).

    Products are layers with weights; 0 if there is none.
    """
    read, written = [0], [0]
    for layer_draft in reversed(drafts):
        gemm = layer_draft.layer.gemm if layer_draft.layer.weights else None
        read.append(gemm.k * gemm.groups // gemm.kernel if gemm else read[-1])
    for layer_draft in drafts:
        gemm = layer_draft.layer.gemm if layer_draft.layer.weights else None
        written.append(gemm.n * gemm.groups if gemm else written[-1])
    return list(zip(reversed(read), written, strict=True))


def _positions_and_channels(tensor: Tensor, widths: tuple[int, int]) -> tuple[int, int]:
    """The positions and channels of an activation; *widths*: likely numbers of channels, the most likely first."""
    sizes = tensor.shape[1:] or (1,)
    default = sizes[0] if len(sizes) > 2 else sizes[-1]
    channels = max(1, next((width for width in widths if width in sizes), default))
    return max(1, tensor.elements // channels), channels
