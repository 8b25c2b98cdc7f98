"""``weft place --from``: adapt a placement to new rates, models or machines, with as few weights to load as possible.

Models stay on their machines where possible. A machine over its cap is relieved until it is below the cap by a margin
(hysteresis), so that the next small change does not put it over the cap again: some of its requests go to machines that
already have the model, or a model moves. A model without a place goes to a single machine if one has room, to a machine
in use rather than an idle one; an idle one stays open only if the machines in use cannot divide all models anew. A
machine is emptied if its models fit on the other machines with that margin.

``PlacementChange`` lists the steps from one placement to another: models to load, in which order, models to drop, and
the time that takes. Only loading weights takes time; routing requests to other machines and dropping models do not.
Machines load at the same time, each one model after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from weft.base.errors import InputError, PlacingError, unknown_name
from weft.base.jsonfile import first_problem, write_json
from weft.workloads.requests import Workload
from weft_cluster.placing.bound import placing_bound
from weft_cluster.placing.demand import Demand, demands_of
from weft_cluster.placing.filling import Filling, Piece, rooms_apart
from weft_cluster.placing.judging import OTHER_SEEDS, OnTimeJudge
from weft_cluster.placing.machines import Machines
from weft_cluster.placing.placement import Bytes, Name, NotNegative, Placement
from weft_cluster.placing.problem import ROUNDING, Bools, PlacingProblem, check_each_fits
from weft_cluster.placing.resharing import reshare
from weft_cluster.placing.summary import make_placement

CHANGE_FILE = "change.json"
"""File name of a change in a placement folder."""


class WeightLoad(BaseModel, extra="forbid", frozen=True):
    """A load of a model's weights to a machine."""

    model: Name
    machine: Name
    bytes: Bytes
    seconds: NotNegative
    """Duration of the load."""
    ready_s: NotNegative
    """When the load ends, after the loads before it on the same machine."""
    rate: NotNegative
    """Requests per second of the model that go to the machine afterwards."""


class WeightDrop(BaseModel, extra="forbid", frozen=True):
    """Weights that a machine no longer needs."""

    model: Name
    machine: Name


class PlacementChange(BaseModel, extra="forbid", frozen=True):
    """All loads and drops of a change; ``change.json`` holds one (docs/formats.md)."""

    format: Literal[1] = 1
    loads: tuple[WeightLoad, ...]
    """In the order of being ready."""
    drops: tuple[WeightDrop, ...]
    kept: Annotated[int, Field(ge=0)]
    """Models on machines that stay where they are."""

    @property
    def bytes(self) -> int:
        """Bytes of all loads."""
        return sum(load.bytes for load in self.loads)

    @property
    def seconds(self) -> float:
        """When the last load ends."""
        return max((load.ready_s for load in self.loads), default=0.0)

    @property
    def waiting(self) -> float:
        """Requests that arrive for loaded models before their loads end: the cost of an outage."""
        return sum(load.rate * load.ready_s for load in self.loads)


def difference(before: Placement, after: Placement, problem: PlacingProblem) -> PlacementChange:
    """The loads and drops that lead from one placement to the other, on the machines of a problem."""
    old_rates, new_rates = _rates_by_copy(before), _rates_by_copy(after)
    machines = {machine.name: machine.kind for machine in problem.machines}
    kept = [copy for copy in new_rates if copy in old_rates]
    drops = [
        (machine, model) for machine, model in old_rates if (machine, model) not in new_rates and machine in machines
    ]
    new = [(machine, model, rate) for (machine, model), rate in new_rates.items() if (machine, model) not in old_rates]
    return PlacementChange(
        loads=tuple(in_order(new, problem)),
        drops=tuple(WeightDrop(model=model, machine=machine) for machine, model in drops),
        kept=len(kept),
    )


def _rates_by_copy(placement: Placement) -> dict[tuple[str, str], float]:
    """(machine, model) -> requests per second that go to this copy."""
    return {(machine.name, placed.model): placed.rate for machine in placement.machines for placed in machine.models}


