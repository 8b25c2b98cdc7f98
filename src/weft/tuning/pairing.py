"""Models that share a device at their best: what tuning one of them does for all.

System throughput counts each query as the time it takes alone. A tuned model takes less time alone, so its queries
would count for less than before although there are more of them; whoever compares before and after must therefore count
both by the same times (*reference_s*), those before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.bound import best_mix, demand_of
from weft.devices import Npu
from weft.errors import TuneError
from weft.profiles import Profile
from weft.program import Clock, lower


@dataclass(frozen=True, slots=True)
class Sharing:
    """What models come to on one device, in the order in which they were given."""

    models: tuple[str, ...]
    weight_bytes: tuple[int, ...]
    alone_s: tuple[float, ...]
    """Per query, back to back with the device to itself."""
    queries_per_s: tuple[float, ...]
    stp: float
    """Reference times' worth of queries per unit of time."""


def system_throughput(queries_per_s: Sequence[float], reference_s: Sequence[float]) -> float:
    """How many devices' worth of work is done, a query counting as its reference time."""
    if len(queries_per_s) != len(reference_s):
        raise TuneError(f"{len(reference_s)} reference times for {len(queries_per_s)} models; give one for each")
    return sum(rate * time for rate, time in zip(queries_per_s, reference_s, strict=True))


def sharing_at_best(profiles: Sequence[Profile], npu: Npu, reference_s: Sequence[float] | None = None) -> Sharing:
    """The mix of queries with the largest throughput that memory channel and array allow.

    *reference_s*: what a query of each counts as; its time alone, if not said.
    """
    if not profiles:
        raise TuneError("no models to share the device")
    clock = Clock.of(npu)
    demands = [demand_of(lower(profile, npu), clock.buffer) for profile in profiles]
    alone = tuple(demand.alone * clock.tick_s for demand in demands)
    rates = tuple(rate / clock.tick_s for rate in best_mix(demands))
    return Sharing(
        tuple(profile.model for profile in profiles),
        tuple(profile.weight_bytes for profile in profiles),
        alone,
        rates,
        system_throughput(rates, reference_s or alone),
    )
