"""Check a plan for changes since it was written: its models and their sources, settings, machine and versions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from weft.base.errors import InputError, PlanError
from weft.planning.folder import changed_models, digest_of
from weft.planning.layout import MODELS, SETTINGS_FILE, planned_workload
from weft.planning.machine import these_versions, this_machine
from weft.planning.plan import Plan, PlanMachine, PlannedModel, read_plan
from weft.serving.config import read_model_config, read_toml
from weft.serving.repository import SETTINGS_FILE as MODEL_SETTINGS_FILE

SAME_MEMORY = 0.05
"""Share by which the reported memory of one machine varies, because the system reserves more or less of it."""
_PLANNED_KEYS = ("max_batch", "batch_timeout_ms", "grain_ms")


def drift(
    folder: str | Path, *, machine: PlanMachine | None = None, versions: dict[str, str] | None = None
) -> list[str]:
    """Return the reasons why a plan may no longer hold, as sentences; none if it holds.

    machine, versions: compared with the plan's; by default those of this machine and installation.
    """
    try:
        plan = read_plan(folder)
    except PlanError as error:
        return [str(error)]
    return [
        *changed_models(folder, plan),
        *_sources(plan),
        *_settings(Path(folder), plan),
        *_workload(folder, plan),
        *_machine(plan, machine or this_machine(plan.settings.device)),
        *_versions(plan, versions or these_versions()),
    ]


def _sources(plan: Plan) -> list[str]:
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


def _settings(folder: Path, plan: Plan) -> list[str]:
    """Return the settings that were edited after planning."""
    try:
        given = read_toml(folder / SETTINGS_FILE, SETTINGS_FILE)
    except InputError as error:
        return [str(error)]
    planned = plan.settings.model_dump(mode="json")
    wanted = {key: value for key, value in planned.items() if value or key in given}
    changes = _unlike(SETTINGS_FILE, wanted, given)
    return changes + [sentence for model in plan.models for sentence in _model_settings(folder, model)]


def _model_settings(folder: Path, model: PlannedModel) -> list[str]:
    where = f"{MODELS}/{model.name}/{MODEL_SETTINGS_FILE}"
    try:
        given = read_model_config(folder / where, where=where)
    except InputError as error:
        return [str(error)]
    known = {key: getattr(given, key) for key in _PLANNED_KEYS if getattr(given, key) is not None}
    return _unlike(where, {key: getattr(model, key) for key in known}, known)


def _unlike(where: str, planned: dict[str, Any], given: dict[str, Any]) -> list[str]:
    return [
        f"{where}: {key} = {_shown(given.get(key))}, planned was {_shown(value)}"
        for key, value in planned.items()
        if given.get(key) != value
    ]


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)


def _workload(folder: str | Path, plan: Plan) -> list[str]:
    """Return why the planned requests cannot be sent, or differ from the predicted ones."""
    try:
        streams = planned_workload(folder).stream
    except InputError as error:
        return [str(error)]
    asked, predicted = [stream.model for stream in streams], [stream.model for stream in plan.predicted.streams]
    if asked == predicted:
        return []
    return [f"the workload asks for {', '.join(asked)}, the prediction is of {', '.join(predicted)}"]


def _machine(plan: Plan, here: PlanMachine) -> list[str]:
    """Return the differences between this machine and the plan's that matter to the plan."""
    planned, changes = plan.machine, []
    if planned.processor and here.processor != planned.processor:
        changes.append(f"the processor is {here.processor}, planned was on {planned.processor}")
    if planned.gpu and here.gpu != planned.gpu:
        changes.append(f"{plan.settings.device} is {here.gpu or 'not here'}, planned was on {planned.gpu}")
    wanted = plan.budget.cores
    if here.cores < wanted if wanted else here.cores != planned.cores:
        changes.append(f"the number of cores is {here.cores}, planned was with {wanted or planned.cores}")
    needed = plan.budget.memory_bytes
    if here.memory_bytes and planned.memory_bytes and _memory_differs(needed, planned.memory_bytes, here.memory_bytes):
        mib = (needed or planned.memory_bytes) >> 20
        changes.append(f"there are {here.memory_bytes >> 20} MiB of memory, planned was with {mib}")
    return changes


def _memory_differs(budget: int | None, planned: int, here: int) -> bool:
    if budget:
        return here < budget
    return abs(here - planned) > SAME_MEMORY * planned


def _versions(plan: Plan, here: dict[str, str]) -> list[str]:
    return [
        f"{name} is {here.get(name, 'not known')}, planned was with {number}"
        for name, number in plan.versions.items()
        if here.get(name) != number
    ]