def in_order(copies: Iterable[tuple[str, str, float]], problem: PlacingProblem) -> list[WeightLoad]:
    """Order the loads of (machine, model, rate) on every machine, and compute when each ends.

    Loads with the most requests per second of loading time go first: in that order the fewest requests wait (Smith's
    rule).
    """
    needs = {demand.model: demand.needs for demand in problem.demands}
    kinds = {machine.name: machine.kind for machine in problem.machines}
    unordered = []
    for machine, model, rate in copies:
        size = needs[model][kinds[machine]].weight_bytes
        seconds = size / problem.kinds[kinds[machine]].load_bytes_per_s
        unordered.append((-rate / max(seconds, 1e-9), machine, model, rate, size, seconds))
    ready: dict[str, float] = {}
    loads = []
    for _, machine, model, rate, size, seconds in sorted(unordered):
        ready[machine] = ready.get(machine, 0.0) + seconds
        loads.append(
            WeightLoad(model=model, machine=machine, bytes=size, seconds=seconds, ready_s=ready[machine], rate=rate)
        )
    return sorted(loads, key=lambda load: (load.ready_s, load.machine, load.model))


def parse_change(raw: Any, where: str) -> PlacementChange:
    """Parse the JSON of a change; *where* begins the message of the PlacingError if it is invalid."""
    try:
        return PlacementChange.model_validate(raw)
    except ValidationError as error:
        raise PlacingError(f"{where}: {first_problem(error, PlacementChange, WeightLoad, WeightDrop)}") from error


def write_change(change: PlacementChange, folder: Path) -> None:
    """Write ``change.json`` into a placement folder."""
    write_json(folder / CHANGE_FILE, change.model_dump(mode="json"))


HYSTERESIS = 0.1
"""How far below its cap a machine that must change is brought, as a share of the cap."""
LEAST_PLACED_PART = 1e-3
"""The smallest part of an unplaced share that is worth a load of weights on another machine."""
NEGLIGIBLE_SHARE = 1e-7
"""Shares up to this are rounding and need no place."""


@dataclass(frozen=True, slots=True, eq=False)
class Adapted:
    """The new placement, and the change that leads to it."""

    placement: Placement
    change: PlacementChange


def adapt(
    before: Placement,
    workload: Workload | Sequence[Demand],
    machines: Machines,
    *,
    lost: Sequence[str] = (),
    hysteresis: float = HYSTERESIS,
    judged: bool = True,
    seed: int = 0,
) -> Adapted:
    """Adapt a placement to a changed workload or changed machines, with few loads of models.

    lost: names of machines in the file that are gone. hysteresis: how far below its cap a machine that must change is
    brought, as a share. judged: whether to simulate which requests meet their deadlines afterwards.
    """
    if not 0 <= hysteresis < 1:
        raise InputError(f"hysteresis = {hysteresis:g} must be at least 0 and below 1, as 0.1")
    demands = demands_of(workload, machines) if isinstance(workload, Workload) else workload
    problem = PlacingProblem.of(machines, demands)
    check_each_fits(problem)
    problem = _remove_machines(problem, lost)
    filling = adapted(problem, before, hysteresis)
    bound = placing_bound(problem, before.objective)
    judge = OnTimeJudge(seed + OTHER_SEEDS) if judged or before.objective == "attainment" else None
    value = _objective_value(filling, before, judge)
    after = make_placement(
        filling,
        before.objective,
        value=value,
        bound=value if bound is None else bound.value,
        bound_by="load" if bound is None else bound.by,
        judge=judge,
    )
    return Adapted(after, difference(before, after, problem))


def _remove_machines(problem: PlacingProblem, lost: Sequence[str]) -> PlacingProblem:
    """The problem without the machines named *lost*. PlacingError if one is unknown or none is left."""
    names = [machine.name for machine in problem.machines]
    for name in lost:
        if name not in names:
            raise PlacingError(unknown_name("machine", name, names))
    remaining = [number for number, name in enumerate(names) if name not in lost]
    if not remaining:
        raise PlacingError("no machine is left; name fewer of them as lost")
    return problem.section(remaining, range(len(problem.demands)))


def _objective_value(filling: Filling, before: Placement, judge: OnTimeJudge | None) -> float:
    """The value of the objective of *before* for a filling of the new problem.

    judge: simulates which requests are on time; needed for the objective attainment.
    """
    problem, used = filling.problem, np.flatnonzero(filling.used).tolist()
    if before.objective == "machines":
        return float(len(used))
    if before.objective == "cost":
        return sum(problem.kinds[problem.machines[machine].kind].price for machine in used)
    rates = np.array([demand.rate for demand in problem.demands])
    served = float(filling.served() @ rates / rates.sum())
    if before.objective == "attainment" and judge is not None:
        return float(served * judge.attainment(filling, used))
    busiest = float((filling.loads.max(axis=1) / problem.cap[problem.kind_of]).max())
    return 1 / busiest if served > 1 - 1e-6 else 0.0  # the multiple of the rates that fills the busiest machine


