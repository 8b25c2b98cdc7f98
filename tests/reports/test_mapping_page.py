"""Outcomes on a SoC as numbers, traces, Perfetto files, pictures and pages: complete, right and safe with any name."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from tests.mapping.naive_soc import random_case
from tests.reports.examples import DLA, GPU, MS, NASTY, parallel_outcome, problem, serial_outcome
from weft.base.errors import InputError
from weft.devices.soc import Soc, Unit
from weft.reports.trace import read_trace, write_trace
from weft.reports.trace_exports import write_html, write_perfetto
from weft_map.export import SOC, TASKS, write_outcome_perfetto
from weft_map.pages.numbers import demand_of, mapping_report, outcome_trace, report_of, steps_of
from weft_map.pages.page import explain, page_data, write_mapping_page
from weft_map.pages.picture import draw_mapping
from weft_map.problem import Group, Problem, Task, UnitCost
from weft_map.schedule import Outcome, Schedule
from weft_map.simulator import simulate


def moving() -> Outcome:
    """a changes to the dla for its second group: 0.5 ms on the way."""
    return simulate(problem(), Schedule(((GPU, DLA), (GPU,)), made_by="moving"))


cases = st.tuples(st.randoms(use_true_random=False), st.booleans()).map(
    lambda drawn: simulate(*random_case(drawn[0], coarse=drawn[1]))
)


# Numbers


def test_a_report_says_where_the_time_went():
    report = report_of(parallel_outcome())
    a, b = report.tasks
    assert (a.finish_s, a.work_s, a.contention_s) == pytest.approx((4.8 * MS, 4 * MS, 0.8 * MS))
    assert (b.finish_s, b.work_s, b.contention_s, b.slow_down) == pytest.approx((2.8 * MS, 2 * MS, 0.8 * MS, 1.4))
    assert report.contended_share == pytest.approx(2.8 / 4.8)
    assert report.above_peak_share == pytest.approx(2.8 / 4.8)
    assert report.mean_demand_gb_s == pytest.approx((140 * 2.8 + 80 * 2) / 4.8)
    assert [unit.name for unit in report.units] == ["gpu", "dla 0", "dla 1"]
    assert [unit.busy_share for unit in report.units] == pytest.approx([1.0, 2.8 / 4.8, 0.0])
    assert (report.moves, report.moving_s, report.waiting_s) == (0, 0.0, 0.0)


def test_waiting_and_moves_are_counted():
    line, move = report_of(serial_outcome()), report_of(moving())
    assert [task.waiting_s for task in line.tasks] == pytest.approx([3 * MS, 2 * MS])  # a1 for b0, b0 for a0
    assert (move.moves, move.moving_s) == (1, pytest.approx(0.5 * MS))
    assert line.contention_s == pytest.approx(0, abs=1e-15)


def test_the_best_stand_alone_time_counts_moves():
    assert [task.alone_s for task in report_of(parallel_outcome()).tasks] == pytest.approx([4 * MS, 2 * MS])


def test_the_memory_demand_is_that_of_what_runs():
    demand = demand_of(parallel_outcome())
    assert demand.times_s == pytest.approx([0, 2.8 * MS, 4.8 * MS])
    assert demand.gb_s.tolist() == [[80.0, 60.0], [80.0, 0.0]]


def test_a_report_is_ready_for_json():
    raw = json.loads(json.dumps(mapping_report(moving()), allow_nan=False))
    assert raw["made_by"] == "moving"
    assert [task["name"] for task in raw["tasks"]] == ["a", "b"]
    assert len(raw["demand"]["times_s"]) == len(raw["demand"]["gb_s"]) + 1


@settings(max_examples=25)
@given(cases)
def test_work_contention_moves_and_waiting_make_up_a_tasks_time(outcome):
    for task in report_of(outcome).tasks:
        parts_s = task.work_s + task.contention_s + task.moving_s + task.waiting_s
        assert task.began_s + parts_s == pytest.approx(task.finish_s, rel=1e-9)
        assert task.slow_down >= 1 - 1e-9
        assert task.alone_s <= (task.finish_s - task.began_s) * (1 + 1e-9)


@settings(max_examples=25)
@given(cases)
def test_work_contention_and_idle_time_make_up_the_makespan_of_every_unit(outcome):
    report = report_of(outcome)
    parts_s = report.work_s + report.contention_s + report.idle_s
    assert parts_s == pytest.approx(report.makespan_s * len(report.units), rel=1e-9)
    assert sum(unit.contention_s for unit in report.units) == pytest.approx(report.contention_s, rel=1e-9, abs=1e-15)


# Trace


def test_an_outcome_is_a_trace_like_any_other(tmp_path):
    trace = outcome_trace(moving())
    write_trace(trace, tmp_path / "trace.json")
    again = read_trace(tmp_path / "trace.json")
    spans = {(span.model, span.layer): span for span in again.spans}
    second = spans["a", "a1"]
    times_s = second.fetch_start_s, second.fetch_end_s, second.compute_start_s, second.compute_end_s
    first_end_s = spans["a", "a0"].compute_end_s
    assert times_s[:3] == pytest.approx((first_end_s, first_end_s + 0.5 * MS, first_end_s + 0.5 * MS))
    assert times_s[3] == pytest.approx(moving().finish_s[0])
    assert again.settings["unit_of_span"] == [GPU, GPU, DLA]
    write_perfetto(again, tmp_path / "perfetto.json")
    write_html(again, tmp_path / "page.html")


@settings(max_examples=15)
@given(cases)
def test_a_trace_holds_every_step_once_and_files_accept_it(tmp_path_factory, outcome):
    trace, path = outcome_trace(outcome), tmp_path_factory.getbasetemp() / "any.json"
    assert len(trace) == outcome.problem.tables.steps.sum()
    write_trace(trace, path)
    assert len(read_trace(path)) == len(trace)


# Perfetto


def events(outcome: Outcome, folder: Path, **wanted: Any) -> list[dict[str, Any]]:
    write_outcome_perfetto(outcome, folder / "trace.json")
    read = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in read if all(event.get(key) == value for key, value in wanted.items())]


def test_perfetto_has_a_track_per_instance_with_slow_downs(tmp_path):
    names = [
        event["args"]["name"] for event in events(parallel_outcome(), tmp_path, ph="M", name="thread_name", pid=SOC)
    ]
    assert names == ["gpu", "dla 0", "dla 1"]
    pieces = events(parallel_outcome(), tmp_path, ph="X", pid=SOC)
    shown = [(e["tid"], e["name"], e["ts"], e["dur"], e["args"]["slow_down"]) for e in pieces]
    assert shown == [
        (1, "a/a0", 0.0, 2800.0, 1.4),
        (2, "b/b0", 0.0, 2800.0, 1.4),
        (1, "a/a1", 2800.0, 2000.0, 1.0),
    ]


def test_perfetto_has_the_total_demand_as_a_counter(tmp_path):
    counted = [(event["ts"], event["args"]["value"]) for event in events(parallel_outcome(), tmp_path, ph="C")]
    assert counted == [(0.0, 140.0), (2800.0, 80.0), (4800.0, 0.0)]


def test_perfetto_shows_moves_and_waiting_of_each_task(tmp_path):
    [move] = events(moving(), tmp_path, cat="move")
    assert (move["name"], move["pid"], move["tid"], move["dur"]) == ("move gpu to dla", TASKS, 1, 500.0)
    waits = events(serial_outcome(), tmp_path, cat="wait")
    assert sorted((event["args"]["group"], event["dur"]) for event in waits) == [("a1", 3000.0), ("b0", 2000.0)]


@settings(max_examples=15)
@given(cases)
def test_perfetto_spans_of_a_track_never_overlap(tmp_path_factory, outcome):
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events(outcome, tmp_path_factory.getbasetemp(), ph="X"):
        start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
        spans.setdefault((event["pid"], event["tid"]), []).append((start, start + length))
    for row in spans.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(row)))


# Page


def read_page(path: Path) -> tuple[str, dict[str, Any]]:
    page = path.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    return page, json.loads(found[1])


def test_a_page_holds_all_it_needs_and_asks_nobody(tmp_path):
    write_mapping_page(
        tmp_path / "page.html",
        [parallel_outcome(), serial_outcome(), moving()],
        certificate={"proved": True, "gap": 0.0},
    )
    page, data = read_page(tmp_path / "page.html")
    assert not re.search(r"""(https?:)?//[a-z]|src=|<link|@import|url\(""", page.split("<script>")[0])
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|https?://", page)
    assert [outcome["name"] for outcome in data["outcomes"]] == ["beside", "in line", "moving"]
    assert data["certificate"] == {"proved": True, "gap": 0.0}


