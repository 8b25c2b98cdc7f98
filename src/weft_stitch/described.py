"""What a stitched file says of the models in it, so that they can be had from it again: ``described``.

The layers, which channels are shared by whom, and where the kernels lie among the file's own weights, by name and rows;
no kernel is stored a second time. Scales and shifts, which are few, are told as they are. ``rebuilding`` reads it.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from weft.runtime.metadata import FAMILY_KEY
from weft_stitch.family import Family
from weft_stitch.graph import Graph, Origin
from weft_stitch.layouts import tidy
from weft_stitch.net import Array, Op, Window
from weft_stitch.sharing import Block, Sharing
from weft_stitch.spaces import wire

VERSION = 1

Numbers = str
"""An array: its type, a colon, and its bytes, compressed and in base64."""


class _Noted(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class OpNote(_Noted):
    """An operation of all tasks, or of one."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    output: str
    window: tuple[tuple[int, int], tuple[int, int], tuple[int, int, int, int], tuple[int, int]] | None = None
    """Kernel, strides, pads, dilations; None: of one position."""
    groups: tuple[int, ...] = ()
    function: str = ""
    settings: dict[str, float] = {}
    scale: tuple[Numbers | None, ...] = ()
    shift: tuple[Numbers | None, ...] = ()


class KernelNote(_Noted):
    """Kernels in one of the file's weights, see ``Origin``."""

    weight: str
    outs: tuple[int, ...] = ()
    ins: tuple[int, ...] = ()
    task: int | None = None
    folded: int = 0
    slabs: tuple[int, ...] = ()


class PortNote(_Noted):
    name: str
    value: str
    shape: tuple[int, ...]


class NetNote(_Noted):
    name: str
    batch: int
    inputs: tuple[PortNote, ...]
    outputs: tuple[PortNote, ...]
    sizes: tuple[tuple[int, int, int], ...]
    """Of its inputs, as the layers see them."""
    tail: tuple[OpNote, ...] = ()
    """What it does alone."""
    reads: dict[str, str] = {}
    """What that reads of the common part, by the names that it has there."""


class BlockNote(_Noted):
    tasks: tuple[int, ...]
    channels: Numbers
    """Of each of them."""


class FamilyNote(_Noted):
    """All of it."""

    version: int
    missing: str = ""
    """Why there is nothing of what follows."""
    layers: tuple[OpNote, ...] = ()
    nets: tuple[NetNote, ...] = ()
    outputs: tuple[str, ...] = ()
    carries: dict[str, tuple[str, ...]] = {}
    """The spaces of each value."""
    spaces: dict[str, tuple[BlockNote, ...]] = {}
    kernels: dict[str, tuple[KernelNote, ...]] = {}
    """By what the convolution writes."""


def described(family: Family, sharing: Sharing, graph: Graph) -> dict[str, str]:
    """What a file of *graph*, whose rows are open, says of its models, or why it does not."""
    missing = _missing(family)
    noted = FamilyNote(version=VERSION, missing=missing) if missing else _noted(family, sharing, graph)
    return {FAMILY_KEY: noted.model_dump_json(exclude_defaults=True)}


def _missing(family: Family) -> str:
    """Why models cannot be had from their file again; empty if they can."""
    if any(net.tuned for net in family.nets):
        return "its models are tuned, and their weights are kept in few bits"
    ops = [op for layer in family.layers for op in layer.ops] + [op for tail in family.tails for op in tail]
    foreign = next((op.name for op in ops if op.payload is not None), "")
    return f"{foreign} is an operator that is kept as it stands in the model" if foreign else ""


def _noted(family: Family, sharing: Sharing, graph: Graph) -> FamilyNote:
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
    """For each task what its own values are called: those that tails write get names that the family does not have."""
    names = []
    for task, net in enumerate(family.nets):
        made = {op.output: f"{net.name}/{op.output}" for op in family.tails[task]} if family.tails else {}
        common = {ports[task].value: value for value, ports in family.outputs.items()}
        names.append(common | dict(family.bridges[task] if family.bridges else {}) | made)
    return names


def _op_note(ops: Sequence[Op], inputs: tuple[str, ...], output: str) -> OpNote:
    first = ops[0]
    window = first.window
    sizes = (window.kernel, window.strides, window.pads, window.dilations)
    affine = first.kind == "affine"
    return OpNote(
        name=first.name,
        kind=first.kind,
        inputs=inputs,
        output=output,
        window=None if window == Window() else sizes,
        groups=tuple(op.groups for op in ops) if first.kind == "conv" else (),
        function=first.function,
        settings=dict(first.settings),
        scale=tuple(_optional(op.scale) for op in ops) if affine else (),
        shift=tuple(_optional(op.shift) for op in ops) if affine else (),
    )


def _net_note(family: Family, task: int, names: Mapping[str, str]) -> NetNote:
    net = family.nets[task]
    sizes = [net.values[port.value] for port in net.inputs]
    tail = family.tails[task] if family.tails else ()
    inputs = zip(net.inputs, family.inputs, strict=True)
    return NetNote(
        name=net.name,
        batch=net.batch,
        inputs=tuple(PortNote(name=port.name, value=value, shape=port.shape) for port, value in inputs),
        outputs=tuple(PortNote(name=port.name, value=names[port.value], shape=port.shape) for port in net.outputs),
        sizes=tuple((each.channels, each.height, each.width) for each in sizes),
        tail=tuple(_op_note([op], tuple(names[each] for each in op.inputs), names[op.output]) for op in tail),
        reads={value: value for value in family.bridges[task].values()} if family.bridges else {},
    )


def _block_note(block: Block) -> BlockNote:
    tasks = sorted(block.tasks)
    return BlockNote(tasks=tuple(tasks), channels=_packed(np.stack([block.members[task] for task in tasks]), np.int32))


def _kernel_notes(
    family: Family, graph: Graph, names: Sequence[Mapping[str, str]]
) -> dict[str, tuple[KernelNote, ...]]:
    whose = {id(op): (layer.output, task) for layer in family.layers for task, op in enumerate(layer.ops)}
    for task, tail in enumerate(family.tails):
        whose |= {id(op): (names[task][op.output], task) for op in tail}
    found: dict[str, list[KernelNote]] = {}
    for each in graph.origins:
        if each.constant in graph.constants:
            value, task = whose[id(each.op)]
            found.setdefault(value, []).append(_kernel_note(each, task))
    return {value: tuple(notes) for value, notes in found.items()}


def _kernel_note(origin: Origin, task: int) -> KernelNote:
    """*task*: whose it is if it is stored as it is."""
    return KernelNote(
        weight=origin.constant,
        outs=origin.outs,
        ins=origin.ins,
        task=origin.task if origin.outs else task,
        folded=origin.folded,
        slabs=origin.slabs,
    )


def _packed(array: Array, dtype: Any = None) -> Numbers:
    flat = np.ascontiguousarray(array, dtype)
    return f"{flat.dtype.name}:{base64.b64encode(zlib.compress(flat.tobytes())).decode()}"


def _optional(array: Array | None) -> Numbers | None:
    return None if array is None else _packed(array)


def unpacked(text: Numbers) -> Array:
    """The array that a text of ``Numbers`` is."""
    kind, _, data = text.partition(":")
    return np.frombuffer(zlib.decompress(base64.b64decode(data)), kind)
