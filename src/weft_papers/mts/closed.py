"""MACs and weights in closed form: from the sharing ratio alone, and exactly from the widths of an architecture.

Let all T tasks share a fraction *a* of the C channels of every layer. T models one by one store T C^2 weights, and
their products per position are as many. In units of C^2, the paper's matrix (IV-C) stores (a + T (1 - a))^2 weights and
multiplies each T times, for the rows of every task; an exact form stores a^2 + T (1 - a^2) and makes T products.
``layers`` and ``work`` compute the same with the integer widths of an architecture, its unshared classifier and its
shared picture; the counts of real graphs must equal them.

``limits`` reports where the paper's form stops paying, by its own formulas (IV-C). The paper concludes O(T^2) weights
and O(T^3) FLOPs. It does not say what else follows: T separate models are smaller as soon as T > (a / (1 - a))^2,
groups of a / (1 - a) tasks are smallest, and even those store 4 a (1 - a) of each model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.reports.exhibits import DASHED, INK, Area, Axis, Curve, Panel, ReferenceLine, Texts
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table
from weft_papers.mts import recorded
from weft_papers.mts.lab import APART, COLOURS, SHARINGS, TASKS, EvaluatedModels, heads
from weft_stitch.cost import ITEM_BYTES
from weft_stitch.family import ChannelSpace

# By the sharing ratio


def widened(sharing: float, tasks: float) -> float:
    """Channels of a stitched layer over those of one model; *sharing*: fraction of them that all tasks share."""
    return sharing + tasks * (1 - sharing)


def mts_macs(sharing: float, tasks: float) -> float:
    """The MACs of the paper's form, over those of the models one by one."""
    return widened(sharing, tasks) ** 2


def mts_weights(sharing: float, tasks: float) -> float:
    """The weights of the paper's form, over those of the models one by one."""
    return widened(sharing, tasks) ** 2 / tasks


def half_macs(sharing: float, tasks: float) -> float:
    """The MACs of the form "half", over those of the models one by one.

    One product of the shared input channels with all outputs, and a product per task of its own input channels.
    """
    return sharing * widened(sharing, tasks) + 1 - sharing


def unique_weights(sharing: float, tasks: float) -> float:
    """The weights with each stored once, over those of the models one by one."""
    return sharing**2 / tasks + 1 - sharing**2


def break_even(sharing: float) -> float:
    """Number of tasks above which the paper's matrix is larger than the models one by one."""
    return (sharing / (1 - sharing)) ** 2


def best_group(sharing: float) -> float:
    """Number of tasks in the group with the fewest stitched weights per model, which are 4 a (1 - a) of a model's."""
    return sharing / (1 - sharing)


# By the widths of an architecture


class Dense(NamedTuple):
    """A convolution, not depthwise, in the models of all tasks, with the channel spaces that it reads and writes."""

    name: str
    taps: int
    """Weights of the kernel for each pair of channels."""
    positions: int
    """Output pixels."""
    read: tuple[ChannelSpace, ...]
    written: ChannelSpace
    is_head: bool
    """Whether the outputs are classes."""


class FormWork(NamedTuple):
    """MACs and weights of one or more layers in a form."""

    macs: int
    weights: int

    def __add__(self, other: object) -> FormWork:
        assert isinstance(other, FormWork)
        return FormWork(self.macs + other.macs, self.weights + other.weights)

    @property
    def weight_bytes(self) -> int:
        return ITEM_BYTES * self.weights


@lru_cache(maxsize=256)
def layers(setting: EvaluatedModels) -> tuple[Dense, ...]:
    """The convolutions of an architecture without depthwise ones, computed from its plan without generating weights."""
    recipe = setting.recipe
    plan, head_names = recipe.plan, heads(recipe)
    sides = {"image": plan.resolution}  # value -> height and width of its picture
    convs = []
    for node in plan.nodes:
        side = sides[node.inputs[0]]
        windowed = node.kind in ("conv", "max_pool", "avg_pool")
        sides[node.name] = node.window.output(side, 1)[0] if windowed else 1 if node.kind == "global_pool" else side
        if node.kind == "conv":
            read = tuple(recipe.planted[space] for space in plan.carries[node.inputs[0]])
            (written,) = (recipe.planted[space] for space in plan.carries[node.name])
            height, width = node.window.kernel
            convs.append(
                Dense(node.name, height * width, sides[node.name] ** 2, read, written, node.name in head_names)
            )
    return tuple(convs)


@lru_cache(maxsize=1024)
def work(setting: EvaluatedModels, form: str) -> FormWork:
    """MACs and weights of all layers in one form (see ``lab.lowered``)."""
    batches = setting.batches or (1,) * setting.tasks
    inner_form, head_form = ("mts", "split") if form == APART else (form, form)
    return sum(
        (_layer_work(layer, head_form if layer.is_head else inner_form, batches) for layer in layers(setting)),
        FormWork(0, 0),
    )


def _layer_work(layer: Dense, form: str, batches: Sequence[int]) -> FormWork:
    """MACs and weights of one layer in a form; *batches*: rows of each task."""
    tasks, rows = range(len(batches)), sum(batches)
    ins = [sum(space.widths[task] for space in layer.read) for task in tasks]  # input channels of each task
    outs = layer.written.widths
    stitched_in = sum(space.stitched_width for space in layer.read)
    stitched_out = layer.written.stitched_width
    exact_macs = sum(rows * into * out for rows, into, out in zip(batches, ins, outs, strict=True))
    # MACs per output pixel and tap of the kernel; weights per tap.
    if form == "separate":
        position_work = FormWork(exact_macs, sum(into * out for into, out in zip(ins, outs, strict=True)))
    elif form == "grouped":
        position_work = FormWork(rows * max(ins) * max(outs), len(batches) * max(ins) * max(outs))
    elif form == "mts":
        position_work = FormWork(rows * stitched_in * stitched_out, stitched_in * stitched_out)
    else:  # half, split and fused store every weight once
        shared_in = sum(space.shared_width for space in layer.read)
        own_ins = [into - shared_in for into in ins]
        macs = exact_macs
        if form == "half" and shared_in and all(own_ins):
            own_macs = sum(rows * into * out for rows, into, out in zip(batches, own_ins, outs, strict=True))
            macs = rows * shared_in * stitched_out + own_macs
        position_work = FormWork(macs, _unique_weights(layer))
    return FormWork(position_work.macs * layer.taps * layer.positions, position_work.weights * layer.taps)


