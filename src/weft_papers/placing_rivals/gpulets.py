"""GPUlets (Choi et al., ATC 2022): machines divided into at most two slices, with a model of their interference.

In a slice with a share p of a machine, computing takes 1/p times as long; memory bandwidth is not divided. A model gets
the smaller of two slice sizes: the knee, beyond which more of the machine stops paying, and the size that its rate
needs. Models also share a slice in time. Models in the two slices of a machine slow each other down by a linear
function of their use of L2 and DRAM, with the published constants (of an RTX 2080 Ti). The use of L2 is not known, so
it is taken to equal the use of DRAM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from weft_cluster.placing.filling import Filling
from weft_cluster.placing.problem import ROUNDING, PlacingProblem
from weft_cluster.placing.resharing import new_homes
from weft_papers.placing_rivals.spreading import free_to_go, serial_loads

SIZES = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Sizes of slices, as shares of a machine."""
# The published constants of the linear interference model: slow-down over the use of L2 and DRAM.
OWN_L2, OTHER_L2, OWN_DRAM, OTHER_DRAM, BASE = 0.113, 0.716, 0.355, 0.088, 0.895
LEAST = 1e-3
"""The smallest share of a model's requests that is placed in a slice, unless less is left."""


@dataclass(slots=True, eq=False)
class Slice:
    """A share of a machine, and the models that share it in time."""

    machine: int
    size: float
    """Share of the machine."""
    shares: dict[int, float] = field(default_factory=dict)
    """Model -> the share of its requests that is served here."""


class Slices:
    """The slices of all machines, and their busy times by the paper's rules; *smallest*: least size of a slice."""

    def __init__(self, problem: PlacingProblem, smallest: float) -> None:
        self.problem, self.filling = problem, Filling(problem)
        self.sizes = [size for size in SIZES if size >= smallest]
        self.on: list[list[Slice]] = [[] for _ in problem.machines]  # by machine
        self._dram = problem.memory / serial_loads(problem)

    def load(self, kind: int, model: int, size: float) -> float:
        """Share of the time of a slice of *size*, on a machine of *kind*, that all requests of a model take alone."""
        problem = self.problem
        return float(problem.compute[kind, model] / size + problem.memory[kind, model] + problem.other[kind, model])

    def knee(self, kind: int, model: int) -> float:
        """The slice size beyond which more of the machine stops paying: served rate minus size is largest there."""
        whole_load = self.load(kind, model, 1.0)
        return max(self.sizes, key=lambda size: whole_load / self.load(kind, model, size) - size)

    def slow_down(self, kind: int, model: int, slice_: Slice) -> float:
        """Slow-down of *model* in *slice_* by the worst model in the other slice of its machine; at least 1."""
        own_use = float(self._dram[kind, model])
        others = [neighbour for neighbour in self.on[slice_.machine] if neighbour is not slice_]
        other_uses = [float(self._dram[kind, other]) for neighbour in others for other in neighbour.shares]
        slow_downs = [BASE + (OWN_L2 + OWN_DRAM) * own_use + (OTHER_L2 + OTHER_DRAM) * use for use in other_uses]
        return max([1.0, *slow_downs])

    def busy(self, slice_: Slice) -> float:
        """Share of the time for which a slice is busy; infinite if a request of one of its models would be late."""
        kind, demands = int(self.problem.kind_of[slice_.machine]), self.problem.demands
        time_share = 0.0
        for model, share in slice_.shares.items():
            load = self.load(kind, model, slice_.size) * self.slow_down(kind, model, slice_)
            if load / demands[model].rate > demands[model].deadline_s:
                return np.inf
            time_share += share * load
        return time_share

    def largest_part(self, slice_: Slice, model: int, share: float) -> float:
        """The part of *share* of a model's requests that fits into *slice_*; 0 if a slice would exceed the cap."""
        kind = int(self.problem.kind_of[slice_.machine])
        cap, before = float(self.problem.cap[kind]), self.on[slice_.machine]
        time_share = self.load(kind, model, slice_.size) * self.slow_down(kind, model, slice_)
        fitting = min(share, (cap - self.busy(slice_)) / time_share)
        if fitting < min(share, LEAST):
            return 0.0
        # Add the model for a moment, because it also slows the neighbour down.
        slice_.shares[model] = fitting
        self.on[slice_.machine] = [*(neighbour for neighbour in before if neighbour is not slice_), slice_]
        within_cap = all(self.busy(neighbour) <= cap + ROUNDING for neighbour in self.on[slice_.machine])
        self.on[slice_.machine] = before
        del slice_.shares[model]
        return fitting if within_cap else 0.0

    def candidates(self, machine: int, needed: float) -> Iterator[Slice]:
        """The slices of a machine, and a new one if it has fewer than two.

        The new slice has the size *needed* on an empty machine, else the rest of the machine; ``put`` adds it.
        """
        yield from self.on[machine]
        if not self.on[machine]:
            yield Slice(machine, needed)
        elif len(self.on[machine]) == 1 and self.on[machine][0].size < 1:
            yield Slice(machine, 1 - self.on[machine][0].size)

    def put(self, slice_: Slice, model: int, share: float) -> None:
        """Serve *share* of a model's requests in *slice_*, which is added to its machine if it is new."""
        if slice_ not in self.on[slice_.machine]:
            self.on[slice_.machine].append(slice_)
        slice_.shares[model] = share
        self.filling.add(slice_.machine, model, share)


def elastic(problem: PlacingProblem) -> Filling:
    """GPUlets' elastic partitioning, run once for each smallest slice size.

    Returns the result that serves the most requests and, among these, uses the fewest machines.
    """
    fillings = [_partition(Slices(problem, smallest)) for smallest in SIZES]
    return min(fillings, key=lambda filling: (-filling.served().sum().round(3), filling.used.sum()))


def _partition(slices: Slices) -> Filling:
    """Place the models, the largest first, each in slices until all its requests have one or no slice takes more."""
    problem, kind = slices.problem, int(slices.problem.kind_of[0])
    for model in np.lexsort((-serial_loads(problem)[kind], free_to_go(problem))).tolist():
        replicas = problem.demands[model].replicas
        for _ in range(replicas):
            remaining = 1 / replicas
            while remaining > ROUNDING and (placed := _place(slices, model, remaining)):
                remaining -= placed
    return slices.filling


def _place(slices: Slices, model: int, share: float) -> float:
    """Place as much of a share of *model* as one slice takes; return that part, 0 if no slice takes any.

    Preferred are slices on machines in use, then those that take most, then the smallest, then slices in use.
    """
    best: tuple[tuple[float, float, float, float], Slice] | None = None
    tried_fresh = False
    for machine in np.flatnonzero(new_homes(slices.filling, model)).tolist():
        fresh, kind = not slices.on[machine], int(slices.problem.kind_of[machine])
        if fresh and tried_fresh:
            continue  # empty machines are tried once
        tried_fresh |= fresh
        cap = float(slices.problem.cap[kind])
        needed = next((size for size in slices.sizes if share * slices.load(kind, model, size) <= cap), SIZES[-1])
        needed = min(needed, slices.knee(kind, model))
        for candidate in slices.candidates(machine, needed):
            part = slices.largest_part(candidate, model, share)
            preference = (-float(fresh), part, -candidate.size, float(bool(candidate.shares)))
            if part > 0 and (best is None or preference > best[0]):
                best = preference, candidate
    if best is None:
        return 0.0
    (_, part, _, _), candidate = best  # part: the second entry of the order
    slices.put(candidate, model, part)
    return part
