"""A layer during the import: its counts, and what fusion and accounting still need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from weft.models.layer import Gemm, Layer
from weft.models.onnx_graph import Attributes
from weft.models.onnx_import.tensors import Stored, Tensor


@dataclass(frozen=True, slots=True)
class ImportedNode:
    """An ONNX node with its inputs and outputs as tensors."""

    name: str
    op: str
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    attributes: Attributes

    def input(self, place: int) -> Tensor | None:
        return self.inputs[place] if place < len(self.inputs) else None

    @property
    def activations(self) -> tuple[Tensor, ...]:
        """The inputs that depend on the request, each tensor once."""
        seen = {id(tensor.root): tensor for tensor in self.inputs if tensor is not None and not tensor.constant}
        return tuple(seen.values())

    @property
    def output_elements(self) -> int:
        return sum(tensor.elements for tensor in self.outputs)


@dataclass(frozen=True, slots=True, eq=False)
class LayerDraft:
    """A layer, before its parameters are summed and its neighbours fused into it."""

    layer: Layer
    reads: tuple[Tensor, ...]
    """Activations that it reads; a view counts as the tensor it shows."""
    writes: tuple[Tensor, ...]
    stored: tuple[Stored, ...] = ()
    sealed: bool = False
    """Came out of the body of an If, Loop or Scan: runs when that runs, so nothing is fused across."""
    step: int = -1
    """Index of the node that it came from, in the whole graph."""
    segment: int = 0
    """The subnet of the whole graph it belongs to, where exits cut it.

    Fusion need not look at it: whatever an exit needs of a group it gets through the group's last member.
    """

    def within(self, path: str) -> LayerDraft:
        return replace(self, layer=replace(self.layer, name=f"{path}/{self.layer.name}"), sealed=True)


def draft(
    node: ImportedNode,
    kind: str,
    *,
    gemm: Gemm | None = None,
    weight: Tensor | None = None,
    trained: Sequence[Tensor | None] = (),
    lookups: int = 0,
    input_elements: int | None = None,
    output_elements: int | None = None,
) -> LayerDraft:
    """The layer of *node*. *trained*: constants that are learned, whatever their type."""
    reads, weighted = node.activations, weight is not None and weight.constant
    traffic = sum(tensor.elements for tensor in reads) if input_elements is None else input_elements
    return LayerDraft(
        Layer(
            name=node.name,
            kind=kind,
            op=node.op,
            gemm=gemm,
            weights=weight.elements if weight is not None and weighted and gemm is not None else 0,
            lookups=lookups,
            input_elements=traffic,
            output_elements=node.output_elements if output_elements is None else output_elements,
            weight_bits=weight.bits if weight is not None and weighted else 32,
            activation_bits=activation_bits(reads, node.outputs if gemm is None else ()),
            reuses_weights=weighted or gemm is None,
        ),
        reads=tuple(tensor.root for tensor in reads),
        writes=tuple(tensor.root for tensor in node.outputs),
        stored=trained_constants(node, trained),
    )


def activation_bits(reads: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """The bit width of the largest tensor, as masks, indices and scales are small.

    The output of a multiplication does not count: in a quantised network it is written as narrow as its inputs.
    """
    largest = max((*reads, *outputs), key=lambda tensor: tensor.elements, default=None)
    return largest.bits if largest is not None else 32


def trained_constants(node: ImportedNode, trained: Iterable[Tensor | None]) -> tuple[Stored, ...]:
    named = [
        stored_tensor for tensor in trained if tensor is not None and tensor.constant for stored_tensor in tensor.stored
    ]
    constants = (tensor for tensor in node.inputs if tensor is not None and tensor.constant)
    return tuple(dict.fromkeys([*named, *(s for tensor in constants for s in tensor.stored if s.trained)]))


def repeated(draft: LayerDraft, times: int) -> LayerDraft:
    """The layer run *times* over: more rows through the same weights."""
    layer = draft.layer
    gemm = replace(layer.gemm, m=layer.gemm.m * times) if layer.gemm else None
    more = replace(
        layer,
        gemm=gemm,
        lookups=layer.lookups * times,
        input_elements=layer.input_elements * times,
        output_elements=layer.output_elements * times,
    )
    return replace(draft, layer=more)
