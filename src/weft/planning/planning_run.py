"""Planning from start to end: models, rates and deadlines in, a plan out, for ``weft plan`` and ``weft.plan``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.base.errors import InputError, WorkloadError
from weft.base.registry import registered
from weft.devices import Host
from weft.devices.conditions import worst_of
from weft.kernels.request_loop import is_compiled
from weft.planning.busiest import BusyStretch, busiest
from weft.planning.candidates import Arrangement, arrangements
from weft.planning.choice import Chosen, choose
from weft.planning.finals import FINALISTS, Finalist, finals, long_run
from weft.planning.folder import ModelToServe, planned_model, source_digests, write_plan
from weft.planning.machine import PlanTarget, made_here, plan_target, these_versions, this_machine
from weft.planning.measured import CUT, SECONDS, LeftOutShape, MeasuredMachine, default_cache, measured_hosts
from weft.planning.page import plan_page
from weft.planning.plan import Plan, PlanBudget, PlannedModel, PlanOption, PlanSettings, Prediction
from weft.planning.plan_request import LIMIT, PlanRequest, RequestedModel, ask
from weft.planning.process_pool import Helpers
from weft.planning.reasons import reasons, shared_weights
from weft.planning.segment_length import with_longer_segments
from weft.planning.served_files import files_to_serve, stitched_from
from weft.planning.standalone_times import times_alone
from weft.planning.trials import STEP, OptionTrial
from weft.serving.isolation import THREADS
from weft.simulation.run_length import LONG
from weft.workloads.requests import Workload

if TYPE_CHECKING:
    from weft.reports.pictures import Figure


class PlanProgress(NamedTuple):
    """The stage of the planning, and the steps done in this stage, of *of* steps (None: unknown)."""

    stage: str
    detail: str = ""
    done: int = 0
    of: int | None = None


OnProgress = Callable[[PlanProgress], None]


@dataclass(frozen=True, eq=False, repr=False)
class MadePlan:
    """A plan with the request, the measurement and the files that it was made from."""

    plan: Plan
    asked: PlanRequest
    """What was asked for: workload, limits and objective."""
    host: Host
    """The machine as measured with the lanes and threads of the plan, or its GPU."""
    models: dict[str, ModelToServe]
    """The files and settings to serve, by name."""
    busiest: BusyStretch

    def __repr__(self) -> str:
        return f"Made{self.plan!r}"

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()

    def plot(self) -> Figure:
        """Draw the latencies, deadlines and largest load of each option."""
        return self.plan.plot()

    def report(self) -> str:
        """Return the plan as an HTML page."""
        return plan_page(self.plan, self.asked, self.busiest, self.host.source)

    def write(self, folder: str | Path) -> None:
        """Write the folder that ``weft serve`` and ``weft bench`` read."""
        write_plan(
            self.plan, folder, models=self.models, workload=self.asked.workload, host=self.host, report=self.report()
        )


def make_plan(
    workload: Workload,
    *,
    cores: int | None = None,
    memory_bytes: int | None = None,
    objective: str = "deadlines",
    deadlines: str = "strict",
    limit: float = LIMIT,
    isolation: str = THREADS,
    int8: bool = False,
    devices: Sequence[str | Host] = (),
    seconds: float = SECONDS,
    cache: str | Path | None = None,
    fresh: bool = False,
    processes: int = 1,
    on_progress: OnProgress | None = None,
) -> MadePlan:
    """Measure the models on this machine or its GPU, and choose the best arrangement for a workload.

    workload: the models with the rates and deadlines of their requests (docs/formats.md).
    objective, deadlines: of ``plan_request.OBJECTIVES`` and ``DEADLINES``. limit: the share of deadlines that
    may be missed. seconds: duration of the measurement of all models together.
    cores, memory_bytes: limits; by default all of the machine. devices: a device to plan for, such as a GPU, which a
    workload may name as well; or measured machines, or files of them (``weft profile --device host -o``), instead of
    measuring. isolation: where models run, in threads of the server or in worker processes. int8: whether models that
    have samples are tried in 8 bits. cache: folder of measurements. fresh: measure again, ignoring the cache.
    processes: number of processes that simulate; it does not change the plan.
    """
    notify = on_progress or (lambda progress: None)
    request, measured = measured_for(
        workload,
        devices,
        seconds,
        cache,
        notify,
        int8=int8,
        fresh=fresh,
        cores=cores,
        memory_bytes=memory_bytes,
        objective=objective,
        deadlines=deadlines,
        limit=limit,
        isolation=isolation,
    )
    options = arrangements(request, measured.hosts)
    memory = partial(memory_of, request)
    with _helpers(request, measured.hosts, processes - 1) as helpers:
        chosen = choose(request, options, memory, lambda done, of: notify(PlanProgress("choosing", "", done, of)))
        return _final_plan(request, with_longer_segments(request, chosen, memory), notify, helpers, measured)


def _helpers(request: PlanRequest, hosts: Sequence[Host], processes: int) -> Helpers:
    """Start processes that simulate in parallel; none if the compiled simulation loop can run at once.

    The loop covers neither exit floors nor lanes that queue segments ahead. It is not compiled for a first plan: with
    two processes the plain engine is done sooner. Call this after the last measurement, whose times processes would
    change.
    """
    has_exit_floor = any(stream.exit_floor is not None for stream in request.workload.stream)
    uses_plain_loop = has_exit_floor or any(host.ahead for host in hosts) or not is_compiled()
    return Helpers(processes, finals.__module__) if uses_plain_loop else Helpers()


def plan_option(name: str) -> Any:
    """Return a tool's implementation of an option of ``weft plan``; InputError without the tool or a dependency."""
    entry = registered("plan_options").get(name)
    if entry is None:
        raise InputError(f"{name}: no tool of this installation brings this option; weft tools lists what there is")
    if missing := entry.tool.missing():  # checked here, not on import: that follows minutes of measuring
        raise InputError(entry.tool.lacks(missing[0]))
    return entry.load()


