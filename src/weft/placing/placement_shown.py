"""A placement as tables: its machines, and what goes nowhere."""

from __future__ import annotations

from weft.placing.machines import GIB
from weft.placing.placement import PlacedMachine, Placement
from weft.reports.tables import ResultTable, TableRow, number

MOST_NAMES = 4
"""How many models of a machine a row names."""
UNITS = {"machines": "machines", "cost": "cost", "load": "times the rates", "attainment": "on time"}


def tables(placement: Placement) -> tuple[ResultTable, ...]:
    """All there is to see."""
    return (machines_table(placement), *([unserved_table(placement)] if placement.unserved else []))


def machines_table(placement: Placement, most: int | None = None) -> ResultTable:
    """A row for each machine, up to *most* of them."""
    shown = placement.machines[:most]
    left = len(placement.machines) - len(shown)
    return ResultTable(
        "",
        ("machine", "zone", "models", "limit", "compute", "bandwidth", "busy", "of", "memory", "on time"),
        tuple(map(_row, shown)),
        left=4,
        notes=(f"and {left} more machines",) if left else (),
    )


def _row(machine: PlacedMachine) -> TableRow:
    names = [each.model if each.share > 0.999 else f"{each.model} {each.share:.0%}" for each in machine.models]
    more = len(names) - MOST_NAMES
    held, room = machine.memory_bytes / GIB, machine.memory_limit_bytes / GIB
    return TableRow(
        (
            machine.name,
            machine.zone,
            ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else ""),
            f"{machine.limit} ({machine.limited_by})",
            f"{machine.compute:.0%}",
            f"{machine.bandwidth:.0%}",
            f"{machine.busy:.0%}",
            f"{machine.busy_cap:.0%}",
            f"{held:.1f} of {room:.0f} GiB",
            number(machine.attainment, 2, scale=100, suffix=" %"),
        )
    )


def unserved_table(placement: Placement) -> ResultTable:
    """What goes nowhere, and what would be needed."""
    rows = [TableRow((each.model, each.why, f"{each.share:.1%}", f"{each.rate:.4g}")) for each in placement.unserved]
    return ResultTable("not served", ("model", "needs", "share", "requests/s"), tuple(rows), left=2)


def in_words(placement: Placement) -> list[str]:
    """What it comes to, beside its bound, in sentences."""
    unit = UNITS[placement.objective]
    better = "at most" if placement.objective in ("load", "attainment") else "at least"
    found = [
        f"{placement.value:.4g} {unit}; {better} {placement.bound:.4g} for any placement ({placement.bound_by}): "
        f"gap {placement.gap:.1%}"
    ]
    if placement.attainment is not None:
        worst = min(placement.machines, key=lambda machine: machine.attainment or 0.0, default=None)
        where = f", {worst.attainment:.2%} on {worst.name}" if worst and worst.attainment is not None else ""
        found.append(f"{placement.attainment:.2%} of the requests are predicted to be on time{where}")
    return [*found, *placement.notes]
