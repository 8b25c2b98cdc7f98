"""A layer during the import: ``LayerDraft``, its counts with the tensors that fusion and accounting need."""

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

    def input(self, index: int) -> Tensor | None:
        """The input with this index; None if it is left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    @property
    def activations(self) -> tuple[Tensor, ...]:
        """The inputs that are not constant, each tensor once."""
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
    """Activations that the layer reads; a view counts as its underlying tensor."""
    writes: tuple[Tensor, ...]
    stored: tuple[Stored, ...] = ()
    sealed: bool = False
    """Whether the layer is in the body of an If, Loop or Scan, so that no layer outside is fused with it."""
    step: int = -1
    """Index of the layer's node in the whole graph."""
    segment: int = 0
    """The subnet that the layer belongs to, if exits cut the graph.

    Fusion ignores it: an exit can only need a fused group through the group's last layer.
    """

    def within(self, path: str) -> LayerDraft:
        """The layer as a part of a nested graph: sealed, and named ``path/name``."""
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
    """Make the layer of *node*; *kind*: as in ``Layer``.

    weight: the right matrix of *gemm*, or an embedding table. trained: inputs that are parameters, whatever their type.
    lookups: values gathered from a table. input_elements, output_elements: by default all elements of the node's
    activations and outputs.
    """
    reads, has_weight = node.activations, weight is not None and weight.constant
    traffic = sum(tensor.elements for tensor in reads) if input_elements is None else input_elements
    return LayerDraft(
        Layer(
            name=node.name,
            kind=kind,
            op=node.op,
            gemm=gemm,
            weights=weight.elements if weight is not None and has_weight and gemm is not None else 0,
            lookups=lookups,
            input_elements=traffic,
            output_elements=node.output_elements if output_elements is None else output_elements,
            weight_bits=weight.bits if weight is not None and has_weight else 32,
            activation_bits=activation_bits(reads, node.outputs if gemm is None else ()),
            reuses_weights=has_weight or gemm is None,
        ),
        reads=tuple(tensor.root for tensor in reads),
        writes=tuple(tensor.root for tensor in node.outputs),
        stored=trained_constants(node, trained),
    )


def activation_bits(reads: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """The bit width of the largest tensor, since masks, indices and scales are small.

    outputs: empty for a matrix product, as a quantised network stores its output with the bits of the inputs.
    """
    largest = max((*reads, *outputs), key=lambda tensor: tensor.elements, default=None)
    return largest.bits if largest is not None else 32


def trained_constants(node: ImportedNode, trained: Iterable[Tensor | None]) -> tuple[Stored, ...]:
    """The stored tensors behind *trained*, and behind all other constant inputs that look like parameters."""
    named = [
        stored_tensor for tensor in trained if tensor is not None and tensor.constant for stored_tensor in tensor.stored
    ]
    constants = (tensor for tensor in node.inputs if tensor is not None and tensor.constant)
    return tuple(dict.fromkeys([*named, *(s for tensor in constants for s in tensor.stored if s.trained)]))


def repeated(draft: LayerDraft, times: int) -> LayerDraft:
    """The layer of a loop body that runs *times* times: more rows for the same weights."""
    layer = draft.layer
    gemm = replace(layer.gemm, m=layer.gemm.m * times) if layer.gemm else None
    repeated_layer = replace(
        layer,
        gemm=gemm,
        lookups=layer.lookups * times,
        input_elements=layer.input_elements * times,
        output_elements=layer.output_elements * times,
    )
    return replace(draft, layer=repeated_layer)
