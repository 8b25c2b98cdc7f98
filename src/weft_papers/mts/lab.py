"""Common to all parts: the paper's settings as recipes of models, ways to run them, and counts of lowered graphs.

The models are generated with the paper's pruning and sharing ratios. Their weights are random, because neither counts
nor times depend on the values. Classifiers share no channels. The paper's form still stitches them into its matrix
(equation 8), where a thousand classes take most of the space; ``APART`` is that form with one classifier per task.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from weft_stitch.cost import Counts, count
from weft_stitch.family import Family, Sharing
from weft_stitch.graph import Graph
from weft_stitch.graph_steps import plain_graph
from weft_stitch.lowering import formed_layers, lower
from weft_stitch.making.architectures import CLASSES
from weft_stitch.making.generator import FamilyRecipe
from weft_stitch.reading.alignment import align

TASKS = (4, 8, 16, 32)
"""Numbers of models; in the paper, every model is a task."""
SHARINGS = (0.9, 0.8, 0.7, 0.6)
PRUNED, SHARED = 0.9, 0.9
"""The usual pruning ratio and sharing ratio of the channels."""
TITLES = {"resnet18": "ResNet18", "vgg16": "VGG16", "resnet50": "ResNet50"}

APART = "mts + own classifiers"  # a form, see above
FORMS = ("grouped", "mts", APART, "half", "split", "fused")
"""The forms of a stitched graph; ``separate`` is each model alone."""
LABELS = {
    "separate": "separate models",
    "eager": "sequential, eager (paper)",
    "sequential": "sequential, one CUDA graph",
    "streams": "streams, one CUDA graph",
    "compile": "torch.compile of the loop",
    "vmap": "vmap + torch.compile",
    "grouped-eager": "grouped, eager (NetFuse)",
    "grouped": "grouped, one CUDA graph",
    "mts": "MTS, no grouping",
    "mts in groups": "MTS",
    APART: "MTS, no grouping, own classifiers",
    "half": "half",
    "split": "split",
    "fused": "fused (ours)",
    "batch": "batch through one net",
}
"""Form or way to run models, as named in recorded rows -> label. ``mts in groups`` is computed from rows of ``mts``."""
COLOURS = {
    "separate": "#66727f",
    "eager": "#b9c0c8",
    "sequential": "#66727f",
    "streams": "#e69f00",
    "compile": "#b8a400",
    "vmap": "#cc79a7",
    "grouped-eager": "#a9d5f2",
    "grouped": "#56b4e9",
    "mts": "#f0a878",
    "mts in groups": "#d55e00",
    APART: "#d55e00",
    "half": "#cc79a7",
    "split": "#0072b2",
    "fused": "#009e73",
    "batch": "#1f2933",
}
MARKS = dict(zip(LABELS, "oosDX*^vPph<d>.", strict=True))
"""Form or way -> mark of its curve."""
RIVALS = ("sequential", "streams", "compile", "vmap", "grouped", "mts in groups")
"""Ways to run models without weft: the paper's form and today's methods."""


class EvaluatedModels(NamedTuple):
    """A set of models of the paper's evaluation."""

    net: str
    tasks: int
    pruning: float = PRUNED
    sharing: float = SHARED
    widths: tuple[float, ...] | None = None
    """Factor on the channels of each task's model; None: all alike."""
    batches: tuple[int, ...] | None = None
    """Pictures of each task; None: one."""
    resolution: int | None = None
    """Side of the input picture; None: the architecture's own. The same holds for *classes*."""
    classes: int | None = None

    @property
    def recipe(self) -> FamilyRecipe:
        return FamilyRecipe(
            self.net, self.tasks, pruning=self.pruning, sharing=self.sharing, widths=self.widths,
            batches=self.batches or 1, resolution=self.resolution, classes=self.classes,
        )  # fmt: skip


@lru_cache(maxsize=4)
def models(setting: EvaluatedModels) -> tuple[Family, Sharing]:
    """Generate the models, with random weights, and the channels that they share."""
    recipe = setting.recipe
    return align(tuple(recipe.nets())), recipe.planted


def lowered(setting: EvaluatedModels, form: str) -> Graph:
    """The stitched graph with all layers in one form; with ``APART``, the classifiers are split by task."""
    family, sharing = models(setting)
    if form != APART:
        return lower(family, sharing, form)
    head_names = heads(setting.recipe)
    forms = {layer.name: "split" if layer.name in head_names else "mts" for layer in formed_layers(family)}
    return lower(family, sharing, forms)


def heads(recipe: FamilyRecipe) -> frozenset[str]:
    """The names of the layers whose outputs are classes."""
    spaces, carries = recipe.plan.spaces, recipe.plan.carries  # channel spaces; node -> those of its output
    nodes = [node for node in recipe.plan.nodes if node.kind == "conv"]
    return frozenset(node.name for node in nodes if any(spaces[space].role == CLASSES for space in carries[node.name]))


@lru_cache(maxsize=256)
def counted(setting: EvaluatedModels, form: str) -> Counts:
    """Counts of the lowered graph.

    ``separate`` adds up the models one by one; of their activation memory only the largest counts.
    """
    if form != "separate":
        return count(lowered(setting, form))
    alone = [count(plain_graph(net)) for net in models(setting)[0].nets]
    return Counts(
        sum(net_counts.macs for net_counts in alone),
        sum(net_counts.weight_bytes for net_counts in alone),
        sum(net_counts.table_bytes for net_counts in alone),
        max(net_counts.activation_bytes for net_counts in alone),
        sum(net_counts.launches for net_counts in alone),
        {},
    )


def memory_bytes(counts: Counts) -> int:
    """Peak memory: weights, tables and activations."""
    return counts.weight_bytes + counts.table_bytes + counts.activation_bytes


class GroupedCost(NamedTuple):
    """The cost of models in several stitched graphs."""

    macs: int
    peak_bytes: int


def grouped_cost(setting: EvaluatedModels, form: str, groups: int) -> GroupedCost:
    """Count the cost if the tasks are stitched in *groups* groups of nearly equal size.

    The groups run one after another, so the weights of all groups count, but only the largest activation memory.
    """
    # Nearly equal: *larger_count* groups have one task more than the others.
    smaller_size, larger_count = divmod(setting.tasks, groups)
    counts = {smaller_size + 1: larger_count, smaller_size: groups - larger_count}  # size of a group -> how many
    by_size = {size: counted(setting._replace(tasks=size), form) for size, count in counts.items() if count}
    macs = sum(counts[size] * group.macs for size, group in by_size.items())
    stored_bytes = sum(counts[size] * (group.weight_bytes + group.table_bytes) for size, group in by_size.items())
    return GroupedCost(macs, stored_bytes + max(group.activation_bytes for group in by_size.values()))
