"""ONNX files -> Net: ``read_net``.

The file is opened and checked and its constants are folded (``onnx_source``); every other node is translated to
operations of a draft (``onnx_ops``) or, where the caller allows it, kept as an island (``onnx_islands``). *Rounding*
steps, which ``weft tune`` writes to simulate number formats, become one operation each.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from weft.base.errors import ModelError, ShapeNeeded, StitchError
from weft.base.shapes import settle
from weft.models.onnx_graph import Attributes, OnnxModel, OnnxNode, metadata, node_name
from weft.models.onnx_import.widths import FORMATS, ROUNDED, rounded_in, widths_in
from weft_stitch.graph import Builder
from weft_stitch.net import Array, Net
from weft_stitch.reading.draft import Foreign, NetDraft, Shape
from weft_stitch.reading.onnx_islands import Surveyor
from weft_stitch.reading.onnx_ops import Operands, read_node
from weft_stitch.reading.onnx_source import HALF_TYPES, OnnxSource, SourceNode, constant_node, fold, load, open_source

_APPLIES_PADDING = ("Conv", "Pad")
"""Operators that apply the pending padding of their input themselves."""


def read_net(
    source: str | os.PathLike[str] | OnnxModel,
    *,
    batch: int | None = None,
    islands: bool = False,
    name: str = "",
    shapes: Mapping[str, Shape] | None = None,
) -> Net:
    """Read the model in *source*, with its weights in float32.

    *batch*: rows if the file leaves their number open (by default 1). *islands*: keep operators that are not understood
    as they are, to run model by model. *shapes*: input -> full shape, if the file leaves sizes open. Raises
    ``ModelError`` for damaged files, ``StitchError`` for models that cannot be stitched.
    """
    folder: Path | None = None
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        folder, title, label = path.parent, name or path.stem, path.name or str(path)
    else:
        title = label = name or source.graph.name or "model"
    try:
        model = load(Path(source)) if isinstance(source, str | os.PathLike) else source
        opened = open_source(model, folder)
        net = _OnnxReader(opened, _input_shapes(opened, batch, shapes or {}), islands).net(title)
        return replace(net, stored=opened.precision)
    except (ModelError, StitchError) as error:
        raise type(error)(" ".join(f"{label}: {error}".split())) from error


class _OnnxReader:
    """Translates the nodes of one file, in order, to a draft."""

    def __init__(self, source: OnnxSource, shapes: Mapping[str, Shape], islands: bool) -> None:
        """*shapes*: the full shape of each input. *islands*: whether nodes may be kept as islands."""
        self._source = source
        self._islands = islands
        self._draft = NetDraft()
        self._rows = next(iter(shapes.values()))[0]  # all inputs have as many
        self._constants = _StoredArrays(source)
        self._pictures = {name: self._draft.input(name, shape[1:]) for name, shape in shapes.items()}
        self._surveyor = Surveyor(source, self._rows, self._pictures, self._constants)
        self._roundings = roundings(source)
        """Rounded tensor -> the steps that round it; each becomes one operation of the draft."""
        self._rounding_tensors = inner_tensors(self._roundings.values())
        """The tensors inside these steps."""

    def net(self, title: str) -> Net:
        """Translate all nodes; return the net."""
        for node in self._source.nodes:
            try:
                self._read(node)
            except Foreign as error:
                raise StitchError(self._refusal(node, str(error))) from error
            except ModelError as error:
                raise ModelError(f"{node.name} ({node.op}): {error}") from error
        outputs = {name: self._pictures[name] for name in self._source.outputs if name in self._pictures}
        if missing := [name for name in self._source.outputs if name not in outputs]:
            raise StitchError(f"its output {missing[0]} does not depend on its inputs")
        net, narrow = self._draft.finish(title, outputs, self._rows), narrow_nodes(self._source)  # *narrow*: node names
        ops = (replace(op, tuned=True) if op.kind == "conv" and op.name in narrow else op for op in net.ops)
        return replace(net, ops=tuple(ops)) if narrow else net

    def _read(self, node: SourceNode) -> None:
        """Translate one node: to a constant, an operation, or a part of an island."""
        output = node.outputs[0]
        if output in self._rounding_tensors:
            return  # a part of the rounding operation
        if output in self._roundings:
            rounding = self._roundings[output]
            self._pictures[output] = self._draft.rounding(node.name, self._pictures[rounding.source], rounding)
            return
        if node.op not in _APPLIES_PADDING:
            self._apply_pads(node)
        if node.op == "Constant":
            self._constants[node.outputs[0]] = constant_node(node, self._source.folder)
        # shapes are constants: a net is read for one number of rows
        elif node.op == "Shape" and node.inputs and self._surveyor.kind(node.inputs[0]).shape is not None:
            shape = np.array(self._surveyor.kind(node.inputs[0]).shape, np.int64)
            self._constants[node.outputs[0]] = shape[node.integer("start", 0) : node.integer("end", len(shape))]
        elif any(name in self._surveyor.hidden for name in node.inputs):
            self._keep_foreign(node, "it reads what is inside an island")
        elif all(name in self._constants for name in node.inputs if name):
            self._fold(node)
        else:
            self._translate(node)

    def _fold(self, node: SourceNode) -> None:
        """Compute the outputs of a node that reads constants only."""
        arrays = {name: self._constants[name] for name in node.inputs if name}
        if node.op in ("Identity", "Dropout") and arrays:
            self._constants[node.outputs[0]] = arrays[node.inputs[0]]
            return
        for name, array in zip(node.outputs, fold(node, arrays, self._source.opset), strict=False):
            self._constants[name] = array

    def _translate(self, node: SourceNode) -> None:
        """Translate a node to operations of the net; otherwise keep it as an island."""
        try:
            self._pictures[node.outputs[0]] = read_node(self._operands(node))
        except Foreign as error:
            self._keep_foreign(node, str(error))

    def _operands(self, node: SourceNode) -> Operands:
        """The operands of *node* for its handler."""
        source = self._source
        return Operands(
            node, self._draft, self._pictures, self._constants, self._rows, source.opset, source.precision in HALF_TYPES
        )

    def _keep_foreign(self, node: SourceNode, why: str) -> None:
        """Keep a node as an island, or as part of one; *why*: the reason why a net cannot express it.

        Raises ``Foreign`` if islands are not allowed.
        """
        if not self._islands:
            raise Foreign(why)
        node = self._surveyor.as_read(node)
        self._apply_pads(node)
        self._surveyor.infer_outputs(node)
        for name in filter(None, node.outputs):
            # what cannot be a value of the net becomes a part of the islands that read it
            if name not in self._source.outputs and not self._surveyor.is_value(name):
                self._surveyor.hidden[name] = node
                continue
            island, sources = self._surveyor.island(node, name)
            inputs = [self._pictures[tensor] for tensor in sources]
            self._pictures[name] = self._draft.island(node.name, inputs, island, island.view)

    def _apply_pads(self, node: SourceNode) -> None:
        """Apply the pending padding of the inputs of *node*, because it is part of their shape."""
        for name in node.inputs:
            if name in self._pictures:
                self._pictures[name] = self._draft.apply_pads(self._pictures[name])

    def _refusal(self, node: SourceNode, why: str) -> str:
        """The message for a node that is neither understood nor kept as an island."""
        way_out = "it cannot be kept as an island"
        if not self._islands:
            way_out = "islands = True runs it model by model, body = True shares whole weights around any operator"
        return f"{node.name} is the operator {node.op}: {why}; {way_out}"


class _StoredArrays(dict[str, Array]):
    """Constants by name; those stored in the file are read at first use."""

    def __init__(self, source: OnnxSource) -> None:
        super().__init__()
        self._source = source

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._source.tensors

    def __missing__(self, name: str) -> Array:
        if name not in self._source.tensors:
            raise KeyError(name)
        self[name] = array = self._source.stored(name)
        return array


def _input_shapes(source: OnnxSource, batch: int | None, stated: Mapping[str, Shape]) -> dict[str, Shape]:
    """The full shape of every input, with *batch* rows where they are open; *stated*: shapes that the caller states."""
    settled = settle(stated, source.inputs)  # full shapes, as far as they follow from the stated ones
    if batch is not None and batch < 1:
        raise ModelError(f"a batch of {batch} is no batch; give 1 or more")
    # An input of a stated shape has its rows from there. Other settled ones have those of the file, or of *batch*.
    open_rows = {name: (sizes[0], *settled[name][1:]) for name, sizes in source.inputs.items() if name in settled}
    known_sizes = open_rows | {name: settled[name] for name in stated if name in settled}
    shapes = {name: _input_shape(name, known_sizes.get(name, sizes), batch) for name, sizes in source.inputs.items()}
    rows = {name: shape[0] for name, shape in shapes.items()}
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise ModelError(f"its inputs have different numbers of rows: {counts}")
    return shapes


def _input_shape(name: str, sizes: Sequence[int | str], batch: int | None) -> Shape:
    """The full shape of the input *name*; ``ShapeNeeded`` if one of its *sizes* besides the rows is open (a text)."""
    if len(sizes) < 2:
        raise ModelError(f"its input {name} has {len(sizes)} dimensions; rows of vectors or pictures can be stitched")
    rows = sizes[0]
    if isinstance(rows, str):
        rows = batch or 1
    elif batch not in (None, rows):
        raise ModelError(f"its input {name} is fixed to {rows} rows, not {batch}; export it with an open batch")
    shape = [rows]
    for axis, size in enumerate(sizes[1:], 1):
        if isinstance(size, str):
            example = "x".join(str(extent) if isinstance(extent, int) else "224" for extent in (rows, *sizes[1:]))
            raise ShapeNeeded(f"size {axis} of its input {name} is open ({size})", name, example)
        shape.append(size)
    if min(shape) < 1:
        raise ModelError(f"its input {name} has the shape {shape}")
    return tuple(shape)


FLOAT_BITS = 32
"""Bits of a weight that is not tuned."""


@dataclass(frozen=True, eq=False)
class RoundingSteps:
    """Operators that round a value to a number format; their tensors have the value's shape, or hold one number."""

    nodes: tuple[OnnxNode, ...]
    constants: Mapping[str, Array]
    source: str
    """The tensor that is rounded."""
    output: str
    """The rounded tensor."""
    signature: str
    """Equal for steps that round alike."""

    def steps(self, builder: Builder, inputs: Sequence[str]) -> str:
        """Add the operators to a graph; return the name of the rounded tensor."""
        shape, names = builder.shape(inputs[0]), {self.source: inputs[0]}
        names |= {name: builder.constant(array, "rounding") for name, array in self.constants.items()}
        for node in self.nodes:
            operands = [names[name] for name in node.input]
            names[node.output[0]] = builder.add(node.op_type, *operands, shape=shape, **Attributes(node).values())
        builder.rounded[names[self.output]] = inputs[0]
        return names[self.output]


