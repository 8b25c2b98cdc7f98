"""What was predicted of a plan beside what was measured of it, and how far the two are apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from weft.load import LoadResult, StreamLoad
from weft.planning.plan import Plan, StreamPrediction

SAME_RATE = 0.001
"""By which share a rate may be off that was only written down in another way."""
SAME_EXITS = 0.1
"""By which share of the requests those that leave by an exit may differ."""
_TOLD_SETTINGS = ("device", "lanes", "threads", "policy", "policy_options", "late")
"""What a server tells of its settings."""


@dataclass(frozen=True, slots=True)
class MeasuredFigures:
    """What the requests of a stream saw, or should see; None where there is nothing to tell."""

    p50_ms: float | None
    p99_ms: float | None
    missed: float | None
    """Share of the deadlines."""
    p99_max_of: int | None = None
    """How many requests p99 is the largest of, where they are fewer than 100; else None."""


@dataclass(frozen=True, slots=True)
class StreamComparison:
    """One stream, predicted and measured."""

    model: str
    predicted: MeasuredFigures
    measured: MeasuredFigures

    @property
    def p50_off(self) -> float | None:
        """Measured over predicted, less 1."""
        return _relative(self.measured.p50_ms, self.predicted.p50_ms)

    @property
    def p99_off(self) -> float | None:
        """Measured over predicted, less 1."""
        return _relative(self.measured.p99_ms, self.predicted.p99_ms)

    @property
    def missed_off(self) -> float | None:
        """Measured less predicted."""
        if self.measured.missed is None or self.predicted.missed is None:
            return None
        return self.measured.missed - self.predicted.missed

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "p50_off": self.p50_off, "p99_off": self.p99_off, "missed_off": self.missed_off}


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """A plan beside a run of its workload."""

    streams: tuple[StreamComparison, ...]
    remarks: tuple[str, ...] = ()
    """What keeps the two from being compared."""

    @property
    def worst_p99_off(self) -> float | None:
        return max((each.p99_off for each in self.streams if each.p99_off is not None), key=abs, default=None)

    @property
    def worst_missed_off(self) -> float | None:
        return max((each.missed_off for each in self.streams if each.missed_off is not None), key=abs, default=None)

    def verdict(self) -> str:
        """How far the two are apart, where they are furthest, in one sentence."""
        p99, missed, parts = self.worst_p99_off, self.worst_missed_off, []
        if p99 is not None:
            parts.append(f"p99 {abs(p99) * 100:.0f} % {'above' if p99 > 0 else 'below'} the prediction")
        if missed is not None:
            parts.append(f"missed deadlines {abs(missed) * 100:.1f} points {'above' if missed > 0 else 'below'} it")
        return f"furthest apart: {', '.join(parts)}" if parts else "nothing was measured that could be compared"

    def as_dict(self) -> dict[str, Any]:
        return {
            "streams": [each.as_dict() for each in self.streams],
            "worst_p99_off": self.worst_p99_off,
            "worst_missed_off": self.worst_missed_off,
            "remarks": list(self.remarks),
        }


def beside(plan: Plan, result: LoadResult) -> PlanComparison:
    """What was predicted of a plan beside what a run of its workload found, stream by stream."""
    pairs = list(_pairs(plan, result))
    rows = tuple(StreamComparison(load.stream.served_name, _foreseen(seen), _measured(load)) for seen, load in pairs)
    return PlanComparison(rows, tuple(_remarks(plan, result, pairs)))


def _pairs(plan: Plan, result: LoadResult) -> Iterator[tuple[StreamPrediction, StreamLoad]]:
    """Streams with their predictions; those for one model in their order."""
    left = list(plan.predicted.streams)
    for load in result.streams:
        found = next((each for each in left if each.model == load.stream.served_name), None)
        if found is not None:
            left.remove(found)
            yield found, load


def _remarks(plan: Plan, result: LoadResult, pairs: list[tuple[StreamPrediction, StreamLoad]]) -> Iterator[str]:
    if len(pairs) < max(len(result.streams), len(plan.predicted.streams)):
        yield "not all streams that were sent were predicted, or the other way round"
    if result.deadlines != plan.deadlines:
        yield f"the deadlines were {result.deadlines}, predicted was of {plan.deadlines} ones"
    rates = dict(zip(result.streams, result.workload.rates, strict=True))
    for seen, load in pairs:
        rate = rates[load]
        if rate and seen.rate and abs(rate - seen.rate) > SAME_RATE * seen.rate:
            yield f"{seen.model} was sent {rate:g} times a second, predicted was of {seen.rate:g}"
    for seen, load in pairs:
        yield from _other_exits(seen, load)
    yield from _other_settings(plan, result.profile)


def _other_exits(seen: StreamPrediction, load: StreamLoad) -> Iterator[str]:
    """Requests that left elsewhere than was predicted; where the threshold sinks with the load they may."""
    left = load.figures.exit_shares
    if not left or not seen.exit_rates or load.stream.exit_floor is not None or len(left) != len(seen.exit_rates):
        return
    if max(abs(a - b) for a, b in zip(left, seen.exit_rates, strict=True)) > SAME_EXITS:
        shown, planned = (" / ".join(f"{share:.0%}" for share in shares) for shares in (left, seen.exit_rates))
        yield f"{shown} of {seen.model} left by its exits, predicted was {planned}; send samples that leave as planned"


def _other_settings(plan: Plan, profile: Any) -> Iterator[str]:
    if not isinstance(profile, dict):
        yield "the server does not tell its settings; is it the one of the plan?"
        return
    planned = plan.settings.model_dump()
    for key in _TOLD_SETTINGS:
        if key in planned and profile.get(key) != planned[key]:
            yield f"the server has {key} = {profile.get(key)}, planned was {planned[key]}"


def _foreseen(seen: StreamPrediction) -> MeasuredFigures:
    missed = None if seen.deadline_ms is None else seen.missed
    return MeasuredFigures(seen.p50_ms, seen.p99_ms, missed, seen.p99_max_of)


def _measured(load: StreamLoad) -> MeasuredFigures:
    found = load.figures
    missed = None if found.met_share is None else 1 - found.met_share
    return MeasuredFigures(_ms(found.p50_s), _ms(found.p99_s), missed, found.p99_max_of)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _relative(measured: float | None, predicted: float | None) -> float | None:
    return measured / predicted - 1 if measured is not None and predicted else None
