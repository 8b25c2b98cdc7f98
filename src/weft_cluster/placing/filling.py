"""A placement under construction: the models on every machine, and how much more of a model each could take.

``broken_limits`` describes the limits that a filling exceeds; every placement method is tested with it. ``balance``
fills machines evenly: largest models first, each undivided on the machine where it adds least.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from weft_cluster.placing.bound import PlacingBound
from weft_cluster.placing.machines import GIB
from weft_cluster.placing.problem import ROUNDING, Bools, Floats, PlacingProblem, Shares

TOLERANCE = 1e-6
"""Relative excess over a limit that counts as rounding."""


class Filling:
    """Shares of models on machines, and the loads that result; checks are vectorised over all machines."""

    def __init__(self, problem: PlacingProblem, shares: Shares = ()) -> None:
        machines = len(problem.machines)
        self.problem = problem
        self.shares: list[dict[int, float]] = [{} for _ in range(machines)]
        """By machine: number of a model -> share of its requests that go there."""
        self._homes: dict[int, set[int]] = {}
        """Model -> the machines that have it."""
        self.loads = np.zeros((machines, 2))
        """(machine, 2): the two loads (``PlacingProblem.model_loads``)."""
        self.bytes = np.zeros(machines)
        self.longest_s = np.zeros(machines)
        """(machine): the longest segment of its models."""
        self.tightest_s = np.full(machines, np.inf)
        """(machine): the smallest slack of its models."""
        self.open = np.ones(machines, np.bool_)
        """(machine): whether models may be placed there."""
        self._caps, self._room = problem.cap[problem.kind_of], problem.room_bytes[problem.kind_of]
        for machine, models in enumerate(shares):
            for model, share in models.items():
                self.add(machine, model, share)

    def could_join(self, model: int) -> Bools:
        """Return whether each machine may have the model at all: memory, deadlines and rules allow it; (machines)."""
        problem, kinds = self.problem, self.problem.kind_of
        joins: Bools = self.bytes + problem.bytes[kinds, model] <= self._room
        joins &= self.longest_s <= problem.slack_s[kinds, model]
        joins &= problem.segment_s[kinds, model] <= self.tightest_s
        joins[self.machines_with(model)] = True
        joins &= self.open & problem.allowed[:, model]
        return joins

    def room(self, model: int) -> Floats:
        """Return the largest share of the model, at most 1, that each machine has room for; (machines)."""
        model_loads = self.problem.model_loads[self.problem.kind_of, :, model]  # (machines, 2)
        free = np.maximum(self._caps[:, None] - self.loads, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            # The free part of each load over the load of the whole model: the scarcer of the two decides.
            largest_share = np.where(model_loads > 0, free / model_loads, np.inf).min(axis=1)
        return np.where(self.could_join(model), np.minimum(largest_share + ROUNDING, 1.0), 0.0)

    def machines_with(self, model: int) -> list[int]:
        """The machines that have the model."""
        return sorted(self._homes.get(model, ()))

    def replicas(self, model: int) -> int:
        """Return the number of machines that have the model; of zones, if its replicas must be in different zones."""
        machines = self.machines_with(model)
        apart = self.problem.demands[model].apart == "zone"
        return len(set(self.problem.zone_of[machines].tolist())) if apart else len(machines)

    def add(self, machine: int, model: int, share: float) -> None:
        """Add a share of a model to a machine, which may have a share of it already."""
        problem, kind = self.problem, self.problem.kind_of[machine]
        self.loads[machine] += share * problem.model_loads[kind, :, model]
        if model not in self.shares[machine]:
            self.bytes[machine] += problem.bytes[kind, model]
            self.longest_s[machine] = max(self.longest_s[machine], problem.segment_s[kind, model])
            self.tightest_s[machine] = min(self.tightest_s[machine], problem.slack_s[kind, model])
            self._homes.setdefault(model, set()).add(machine)
        self.shares[machine][model] = self.shares[machine].get(model, 0.0) + share

    def remove(self, machine: int, model: int) -> float:
        """Remove a model from a machine; return the share that was there.

        The machine's loads and limits are computed anew.
        """
        share = self.shares[machine].pop(model)
        self._homes[model].discard(machine)
        others, self.shares[machine] = self.shares[machine], {}
        self.loads[machine], self.bytes[machine] = 0.0, 0.0
        self.longest_s[machine], self.tightest_s[machine] = 0.0, np.inf
        for other, part in others.items():
            self.add(machine, other, part)
        return share

    @property
    def used(self) -> Bools:
        """Whether each machine has a model."""
        return np.array([bool(models) for models in self.shares], np.bool_)

    def served(self) -> Floats:
        """The share of each model's requests that has a machine."""
        served_shares = np.zeros(len(self.problem.demands))
        for models in self.shares:
            for model, share in models.items():
                served_shares[model] += share
        return served_shares


