"""Small families of networks, made by hand or at random with a sharing that is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from weft_stitch.discovery.evidence import Evidence
from weft_stitch.discovery.partition import NONE, Partition
from weft_stitch.family import Family, FamilyLayer, Sharing, Wiring, role, wire
from weft_stitch.net import Net, Op, Port, Window, assemble

BLOCKS = ("conv", "residual", "project", "loop", "dense", "depthwise", "excite")
"""What a random network is made of."""
TANGLES = ("twice", "cut")
"""More blocks: a value that carries one space twice, and a convolution whose output carries several."""

Weigh = Callable[[str, int, tuple[int, ...]], np.ndarray]
"""The weight of a convolution: its name, the task, the shape."""


def family_of(nets: Sequence[Net]) -> Family:
    """Networks whose operations have the same names in the same order."""
    first = nets[0]
    layers = tuple(
        FamilyLayer(ops, ops[0].inputs, ops[0].output) for ops in zip(*(net.ops for net in nets), strict=True)
    )
    values = {value: tuple(net.values[value] for net in nets) for value in first.values}
    outputs = {port.value: tuple(net.outputs[at] for net in nets) for at, port in enumerate(first.outputs)}
    return Family(tuple(nets), layers, values, tuple(port.value for port in first.inputs), outputs)


class Drawing:
    """A network without weights; a width is a list with one number for each task."""

    def __init__(self, channels: Sequence[int]) -> None:
        self.tasks = len(channels)
        self.widths = {"image": list(channels)}
        self.lines: list[tuple[str, str, tuple[str, ...], int]] = []

    def add(self, kind: str, *inputs: str, width: Sequence[int] | None = None, kernel: int = 1) -> str:
        name = f"{kind}{len(self.lines)}"
        self.lines.append((name, kind, inputs, kernel))
        sums = [sum(self.widths[each][task] for each in inputs) for task in range(self.tasks)]
        self.widths[name] = list(width or (sums if kind == "concat" else self.widths[inputs[0]]))
        return name

    def family(self, weigh: Weigh = lambda name, task, shape: np.zeros(shape, np.float32)) -> Family:
        return family_of([self._net(task, weigh) for task in range(self.tasks)])

    def _net(self, task: int, weigh: Weigh) -> Net:
        ops = [self._op(task, weigh, *line) for line in self.lines]
        image = Port("image", "image", (self.widths["image"][task], 4, 4))
        last = ops[-1].output
        return assemble(f"net{task}", (image,), ops, (Port("answer", last, (self.widths[last][task],)),))

    def _op(self, task: int, weigh: Weigh, name: str, kind: str, inputs: tuple[str, ...], kernel: int) -> Op:
        out, read = self.widths[name][task], self.widths[inputs[0]][task]
        window = Window((kernel, kernel), pads=(kernel // 2,) * 4)
        if kind == "depthwise":
            weight = weigh(name, task, (out, 1, kernel, kernel))
            return Op(name, "conv", inputs, name, weight, window=window, groups=out)
        if kind == "conv":
            return Op(name, kind, inputs, name, weigh(name, task, (out, read, kernel, kernel)), window=window)
        if kind == "affine":
            rng = np.random.default_rng(task)
            scale, shift = rng.standard_normal((2, out)).astype(np.float32)
            return Op(name, kind, inputs, name, scale=scale, shift=shift)
        return Op(name, kind, inputs, name, function="Relu" if kind == "unary" else "")


@dataclass(frozen=True)
class Planted:
    """A family and the sharing that was put into it."""

    family: Family
    sharing: Sharing


def draw(blocks: Sequence[str], tasks: int, rng: np.random.Generator) -> Drawing:
    """A network of these blocks, with widths from 4 to 9."""
    drawing = Drawing([3] * tasks)

    def width() -> list[int]:
        least = rng.integers(4, 8)
        return [int(least + rng.integers(3)) for _ in range(tasks)]

    def conv(value: str, out: Sequence[int] | None = None, kernel: int = 1) -> str:
        return drawing.add("conv", value, width=out or width(), kernel=kernel)

    value = drawing.add("unary", drawing.add("affine", conv("image", kernel=3)))
    for block in blocks:
        mine = drawing.widths[value]
        if block == "conv":
            value = conv(value, kernel=3)
        elif block == "residual":
            value = drawing.add("add", value, conv(drawing.add("unary", conv(value, kernel=3)), mine))
        elif block == "project":
            out = width()
            value = drawing.add("add", conv(conv(value), out), conv(value, out))
        elif block == "loop":
            value = drawing.add("add", conv(value, mine), value)
        elif block == "dense":
            value = drawing.add("concat", value, conv(value, kernel=3))
        elif block == "twice":
            value = drawing.add("concat", value, drawing.add("unary", value))
        elif block == "cut":
            joined = drawing.add("concat", value, conv(value, kernel=3))
            value = drawing.add("add", joined, conv(value, drawing.widths[joined]))
        elif block == "depthwise":
            value = drawing.add("affine", drawing.add("depthwise", value, kernel=3))
        else:
            gate = conv(conv(drawing.add("global_pool", value)), mine)
            value = drawing.add("mul", value, drawing.add("unary", gate))
    conv(drawing.add("global_pool", value))
    return drawing


def plant(
    drawing: Drawing,
    rng: np.random.Generator,
    *,
    ratio: float = 0.6,
    clusters: Sequence[Sequence[int]] = (),
    zeros: float = 0.0,
    misleading: float = 0.0,
) -> Planted:
    """A family whose weights depend on the classes of both their channels alone.

    zeros: chance that a class (not the first of a space) has filters of nothing but zeros. misleading: chance that the
    first layer that writes a space has the same filters for channels that are not shared.
    """
    empty = drawing.family()
    wiring = wire(empty)
    partitions = {space: _partition(widths, rng, ratio, clusters) for space, widths in wiring.widths.items()}
    partitions["image"].replace(np.repeat(np.arange(3)[:, None], drawing.tasks, axis=1))
    dead = {space: rng.random(len(each.members)) < zeros for space, each in partitions.items()}
    tables: dict[str, np.ndarray] = {}
    written: set[str] = set()
    for layer in empty.layers:
        if role(layer) in ("dense", "depthwise"):
            inputs = 1 if role(layer) == "depthwise" else _classes(wiring, partitions, layer.inputs[0])
            shape = _classes(wiring, partitions, layer.output), inputs, *layer.op.window.kernel
            table = tables[layer.output] = rng.standard_normal(shape, np.float32)
            start = 0
            for space in wiring.carries[layer.output]:
                rows = table[start : start + len(partitions[space].members)]
                if space not in written and rng.random() < misleading:
                    _mislead(rows, partitions[space])
                rows[1:][dead[space][1:]] = 0
                written.add(space)
                start += len(rows)
    sources = {layer.output: layer.inputs[0] for layer in empty.layers}

    def weigh(name: str, task: int, shape: tuple[int, ...]) -> np.ndarray:
        rows = tables[name][_labels(wiring, partitions, name, task)]
        return np.ascontiguousarray(
            rows if rows.shape[1] == shape[1] == 1 else rows[:, _labels(wiring, partitions, sources[name], task)]
        )

    sharing = Sharing({space: partition.space() for space, partition in partitions.items()})
    return Planted(drawing.family(weigh), sharing)


def random_family(blocks: Sequence[str], tasks: int, seed: int, **settings: Any) -> Planted:
    """A network of these blocks with something planted; *settings* are those of ``plant``."""
    rng = np.random.default_rng(seed)
    return plant(draw(blocks, tasks, rng), rng, **settings)


TANGLED = st.builds(
    random_family,
    st.lists(st.sampled_from((*TANGLES, *BLOCKS)), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 99),
    ratio=st.sampled_from([0.0, 0.6, 1.0]),
)
"""Families in which concatenations and additions meet in any order."""


def changed(family: Family, change: Callable[[int, Op], Op]) -> Family:
    """The family with each operation of each task replaced."""
    nets = [replace(net, ops=tuple(change(task, op) for op in net.ops)) for task, net in enumerate(family.nets)]
    return family_of(nets)


def stored(family: Family, sharing: Sharing) -> int:
    """Weights that are left when none that is shared is stored twice."""
    partitions = {name: Partition.from_space(space) for name, space in sharing.spaces.items()}
    return Evidence(family, wire(family), partitions).stored


def pairs(sharing: Sharing) -> set[tuple[str, int, int, int, int]]:
    """Every two channels that are said to be the same: space, task, channel, task, channel."""
    return {
        (name, one, int(mine), two, int(theirs))
        for name, space in sharing.spaces.items()
        for block in space.blocks
        for one in block.tasks
        for two in block.tasks
        if one < two
        for mine, theirs in zip(block.members[one], block.members[two], strict=True)
    }


def _partition(
    widths: tuple[int, ...], rng: np.random.Generator, ratio: float, clusters: Sequence[Sequence[int]]
) -> Partition:
    """At least one class of all tasks, then some of each cluster, then those of single tasks."""
    left = [rng.permutation(width).tolist() for width in widths]
    everyone = range(len(widths))
    shares = [(everyone, max(1, round(ratio * min(widths)))), *((tasks, 2) for tasks in clusters)]
    rows = []
    for tasks, count in [*shares, *(([task], width) for task, width in enumerate(widths))]:
        for _ in range(min(count, *(len(left[task]) for task in tasks))):
            rows.append([left[task].pop() if task in tasks else NONE for task in everyone])
    result = Partition(widths)
    result.replace(np.array(rows))
    return result


def _mislead(rows: np.ndarray, partition: Partition) -> None:
    """Give the n-th channel that each task has for itself the same filter."""
    single = partition.part_of == NONE
    own = [np.flatnonzero(single & (column != NONE)) for column in partition.members.T]
    for mine in own[1:]:
        count = min(len(own[0]), len(mine))
        rows[mine[:count]] = rows[own[0][:count]]


def _labels(wiring: Wiring, partitions: dict[str, Partition], value: str, task: int) -> np.ndarray:
    starts = np.cumsum([0, *(len(partitions[space].members) for space in wiring.carries[value])])
    labels = [partitions[space].labels[task] for space in wiring.carries[value]]
    return np.concatenate([start + each for start, each in zip(starts, labels, strict=False)])


def _classes(wiring: Wiring, partitions: dict[str, Partition], value: str) -> int:
    return sum(len(partitions[space].members) for space in wiring.carries[value])
