"""Round robin: models are dealt out to the machines in turn, as people do by hand."""

from __future__ import annotations

import numpy as np

from weft_cluster.placing.filling import Filling
from weft_cluster.placing.problem import PlacingProblem
from weft_cluster.placing.spreading import new_homes
from weft_papers.placing_rivals.spreading import parts, serial_loads


def round_robin(problem: PlacingProblem) -> Filling:
    """Every model on the next machine that may have it, largest models first; those too large for one are cut."""
    filling, turn = Filling(problem), 0
    for model, share in parts(problem, serial_loads(problem)):
        homes = np.flatnonzero(new_homes(filling, model))
        if len(homes):
            machine = int(homes[np.argmin((homes - turn) % len(problem.machines))])
            filling.add(machine, model, share)
            turn = machine + 1
    return filling