def broken_limits(filling: Filling) -> Iterator[str]:
    """Yield a sentence for each limit that a filling breaks. Requests without a machine break none."""
    for machine in np.flatnonzero(filling.used).tolist():
        yield from _broken_by_machine(filling, machine)
    served = filling.served()
    for number, demand in enumerate(filling.problem.demands):
        if served[number] > 1 + TOLERANCE:
            yield f"{demand.model}: {served[number]:.3f} of its requests are placed, more than there are"
        yield from _broken_replicas(filling, number)


def _broken_by_machine(filling: Filling, machine: int) -> Iterator[str]:
    """Yield a sentence for each limit that one machine breaks: load, memory, rules, and waits of its models."""
    problem, kind = filling.problem, int(filling.problem.kind_of[machine])
    name, numbers = problem.machines[machine].name, list(filling.shares[machine])
    if (busy := filling.loads[machine].max()) > problem.cap[kind] * (1 + TOLERANCE):
        yield f"{name} is {busy:.3f} busy, and may be {problem.cap[kind]:.3f}"
    if filling.bytes[machine] > problem.room_bytes[kind] * (1 + TOLERANCE):
        yield f"{name} holds {filling.bytes[machine] / GIB:.2f} GiB, and has {problem.room_bytes[kind] / GIB:.2f}"
    for model in numbers:
        demand = problem.demands[model]
        if not problem.allowed[machine, model]:
            yield f"{demand.model} may not be on {name}: it is pinned elsewhere, too large, or too slow there"
        for other in numbers:
            if other != model and problem.segment_s[kind, other] > problem.slack_s[kind, model] * (1 + TOLERANCE):
                longest = problem.segment_s[kind, other] * 1e3
                yield f"{demand.model} on {name} may wait {longest:.1f} ms for {problem.demands[other].model}"


def _broken_replicas(filling: Filling, model: int) -> Iterator[str]:
    """Yield a sentence if a model that is placed has too few replicas."""
    demand, count = filling.problem.demands[model], filling.replicas(model)
    if 0 < count < demand.replicas:
        yield f"{demand.model} is in {count} {demand.apart}s, and must be in {demand.replicas}"


STEEPNESS = 8.0
"""Exponent of the penalty for load: the fuller a machine is, the more another load counts."""
LEAST_PART = 0.02
"""Smaller shares of a model in the bound's division are ignored."""
LARGEST_PIECE = 0.5
"""Largest part of a machine that a piece of a divided model takes; the rest is for models that use the other
resource."""


class Piece(NamedTuple):
    """A share of a model that is placed on one machine if possible."""

    model: int
    share: float
    among: tuple[int, ...] = ()
    """The machines that it may go to; empty: any."""


