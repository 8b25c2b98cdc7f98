"""Conversion of a filling to a placement (``placement``), which is written, read and shown, and back."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from weft.base.errors import PlacingError, unknown_name
from weft_cluster.placing.filling import Filling
from weft_cluster.placing.judging import OnTimeJudge
from weft_cluster.placing.placement import Limit, Objective, PlacedMachine, PlacedModel, Placement, UnservedModel
from weft_cluster.placing.problem import ROUNDING, PlacingProblem, what_would_serve

LOST_TO_ROUNDING = 1e-6
"""A smaller share of a model's requests without a machine is rounding."""


def placed_machines(filling: Filling, judge: OnTimeJudge | None = None) -> tuple[PlacedMachine, ...]:
    """Return every machine with models, its loads, and the simulated attainment of its models if there is a judge."""
    return tuple(_placed_machine(filling, machine, judge) for machine in np.flatnonzero(filling.used).tolist())


def idle_machines(filling: Filling) -> tuple[str, ...]:
    """Names of machines without models."""
    return tuple(filling.problem.machines[machine].name for machine in np.flatnonzero(~filling.used).tolist())


def unserved_models(filling: Filling) -> tuple[UnservedModel, ...]:
    """The share of each model without a machine, and the machines that it would need."""
    missing = np.minimum(1.0 - filling.served(), 1.0)
    return tuple(
        UnservedModel(
            model=demand.model,
            share=float(missing[number]),
            rate=float(missing[number]) * demand.rate,
            why=what_would_serve(filling.problem, number, float(missing[number])),
        )
        for number, demand in enumerate(filling.problem.demands)
        if missing[number] > LOST_TO_ROUNDING
    )


def _placed_machine(filling: Filling, machine: int, judge: OnTimeJudge | None) -> PlacedMachine:
    """The placed machine with its models, loads, and the resource that limits it."""
    problem, kind = filling.problem, int(filling.problem.kind_of[machine])
    limit, limiting_model = _find_limit(filling, machine)
    models = tuple(_placed_model(filling, machine, model, judge) for model in filling.shares[machine])
    return PlacedMachine(
        **problem.machines[machine]._asdict(),
        models=models,
        compute=sum(placed.compute for placed in models),
        bandwidth=sum(placed.bandwidth for placed in models),
        other=sum(placed.other for placed in models),
        overlap=problem.kinds[problem.machines[machine].kind].overlap,
        busy=float(filling.loads[machine].max()),
        busy_cap=float(problem.cap[kind]),
        memory_bytes=sum(placed.memory_bytes for placed in models),
        memory_limit_bytes=int(problem.room_bytes[kind]),
        limit=limit,
        limited_by=problem.demands[limiting_model].model,
        attainment=None if judge is None else judge.attainment(filling, [machine]),
    )


def _placed_model(filling: Filling, machine: int, model: int, judge: OnTimeJudge | None) -> PlacedModel:
    """A placed model with its share of the requests and the loads that it causes."""
    problem, kind = filling.problem, int(filling.problem.kind_of[machine])
    demand, share = problem.demands[model], filling.shares[machine][model]
    return PlacedModel(
        model=demand.model,
        share=share,
        rate=share * demand.rate,
        compute=share * float(problem.compute[kind, model]),
        bandwidth=share * float(problem.memory[kind, model]),
        other=share * float(problem.other[kind, model]),
        memory_bytes=int(problem.bytes[kind, model]),
        attainment=None if judge is None else judge.machine(filling, machine)[model].on_time,
    )


def _find_limit(filling: Filling, machine: int) -> tuple[Limit, int]:
    """The resource with the least left on a machine, and the number of the model that uses most of it."""
    problem, shares, kind = filling.problem, filling.shares[machine], int(filling.problem.kind_of[machine])
    models, model_shares = list(shares), np.array(list(shares.values()))
    uses_by_model: dict[Limit, list[float]] = {  # by model, as parts of the cap on the two loads, or of the memory
        "compute": (model_shares * problem.model_loads[kind, 0, models] / problem.cap[kind]).tolist(),
        "bandwidth": (model_shares * problem.model_loads[kind, 1, models] / problem.cap[kind]).tolist(),
        "memory": (problem.bytes[kind, models] / problem.room_bytes[kind]).tolist(),
    }
    totals = {key: sum(by_model) for key, by_model in uses_by_model.items()}
    waits = [_longest_wait(problem, kind, model, models) for model in models]
    totals["deadline"], uses_by_model["deadline"] = max(waits), waits
    limit = max(totals, key=lambda key: totals[key])
    limiting_model = models[int(np.argmax(uses_by_model[limit]))]
    resource, other = (problem.compute if limit == "compute" else problem.memory)[kind], problem.other[kind]
    if limit in ("compute", "bandwidth") and model_shares @ other[models] > model_shares @ resource[models]:
        limit = "other"  # most of the load is time that overlaps with nothing
    return limit, limiting_model


def _longest_wait(problem: PlacingProblem, kind: int, model: int, models: list[int]) -> float:
    """Return the longest segment of the other *models*, as a share of this model's slack; 0 if there are no others."""
    longest = max((float(problem.segment_s[kind, other]) for other in models if other != model), default=0.0)
    return longest / max(float(problem.slack_s[kind, model]), ROUNDING) if longest else 0.0


def filled(placement: Placement, problem: PlacingProblem) -> Filling:
    """The filling of a placement on a problem's machines, even if it breaks limits.

    PlacingError if the problem does not have a machine or a model of the placement.
    """
    machines = {machine.name: number for number, machine in enumerate(problem.machines)}
    models = {demand.model: number for number, demand in enumerate(problem.demands)}
    filling = Filling(problem)
    for machine in placement.machines:
        if machine.name not in machines:
            raise PlacingError(f"the placement has models on it: {unknown_name('machine', machine.name, machines)}")
        for placed in machine.models:
            if placed.model not in models:
                raise PlacingError(f"{machine.name} has it placed: {unknown_name('model', placed.model, models)}")
            filling.add(machines[machine.name], models[placed.model], placed.share)
    return filling


def make_placement(
    filling: Filling,
    objective: Objective,
    *,
    value: float,
    bound: float,
    bound_by: str,
    judge: OnTimeJudge | None = None,
    notes: Iterable[str] = (),
) -> Placement:
    """Make the placement of a filling; *judge*, if any, adds the simulated share of requests on time.

    value, bound, bound_by, notes: as of ``Placement``.
    """
    return Placement(
        objective=objective,
        machines=placed_machines(filling, judge),
        idle=idle_machines(filling),
        unserved=unserved_models(filling),
        value=value,
        bound=bound,
        bound_by=bound_by,
        attainment=None if judge is None else judge.share_on_time(filling),
        notes=tuple(notes),
    )
