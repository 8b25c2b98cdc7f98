"""What the parts share: networks and SoCs under the paper's names, assumptions that may be varied, and searches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from time import process_time
from typing import NamedTuple

from weft.devices import Pccs, Soc, Unit, load_soc
from weft_map.limits import TaskLimits
from weft_map.problem import Group, Problem, Task
from weft_map.profile_by_name import find_profile
from weft_map.profiles import Origin, SocProfile
from weft_map.schedule import Outcome
from weft_map.solver import Certificate, Options, solve
from weft_papers.base import Tick
from weft_papers.fluid_batching.lab import Bench

XAVIER, ORIN, SNAPDRAGON = "xavier-agx", "agx-orin", "snapdragon-865"
CHIPS = {XAVIER: "Xavier", ORIN: "Orin", SNAPDRAGON: "Snapdragon 865"}
NETWORKS = {
    "caffenet": "CaffeNet",
    "densenet121": "DenseNet",
    "googlenet": "GoogLeNet",
    "inception-resnet-v2": "Inc-res-v2",
    "inception-v4": "Inception",
    "resnet18": "ResNet18",
    "resnet50": "ResNet50",
    "resnet101": "ResNet101",
    "resnet152": "ResNet152",
    "vgg19": "VGG-19",
}
"""The networks of Tables 5 and 8, in their order."""
OTHERS = {"alexnet": "AlexNet", "fcn-resnet18": "FCN-ResNet18", "vgg16": "VGG-16", "mobilenet-v2": "MobileNet"}
NAMES = NETWORKS | OTHERS

THEIRS = {"gpu-only": "GPU only", "per-unit": "GPU & DSA", "herald": "Herald", "h2h": "H2H"}
"""The baselines of Tables 6 and 8, by our names."""
LABELS = THEIRS | {"mensa": "Mensa", "heft": "HEFT", "contention-blind": "contention-blind"}
HAXCONN, OURS = "haxconn", "weft"
COLOURS = {
    "gpu-only": "#b9c0c8",
    "per-unit": "#8f8f8f",
    "mensa": "#cc79a7",
    "herald": "#e69f00",
    "h2h": "#56b4e9",
    "heft": "#b8a400",
    "contention-blind": "#d55e00",
    HAXCONN: "#0072b2",
    OURS: "#009e73",
}

# Limit of one search. What is not proved optimal by then is printed with its gap; a longer limit would make the
# reproduction of all pairs longer.
TIME_LIMIT_S = 20.0
IMPROVED = 1.005
"""A speed-up from which a schedule counts as better."""


@lru_cache(maxsize=8)
def chip(name: str) -> Soc:
    return load_soc(name)


def profile(model: str, soc: str, origin: Origin | None = "derived") -> SocProfile:
    """Origin of the profiles; only derived ones add up to the paper's Table 5."""
    return find_profile(model, chip(soc), origin=origin)


def total_ms(model: str, soc: str, unit: str, origin: Origin | None = "derived") -> float | None:
    total_s = profile(model, soc, origin).total_s(unit)
    return None if total_s is None else 1e3 * total_s


# What is assumed, and may be varied


class Change(NamedTuple):
    """A change of the assumptions behind a problem."""

    demand: float = 1.0
    """Times the demands of the profiles, up to the memory's peak."""
    split: float = 1.0
    """Times the cbp of the second unit; its difference from tbwdc, which is published, stays."""
    floor_pct: float | None = None

    def of(self, problem: Problem) -> Problem:
        if self == Change():
            return problem
        units = tuple(self._unit(place, unit) for place, unit in enumerate(problem.soc.units))
        soc = problem.soc.model_copy(update={"units": units})
        return Problem(soc, tuple(scaled(task, self.demand, soc.bandwidth_gb_s) for task in problem.tasks))

    def _unit(self, place: int, unit: Unit) -> Unit:
        model = unit.contention
        if not isinstance(model, Pccs):
            return unit
        update: dict[str, float] = {}
        if place and self.split != 1:
            cbp = self.split * model.cbp
            update = {"cbp": cbp, "tbwdc": max(0.0, cbp - (model.cbp - model.tbwdc))}
        if self.floor_pct is not None:
            update["floor_pct"] = self.floor_pct
        return unit.model_copy(update={"contention": model.model_copy(update=update)})


def scaled(task: Task, demand: float, most_gb_s: float) -> Task:
    """A task with its bandwidth demands multiplied by *demand*, each capped at *most_gb_s*."""

    def group(one: Group) -> Group:
        costs = {
            unit: replace(cost, demand_gb_s=min(most_gb_s, demand * cost.demand_gb_s))
            for unit, cost in one.costs.items()
        }
        return replace(one, costs=costs)

    return replace(task, groups=tuple(map(group, task.groups)))


