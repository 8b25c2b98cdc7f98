"""Which form each layer takes: ``plan`` finds the mixture that costs least, by a model or by the clock.

A *form* is a way to compute a layer for all models. A *segment*, a layer that takes a form and the layers after it
up to the next such layer, is costed by itself in every form, and so is every conversion of a value between layouts. The
plan is then a shortest path along the segments; a state of the path is the layouts in which the values still needed
exist. The best mixture of forms and each form used for all layers are costed as whole graphs; the fastest is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weft.base.errors import StitchError, unknown_name
from weft_stitch.cost import VIEWS, GraphCost, count
from weft_stitch.family import Family, Sharing
from weft_stitch.forms import FORMS
from weft_stitch.graph import Graph, signature
from weft_stitch.layouts import APART, Layout
from weft_stitch.lowering import lower
from weft_stitch.planning.segments import Cutter, FormSegment, segments
from weft_stitch.slabs import slab_layers
from weft_stitch.slabs import slabs as in_slabs

MIXED = "mixed"
"""The name of a plan with different forms."""
ANYWHERE = tuple(form for form in FORMS if form != "fused")
"""The forms that every runtime can compute."""
_STATES = 256
"""Width of the beam search: more states cost time, fewer can lose the best path where many values are alive."""
_PRICES = 40
"""Bisection steps for the price per byte at which the weights fit: 40 halvings find it to a relative 1e-12."""

Progress = Callable[[str], None]
Layouts = frozenset[Layout]
State = tuple[tuple[str, Layouts], ...]
"""The values still needed, each with the layouts in which it exists."""


@dataclass(frozen=True, slots=True)
class Option:
    """A segment in one form, with or without slabs."""

    form: str
    seconds: float
    slabs: bool
    """Whether its convolutions are in slabs."""
    weight_bytes: int
    reads: Mapping[str, Layout]
    """Input value -> its layout."""
    writes: Mapping[str, Layout]
    """Output value -> its layout."""


@dataclass(frozen=True, slots=True)
class FormChoice:
    """The chosen form of one layer, and its seconds in all forms."""

    layer: str
    form: str
    """The chosen form."""
    slabs: bool
    seconds: Mapping[str, float]
    """Form -> seconds of the layer and its followers, without layout conversions."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A form for every layer that takes one."""

    name: str
    """``mixed``, or the form of all layers."""
    forms: Mapping[str, str]
    slabs: frozenset[str]
    """Layers whose convolutions are computed in slabs."""
    seconds: Mapping[str, float]
    """Name of a plan -> seconds of its whole graph, for this plan and those of a single form."""
    table: tuple[FormChoice, ...]
    """The choice for each layer."""
    weight_bytes: int = 0
    """Bytes of the kernels of the whole graph."""

    @property
    def own_s(self) -> float:
        """Seconds of this plan."""
        return self.seconds[self.name]


def plan(
    family: Family,
    sharing: Sharing,
    cost: GraphCost,
    *,
    forms: Sequence[str] | None = None,
    slabs: bool = False,
    batches: Sequence[int] | None = None,
    dynamic: bool = False,
    align: int = 1,
    weight_cap_bytes: int | None = None,
    whole: GraphCost | None = None,
    progress: Progress = lambda what: None,
) -> Plan:
    """The fastest choice of forms for *family*.

    *cost* gives the seconds of segments. *whole* gives those of the whole graphs that are compared at the end; by
    default it is *cost*. *forms*: to choose from, by default ``ANYWHERE``. *slabs*: allow convolutions in slabs, which
    are often faster under onnxruntime on a CPU. *weight_cap_bytes*: limit on the weights of a graph. *batches*,
    *dynamic* and *align*: see ``lowering.lower``. Raises ``StitchError`` if no choice is below the cap.
    """
    rows = tuple(family.batches if batches is None else batches)
    search = _FormSearch(family, sharing, cost, tuple(forms or ANYWHERE), slabs, rows, dynamic, align, progress)
    candidates = search.contenders([search.cheapest(weight_cap_bytes)], whole or cost, weight_cap_bytes)
    return min(candidates, key=lambda candidate: (candidate.own_s, candidate.name))


