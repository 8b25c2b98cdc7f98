"""Export of schedules: as segments of groups, devices of layers, options of trtexec, JSON, and trace events."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from itertools import chain
from math import isfinite
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from weft.base.errors import InputError
from weft.base.files import write_text
from weft.base.jsonfile import write_json
from weft.base.version import __version__
from weft.reports.trace_exports import Event, process_events, write_events
from weft_map.limits import TaskLimits, energy_j, keeps_to
from weft_map.pages.numbers import RanStep, demand_of, lane_name, lanes_of, steps_of
from weft_map.problem import Group, Problem
from weft_map.scenario import MappingCase
from weft_map.schedule import Outcome, Schedule, Transfer
from weft_map.solver import Improvement, Solution

SUFFIXES = (".json", ".csv", ".txt")
"""Suffixes of device list files; .txt holds options of trtexec."""
TRT_DEVICES = {"gpu": "GPU", "dla": "DLA"}  # unit -> device of trtexec
TRT_PRECISIONS = {16: "--fp16", 8: "--int8"}
"""Options of trtexec by the width of a SoC's values; without one the DLA is not used at all."""
OTHER_FORMATS = "or write the device list as .json or .csv"  # end of error messages
MOST_LAYERS = 100_000
"""Cap on the layers of a group that gives them by number: a range in a file must not fill the memory."""


class UnitSegment(NamedTuple):
    """Groups that a task runs in a row on one unit, in one run."""

    task: int
    run: int
    unit: int
    first: int
    """Number of the group, from 0."""
    last: int


class LayerDevice(NamedTuple):
    """The unit of one layer in one run. The field names are the keys and the columns of the files."""

    task: str
    model: str
    run: int
    """Number of the task's run, from 0; each run may use other units."""
    group: str
    layer: str | None
    """The layer's name, or its number if the profile numbers layers; None if the profile names only groups."""
    unit: str
    instance: int
    """Index of the unit's instance, from 0: the core id."""


def segments(problem: Problem, schedule: Schedule) -> tuple[UnitSegment, ...]:
    """The segments of all tasks: runs of consecutive groups on one unit, by task and run."""
    merged: list[UnitSegment] = []
    for task, units in enumerate(schedule.units):
        groups = len(problem.tasks[task].groups)
        for step, unit in enumerate(units):
            run, group = divmod(step, groups)
            last = merged[-1] if merged else None
            if last and group and (last.task, last.run, last.unit) == (task, run, unit):
                merged[-1] = last._replace(last=group)
            else:
                merged.append(UnitSegment(task, run, unit, group, group))
    return tuple(merged)


def segment_line(problem: Problem, segments_of_run: Sequence[UnitSegment]) -> str:
    """Text of the segments of one run of one task, such as "gpu 0-4 | dla 5-9" (groups from 0)."""
    texts = [
        f"{problem.units[segment.unit]} {segment.first}" + (f"-{segment.last}" if segment.last > segment.first else "")
        for segment in segments_of_run
    ]
    return " | ".join(texts)


# A device for every layer


def device_list(outcome: Outcome, models: Mapping[str, str] | None = None) -> list[LayerDevice]:
    """The unit and the instance of every layer in every run; models: task -> name of its model, if it differs."""
    problem, models = outcome.problem, models or {}
    instances = {(piece.task, piece.step): piece.instance for piece in outcome.pieces}
    rows = []
    for n, task in enumerate(problem.tasks):
        for step, unit in enumerate(outcome.schedule.units[n]):
            group = problem.step(n, step)
            model, run = models.get(task.name, task.name), step // len(task.groups)
            rows += [
                LayerDevice(task.name, model, run, group.name, layer, problem.units[unit], instances[n, step])
                for layer in _layers(group)
            ]
    return rows


def _layers(group: Group) -> Sequence[str | None]:
    """The layers of a group by name, or by number if it gives a range such as "0-9"; (None,) if it lists none."""
    numbered = re.fullmatch(r"(\d{1,9})-(\d{1,9})", group.layers[0]) if len(group.layers) == 1 else None
    if numbered:
        first, last = int(numbered[1]), int(numbered[2])
        if first <= last < first + MOST_LAYERS:
            return [str(number) for number in range(first, last + 1)]
    return group.layers or (None,)