def adapted(problem: PlacingProblem, before: Placement, hysteresis: float = HYSTERESIS) -> Filling:
    """Return the placement *before* changed for the machines and demands of *problem*.

    Machines and models that no longer exist are left out.
    """
    lowered_caps = replace(problem, cap=problem.cap * (1 - hysteresis))
    filling, unplaced = carried_over(lowered_caps, before)
    mover = _ModelMover(filling)
    is_over = filling.loads.max(axis=1) > problem.cap[problem.kind_of] + ROUNDING
    for machine in np.flatnonzero(is_over).tolist():
        unplaced += mover.relieve(machine)
    used_before = filling.used
    still_unplaced = mover.settle(unplaced)
    if before.objective in ("machines", "cost") and not still_unplaced:
        mover.close_new_machines(used_before)
        mover.empty_machines()
    # Pieces without a place may fill machines up to their real caps.
    mover.filling = Filling(problem, mover.filling.shares)
    mover.settle(still_unplaced)
    return mover.filling


def carried_over(problem: PlacingProblem, before: Placement) -> tuple[Filling, list[Piece]]:
    """Return the filling of models that may stay on their machines, even above caps, and the pieces without a place."""
    machines = {machine.name: number for number, machine in enumerate(problem.machines)}
    models = {demand.model: number for number, demand in enumerate(problem.demands)}
    filling = Filling(problem)
    for old_machine in before.machines:
        for placed in old_machine.models if old_machine.name in machines else ():
            machine, model = machines[old_machine.name], models.get(placed.model)
            if model is not None and filling.could_join(model)[machine]:
                filling.add(machine, model, placed.share)
    for model, demand in enumerate(problem.demands):
        homes = filling.machines_with(model)
        if homes and len(homes) < demand.replicas:  # free a share for the replica that is missing
            largest = max(homes, key=lambda home: filling.shares[home][model])
            reduce_share(filling, largest, model, min(1 / demand.replicas, filling.shares[largest][model] / 2))
    missing = 1 - filling.served()
    return filling, [
        Piece(model, float(missing[model])) for model in np.flatnonzero(missing > NEGLIGIBLE_SHARE).tolist()
    ]


def reduce_share(filling: Filling, machine: int, model: int, share: float) -> float:
    """Remove a share of a model from a machine, and the model if nothing remains; return the share that was removed."""
    present_share = filling.remove(machine, model)
    if present_share - share <= NEGLIGIBLE_SHARE:
        return present_share
    filling.add(machine, model, present_share - share)
    return share


