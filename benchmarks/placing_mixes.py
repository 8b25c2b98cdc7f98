"""Generated mixes of models, and machines to place them on: shared by the benchmarks of ``weft place``.

The shares of computing and memory in a model's time are Orion's profile of a V100 for the first four (Strati et al.,
EuroSys 2024) and assumed for the two that memory bounds. Loads are lognormal; rates follow from them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from weft_cluster.placing.demand import Demand, Need
from weft_cluster.placing.machines import MachineGroup, MachineKind, Machines
from weft_cluster.placing.problem import PlacingProblem

MIB = 2**20
MEAN_LOAD = 0.25
"""Of a machine, if nothing overlaps."""
SPREAD = 0.8
"""Standard deviation of the logarithm of a load."""
MEMORY_GIB = 48.0
KIND = "gpu"


class Family(NamedTuple):
    """Models of one sort."""

    compute: float
    """Share of its time that it computes..."""
    memory: float
    """... and that it waits for memory; the rest overlaps with nothing."""
    alone_ms: float
    weights_mib: float
    segments: int
    """Pieces of equal length that cannot be interrupted."""


FAMILIES = {
    "resnet50": Family(0.76, 0.20, 3.0, 98, 10),
    "mobilenet": Family(0.46, 0.41, 1.5, 14, 10),
    "bert": Family(0.84, 0.12, 8.0, 420, 12),
    "transformer": Family(0.68, 0.18, 12.0, 1100, 12),
    "embedding": Family(0.10, 0.90, 4.0, 4000, 8),
    "decoder": Family(0.05, 0.95, 20.0, 7000, 24),
}
MIXES = {
    "balanced": {"resnet50": 3, "mobilenet": 3, "bert": 3, "transformer": 3, "embedding": 4, "decoder": 4},
    "vision": {"resnet50": 4, "mobilenet": 4, "bert": 1, "embedding": 1},
    "encoder-heavy": {"bert": 4, "transformer": 3, "resnet50": 1, "embedding": 1, "decoder": 1},
}
"""How often each family occurs; in the balanced mix computing and memory are asked for about equally."""


def demands(
    mix: str, models: int, seed: int, deadlines: float = 8.0, load: float = 1.0, cv: float = 1.0
) -> tuple[Demand, ...]:
    """Models of a mix; *deadlines*: times the time alone; *load*: times the usual."""
    rng = np.random.default_rng([sorted(MIXES).index(mix), models, seed])
    weights = np.array(list(MIXES[mix].values()), np.float64)
    names = rng.choice(list(MIXES[mix]), models, p=weights / weights.sum())
    loads = load * MEAN_LOAD * rng.lognormal(-(SPREAD**2) / 2, SPREAD, models)
    sizes = rng.lognormal(0.0, 0.3, (models, 2))
    return tuple(
        _demand(f"{name}-{number}", FAMILIES[name], float(each), *map(float, size), deadlines, cv)
        for number, (name, each, size) in enumerate(zip(names, loads, sizes, strict=True))
    )


def _demand(
    name: str, family: Family, load: float, longer: float, larger: float, deadlines: float, cv: float
) -> Demand:
    alone_s = family.alone_ms / 1e3 * longer
    weights = int(family.weights_mib * larger * MIB)
    need = Need(
        compute_s=family.compute * alone_s,
        memory_s=family.memory * alone_s,
        other_s=(1 - family.compute - family.memory) * alone_s,
        weight_bytes=weights,
        activation_bytes=weights // 10,
        segment_s=alone_s / family.segments,
        alone_s=alone_s,
    )
    return Demand(name, load / alone_s, deadlines * alone_s, {KIND: need}, cv=cv)


def cluster(count: int, overlap: float, **kind: float) -> Machines:
    """So many machines of one kind."""
    what = MachineKind(memory_gib=MEMORY_GIB, overlap=overlap).model_copy(update=kind)
    return Machines(kinds={KIND: what}, machine=(MachineGroup(kind=KIND, count=count),))


def mixed_problem(mix: str, models: int, seed: int, overlap: float, machines: int | None = None) -> PlacingProblem:
    """A mix and machines enough for whoever packs badly."""
    wanted = demands(mix, models, seed)
    return PlacingProblem.of(cluster(machines or models, overlap), wanted)


def drifted(given: tuple[Demand, ...], seed: int, spread: float = 0.2) -> tuple[Demand, ...]:
    """The same models at other rates: what a day later looks like."""
    factors = np.random.default_rng(seed).lognormal(-(spread**2) / 2, spread, len(given))
    return tuple(
        replace(stream, rate=stream.rate * float(factor)) for stream, factor in zip(given, factors, strict=True)
    )
