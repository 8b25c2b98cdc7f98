"""Measured now on this machine: pruned ResNet18s on one CPU thread, one by one, in every form, and as planned.

The paper has no CPU results. Its form is slower there, because a CPU pays for every MAC. The planner's choice of forms
is faster, mostly by convolutions in slabs; separate models can use slabs as well, and are also measured with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.reports.exhibits import Axis, Bars, Panel, ReferenceLine
from weft.runtime.timing import Turns
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table, Tick
from weft_papers.mts.lab import COLOURS, EvaluatedModels, lowered, models
from weft_stitch.cost import Modelled, count
from weft_stitch.graph import Graph
from weft_stitch.graph_steps import plain_graph
from weft_stitch.planning.planner import Plan, lower_plan, plan
from weft_stitch.running.sessions import race
from weft_stitch.slabs import slabs

FIGURE = "CPU"
TASKS = (2, 4, 8)  # numbers of models
FORMS = ("grouped", "mts", "half", "split")
SEQUENTIAL, SLABBED, PLANNED = "sequential", "sequential, slabs", "planned"
TINTS = {SEQUENTIAL: "#66727f", SLABBED: "#b9c0c8", PLANNED: "#009e73"} | {form: COLOURS[form] for form in FORMS}


@dataclass(frozen=True)
class CpuTimes:
    """The times of all ways to run some models, measured in turn on this machine."""

    setting: EvaluatedModels
    plan: Plan
    graphs: dict[str, list[Graph]]
    """Way to run the models -> its graphs: one for each model, or the stitched one alone."""
    times: dict[str, Turns]
    """Way -> its times."""

    def gain(self, name: str) -> float:
        """Speed-up of a way over the models one by one, by median times."""
        return self.times[SEQUENTIAL].median_s / self.times[name].median_s

    def macs(self, name: str) -> float:
        """MACs, relative to those of the models run one by one."""
        macs, sequential_macs = (sum(count(graph).macs for graph in self.graphs[way]) for way in (name, SEQUENTIAL))
        return macs / sequential_macs

    @property
    def chosen(self) -> str:
        """Text with the number of layers that the planner put in each form."""
        forms = list(self.plan.forms.values())
        return ", ".join(f"{forms.count(form)} {form}" for form in dict.fromkeys(forms))


def time_models(setting: EvaluatedModels, rounds: int) -> CpuTimes:
    """Plan and lower the models in every way, and time all ways in turn for *rounds* rounds on one thread."""
    family, sharing = models(setting)
    planned = plan(family, sharing, Modelled(), slabs=True)
    separate = [plain_graph(net) for net in family.nets]
    graphs = {SEQUENTIAL: separate, SLABBED: [slabs(graph) for graph in separate]}
    graphs |= {form: [lowered(setting, form)] for form in FORMS}
    graphs[PLANNED] = [lower_plan(family, sharing, planned)]
    return CpuTimes(setting, planned, graphs, race(graphs, rounds=rounds, threads=1))


def time_task_counts(rounds: int, tick: Tick | None = None) -> list[CpuTimes]:
    """Time pruned ResNet18s at every number of tasks."""
    results = []
    for number in TASKS:
        results.append(time_models(EvaluatedModels("resnet18", number), rounds))
        if tick:
            tick(len(results), len(TASKS))
    return results


def on_cpu(out: Path, results: Sequence[CpuTimes]) -> Exhibit:
    """Report the times on this machine's CPU."""
    return Exhibit(
        tuple(row for result in results for row in _rows(result)), (_table(results),), (_picture(out, results),)
    )


def _rows(result: CpuTimes) -> list[Row]:
    """Rows with the speed-ups of the planned graph and of the paper's form over the models one by one."""
    tasks, rounds = result.setting.tasks, len(result.times[SEQUENTIAL].seconds)
    planned_bytes = sum(graph.weight_bytes for graph in result.graphs[PLANNED])
    separate_bytes = sum(graph.weight_bytes for graph in result.graphs[SEQUENTIAL])
    return [
        Row(
            FIGURE, f"planned over the models one by one, {tasks} ResNet18", None, result.gain(PLANNED), "x",
            f"measured now, median of {rounds} rounds in turn: {1e3 * result.times[PLANNED].median_s:.1f} and "
            f"{1e3 * result.times[SEQUENTIAL].median_s:.1f} ms; {result.chosen}; slabs alone give the separate models "
            f"{result.gain(SLABBED):.2f}x; weights {planned_bytes / separate_bytes:.2f}x",
        ),
        Row(
            FIGURE, f"the paper's form over the models one by one, {tasks} ResNet18", None, result.gain("mts"), "x",
            f"measured now: {result.macs('mts'):.2f} times the MACs, and a CPU thread is full with one model",
        ),
    ]  # fmt: skip


def _table(results: Sequence[CpuTimes]) -> Table:
    """Table of times and weights of every way."""
    body = [
        (
            str(result.setting.tasks), name, f"{1e3 * times.median_s:.2f}", f"{1e3 * times.least_s:.2f}",
            f"{result.gain(name):.2f}", f"{sum(graph.weight_bytes for graph in result.graphs[name]) / 1e6:.2f}",
        )
        for result in results
        for name, times in result.times.items()
    ]  # fmt: skip
    header = ("tasks", "way", "median ms", "least ms", "faster x", "weights MB")
    return Table(f"{FIGURE}: pruned ResNet18s under onnxruntime, one thread, on this machine", header, tuple(body))


def _picture(out: Path, results: Sequence[CpuTimes]) -> Figure:
    series = {name: [result.gain(name) for result in results] for name in results[0].times}
    bars = Bars([f"{result.setting.tasks} tasks" for result in results], series, TINTS)
    panel = Panel([bars, ReferenceLine(1, dash="-")], y=Axis(label="times faster than one by one"))
    title = f"{FIGURE}: pruned ResNet18s, onnxruntime, one thread (measured now)"
    return pictures.picture(out, "cpu", title, [panel], size=(9, 3.8))
