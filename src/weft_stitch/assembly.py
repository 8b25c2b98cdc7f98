"""Plans one graph for a family whose sharing is known: ``assemble`` returns a ``Stitched``.

A *plan* names a form for each layer, a *contest* has several plans and the rule that chooses among them. A *way* is one
way to run the models, with its sizes and times.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from weft.base.errors import StitchError, unknown_name
from weft_stitch.cost import ITEM_BYTES, GraphCost, Modelled, coded_kernels, count, store_codes, width_metadata
from weft_stitch.family import Family, FamilyLayer, Sharing, part
from weft_stitch.forms import FORMS
from weft_stitch.graph import Graph, signature
from weft_stitch.graph_steps import plain_graph
from weft_stitch.lowering import formed_layers, lower
from weft_stitch.net import ROUNDING, Net, Op
from weft_stitch.planning.planner import ANYWHERE, Plan, Progress, lower_plan, plan, plans
from weft_stitch.slabs import slabs as in_slabs
from weft_stitch.summary import (
    SEQUENTIAL,
    SLABBED,
    STITCHED,
    Summary,
    Way,
    count_kernels,
    form_name,
    graph_way,
    layer_rows,
    space_rows,
    sum_ways,
)

PLANNED = "planned"
"""In place of a form's name: choose the cheapest form for each layer."""
SLACK = 0.05
"""Default slack: how much slower than the fastest plan one with fewer weights may be, as a fraction."""
CAP_FRACTIONS = (0.05, 0.25, 0.5, 0.75)
"""Weight caps of the plans to search, as fractions: 0 is the bytes of the unique weights, 1 of the fastest plan's."""


@dataclass(frozen=True, eq=False)
class CachedCost:
    """A cache around *cost*: graphs that differ only in the values of their weights are costed once."""

    cost: GraphCost
    cached_s: dict[str, float] = field(default_factory=dict)
    """Signature of a graph -> its seconds."""

    def seconds(self, graphs: Sequence[Graph]) -> list[float]:
        """The seconds of *graphs*; only graphs with new signatures are passed on to *cost*."""
        keys = [signature(graph) for graph in graphs]
        new = {key: graph for key, graph in zip(keys, graphs, strict=True) if key not in self.cached_s}
        if new:
            self.cached_s.update(zip(new, self.cost.seconds(list(new.values())), strict=True))
        return [self.cached_s[key] for key in keys]


@dataclass(frozen=True, eq=False)
class PlanContest:
    """Plans of one family, and the rule that chooses among them."""

    plans: tuple[Plan, ...]
    slack: float = SLACK
    most_bytes: int | None = None
    """Limit on the bytes of weights; a plan above it is only chosen if every plan is above it."""

    def choose(self, seconds: Sequence[float] | None = None) -> int:
        """Return the index of the plan with the fewest weights among those within the slack of the fastest.

        *seconds*: measured times of the plans, to be used instead of their own. Of ties the faster, then the earlier.
        """
        times = [candidate.own_s for candidate in self.plans] if seconds is None else seconds
        indices = range(len(times))
        cap = self.most_bytes
        within_cap = [index for index in indices if cap is None or self.plans[index].weight_bytes <= cap]
        within_cap = within_cap or list(indices)
        # at least the fastest within the cap is fast enough
        limit_s = max(min(times) * (1 + self.slack), min(times[index] for index in within_cap))
        fast_enough = [index for index in within_cap if times[index] <= limit_s]
        return min(fast_enough, key=lambda index: (self.plans[index].weight_bytes, times[index], index))

    @property
    def chosen(self) -> Plan:
        return self.plans[self.choose()]


