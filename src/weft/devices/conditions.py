"""Conditions of a measurement: processor time of other processes, stolen time, clock, repeats.

``weft.planning.survey.processor_time`` reads it; hosts and plans store the value, and messages use its words.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, Field

OTHERS_SHARE = 0.05
"""Share of the cores' time above which other processes are named. Plans look for the largest load in steps of 5 %
(``planning.trials.STEP``): a smaller share changes no number in them."""
STOLEN_SHARE = 0.02
"""Share of the cores' time above which steal is named. It is less than for processes: a hypervisor takes whole time
slices of some milliseconds, and if 2 % of requests wait for such a slice, the usual limit of late requests is exceeded.
"""
REPEATS_RATIO = 1.5
"""How many times longer the same model may take alone in one measurement than in another before that is named; the
ratio at which benchmarks/undisturbed.py does a run again."""

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Conditions(BaseModel, extra="forbid", frozen=True):
    """The state of the machine during a measurement; None: the system does not report it."""

    ended: datetime
    """When the measurement ended."""
    cores: Annotated[int, Field(ge=1, le=65536)]
    """Cores that the measured processes were allowed to use."""
    others_cores: NotNegative | None = None
    """Processor time of all other processes on these cores, per second of measuring."""
    stolen_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the cores' time that a hypervisor gave to others (steal in /proc/stat)."""
    clock_mhz: NotNegative | None = None
    """Clock of the fastest core: the median of readings after each part of the measurement."""
    repeats_ratio: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Longest over shortest median time of the same model alone, over the repeats of its measurement; the largest of
    all models."""

    @property
    def taken_share(self) -> float:
        """Share of the cores' time that the measured processes could not get."""
        return min(1.0, (self.others_cores or 0.0) / self.cores + (self.stolen_share or 0.0))

    @property
    def too_long(self) -> float:
        """The relative error by which measured times may be too long, if the measured work could fill all cores."""
        return self.taken_share / (1 - min(0.99, self.taken_share))

    @property
    def disturbances(self) -> list[str]:
        """Messages that name each disturbance of the measurement and its size; empty on a quiet machine."""
        causes = []
        if self.others_cores is not None and self.others_cores > OTHERS_SHARE * self.cores:
            causes.append(f"other processes took {self.others_cores:.2g} of {_cores(self.cores)} while measuring")
        if self.stolen_share is not None and self.stolen_share > STOLEN_SHARE:
            causes.append(f"the hypervisor took {self.stolen_share:.1%} of the cores' time while measuring (steal)")
        if self.repeats_ratio is not None and self.repeats_ratio > REPEATS_RATIO:
            causes.append(f"the same model alone took up to {self.repeats_ratio:.1f} times as long when repeated")
        return causes

    @property
    def disturbed(self) -> bool:
        return bool(self.disturbances)

    @property
    def in_words(self) -> str:
        """The disturbances and their effect on measured times, in one line; empty on a quiet machine."""
        if not self.disturbances:
            return ""
        causes = ", ".join(self.disturbances)
        return f"{causes}; measured times may be up to {max(1, round(100 * self._largest_error)):d} % too long"

    @property
    def _largest_error(self) -> float:
        """The relative error of measured times, by taken processor time or by the spread of repeats."""
        repeats = self.repeats_ratio or 1.0
        return max(self.too_long, repeats - 1 if repeats > REPEATS_RATIO else 0.0)


def worst_of(measured: Iterable[Conditions | None]) -> Conditions | None:
    """Merge the conditions of several measurements, for each number the worst one; None if none is known.

    That is the largest value, but the lowest clock and the earliest end.
    """
    all_conditions = [conditions for conditions in measured if conditions is not None]
    if not all_conditions:
        return None
    numbers: dict[str, Any] = {
        key: max(
            (getattr(measurement, key) for measurement in all_conditions if getattr(measurement, key) is not None),
            default=None,
        )
        for key in ("cores", "others_cores", "stolen_share", "repeats_ratio")
    }
    clocks = [measurement.clock_mhz for measurement in all_conditions if measurement.clock_mhz is not None]
    ended = min(measurement.ended for measurement in all_conditions)
    return Conditions(ended=ended, clock_mhz=min(clocks, default=None), **numbers)


def age_in_words(ended: datetime, now: datetime | None = None) -> str:
    """The age of a measurement in its largest unit, such as "3 days"; *now* is the current time by default."""
    seconds = ((now or datetime.now(UTC)) - ended).total_seconds()
    for unit, length_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length_s:
            count = int(seconds // length_s)
            return f"{count} {unit}{'s' * (count > 1)}"
    return "less than a minute"


def _cores(count: int) -> str:
    return f"{count} core{'s' * (count > 1)}"
