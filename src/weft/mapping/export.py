"""Schedules in the words of others: stretches of groups, a device for every layer, trtexec's options, JSON."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from io import StringIO
from math import isfinite
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from weft.errors import InputError
from weft.jsonfile import write_json
from weft.mapping.limits import Limits, energy_j, keeps_to
from weft.mapping.problem import Group, Problem
from weft.mapping.scenario import Case
from weft.mapping.schedule import Outcome, Schedule
from weft.mapping.solver import Improvement, Solution
from weft.version import __version__

SUFFIXES = (".json", ".csv", ".txt")
"""Of a device list; .txt holds options of trtexec."""
TRT_DEVICES = {"gpu": "GPU", "dla": "DLA"}
MOST_LAYERS = 100_000
"""Of a group that gives its layers by number."""


class Segment(NamedTuple):
    """Groups that a task runs in a row on one unit, in one run."""

    task: int
    run: int
    unit: int
    first: int
    """Number of the group, from 0."""
    last: int


class LayerDevice(NamedTuple):
    """Where one layer runs. The field names are the keys and the columns of the files."""

    task: str
    model: str
    run: int
    """From 0; a task that repeats may be placed differently each time."""
    group: str
    layer: str | None
    """Its name, or its number where the profile numbers layers; none where it names only groups."""
    unit: str
    instance: int
    """Which of the unit's instances, from 0: the core id."""


def segments(problem: Problem, schedule: Schedule) -> tuple[Segment, ...]:
    """Every task's way through the units."""
    found: list[Segment] = []
    for task, units in enumerate(schedule.units):
        groups = len(problem.tasks[task].groups)
        for step, unit in enumerate(units):
            run, group = divmod(step, groups)
            last = found[-1] if found else None
            if last and group and (last.task, last.run, last.unit) == (task, run, unit):
                found[-1] = last._replace(last=group)
            else:
                found.append(Segment(task, run, unit, group, group))
    return tuple(found)


def segment_line(problem: Problem, its: Sequence[Segment]) -> str:
    """One run of one task, as "gpu 0-4 | dla 5-9"."""
    parts = [
        f"{problem.units[each.unit]} {each.first}" + (f"-{each.last}" if each.last > each.first else "") for each in its
    ]
    return " | ".join(parts)


# A device for every layer


def device_list(outcome: Outcome, models: Mapping[str, str] | None = None) -> list[LayerDevice]:
    """The unit and the instance of every layer; models: task -> what it was made from."""
    problem, models = outcome.problem, models or {}
    instances = {(piece.task, piece.step): piece.instance for piece in outcome.pieces}
    rows = []
    for n, task in enumerate(problem.tasks):
        for step, unit in enumerate(outcome.schedule.units[n]):
            group = problem.step(n, step)
            head = task.name, models.get(task.name, task.name), step // len(task.groups), group.name
            place = problem.units[unit], instances[n, step]
            rows += [LayerDevice(*head, layer, *place) for layer in _layers(group)]
    return rows


def _layers(group: Group) -> Sequence[str | None]:
    numbered = re.fullmatch(r"(\d{1,9})-(\d{1,9})", group.layers[0]) if len(group.layers) == 1 else None
    if numbered:
        first, last = int(numbered[1]), int(numbered[2])
        if first <= last < first + MOST_LAYERS:
            return [str(number) for number in range(first, last + 1)]
    return group.layers or (None,)


def write_device_list(path: str | Path, outcome: Outcome, models: Mapping[str, str] | None = None) -> None:
    """Write it as .json, as .csv, or as options of trtexec (.txt)."""
    rows, suffix = device_list(outcome, models), Path(path).suffix.lower()
    if suffix == ".json":
        write_json(path, {"format": 1, "soc": outcome.problem.soc.name, "layers": [row._asdict() for row in rows]})
        return
    if suffix not in SUFFIXES:
        raise InputError(f"{path}: a device list is written as {', '.join(SUFFIXES)}")
    text = _csv(rows) if suffix == ".csv" else "\n".join(trtexec_options(rows)) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as problem:
        raise InputError(f"{path}: cannot write: {problem}") from problem


def _csv(rows: Sequence[LayerDevice]) -> str:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(LayerDevice._fields)
    writer.writerows(rows)
    return text.getvalue()


def trtexec_options(rows: Sequence[LayerDevice]) -> list[str]:
    """For each task a remark and the options that build its engine: ``--layerDeviceTypes=conv1:GPU,conv2:DLA``."""
    lines: list[str] = []
    for task in dict.fromkeys(row.task for row in rows):
        ways: dict[str, list[int]] = {}
        for run in sorted({row.run for row in rows if row.task == task}):
            way = _trtexec_line([row for row in rows if (row.task, row.run) == (task, run)])
            ways.setdefault(way, []).append(run)
        for way, runs in ways.items():
            which = f", run {', '.join(map(str, runs))}" if len(ways) > 1 else ""
            lines += [f"# {task}{which}", way]
    return lines