@dataclass(frozen=True, eq=False, repr=False)
class Stitched:
    """Several models as one graph that computes the same outputs."""

    family: Family
    sharing: Sharing
    forms: Mapping[str, str]
    """Layer -> its form, for layers that have weights."""
    graph: Graph
    batches: tuple[int, ...]
    """Number of rows of each model for which the graph was planned."""
    dynamic: bool = False
    """Whether each model's rows are only known at run time."""
    align: int = 1
    """Numbers per vector load in the form ``fused``."""
    plan: Plan | None = None
    """None if the forms were not planned but given."""
    slabs_allowed: bool = False
    contest: PlanContest | None = None
    """The plans among which *plan* was chosen."""

    def __repr__(self) -> str:
        rows = "any" if self.dynamic else ", ".join(map(str, self.batches))
        return f"Stitched({', '.join(self.names)}; form {form_name(self.forms)}, rows {rows})"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(net.name for net in self.family.nets)

    @cached_property
    def counted(self) -> Graph:
        """The graph by which bytes and times are counted: for the rows *batches*, as a dynamic graph has no sizes."""
        if not self.dynamic:
            return self.graph
        if self.plan:
            return lower_plan(self.family, self.sharing, self.plan, align=self.align)
        return lower(self.family, self.sharing, self.forms, align=self.align)

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the ONNX file: the models in it, and how they share weights."""
        from weft_stitch.file_description import family_metadata, metadata  # pydantic is for files

        entries = metadata(self.family, self.batches)
        return entries | family_metadata(self.family, self.sharing, self.graph) if self.dynamic else entries

    @cached_property
    def report(self) -> Summary:
        """Sizes and predicted time, compared with the models one after another."""
        return self.summarise()

    def summarise(self, cost: Modelled | None = None, compare: Sequence[str] = ()) -> Summary:
        """Summarise the graph on a described machine.

        *compare*: forms; each is compared as the only form of all layers, if that is possible.
        """
        cost = cost or Modelled()
        ways = [self._sequential(SEQUENTIAL, cost), self._stitched_way(STITCHED, cost)]
        if compare and self.slabs_alone:
            ways.append(self._sequential(SLABBED, cost))
        impossible: dict[str, str] = {}
        for form in compare:
            rival = self._rival_way(form, cost)
            if isinstance(rival, Way):
                ways.append(rival)
            else:
                impossible[form] = rival
        return Summary(
            models=self.names,
            batches=self.batches,
            dynamic=self.dynamic,
            form=form_name(self.forms),
            ways=tuple(ways),
            impossible=impossible,
            kernels=count_kernels(self.family, self.sharing),
            layers=layer_rows(self.family, self.sharing, self.counted, self.forms, self.plan, cost),
            spaces=space_rows(self.family, self.sharing),
        )

    @property
    def slabs(self) -> frozenset[str]:
        """Names of the layers whose convolutions are in slabs."""
        return self.plan.slabs if self.plan else frozenset()

    @property
    def slabs_alone(self) -> frozenset[str]:
        """Names of the layers in slabs when the models run separately: those of the plan ``separate``, if it exists."""
        return next((rival.slabs for rival in self._rivals if rival.name == "separate"), self.slabs)

    @property
    def _rivals(self) -> tuple[Plan, ...]:
        """The plans among which this one was chosen."""
        return self.contest.plans if self.contest else ()

    def alone(self, task: int, *, slabs: bool = False) -> Graph:
        """The graph of one model, with normalisations folded; *slabs*: with layers in slabs where that is faster."""
        if not slabs:
            return plain_graph(self.family.nets[task])
        graph = lower(*part(self.family, self.sharing, (task,)), "separate")
        return in_slabs(graph, {layer.ops[task].name for layer in self.family.layers if layer.name in self.slabs_alone})

    def _sequential(self, name: str, cost: Modelled) -> Way:
        """Sizes and time of the models one after another."""
        graphs = (self.alone(task, slabs=name == SLABBED) for task in range(self.family.tasks))
        return sum_ways(name, [graph_way(name, graph, cost) for graph in graphs])

    def _stitched_way(self, name: str, cost: Modelled) -> Way:
        """Sizes and time of this graph. Launches are those of the dynamic graph if it is dynamic."""
        return replace(graph_way(name, self.counted, cost), launches=count(self.graph).launches, slabs=bool(self.slabs))

    def _rival_way(self, form: str, cost: Modelled) -> Way | str:
        """Sizes and time if all layers have *form*, or the reason why that is impossible."""
        try:
            return self.in_form(form)._stitched_way(form, cost)
        except StitchError as error:
            return str(error)

    def planned(self, other: Plan) -> Stitched:
        """The same models, stitched by the plan *other*."""
        graph = lower_plan(self.family, self.sharing, other, dynamic=self.dynamic, align=self.align)
        return replace(self, forms=other.forms, graph=graph, plan=other)

    def unrounded(self) -> Stitched:
        """The same models without their rounding steps; this object if there are none."""
        if not self.graph.rounded:
            return self
        unrounded = replace(self, family=without_rounding(self.family))
        if self.plan:
            return unrounded.planned(self.plan)
        graph = lower(unrounded.family, self.sharing, self.forms, dynamic=self.dynamic, align=self.align)
        return replace(unrounded, graph=graph)

    def in_form(self, form: str) -> Stitched:
        """The same models, with *form* for all layers."""
        for rival in self._rivals:
            if rival.name == form:
                return self.planned(rival)
        return assemble(
            self.family, self.sharing, form=form, dynamic=self.dynamic, slabs=self.slabs_allowed, align=self.align
        )

    def module(self, *, device: Any = "cpu", dtype: Any = None, channels_last: bool = False) -> Any:
        """A torch module that takes and returns the models' inputs and outputs, one model after another."""
        from weft_stitch.running.module import StitchedModule

        return StitchedModule(self.graph, device=device, dtype=dtype, channels_last=channels_last)

    def to_onnx(self, path: str | os.PathLike[str]) -> None:
        """Write an ONNX file; ``weft serve`` serves it as the separate models if it is dynamic."""
        from weft_stitch.onnx_writer import write_onnx

        kernels = coded_kernels(self.graph)
        write_onnx(store_codes(self.graph, kernels), path, self.metadata | width_metadata(self.graph, kernels))


