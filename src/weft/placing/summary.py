"""What a filling comes to: the value that is written, read and shown (``placement``), and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from weft.errors import PlacingError, unknown_name
from weft.placing.filling import Filling
from weft.placing.placement import Limit, Objective, PlacedMachine, PlacedModel, Placement, UnservedModel
from weft.placing.problem import ROUNDING, PlacingProblem


def placed_machines(filling: Filling) -> tuple[PlacedMachine, ...]:
    """Every machine that has models, with what they take of it."""
    return tuple(_machine(filling, machine) for machine in np.flatnonzero(filling.used).tolist())


def idle_machines(filling: Filling) -> tuple[str, ...]:
    """The names of those that have none."""
    return tuple(filling.problem.machines[machine].name for machine in np.flatnonzero(~filling.used).tolist())


def unserved_models(filling: Filling, why: Mapping[int, str]) -> tuple[UnservedModel, ...]:
    """What of each model goes nowhere; *why*: number of a model -> what would be needed."""
    missing = 1.0 - filling.served()
    return tuple(
        UnservedModel(
            model=demand.model,
            share=min(1.0, float(missing[number])),
            rate=float(missing[number]) * demand.rate,
            why=why.get(number, "more machines"),
        )
        for number, demand in enumerate(filling.problem.demands)
        if missing[number] > 100 * ROUNDING
    )


def _machine(filling: Filling, machine: int) -> PlacedMachine:
    problem, shares = filling.problem, filling.shares[machine]
    kind, numbers = int(problem.kind_of[machine]), np.array(list(shares), np.int64)
    parts = np.array(list(shares.values()))
    limit, who = _limit(filling, machine)
    return PlacedMachine(
        **problem.machines[machine]._asdict(),
        models=tuple(
            PlacedModel(model=problem.demands[m].model, share=share, rate=share * problem.demands[m].rate)
            for m, share in shares.items()
        ),
        compute=float(parts @ problem.compute[kind, numbers]),
        bandwidth=float(parts @ problem.memory[kind, numbers]),
        other=float(parts @ problem.other[kind, numbers]),
        busy=float(filling.loads[machine].max()),
        busy_cap=float(problem.cap[kind]),
        memory_bytes=int(filling.bytes[machine]),
        memory_limit_bytes=int(problem.room_bytes[kind]),
        limit=limit,
        limited_by=problem.demands[who].model,
    )


def _limit(filling: Filling, machine: int) -> tuple[Limit, int]:
    """What is nearest to its end on a machine, and the model that takes most of it."""
    problem, shares, kind = filling.problem, filling.shares[machine], int(filling.problem.kind_of[machine])
    numbers, parts = list(shares), np.array(list(shares.values()))
    takes: dict[Limit, list[float]] = {
        "compute": (parts * problem.rows[kind, 0, numbers] / problem.cap[kind]).tolist(),
        "bandwidth": (parts * problem.rows[kind, 1, numbers] / problem.cap[kind]).tolist(),
        "memory": (problem.bytes[kind, numbers] / problem.room_bytes[kind]).tolist(),
    }
    used = {key: sum(each) for key, each in takes.items()}
    waits = [_waiting(problem, kind, one, numbers) for one in numbers]
    used["deadline"], takes["deadline"] = max(waits), waits
    limit = max(used, key=lambda key: used[key])
    return limit, numbers[int(np.argmax(takes[limit]))]


def _waiting(problem: PlacingProblem, kind: int, model: int, beside: list[int]) -> float:
    """The longest segment of a model's neighbours, as a share of what it can wait for."""
    longest = max((float(problem.segment_s[kind, other]) for other in beside if other != model), default=0.0)
    return longest / max(float(problem.slack_s[kind, model]), ROUNDING) if longest else 0.0


def filled(placement: Placement, problem: PlacingProblem) -> Filling:
    """A placement on a problem's machines again, whether it keeps to the limits or not (``checking``)."""
    machines = {machine.name: number for number, machine in enumerate(problem.machines)}
    models = {demand.model: number for number, demand in enumerate(problem.demands)}
    found = Filling(problem)
    for machine in placement.machines:
        if machine.name not in machines:
            raise PlacingError(f"the placement has models on it: {unknown_name('machine', machine.name, machines)}")
        for each in machine.models:
            if each.model not in models:
                raise PlacingError(f"{machine.name} has it placed: {unknown_name('model', each.model, models)}")
            found.add(machines[machine.name], models[each.model], each.share)
    return found


def make_placement(
    filling: Filling,
    objective: Objective,
    *,
    value: float,
    bound: float,
    bound_by: str,
    why: Mapping[int, str] = MappingProxyType({}),
) -> Placement:
    """The finished placement; *why*: number of a model -> what its unserved rest would need."""
    return Placement(
        objective=objective,
        machines=placed_machines(filling),
        idle=idle_machines(filling),
        unserved=unserved_models(filling, why),
        value=value,
        bound=bound,
        bound_by=bound_by,
    )
