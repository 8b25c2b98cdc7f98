"""A plan's models timed now, beside what they took when it was made: what ``weft plan --check`` measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from weft.base.errors import PlanError
from weft.devices import Host, HostModel
from weft.devices.conditions import Conditions
from weft.devices.host import HOST
from weft.planning.folder import changed_models
from weft.planning.layout import MODELS, planned_workload
from weft.planning.load_prediction import planned_host
from weft.planning.measured import CUT, default_cache
from weft.planning.plan import Plan, read_plan
from weft.planning.survey import Subject
from weft.planning.survey.measure import time_models
from weft.runtime.device_kinds import device_called
from weft.serving.repository import Repository

SECONDS = 2.0
"""How long all models are watched, in turns."""
SAME_TIME = 1.2
"""How many times longer or shorter a model may take before that is a difference: predictions are made to be within
20 % of what is measured (benchmarks/plan_holds.py)."""


class Timing(Protocol):
    """Times models in turns on one lane; ``weft.planning.survey.measure.time_models``."""

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
    """The usual time of one request in its segments, now and when planned."""

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
    """All models of a plan, and what else the machine did now and then."""

    models: tuple[TimedModel, ...]
    now: Conditions
    planned: Conditions | None

    @property
    def differences(self) -> list[str]:
        """What is not as it was when the plan was made, in sentences with numbers."""
        differences = [str(model) for model in self.models if model.differs]
        # a machine that was as busy when planned is named only where it may be the cause of a difference
        if self.now.disturbed and (differences or not (self.planned and self._as_disturbed(self.planned))):
            differences.append(f"{', '.join(self.now.disturbances)}; {_as_planned(self.planned)}")
        clock, before = self.now.clock_mhz, self.planned.clock_mhz if self.planned else None
        if differences and clock and before and not 1 / SAME_TIME <= clock / before <= SAME_TIME:
            differences.append(f"the processor runs at {clock:.0f} MHz, {before:.0f} MHz when planned")
        return differences

    def _as_disturbed(self, planned: Conditions) -> bool:
        """Whether the machine was as busy with others when the plan was made."""
        return planned.disturbed and self.now.taken_share <= SAME_TIME * planned.taken_share


def timed_now(
    folder: str | Path,
    *,
    seconds: float = SECONDS,
    progress: Callable[[str, int, int], None] | None = None,
    timing: Timing = time_models,
) -> TimedNow:
    """Run a plan's models for a moment as they were measured.

    PlanError where they cannot be compared: other models, another GPU, or no measurement in the plan.
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
    return TimedNow(models, now, _conditions(plan, host))


def usual_s(model: HostModel) -> float:
    """The median time of a whole run of one request, as it was measured."""
    if not model.spread:
        return model.total_s(1)
    return float(np.median(np.array(model.spread) @ np.array(model.times_s[1])))


def _conditions(plan: Plan, host: Host) -> Conditions | None:
    return plan.measured or host.conditions


def _subjects(folder: Path) -> list[Subject]:
    """The models that the plan's workload asks for, with what is sent to them."""
    repository = Repository([folder / MODELS], folder)
    subjects: dict[str, Subject] = {}
    for stream in planned_workload(folder).stream:
        entry = repository.entry(stream.served_name)
        stated = {} if entry.body else entry.config.shapes  # those of a stitched file have names of its graph
        shapes = {name: tuple(sizes) for name, sizes in {**stated, **stream.shapes}.items()}
        subjects.setdefault(
            entry.name, Subject(entry.name, shapes, {**({} if entry.body else entry.config.values), **stream.values})
        )
    return list(subjects.values())


def _as_planned(planned: Conditions | None) -> str:
    if planned is None:
        return "the plan does not say how it was then"
    if planned.disturbed:
        return f"when planned: {', '.join(planned.disturbances)}"
    if planned.others_cores is None:
        return "what others took when it was planned is not known"
    return f"{planned.others_cores:.2g} when planned"
