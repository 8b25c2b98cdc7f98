"""The description of stitched models in their ONNX file: ``family_metadata`` writes it, ``read_stitched`` reads it.

It lists the layers, which models share which channels, and which rows of the file's own weights hold which kernels; no
kernel is stored twice. Scales and shifts, which are small, are written out. A model's *tail* are the operations that
only it has. A *part* is a block of channels that the same models share. ``metadata`` has what the server reads: the
models, and the graph's names of their inputs and outputs.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate, product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from weft.base.errors import ModelError, StitchError
from weft.base.jsonfile import first_problem
from weft.models.onnx_graph import initializers, load, to_array
from weft.models.onnx_graph import metadata as entries_of
from weft.runtime.metadata import FAMILY_KEY, STITCHED_KEY, STITCHED_VERSION
from weft_stitch.family import Block, ChannelSpace, Family, FamilyLayer, Sharing, Wiring, wire
from weft_stitch.graph import Graph, KernelOrigin
from weft_stitch.layouts import Affine, Channels, channels, tidy
from weft_stitch.lowering import port_name
from weft_stitch.net import Array, Net, Op, Port, Value, Window, infer
from weft_stitch.slabs import undo_slabs

VERSION = 1
"""Version of the description; files with another one are refused."""

Numbers = str
"""An array: its type, a colon, and its bytes, compressed and in base64."""


class NotePart(BaseModel):
    """A part of the description: immutable, without unknown keys; infinities are written as ``Infinity``."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class OpNote(NotePart):
    """An operation that all tasks have, or one of a task's tail (``NetNote.tail``)."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    output: str
    window: tuple[tuple[int, int], tuple[int, int], tuple[int, int, int, int], tuple[int, int]] | None = None
    """Kernel, strides, pads, dilations; None: the default ``Window``."""
    groups: tuple[int, ...] = ()
    """conv: the groups in each task."""
    function: str = ""
    settings: dict[str, float] = {}
    """*function* and *settings* are those of ``net.Op``."""
    scale: tuple[Numbers | None, ...] = ()
    """affine: each task's scales; None where it has none."""
    shift: tuple[Numbers | None, ...] = ()
    """affine: each task's shifts; None where it has none."""


class KernelNote(NotePart):
    """Where one of the file's weights holds kernels: its name, and the fields of ``KernelOrigin``."""

    weight: str
    outs: tuple[int, ...] = ()
    ins: tuple[int, ...] = ()
    task: int | None = None
    folded: int = 0
    slabs: tuple[int, ...] = ()


class PortNote(NotePart):
    """An input or output of a model, and the value behind it."""

    name: str
    value: str
    shape: tuple[int, ...]


class NetNote(NotePart):
    """A stitched model with its inputs and outputs."""

    name: str
    batch: int
    inputs: tuple[PortNote, ...]
    outputs: tuple[PortNote, ...]
    sizes: tuple[tuple[int, int, int], ...]
    """Channels, height and width of each input, as the layers see it."""
    tail: tuple[OpNote, ...] = ()
    """The operations that only this model has; they run after the layers that all models have."""
    reads: dict[str, str] = {}
    """The common values that the tail reads, as ``Family.bridges`` maps them: in a file, each name to itself."""


class BlockNote(NotePart):
    """A block of channels that the same tasks share."""

    tasks: tuple[int, ...]
    channels: Numbers
    """The channels of each task, one task after another."""


class VersionedNote(NotePart):
    """A whole description, with its version."""

    version: int


Note = TypeVar("Note", bound=VersionedNote)


class FamilyNote(VersionedNote):
    """The description of a family."""

    missing: str = ""
    """Why the models are not described; all other fields are then empty."""
    layers: tuple[OpNote, ...] = ()
    nets: tuple[NetNote, ...] = ()
    outputs: tuple[str, ...] = ()
    """The values that are an output of every model."""
    carries: dict[str, tuple[str, ...]] = {}
    """Value -> the channel spaces that it carries, one after another (``Wiring``)."""
    spaces: dict[str, tuple[BlockNote, ...]] = {}
    """Space -> its blocks."""
    kernels: dict[str, tuple[KernelNote, ...]] = {}
    """Output value of a convolution -> where its kernels are stored."""


