"""``weft map dynamic``: models that come and go, with schedules that get better while they run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from weft.base.errors import InputError
from weft.cli import common
from weft.cli.common import how
from weft.cli.printing import (
    add_row,
    console,
    number,
    plain_table,
    progress_bar,
    say,
    say_written,
    write_result,
)

if TYPE_CHECKING:
    from weft_map.dynamic import DynamicLog, Frame
    from weft_map.scenario import Scenario

REDRAW_S = 0.2  # least time between two redraws of the table: often enough to read, and no cost for the loop


def command(
    scenario: Annotated[str, typer.Argument(help="A TOML file with tasks and phases; see docs/mapping.md.")],
    duration: Annotated[float | None, how("--duration", help="Seconds of every phase, instead of the file's.")] = None,
    oracle: Annotated[
        bool, how("--oracle/--no-oracle", help="Afterwards, find the best schedule of every phase.")
    ] = True,
    json_file: common.JsonFile = None,
    figure: common.FigureFile = None,
) -> None:
    """Run a scenario's phases in real time, with the best naive schedule first and better ones when found."""
    from weft_map.dynamic import log_as_dict, run_dynamic

    settings = _read_phases(scenario, duration)
    with _watch_frames(settings) as watch:
        log = run_dynamic(settings, watch, oracle=oracle)
    _print_log(log)
    write_result(json_file, log_as_dict(log))
    if figure:
        from weft_map.pages.picture import draw_dynamic

        draw_dynamic(log, figure)
        say_written("figure", figure)


def _read_phases(path: str, duration: float | None) -> Scenario:
    """The scenario in a file; *duration*: seconds of every phase, instead of the file's."""
    from weft_map.scenario import parse_scenario, read_scenario

    scenario = read_scenario(path)
    if not scenario.phase:
        raise InputError(f"{path}: has no phases; add [[phase]] with tasks and duration_s, or run weft map {path}")
    if duration is None:
        return scenario
    phases = [phase.model_dump() | {"duration_s": duration} for phase in scenario.phase]
    return parse_scenario(scenario.model_dump() | {"phase": phases}, "--duration")


@contextmanager
def _watch_frames(scenario: Scenario) -> Iterator[Callable[[Frame], None] | None]:
    """Yield a function that shows each frame: in a live table on a terminal, otherwise as progress by phase."""
    from rich.live import Live

    if not sys.stderr.isatty():
        with progress_bar("running", len(scenario.phase)) as advance:
            yield lambda frame: advance(None, frame.phase)
        return
    screen = Console(stderr=True)
    rows: dict[int, list[Frame]] = {}
    with Live("warming up (the first run compiles, which takes about 20 s)", console=screen, transient=True) as live:
        drawn_s = 0.0

        def watch(frame: Frame) -> None:
            nonlocal drawn_s
            first, _ = rows.setdefault(frame.phase, [frame, frame])
            rows[frame.phase] = [first, frame]
            if frame.start_s - drawn_s > REDRAW_S or frame is first:
                drawn_s = frame.start_s
                live.update(_live_table(scenario, rows))

        yield watch


def _live_table(scenario: Scenario, rows: dict[int, list[Frame]]) -> Table:
    """The live table; *rows*: number of a phase -> its first and its latest frame."""
    table = plain_table("latency per frame", ("phase", "first ms", "now ms", "schedule", "gap", "at s"))
    for phase, (first, last) in rows.items():
        add_row(
            table,
            " + ".join(scenario.phase[phase].tasks),
            number(first.latency_s, scale=1e3),
            number(last.latency_s, scale=1e3),
            str(last.version),
            number(last.gap, 2, scale=100, suffix=" %"),
            number(last.start_s, 1),
        )
    return table


def _print_log(log: DynamicLog) -> None:
    """Print a table with a row per phase, then the failures of the planner."""
    columns = (
        "phase", "first", "frames", "first ms", "last ms", "oracle ms", "better after ms", "within 2 % ms", "proved ms",
    )  # fmt: skip
    table = plain_table(f"models that come and go on {log.soc}: latency per frame", columns, left=2)
    for phase in log.phases:
        add_row(
            table,
            " + ".join(phase.tasks),
            phase.first_made_by,
            str(phase.frames),
            number(phase.first_latency_s, scale=1e3),
            number(phase.last_latency_s, scale=1e3),
            number(phase.oracle_latency_s, scale=1e3) + ("" if phase.oracle_proved or not phase.oracle_value else " ?"),
            number(phase.improved_s, 1, scale=1e3),
            number(phase.near_s, 1, scale=1e3),
            number(phase.proved_s, 1, scale=1e3),
        )
    console.print(table)
    if any(phase.oracle_value and not phase.oracle_proved for phase in log.phases):
        say("?: the best known, not proved within the time limit")
    for event in log.events:
        say(f"{event.at_s:.3f} s: {event.message}", style="yellow")