def measured_for(
    workload: Workload,
    devices: Sequence[str | Host],
    seconds: float,
    cache: str | Path | None,
    notify: OnProgress,
    *,
    int8: bool,
    fresh: bool = False,
    **asking: Any,
) -> tuple[PlanRequest, MeasuredMachine]:
    """Check the request and measure its models, as ``make_plan`` does; *asking*: further arguments of ``ask``."""
    cache_folder = default_cache() if cache is None else Path(cache)
    target = plan_target(devices, workload)
    request = ask(workload, cache_folder / CUT, device=target.device, **asking)
    if int8:
        request = plan_option("int8")(request, cache_folder, lambda what: notify(PlanProgress("making int8", what)))
    measured = _measured(request, target, cache_folder, seconds, notify, fresh)
    check_exits(request, measured.hosts)
    check_deadlines(request, measured.hosts)
    remarks = (f"{division.label} was left out: {division.why}." for division in measured.left_out)
    return replace(request, remarks=(*request.remarks, *remarks)), measured


def _measured(
    request: PlanRequest, target: PlanTarget, cache: Path, seconds: float, notify: OnProgress, fresh: bool
) -> MeasuredMachine:
    """Return the machine as measured: in the files of the target, else in the cache, else now; *fresh*: always now."""
    if not target.measured:
        return measured_hosts(
            request,
            cache,
            seconds=seconds,
            fresh=fresh,
            progress=lambda what, done, of: notify(PlanProgress("measuring", what, done, of)),
        )
    if fresh:
        raise InputError(
            "fresh = True: the devices that are given were measured before, and are not again; leave it out"
        )
    for host in target.measured:
        if host.isolation != request.isolation:
            raise InputError(
                f"isolation = {request.isolation}: the device was measured with models in {host.isolation}, "
                "which takes another time; leave the device out to measure it so"
            )
        for model in request.models:
            host.model(model.name)  # raises an error if it was not measured
    fitting = [host for host in target.measured if host.lanes * host.threads <= request.cores]
    if not fitting:
        least = min(host.lanes * host.threads for host in target.measured)
        raise InputError(f"cores = {request.cores}: the device was measured with {least} or more; allow as many")
    return MeasuredMachine(fitting)


def check_exits(request: PlanRequest, hosts: Sequence[Host]) -> None:
    """Raise WorkloadError if a stream states shares for other exits than were measured."""
    for stream, _, exit_shares in request.sent_streams:
        for host in hosts:
            early = len(host.model(stream.served_name).exits)
            if exit_shares and len(exit_shares) != early + 1:
                raise WorkloadError(
                    f"{stream.model}: {len(exit_shares) - 1} early exits are stated, and it was measured with "
                    f"{early}; measure it as it is served, or leave out exit_rates and exit_record"
                )


def check_deadlines(request: PlanRequest, hosts: Sequence[Host]) -> None:
    """Raise WorkloadError for a deadline that is shorter than the model's own time, and name a possible one.

    A strict deadline is compared with the time without early exits, as in the server's admission.
    """
    for stream, _, exit_shares in request.sent_streams:
        rates = () if request.deadlines == "strict" else exit_shares
        fastest = min(
            (times_alone(host, stream.served_name, rates) for host in hosts), key=lambda alone: alone.middle_s
        )
        if fastest.middle_s > stream.deadline_s:
            # suggests 20 % more than the p99 alone, in milliseconds
            raise WorkloadError(
                f"{stream.model}: a deadline of {stream.deadline_s * 1e3:g} ms is shorter than the fastest possible, "
                f"{fastest.middle_s * 1e3:.3g} ms with nothing else running; plan with "
                f"deadline={ceil(1.2e3 * fastest.quantile_s(0.99))} or more"
            )


def memory_of(request: PlanRequest, arrangement: Arrangement) -> int:
    """Return the server's memory: as measured, else the size of the models' files, twice with workers and spares."""
    return arrangement.host.memory_bytes or request.bytes * (1 if request.isolation == THREADS else 2)


