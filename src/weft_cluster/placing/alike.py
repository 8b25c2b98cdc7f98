"""Machines that are alike: of one kind, in one zone, no model pinned to one of them. Searches count these."""

from __future__ import annotations

from dataclasses import dataclass

from weft_cluster.placing.machines import MachineKind
from weft_cluster.placing.problem import PlacingProblem


@dataclass(frozen=True, slots=True, eq=False)
class AlikeMachines:
    """Machines that any model sees as the same."""

    kind: int
    """The number of their kind."""
    what: MachineKind
    members: tuple[int, ...]
    """Their numbers, in order."""

    def __len__(self) -> int:
        return len(self.members)


def alike_machines(problem: PlacingProblem) -> tuple[AlikeMachines, ...]:
    """All machines, in groups of those that are alike."""
    pinned = {demand.machine for demand in problem.demands}
    found: dict[tuple[str, str, str], list[int]] = {}
    for number, machine in enumerate(problem.machines):
        alone = machine.name if machine.name in pinned else ""
        found.setdefault((machine.kind, machine.zone, alone), []).append(number)
    names = list(problem.kinds)
    return tuple(
        AlikeMachines(names.index(kind), problem.kinds[kind], tuple(members)) for (kind, _, _), members in found.items()
    )