def _trtexec_line(rows: Sequence[LayerDevice]) -> str:
    cores = sorted({row.instance for row in rows if row.unit == "dla"})
    if len(cores) > 1:
        raise InputError(
            f"{rows[0].task} uses the DLA cores {' and '.join(map(str, cores))}, and an engine of TensorRT uses one; "
            "write the device list as .json or .csv"
        )
    core = f"--useDLACore={cores[0]} --allowGPUFallback " if cores else ""
    pairs = [pair for row in rows for pair in _trtexec_pairs(row)]
    return core + quote(f"--layerDeviceTypes={','.join(pairs)}")


def _trtexec_pairs(row: LayerDevice) -> list[str]:
    if row.unit not in TRT_DEVICES:
        raise InputError(f"{row.task}: trtexec knows {' and '.join(TRT_DEVICES)}, not {row.unit}; write .json or .csv")
    if row.layer is None or row.layer.isdigit():
        raise InputError(
            f"{row.task}: the profile does not name the layers of group {row.group!r}, and trtexec goes by names; take "
            "an estimated profile or one from weft map import-trt, or write .json or .csv"
        )
    if set(row.layer) & set(",'\n"):
        raise InputError(f"{row.task}: trtexec cannot read the layer name {row.layer!r}; write .json or .csv")
    # a kernel of a profile that trtexec wrote joins the names of its layers
    return [f"{name}:{TRT_DEVICES[row.unit]}" for name in re.split(r"\s(?:\+|\|\|)\s", row.layer)]


# JSON


def solution_as_dict(case: Case, solution: Solution) -> dict[str, Any]:
    """A solution as a file tells it; ``weft map --json`` adds the report."""
    problem, options = case.problem, case.options
    return {
        "format": 1,
        "kind": "mapping",
        "version": __version__,
        "soc": problem.soc.name,
        "objective": options.objective,
        "max_switches": options.limits.max_switches,
        "energy_budget_j": options.limits.energy_budget_j,
        "time_limit_s": options.time_limit_s,
        "seed": options.seed,
        "cp_sat": options.cp_sat,
        "strict": options.strict,
        "tasks": [_task(case, n) for n in range(len(problem.tasks))],
        "schedule": outcome_as_dict(solution.outcome, options.limits),
        "idled": outcome_as_dict(solution.idled, options.limits) if solution.idled else None,
        "baselines": {name: outcome_as_dict(its, options.limits) for name, its in solution.baselines.items()},
        "best_baseline": best_baseline(case, solution),
        "gain": gain(case, solution),
        "improvements": [improvement_as_dict(each) for each in solution.improvements],
        "certificate": {key: finite(value) for key, value in solution.certificate.as_dict().items()},
    }


def _task(case: Case, n: int) -> dict[str, Any]:
    task = case.problem.tasks[n]
    profile = case.profiles[task.name]
    return {
        "name": task.name,
        "model": profile.model,
        "origin": profile.origin,
        "source": profile.source,
        "after": list(task.after),
        "repeats": task.repeats,
        "groups": [group.name for group in task.groups],
    }


def outcome_as_dict(outcome: Outcome, limits: Limits) -> dict[str, Any]:
    """What a schedule does and what it comes to; units and tasks by name."""
    problem, schedule = outcome.problem, outcome.schedule
    names = [task.name for task in problem.tasks]
    known = all(cost.energy_j is not None for task in problem.tasks for g in task.groups for cost in g.costs.values())
    return {
        "made_by": schedule.made_by,
        "makespan_s": outcome.makespan_s,
        "throughput": finite(outcome.throughput),
        "finish_s": list(outcome.finish_s),
        "energy_j": energy_j(problem, schedule) if known else None,
        "keeps_limits": keeps_to(problem, schedule, limits),
        "units": [[problem.units[unit] for unit in row] for row in schedule.units],
        "starts_s": [list(row) for row in schedule.starts_s] if schedule.starts_s else None,
        "order": [names[n] for n in schedule.order] if schedule.order else None,
        "segments": [
            {"task": names[s.task], "run": s.run, "unit": problem.units[s.unit], "first": s.first, "last": s.last}
            for s in segments(problem, schedule)
        ],
    }


def improvement_as_dict(found: Improvement) -> dict[str, Any]:
    return {
        "seconds": found.seconds,
        "value": found.value,
        "bound": finite(found.bound),
        "made_by": found.schedule.made_by,
    }


def best_baseline(case: Case, solution: Solution) -> str | None:
    """The best baseline that keeps to the limits; None where none does."""
    fair = [
        name
        for name, outcome in solution.baselines.items()
        if keeps_to(case.problem, outcome.schedule, case.options.limits)
    ]
    objective = case.options.objective
    return min(fair, key=lambda name: solution.baselines[name].value(objective), default=None)


def gain(case: Case, solution: Solution) -> float | None:
    """What the schedule gains over the best baseline: share of the makespan, or of the throughput."""
    name = best_baseline(case, solution)
    if name is None:
        return None
    ours, theirs = solution.outcome, solution.baselines[name]
    if case.options.objective == "latency":
        return 1 - ours.makespan_s / theirs.makespan_s if theirs.makespan_s else 0.0
    return ours.throughput / theirs.throughput - 1


def finite(value: Any) -> Any:
    """For JSON, which has no infinity."""
    return None if isinstance(value, float) and not isfinite(value) else value
