"""The change from one placement to another: models to load, in which order, models to drop, and the time it takes.

Only weights that a machine does not have yet take time; sending requests elsewhere and dropping a model are free.
Machines load at the same time, each one model after another.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from weft.base.errors import PlacingError
from weft.base.jsonfile import first_problem, write_json
from weft_cluster.placing.placement import Bytes, Name, NotNegative, Placement
from weft_cluster.placing.problem import PlacingProblem

CHANGE_FILE = "change.json"
"""File name of a change in a placement folder."""


class WeightLoad(BaseModel, extra="forbid", frozen=True):
    """Weights that a machine gets."""

    model: Name
    machine: Name
    bytes: Bytes
    seconds: NotNegative
    """Duration of the load alone..."""
    ready_s: NotNegative
    """... and its end, after the loads before it on the same machine."""
    rate: NotNegative
    """Requests per second that go there then."""


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
        """All weights that are loaded."""
        return sum(load.bytes for load in self.loads)

    @property
    def seconds(self) -> float:
        """Until the last of them is there."""
        return max((load.ready_s for load in self.loads), default=0.0)

    @property
    def waiting(self) -> float:
        """Requests that arrive for loaded models before these are there: what an outage costs."""
        return sum(load.rate * load.ready_s for load in self.loads)


def difference(before: Placement, after: Placement, problem: PlacingProblem) -> PlacementChange:
    """What leads from one placement to the other, on the machines of a problem."""
    had, has = _copies(before), _copies(after)
    machines = {machine.name: machine.kind for machine in problem.machines}
    kept = [copy for copy in has if copy in had]
    drops = [copy for copy in had if copy not in has and copy[0] in machines]
    new = [(machine, model, has[machine, model]) for machine, model in has if (machine, model) not in had]
    return PlacementChange(
        loads=tuple(in_order(new, problem)),
        drops=tuple(WeightDrop(model=model, machine=machine) for machine, model in drops),
        kept=len(kept),
    )


def _copies(placement: Placement) -> dict[tuple[str, str], float]:
    """(machine, model) -> requests per second that go there."""
    return {(machine.name, placed.model): placed.rate for machine in placement.machines for placed in machine.models}


def in_order(copies: Iterable[tuple[str, str, float]], problem: PlacingProblem) -> list[WeightLoad]:
    """Loads of (machine, model, rate): on every machine first what most requests wait for, per second of loading.

    That order has the fewest requests wait (Smith's rule).
    """
    needs = {demand.model: demand.needs for demand in problem.demands}
    kinds = {machine.name: machine.kind for machine in problem.machines}
    todo = []
    for machine, model, rate in copies:
        size = needs[model][kinds[machine]].weight_bytes
        todo.append((machine, model, rate, size, size / problem.kinds[kinds[machine]].load_bytes_per_s))
    ready: dict[str, float] = {}
    loads = []
    for machine, model, rate, size, seconds in sorted(todo, key=lambda load: (-load[2] / max(load[4], 1e-9), load[:2])):
        ready[machine] = ready.get(machine, 0.0) + seconds
        loads.append(
            WeightLoad(model=model, machine=machine, bytes=size, seconds=seconds, ready_s=ready[machine], rate=rate)
        )
    return sorted(loads, key=lambda load: (load.ready_s, load.machine, load.model))


def parse_change(raw: Any, where: str) -> PlacementChange:
    """The change that parsed JSON describes; *where* opens the message if it is none."""
    try:
        return PlacementChange.model_validate(raw)
    except ValidationError as error:
        raise PlacingError(f"{where}: {first_problem(error, PlacementChange, WeightLoad, WeightDrop)}") from error


def write_change(change: PlacementChange, folder: Path) -> None:
    """Write ``change.json`` into a placement folder."""
    write_json(folder / CHANGE_FILE, change.model_dump(mode="json"))
