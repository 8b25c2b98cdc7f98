"""Zipping: trained models of one architecture come to share weights, and stay good at their tasks: ``zip_nets``.

Multi-Task Zipping (see ``merging``), space by space from the input on. A space's channels are matched over all layers
that write it, so that a residual stage has one shared set; of a shared filter the weights from shared inputs become
one, those from a task's own inputs stay its own, and normalisations are per task, set anew after each merge so that
every channel keeps its mean and deviation. The classifiers' outputs are never shared. After each space all tasks are
trained together for a few steps; a shared weight is one tensor then, put into each task's weights, so that it is the
same in all of them to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft_stitch.family import Block, ChannelSpace, Family, FamilyLayer, Sharing, Wiring, role, wire
from weft_stitch.net import Array, Net
from weft_stitch.reading.alignment import align

from .calibration import moments, restore, statistics
from .merging import Filters, damped, merge, pair
from .networks import (
    Examples,
    OpTensors,
    Tensor,
    accuracy,
    forward,
    functional,
    scales,
    tables,
    torch,
)
from .networks import with_tables as rebuilt

CALIBRATION = 256
"""Images per task from which second moments, means and deviations come."""


class Data(NamedTuple):
    """What a task learns from and what it is judged by."""

    train: Examples
    test: Examples


@dataclass(frozen=True, eq=False)
class Zipped:
    """The models after zipping, with what they share and how good they were and are."""

    nets: tuple[Net, ...]
    planted: Sharing
    before: tuple[float, ...]
    """Accuracy of each task's own model on its test images."""
    after: tuple[float, ...]