def family_metadata(family: Family, sharing: Sharing, graph: Graph) -> dict[str, str]:
    """The metadata entry that describes the models of a dynamic *graph*, or says why they cannot be described."""
    missing = _reason_missing(family)
    note = FamilyNote(version=VERSION, missing=missing) if missing else _describe_family(family, sharing, graph)
    return {FAMILY_KEY: note.model_dump_json(exclude_defaults=True)}


def _reason_missing(family: Family) -> str:
    """Why the models cannot be rebuilt from their file; empty if they can."""
    if any(net.tuned for net in family.nets):
        return "its models are tuned, and their weights are kept in few bits"
    ops = [op for layer in family.layers for op in layer.ops] + [op for tail in family.tails for op in tail]
    foreign = next((op.name for op in ops if op.payload is not None), "")
    return f"{foreign} is an operator that is kept as it stands in the model" if foreign else ""


def _describe_family(family: Family, sharing: Sharing, graph: Graph) -> FamilyNote:
    """Describe the layers, the models, their channels and where *graph* stores their kernels."""
    wiring, names = wire(family), _tail_names(family)
    return FamilyNote(
        version=VERSION,
        layers=tuple(_op_note(layer.ops, layer.inputs, layer.output) for layer in family.layers),
        nets=tuple(_net_note(family, task, names[task]) for task in range(family.tasks)),
        outputs=tuple(family.outputs),
        carries=dict(wiring.carries),
        spaces={name: tuple(map(_block_note, space.blocks)) for name, space in tidy(sharing).spaces.items()},
        kernels=_kernel_notes(family, graph, names),
    )


def _tail_names(family: Family) -> list[dict[str, str]]:
    """For each task, its own value -> the value's name in the description; values of tails get a new name."""
    names = []
    for task, net in enumerate(family.nets):
        tail_values = {op.output: f"{net.name}/{op.output}" for op in family.tails[task]} if family.tails else {}
        common = {ports[task].value: value for value, ports in family.outputs.items()}
        names.append(common | dict(family.bridges[task] if family.bridges else {}) | tail_values)
    return names


def _op_note(ops: Sequence[Op], inputs: tuple[str, ...], output: str) -> OpNote:
    """Describe an operation; *ops* has each task's own, *inputs* and *output* are names in the description."""
    first = ops[0]
    window = first.window
    window_sizes = (window.kernel, window.strides, window.pads, window.dilations)
    affine = first.kind == "affine"
    return OpNote(
        name=first.name,
        kind=first.kind,
        inputs=inputs,
        output=output,
        window=None if window == Window() else window_sizes,
        groups=tuple(op.groups for op in ops) if first.kind == "conv" else (),
        function=first.function,
        settings=dict(first.settings),
        scale=tuple(_pack_optional(op.scale) for op in ops) if affine else (),
        shift=tuple(_pack_optional(op.shift) for op in ops) if affine else (),
    )


def _net_note(family: Family, task: int, names: Mapping[str, str]) -> NetNote:
    """Describe a model; *names*: its values -> their names in the description."""
    net = family.nets[task]
    sizes = [net.values[port.value] for port in net.inputs]
    tail = family.tails[task] if family.tails else ()
    inputs = zip(net.inputs, family.inputs, strict=True)
    return NetNote(
        name=net.name,
        batch=net.batch,
        inputs=tuple(PortNote(name=port.name, value=value, shape=port.shape) for port, value in inputs),
        outputs=tuple(PortNote(name=port.name, value=names[port.value], shape=port.shape) for port in net.outputs),
        sizes=tuple((size.channels, size.height, size.width) for size in sizes),
        tail=tuple(_op_note([op], tuple(names[value] for value in op.inputs), names[op.output]) for op in tail),
        # The description calls common values by the family's names, also where the tail's operations read them: so the
        # rebuilt model has no other names of its own, and its bridges map each name to itself.
        reads={value: value for value in family.bridges[task].values()} if family.bridges else {},
    )