class _ModelMover:
    """Moves models between the machines of a filling with few loads of weights."""

    def __init__(self, filling: Filling) -> None:
        self.filling = filling
        self._queue_s = np.zeros(len(filling.problem.machines))
        """(machine): seconds of the loads of weights that were caused so far."""

    def relieve(self, machine: int) -> list[Piece]:
        """Bring a machine below its cap; return the pieces that no other machine with their model has room for."""
        for model in list(self.filling.shares[machine]):
            self._move_to_others(machine, model, min(self._excess(machine, model), self.filling.shares[machine][model]))
        removed = []
        while self._excess(machine) > 0:
            model, share = self._pick_removal(machine)
            removed.append(Piece(model, reduce_share(self.filling, machine, model, share)))
        return removed

    def _excess(self, machine: int, model: int | None = None) -> float:
        """Return the largest excess of a machine over its cap.

        model: return instead the share of this model whose removal ends the excess.
        """
        problem, kind = self.filling.problem, self.filling.problem.kind_of[machine]
        excess = self.filling.loads[machine] - problem.cap[kind]
        excess[excess <= ROUNDING] = 0.0
        if model is None:
            return float(excess.max())
        with np.errstate(divide="ignore", invalid="ignore"):
            # A removed share lowers each of the two loads by that share of the model's load.
            return float(np.where(excess > 0, excess / problem.model_loads[kind, :, model], 0.0).max())

    def _move_to_others(self, machine: int, model: int, share: float) -> None:
        """Move up to *share* of a model to other machines that have it, as far as they have room."""
        rooms = self.filling.room(model)
        for home in self.filling.machines_with(model):
            moved = min(share, float(rooms[home]))
            if home != machine and moved > ROUNDING:
                moved = reduce_share(self.filling, machine, model, moved)
                self.filling.add(home, model, moved)
                share -= moved
                if model not in self.filling.shares[machine]:
                    return

    def _pick_removal(self, machine: int) -> tuple[int, float]:
        """Return the model, and its share, to remove from a machine.

        Preferred in this order: a model whose removal suffices; one that fits on a single other machine; the one with
        the fewest bytes to load (the one with the largest load if none suffices).
        """
        problem, shares = self.filling.problem, self.filling.shares[machine]
        kind = problem.kind_of[machine]
        options = []
        for model, share in shares.items():
            needed = min(self._excess(machine, model), share)
            rooms = rooms_apart(self.filling, model)
            rooms[machine] = 0.0
            # The whole model if one machine in use has room for it.
            removed = share if (rooms * self.filling.used).max() >= share - ROUNDING else needed
            suffices, fits = self._excess(machine, model) <= share, rooms.max() >= removed - ROUNDING
            load = float(problem.model_loads[kind, :, model].max()) * share
            options.append(
                ((not suffices, not fits, problem.bytes[kind, model] if suffices else -load), model, removed)
            )
        return min(options)[1:]

    def settle(self, pieces: list[Piece]) -> list[Piece]:
        """Place pieces, the largest first; return the pieces, or parts of them, without a place."""
        sizes = self.filling.problem.model_loads.max(axis=(0, 1))
        largest_first = sorted(pieces, key=lambda piece: -sizes[piece.model] * piece.share)
        unplaced = [self._place(piece.model, piece.share) for piece in largest_first]
        return [piece for piece in unplaced if piece.share > NEGLIGIBLE_SHARE]

    def _place(self, model: int, rest: float) -> Piece:
        """Place the share *rest* of a model; return the part without a place.

        In this order: machines that have the model; one machine in use that takes all; one idle machine; several
        machines.
        """
        rooms = rooms_apart(self.filling, model)
        for home in self.filling.machines_with(model):
            rest -= self._put(home, model, min(rest, float(rooms[home])))
        for candidates in (self.filling.used, ~self.filling.used):
            has_room = (rooms_apart(self.filling, model) >= rest - ROUNDING) & candidates
            if rest > ROUNDING and has_room.any():
                rest -= self._put(self._pick_soonest(has_room), model, rest)
        while rest > NEGLIGIBLE_SHARE and (rooms := rooms_apart(self.filling, model)).max() > LEAST_PLACED_PART * rest:
            rest -= self._put(int(np.argmax(rooms)), model, min(rest, float(rooms.max())))
        return Piece(model, rest)

    def _pick_soonest(self, candidates: Bools) -> int:
        """Return the machine of *candidates* with the shortest queue of loads; of equals the least busy."""
        machines = np.flatnonzero(candidates)
        order = np.lexsort((self.filling.loads[machines].max(axis=1), self._queue_s[machines]))
        return int(machines[order[0]])

    def _put(self, machine: int, model: int, share: float) -> float:
        """Add a share to a machine, and record the load of weights that it causes; return the share."""
        if share <= ROUNDING:
            return 0.0
        if model not in self.filling.shares[machine]:
            problem = self.filling.problem
            kind = problem.machines[machine].kind
            size = problem.demands[model].needs[kind].weight_bytes
            self._queue_s[machine] += size / problem.kinds[kind].load_bytes_per_s
        self.filling.add(machine, model, share)
        return share

    def close_new_machines(self, used_before: Bools) -> None:
        """Close machines that are newly in use, while the others have room if all models are divided anew.

        used_before: (machine) whether it was in use before.
        """
        while (new := np.flatnonzero(self.filling.used & ~used_before)).size:
            least_busy = int(new[np.argmin(self.filling.loads[new].max(axis=1))])
            others = [{} if machine == least_busy else models for machine, models in enumerate(self.filling.shares)]
            trial = Filling(self.filling.problem, others)
            trial.open[:] = trial.used  # no other idle machine may be opened instead
            trial, unplaced = reshare(trial)
            if unplaced:
                return
            trial.open[:] = True
            self.filling = trial

    def empty_machines(self) -> None:
        """Empty machines, the least busy first, while other used machines have room for all that they have."""
        while (used := np.flatnonzero(self.filling.used)).size > 1:
            least_busy = int(used[np.argmin(self.filling.loads[used].max(axis=1))])
            trial = _ModelMover(Filling(self.filling.problem, self.filling.shares))
            trial._queue_s[:] = self._queue_s
            pieces = [
                Piece(model, trial.filling.remove(least_busy, model)) for model in self.filling.shares[least_busy]
            ]
            trial.filling.open[:] = trial.filling.used
            if trial.settle(pieces):
                return
            trial.filling.open[:] = True
            self.filling, self._queue_s = trial.filling, trial._queue_s