AS_SHIPPED = Change()


# What is run


class CaseNetwork(NamedTuple):
    """A network of a case."""

    model: str
    repeats: int = 1
    after: str = ""
    """The network of the case it waits for."""
    slower: float = 1.0
    """Times the profile's times."""
    origin: Origin = "derived"
    max_groups: int | None = None
    demand: float = 1.0
    """Times the profile's demands."""

    def task(self, soc: str, taken: Sequence[str]) -> Task:
        name = NAMES[self.model]
        after = (NAMES[self.after],) if self.after else ()
        own = f"{name} (2)" if name in taken else name
        profiled = find_profile(self.model, chip(soc), origin=self.origin, max_groups=self.max_groups)
        task = profiled.task(own, after=after, repeats=self.repeats)
        if self.slower != 1:
            task = replace(task, groups=tuple(map(self._slowed, task.groups)))
        return task if self.demand == 1 else scaled(task, self.demand, chip(soc).bandwidth_gb_s)

    def _slowed(self, group: Group) -> Group:
        costs = {unit: replace(cost, time_s=self.slower * cost.time_s) for unit, cost in group.costs.items()}
        return replace(group, costs=costs)


class SocCase(NamedTuple):
    """Networks on a SoC, under some assumptions."""

    soc: str
    entries: tuple[CaseNetwork, ...]
    change: Change = AS_SHIPPED
    max_switches: int | None = None

    @property
    def name(self) -> str:
        parts = [
            NAMES[entry.model] if entry.repeats == 1 else f"{entry.repeats} {NAMES[entry.model]}"
            for entry in self.entries
        ]
        return f"{' + '.join(parts)}, {CHIPS[self.soc]}"

    @property
    def problem(self) -> Problem:
        tasks: list[Task] = []
        for entry in self.entries:
            tasks.append(entry.task(self.soc, [task.name for task in tasks]))
        return self.change.of(Problem(chip(self.soc), tuple(tasks)))

    def under(self, change: Change) -> SocCase:
        return self._replace(change=change)


def models(soc: str, *names: str) -> SocCase:
    """Each once, all at the same time."""
    return SocCase(soc, tuple(CaseNetwork(name) for name in names))


# The search


@dataclass(frozen=True, slots=True)
class LeastMakespan:
    """The least makespan of a case, how sure it is, and what the baselines come to."""

    outcome: Outcome
    certificate: Certificate
    baselines: Mapping[str, float]
    """Their makespans in seconds."""
    cpu_s: float

    @property
    def best_s(self) -> float:
        return self.certificate.value

    @property
    def best_ms(self) -> float:
        return 1e3 * self.certificate.value

    def ms(self, name: str) -> float:
        """The makespan of a baseline; ours has the name of the paper's."""
        return self.best_ms if name == HAXCONN else 1e3 * self.baselines[name]

    def rival(self, names: Iterable[str] | None = None) -> str:
        """The best of the baselines."""
        return min(names or self.baselines, key=lambda name: self.baselines[name])

    def gain(self, names: Iterable[str] | None = None) -> float:
        """How many times faster than the best of the baselines."""
        return self.baselines[self.rival(names)] / self.best_s


def answer(problem: Problem, max_switches: int | None = None) -> LeastMakespan:
    """The answer of the solver."""
    began_s = process_time()
    solution = solve(problem, Options(limits=TaskLimits(max_switches=max_switches), time_limit_s=TIME_LIMIT_S))
    cpu_s = process_time() - began_s
    makespans = {name: outcome.makespan_s for name, outcome in solution.baselines.items()}
    return LeastMakespan(solution.outcome, solution.certificate, makespans, cpu_s)


def searched(case: SocCase) -> LeastMakespan:
    return answer(case.problem, case.max_switches)


class Laboratory:
    """Searches cases on all cores, each once."""

    def __init__(self, bench: Bench, fitted: float) -> None:
        """fitted: times the demands of the profiles, from the paper's own results."""
        self.fitted = Change(demand=fitted)
        self._bench = bench
        self._found: dict[SocCase, LeastMakespan] = {}

    def find(self, cases: Iterable[SocCase], tick: Tick | None = None) -> dict[SocCase, LeastMakespan]:
        """The best schedule of each case."""
        wanted = list(dict.fromkeys(cases))
        new = [case for case in wanted if case not in self._found]
        self._found.update(zip(new, self._bench.run_all(searched, new, tick), strict=True))
        return {case: self._found[case] for case in wanted}