def _block_note(block: Block) -> BlockNote:
    """Describe a block of channels."""
    tasks = sorted(block.tasks)
    return BlockNote(
        tasks=tuple(tasks), channels=_pack_numbers(np.stack([block.members[task] for task in tasks]), np.int32)
    )


def _kernel_notes(
    family: Family, graph: Graph, names: Sequence[Mapping[str, str]]
) -> dict[str, tuple[KernelNote, ...]]:
    """Where the kernels of each convolution are stored, by the convolution's output. *names*: see ``_tail_names``."""
    # id of an operation -> the name of its output, and its task
    owners = {id(op): (layer.output, task) for layer in family.layers for task, op in enumerate(layer.ops)}
    for task, tail in enumerate(family.tails):
        owners |= {id(op): (names[task][op.output], task) for op in tail}
    by_value: dict[str, list[KernelNote]] = {}  # output value of a convolution -> its kernels
    for origin in graph.origins:
        if origin.constant in graph.constants:
            value, task = owners[id(origin.op)]
            by_value.setdefault(value, []).append(_kernel_note(origin, task))
    return {value: tuple(notes) for value, notes in by_value.items()}


def _kernel_note(origin: KernelOrigin, task: int) -> KernelNote:
    """Describe where a kernel is stored; *task* owns it if the constant holds the whole kernel of one task."""
    return KernelNote(
        weight=origin.constant,
        outs=origin.outs,
        ins=origin.ins,
        task=origin.task if origin.outs else task,
        folded=origin.folded,
        slabs=origin.slabs,
    )


def _pack_numbers(array: Array, dtype: Any = None) -> Numbers:
    """The text of an array (see ``Numbers``)."""
    flat = np.ascontiguousarray(array, dtype)
    return f"{flat.dtype.name}:{base64.b64encode(zlib.compress(flat.tobytes())).decode()}"


def _pack_optional(array: Array | None) -> Numbers | None:
    return None if array is None else _pack_numbers(array)


def unpack_numbers(text: Numbers) -> Array:
    """The array that a text of ``Numbers`` stands for, in one dimension."""
    kind, _, data = text.partition(":")
    return np.frombuffer(zlib.decompress(base64.b64decode(data)), kind)


def metadata(family: Family, batches: Sequence[int]) -> dict[str, str]:
    """The entry that the server reads: the models, the graph's names of their ports, and their rows in *batches*."""
    tasks = [
        {
            "name": net.name,
            "inputs": {port.name: port_name(family, task, port) for port in net.inputs},
            "outputs": {port.name: port_name(family, task, port) for port in net.outputs},
            "batch": batch,
        }
        for task, (net, batch) in enumerate(zip(family.nets, batches, strict=True))
    ]
    return tasks_metadata(tasks)


