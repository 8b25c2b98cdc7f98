"""A placement as tables and sentences: its machines, unserved models, and the loads of a change; and as a folder.

The folder has ``placement.json``, and a page that shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.base.errors import PlacingError
from weft.base.files import replacing_folder
from weft.reports.exhibits import Axis, Bars, Panel, Strokes, draw
from weft.reports.page import PALETTE, page_text
from weft.reports.pictures import LIMIT
from weft.reports.tables import ResultTable, TableRow, number
from weft_cluster.placing.adapting import PlacementChange, WeightLoad
from weft_cluster.placing.machines import GIB
from weft_cluster.placing.placement import PLACEMENT_FILE, PlacedMachine, Placement, write_placement

if TYPE_CHECKING:
    from weft.reports.pictures import Figure


MOST_DRAWN = 60
"""Most machines in a picture."""
MOST_NAMES = 4
"""Most models of a machine that a row names."""
UNITS = {"machines": "machines", "cost": "cost", "load": "times the rates", "attainment": "on time"}


def figure(placement: Placement) -> Figure:
    """Draw the two loads and the memory of up to MOST_DRAWN machines, as shares, with the cap of each."""
    shown = placement.machines[:MOST_DRAWN]
    loads = {
        "computing": [machine.compute_load for machine in shown],
        "memory channel": [machine.bandwidth_load for machine in shown],
        "memory": [machine.memory_bytes / machine.memory_limit_bytes for machine in shown],
    }
    bars = Bars([machine.name for machine in shown], loads, dict(zip(loads, PALETTE, strict=False)), flat=True)
    limits = [machine.busy_cap for machine in shown]
    caps = Strokes(bars.places(), limits, width=0.84, label="how busy it may be", colour=LIMIT, upright=True)
    panel = Panel([bars, caps], x=Axis(label="share used", low=0), grid="x")
    return draw(f"{len(placement.machines)} machines", [panel], size=(9.0, 1.4 + 0.42 * len(shown)))


def tables(placement: Placement) -> tuple[ResultTable, ...]:
    """The table of machines, and that of unserved models if there are any."""
    return (machines_table(placement), *([unserved_table(placement)] if placement.unserved else []))


def machines_table(placement: Placement, most: int | None = None) -> ResultTable:
    """A table with a row for each machine; *most*: largest number of rows, None for all."""
    shown = placement.machines[:most]
    hidden = len(placement.machines) - len(shown)
    return ResultTable(
        "",
        ("machine", "zone", "models", "limit", "compute", "bandwidth", "busy", "of", "memory", "on time"),
        tuple(map(_row, shown)),
        left=4,
        notes=(f"and {hidden} more machines",) if hidden else (),
    )


def _row(machine: PlacedMachine) -> TableRow:
    """The table row of a machine; models beyond MOST_NAMES are counted."""
    names = [
        placed.model if placed.share > 0.999 else f"{placed.model} {percent(placed.share, 0)}"
        for placed in machine.models
    ]
    more = len(names) - MOST_NAMES
    held, room = machine.memory_bytes / GIB, machine.memory_limit_bytes / GIB
    return TableRow(
        (
            machine.name,
            machine.zone,
            ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else ""),
            f"{machine.limit} ({machine.limited_by})",
            percent(machine.compute, 0),
            percent(machine.bandwidth, 0),
            percent(machine.busy, 0),
            percent(machine.busy_cap, 0),
            f"{held:.1f} of {room:.0f} GiB",
            number(machine.attainment, 2, scale=100, suffix=" %"),
        )
    )


def unserved_table(placement: Placement) -> ResultTable:
    """A table of the requests without a machine, and of the machines that they would need."""
    rows = [
        TableRow((unserved.model, unserved.why, percent(unserved.share), f"{unserved.rate:.4g}"))
        for unserved in placement.unserved
    ]
    return ResultTable("not served", ("model", "needs", "share", "requests/s"), tuple(rows), left=2)


def in_words(placement: Placement) -> list[str]:
    """Describe the value of a placement and its bound, in sentences."""
    unit = UNITS[placement.objective]
    better = "at most" if placement.objective in ("load", "attainment") else "at least"
    value = f"{placement.value:.4g} {unit}"
    if placement.unserved:
        value = f"{value}, which do not serve all"
    elif placement.value != placement.bound:
        value += (
            f"; {better} {placement.bound:.4g} for any placement ({placement.bound_by}), {percent(placement.gap)} away"
        )
    else:
        value += f"; no placement can do better ({placement.bound_by})"
    sentences = [value]
    if placement.attainment is not None:
        on_time = f"{percent(placement.attainment, 2)} of the requests are predicted to be on time"
        judged = [
            (machine.attainment, machine.name) for machine in placement.machines if machine.attainment is not None
        ]
        if judged:
            worst, name = min(judged)
            on_time += f", and {percent(worst, 2)} of those to {name}, the worst"
        sentences.append(on_time)
    return [*sentences, *placement.notes]


def percent(share: float, digits: int = 1) -> str:
    """A share as text in percent."""
    return f"{100 * share:.{digits}f} %"


def loads_table(change: PlacementChange, most: int | None = None) -> ResultTable:
    """A table of the loads in the order in which they end; *most*: largest number of rows, None for all."""
    shown = change.loads[:most]
    hidden = len(change.loads) - len(shown)
    return ResultTable(
        "to load",
        ("model", "machine", "GB", "takes s", "ready s", "requests/s"),
        tuple(map(_load_row, shown)),
        left=2,
        notes=(f"and {hidden} more loads",) if hidden else (),
    )


def _load_row(load: WeightLoad) -> TableRow:
    times = (f"{load.seconds:.3g}", f"{load.ready_s:.3g}", f"{load.rate:.4g}")
    return TableRow((load.model, load.machine, f"{load.bytes / 1e9:.3g}", *times))


def change_in_words(change: PlacementChange) -> str:
    """Describe a change in one sentence."""
    if not change.loads:
        return f"nothing to load: {change.kept} models stay where they are, {len(change.drops)} may be dropped"
    return (
        f"{len(change.loads)} loads of {change.bytes / 1e9:.4g} GB are done after {change.seconds:.3g} s, before which "
        f"{change.waiting:.4g} requests arrive for them; {change.kept} models stay where they are, {len(change.drops)} "
        "may be dropped"
    )


REPORT_FILE = "report.html"


def write_folder(placement: Placement, path: str | Path, more: Callable[[Path], None] = lambda folder: None) -> None:
    """Write a placement folder whole or not at all.

    An existing folder is replaced only if it holds a placement. more: writes further files into the folder.
    """
    check_place(path)
    with replacing_folder(path, PlacingError) as folder:
        write_placement(placement, folder / PLACEMENT_FILE)
        (folder / REPORT_FILE).write_text(placement_page(placement), encoding="utf-8")
        more(folder)


def check_place(path: str | Path) -> None:
    """Raise PlacingError unless a placement folder can be written at *path*."""
    folder = Path(path)
    if not folder.absolute().parent.is_dir():
        raise PlacingError(f"{path}: there is no folder {folder.absolute().parent}")
    if folder.is_file():
        raise PlacingError(f"{path}: is a file; name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / PLACEMENT_FILE).is_file():
        raise PlacingError(f"{path}: holds something that is no placement; name another folder, or empty it")


def placement_page(placement: Placement) -> str:
    """The HTML page that shows a placement."""
    return page_text("placement.html", page_data(placement), "weft_cluster.placing")


def page_data(placement: Placement) -> dict[str, Any]:
    """Return the JSON data of the page; machines refer to models by their index in "models"."""
    indices = {name: number for number, name in enumerate(placement.models)}
    shown = placement.model_dump(mode="json", exclude={"format", "machines", "idle"})
    return {
        **shown,
        "gap": placement.gap,
        "unit": UNITS[placement.objective],
        "words": in_words(placement),
        "idle": len(placement.idle),
        "models": list(indices),
        "machines": [_machine_data(machine, indices) for machine in placement.machines],
    }


def _machine_data(machine: PlacedMachine, names: dict[str, int]) -> dict[str, Any]:
    """Return the page's data of a machine; *names*: model -> index. Each model on it is a row of values."""
    shown = machine.model_dump(mode="json", exclude={"models"})
    return {
        **shown,
        "models": [
            [
                names[placed.model],
                placed.share,
                placed.rate,
                placed.compute,
                placed.bandwidth,
                placed.other,
                placed.memory_bytes,
                placed.attainment,
            ]
            for placed in machine.models
        ],
    }