def zip_nets(
    nets: Sequence[Net],
    data: Sequence[Data],
    *,
    sharing: float = 0.9,
    finetune_steps: int = 20,
    last_steps: int = 200,
    batch: int = 64,
    learning_rate: float = 2e-3,
    seed: int = 0,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Zipped:
    """Make *nets* share that part of every space's channels.

    All tasks are trained together for *finetune_steps* after each space and *last_steps* at the end (0 and 0: not at
    all). *on_progress* hears the space that is done, its number and how many there are.
    """
    _check(nets, data, sharing)
    before = tuple(accuracy(net, mine.test) for net, mine in zip(nets, data, strict=True))
    zipper = _Zipper(align(nets), data, batch, learning_rate, seed)
    spaces = zipper.sharable()
    zipper.foresee(spaces, sharing)
    for number, space in enumerate(spaces, start=1):
        zipper.share(space, sharing)
        zipper.tune(finetune_steps)
        if on_progress:
            on_progress(space, number, len(spaces))
    zipper.tune(last_steps, fading=True)
    zipped = zipper.nets()
    after = tuple(accuracy(net, mine.test) for net, mine in zip(zipped, data, strict=True))
    return Zipped(zipped, zipper.sharing(), before, after)


def _check(nets: Sequence[Net], data: Sequence[Data], sharing: float) -> None:
    if len(nets) < 2 or len(nets) != len(data):
        raise StitchError(
            f"{len(nets)} models and data for {len(data)}; zipping needs two models or more, each with data"
        )
    if not 0 <= sharing <= 1:
        raise StitchError(f"a sharing of {sharing} is not from 0 to 1")
    for net in nets:
        if len(net.inputs) != 1 or len(net.outputs) != 1:
            ports = f"{len(net.inputs)} inputs and {len(net.outputs)} outputs"
            raise StitchError(f"{net.name} has {ports}; only models of one input and one output can be zipped")


class _SeenWeights(NamedTuple):
    """A task's weights and the second moments of what they read, by the value that is written."""

    weights: dict[str, Array]
    moments: dict[str, Array]


class _Common(NamedTuple):
    """A layer's weights from shared inputs to shared channels, and where each task has them."""

    weight: Tensor
    places: list[tuple[Tensor, ...]]


class _Zipper:
    """The models on their way: every task's own numbers, and the shared weights of layers that have some."""

    def __init__(self, family: Family, data: Sequence[Data], batch: int, learning_rate: float, seed: int) -> None:
        self._family, self._wiring = family, wire(family)
        self._numbers = [tables(net) for net in family.nets]
        self._common: dict[str, _Common] = {}
        """The shared weights by layer."""
        self._chosen = {value: _everything(self._wiring, value) for value in family.inputs}
        """Each task's shared channels by space; those at one place go together."""
        self._foreseen: dict[str, list[Array]] = {}
        """What they will be in spaces whose turn has not come."""
        self._pictures = [mine.train.first(CALIBRATION) for mine in data]
        self._batches = [mine.train.batches(batch, seed + task) for task, mine in enumerate(data)]
        self._learning_rate = learning_rate
        for net, numbers in zip(family.nets, self._numbers, strict=True):
            _fold(net, numbers)

    @property
    def _tasks(self) -> range:
        return range(self._family.tasks)

    def sharable(self) -> list[str]:
        """The spaces to share, from the input on."""
        last = {space for value in self._family.outputs for space in self._wiring.carries[value]}
        kinds = {space: {writer.role for writer in found} for space, found in self._wiring.writers.items()}
        return [space for space, found in kinds.items() if space not in last and not found & {"input", "separate"}]

    def foresee(self, spaces: Sequence[str], sharing: float) -> None:
        """A first guess at every space: residual blocks need their outputs' channels before those are settled."""
        for space in spaces:
            self._foreseen[space] = self._pair(space, sharing)

    def share(self, space: str, sharing: float) -> None:
        """Settle the shared channels of *space* and merge what now goes from shared to shared."""
        self._chosen[space] = self._pair(space, sharing)
        seen = [self._see(task) for task in self._tasks]
        wanted = [statistics(*self._case(task)) for task in self._tasks]
        for layer in self._touching(space):
            self._merge(layer, seen)
        for task, mine in enumerate(wanted):
            restore(*self._case(task), mine)

    def tune(self, steps: int, *, fading: bool = False) -> None:
        """Train all tasks together; *fading*: the learning rate ends at nothing."""
        learned = list(self._learned())
        for each in learned:
            each.requires_grad_(True)
        optimizer = torch.optim.Adam(learned, self._learning_rate)
        for step in range(steps):
            if fading:
                optimizer.param_groups[0]["lr"] = self._learning_rate * (1 - step / steps)
            optimizer.zero_grad(set_to_none=True)
            for task in self._tasks:
                pictures, labels = next(self._batches[task])
                answers = forward(self._family.nets[task], self._assembled(task), pictures)
                functional.cross_entropy(answers, labels).backward()
            optimizer.step()
        for each in learned:
            each.requires_grad_(False)

    def nets(self) -> tuple[Net, ...]:
        return tuple(rebuilt(net, self._assembled(task)) for task, net in enumerate(self._family.nets))

    def sharing(self) -> Sharing:
        spaces = {}
        for space, widths in self._wiring.widths.items():
            chosen = self._chosen.get(space, [np.zeros(0, int) for _ in widths])
            spaces[space] = _space(widths, chosen)
        return Sharing(spaces)

    def _pair(self, space: str, sharing: float) -> list[Array]:
        count = round(sharing * min(self._wiring.widths[space]))
        seen = [self._see(task) for task in self._tasks]
        layers = []
        for writer in self._wiring.writers[space]:
            assert writer.layer is not None
            layer = writer.layer
            inputs = [self._channels(layer.inputs[0], task, foreseen=True) for task in self._tasks]
            rows = [dict(self._wiring.slices(layer.output, task))[space] for task in self._tasks]
            if role(layer) == "depthwise" or len(inputs[0]):
                layers.append([_filters(layer, task, seen[task], rows[task], inputs[task]) for task in self._tasks])
        return pair(layers, count) if layers else [np.zeros(0, int) for _ in self._tasks]

    def _merge(self, layer: FamilyLayer, seen: list[_SeenWeights]) -> None:
        rows, inputs = (
            [self._channels(value, task) for task in self._tasks] for value in (layer.output, layer.inputs[0])
        )
        if not (len(rows[0]) and len(inputs[0])):
            return
        merged = merge([_filters(layer, task, seen[task], rows[task], inputs[task]) for task in self._tasks])
        shape = (*merged.shape[:2], *layer.op.window.kernel)
        places = [
            (torch.from_numpy(mine),)
            if role(layer) == "depthwise"
            else tuple(map(torch.from_numpy, np.ix_(mine, read)))
            for mine, read in zip(rows, inputs, strict=True)
        ]
        self._common[layer.name] = _Common(torch.from_numpy(merged.reshape(shape).astype(np.float32)), places)

    def _case(self, task: int) -> tuple[Net, dict[str, OpTensors], Tensor]:
        return self._family.nets[task], self._assembled(task), self._pictures[task]

    def _see(self, task: int) -> _SeenWeights:
        net, numbers, pictures = self._case(task)
        weights = {name: mine.weight.double().numpy() for name, mine in numbers.items() if mine.weight is not None}
        return _SeenWeights(weights, moments(net, numbers, pictures))

    def _touching(self, space: str) -> Iterator[FamilyLayer]:
        for layer in self._family.layers:
            values = (layer.output, layer.inputs[0])
            if role(layer) in ("dense", "depthwise") and any(space in self._wiring.carries[each] for each in values):
                yield layer

    def _channels(self, value: str, task: int, *, foreseen: bool = False) -> Array:
        """The shared channels of *value* in the task's own order of spaces."""
        known = {**self._foreseen, **self._chosen} if foreseen else self._chosen
        found = [known[space][task] + rows.start for space, rows in self._wiring.slices(value, task) if space in known]
        return np.concatenate([*found, np.zeros(0, int)]).astype(int)

    def _assembled(self, task: int) -> dict[str, OpTensors]:
        """The task's numbers with the shared weights in their places."""
        numbers = dict(self._numbers[task])
        for layer in self._family.layers:
            if layer.name in self._common:
                name, common = layer.ops[task].output, self._common[layer.name]
                numbers[name] = OpTensors(numbers[name].weight.index_put(common.places[task], common.weight))
        return numbers

    def _learned(self) -> Iterator[Tensor]:
        yield from (common.weight for common in self._common.values())
        for net, numbers in zip(self._family.nets, self._numbers, strict=True):
            for op in net.ops:
                mine = numbers[op.output]
                yield from (each for each in (mine.weight, mine.shift) if each is not None)
                if scales(op):
                    yield mine.scale


def _filters(layer: FamilyLayer, task: int, seen: _SeenWeights, rows: slice | Array, inputs: Array) -> Filters:
    """The filters of some channels of a layer, from some of its inputs."""
    name = layer.ops[task].output
    weight, known = seen.weights[name][rows], seen.moments[name]
    if role(layer) == "depthwise":
        return Filters(weight.reshape(*weight.shape[:2], -1), damped(np.diagonal(known)[rows]))
    return Filters(weight[:, inputs].reshape(len(weight), len(inputs), -1), damped(known[np.ix_(inputs, inputs)]))


def _fold(net: Net, numbers: dict[str, OpTensors]) -> None:
    """Take the scale of a normalisation into its convolution, so that filters of different nets can be compared."""
    writers = {op.output: op for op in net.ops if op.kind == "conv"}
    for op in net.ops:
        if op.kind == "affine" and scales(op) and op.inputs[0] in writers and len(list(net.readers(op.inputs[0]))) == 1:
            mine, conv = numbers[op.output], numbers[op.inputs[0]]
            conv.weight = conv.weight * mine.scale[:, None, None, None]
            mine.scale = torch.ones_like(mine.scale)


def _everything(wiring: Wiring, value: str) -> list[Array]:
    """All channels of an input, or none where the tasks have unequal ones."""
    (space,) = wiring.carries[value]
    widths = wiring.widths[space]
    return [np.arange(width if len(set(widths)) == 1 else 0) for width in widths]


def _space(widths: tuple[int, ...], chosen: Sequence[Array]) -> ChannelSpace:
    blocks = [Block(dict(enumerate(chosen)))] if len(chosen[0]) else []
    for task, width in enumerate(widths):
        rest = np.setdiff1d(np.arange(width), chosen[task])
        if len(rest):
            blocks.append(Block({task: rest}))
    return ChannelSpace(widths, tuple(blocks))
