"""Plans for several machines like this one: the models are measured here and divided, then each machine is planned.

``weft plan --machines`` is registered with this module: it calls ``check_place``, ``plan_across`` and ``print_plans``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.base.errors import InputError
from weft.cli.printing import print_table, say, say_written
from weft.devices import Host
from weft.planning.machine import this_machine
from weft.planning.measured import SECONDS
from weft.planning.planning_run import MadePlan, OnProgress, make_plan, measured_for
from weft.workloads.requests import Workload
from weft_cluster.placing.demand import demands_of
from weft_cluster.placing.machines import GIB, MOST_MACHINES, parse_machines
from weft_cluster.placing.placement import PlacedMachine, Placement
from weft_cluster.placing.placement_shown import check_place, in_words, machines_table, write_folder
from weft_cluster.routing.placing_run import place

__all__ = ["PlansAcross", "check_place", "plan_across", "print_plans", "workload_of"]

KIND = "machine"
"""Name of the kind of machines like this one; machines are called machine-1, machine-2, ..."""


@dataclass(frozen=True, eq=False)
class PlansAcross:
    """A placement on machines like this one, and the plan of each machine."""

    placement: Placement
    plans: dict[str, MadePlan]
    """Machine -> its plan."""

    def write(self, folder: str | Path) -> None:
        """Write a folder with the placement, and in it a folder for ``weft serve`` on each machine."""

        def write_plans(inside: Path) -> None:
            for name, plan in self.plans.items():
                plan.write(inside / name)

        write_folder(self.placement, folder, write_plans)


def plan_across(workload: Workload, count: int, **how: Any) -> PlansAcross:
    """Divide a workload among *count* machines like this one, so that most requests are on time, and plan for each.

    how: keyword arguments of ``make_plan``. InputError if *count* is out of range.
    """
    if not 1 <= count <= MOST_MACHINES:
        raise InputError(f"machines = {count} must be from 1 to {MOST_MACHINES}")
    host = _measure_device(workload, **how)
    memory_bytes = how.get("memory_bytes") or this_machine().memory_bytes
    like_this = {"memory_gib": memory_bytes / GIB, "overlap": 0.0}
    machines = parse_machines({"kinds": {KIND: like_this}, "machine": [{"kind": KIND, "count": count}]})
    placement = place(demands_of(workload, machines, {KIND: host}), machines, objective="attainment")
    plans = {machine.name: make_plan(workload_of(machine, workload), **how) for machine in placement.machines}
    return PlansAcross(placement, plans)


def _measure_device(
    workload: Workload,
    *,
    devices: Sequence[str | Host] = (),
    seconds: float = SECONDS,
    cache: str | Path | None = None,
    int8: bool = False,
    processes: int = 1,
    on_progress: OnProgress | None = None,
    **plan_options: Any,
) -> Host:
    """Measure this machine with each sensible number of lanes and threads; return the least loaded per lane.

    Arguments are those of ``make_plan``; *processes* does not matter here.
    """
    report_progress = on_progress or (lambda progress: None)
    served, measured = measured_for(workload, devices, seconds, cache, report_progress, int8=int8, **plan_options)

    def load_per_lane(host: Host) -> float:
        """Return the seconds of work per second and lane."""
        work_s = [(sent.rate or 0.0) * host.model(sent.name).total_s(1) for sent in served.sent_streams]
        return sum(work_s) / host.lanes

    return min(measured.hosts, key=load_per_lane)


def workload_of(machine: PlacedMachine, workload: Workload) -> Workload:
    """The part of a workload that a placement sends to *machine*: its models, at their shares of the rates."""
    shares = {placed.model: placed.share for placed in machine.models}
    streams = tuple(
        stream.model_copy(update={"rate": rate and rate * shares[stream.served_name]})
        for stream, rate in zip(workload.stream, workload.rates, strict=True)
        if stream.served_name in shares
    )
    return workload.model_copy(update={"stream": streams, "total_rate": None, "ratio": None})


def print_plans(plans: PlansAcross, output: str | None) -> None:
    """Print the placement and, if it was written to *output*, the commands that serve each machine."""
    print_table(machines_table(plans.placement))
    for sentence in in_words(plans.placement):
        say(sentence, soft_wrap=True)
    if output is None:
        say("nothing was written: -o FOLDER writes the placement, and a plan for each machine")
        return
    say_written("placement", output, f"{os.path.join(output, 'report.html')} shows it")
    for name in plans.plans:
        say(f"{'then':<9} weft serve {os.path.join(output, name)}   on {name}", soft_wrap=True)
