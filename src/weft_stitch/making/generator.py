"""Weight-shared models without training: ``generate``, and ``FamilyRecipe`` for one model at a time.

A channel *space* is a set of channels that several values of a model carry, as the operands of an addition do. In every
space a part of the channels is common to all tasks (models), the rest belongs to subsets or to one task, and each task
has them in an order of its own. Channels of the same tasks are a *block* of the space. A piece of a layer's weight,
from one block of channels to another, is drawn from the seed, the layer and the two blocks alone, so that it is the
same in all tasks that have both, whichever model is generated first.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.errors import StitchError
from weft.base.files import make_folder
from weft_stitch.family import Block, ChannelSpace, Sharing
from weft_stitch.graph import Builder, Graph
from weft_stitch.graph_steps import begin_graph, convolve, emit, finish_graph
from weft_stitch.making.architectures import (
    ANY_WIDTH,
    CLASSES,
    IMAGE,
    NetSketch,
    SketchNode,
    Wire,
    find_architecture,
    plan,
)
from weft_stitch.net import Array, Net, Op, Port, assemble

PER_TASK, SHARED, FOLDED = "per_task", "shared", "folded"
"""Kinds of normalisation; see ``FamilyRecipe.norm``."""

RATIO = 0.9
"""Default sharing: the fraction of the narrowest task's channels that all tasks share."""


@dataclass(frozen=True, eq=False)
class Generated:
    """Generated models, and the sharing that was built into them."""

    nets: tuple[Net, ...]
    planted: Sharing


def generate(architecture: str, tasks: int, **settings: Any) -> Generated:
    """Generate *tasks* models of one architecture that share weights. *settings*: fields of ``FamilyRecipe``."""
    recipe = FamilyRecipe(architecture, tasks, **settings)
    return Generated(tuple(recipe.nets()), recipe.planted)


