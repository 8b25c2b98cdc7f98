"""Several GPUs of one machine: a backend each, every model on all of them, and a lane for each.

A step runs on the device of its lane. What it leaves lies there, so a batch stays where it began, and a new one goes to
the lane that is free first. Models are cut once: the other devices open what the first one has learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.base.errors import ModelError
from weft.runtime.backend import (
    DeviceLane,
    Ended,
    LoadedModel,
    LoadOptions,
    Progress,
    StartedStep,
    Step,
)
from weft.runtime.defaults import BackendDefaults
from weft.runtime.isolated.device import DeviceBackend
from weft.runtime.isolated.group import WorkerGroup
from weft.runtime.isolated.lane import IsolatingLane
from weft.runtime.isolated.limits import WorkerCounts, WorkerLimits
from weft.runtime.isolated.model import IsolatedModel
from weft.runtime.lent import Lender
from weft.runtime.own_folder import make_folder, remove


class SeveralDevices(BackendDefaults):
    """Opens every model on each of its devices."""

    isolates = True

    def __init__(
        self,
        names: Sequence[str],
        limits: WorkerLimits,
        memory_bytes: int | None = None,
        *,
        numbers: Sequence[int | None] | None = None,
    ) -> None:
        """memory_bytes: what models may hold of each device's memory together.

        numbers: by which clients name the memory of each (``DeviceBackend``).
        """
        self.labels, together = _labels(names), ",".join(names)
        self._numbers = numbers or [None] * len(names)
        self._each = [
            DeviceBackend(name, limits, memory_bytes, label=label, kept_as=together, number=number)
            for name, label, number in zip(names, self.labels, self._numbers, strict=True)
        ]
        self.region_devices = frozenset(number for number in self._numbers if number is not None)
        first = self._each[0]
        self.name, self.platform, self.now = first.name, first.platform, first.now
        self.device, self.grain_s, self.limits, self.memory_bytes = together, first.grain_s, first.limits, memory_bytes
        self._folder: Path | None = None

    def open(
        self,
        path: Path,
        options: LoadOptions,
        cache: Path | None = None,
        say: Progress | None = None,
        *,
        learn: bool = True,
    ) -> LoadedModel:
        kept = cache or self._temporary()
        models: list[LoadedModel] = []
        try:
            for each in self._each:
                models.append(each.open(path, options, kept, say, learn=learn))
                _check_alike(path, self.labels, models)
        except BaseException:
            for model in models:
                model.close()
            raise
        return SpreadModel(models, self.labels)

    def _temporary(self) -> Path:
        """Where models are kept for this time only, for all devices."""
        if self._folder is None:
            self._folder = make_folder()
        return self._folder

    def lane(self, index: int, *, pin: bool = False) -> IsolatingLane:
        return self._each[index].lane(index, pin=pin)

    def write_region(self, lender: Lender, offset: int, data: memoryview) -> None:
        """Have it written by the device that has the region, or else by the first."""
        number = lender.terms.device
        self._each[self._numbers.index(number) if number in self._numbers else 0].write_region(lender, offset, data)

    @property
    def scratch_bytes(self) -> int:
        """What runs have left in the arena of this process."""
        return self._each[0].scratch_bytes

    @property
    def used_bytes(self) -> dict[str, int]:
        """What of each device's memory is in use, as it was when this was last asked."""
        return {label: used for each in self._each for label, used in each.used_bytes.items()}

    @property
    def returns(self) -> dict[str, int]:
        """How often a model came back to each device's memory."""
        return {label: count for each in self._each for label, count in each.returns.items()}

    def counts(self) -> WorkerCounts:
        """How often workers died, and were started again."""
        return WorkerCounts(*map(sum, zip(*(each.counts() for each in self._each), strict=True)))

    def groups(self) -> dict[str, WorkerGroup]:
        """The worker of each device, by its label."""
        return {name: group for each in self._each for name, group in each.groups().items()}

    def close(self) -> None:
        for each in self._each:
            each.close()
        if self._folder is not None:
            remove(self._folder)


class SpreadModel:
    """A model on several devices; a step runs on that of its lane."""

    def __init__(self, models: Sequence[LoadedModel], labels: Sequence[str]) -> None:
        self._models, first = models, models[0]
        self.remarks = (*first.remarks, f"runs on each of {', '.join(labels)}")
        for each in models[1:]:
            if isinstance(each, IsolatedModel) and isinstance(first, IsolatedModel):
                each.breaker = first.breaker  # what kills one device's worker would kill the next

    def __getattr__(self, name: str) -> Any:
        return getattr(self._models[0], name)

    @property
    def away_s(self) -> float:
        """How long it takes to be there, on the device that has it soonest."""
        return min(each.away_s for each in self._models)

    def prepare(self, rows: int) -> None:
        """Have what batches of so many rows need on all devices."""
        for each in self._models:
            each.prepare(rows)

    def start(self, step: Step, lane: DeviceLane, ended: Ended, *, here: bool = False) -> StartedStep:
        assert isinstance(lane, IsolatingLane)
        return self._models[lane.index].start(step, lane, ended, here=here)

    def close(self) -> None:
        for each in self._models:
            each.close()


def _labels(names: Sequence[str]) -> tuple[str, ...]:
    """The devices by names that differ: one that is named again is told apart."""
    before = [list(names[:at]).count(name) for at, name in enumerate(names)]
    return tuple(f"{name}#{count + 1}" if count else name for name, count in zip(names, before, strict=True))


def _check_alike(path: Path, labels: Sequence[str], models: Sequence[LoadedModel]) -> None:
    """Refuse a model that the last device cuts otherwise than the first: there is one plan of its segments."""
    first, last = models[0], models[-1]
    if (first.segments, first.max_batch, first.exits) != (last.segments, last.max_batch, last.exits):
        raise ModelError(
            f"{path}: comes out otherwise on {labels[len(models) - 1]} than on {labels[0]}; name devices of one kind"
        )