def write_device_list(path: str | Path, outcome: Outcome, models: Mapping[str, str] | None = None) -> None:
    """Write the device list of *outcome* as .json, as .csv, or as options of trtexec (.txt)."""
    rows, suffix = device_list(outcome, models), Path(path).suffix.lower()
    if suffix == ".json":
        write_json(path, {"format": 1, "soc": outcome.problem.soc.name, "layers": [row._asdict() for row in rows]})
        return
    if suffix not in SUFFIXES:
        raise InputError(f"{path}: a device list is written as {', '.join(SUFFIXES)}")
    bits = outcome.problem.soc.element_bits
    text = _csv(rows) if suffix == ".csv" else "\n".join(trtexec_options(rows, bits)) + "\n"
    write_text(path, text)


def _csv(rows: Sequence[LayerDevice]) -> str:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(LayerDevice._fields)
    writer.writerows(rows)
    return text.getvalue()


def check_device_list(path: str | Path, problem: Problem) -> None:
    """Raise InputError if a device list of *problem* cannot be written to *path*; called before the search."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(f"{path}: a device list ends in {', '.join(SUFFIXES)}")
    if suffix != ".txt":
        return
    for task in problem.tasks:
        for group in task.groups:
            for unit in group.costs:
                _check_trtexec_unit(task.name, unit)
            for layer in _layers(group):
                _check_trtexec_layer(task.name, group.name, layer)


def trtexec_options(rows: Sequence[LayerDevice], element_bits: int) -> list[str]:
    """Lines for a .txt file: for each task a comment and the options that build its engine.

    Example: ``--layerDeviceTypes=*:GPU,conv1:DLA``. Runs of a task that use different units get a line each.
    """
    precision = TRT_PRECISIONS.get(element_bits)
    lines = [f"# add {precision}, or the precision that the profile was measured with"] if precision else []
    for task in dict.fromkeys(row.task for row in rows):
        runs_of_line: dict[str, list[int]] = {}
        for run in sorted({row.run for row in rows if row.task == task}):
            line = _trtexec_line([row for row in rows if (row.task, row.run) == (task, run)])
            runs_of_line.setdefault(line, []).append(run)
        for line, runs in runs_of_line.items():
            suffix = f", run {', '.join(map(str, runs))}" if len(runs_of_line) > 1 else ""
            lines += [f"# {task}{suffix}", line]
    return lines


def _trtexec_line(rows: Sequence[LayerDevice]) -> str:
    """The options of trtexec for one run of one task; raises InputError if it uses two cores of the DLA."""
    cores = sorted({row.instance for row in rows if row.unit == "dla"})
    if len(cores) > 1:
        raise InputError(
            f"{rows[0].task} uses the DLA cores {' and '.join(map(str, cores))}, and an engine of TensorRT uses one; "
            "write the device list as .json or .csv"
        )
    core = f"--useDLACore={cores[0]} --allowGPUFallback " if cores else ""
    # The wildcard is for layers that TensorRT's parser adds, whose names we do not know; exact names take precedence.
    devices = {"*": "DLA" if all(row.unit == "dla" for row in rows) else "GPU"}
    for row in rows:
        _check_trtexec_unit(row.task, row.unit)
        layer = _check_trtexec_layer(row.task, row.group, row.layer)
        # a kernel of a profile that trtexec wrote joins the names of its layers
        devices.update(dict.fromkeys(re.split(r"\s(?:\+|\|\|)\s", layer), TRT_DEVICES[row.unit]))
    return core + quote(f"--layerDeviceTypes={','.join(f'{name}:{device}' for name, device in devices.items())}")


def _check_trtexec_unit(task: str, unit: str) -> None:
    """Raise InputError if trtexec has no device for *unit*."""
    if unit not in TRT_DEVICES:
        raise InputError(
            f"{task} may run on {unit}, and trtexec knows only {' and '.join(TRT_DEVICES)}; write the device list as "
            ".json or .csv"
        )


def _check_trtexec_layer(task: str, group: str, layer: str | None) -> str:
    """Return the name of *layer*; raises InputError if trtexec cannot refer to it."""
    if layer is None or layer.isdigit():
        raise InputError(
            f"{task}: the profile does not name the layers of group {group!r}, and trtexec goes by names; add "
            f"--profiles estimated, name an .onnx file or a profile from weft map import-trt, {OTHER_FORMATS}"
        )
    if set(layer) & set(",'\n"):
        raise InputError(f"{task}: trtexec cannot read the layer name {layer!r}; rename it, {OTHER_FORMATS}")
    return layer


# JSON


def solution_as_dict(case: MappingCase, solution: Solution) -> dict[str, Any]:
    """The content of a mapping file; ``weft map --json`` adds the report."""
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
        "ties": options.ties,
        "strict": options.strict,
        "tasks": [_task(case, n) for n in range(len(problem.tasks))],
        "schedule": outcome_as_dict(solution.outcome, options.limits),
        "idled": outcome_as_dict(solution.idled, options.limits) if solution.idled else None,
        "baselines": {name: outcome_as_dict(outcome, options.limits) for name, outcome in solution.baselines.items()},
        "best_baseline": solution.best_baseline,
        "gain": gain(case, solution),
        "improvements": [improvement_as_dict(improvement) for improvement in solution.improvements],
        "certificate": {key: finite(value) for key, value in solution.certificate.as_dict().items()},
    }


def _task(case: MappingCase, n: int) -> dict[str, Any]:
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


def outcome_as_dict(outcome: Outcome, limits: TaskLimits) -> dict[str, Any]:
    """A schedule and its outcome as JSON, with units and tasks by name."""
    problem, schedule = outcome.problem, outcome.schedule
    names = [task.name for task in problem.tasks]
    costs = [cost for task in problem.tasks for group in task.groups for cost in group.costs.values()]
    energies_known = all(cost.energy_j is not None for cost in costs)
    return {
        "made_by": schedule.made_by,
        "makespan_s": outcome.makespan_s,
        "throughput": finite(outcome.throughput),
        "finish_s": list(outcome.finish_s),
        "energy_j": energy_j(problem, schedule) if energies_known else None,
        "keeps_limits": keeps_to(problem, schedule, limits),
        "units": [[problem.units[unit] for unit in row] for row in schedule.units],
        "starts_s": [list(row) for row in schedule.starts_s] if schedule.starts_s else None,
        "order": [names[n] for n in schedule.order] if schedule.order else None,
        "segments": [
            {"task": names[s.task], "run": s.run, "unit": problem.units[s.unit], "first": s.first, "last": s.last}
            for s in segments(problem, schedule)
        ],
    }


def improvement_as_dict(improvement: Improvement) -> dict[str, Any]:
    return {
        "seconds": improvement.seconds,
        "value": improvement.value,
        "bound": finite(improvement.bound),
        "made_by": improvement.schedule.made_by,
    }


def gain(case: MappingCase, solution: Solution) -> float | None:
    """The gain over the best baseline, as a share of its makespan or throughput; None without a baseline."""
    name = solution.best_baseline
    if name is None:
        return None
    ours, theirs = solution.outcome, solution.baselines[name]
    if case.options.objective == "latency":
        return 1 - ours.makespan_s / theirs.makespan_s if theirs.makespan_s else 0.0
    return ours.throughput / theirs.throughput - 1


def finite(value: Any) -> Any:
    """Replace infinity and NaN by None, because JSON has neither; return other values unchanged."""
    return None if isinstance(value, float) and not isfinite(value) else value


SOC, TASKS = 1, 2
"""Ids (``pid``) of the two processes in the trace events: units as threads, and tasks as threads."""


def write_outcome_perfetto(outcome: Outcome, path: Path | str) -> None:
    """Write *outcome* as Chrome trace events, for https://ui.perfetto.dev and chrome://tracing.

    One process is the SoC, with a thread per instance of a unit and a counter for the memory demand, and process
    "tasks" has a thread per task that shows its moves and when it waits; each piece of a step carries its slow-down.
    Times are rounded to whole nanoseconds, as those of traces are (``weft.reports.trace_exports``).
    """
    settings = {"soc": outcome.problem.soc.name, "made_by": outcome.schedule.made_by, "version": __version__}
    pieces, moves = _piece_events(outcome), _task_events(outcome)
    write_events(path, settings, chain(_soc_names(outcome.problem), pieces, moves, _demand_events(outcome)))


def _soc_names(problem: Problem) -> Iterator[Event]:
    """Events that name the processes and threads: an instance of a unit, and a task, is a thread."""
    lanes = {tid: lane_name(problem, *lane) for tid, lane in enumerate(lanes_of(problem), start=1)}
    yield from process_events(SOC, problem.soc.name, lanes)
    yield from process_events(TASKS, "tasks", {tid: task.name for tid, task in enumerate(problem.tasks, start=1)})


def _piece_events(outcome: Outcome) -> Iterator[Event]:
    """One event per piece of a step, in the thread of its unit's instance."""
    problem, demand = outcome.problem, outcome.problem.tables.demand
    threads = {lane: tid for tid, lane in enumerate(lanes_of(problem), start=1)}
    for piece in outcome.pieces:
        task, name = problem.tasks[piece.task], problem.step(piece.task, piece.step).name
        arguments = {
            "task": task.name,
            "run": piece.step // len(task.groups),
            "group": name,
            "slow_down": round(piece.slow_down, 6),
            "demand_gb_s": float(demand[piece.task, piece.step, piece.unit]),
        }
        event = {"ph": "X", "pid": SOC, "tid": threads[piece.unit, piece.instance], "cat": "compute", "args": arguments}
        yield {**event, "name": f"{task.name}/{name}", **_times_us(piece.start_s, piece.end_s)}