@dataclass(frozen=True, eq=False)
class FamilyRecipe:
    """Describes the models to generate; ``net`` generates one of them without the others."""

    architecture: str
    tasks: int
    pruning: float = 0.0
    """The fraction of every inner width that is pruned."""
    sharing: float | Mapping[str, float] | Callable[[str], float] = RATIO
    """Channels that all tasks share, as a fraction of the narrowest task's.

    One number for every space, or by the space's name (a space that a mapping lacks: 0.9).
    """
    norm: str = PER_TASK
    """``per_task``: each task has its own; ``shared``: equal on shared channels; ``folded``: only biases."""
    widths: Sequence[float] | None = None
    """For each task, a factor on every inner width."""
    classes: int | Sequence[int] | None = None
    batches: int | Sequence[int] = 1
    resolution: int | None = None
    """Height and width of the pictures; by default, as for *classes*, the architecture's."""
    channels: int = 3
    """Channels of the pictures."""
    seed: int = 0
    permute: bool = True
    """Whether each task has its channels in a random order of its own."""
    multiple: int = 1
    """Shared channels of a space are rounded to a multiple of this, if the narrowest task has at least as many."""
    clusters: Sequence[Sequence[int]] | None = None
    """Subsets of the tasks that share more, in turn: each shares a fraction of the channels not shared yet."""
    cluster_sharing: float = 0.5
    """That fraction, of what the subset's narrowest task has left."""
    activation: str | None = None
    """Activation to use instead of the architecture's."""

    def __post_init__(self) -> None:
        if self.tasks < 1:
            raise StitchError(f"{self.tasks} tasks: give 1 or more")
        if not 0 <= self.pruning < 1:
            raise StitchError(f"pruning {self.pruning}: give a part from 0 to below 1")
        if self.multiple < 1:
            raise StitchError(f"multiple {self.multiple}: give 1 or more")
        if self.norm not in (PER_TASK, SHARED, FOLDED):
            raise StitchError(f"norm is {self.norm!r}; it may be {PER_TASK}, {SHARED} or {FOLDED}")
        if self.widths is not None and len(self.widths) != self.tasks:
            raise StitchError(f"{len(self.widths)} widths for {self.tasks} tasks; give one for each")
        if invalid := [factor for factor in self.widths or () if not 0 < factor < inf]:
            raise StitchError(f"a width of {invalid[0]}: give factors above 0, as 0.9")
        for tasks in self.clusters or ():
            if not tasks or not set(tasks) <= set(range(self.tasks)):
                listed = ", ".join(map(str, tasks))
                raise StitchError(f"a cluster of tasks {listed}, but tasks go from 0 to {self.tasks - 1}")
        if isinstance(self.sharing, Mapping) and (unknown := set(self.sharing) - set(self.plan.spaces)):
            raise StitchError(f"{self.architecture} has no space {min(unknown)}; it has {', '.join(self.plan.spaces)}")

    @cached_property
    def plan(self) -> NetSketch:
        """The architecture's operations, without weights."""
        return plan(self.architecture, self.resolution, self.activation, self.channels)

    @cached_property
    def planted(self) -> Sharing:
        """The sharing that is built into the models."""
        return Sharing({name: self._space(name, wire) for name, wire in self.plan.spaces.items()})

    def nets(self) -> Iterator[Net]:
        """Generate one model after another, so that many large ones need not be in memory together."""
        return (self.net(task) for task in range(self.tasks))

    def net(self, task: int) -> Net:
        """The model of *task*."""
        picture = Port("image", "image", (self.channels, self.plan.resolution, self.plan.resolution))
        classes = self._widths(Wire(ANY_WIDTH, CLASSES))[task]
        answer = Port("logits", self.plan.output, (classes,))
        ops = [self._op(node, task) for node in self.plan.nodes]
        name = f"{self.architecture}-{task}"
        return assemble(name, (picture,), ops, (answer,), _one_per_task("batches", self.batches, self.tasks)[task])

    def _space(self, name: str, wire: Wire) -> ChannelSpace:
        """The space *name*: the blocks of channels that tasks share or have for themselves; *wire*: its sketch."""
        widths = self._widths(wire)
        if wire.role == IMAGE:
            return ChannelSpace.common(wire.width, self.tasks)
        if wire.role == CLASSES:
            return ChannelSpace.completed(widths)
        orders = [self._order(name, task, width) for task, width in enumerate(widths)]
        assigned = [0] * self.tasks  # for each task, its channels in blocks so far
        blocks = []
        for tasks, width in self._block_widths(name, widths):
            blocks.append(Block({task: orders[task][assigned[task] : assigned[task] + width] for task in tasks}))
            for task in tasks:
                assigned[task] += width
        return ChannelSpace(widths, tuple(blocks))

    def _block_widths(self, name: str, widths: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
        """The blocks of the space *name*, each as its tasks and number of channels; blocks of many tasks come first.

        *widths*: for each task, its number of channels in the space.
        """
        remaining = list(widths)
        blocks: Counter[tuple[int, ...]] = Counter()  # tasks -> number of channels
        all_tasks = tuple(range(self.tasks))
        for tasks in (all_tasks, *(tuple(sorted(set(cluster))) for cluster in self.clusters or ())):
            narrowest = min(remaining[task] for task in tasks)
            # the first block is that of all tasks
            width = round(self.cluster_sharing * narrowest) if blocks else self._shared_width(name, narrowest)
            blocks[tasks] += width
            for task in tasks:
                remaining[task] -= width
        blocks.update({(task,): width for task, width in enumerate(remaining)})
        yield from ((tasks, width) for tasks, width in sorted(blocks.items(), key=_most_tasks_first) if width)

    def _shared_width(self, name: str, narrowest: int) -> int:
        """Number of channels of the space *name* that all tasks share; *narrowest*: the least width of a task."""
        ratio = self.sharing
        if callable(ratio):
            ratio = ratio(name)
        elif isinstance(ratio, Mapping):
            ratio = ratio.get(name, RATIO)
        if not 0 <= ratio <= 1:
            raise StitchError(f"space {name}: a sharing of {ratio} is not from 0 to 1")
        multiple = self.multiple if self.multiple <= narrowest else 1
        return min(round(ratio * narrowest / multiple), narrowest // multiple) * multiple

    def _widths(self, wire: Wire) -> tuple[int, ...]:
        """Each task's width of *wire*, after pruning."""
        if wire.role == IMAGE:
            return (wire.width,) * self.tasks
        if wire.role == CLASSES:
            classes = find_architecture(self.architecture).classes if self.classes is None else self.classes
            return _one_per_task("classes", classes, self.tasks)
        factors = self.widths or (1.0,) * self.tasks
        return tuple(max(1, round(factor * (1 - self.pruning) * wire.width)) for factor in factors)

    def _order(self, name: str, task: int, width: int) -> Array:
        """The order of a task's channels in the space *name*."""
        return self._random("order", name, task).permutation(width) if self.permute else np.arange(width)

    def _op(self, node: SketchNode, task: int) -> Op:
        """The operation *node* with the weights of *task*."""
        if node.kind == "conv":
            return Op(node.name, "conv", node.inputs, node.name, self._weight(node, task), window=node.window)
        if node.kind == "depthwise":
            filters = self._filters(node, task)
            return Op(node.name, "conv", node.inputs, node.name, filters, window=node.window, groups=len(filters))
        if node.kind in ("norm", "bias"):
            return self._affine(node, task)
        function, settings = node.function, node.settings
        return Op(
            node.name, node.kind, node.inputs, node.name, window=node.window, function=function, settings=settings
        )

    def _weight(self, node: SketchNode, task: int) -> Array:
        """The weight [out, in, height, width] of *task*, drawn by pieces so that shared ones are equal in all tasks."""
        (out,), input_spaces = self._spaces(node.name), self._spaces(node.inputs[0])
        height, width = node.window.kernel
        channels = sum(space.widths[task] for space in input_spaces)
        # the mean over all tasks: with each task's own width, shared pieces would be scaled differently
        mean_channels = sum(sum(space.widths) for space in input_spaces) / self.tasks
        deviation = self._deviation(node, mean_channels * height * width)
        weight = np.empty((out.widths[task], channels, height, width), np.float32)
        for out_index, block in _number_blocks(out, task):
            for key, columns in _block_channels(input_spaces, task):
                rows = block.members[task]
                piece = self._random("weight", node.name, out_index, *key).standard_normal(
                    (len(rows), len(columns), height, width), np.float32
                )
                weight[np.ix_(rows, columns)] = deviation * piece
        return weight

    def _filters(self, node: SketchNode, task: int) -> Array:
        """The weight [channels, 1, height, width] of a depthwise convolution."""
        height, width = node.window.kernel
        deviation = self._deviation(node, height * width)
        return deviation * self._blockwise(
            node, task, lambda rng, count: rng.standard_normal((count, 1, height, width), np.float32)
        )

    def _affine(self, node: SketchNode, task: int) -> Op:
        """A bias or a normalisation of *task*."""
        owner = task if self.norm == PER_TASK else -1  # -1: equal for all tasks of a block
        shift = self._blockwise(node, task, lambda rng, count: 0.2 * rng.standard_normal(count, np.float32), owner)
        scale = np.ones_like(shift)
        if node.kind == "norm" and self.norm != FOLDED:
            scale = self._blockwise(node, task, lambda rng, count: rng.uniform(0.7, 1.3, count), owner, "scale")
        return Op(node.name, "affine", node.inputs, node.name, scale=scale, shift=shift)

    def _blockwise(
        self,
        node: SketchNode,
        task: int,
        draw: Callable[[np.random.Generator, int], Array],
        owner: int = -1,
        purpose: str = "shift",
    ) -> Array:
        """Draw numbers for each channel that *node* writes, equal for all tasks of a block.

        *draw*: returns some numbers per channel, from a generator and the number of channels. *owner*: a task that gets
        numbers of its own instead; -1: none. *purpose*: tells draws for one node apart.
        """
        numbers_by_space = []
        for space_index, space in enumerate(self._spaces(node.name)):
            numbers_by_block = [
                draw(self._random(purpose, node.name, space_index, block_index, owner), block.width)
                for block_index, block in _number_blocks(space, task)
            ]
            inverse = np.argsort(space.order(task))  # from the order of the blocks to that of the task's channels
            numbers_by_space.append(np.concatenate(numbers_by_block)[inverse])
        return np.concatenate(numbers_by_space).astype(np.float32)

    def _deviation(self, node: SketchNode, sources: float) -> np.float32:
        """The standard deviation of weights that gives an output of mean square one; *sources*: inputs per output."""
        return np.float32((node.power * sources) ** -0.5)

    def _spaces(self, value: str) -> list[ChannelSpace]:
        """The spaces that *value* carries."""
        return [self.planted[name] for name in self.plan.carries[value]]

    def _random(self, purpose: str, name: str, *numbers: int) -> np.random.Generator:
        """A random generator that depends on the recipe's seed and the arguments only."""
        # seeds may not be negative, and -1 stands for no task
        key = [zlib.crc32(f"{purpose} {name}".encode()), *(number + 1 for number in numbers)]
        return np.random.default_rng([self.seed, *key])


def _most_tasks_first(share: tuple[tuple[int, ...], int]) -> tuple[int, tuple[int, ...]]:
    """Sort key of blocks, given as tasks and number of channels."""
    tasks, _ = share
    return -len(tasks), tasks


def _one_per_task(argument: str, counts: int | Sequence[int], tasks: int) -> tuple[int, ...]:
    """*counts*, the value of *argument*, for each task; ``StitchError`` unless there is a positive number for each."""
    numbers = (counts,) * tasks if isinstance(counts, int) else tuple(counts)
    if len(numbers) != tasks or min(numbers) < 1:
        raise StitchError(f"{argument} are {list(numbers)}; give {tasks} numbers from 1, one for each task")
    return numbers


def _number_blocks(space: ChannelSpace, task: int) -> Iterator[tuple[int, Block]]:
    """The blocks that *task* has, with their indices in *space*."""
    return ((index, block) for index, block in enumerate(space.blocks) if task in block.tasks)


def _block_channels(spaces: Sequence[ChannelSpace], task: int) -> Iterator[tuple[tuple[int, int], Array]]:
    """The blocks of *task* in several spaces: indices of space and block, and channels counted over all spaces."""
    start = 0
    for space_index, space in enumerate(spaces):
        for block_index, block in _number_blocks(space, task):
            yield (space_index, block_index), block.members[task] + start
        start += space.widths[task]


def save_nets(nets: Iterable[Net], folder: Path, *, dynamic: bool = False) -> tuple[Path, ...]:
    """Write each net to a file of its name, and return the files; *dynamic* leaves the number of rows open."""
    from weft_stitch.onnx_writer import write_onnx

    make_folder(folder)
    paths = []
    for net in nets:
        paths.append(folder / f"{net.name}.onnx")
        write_onnx(unfolded_graph(net, dynamic=dynamic), paths[-1])
    return tuple(paths)


def unfolded_graph(net: Net, *, dynamic: bool = False) -> Graph:
    """The graph of *net* alone as exporters write it: biases are part of convolutions, normalisations are operators."""
    builder, tensors = begin_graph(net, dynamic=dynamic)
    biases = _biases(net)
    for op in net.ops:
        builder.layer = op.name
        inputs = [tensors[value] for value in op.inputs]
        if op.output in biases:
            bias = biases[op.output].shift
            assert op.weight is not None
            tensors[op.output] = convolve(builder, inputs[0], op.weight, bias, window=op.window, groups=op.groups)
        elif op.inputs[0] in biases and op is biases[op.inputs[0]]:
            tensors[op.output] = inputs[0]  # the convolution before has this bias
        elif op.kind == "affine" and not _is_one(op.scale):
            tensors[op.output] = _normalise(builder, op, inputs[0])
        else:
            tensors[op.output] = emit(builder, op, inputs)
    return finish_graph(net, builder, tensors)


def _biases(net: Net) -> dict[str, Op]:
    """Output of a convolution whose only reader is a bias -> that bias."""
    convolved = {op.output for op in net.ops if op.kind == "conv"} - {port.value for port in net.outputs}
    readers = {value: list(net.readers(value)) for value in convolved}
    only_readers = {value: ops[0] for value, ops in readers.items() if len(ops) == 1}
    return {value: op for value, op in only_readers.items() if op.kind == "affine" and _is_one(op.scale)}


def _normalise(builder: Builder, op: Op, value: str) -> str:
    """An affine as a batch normalisation with mean 0 and variance 1."""
    channels = builder.shape(value)[1]
    scale = np.ones(channels, np.float32) if op.scale is None else op.scale
    shift = np.zeros_like(scale) if op.shift is None else op.shift
    tables = [(scale, "scale"), (shift, "shift"), (np.zeros_like(scale), "mean"), (np.ones_like(scale), "variance")]
    names = [builder.constant(table, hint) for table, hint in tables]
    return builder.add("BatchNormalization", value, *names, shape=builder.shape(value), epsilon=0.0)


def _is_one(scale: Array | None) -> bool:
    """Whether an affine with *scale* only adds."""
    return scale is None or bool((scale == 1).all())
