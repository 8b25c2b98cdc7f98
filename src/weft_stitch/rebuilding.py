"""The models that a stitched file was made of, from what it says of them and its weights: ``rebuilt``.

They equal those that ``described`` was given but for the names that models beside the first give to their layers, and
for the last digit of kernels that the file has scaled.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate, product

import numpy as np
from pydantic import ValidationError

from weft.base.errors import ModelError, StitchError
from weft.base.jsonfile import first_problem
from weft.runtime.metadata import FAMILY_KEY
from weft_stitch.described import (
    VERSION,
    BlockNote,
    FamilyNote,
    KernelNote,
    Numbers,
    OpNote,
    unpacked,
)
from weft_stitch.family import Family, FamilyLayer
from weft_stitch.layouts import Channels
from weft_stitch.net import (
    Array,
    Net,
    Op,
    Port,
    Value,
    Window,
    infer,
)
from weft_stitch.sharing import Block, ChannelSpace, Sharing
from weft_stitch.slabs import unslabbed
from weft_stitch.spaces import Wiring, wire
from weft_stitch.weights import Affine, channels

Weights = Callable[[str], Array]
"""A file's weights by name."""
_ALONE = -1
"""Instead of a part that is read: of a depthwise layer."""


def rebuilt(text: str, weights: Weights) -> tuple[Family, Sharing]:
    """The models that ``described`` told of, and what they share."""
    try:
        noted = FamilyNote.model_validate_json(text)
        if noted.version != VERSION:
            raise StitchError(f"its {FAMILY_KEY} is of version {noted.version}, not {VERSION}; stitch it again")
        if noted.missing:
            raise StitchError(noted.missing)
        return _Rebuilding(noted, weights).family()
    except ValidationError as error:
        raise StitchError(f"its {FAMILY_KEY} cannot be read: {first_problem(error, FamilyNote)}") from error
    except (LookupError, TypeError, ValueError, StopIteration, zlib.error, ModelError) as error:
        raise StitchError(f"its {FAMILY_KEY} does not fit its weights ({error}); stitch it again") from error


class _Rebuilding:
    """Reads a family from a file."""

    def __init__(self, noted: FamilyNote, weights: Weights) -> None:
        self.noted, self.weights, self.tasks = noted, weights, len(noted.nets)
        self.sharing = Sharing({name: _space(blocks, self.tasks) for name, blocks in noted.spaces.items()})
        self.wiring = Wiring(noted.carries, {}, {})

    def family(self) -> tuple[Family, Sharing]:
        noted = self.noted
        layers = tuple(FamilyLayer(self._ops(each), each.inputs, each.output) for each in noted.layers)
        tails = tuple(
            tuple(self._op(op, self._whole(op, task), 0) for op in net.tail) for task, net in enumerate(noted.nets)
        )
        nets = tuple(self._net(task, layers, tails[task]) for task in range(self.tasks))
        bridges = tuple(net.reads for net in noted.nets)
        apart = any(tails) or any(bridges)
        family = Family(
            nets,
            layers,
            {value: tuple(net.values[value] for net in nets) for value in noted.carries},
            tuple(port.value for port in nets[0].inputs),
            {value: tuple(_port_of(net, value) for net in nets) for value in noted.outputs},
            tails if apart else (),
            bridges if apart else (),
        )
        if wire(family).carries != noted.carries:
            raise StitchError(f"its {FAMILY_KEY} does not fit its layers; stitch it again")
        return family, self.sharing

    def _net(self, task: int, layers: Sequence[FamilyLayer], tail: Sequence[Op]) -> Net:
        note = self.noted.nets[task]
        ports = [
            tuple(Port(each.name, each.value, each.shape) for each in side) for side in (note.inputs, note.outputs)
        ]
        values = {port.value: Value(*size) for port, size in zip(ports[0], note.sizes, strict=True)}
        ops = (*(layer.ops[task] for layer in layers), *tail)
        for op in ops:
            values[op.output] = infer(op, tuple(values[each] for each in op.inputs))
        return Net(note.name, ports[0], ops, ports[1], values, note.batch)

    def _ops(self, note: OpNote) -> tuple[Op, ...]:
        kernels: Sequence[Array | None] = [None] * self.tasks
        if note.kind == "conv":
            kernels = self._kernels(note)
        return tuple(self._op(note, kernels[task], task) for task in range(self.tasks))

    def _op(self, note: OpNote, kernel: Array | None, task: int) -> Op:
        return Op(
            note.name,
            note.kind,
            note.inputs,
            note.output,
            kernel,
            _vector(note.scale, task),
            _vector(note.shift, task),
            Window() if note.window is None else Window(*note.window),
            note.groups[task] if note.groups else 1,
            note.function,
            note.settings,
        )

    def _whole(self, note: OpNote, task: int) -> Array | None:
        """A kernel that is in the file as the model has it."""
        if note.kind != "conv":
            return None
        (found,) = [each for each in self.noted.kernels[note.output] if each.task == task and not each.outs]
        window = note.window[0] if note.window else (1, 1)
        array = self.weights(found.weight)
        array = unslabbed(array, found.slabs, window) if found.slabs else array
        return np.ascontiguousarray(array.reshape(len(array), -1, *window))

    def _kernels(self, note: OpNote) -> list[Array]:
        """The kernels of all tasks of a convolution."""
        if not self.noted.kernels[note.output][0].outs:
            return [array for task in range(self.tasks) if (array := self._whole(note, task)) is not None]
        outputs, inputs = (channels(value, self.wiring, self.sharing) for value in (note.output, note.inputs[0]))
        held, assembly = self.noted.kernels[note.output], _Kernels(note, outputs, inputs)
        scales = {each: self._scales(note.output, each, outputs.widths) for each in {kernel.folded for kernel in held}}
        for kernel in held:
            assembly.take(kernel, self.weights(kernel.weight), scales[kernel.folded])
        return assembly.finished()

    def _scales(self, value: str, layers: int, widths: Sequence[int]) -> tuple[Array, ...]:
        """What so many of the affines after *value* scale it by, in each task."""
        affine = Affine.none(widths)
        for _ in range(layers):
            note = next(each for each in self.noted.layers if each.kind == "affine" and each.inputs[0] == value)
            ops = tuple(self._op(note, None, task) for task in range(self.tasks))
            affine, value = affine.then(Affine.of(FamilyLayer(ops, note.inputs, note.output), widths)), note.output
        return affine.scales


