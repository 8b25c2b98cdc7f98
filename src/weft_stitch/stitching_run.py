"""Plans, times and checks one graph of several models: ``stitch`` returns a ``Stitching``.

The steps: read, align, find shared channels, choose forms or groups, lower. Where times are measured, the remaining
plans are timed once more, in one race with the separate models; the reported times are those of this race. A *way* is
one way to run the models: one after another, stitched, or stitched in a single form.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.base.errors import StitchError
from weft.reports.pictures import Shown
from weft.runtime.metadata import servable
from weft_stitch.assembly import PLANNED, PlanContest, Stitched, assemble
from weft_stitch.cost import GraphCost, Modelled, machine
from weft_stitch.discovery import discover
from weft_stitch.family import Family, Sharing
from weft_stitch.forms import FORMS
from weft_stitch.graph import Graph
from weft_stitch.lowering import formed_layers
from weft_stitch.onnx_writer import refuse_overwriting
from weft_stitch.options import StitchOptions
from weft_stitch.planning.budget import BudgetLimits, stitch_groups
from weft_stitch.planning.planner import ANYWHERE
from weft_stitch.reading import read_models
from weft_stitch.reading.alignment import align
from weft_stitch.summary import SEQUENTIAL, SLABBED, STITCHED, Summary, Way, sum_ways

if TYPE_CHECKING:
    from weft_stitch.bodies.body_stitching import BodyStitching
    from weft_stitch.running.sessions import Difference

CLOSE_ROUNDED = 0.25
"""Largest relative difference of tuned models with rounding: a last digit may round a value to the format's next."""
ROUNDS = 20
"""Timed rounds per way to run the models, of which the least time counts: fewer leave more noise."""


class StitchProgress(NamedTuple):
    """Progress of a stitching."""

    stage: str
    detail: str = ""
    done: int = 0
    """Number of finished steps of the stage."""
    of: int | None = None
    """Number of all steps; None if unknown."""


OnProgress = Callable[[StitchProgress], None]
WayTimes = Mapping[str, float]
"""Name of a way to run the models -> seconds."""


@dataclass(frozen=True, eq=False, repr=False)
class Stitching(Shown):
    """Models as one graph, or as several groups if the limits require it, with their sizes, times and differences."""

    options: StitchOptions
    family: Family
    sharing: Sharing
    groups: tuple[Stitched, ...]
    summaries: tuple[Summary, ...]
    """The sizes and times of each group, and of the ways it was compared with."""
    difference: Difference | None
    """The largest difference to the outputs of the separate models; None if it was not checked."""

    def __repr__(self) -> str:
        graphs = "one graph" if len(self.groups) == 1 else f"{len(self.groups)} graphs"
        weights = f"{self.after.weight_bytes / 1e6:.3g} MB of weights, {self.before.weight_bytes / 1e6:.3g} MB before"
        return f"Stitching({', '.join(self.names)} as {graphs}; {weights})"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(net.name for net in self.family.nets)

    @property
    def before(self) -> Way:
        """All models one after another."""
        return sum_ways(SEQUENTIAL, [summary.sequential for summary in self.summaries])

    @property
    def after(self) -> Way:
        """All groups one after another."""
        return sum_ways(STITCHED, [summary.stitched for summary in self.summaries])

    @property
    def files(self) -> dict[str, Path]:
        """Name of a model -> the file that it was read from; models from memory are left out."""
        pairs = zip(self.names, self.options.models, strict=True)
        return {name: Path(model) for name, model in pairs if isinstance(model, str | os.PathLike)}

    def outputs(self, path: str | os.PathLike[str]) -> tuple[Path, ...]:
        """The file of each group: *path*, with a number before its suffix if there are several groups."""
        target = Path(path)
        if len(self.groups) == 1:
            return (target,)
        return tuple(target.with_name(f"{target.stem}.{number}{target.suffix}") for number in range(len(self.groups)))

    def to_onnx(self, path: str | os.PathLike[str]) -> tuple[Path, ...]:
        """Write every group as an ONNX file, and return the files; ``StitchError`` if one would overwrite a model."""
        outputs = self.outputs(path)
        refuse_overwriting(self.files.values(), outputs)
        for group, output in zip(self.groups, outputs, strict=True):
            group.to_onnx(output)
        return outputs


def stitch(
    models: Sequence[Any], *, on_progress: OnProgress | None = None, **options: Any
) -> Stitching | BodyStitching:
    """Make one graph of models that share weights; *options* are the fields of ``StitchOptions``."""
    return carry_out(StitchOptions(models=models, **options), on_progress)


