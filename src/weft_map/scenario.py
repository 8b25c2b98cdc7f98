"""A mapping scenario, as a TOML file or as options of a command: a SoC, its tasks, and perhaps phases.

A scenario names models; ``prepare`` finds their profiles and makes the problem. Phases (``weft_map.dynamic``)
say which of the tasks run when. ``map_models`` goes from names to a solution in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from weft.base.errors import ShapeNeeded, WorkloadError, unknown_name
from weft.base.jsonfile import first_problem, printable
from weft.base.settings import how, what
from weft.base.shapes import sizes_of
from weft.base.tomlfile import read_toml
from weft.devices import Soc, load_soc
from weft_map.estimate import find_profile
from weft_map.limits import TaskLimits
from weft_map.problem import MAX_STEPS, Objective, Problem
from weft_map.profiles import Origin, SocProfile, merge_groups
from weft_map.solver import Improvement, Options, Solution, solve

ESTIMATED_GROUPS = 16
"""Groups that an estimated profile is merged to by default; the time of the search grows fast with them."""
GROUPS_SHOWN = f"{ESTIMATED_GROUPS} for an estimate, else as in the profile"

Name = Annotated[str, Field(min_length=1, max_length=1600), AfterValidator(printable)]
Names = Annotated[tuple[Name, ...], Field(strict=False)]
Shape = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False), BeforeValidator(sizes_of)]
Seconds = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Joules = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ScenarioTask(BaseModel, extra="forbid", frozen=True, strict=True):
    """A model to be run."""

    model: Name
    """A name of the zoo, an .onnx file or a profile (.json); files are relative to the scenario's."""
    name: Name | None = None
    """What the task is called; the model's name, with a number behind it where that is taken."""
    after: Names = ()
    """Tasks that must end before it begins."""
    repeats: Annotated[int, Field(ge=1, le=MAX_STEPS)] = 1
    """Runs in a row."""
    shapes: dict[Name, Shape] | None = None
    """Input of the model -> shape, as ``{input = "1x3x224x224"}``, or axis -> size; with them its profile is estimated
    ([shapes](formats.md#shapes))."""


class ScenarioPhase(BaseModel, extra="forbid", frozen=True, strict=True):
    """A stretch of time during which the same tasks run, again and again."""

    tasks: Annotated[Names, Field(min_length=1)]
    duration_s: Seconds


class Scenario(BaseModel, extra="forbid", frozen=True, strict=True):
    """A mapping scenario. The field names are the keys of the file."""

    soc: Name
    """A SoC that ships with weft, or a TOML file."""
    objective: Annotated[Objective, how(metavar="GOAL")] = "latency"
    """latency (the least) or throughput (the most).

    Latency is the time until all tasks have finished, throughput the runs per second, summed over the tasks.
    """
    max_switches: Annotated[Annotated[int, Field(ge=0)] | None, how()] = None
    """Largest number of changes of unit of a model.

    It holds for every run of every task.
    """
    energy_budget_j: Annotated[Joules | None, how("--energy-budget")] = None
    """Energy limit of all models together, in joules."""
    time_limit_s: Annotated[Seconds, how("--time-limit")] = 60.0
    """Seconds to search."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63), how()] = 0
    """Seed of the search."""
    cp_sat: Annotated[bool, how()] = False
    """Ask CP-SAT first, for a start and a bound; up to 10 s.

    It knows no contention.
    """
    ties: Annotated[float, Field(ge=0, le=0.1)] = 1e-4
    """Among schedules whose latencies differ by less than this share, the one with the highest throughput wins."""
    strict: Annotated[bool, how()] = False
    """Search until the proof holds without assumptions."""
    profiles: Annotated[Origin | None, what(metavar="KIND", shown="the best there are")] = None
    """Only measured, derived or estimated profiles."""
    max_groups: Annotated[Annotated[int, Field(ge=1, le=MAX_STEPS)] | None, what(shown=GROUPS_SHOWN)] = None
    """Merge groups of a model until there are at most this many.

    Neighbours are merged.
    """
    task: Annotated[tuple[ScenarioTask, ...], Field(min_length=1, max_length=64, strict=False)]
    """Models to be run, each as ``[[task]]``."""
    phase: Annotated[tuple[ScenarioPhase, ...], Field(max_length=10_000, strict=False)] = ()
    """Which tasks run when, for ``weft map dynamic``, each as ``[[phase]]``; ``weft map --phase 2`` maps the second."""
    folder: str = ""  # where files are looked for; not a key of the file

    @property
    def options(self) -> Options:
        """The options of the search, for ``solver.solve``."""
        limits = TaskLimits(self.max_switches, self.energy_budget_j)
        return Options(
            objective=self.objective,
            limits=limits,
            time_limit_s=self.time_limit_s,
            seed=self.seed,
            cp_sat=self.cp_sat,
            ties=self.ties,
            strict=self.strict,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tasks: as given, else that of the model, with a number where that is taken."""
        taken = {task.name for task in self.task if task.name}
        names: list[str] = []
        for task in self.task:
            name = task.name or _unused_name(short_name(task.model), taken)
            taken.add(name)
            names.append(name)
        return tuple(names)

    def path(self, text: str) -> str:
        """Resolve a file name relative to the scenario; return other names unchanged."""
        is_file = text.endswith((".onnx", ".json", ".toml"))
        return str(Path(self.folder) / text) if is_file else text


