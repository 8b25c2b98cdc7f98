"""Places where a graph can be cut: at outputs that are exits, and at block ends.

An exit's subnet holds what its output needs and no earlier exit needed. At a block end a single activation crosses to
the layers after; there an exit can be placed (``weft.models.exits``).
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
    """The outputs that are exits, checked: those that the caller names, else those that the file names."""
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
    text = metadata(proto).get(EXITS, "")
    if not isinstance(text, str):  # protobuf hands out bytes where a text is not UTF-8
        raise ModelError(f"its metadata {EXITS!r} is not text; the file is damaged, export or download it again")
    return tuple(name.strip() for name in text.split(",") if name.strip())


@dataclass(frozen=True, slots=True)
class Subnets:
    """The nodes of a graph divided among its exits."""

    names: tuple[str, ...]
    needs: tuple[frozenset[int], ...]
    """The nodes that each exit's output needs, by their places in the file."""

    @classmethod
    def of(cls, graph: OnnxGraph, names: Sequence[str]) -> Subnets:
        return cls(tuple(names), tuple(_ancestors(graph, names)))

    def segments(self, nodes: int) -> dict[int, int]:
        """Node -> the first exit that needs it; one past the last exit where none does."""
        first = dict.fromkeys(range(nodes), len(self.names))
        for place, needed in reversed(list(enumerate(self.needs))):
            first.update(dict.fromkeys(needed, place))
        return first

    def exits(self, drafts: Sequence[LayerDraft]) -> tuple[Exit, ...]:
        """The exits among layers that were ordered by ``segments``, the end left out."""
        counts = [sum(layer_draft.segment == place for layer_draft in drafts) for place in range(len(self.names))]
        for place, count in enumerate(counts):
            if not count:
                raise ModelError(self._nothing_new(place, drafts))
        macs = [
            sum(layer_draft.layer.macs for layer_draft in drafts if layer_draft.step in needed) for needed in self.needs
        ]
        for (early, less), (late, more) in pairwise(zip(self.names, macs, strict=True)):
            if less > more:
                raise ModelError(
                    f"exits are out of order: {early!r} needs {less} MACs and {late!r} after it {more}; "
                    "name them from shallow to deep"
                )
        return tuple(map(Exit, self.names[:-1], accumulate(counts)))

    def _nothing_new(self, place: int, drafts: Collection[LayerDraft]) -> str:
        name = self.names[place]
        if not place:
            return f"the exit {name!r} needs no layer: it hands out an input or a constant"
        whose = next(
            (layer_draft for layer_draft in drafts if layer_draft.sealed and layer_draft.step in self.needs[place]),
            None,
        )
        inside = (
            f"; both may come out of the body of {whose.layer.name.split('/')[0]}, which cannot be cut" if whose else ""
        )
        return (
            f"the exit {name!r} adds no layer to what {self.names[place - 1]!r} needs; "
            f"name exits from shallow to deep{inside}"
        )


def _ancestors(graph: OnnxGraph, names: Sequence[str]) -> list[frozenset[int]]:
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
    """A block's end: after how many layers it lies, and the positions and channels of what crosses."""

    after: int
    shape: tuple[int, int]


def block_ends(drafts: Sequence[LayerDraft]) -> list[BlockEnd]:
    """The block ends, in order."""
    last_read, widths = _last_reads(drafts), _widths(drafts)
    alive: set[Tensor] = set()
    ends = []
    for after, (done, following) in enumerate(pairwise(drafts), start=1):
        alive.update(tensor for tensor in done.writes if tensor in last_read)
        alive.difference_update([tensor for tensor in _sources(done) if last_read.get(tensor, after) < after])
        inside = done.step == following.step  # of one operator, or of a body
        if len(alive) == 1 and not inside:
            (crossing,) = alive
            ends.append(BlockEnd(after, _positions_and_channels(crossing, widths[after])))
    return ends


def _last_reads(drafts: Sequence[LayerDraft]) -> dict[Tensor, int]:
    """Computed activation -> the place of the last layer that reads it.

    What inputs become without a multiplication (a mask, an embedding) is as good as an input and left out.
    """
    computed: set[Tensor] = set()
    last: dict[Tensor, int] = {}
    for place, layer_draft in enumerate(drafts):
        known = [tensor for tensor in _sources(layer_draft) if tensor in computed]
        last.update(dict.fromkeys(known, place))
        if layer_draft.layer.macs or known:
            computed.update(layer_draft.writes)
    return last


def _sources(draft: LayerDraft) -> list[Tensor]:
    return [origin for tensor in draft.reads for origin in tensor.origins]


def _widths(drafts: Sequence[LayerDraft]) -> list[tuple[int, int]]:
    """For each number of layers done: the channels that the next weights read, and that the last ones wrote."""
    read, written = [0], [0]
    for layer_draft in reversed(drafts):
        gemm = layer_draft.layer.gemm if layer_draft.layer.weights else None
        read.append(gemm.k * gemm.groups // gemm.kernel if gemm else read[-1])
    for layer_draft in drafts:
        gemm = layer_draft.layer.gemm if layer_draft.layer.weights else None
        written.append(gemm.n * gemm.groups if gemm else written[-1])
    return list(zip(reversed(read), written, strict=True))


def _positions_and_channels(tensor: Tensor, widths: tuple[int, int]) -> tuple[int, int]:
    """The size of an activation; its channel axis follows from the products around it."""
    sizes = tensor.shape[1:] or (1,)
    usual = sizes[0] if len(sizes) > 2 else sizes[-1]
    channels = max(1, next((width for width in widths if width in sizes), usual))
    return max(1, tensor.elements // channels), channels