def _final_plan(
    request: PlanRequest, chosen: Chosen, notify: OnProgress, helpers: Helpers, measured: MeasuredMachine
) -> MadePlan:
    """Run the final comparison and return its winner as a plan, with figures from fresh requests."""
    # The best candidate usually wins, so its long run begins before the comparison ends.
    expected_run = helpers.begin(long_run, request, chosen.best.arrangement, LONG)
    ranking = finals(
        request,
        (chosen.best, *chosen.others),
        lambda label, done, of: notify(PlanProgress("comparing the best", label, done, of + 1)),
        helpers,
    )
    winner = ranking.winner
    arrangement = winner.trial.arrangement
    notify(PlanProgress("comparing the best", "a long run", 2 * FINALISTS, 2 * FINALISTS + 1))
    case, run = expected_run.result() if winner.trial is chosen.best else long_run(request, arrangement, LONG)
    predicted = winner.prediction
    configs = {model.name: _settings(request, model, arrangement) for model in request.models}
    models = files_to_serve(request.models, configs)
    plan = Plan(
        made=made_here(request.device),
        versions=these_versions(),
        objective=request.objective,
        deadlines="soft" if request.deadlines == "soft" else "strict",
        machine=this_machine(request.device),
        measured=worst_of(host.conditions for host in measured.hosts),
        budget=PlanBudget(cores=None if request.device else request.cores, memory_bytes=request.memory_bytes),
        models=tuple(_plan_model(request, home, file, arrangement.host) for home, file in models.items()),
        settings=arrangement.settings,
        predicted=predicted,
        options=(
            *_options(chosen, ranking.finalists),
            *(_not_measured(request, division) for division in measured.left_out),
        ),
        reasons=reasons(request, chosen, ranking, shared_weights(request.models)),
    )
    return MadePlan(plan, request, arrangement.host, models, busiest(case, run, arrangement.host.lanes))


def _options(chosen: Chosen, finalists: Sequence[Finalist]) -> Iterator[PlanOption]:
    """Yield all candidates, the best first: *finalists* by rank, their twins, other simulated options, and the rest."""
    yield from (_option(finalist.trial.arrangement, finalist.prediction) for finalist in finalists)
    listed = [finalist.trial for finalist in finalists]
    for finalist in finalists:
        listed += finalist.twins
        why = f"does the same as {finalist.trial.arrangement.label}"
        yield from (_left_out(twin.arrangement, why) for twin in finalist.twins)
    for trial in (chosen.best, *chosen.others):
        if trial not in listed:
            yield _left_out(trial.arrangement, _not_finalist_text(trial))
    for option in chosen.left_out:
        yield _left_out(option.arrangement, option.why)


def _option(arrangement: Arrangement, predicted: Prediction) -> PlanOption:
    return PlanOption(
        label=arrangement.label, settings=arrangement.settings, models=arrangement.models, predicted=predicted
    )


def _left_out(arrangement: Arrangement, why: str) -> PlanOption:
    return PlanOption(label=arrangement.label, settings=arrangement.settings, models=arrangement.models, left_out=why)


def _not_measured(request: PlanRequest, division: LeftOutShape) -> PlanOption:
    """Return all options of a division as one, whose policy is the default because none was tried."""
    settings = PlanSettings(lanes=division.shape.lanes, threads=division.shape.threads, isolation=request.isolation)
    return PlanOption(label=division.label, settings=settings, left_out=division.why)


def _not_finalist_text(trial: OptionTrial) -> str:
    """Return why a simulated option was not among the finalists."""
    if not trial.failed:
        return "came after the finalists in short runs"
    step, missed = trial.nearness
    return f"missed {missed:.1%} of a stream's deadlines at {STEP**-step:.2f} times the load"


def _settings(request: PlanRequest, model: RequestedModel, arrangement: Arrangement) -> dict[str, Any]:
    """Return the settings chosen for a model; its shortest stream deadline is the default of its requests."""
    deadlines_ms = [stream.deadline_ms for stream in request.workload.stream if stream.served_name == model.name]
    grain_ms = arrangement.grain_ms[model.name]
    return {
        "max_batch": arrangement.batches[model.name],
        "slo_ms": min(deadline_ms for deadline_ms in deadlines_ms if deadline_ms is not None),
        **({} if grain_ms == model.config.grain_ms else {"grain_ms": grain_ms}),
    }


def _plan_model(request: PlanRequest, home: str, file: ModelToServe, host: Host) -> PlannedModel:
    """Describe a model file in the plan. *home*: its folder in the repository; all models in a file are cut alike."""
    first = next(model for model in request.models if model.home == home)
    preparation = first.preparation
    same_answers = None if preparation is None else preparation.same_answers
    return planned_model(
        home,
        file,
        sources=source_digests(preparation.original if preparation else first.path),
        segments=len(host.model(first.name).segments),
        done=preparation.change if preparation else stitched_from(request.models, home),
        accuracy=same_answers,
        accuracy_as_given=None if same_answers is None else 1.0,
    )