def pieces(problem: PlacingProblem, bound: PlacingBound | None = None) -> list[Piece]:
    """Order the models to place: first those with few possible machines, then by size; divide models that need several.

    bound: the bound by whose division among groups of machines models are divided; None: not divided by groups.
    """
    sizes = np.maximum(
        problem.model_loads.max(axis=1) / problem.cap[:, None], problem.bytes / problem.room_bytes[:, None]
    )
    runnable = np.stack([problem.allowed[problem.kind_of == kind].any(axis=0) for kind in range(len(problem.kinds))])
    smallest = np.where(runnable, sizes, np.inf).min(axis=0)
    machine_counts = problem.allowed.sum(axis=0)  # by model: how many machines may have it
    unrestricted = machine_counts >= machine_counts.max(initial=0)
    sized = []  # the two sort keys of each piece, and the piece
    for piece, kind in _divide_by_bound(problem, bound):
        model, share, among = piece
        size = share * (smallest[model] if kind is None else sizes[kind, model])
        count = max(math.ceil(size / LARGEST_PIECE) if size > 1 else 1, 1 if among else problem.demands[model].replicas)
        sized += [(bool(unrestricted[model]), -size / count, Piece(model, share / count, among))] * count
    return [piece for _, _, piece in sorted(sized, key=lambda entry: entry[:2])]


def _divide_by_bound(problem: PlacingProblem, bound: PlacingBound | None) -> Iterator[tuple[Piece, int | None]]:
    """Yield every model whole, or in the shares by which the bound divides it.

    Each piece comes with the kind of its machines; None if the model is whole.
    """
    for model, demand in enumerate(problem.demands):
        if bound is None or len(bound.groups) == 1 or demand.replicas > 1:
            yield Piece(model, 1.0), None
            continue
        shares = {
            index: group_shares[model]
            for index, group_shares in enumerate(bound.shares)
            if group_shares.get(model, 0.0) > LEAST_PART
        }
        total = sum(shares.values())
        for index, share in shares.items():
            group = bound.groups[index]
            yield Piece(model, share / total, group.members), group.kind


def balance(filling: Filling, todo: Iterable[Piece]) -> list[Piece]:
    """Place each piece of *todo* on the one of its machines where it adds least; return those without a place.

    The returned pieces may go to any machine.
    """
    unplaced = []
    for piece in todo:
        fits = rooms_apart(filling, piece.model) >= piece.share - ROUNDING
        if piece.among:
            allowed = np.zeros(len(fits), np.bool_)
            allowed[list(piece.among)] = True
            fits &= allowed
        if fits.any():
            filling.add(_pick_machine(filling, piece, fits), piece.model, piece.share)
        else:
            unplaced.append(Piece(piece.model, piece.share))
    return unplaced


def divide(filling: Filling, todo: Iterable[Piece]) -> list[Piece]:
    """Place each piece of *todo* on several machines, those with the most room first; return parts without a place."""
    unplaced = []
    for piece in todo:
        rest = piece.share
        while rest > ROUNDING:
            rooms = rooms_apart(filling, piece.model)
            machine = int(np.argmax(rooms))
            if rooms[machine] <= 1e-3 * rest:  # too little to be worth the weights on another machine
                break
            part = min(rest, float(rooms[machine]))
            filling.add(machine, piece.model, part)
            rest -= part
        if rest > ROUNDING:
            unplaced.append(Piece(piece.model, rest))
    return unplaced


def rooms_apart(filling: Filling, model: int) -> Floats:
    """Return the share of the model that each machine could take; (machines).

    While there are fewer replicas than required, machines (or zones) with a replica count as full.
    """
    rooms, demand = filling.room(model), filling.problem.demands[model]
    if 0 < filling.replicas(model) < demand.replicas:
        homes, zones = filling.machines_with(model), filling.problem.zone_of
        rooms[np.isin(zones, zones[homes]) if demand.apart == "zone" else homes] = 0.0
    return rooms


def _pick_machine(filling: Filling, piece: Piece, fits: Bools) -> int:
    """Return the machine, among *fits*, on which the sum of the exponentials of the two loads grows least.

    So models that mostly need one resource are placed with models that mostly need the other.
    """
    problem = filling.problem
    candidates = np.flatnonzero(fits)
    kinds = problem.kind_of[candidates]
    caps = problem.cap[kinds][:, None]
    before = filling.loads[candidates] / caps  # (candidates, 2): the two loads as parts of the cap
    after = before + piece.share * problem.model_loads[kinds, :, piece.model] / caps
    growth = (np.exp(STEEPNESS * after) - np.exp(STEEPNESS * before)).sum(axis=1)
    return int(candidates[np.argmin(growth)])
