"""A plan as a table and as a picture."""

from __future__ import annotations

import weft
from weft.planning.plan import (
    Plan,
    PlanMachine,
    PlannedModel,
    PlanOption,
    PlanReasons,
    PlanSettings,
    Prediction,
)
from weft.planning.plan import StreamPrediction as Stream
from weft.planning.plan_shown import options_table, tables


def predicted(p99_ms: float | None, factor: float | None) -> Prediction:
    streams = (
        Stream(model="a", rate=50.0, deadline_ms=20.0, p50_ms=3.0, p99_ms=p99_ms, missed=0.01),
        Stream(model="b", rate=5.0, deadline_ms=None, p50_ms=None, p99_ms=None, missed=0.0),
    )
    per_s = factor and 55 * factor
    return Prediction(streams=streams, load=0.5, sustainable_factor=factor, sustainable_per_s=per_s, memory_bytes=2**20)


def option(label: str, found: Prediction | None) -> PlanOption:
    return PlanOption(
        label=label, settings=PlanSettings(lanes=1), predicted=found, left_out="" if found else "too slow"
    )


def plan() -> Plan:
    model = PlannedModel(name="a", file="models/a/1/model.onnx", sha256="0" * 64, bytes=1)
    return Plan(
        made="now",
        objective="deadlines",
        machine=PlanMachine(cores=2, memory_bytes=1, processor="cpu"),
        models=(model,),
        settings=PlanSettings(lanes=1),
        predicted=predicted(9.0, 1.5),
        options=(option("one", predicted(9.0, 1.5)), option("two", predicted(30.0, None)), option("three", None)),
        reasons=PlanReasons(won=("it is best",), limits=("lane time",), next=("a second lane",)),
    )


def test_options_that_were_simulated_stand_side_by_side_the_best_first() -> None:
    table = options_table(plan())
    assert table.title == "a / b on cpu"
    assert [(row.cells, row.best) for row in table.rows] == [
        (("one", "3.0 / -", "9.0 / -", "1.00%", "1.50 x", "82", "1"), True),
        (("two", "3.0 / -", "30.0 / -", "1.00%", "-", "-", "1"), False),
    ]
    (shown,) = tables(plan())
    assert "late requests are given up" in shown.notes[1] and "--late drop" in shown.notes[1]
    assert shown.notes[2:] == ("it is best", "lane time", "a second lane")
    assert "a second lane" in plan()._repr_html_()


def test_a_picture_shows_latencies_beside_deadlines_and_the_largest_loads() -> None:
    left, right = plan().plot().axes
    assert [bar.get_width() for bar in left.patches] == [9.0, 30.0, 0.0, 0.0]
    assert [line.get_xdata()[0] for line in left.lines] == [20.0]
    assert [bar.get_width() for bar in right.patches] == [1.5, 0.0]


def test_the_planner_is_there_by_its_short_name() -> None:
    from weft.planning.planning_run import make_plan

    assert weft.plan is make_plan