def carry_out(options: StitchOptions, on_progress: OnProgress | None = None) -> Stitching | BodyStitching:
    """Read, plan, time and compare models as *options* say."""
    notify = on_progress or (lambda progress: None)
    if options.as_body:
        return _stitch_body(options, notify)
    if options.base is not None:
        raise StitchError(f"base = {options.base} is for a body; leave it out")
    family = _read_family(options, notify)
    sharing = _find_sharing(options, family, notify)
    groups = _plan_groups(options, family, sharing, notify)
    times: Sequence[WayTimes] = ()
    if options.measures and len(groups) == 1 and groups[0].contest is not None:
        notify(StitchProgress("racing"))
        stitched, way_times = _choose_fastest(options, groups[0], groups[0].contest)
        groups, times = (stitched,), (way_times,)
    difference = _compare_with_models(options, family, groups, notify) if options.checks else None
    modelled = Modelled(machine(options.machine))
    summaries = [group.summarise(modelled, _rivals(options, groups)) for group in groups]
    if options.measures:
        notify(StitchProgress("racing"))
        times = times or _race_ways(options, family, groups, summaries)
        summaries = [summary.timed(seconds) for summary, seconds in zip(summaries, times, strict=True)]
    return Stitching(options, family, sharing, groups, tuple(summaries), difference)


def _stitch_body(options: StitchOptions, notify: OnProgress) -> BodyStitching:
    """Stitch whole weights instead of channels."""
    from weft_stitch.bodies.body_stitching import stitch_body

    options.check_body()
    return stitch_body(
        options.models,
        options.names,
        tolerance=options.tolerance,
        base=options.base,
        check=options.checks,
        measure=options.measures,
        threads=options.used_threads,
        on_stage=lambda stage, done, of: notify(StitchProgress(stage, done=done, of=of)),
    )


def _read_family(options: StitchOptions, notify: OnProgress) -> Family:
    """Read the models and align them; ``StitchError`` for a name that a server refuses."""
    nets = read_models(
        options.models,
        example_inputs=options.example_inputs,
        names=options.names,
        batches=options.batches,
        islands=options.islands,
        shapes=options.shapes,
        progress=lambda done: notify(StitchProgress("reading", done=done, of=len(options.models))),
    )
    for net, model in zip(nets, options.models, strict=True):
        if options.dynamic and not servable(net.name):
            source = model if isinstance(model, str | os.PathLike) else net.name
            raise StitchError(f"{source}: its name is none that weft serve takes; give names = a,b,c")
    family = align(nets, islands=options.islands)
    if options.dynamic:
        _require_free_rows(options, family)
    return family


def _require_free_rows(options: StitchOptions, family: Family) -> None:
    """Refuse models in which the answer for one row depends on other rows; only islands can do so."""
    from weft_stitch.running.sessions import CLOSE, tied_rows

    for net in family.nets:
        has_islands = any(op.kind == "island" for op in net.ops)
        if why := tied_rows(net, CLOSE, threads=options.used_threads) if has_islands else "":
            raise StitchError(f"{net.name} {why}; leave out dynamic = True")


def _find_sharing(options: StitchOptions, family: Family, notify: OnProgress) -> Sharing:
    """The sharing: given in *options*, read from a file, or found by comparing weights."""
    given = options.sharing
    if isinstance(given, Sharing):
        return given
    if given is not None:
        from weft_stitch.sharing_map import read_sharing

        return read_sharing(os.fspath(given), family, tolerance=options.tolerance)
    stage = "looking for what is shared"
    notify(StitchProgress(stage))
    return discover(
        family,
        tolerance=options.tolerance,
        on_progress=lambda done, of: notify(StitchProgress(stage, done=done, of=of)),
    )


def _plan_groups(options: StitchOptions, family: Family, sharing: Sharing, notify: OnProgress) -> tuple[Stitched, ...]:
    """Plan one graph for all models, or groups if *options* set limits."""
    settings: dict[str, Any] = {
        "form": options.form, "cost": _cost(options), "dynamic": options.dynamic, "slabs": options.allows_slabs,
    }  # fmt: skip
    if options.in_groups:
        limits = BudgetLimits(options.memory_cap_bytes, options.latency_target_s)
        # about as many groups are costed: one of each number of models in each of three styles
        progress = _step_counter("grouping", 3 * family.tasks, notify)
        return stitch_groups(family, sharing, limits, **settings, progress=progress)
    # every layer in every form, and the whole graphs
    steps = len(formed_layers(family)) * len(ANYWHERE) + 1 if options.form == PLANNED else None
    settings |= {"slack": options.allowed_slack, "align": options.align}
    return (assemble(family, sharing, **settings, progress=_step_counter("planning", steps, notify)),)


def _step_counter(stage: str, of: int | None, notify: OnProgress) -> Callable[[str], None]:
    """Return a callback that reports one more finished step of *stage* at each call. *of*: the number of all steps."""
    numbers = count(1)
    notify(StitchProgress(stage, of=of))
    return lambda detail: notify(StitchProgress(stage, detail, next(numbers), of))


def _cost(options: StitchOptions) -> GraphCost:
    """The cost by which plans are compared: timed, or predicted for the described machine."""
    if not options.measures:
        return Modelled(machine(options.machine))
    from weft_stitch.running.sessions import GraphTimer

    return GraphTimer(threads=options.used_threads)