def _unique_weights(layer: Dense) -> int:
    """Weights per tap if each is stored once: pairs of input and output blocks that have a task in common."""
    blocks = [block for space in layer.read for block in space.blocks]
    return sum(out.width * into.width for out in layer.written.blocks for into in blocks if out.tasks & into.tasks)


FIGURE = "IV-C"
COLOURS_BY_SHARING = dict(zip(SHARINGS, ("#009e73", "#0072b2", "#e69f00", "#d55e00"), strict=True))


def limits(out: Path) -> Exhibit:
    """Report where the paper's form stops paying, by its own formulas."""
    rows = [
        Row(
            FIGURE, f"tasks from which MTS stores more than separate models, sharing {sharing:g}", None,
            break_even(sharing), "",
            f"(a / (1 - a))^2; the smallest groups are of {best_group(sharing):.3g} and store "
            f"{4 * sharing * (1 - sharing):.2f} of each model, every weight once {1 - sharing**2:.2f} in the limit",
        )
        for sharing in SHARINGS
    ]  # fmt: skip
    return Exhibit(tuple(rows), (_table(),), (_picture(out),))


def _table() -> Table:
    """Table of MACs and weights of the forms in closed form, by sharing ratio and number of tasks."""
    body = tuple(
        (
            f"{sharing:g}", str(tasks), f"{mts_macs(sharing, tasks):.2f}",
            f"{half_macs(sharing, tasks):.2f}", f"{mts_weights(sharing, tasks):.3f}",
            f"{unique_weights(sharing, tasks):.3f}",
        )
        for sharing in SHARINGS
        for tasks in TASKS
    )  # fmt: skip
    header = ("sharing", "tasks", "MTS MACs x", "half MACs x", "MTS weights x", "unique weights x")
    return Table(f"{FIGURE}: one inner layer in closed form, over the models one by one", header, body)


def _picture(out: Path) -> Figure:
    """Draw MACs and weights over the number of tasks, and the limits over the sharing ratio."""
    tasks = np.geomspace(1, 64, 100)
    x = recorded.tasks_axis((1, 2, 4, 8, 16, 32, 64))
    macs = [
        Curve(tasks, [mts_macs(sharing, count) for count in tasks], f"sharing {sharing:g}", COLOURS_BY_SHARING[sharing])
        for sharing in SHARINGS
    ]
    weights = [curve for sharing in SHARINGS for curve in _weight_curves(tasks, sharing)]
    shown = [
        Panel(
            macs, "the paper's form multiplies (a + T (1 - a))$^2$; split and fused 1", x,
            Axis(label="MACs over separate models", scale="log"),
        ),
        Panel(
            [*weights, ReferenceLine(1, dash="-")], "solid: the paper's form; dashed: every weight once; ring: even", x,
            Axis(label="weights over separate models", scale="log"),
        ),
        _frontier(),
    ]  # fmt: skip
    title = f"{FIGURE}: where the paper's form stops paying, over the sharing ratio a"
    return pictures.picture(out, "limits", title, shown, size=(13, 4.2), columns=3)


def _weight_curves(tasks: np.ndarray, sharing: float) -> list[Curve]:
    """Curves of the weights over the number of tasks: the paper's form, and each weight once.

    A ring marks where the paper's form is as large as the models one by one.
    """
    colour, even_tasks = COLOURS_BY_SHARING[sharing], break_even(sharing)
    curves = [
        Curve(tasks, [mts_weights(sharing, count) for count in tasks], None, colour),
        Curve(tasks, [unique_weights(sharing, count) for count in tasks], None, colour, dash=DASHED, width=1.2),
    ]
    ring = Curve([even_tasks], [1], None, colour, "o", size=7, hollow=True)
    return [*curves, ring] if even_tasks <= tasks[-1] else curves


def _frontier() -> Panel:
    """Panel over the sharing ratio: tasks up to which the stitched matrix is smaller, and the best group size."""
    sharing = np.linspace(0.5, 0.95, 200)
    even_tasks = np.array([break_even(ratio) for ratio in sharing])
    crosses = [Curve([ratio] * len(TASKS), TASKS, None, INK, "+", "", size=7) for ratio in SHARINGS]
    marks = [
        Curve(sharing, even_tasks, None, COLOURS["mts in groups"]),
        Curve(sharing, [best_group(ratio) for ratio in sharing], None, COLOURS["fused"], dash=DASHED),
        Area(sharing, even_tasks, 400, COLOURS["mts"]),  # 400: above the axis
        Texts([0.52], [50], ["larger than separate models"], align="left"),
        Texts([0.95], [1.25], ["dashed: smallest group"], align="right"),
    ]
    y = Axis(label="tasks in one matrix", scale="log2", low=1, high=128, ticks=(1, 2, 4, 8, 16, 32, 64))
    title = "weights; crosses: what the paper runs (before grouping)"
    return Panel([*marks, *crosses], title, Axis(label="sharing ratio a"), y)
