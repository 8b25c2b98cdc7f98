"""A layer in the making: the counted layer, and what fusion and bookkeeping still need to know of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from weft.models.layer import Gemm, Layer
from weft.models.onnx_graph import Attributes
from weft.models.onnx_import.tensors import Stored, Tensor


@dataclass(frozen=True, slots=True)
class ImportedNode:
    """An ONNX node with its names looked up."""

    name: str
    op: str
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    attributes: Attributes

    def input(self, place: int) -> Tensor | None:
        return self.inputs[place] if place < len(self.inputs) else None

    @property
    def activations(self) -> tuple[Tensor, ...]:
        """The inputs that come with the query, each tensor once."""
        seen = {id(each.root): each for each in self.inputs if each is not None and not each.constant}
        return tuple(seen.values())

    @property
    def output_elements(self) -> int:
        return sum(each.elements for each in self.outputs)


@dataclass(frozen=True, slots=True, eq=False)
class LayerDraft:
    """A layer, before its parameters are summed and its neighbours fused into it."""

    layer: Layer
    reads: tuple[Tensor, ...]
    """Activations it reads, as memory (views resolved)."""
    writes: tuple[Tensor, ...]
    stored: tuple[Stored, ...] = ()
    sealed: bool = False
    """Came out of the body of an If, Loop or Scan: runs when that runs, so nothing is fused across."""
    step: int = -1
    """The node of the whole graph it came from, by its place in the file."""
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
    """The layer of *node*. *trained* names constants that are learned whatever their type looks like."""
    reads, weighted = node.activations, weight is not None and weight.constant
    traffic = sum(each.elements for each in reads) if input_elements is None else input_elements
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
        reads=tuple(each.root for each in reads),
        writes=tuple(each.root for each in node.outputs),
        stored=trained_constants(node, trained),
    )


def activation_bits(reads: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """The width of the largest tensor: masks, indices and scales ride along with the data.

    What a multiplication writes is left out: in a quantised network it leaves as narrow as it came.
    """
    largest = max((*reads, *outputs), key=lambda each: each.elements, default=None)
    return largest.bits if largest is not None else 32


def trained_constants(node: ImportedNode, trained: Iterable[Tensor | None]) -> tuple[Stored, ...]:
    named = [each for tensor in trained if tensor is not None and tensor.constant for each in tensor.stored]
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