def _choose_fastest(options: StitchOptions, stitched: Stitched, contest: PlanContest) -> tuple[Stitched, WayTimes]:
    """Time all plans in one race; return *stitched* by the plan that the contest's rule chooses, and seconds by way."""
    plans = contest.plans
    separate_ways = [SEQUENTIAL, *([SLABBED] if stitched.slabs_alone else [])]
    # name of a way, or index of a plan -> its graphs
    contenders = {name: _graphs(stitched.family, stitched, name) for name in separate_ways}
    contenders |= {
        str(index): _graphs(stitched.family, stitched.planned(plan), STITCHED) for index, plan in enumerate(plans)
    }
    race_s = _race(options, stitched.family, contenders)
    seconds = [race_s[str(index)] for index in range(len(plans))]
    chosen = contest.choose(seconds)
    pairs = reversed(list(zip(plans, seconds, strict=True)))  # of plans of one name the first counts, as in ``in_form``
    forms = {plan.name: plan_s for plan, plan_s in pairs if plan.name in FORMS}
    times = {name: race_s[name] for name in separate_ways} | forms | {STITCHED: seconds[chosen]}
    return stitched.planned(plans[chosen]), times


def _race_ways(
    options: StitchOptions, family: Family, groups: Sequence[Stitched], summaries: Sequence[Summary]
) -> list[WayTimes]:
    """Time all ways of all groups in one race; return the seconds by way for each group."""
    contenders: dict[str, list[Graph]] = {}
    for number, (stitched, summary) in enumerate(zip(groups, summaries, strict=True)):
        contenders |= {f"{number}:{way.name}": _graphs(family, stitched, way.name) for way in summary.ways}
    times: list[dict[str, float]] = [{} for _ in summaries]
    for name, seconds in _race(options, family, contenders).items():
        group, _, way = name.partition(":")
        times[int(group)][way] = seconds
    return list(times)


def _race(options: StitchOptions, family: Family, contenders: Mapping[str, Sequence[Graph]]) -> dict[str, float]:
    """Time the *contenders*, by name: graphs that run one after another. Return the least seconds of each.

    With one thread the time of the processor counts, which other processes disturb less.
    """
    from weft_stitch.running.sessions import race

    threads = options.used_threads
    results = race(contenders, threads=threads, rows=family.batches[0], rounds=ROUNDS)
    return {name: min(turns.busy if threads == 1 else turns.seconds) for name, turns in results.items()}


def _graphs(family: Family, stitched: Stitched, way: str) -> list[Graph]:
    """The graphs that the way named *way* runs one after another, for the models of *stitched*.

    Rows stay dynamic only if all models of *family* get the same number of them, as the race gives one number.
    """
    same_rows = stitched.dynamic and len(set(family.batches)) == 1
    if way in (SEQUENTIAL, SLABBED):
        return [stitched.alone(task, slabs=way == SLABBED) for task in range(stitched.family.tasks)]
    if way != STITCHED:
        stitched = stitched.in_form(way)
    return [stitched.graph if same_rows else stitched.counted]


def _rivals(options: StitchOptions, groups: Sequence[Stitched]) -> tuple[str, ...]:
    """The forms to compare the plan with: those it was chosen from, except its own."""
    plan = groups[0].plan
    if options.form != PLANNED or len(groups) > 1 or plan is None:
        return ()
    return tuple(form for form in ANYWHERE if form != plan.name)


def _compare_with_models(
    options: StitchOptions, family: Family, groups: Sequence[Stitched], notify: OnProgress
) -> Difference:
    """The largest difference of outputs to the separate models'.

    Raises ``StitchError`` if it is too large and no tolerance was given. Tuned models are compared twice: without their
    rounding steps, strictly, and with them, coarsely.
    """
    from weft_stitch.running.sessions import CLOSE, Difference, largest_difference

    notify(StitchProgress("comparing with the models"))
    pairs = zip(family.nets, options.models, strict=True)
    sources = {net.name: Path(model) for net, model in pairs if isinstance(model, str | os.PathLike)}
    worst = Difference(0.0, "")
    for group in groups:
        files, unrounded = [sources.get(name) for name in group.names], group.unrounded()
        # a file with rounding steps is no reference without them: then the net is compared, as it was read
        references = files if unrounded is group else [None] * len(files)
        for rows in _row_counts(group):
            difference = largest_difference(
                unrounded.graph, unrounded.family, references, rows, threads=options.used_threads
            )
            if not options.tolerance:
                difference.require(CLOSE)
            coarse = difference.rounding_difference  # to files that round by themselves
            if unrounded is not group:
                rounded = largest_difference(group.graph, group.family, files, rows, threads=options.used_threads)
                if not options.tolerance:
                    rounded.require(CLOSE_ROUNDED)
                coarse = rounded.relative
            worst = max(worst, difference)._replace(rounding_difference=max(worst.rounding_difference, coarse))
    return worst


def _row_counts(stitched: Stitched) -> list[tuple[int, ...]]:
    """The rows of each model in each comparison; dynamic graphs are also compared with unequal rows."""
    comparisons = [stitched.batches]
    if stitched.dynamic:
        comparisons.append(tuple(batch * (1 + task % 3) for task, batch in enumerate(stitched.batches)))
    return comparisons