def test_the_data_of_a_page_is_that_of_the_outcomes():
    [first, second] = page_data([parallel_outcome(), moving()])["outcomes"]
    assert first["pieces"] == [
        [0, 0, 0, 0.0, 2800.0, pytest.approx(1.4)],
        [1, 0, 1, 0.0, 2800.0, pytest.approx(1.4)],
        [0, 1, 0, 2800.0, 4800.0, 1.0],
    ]
    assert first["finish"] == [4800.0, 2800.0]
    assert first["demand"] == [[80.0, 60.0], [80.0, 0.0]]
    # ready, start, end, alone, demand of a1; its move from the gpu to the first dla, beside b on the gpu
    assert second["moves"] == [[0, 1, 0, 1, 2000.0, 2500.0]]
    assert second["steps"][1][:5] == [0, 1, 1, 2500.0, 2500.0]


def test_a_page_uses_no_key_that_its_data_does_not_have(tmp_path):
    write_mapping_page(tmp_path / "page.html", [parallel_outcome()])
    page, data = read_page(tmp_path / "page.html")
    script = page.rsplit("<script>", 1)[1]
    assert set(re.findall(r"\bdata\.(\w+)", script)) <= data.keys()
    report = data["outcomes"][0]["report"]
    assert set(re.findall(r"\breport\.(\w+)", script)) <= report.keys()
    assert set(re.findall(r"\bunit\.(\w+)", script)) <= report["units"][0].keys()


