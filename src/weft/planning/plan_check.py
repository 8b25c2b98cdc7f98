"""``weft plan --check``: what has changed since a plan was written.

``drift`` compares a plan's models and their sources, its settings, the machine and the versions with the present ones;
``timed_now`` times the models again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from weft.base.errors import InputError, PlanError
from weft.devices import HostModel
from weft.devices.conditions import Conditions
from weft.devices.host import HOST
from weft.planning.folder import changed_models, digest_of
from weft.planning.machine import these_versions, this_machine
from weft.planning.measured import CUT, default_cache
from weft.planning.plan import MODELS, SETTINGS_FILE, Plan, PlanMachine, PlannedModel, planned_workload, read_plan
from weft.planning.prediction import planned_host
from weft.planning.survey import Subject
from weft.planning.survey.measure import time_models
from weft.runtime.device_kinds import device_called
from weft.serving.config import ModelConfig, read_model_config, read_toml
from weft.serving.repository import SETTINGS_FILE as MODEL_SETTINGS_FILE
from weft.serving.repository import Repository

SAME_MEMORY = 0.05
"""Share by which the reported memory of a machine varies, because the system reserves more or less of it."""
_PLANNED_KEYS = ("max_batch", "batch_timeout_ms", "grain_ms")
"""Settings of a model that a plan sets."""

SECONDS = 2.0
"""Duration of the measurement of all models in turns."""
SAME_TIME = 1.2
"""Factor by which a model's time may differ without a remark: predictions are made to be within 20 % of measurements
(benchmarks/plan_holds.py)."""


def drift(
    folder: str | Path, *, machine: PlanMachine | None = None, versions: dict[str, str] | None = None
) -> list[str]:
    """Return the reasons why a plan may no longer hold, as sentences; none if it holds.

    machine, versions: compared with the plan's; by default, of this machine and installation.
    """
    try:
        plan = read_plan(folder)
    except PlanError as error:
        return [str(error)]
    return [
        *changed_models(folder, plan),
        *_source_changes(plan),
        *_settings_changes(Path(folder), plan),
        *_workload_changes(folder, plan),
        *_machine_changes(plan, machine or this_machine(plan.settings.device)),
        *_version_changes(plan, versions or these_versions()),
    ]


def _source_changes(plan: Plan) -> list[str]:
    """Return the changes of files that models were made of; files that no longer exist are ignored."""
    changes = []
    for model in plan.models:
        for source, digest in model.sources.items():
            if not os.path.isfile(source):
                continue
            try:
                if digest_of(Path(source)) != digest:
                    changes.append(f"{source}, of which {model.name} was made, has changed; plan again to serve it")
            except OSError as problem:
                why = problem.strerror or problem
                changes.append(f"{source}, of which {model.name} was made, cannot be read: {why}")
    return changes


def _settings_changes(folder: Path, plan: Plan) -> list[str]:
    """Return the settings that were edited after planning."""
    try:
        present = read_toml(folder / SETTINGS_FILE, SETTINGS_FILE)
    except InputError as error:
        return [str(error)]
    planned = plan.settings.model_dump(mode="json")
    # keys without a value are not written to the file
    compared = {key: value for key, value in planned.items() if value or key in present}
    changes = _differences(SETTINGS_FILE, compared, present)
    return changes + [sentence for model in plan.models for sentence in _model_settings_changes(folder, model)]


def _model_settings_changes(folder: Path, model: PlannedModel) -> list[str]:
    """Return the settings of a model that were edited after planning."""
    where = f"{MODELS}/{model.name}/{MODEL_SETTINGS_FILE}"
    try:
        config = read_model_config(folder / where, where=where)
    except InputError as error:
        return [str(error)]
    present = {key: getattr(config, key) for key in _PLANNED_KEYS if getattr(config, key) is not None}
    return _differences(where, {key: getattr(model, key) for key in present}, present)


def _differences(where: str, planned: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """Return a sentence for each planned setting that differs from the *present* one in the file *where*."""
    return [
        f"{where}: {key} = {_shown(present.get(key))}, the plan has {_shown(value)}"
        for key, value in planned.items()
        if present.get(key) != value
    ]


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)


def _workload_changes(folder: str | Path, plan: Plan) -> list[str]:
    """Return why the planned requests cannot be sent, or differ from the predicted ones."""
    try:
        streams = planned_workload(folder).stream
    except InputError as error:
        return [str(error)]
    sent, predicted = [stream.model for stream in streams], [stream.model for stream in plan.predicted.streams]
    if sent == predicted:
        return []
    return [f"the workload asks for {', '.join(sent)}, the prediction is of {', '.join(predicted)}"]


def _machine_changes(plan: Plan, here: PlanMachine) -> list[str]:
    """Return the differences between this machine and the plan's machine that matter to the plan."""
    planned, changes = plan.machine, []
    if planned.processor and here.processor != planned.processor:
        changes.append(f"the processor is {here.processor}, the plan was made on {planned.processor}")
    if planned.gpu and here.gpu != planned.gpu:
        changes.append(f"{plan.settings.device} is {here.gpu or 'not here'}, the plan was made for {planned.gpu}")
    cores = plan.budget.cores
    # with a budget, fewer cores than that matter; without one, another number of cores
    if here.cores < cores if cores else here.cores != planned.cores:
        changes.append(f"the number of cores is {here.cores}, the plan was made for {cores or planned.cores}")
    budget = plan.budget.memory_bytes
    if here.memory_bytes and planned.memory_bytes and _memory_differs(budget, planned.memory_bytes, here.memory_bytes):
        mib = (budget or planned.memory_bytes) >> 20
        changes.append(f"there are {here.memory_bytes >> 20} MiB of memory, the plan was made for {mib}")
    return changes