def narrow_nodes(source: OnnxSource) -> frozenset[str]:
    """The names of the nodes of a tuned file whose weights have fewer bits than floats."""
    widths = widths_in(source.proto)
    narrow = {name for name, width in widths.items() if width.weight < FLOAT_BITS}
    return frozenset(node.name for node in source.nodes if node_name(node.node) in narrow)


def roundings(source: OnnxSource) -> dict[str, RoundingSteps]:
    """Rounded tensor -> the steps that round it, as the file's metadata says."""
    writers = {output: node for node in source.nodes for output in node.outputs if output}
    rounded, notes = rounded_in(source.proto), metadata(source.proto)
    if FORMATS in notes and ROUNDED not in notes:
        raise StitchError("it was tuned by an older weft, and does not say where it rounds; tune it again")
    pairs = [(exact, output) for output, exact in rounded.items() if output in writers]
    return {output: _rounding_steps(source, writers, exact, output) for exact, output in pairs}


def inner_tensors(steps: Iterable[RoundingSteps]) -> frozenset[str]:
    """The intermediate tensors of rounding steps."""
    return frozenset(node.output[0] for step in steps for node in step.nodes if node.output[0] != step.output)


def _rounding_steps(source: OnnxSource, writers: Mapping[str, SourceNode], exact: str, output: str) -> RoundingSteps:
    """The operators between the tensor *exact* and its rounded version *output*.

    *writers*: tensor -> the node that writes it.
    """
    pending, on_path = [output], dict[str, SourceNode]()
    while pending:
        name = pending.pop()
        if name == exact or name in on_path or name not in writers:
            continue
        on_path[name] = writers[name]
        pending += [tensor for tensor in writers[name].inputs if tensor]
    nodes = [node for node in source.nodes if any(node is writer for writer in on_path.values())]
    if foreign := [node.op for node in nodes if "." in node.op]:
        raise StitchError(f"it rounds by {foreign[0]}, which ONNX Runtime does not know; tune it with --export qdq")
    sources = dict.fromkeys(name for node in nodes for name in node.inputs if name)
    constants = {name: source.stored(name) for name in sources if name in source.tensors}
    return RoundingSteps(tuple(node.node for node in nodes), constants, exact, output, _signature(nodes, constants))


def _signature(nodes: Sequence[SourceNode], constants: Mapping[str, Array]) -> str:
    """A digest of operators, attributes and constants."""
    digest = hashlib.sha256()
    for node in nodes:
        arrays = [constants[name].tobytes() for name in node.inputs if name in constants]
        attributes = [attribute.SerializeToString() for attribute in node.node.attribute]
        digest.update(b"|".join([node.op.encode(), *arrays, *attributes]))
    return digest.hexdigest()[:16]
