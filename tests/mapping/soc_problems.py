"""Problems for the mapping tests, drawn at random: units, contention, models, forbidden units, pipelines, repeats.

And the clock by which the solver goes in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np
import pytest

from weft.devices.soc import BandwidthSharing, Contention, Pccs, Soc, Unit
from weft_map.problem import Group, Problem, Task, UnitCost

XAVIER_GPU = Pccs(normal_bw=38.1, intensive_bw=96.2, mrmc_pct=4.9, pbw=127.5, tbwdc=87.2, cbp=45.3, rate_n=1.11)
XAVIER_DLA = Pccs(normal_bw=0.0, intensive_bw=27.9, mrmc_pct=0.0, pbw=127.5, tbwdc=22.0, cbp=71.0, rate_n=0.35)
XAVIER = Soc(
    name="xavier-like",
    bandwidth_gb_s=136.5,
    units=(Unit(name="gpu", contention=XAVIER_GPU), Unit(name="dla", contention=XAVIER_DLA)),
)


LOOK_S = 0.01
"""What a look at the solver's clock takes in tests; 500 states are expanded between two looks."""


@contextmanager
def steady_solver() -> Iterator[None]:
    """For the solver time passes only when it looks at the clock: a limit is so much work, on every machine."""
    looks = count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft_map.solver.perf_counter", lambda: LOOK_S * next(looks))
        yield


def synthetic(seed: int, tasks: int = 2, groups: int = 12) -> Problem:
    """Models on a fast and a slow unit: 0.1 to 0.6 ms a group, the slow unit 1.2 to 2.2 times slower."""
    rng = np.random.default_rng(seed)

    def group(name: str) -> Group:
        fast_s, draws = rng.uniform(0.1, 0.6) * 1e-3, rng.uniform(30, 105)
        slow_s, less = fast_s * rng.uniform(1.2, 2.2), draws * rng.uniform(0.3, 0.7)
        out_s = rng.uniform(0.01, 0.1, 2) * 1e-3
        return Group(
            name,
            {
                "gpu": UnitCost(fast_s, draws, 0.0, float(out_s[0])),
                "dla": UnitCost(slow_s, less, 0.0, float(out_s[1])),
            },
        )

    return Problem(XAVIER, tuple(Task(f"m{n}", tuple(group(f"g{i}") for i in range(groups))) for n in range(tasks)))


def arbitrary(seed: int) -> Problem:
    """Two or three small tasks on two or three units, with everything a problem may have."""
    rng = np.random.default_rng(seed)
    count, kinds = (int(rng.integers(2, 4)) for _ in range(2))
    units = tuple(
        Unit(name=f"u{u}", instances=1 + int(rng.random() < 0.2), contention=_contention(rng)) for u in range(kinds)
    )
    soc = Soc(name="drawn", bandwidth_gb_s=120.0, units=units)
    steps = int(rng.integers(2, 5 if kinds == 2 else 4)) if count == 2 else int(rng.integers(1, 3 if kinds == 2 else 2))
    tasks = []
    for n in range(count):
        repeats = 2 if steps == 2 and count == 2 and rng.random() < 0.3 else 1
        after = (f"m{rng.integers(0, n)}",) if n and rng.random() < 0.25 else ()
        groups = _groups(rng, [unit.name for unit in units], steps)
        entry = {units[0].name: 3e-5} if rng.random() < 0.2 else None
        leaving = {units[-1].name: 4e-5} if rng.random() < 0.2 else None
        tasks.append(Task(f"m{n}", groups, after, repeats, entry, leaving))
    return Problem(soc, tuple(tasks))


def _contention(rng: np.random.Generator) -> Contention:
    if rng.random() < 0.3:
        return BandwidthSharing()
    normal = float(rng.uniform(0, 50))
    return Pccs(
        normal_bw=normal,
        intensive_bw=normal + float(rng.uniform(0, 60)),
        mrmc_pct=float(rng.uniform(0, 10)),
        pbw=127.5,
        tbwdc=float(rng.uniform(10, 90)),
        cbp=float(rng.uniform(10, 80)),
        rate_n=float(rng.uniform(0.2, 1.5)),
    )


def _groups(rng: np.random.Generator, units: list[str], count: int) -> tuple[Group, ...]:
    staying = units[
        int(rng.integers(len(units)))
    ]  # one unit runs all, so that some way exists whatever may not be left
    return tuple(
        Group(f"g{i}", {u: _cost(rng) for u in units if u == staying or rng.random() < 0.8}, leave=rng.random() < 0.8)
        for i in range(count)
    )


def _cost(rng: np.random.Generator) -> UnitCost:
    ways = np.where(rng.random(2) < 0.4, 0.0, rng.uniform(0.01, 0.1, 2) * 1e-3)
    return UnitCost(
        float(rng.uniform(0.1, 1)) * 1e-3,
        float(rng.uniform(5, 110)),
        float(ways[0]),
        float(ways[1]),
        float(rng.uniform(1, 9)) * 1e-3,
    )