def plans(
    family: Family,
    sharing: Sharing,
    cost: GraphCost,
    *,
    between: Sequence[float],
    lightest_bytes: int,
    heaviest_bytes: int,
    weight_cap_bytes: int | None = None,
    slabs: bool = False,
    dynamic: bool = False,
    align: int = 1,
    progress: Progress = lambda what: None,
) -> list[Plan]:
    """The fastest mixture of forms, lighter ones, and every single form, all costed together as whole graphs.

    *between*: where the weight caps of the lighter mixtures lie, as fractions of the way from *lightest_bytes* to the
    fastest mixture's weights. *heaviest_bytes* is one more cap.
    """
    search = _FormSearch(family, sharing, cost, ANYWHERE, slabs, family.batches, dynamic, align, progress)
    best = search.cheapest(weight_cap_bytes)
    best_bytes = sum(option.weight_bytes for option in best)
    caps = [lightest_bytes + int(fraction * (best_bytes - lightest_bytes)) for fraction in between]
    caps = [cap for cap in (*caps, heaviest_bytes) if lightest_bytes <= cap < best_bytes]
    lighter = [mixture for cap in caps if (mixture := search.within(cap)) is not None]
    return search.contenders([best, *lighter], cost, weight_cap_bytes)


def lower_plan(family: Family, sharing: Sharing, chosen: Plan, *, dynamic: bool = False, align: int = 1) -> Graph:
    """Lower a family by the plan *chosen*."""
    graph = lower(family, sharing, chosen.forms, dynamic=dynamic, align=align)
    return in_slabs(graph, chosen.slabs) if chosen.slabs else graph


@dataclass(frozen=True, slots=True)
class _Path:
    """The cheapest options found that lead to a state of the search."""

    price: float
    """Seconds, plus bytes of weights times the price of a byte."""
    options: tuple[Option, ...]
    """The option taken for each segment so far."""

    @property
    def weight_bytes(self) -> int:
        return sum(option.weight_bytes for option in self.options)


