"""From models, rates and deadlines to a plan: all that ``weft plan`` decides, and what ``weft.plan`` does as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from weft.devices import HOST, Host, read_host
from weft.errors import InputError, WorkloadError
from weft.planning.asked import LIMIT, Asked, AskedModel, ask
from weft.planning.bounds import times_alone_s
from weft.planning.busiest import BusyStretch, busiest
from weft.planning.candidates import Arrangement, arrangements
from weft.planning.choice import Chosen, choose
from weft.planning.folder import ModelToServe, planned_model, source_digests, write_plan
from weft.planning.machine import made_here, these_versions, this_machine
from weft.planning.measured import CUT, SECONDS, default_cache, measured_hosts
from weft.planning.plan import Plan, PlanBudget, PlannedModel, PlanOption, Prediction
from weft.planning.predicted import FRESH_SEED, largest_load, prediction
from weft.planning.reasons import reasons
from weft.planning.sharing import shared_weights
from weft.planning.trials import LONG, Trial, simulated
from weft.workloads.requests import Workload

if TYPE_CHECKING:
    from weft.reports.pictures import Figure

BESIDE = 4
"""Options that are told in full besides the winner."""


class PlanProgress(NamedTuple):
    """How far the planning is."""

    stage: str
    detail: str = ""
    done: int = 0
    of: int | None = None


OnProgress = Callable[[PlanProgress], None]


@dataclass(frozen=True, eq=False, repr=False)
class MadePlan:
    """A plan, and what it was made of."""

    plan: Plan
    asked: Asked
    host: Host
    """The machine as measured with the lanes and threads of the plan."""
    models: dict[str, ModelToServe]
    """The files and settings to serve, by name."""
    busiest: BusyStretch

    def __repr__(self) -> str:
        return f"Made{self.plan!r}"

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()

    def plot(self) -> Figure:
        """Latencies beside deadlines, and the largest load, of each option."""
        return self.plan.plot()

    def report(self) -> str:
        """The plan as a page."""
        from weft.planning.page import plan_page

        return plan_page(self)

    def write(self, folder: str | Path) -> None:
        """Write the folder that ``weft serve`` and ``weft bench`` take."""
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
    devices: Sequence[str | Host] = (),
    seconds: float = SECONDS,
    cache: str | Path | None = None,
    on_progress: OnProgress | None = None,
) -> MadePlan:
    """Measure the models on this machine, and choose the best way to serve a workload on it.

    workload: the models, how often each is asked for, and how soon its requests are due (docs/formats.md).
    cores, memory_bytes: what may be used; all there is where left out. devices: measured machines, or files of them
    (``weft profile --device host -o``), instead of measuring. cache: where measurements are kept.
    """
    told = on_progress or (lambda progress: None)
    kept = default_cache() if cache is None else Path(cache)
    asked = ask(
        workload,
        kept / CUT,
        cores=cores,
        memory_bytes=memory_bytes,
        objective=objective,
        deadlines=deadlines,
        limit=limit,
    )
    hosts = _hosts(asked, devices, kept, seconds, told)
    check_deadlines(asked, hosts)
    options = arrangements(asked, hosts)
    chosen = choose(
        asked,
        options,
        lambda each: memory_of(asked, each),
        lambda done, of: told(PlanProgress("choosing", "", done, of)),
    )
    return _made(asked, chosen, told)


def _hosts(asked: Asked, devices: Sequence[str | Host], cache: Path, seconds: float, told: OnProgress) -> list[Host]:
    """The machine that is planned for, measured now or before."""
    if not devices or list(devices) == [HOST]:
        return measured_hosts(
            asked,
            cache,
            seconds=seconds,
            progress=lambda what, done, of: told(PlanProgress("measuring", what, done, of)),
        )
    hosts = [each if isinstance(each, Host) else _read(each) for each in devices]
    for host in hosts:
        for model in asked.models:
            host.model(model.name)
    fitting = [host for host in hosts if host.lanes * host.threads <= asked.cores]
    if not fitting:
        least = min(host.lanes * host.threads for host in hosts)
        raise InputError(f"cores = {asked.cores}: the device was measured with {least} or more; allow as many")
    return fitting


def _read(device: str) -> Host:
    if not device.endswith(".json"):
        raise InputError(
            f"device = {device}: a plan is for a machine that serves; leave it out to measure this one, or name a file "
            f"of weft profile MODELS --device host -o FILE (weft sustain --device {device} tells what an NPU carries)"
        )
    return read_host(device)


def check_deadlines(asked: Asked, hosts: Sequence[Host]) -> None:
    """Refuse a deadline that nobody could keep, and tell what is possible instead."""
    for stream in asked.workload.stream:
        name = stream.served_name
        fastest_s, host = min(
            ((float(np.median(times_alone_s(host, name))), host) for host in hosts), key=lambda found: found[0]
        )
        if fastest_s > stream.deadline_s:
            tail_s = float(np.quantile(times_alone_s(host, name), 0.99))
            raise WorkloadError(
                f"{stream.model}: a deadline of {stream.deadline_s * 1e3:g} ms is shorter than the fastest possible, "
                f"{fastest_s * 1e3:.3g} ms with nothing else running; plan with deadline={ceil(1.2e3 * tail_s)} or more"
            )


def memory_of(asked: Asked, arrangement: Arrangement) -> int:
    """What the server would hold: as measured, else what the models' files do."""
    return arrangement.host.memory_bytes or sum(model.bytes for model in asked.models)