@dataclass(frozen=True)
class MappingCase:
    """A scenario, or one phase of it, ready to be solved."""

    problem: Problem
    options: Options
    profiles: Mapping[str, SocProfile]
    """Name of a task -> its profile."""


def short_name(model: str) -> str:
    """The name of a model; of a file, its name without folder and suffix."""
    return Path(model).stem if model.endswith((".onnx", ".json")) else model


def _unused_name(name: str, taken: set[str]) -> str:
    """*name*, or *name* with a number behind it if that is in *taken*."""
    count, candidate = 1, name
    while candidate in taken:
        count += 1
        candidate = f"{name}-{count}"
    return candidate


# Files


def read_scenario(path: str | Path) -> Scenario:
    """Read a scenario from a TOML file; raises WorkloadError."""
    raw = read_toml(path, WorkloadError, "scenario")
    if "folder" in raw:
        raise WorkloadError(f"{path}: unknown key 'folder'")
    return parse_scenario(raw | {"folder": str(Path(path).parent)}, str(path))


def parse_scenario(raw: Mapping[str, Any], where: str) -> Scenario:
    """Make a scenario from its keys; *where* begins the message of a WorkloadError."""
    try:
        return Scenario.model_validate(raw)
    except ValidationError as error:
        raise WorkloadError(f"{where}: {first_problem(error, Scenario, ScenarioTask, ScenarioPhase)}") from error


# From names to problems


def prepare(scenario: Scenario) -> MappingCase:
    """Find the profiles of *scenario* and make the problem of all its tasks, ignoring phases."""
    soc = load_soc(scenario.path(scenario.soc))
    return _case(scenario, soc, find_profiles(scenario, soc), scenario.names)


def prepare_phases(scenario: Scenario) -> list[MappingCase]:
    """Make the problem of each phase of *scenario*; phases with the same tasks get the same case object."""
    if not scenario.phase:
        raise WorkloadError("the scenario has no phases; add [[phase]] with tasks and duration_s")
    soc = load_soc(scenario.path(scenario.soc))
    profiles = find_profiles(scenario, soc)
    cases: dict[tuple[str, ...], MappingCase] = {}
    for phase in scenario.phase:
        if phase.tasks not in cases:
            cases[phase.tasks] = _case(scenario, soc, profiles, phase.tasks)
    return [cases[phase.tasks] for phase in scenario.phase]


def find_profiles(scenario: Scenario, soc: Soc) -> dict[str, SocProfile]:
    """Name of a task -> its profile; tasks with the same model and shapes share one."""
    profiled: list[tuple[ScenarioTask, SocProfile]] = []
    for task in scenario.task:
        same = (profile for other, profile in profiled if (other.model, other.shapes) == (task.model, task.shapes))
        profiled.append((task, next(same, None) or _find_task_profile(scenario, soc, task)))
    return {name: profile for name, (_, profile) in zip(scenario.names, profiled, strict=True)}


def _find_task_profile(scenario: Scenario, soc: Soc, task: ScenarioTask) -> SocProfile:
    """The profile of one task; an estimate is merged to ``ESTIMATED_GROUPS`` unless the scenario sets max_groups."""
    path = scenario.path(task.model)
    try:
        profile = find_profile(path, soc, origin=scenario.profiles, max_groups=scenario.max_groups, shapes=task.shapes)
    except ShapeNeeded as error:
        raise _add_advice(scenario, task, error) from error
    if scenario.max_groups is None and profile.origin == "estimated" and not path.endswith(".json"):
        return merge_groups(profile, ESTIMATED_GROUPS)
    return profile


def _add_advice(scenario: Scenario, task: ScenarioTask, error: ShapeNeeded) -> ShapeNeeded:
    """Return the error with advice that fits the task's origin: a scenario file or options."""
    if scenario.folder:
        return error.advising(f'add shapes = {{ "{error.name}" = "{error.sizes}" }} to its [[task]]')
    return error.advising(f"pass --shape {task.model}:{error.name}={error.sizes}") if len(scenario.task) > 1 else error


def _case(scenario: Scenario, soc: Soc, profiles: Mapping[str, SocProfile], names: Sequence[str]) -> MappingCase:
    """The problem of the tasks *names*; raises WorkloadError if the scenario has no such task."""
    tasks = dict(zip(scenario.names, scenario.task, strict=True))
    for name in names:
        if name not in tasks:
            raise WorkloadError("a phase names an " + unknown_name("task", name, tasks))
    group_tasks = [profiles[name].task(name, after=tasks[name].after, repeats=tasks[name].repeats) for name in names]
    return MappingCase(Problem(soc, tuple(group_tasks)), scenario.options, {name: profiles[name] for name in names})


def map_models(
    soc: str,
    models: Sequence[str],
    *,
    on_improvement: Callable[[Improvement], None] | None = None,
    **settings: Any,
) -> Solution:
    """Map *models* (zoo names, .onnx files, profiles) to the units of *soc*.

    settings: further keys of a scenario. Calls *on_improvement* for each better schedule during the search.
    """
    raw = {"soc": soc, "task": [{"model": model} for model in models], **settings}
    case = prepare(parse_scenario(raw, "map_models"))
    return solve(case.problem, case.options, on_improvement)