@dataclass(eq=False)
class _FormSearch:
    """The search over the forms of one family."""

    family: Family
    sharing: Sharing
    cost: GraphCost
    forms: tuple[str, ...]
    slabs: bool
    """Whether convolutions in slabs are allowed."""
    rows: tuple[int, ...]
    """Number of rows of each model."""
    dynamic: bool
    align: int
    progress: Progress
    graph_seconds: dict[object, list[float]] = field(default_factory=dict)
    """Signatures of graphs that were costed together -> their seconds."""
    conversion_seconds: dict[tuple[str, Layout, Layout], float] = field(default_factory=dict)
    """Value, source and target layout -> seconds of the conversion."""

    def __post_init__(self) -> None:
        for form in self.forms:
            if form not in FORMS:
                raise StitchError(unknown_name("form", form, FORMS))
        self.cutter = Cutter(self.family, self.sharing, self.rows, dynamic=self.dynamic, align=self.align)
        self.segments = segments(self.family)
        self.options = [self._options(segment) for segment in self.segments]

    def cheapest(self, cap: int | None) -> tuple[Option, ...]:
        """The fastest option for each segment, within *cap* bytes of weights in total (None: no cap).

        Lagrangian relaxation: bytes get a price in seconds, which is bisected to the least at which the weights fit.
        Raises ``StitchError`` if they never do.
        """
        best = self._walk(0.0)
        if cap is None or best.weight_bytes <= cap:
            return best.options
        # prices of a byte: at *high* first, the weights of the fastest options cost as much as their time
        low, high = 0.0, max(best.price, 1e-9) / max(1, best.weight_bytes)
        while (fitting := self._walk(high)).weight_bytes > cap:
            if high > 1.0:  # a second per byte: by this price, only the weights count
                raise StitchError(
                    f"the weights take {fitting.weight_bytes} bytes at least, and {cap} are allowed; "
                    "allow more, or stitch the models in groups"
                )
            low, high = high, high * 8
        for _ in range(_PRICES):
            middle = (low + high) / 2
            path = self._walk(middle)
            low, high = (low, middle) if path.weight_bytes <= cap else (middle, high)
            fitting = path if path.weight_bytes <= cap else fitting
        return fitting.options

    def within(self, cap: int) -> tuple[Option, ...] | None:
        """The options of ``cheapest``; None if no choice is below the cap."""
        try:
            return self.cheapest(cap)
        except StitchError:
            return None

    def contenders(self, mixtures: Sequence[Sequence[Option]], cost: GraphCost, cap: int | None) -> list[Plan]:
        """Cost as whole graphs, without duplicates: *mixtures*, and each form used for all layers.

        Those whose weights take more than *cap* bytes are left out, except the first mixture.
        """
        distinct: dict[object, tuple[str, Sequence[Option]]] = {}
        for mixture in (*mixtures, *self._single_form_options().values()):
            forms = self._forms(mixture)
            name = next(iter(forms.values())) if len(set(forms.values())) == 1 else MIXED
            distinct.setdefault((*forms.items(), self._layers_in_slabs(mixture)), (name, mixture))
        named = list(distinct.values())
        graphs = [self._graph(options) for _, options in named]
        # the first mixture, of index 0, is always compared
        fitting = [index for index, graph in enumerate(graphs) if not index or cap is None or graph.weight_bytes <= cap]
        self.progress(f"comparing {len(fitting)} whole graphs")
        times = dict(zip(fitting, cost.seconds([graphs[index] for index in fitting]), strict=True))
        uniform = {named[index][0]: times[index] for index in fitting if named[index][0] != MIXED}
        return [
            self._plan(*named[index], times[index], uniform, count(graphs[index]).weight_bytes) for index in fitting
        ]

    def _plan(
        self, name: str, options: Sequence[Option], own_s: float, uniform: Mapping[str, float], weight_bytes: int
    ) -> Plan:
        """The plan of the chosen *options*. *uniform*: form -> seconds of the plan that uses it for all layers."""
        seconds = {**uniform, name: own_s}
        return Plan(
            name, self._forms(options), self._layers_in_slabs(options), seconds, self._table(options), weight_bytes
        )

    def _options(self, segment: FormSegment) -> list[Option]:
        """The options for a segment: every form that can compute it."""
        if segment.formed is None:
            return self._with_and_without_slabs(segment, "separate")
        options = []
        for form in self.forms:
            if not self.cutter.refusal(segment.formed, form):
                self.progress(f"{segment.name} in {form}")
                options += self._with_and_without_slabs(segment, form)
        if not options:
            reason = self.cutter.refusal(segment.formed, self.forms[0])
            raise StitchError(f"{segment.name}: {self.forms[0]!r} cannot do it, {reason}")
        return options

    def _with_and_without_slabs(self, segment: FormSegment, form: str) -> list[Option]:
        """The options of a segment in one form, fastest first: with slabs and without.

        The slower option is kept only if its weights are smaller; slabs may be padded.
        """
        piece = self.cutter.piece(segment, form)
        graphs = [piece.graph]
        if self.slabs and slab_layers(piece.graph):
            graphs.append(in_slabs(piece.graph))
        times = self._seconds(graphs)
        fastest_first = sorted(range(len(times)), key=lambda number: times[number])
        options = [
            # graph 1, if there is one, is in slabs
            Option(form, times[number], bool(number), graphs[number].weight_bytes, piece.reads, piece.writes)
            for number in fastest_first
        ]
        return [option for option in options if option is options[0] or option.weight_bytes < options[0].weight_bytes]

    def _seconds(self, graphs: Sequence[Graph]) -> list[float]:
        """Seconds of *graphs*; graphs that differ only in the values of weights are costed once."""
        key = tuple(signature(graph) for graph in graphs)
        if key not in self.graph_seconds:
            self.graph_seconds[key] = self.cost.seconds(graphs)
        return self.graph_seconds[key]

    def _walk(self, byte_price: float) -> _Path:
        """The cheapest options if each byte of weights costs *byte_price* seconds: a beam search over segments."""
        start: State = tuple((value, frozenset({APART})) for value in sorted(self.family.inputs))
        paths = {start: _Path(0.0, ())}
        for number, options in enumerate(self.options):
            needed = {value for later in self.segments[number + 1 :] for value in later.inputs} | self._kept_values()
            following: dict[State, _Path] = {}
            for state, path in paths.items():
                for option in options:
                    reached, seconds = self._apply_option(state, option, needed)
                    price = path.price + seconds + byte_price * option.weight_bytes
                    if reached not in following or price < following[reached].price:
                        following[reached] = _Path(price, (*path.options, option))
            cheapest = sorted(following, key=lambda state: following[state].price)[:_STATES]
            paths = {state: following[state] for state in cheapest}
        ends = {state: path.price + self._output_seconds(state) for state, path in paths.items()}
        return paths[min(ends, key=lambda state: ends[state])]

    def _apply_option(self, state: State, option: Option, needed: set[str]) -> tuple[State, float]:
        """The state after *option*, and the seconds of the option with its layout conversions.

        *needed*: the values that later segments or outputs read; the state drops all others.
        """
        layouts_of, seconds = dict(state), option.seconds
        for value, layout in option.reads.items():
            seconds += self._conversion_seconds(value, layouts_of[value], layout)
            layouts_of[value] |= {layout}
        layouts_of |= {value: frozenset({layout}) for value, layout in option.writes.items()}
        still_needed = [entry for entry in layouts_of.items() if entry[0] in needed]
        return tuple(sorted(still_needed, key=lambda entry: entry[0])), seconds

    def _output_seconds(self, state: State) -> float:
        """Seconds to convert the values that leave the graph to one tensor per task."""
        return sum(self._conversion_seconds(value, layouts, APART) for value, layouts in state)

    def _kept_values(self) -> set[str]:
        """The values that outputs or tails read."""
        return {*self.family.outputs, *(value for bridge in self.family.bridges for value in bridge.values())}

    def _conversion_seconds(self, value: str, sources: Layouts, target: Layout) -> float:
        """Seconds to convert *value* to the layout *target* from the best of *sources*."""
        if target in sources:
            return 0.0
        for source in sources:
            if (value, source, target) not in self.conversion_seconds:
                graph = self.cutter.conversion(value, source, target)
                moving = any(step.op not in VIEWS for step in graph.steps)
                self.conversion_seconds[value, source, target] = self._seconds([graph])[0] if moving else 0.0
        return min(self.conversion_seconds[value, source, target] for source in sources)

    def _single_form_options(self) -> dict[str, list[Option]]:
        """Form -> its options for all segments, for each form that every layer can take."""
        uniform = {}
        for form in self.forms:
            mixture = []
            for segment, options in zip(self.segments, self.options, strict=True):
                same_form = [option for option in options if option.form == form or segment.formed is None]
                mixture += same_form[:1]  # the faster of those with and without slabs
            if len(mixture) == len(self.segments):
                uniform[form] = mixture
        return uniform

    def _graph(self, options: Sequence[Option]) -> Graph:
        """The whole graph with these options."""
        graph = lower(self.family, self.sharing, self._forms(options), batches=self.rows, align=self.align)
        layers = self._layers_in_slabs(options)
        return in_slabs(graph, layers) if layers else graph

    def _forms(self, options: Sequence[Option]) -> dict[str, str]:
        """Layer -> its form, for layers that take one."""
        pairs = zip(self.segments, options, strict=True)
        return {segment.formed.name: option.form for segment, option in pairs if segment.formed is not None}

    def _layers_in_slabs(self, options: Sequence[Option]) -> frozenset[str]:
        """Names of the layers whose convolutions are in slabs."""
        pairs = zip(self.segments, options, strict=True)
        return frozenset(segment.name for segment, option in pairs if option.slabs)

    def _table(self, chosen: Sequence[Option]) -> tuple[FormChoice, ...]:
        """The chosen form of every layer, and its seconds in each form."""
        rows = zip(self.segments, self.options, chosen, strict=True)
        return tuple(
            FormChoice(  # reversed: of two options in one form the faster, which comes first, is kept
                segment.name, taken.form, taken.slabs, {option.form: option.seconds for option in reversed(options)}
            )
            for segment, options, taken in rows
            if segment.formed is not None
        )
