"""Graphs timed where torch runs them: ``GraphClock``, a ``GraphCost``, and ``plan_for``, the forms for a place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft_stitch.family import Family
from weft_stitch.forms import FORMS
from weft_stitch.graph import Graph
from weft_stitch.planning.cost import H200, Modelled
from weft_stitch.planning.planner import Plan, plan
from weft_stitch.running.measuring import REPLAYS, ROUNDS, TimedWay, build, prepare, times_ms
from weft_stitch.running.operators import torch
from weft_stitch.running.ways import Place, RivalWay
from weft_stitch.sharing import Sharing


@dataclass(frozen=True)
class GraphClock:
    """Every graph as a module at *place*, on CUDA as one CUDA graph with tuned kernels; they take turns."""

    place: Place
    rounds: int = ROUNDS
    replays: int = REPLAYS

    def seconds(self, graphs: Sequence[Graph]) -> list[float]:
        runs = {str(number): self._run(graph) for number, graph in enumerate(graphs)}
        times = times_ms(runs, rounds=self.rounds, replays=self.replays)
        return [times[name] / 1e3 for name in runs]

    def _run(self, graph: Graph) -> TimedWay:
        inputs = tuple(self.place.tensor(torch.randn(tensor.shape)) for tensor in graph.inputs)
        (module,) = build([graph], [inputs], self.place).modules
        return prepare(RivalWay(graph.name, module, inputs, graph.weight_bytes, None))


def plan_for(
    place: Place,
    family: Family,
    sharing: Sharing,
    *,
    clock: GraphClock | None = None,
    weight_cap_bytes: int | None = None,
) -> Plan:
    """The fastest way to run *family* at *place*: layers by the model of a GPU, whole graphs by the clock."""
    return plan(
        family,
        sharing,
        Modelled(H200),
        forms=tuple(FORMS),
        align=place.align,
        weight_cap_bytes=weight_cap_bytes,
        whole=clock or GraphClock(place),
    )