class _Kernels:
    """The kernels of one layer, put together of what several weights hold."""

    def __init__(self, note: OpNote, outputs: Channels, inputs: Channels) -> None:
        self.note, self.outputs, self.inputs = note, outputs, inputs
        self.window = note.window[0] if note.window else (1, 1)
        self.depthwise = max(note.groups) > 1
        self.kernels: list[Array] = []
        self.lost: dict[tuple[int, int], Array] = {}
        """Parts that are there -> which of their rows a scale of zero has wiped out; another task may have them."""

    def take(self, note: KernelNote, array: Array, scales: Sequence[Array]) -> None:
        """Take what is not there yet of one weight."""
        array = unslabbed(array, note.slabs, self.window) if note.slabs else array
        rows = _starts([self.outputs.parts[each].width for each in note.outs])
        columns = [0, 1] if self.depthwise else _starts([self.inputs.parts[each].width for each in note.ins])
        array = array.reshape(rows[-1], columns[-1], *self.window)
        if not self.kernels:
            deep = [1] * self.outputs.tasks if self.depthwise else self.inputs.widths
            shapes = zip(self.outputs.widths, deep, strict=True)
            self.kernels = [np.zeros((*shape, *self.window), array.dtype) for shape in shapes]
        for at, out in enumerate(note.outs):
            for beside, inp in enumerate([_ALONE] if self.depthwise else note.ins):
                piece = array[rows[at] : rows[at + 1], columns[beside] : columns[beside + 1]]
                self._put(out, inp, piece, note.task, scales)

    def _put(self, row: int, column: int, piece: Array, lender: int | None, scales: Sequence[Array]) -> None:
        """Give a piece to all tasks that have both its parts."""
        out = self.outputs.parts[row]
        inp = out if self.depthwise else self.inputs.parts[column]
        tasks = sorted(out.tasks & inp.tasks)
        lost = self.lost.get((row, column), np.ones(out.width, bool))
        if not tasks or not lost.any():
            return
        first = tasks[0] if lender is None else lender
        scale = scales[first][out.members[first]]
        self.lost[row, column] = lost & (scale == 0)
        found = _unscaled(piece, scale)[lost]
        for task in tasks:
            columns = np.zeros(1, int) if self.depthwise else inp.members[task]
            self.kernels[task][np.ix_(out.members[task][lost], columns)] = found

    def finished(self) -> list[Array]:
        """The kernels, if nothing is missing."""
        outs, ins = self.outputs.parts, self.inputs.parts
        wanted = {(row, _ALONE) for row in range(len(outs))}
        if not self.depthwise:
            pairs = product(enumerate(outs), enumerate(ins))
            wanted = {(row, column) for (row, out), (column, inp) in pairs if out.tasks & inp.tasks}
        if missing := wanted - self.lost.keys():
            raise StitchError(f"{self.note.name}: {len(missing)} of {len(wanted)} parts of its kernels are missing")
        return self.kernels


def _starts(widths: Sequence[int]) -> list[int]:
    return [0, *accumulate(widths)]


def _unscaled(piece: Array, scale: Array) -> Array:
    if (scale == 1).all():
        return piece
    safe = np.where(scale == 0, 1.0, scale)[:, None, None, None]
    return (piece / safe).astype(piece.dtype)


def _vector(told: Sequence[Numbers | None], task: int) -> Array | None:
    text = told[task] if told else None
    return None if text is None else unpacked(text)


def _port_of(net: Net, value: str) -> Port:
    return next(port for port in net.outputs if port.value == value)


def _space(blocks: Sequence[BlockNote], tasks: int) -> ChannelSpace:
    found = []
    for each in blocks:
        members = unpacked(each.channels).reshape(len(each.tasks), -1)
        found.append(Block(dict(zip(each.tasks, members.astype(np.int64), strict=True))))
    widths = tuple(sum(block.width for block in found if task in block.tasks) for task in range(tasks))
    return ChannelSpace(widths, tuple(found))