def _made(asked: Asked, chosen: Chosen, told: OnProgress) -> MadePlan:
    """The plan of a choice, its numbers drawn afresh."""
    best, of = chosen.best, 3 + BESIDE
    told(PlanProgress("predicting", "", 0, of))
    seed = asked.workload.seed + FRESH_SEED
    case, run = simulated(asked, best.arrangement, 1.0, LONG, seed)
    told(PlanProgress("predicting", "the largest load", 1, of))
    factor = largest_load(best) if asked.has_rates else None
    predicted = prediction(asked, run.report, best.memory_bytes, factor)
    others = []
    for place, trial in enumerate(chosen.others[:BESIDE]):
        told(PlanProgress("predicting", trial.arrangement.label, 2 + place, of))
        others.append(_option(trial, prediction(asked, trial.report, trial.memory_bytes, _factor(trial, best))))
    models = {model.name: _to_serve(asked, model, best.arrangement) for model in asked.models}
    plan = Plan(
        made=made_here(),
        versions=these_versions(),
        objective=asked.objective,
        deadlines="soft" if asked.deadlines == "soft" else "strict",
        machine=this_machine(),
        budget=PlanBudget(cores=asked.cores, memory_bytes=asked.memory_bytes),
        models=tuple(_planned(model, models[model.name], best.arrangement.host) for model in asked.models),
        settings=best.arrangement.settings,
        predicted=predicted,
        options=(_option(best, predicted), *_ranked(others), *_left_out(chosen)),
        reasons=reasons(asked, chosen, predicted, shared_weights(asked.models)),
    )
    return MadePlan(plan, asked, best.arrangement.host, models, busiest(case, run, best.arrangement.host.lanes))


def _factor(trial: Trial, best: Trial) -> float | None:
    """The largest load of an option that did not win, looked for from the winner's on."""
    if not trial.asked.has_rates:
        return None
    trial.level(start=best.level())
    return trial.factor


def _option(trial: Trial, predicted: Prediction) -> PlanOption:
    arrangement = trial.arrangement
    return PlanOption(
        label=arrangement.label, settings=arrangement.settings, models=arrangement.models, predicted=predicted
    )


def _ranked(others: Sequence[PlanOption]) -> list[PlanOption]:
    """Options that did not win: those that carry most first."""
    return sorted(others, key=lambda each: -((each.predicted and each.predicted.sustainable_factor) or 0.0))


def _left_out(chosen: Chosen) -> list[PlanOption]:
    """Options that are not told in full, and why."""
    told = f"carries less than {chosen.best.factor:.2f} times the load" if chosen.best.asked.has_rates else "is slower"
    found = [(trial.arrangement, told) for trial in chosen.others[BESIDE:]]
    found += [(each.arrangement, each.why) for each in chosen.left_out]
    return [
        PlanOption(label=each.label, settings=each.settings, models=each.models, left_out=why) for each, why in found
    ]


def _to_serve(asked: Asked, model: AskedModel, arrangement: Arrangement) -> ModelToServe:
    """A model with the settings that were chosen for it; requests without a deadline get that of its streams."""
    due = [stream.deadline_ms for stream in asked.workload.stream if stream.served_name == model.name]
    chosen = {"max_batch": arrangement.batches[model.name], "slo_ms": min(each for each in due if each is not None)}
    return ModelToServe(model.path, model.config.model_copy(update=chosen))


def _planned(model: AskedModel, served: ModelToServe, host: Host) -> PlannedModel:
    return planned_model(
        model.name, served, sources=source_digests(model.path), segments=len(host.model(model.name).segments)
    )