def test_names_cannot_break_out_of_a_page(tmp_path):
    write_mapping_page(tmp_path / "page.html", [parallel_outcome(NASTY)], title=NASTY, notes={NASTY: NASTY})
    page, data = read_page(tmp_path / "page.html")
    assert page.count("</script>") == files("weft_map.pages").joinpath("mapping.html").read_text("utf-8").count(
        "</script>"
    )
    assert data["tasks"] == ["a", NASTY]
    assert data["notes"] == {NASTY: NASTY}


def test_the_same_outcomes_give_the_same_page(tmp_path):
    for name in ("one.html", "two.html"):
        write_mapping_page(tmp_path / name, [parallel_outcome(), serial_outcome()])
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_a_page_explains_why_the_first_schedule_wins():
    told = explain([parallel_outcome(), moving(), serial_outcome()])
    assert told[0].startswith(
        "beside ends at 4.8 ms. Units are busy for gpu 100.0 %, dla 0 58.3 %, dla 1 0.0 % of that;"
    )
    # in line: 7 ms of work on one of three units; beside: 6 ms of work, 1.6 ms lost
    assert told[1] == "4.8 ms is 31.4 % less than in line, the best of the others, with 7 ms."
    assert told[2] == (
        "Compared with that, an average unit has 0.333 ms less work, 0.533 ms more lost to contention, "
        "2.4 ms less idle."
    )


def test_a_page_is_honest_about_a_schedule_that_does_not_win():
    assert (
        explain([serial_outcome(), parallel_outcome()])[1]
        == "7 ms is 45.8 % more than beside, the best of the others, with 4.8 ms."
    )
    assert explain([parallel_outcome(), parallel_outcome()])[1] == "The best of the others, beside, is equal."


def test_schedules_may_be_compared_by_throughput():
    told = explain([parallel_outcome(), serial_outcome()], "throughput")
    assert told[1] == "565.5 runs a second is 64.9 % more than in line, the best of the others, with 342.9."


def test_what_takes_no_time_is_explained_all_the_same():
    soc = Soc(name="duo", bandwidth_gb_s=100.0, units=(Unit(name="gpu"),))
    nothing = simulate(Problem(soc, (Task("a", (Group("a0", {"gpu": UnitCost(0.0, 1.0)}),)),)), Schedule(((GPU,),)))
    assert explain([nothing, nothing])[1] == "The best of the others, the schedule, is equal."
    assert mapping_report(nothing)["throughput"] == 0.0


def test_outcomes_of_different_problems_do_not_share_a_page(tmp_path):
    with pytest.raises(InputError, match="draw each alone"):
        write_mapping_page(tmp_path / "page.html", [parallel_outcome(), parallel_outcome("c")])
    with pytest.raises(InputError, match="no outcome to draw"):
        write_mapping_page(tmp_path / "page.html", [])


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(InputError, match="cannot write"):
        write_mapping_page(tmp_path / "no" / "page.html", [parallel_outcome()])


# Picture


def test_a_picture_shows_every_piece_and_what_contention_takes(tmp_path):
    figure = draw_mapping([parallel_outcome(), moving()], tmp_path / "chart.png")
    lanes = figure.axes[0]
    boxes = [patch for patch in lanes.patches if isinstance(patch, Rectangle) and patch.get_linewidth() == 0]
    bars = [box for box in boxes if box.get_facecolor()[3] > 0 and box.get_width() < 4.8]
    lost = [box for box in boxes if box.get_hatch() == "/////"]
    assert [round(bar.get_width(), 9) for bar in bars] == [2.8, 2.8, 2.0]
    assert bars[0].get_height() == pytest.approx(bars[2].get_height() / 1.4)
    assert len(lost) == 2
    assert imread(tmp_path / "chart.png").shape[1] == 1920


def test_a_picture_as_svg_is_the_same_each_time(tmp_path):
    for name in ("one.svg", "two.svg"):
        draw_mapping([moving()], tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@settings(max_examples=4)
@given(cases)
def test_any_outcome_can_be_drawn(tmp_path_factory, outcome):
    draw_mapping([outcome], tmp_path_factory.getbasetemp() / "any.svg", title="any")
    assert len(page_data([outcome])["outcomes"][0]["steps"]) == len(steps_of(outcome))


def test_pictures_are_png_or_svg_of_something(tmp_path):
    with pytest.raises(InputError, match=r"a figure ends in .png or .svg, not .pdf"):
        draw_mapping([parallel_outcome()], tmp_path / "chart.pdf")
    with pytest.raises(InputError, match="no outcome to draw"):
        draw_mapping([], tmp_path / "chart.png")
    with pytest.raises(InputError, match="cannot write"):
        draw_mapping([parallel_outcome()], tmp_path / "no" / "chart.png")
