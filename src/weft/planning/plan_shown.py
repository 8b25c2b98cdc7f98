"""Tables and a figure of a plan: its options side by side, and the reasons for the choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.planning.plan import Plan, PlanOption, Prediction
from weft.reports.exhibits import Axis, Bars, Panel, ReferenceLine, draw
from weft.reports.page import PALETTE
from weft.reports.pictures import LIMIT
from weft.reports.tables import ResultTable, TableRow, largest_notes, mark_largest, number

if TYPE_CHECKING:
    from weft.reports.pictures import Figure

SHOWN = 5
"""Number of options in a table; the plan has all of them."""
COLUMNS = ("option", "p50 ms", "p99 ms", "missed", "largest load", "requests/s", "memory MiB")
LEGEND = (
    "p50 and p99 at the asked load, of each stream in turn; missed: the stream that suffers most; "
    "largest load: the multiple of the asked rates that keeps the deadlines"
)


def tables(plan: Plan) -> tuple[ResultTable, ...]:
    """A table of the options, with the reasons of the plan as notes."""
    reasons = plan.reasons
    disturbed = [plan.measured.in_words] if plan.measured and plan.measured.disturbed else []
    notes = (LEGEND, _late_rule_text(plan), *reasons.won, *reasons.limits, *reasons.next, *disturbed)
    return (options_table(plan)._replace(notes=notes),)


def options_table(plan: Plan) -> ResultTable:
    """The options that were simulated, the best first."""
    rows = [
        TableRow(_cells(option, predicted), best=index == 0)
        for index, (option, predicted) in enumerate(_options_to_show(plan))
    ]
    notes = largest_notes((stream.model, stream.p99_max_of) for stream in plan.predicted.streams)
    return ResultTable(_title(plan), COLUMNS, tuple(rows), 1, (LEGEND, _late_rule_text(plan), *notes))


def _late_rule_text(plan: Plan) -> str:
    """The rule for late requests, and the option that gives other commands the same rule."""
    if plan.deadlines == "strict":
        return "deadlines are strict, late requests are given up; weft sustain and compare do so with --late drop"
    return f"deadlines are soft, late requests: {plan.settings.late} unless an option says otherwise"


def figure(plan: Plan) -> Figure:
    """Latency beside deadline, and the largest load, of each option."""
    shown, streams = _options_to_show(plan), plan.predicted.streams
    labels, loads = [option.label for option, _ in shown], [predicted.sustainable_factor for _, predicted in shown]
    times_ms = {
        stream.model: [predicted.streams[index].p99_ms or 0.0 for _, predicted in shown]
        for index, stream in enumerate(streams)
    }
    colours = {model: PALETTE[index % len(PALETTE)] for index, model in enumerate(times_ms)}
    deadlines = [
        ReferenceLine(stream.deadline_ms, colour=colours[stream.model], dash=":", upright=True)
        for stream in streams
        if stream.deadline_ms is not None
    ]
    load_texts = ["not looked for" if load is None else f"{load:.2f}" for load in loads]
    title = "largest load that keeps its deadlines, times the asked one"
    bars = Bars(labels, {title: [load or 0.0 for load in loads]}, {title: PALETTE[0]}, flat=True, words=load_texts)
    panels = [
        Panel(
            [Bars(labels, times_ms, colours, flat=True), *deadlines],
            x=Axis(label="p99, ms (dotted: due)", low=0),
            grid="",
        ),
        Panel([bars, ReferenceLine(1, colour=LIMIT, dash="-", upright=True)], x=Axis(label=title), grid=""),
    ]
    # in inches: higher for more bars
    size = (11.0, 1.8 + 0.45 * len(labels) * max(1, len(times_ms) / 2))
    return draw(_title(plan), panels, size=size, columns=2, share_y=True)


def _options_to_show(plan: Plan) -> list[tuple[PlanOption, Prediction]]:
    """The best ``SHOWN`` options with a prediction."""
    return [(option, option.predicted) for option in plan.options if option.predicted][:SHOWN]


def _title(plan: Plan) -> str:
    names = " / ".join(stream.model for stream in plan.predicted.streams)
    return f"{names} on {plan.machine.gpu or plan.machine.processor or 'this machine'}"


def _cells(option: PlanOption, predicted: Prediction) -> tuple[str, ...]:
    """The cells of an option, in the order of ``COLUMNS``."""
    return (
        option.label,
        " / ".join(number(stream.p50_ms, 1) for stream in predicted.streams),
        " / ".join(mark_largest(number(stream.p99_ms, 1), stream.p99_max_of) for stream in predicted.streams),
        f"{predicted.worst_missed:.2%}",
        number(predicted.sustainable_factor, 2, suffix=" x"),
        number(predicted.sustainable_per_s, 0),
        number(predicted.memory_bytes, 0, scale=2**-20),
    )