def _memory_differs(budget: int | None, planned: int, here: int) -> bool:
    """Return whether this machine has less memory than the budget, or without a budget, another size than planned."""
    if budget:
        return here < budget
    return abs(here - planned) > SAME_MEMORY * planned


def _version_changes(plan: Plan, here: dict[str, str]) -> list[str]:
    """Return the differences between the present versions of weft, Python and ONNX Runtime and the plan's."""
    return [
        f"{name} is {here.get(name, 'not known')}, the plan was made with {number}"
        for name, number in plan.versions.items()
        if here.get(name) != number
    ]


class Timing(Protocol):
    """The signature of ``weft.planning.survey.measure.time_models``, which times models alternately on one lane."""

    def __call__(
        self,
        subjects: list[Subject],
        *,
        device: str,
        threads: int,
        isolation: str,
        seconds: float,
        cache: Path,
        repository: Path,
        progress: Callable[[str, int, int], None] | None,
    ) -> tuple[Mapping[str, float], Conditions]: ...


class TimedModel(NamedTuple):
    """The median time of a request in a model's segments, now and when planned."""

    name: str
    now_s: float
    planned_s: float

    @property
    def ratio(self) -> float:
        return self.now_s / self.planned_s

    @property
    def differs(self) -> bool:
        return not 1 / SAME_TIME <= self.ratio <= SAME_TIME

    def __str__(self) -> str:
        now, planned = f"{self.now_s * 1e3:.3g} ms now", f"{self.planned_s * 1e3:.3g} ms when planned"
        return f"{self.name}: {now}, {planned} ({self.ratio:.1f} times)"


@dataclass(frozen=True)
class TimedNow:
    """The times of all models of a plan, and the machine's conditions now and when planned."""

    models: tuple[TimedModel, ...]
    now: Conditions
    planned: Conditions | None

    @property
    def differences(self) -> list[str]:
        """The differences from the time of planning, in sentences with numbers."""
        differences = [str(model) for model in self.models if model.differs]
        # if the machine was as busy when planned, its load is named only as a possible cause of other differences
        if self.now.disturbed and (differences or not (self.planned and self._as_disturbed(self.planned))):
            differences.append(f"{', '.join(self.now.disturbances)}; {_as_planned(self.planned)}")
        clock, before = self.now.clock_mhz, self.planned.clock_mhz if self.planned else None
        if differences and clock and before and not 1 / SAME_TIME <= clock / before <= SAME_TIME:
            differences.append(f"the processor runs at {clock:.0f} MHz, {before:.0f} MHz when planned")
        return differences

    def _as_disturbed(self, planned: Conditions) -> bool:
        """Whether the machine was at least about as busy with other work when the plan was made."""
        return planned.disturbed and self.now.taken_share <= SAME_TIME * planned.taken_share


def timed_now(
    folder: str | Path,
    *,
    seconds: float = SECONDS,
    progress: Callable[[str, int, int], None] | None = None,
    timing: Timing = time_models,
) -> TimedNow:
    """Time a plan's models again, for *seconds*, in the same way as they were measured.

    PlanError if times cannot be compared: changed models, another GPU, or no measurement in the plan.
    """
    plan, host = read_plan(folder), planned_host(folder)
    if changed := changed_models(folder, plan):
        raise PlanError(changed[0])
    device = plan.settings.device
    if device is not None and device_called(device) != plan.machine.gpu:
        raise PlanError(f"{device} is not the GPU that was planned for, {plan.machine.gpu or 'which is not known'}")
    subjects = _subjects(Path(folder))
    if strange := [subject.name for subject in subjects if subject.name not in host.models]:
        raise PlanError(f"{folder}: host.json has no times of {strange[0]}; plan again")
    times_s, now = timing(
        subjects,
        device=device or HOST,
        threads=host.threads,
        isolation=host.isolation,
        seconds=seconds,
        cache=default_cache() / CUT,
        repository=Path(folder) / MODELS,
        progress=progress,
    )
    models = tuple(TimedModel(name, now_s, usual_s(host.model(name))) for name, now_s in times_s.items())
    return TimedNow(models, now, plan.measured or host.conditions)


def usual_s(model: HostModel) -> float:
    """The measured median time of a run of all segments for one request, in seconds."""
    if not model.spread:
        return model.total_s(1)
    return float(np.median(np.array(model.spread) @ np.array(model.times_s[1])))


def _subjects(folder: Path) -> list[Subject]:
    """The models that the plan's workload asks for, with the shapes and values of their requests."""
    repository = Repository([folder / MODELS], folder)
    subjects: dict[str, Subject] = {}
    for stream in planned_workload(folder).stream:
        entry = repository.entry(stream.served_name)
        # Settings of a stitched file are by names of its graph, not by names in requests.
        config = ModelConfig() if entry.body else entry.config
        shapes = {name: tuple(sizes) for name, sizes in {**config.shapes, **stream.shapes}.items()}
        subjects.setdefault(entry.name, Subject(entry.name, shapes, {**config.values, **stream.values}))
    return list(subjects.values())


def _as_planned(planned: Conditions | None) -> str:
    """The load of other processes when the plan was made, as a part of a sentence."""
    if planned is None:
        return "the plan does not say how it was then"
    if planned.disturbed:
        return f"when planned: {', '.join(planned.disturbances)}"
    if planned.others_cores is None:
        return "what others took when it was planned is not known"
    return f"{planned.others_cores:.2g} when planned"