def _task_events(outcome: Outcome) -> Iterator[Event]:
    for move in outcome.moves:
        yield _move_event(outcome.problem, move)
    for step in steps_of(outcome):
        yield from _step_events(outcome.problem, step)


def _move_event(problem: Problem, move: Transfer) -> Event:
    source, target = (problem.units[unit] if unit >= 0 else "outside" for unit in (move.source, move.target))
    event = {"ph": "X", "pid": TASKS, "tid": move.task + 1, "cat": "move", "name": f"move {source} to {target}"}
    return {**event, "args": {"from": source, "to": target}, **_times_us(move.start_s, move.end_s)}


def _step_events(problem: Problem, step: RanStep) -> Iterator[Event]:
    """Events of a step in the thread of its task: the wait for its unit, if any, and the run."""
    name, unit = problem.step(step.task, step.step).name, lane_name(problem, step.unit, step.instance)
    event = {"ph": "X", "pid": TASKS, "tid": step.task + 1}
    if step.start_s > step.ready_s:
        waits = {**event, "cat": "wait", "name": f"wait for {unit}", "args": {"group": name, "unit": unit}}
        yield {**waits, **_times_us(step.ready_s, step.start_s)}
    args = {"group": name, "unit": unit, "slow_down": round(step.slow_down, 6)}
    yield {**event, "cat": "compute", "name": f"{name} on {unit}", "args": args, **_times_us(step.start_s, step.end_s)}


def _demand_events(outcome: Outcome) -> Iterator[Event]:
    """Counter events of the total memory demand: one per instant at which it changes, and 0 at the end."""
    demand, event = demand_of(outcome), {"ph": "C", "pid": SOC, "name": "memory demand (GB/s)"}
    totals_gb_s = [*demand.gb_s.sum(axis=1).tolist(), 0.0]
    for time_s, gb_s in zip(demand.times_s.tolist(), totals_gb_s, strict=True):
        yield {**event, "ts": round(time_s * 1e9) / 1000, "args": {"value": gb_s}}


def _times_us(start_s: float, end_s: float) -> dict[str, float]:
    """The keys ``ts`` (start) and ``dur`` (duration) of an event, in microseconds, rounded to whole nanoseconds."""
    start_ns, end_ns = round(start_s * 1e9), round(end_s * 1e9)
    return {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