def assemble(
    family: Family,
    sharing: Sharing,
    *,
    form: str | Mapping[str, str] = PLANNED,
    dynamic: bool = False,
    cost: GraphCost | None = None,
    slack: float = SLACK,
    slabs: bool = False,
    align: int = 1,
    weight_cap_bytes: int | None = None,
    progress: Progress = lambda what: None,
) -> Stitched:
    """Choose the forms of a family whose sharing is known, and lower it; nothing is compared with the models.

    form: ``planned``, the name of one, or one for each layer.
    dynamic: the rows of each model are only known at run time.
    cost: how ``planned`` compares graphs: by a described machine (a CPU under onnxruntime), or timed (``GraphTimer``).
    slack: how much slower than the fastest a plan may be if it stores fewer weights, as a fraction.
    slabs: convolutions in slabs where that is faster, as it often is under onnxruntime on a CPU.
    align: see ``lowering.lower``; for the form ``fused``.
    weight_cap_bytes: see ``planner.plan``.
    """
    settings: dict[str, Any] = {"slabs": slabs, "dynamic": dynamic, "align": align, "progress": progress}
    settings["weight_cap_bytes"] = weight_cap_bytes
    chosen, candidates = None, None
    if form == PLANNED:
        candidates = contest(family, sharing, cost or Modelled(), slack=slack, **settings)
        chosen = candidates.chosen
    elif isinstance(form, str) and slabs and form in ANYWHERE:  # only a plan tells for which layers slabs are faster
        chosen = plan(family, sharing, cost or Modelled(), forms=(form,), **settings)
    if chosen:
        graph, forms = lower_plan(family, sharing, chosen, dynamic=dynamic, align=align), chosen.forms
    else:
        forms = uniform(family, form) if isinstance(form, str) else form
        graph = lower(family, sharing, forms, dynamic=dynamic, align=align)
    return Stitched(family, sharing, forms, graph, family.batches, dynamic, align, chosen, slabs, candidates)


def contest(family: Family, sharing: Sharing, cost: GraphCost, *, slack: float = SLACK, **settings: Any) -> PlanContest:
    """Search plans and cost each as a whole graph. *settings* are those of ``planner.plans``.

    With slack, plans are preferred that store no more weights than the separate models do; without, the fastest wins.
    """
    if not slack >= 0:
        raise StitchError(f"slack {slack}: give 0 for the fastest plan, or how much slower it may be, as 0.05")
    unique_bytes = ITEM_BYTES * count_kernels(family, sharing).unique
    separate_graphs = [plain_graph(net) for net in family.nets]
    separate_bytes = sum(graph.weight_bytes for graph in separate_graphs)
    fractions = CAP_FRACTIONS if slack else ()
    settings |= {"between": fractions, "lightest_bytes": unique_bytes, "heaviest_bytes": separate_bytes}
    candidates = plans(family, sharing, CachedCost(cost), **settings)
    return PlanContest(
        tuple(candidates), slack, sum(count(graph).weight_bytes for graph in separate_graphs) if slack else None
    )


def uniform(family: Family, form: str) -> dict[str, str]:
    """Layer -> *form*, for all layers.

    A depthwise layer has nothing to fuse: it gets ``split`` in place of ``fused``.
    """
    if form not in FORMS:
        raise StitchError(unknown_name("form", form, (PLANNED, *FORMS)))
    return {layer.name: "split" if form == "fused" and layer.op.depthwise else form for layer in formed_layers(family)}


def without_rounding(family: Family) -> Family:
    """Replace the rounding steps of *family* by identities."""
    return replace(
        family,
        nets=tuple(map(plain_net, family.nets)),
        layers=tuple(
            FamilyLayer(tuple(map(_identity_if_rounding, layer.ops)), layer.inputs, layer.output)
            for layer in family.layers
        ),
        tails=tuple(tuple(map(_identity_if_rounding, tail)) for tail in family.tails),
    )


def plain_net(net: Net) -> Net:
    """*net* with its rounding steps replaced by identities."""
    return replace(net, ops=tuple(map(_identity_if_rounding, net.ops)))


def _identity_if_rounding(op: Op) -> Op:
    """An identity if *op* is a rounding step, else *op*."""
    return replace(op, function="Identity", payload=None) if op.function == ROUNDING else op