def tasks_metadata(tasks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The metadata entry that lists *tasks*, the entries of all models."""
    return {STITCHED_KEY: json.dumps({"version": STITCHED_VERSION, "tasks": tasks}, ensure_ascii=False)}


Weights = Callable[[str], Array]
"""Returns a weight of the file by its name."""
_NO_INPUT_PART = -1
"""Index in place of an input part's for depthwise layers, whose kernels have no input parts."""
_OWN_ENTRY = 0
"""The note of an operation in a tail describes one task only: its first entry is that task's."""


def parse_note(text: str, kind: type[Note], key: str, version: int) -> Note:
    """Parse the description *text* under *key*; ``StitchError`` where it is damaged or of another version."""
    try:
        note = kind.model_validate_json(text)
    except ValidationError as error:
        raise StitchError(f"its {key} cannot be read: {first_problem(error, kind)}") from error
    if note.version != version:
        raise StitchError(f"its {key} is of version {note.version}, not {version}; stitch it again")
    return note


def rebuild_family(text: str, weights: Weights) -> tuple[Family, Sharing]:
    """Rebuild the models, and their sharing, from the description that ``family_metadata`` wrote.

    Raises ``StitchError`` if the models are not described, or the description does not fit the *weights*.
    """
    note = parse_note(text, FamilyNote, FAMILY_KEY, VERSION)
    if note.missing:
        raise StitchError(note.missing)
    try:
        return _FamilyRebuilder(note, weights).family()
    except (LookupError, TypeError, ValueError, StopIteration, zlib.error, ModelError) as error:
        raise StitchError(f"its {FAMILY_KEY} does not fit its weights ({error}); stitch it again") from error


class _FamilyRebuilder:
    """Rebuilds a family from its description and a file's weights."""

    def __init__(self, note: FamilyNote, weights: Weights) -> None:
        self.note, self.weights, self.tasks = note, weights, len(note.nets)
        self.sharing = Sharing({name: _space(blocks, self.tasks) for name, blocks in note.spaces.items()})
        self.wiring = Wiring(note.carries, widths={}, writers={})
        """Only ``carries`` is filled: the widths are in *sharing*, and writers are not needed."""

    def family(self) -> tuple[Family, Sharing]:
        """Rebuild the models and their sharing: the common layers, and the operations that one model has alone."""
        note = self.note
        layers = tuple(FamilyLayer(self._ops(layer), layer.inputs, layer.output) for layer in note.layers)
        tails = tuple(
            tuple(self._op(op, self._whole_kernel(op, task), _OWN_ENTRY) for op in net.tail)
            for task, net in enumerate(note.nets)
        )
        nets = tuple(self._net(task, layers, tails[task]) for task in range(self.tasks))
        bridges = tuple(net.reads for net in note.nets)
        has_separate_part = any(tails) or any(bridges)
        family = Family(
            nets=nets,
            layers=layers,
            values={value: tuple(net.values[value] for net in nets) for value in note.carries},
            inputs=tuple(port.value for port in nets[0].inputs),
            outputs={value: tuple(_port_of(net, value) for net in nets) for value in note.outputs},
            tails=tails if has_separate_part else (),
            bridges=bridges if has_separate_part else (),
        )
        if wire(family).carries != note.carries:
            raise StitchError(f"its {FAMILY_KEY} does not fit its layers; stitch it again")
        return family, self.sharing

    def _net(self, task: int, layers: Sequence[FamilyLayer], tail: Sequence[Op]) -> Net:
        """The model of *task*, which runs *layers* and then *tail*."""
        note = self.note.nets[task]
        inputs, outputs = (
            tuple(Port(port.name, port.value, port.shape) for port in side) for side in (note.inputs, note.outputs)
        )
        values = {port.value: Value(*size) for port, size in zip(inputs, note.sizes, strict=True)}
        ops = (*(layer.ops[task] for layer in layers), *tail)
        for op in ops:
            values[op.output] = infer(op, tuple(values[value] for value in op.inputs))
        return Net(note.name, inputs, ops, outputs, values, note.batch)

    def _ops(self, note: OpNote) -> tuple[Op, ...]:
        """The operations of all tasks that *note* describes."""
        kernels: Sequence[Array | None] = [None] * self.tasks
        if note.kind == "conv":
            kernels = self._kernels(note)
        return tuple(self._op(note, kernels[task], task) for task in range(self.tasks))

    def _op(self, note: OpNote, kernel: Array | None, entry: int) -> Op:
        """The operation of one task that *note* describes, with *kernel* if it is a convolution.

        *entry*: the task's index in the note's groups, scales and shifts.
        """
        return Op(
            note.name,
            note.kind,
            note.inputs,
            note.output,
            weight=kernel,
            scale=_vector(note.scale, entry),
            shift=_vector(note.shift, entry),
            window=Window() if note.window is None else Window(*note.window),
            groups=note.groups[entry] if note.groups else 1,
            function=note.function,
            settings=note.settings,
        )

    def _whole_kernel(self, note: OpNote, task: int) -> Array | None:
        """The kernel of one task if the file stores it whole; None if *note* is no convolution."""
        if note.kind != "conv":
            return None
        (stored,) = [kernel for kernel in self.note.kernels[note.output] if kernel.task == task and not kernel.outs]
        window = note.window[0] if note.window else (1, 1)
        array = self.weights(stored.weight)
        array = undo_slabs(array, stored.slabs, window) if stored.slabs else array
        return np.ascontiguousarray(array.reshape(len(array), -1, *window))

    def _kernels(self, note: OpNote) -> list[Array]:
        """The kernels of a convolution in all tasks."""
        if not self.note.kernels[note.output][0].outs:  # the kernel of each task is stored whole
            return [array for task in range(self.tasks) if (array := self._whole_kernel(note, task)) is not None]
        outputs, inputs = (channels(value, self.wiring, self.sharing) for value in (note.output, note.inputs[0]))
        stored, assembly = self.note.kernels[note.output], _KernelAssembly(note, outputs, inputs)
        scales = {
            folded: self._scales(note.output, folded, outputs.widths) for folded in {kernel.folded for kernel in stored}
        }
        for kernel in stored:
            assembly.add_weight(kernel, self.weights(kernel.weight), scales[kernel.folded])
        return assembly.kernels_of_tasks()

    def _scales(self, value: str, count: int, widths: Sequence[int]) -> tuple[Array, ...]:
        """For each task, the product of the scales of the *count* affines after *value*, folded into the kernel."""
        affine = Affine.identity(widths)
        for _ in range(count):
            note = next(layer for layer in self.note.layers if layer.kind == "affine" and layer.inputs[0] == value)
            ops = tuple(self._op(note, None, task) for task in range(self.tasks))
            affine = affine.then(Affine.from_layer(FamilyLayer(ops, note.inputs, note.output), widths))
            value = note.output
        return affine.scales


class _KernelAssembly:
    """Assembles the kernels of one layer from pieces in several weights."""

    def __init__(self, note: OpNote, outputs: Channels, inputs: Channels) -> None:
        self.note, self.outputs, self.inputs = note, outputs, inputs
        self.window = note.window[0] if note.window else (1, 1)
        self.depthwise = max(note.groups) > 1
        self.kernels: list[Array] = []
        self.missing_rows: dict[tuple[int, int], Array] = {}
        """Output part and input part of a piece -> a mask of its rows that are missing so far; no entry: all rows are.

        A folded scale of zero erases a row; another task's copy of the piece may have it.
        """

    def add_weight(self, note: KernelNote, array: Array, scales: Sequence[Array]) -> None:
        """Copy the pieces that the weight *array* holds, as *note* says, and that are still missing.

        *scales*: for each task, those that are folded into the weight.
        """
        array = undo_slabs(array, note.slabs, self.window) if note.slabs else array
        row_bounds = _range_bounds([self.outputs.parts[part].width for part in note.outs])
        in_widths = [1] if self.depthwise else [self.inputs.parts[part].width for part in note.ins]
        column_bounds = _range_bounds(in_widths)
        array = array.reshape(row_bounds[-1], column_bounds[-1], *self.window)
        if not self.kernels:
            input_widths = [1] * self.outputs.tasks if self.depthwise else self.inputs.widths
            shapes = zip(self.outputs.widths, input_widths, strict=True)
            self.kernels = [np.zeros((*shape, *self.window), array.dtype) for shape in shapes]
        for row, out in enumerate(note.outs):
            for column, inp in enumerate([_NO_INPUT_PART] if self.depthwise else note.ins):
                rows, columns = slice(*row_bounds[row : row + 2]), slice(*column_bounds[column : column + 2])
                piece = array[rows, columns]
                self._put(out, inp, piece, note.task, scales)

    def _put(self, out_part: int, in_part: int, piece: Array, source_task: int | None, scales: Sequence[Array]) -> None:
        """Write *piece*, without its scale, into the kernels of all tasks that have both *out_part* and *in_part*.

        Parts are given by their indices in ``Channels.parts``. *source_task*: the task whose scale, one of *scales* (by
        task), is folded into *piece*; None: the first that has both parts.
        """
        out = self.outputs.parts[out_part]
        inp = out if self.depthwise else self.inputs.parts[in_part]
        tasks = sorted(out.tasks & inp.tasks)
        missing = self.missing_rows.get((out_part, in_part), np.ones(out.width, bool))
        if not tasks or not missing.any():
            return
        source_task = tasks[0] if source_task is None else source_task
        scale = scales[source_task][out.members[source_task]]
        self.missing_rows[out_part, in_part] = missing & (scale == 0)
        values = _divide_by_scale(piece, scale)[missing]
        for task in tasks:
            columns = np.zeros(1, int) if self.depthwise else inp.members[task]
            self.kernels[task][np.ix_(out.members[task][missing], columns)] = values

    def kernels_of_tasks(self) -> list[Array]:
        """Return the kernels of all tasks; ``StitchError`` if a piece is missing."""
        outs, ins = self.outputs.parts, self.inputs.parts
        expected = {(row, _NO_INPUT_PART) for row in range(len(outs))}
        if not self.depthwise:
            pairs = product(enumerate(outs), enumerate(ins))
            expected = {(row, column) for (row, out), (column, inp) in pairs if out.tasks & inp.tasks}
        if missing := expected - self.missing_rows.keys():
            raise StitchError(f"{self.note.name}: {len(missing)} of {len(expected)} parts of its kernels are missing")
        return self.kernels


def _range_bounds(widths: Sequence[int]) -> list[int]:
    """The first index of each of adjacent ranges of these *widths*, and the end of the last range."""
    return [0, *accumulate(widths)]


def _divide_by_scale(piece: Array, scale: Array) -> Array:
    """Undo the folding of *scale* into the rows of *piece*; rows of scale zero stay as they are."""
    if (scale == 1).all():
        return piece
    divisor = np.where(scale == 0, 1.0, scale)[:, None, None, None]
    return (piece / divisor).astype(piece.dtype)


def _vector(texts: Sequence[Numbers | None], task: int) -> Array | None:
    """The scales or shifts of one task; None if it has none."""
    text = texts[task] if texts else None
    return None if text is None else unpack_numbers(text)


def _port_of(net: Net, value: str) -> Port:
    return next(port for port in net.outputs if port.value == value)


def _space(blocks: Sequence[BlockNote], tasks: int) -> ChannelSpace:
    """The space that its *blocks* describe."""
    described = []
    for note in blocks:
        members = unpack_numbers(note.channels).reshape(len(note.tasks), -1)
        described.append(Block(dict(zip(note.tasks, members.astype(np.int64), strict=True))))
    widths = tuple(sum(block.width for block in described if task in block.tasks) for task in range(tasks))
    return ChannelSpace(widths, tuple(described))


def read_stitched(path: Path) -> tuple[Family, Sharing]:
    """Read the models in a stitched file, and their sharing; ``StitchError`` if it does not describe them."""
    return rebuild_family(*read_note(path, FAMILY_KEY))


def read_note(path: Path, key: str) -> tuple[str, Callable[[str], Array]]:
    """Return the description under *key* in a file's metadata, and a function that returns a weight by its name.

    Raises ``StitchError`` if the file has no such description.
    """
    model = load(path, weights=True)
    text = entries_of(model).get(key, "")
    if not text:
        raise StitchError("it does not say how its models share weights; stitch it again")
    stored = initializers(model.graph)
    return text, cache(lambda name: to_array(stored[name]))
