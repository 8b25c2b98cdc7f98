"""Results as tables and pictures: what a command prints is what a notebook shows, and nothing in it is markup."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import weft
from tests.support.tuning import tuned
from weft.cli import printing
from weft.reports.tables import ResultTable, TableRow, as_html, number
from weft.simulation.report import Report, StreamReport
from weft.simulation.request_report import RequestReport, RequestStream
from weft.simulation.run_tables import comparison_table, copies_of, report_table, request_comparison_table
from weft_stitch.making.generator import generate, save_nets
from weft_stitch.pages import tables as stitching_tables
from weft_tune.pages.page import tables as tuning_tables
from weft_tune.result import OtherMethod, TuningResult

TABLE = ResultTable("a < b", ("name", "x"), (TableRow(("<i>", "1")), TableRow(("best", "2"), best=True)), 1, ("a & b",))


def stream(model: str, slowdown: float | None = 2.0) -> StreamReport:
    return StreamReport(model, 3 if slowdown else 0, 3.0, 1e-3, 2e-3, 3e-3, slowdown)


def report(policy: str, stp: float, pieces: int = 1) -> Report:
    streams = (stream("a"), stream("b", None))
    return Report("npu", policy, stp, 2.0, stp / 2, None, None, 0.5, 0.25, 1.0, None, pieces, "", streams)


def requests(policy: str, missed: float, load: float | None = 0.5) -> RequestReport:
    cdf = tuple(1e-3 * n for n in range(1, 101))
    one = RequestStream("net", 0.02, 50.0, 100, 100, 0, 0, 5, missed, 1.0, 2, 5e-3, 5e-3, 9e-3, 1e-2, 1e-2, 0.1, cdf)
    return RequestReport("host", policy, "keep", 0.5, 0.4, 0.5, missed, missed, 0.5, 0.0, 1.0, 10, (one,), load)


# Tables


def test_html_has_every_cell_and_none_of_it_is_markup() -> None:
    html = as_html(TABLE)
    assert "a &lt; b" in html and "&lt;i&gt;" in html and "a &amp; b" in html and "<i>" not in html
    assert html.count("<tr>") == 3 and html.count("<strong>2</strong>") == 1
    assert html.count("text-align: left") == 3 and html.count("text-align: right") == 3
    assert as_html(TABLE, TABLE) == 2 * html
    assert "<p><strong>" not in as_html(TABLE._replace(title=""))


def test_a_command_prints_the_same_table(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_table(TABLE)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["a", "<", "b"],
        ["name", "x"],
        ["<i>", "1"],
        ["best", "2"],
        ["a", "&", "b"],
    ]


def test_numbers_have_digits_and_what_is_none_is_a_dash() -> None:
    assert [number(1 / 3), number(None), number(0.5, 0, scale=100, suffix=" %")] == ["0.333", "-", "50 %"]


# Runs


def test_a_report_tells_its_streams_and_who_starved() -> None:
    table = report_table(report("fifo", 1.5))
    assert [row.cells[:2] for row in table.rows] == [("a", "3"), ("b", "0")]
    assert table.notes[0].startswith("STP 1.500 = 75.0% of the bound 2.000") and table.notes[1].startswith("b starved")
    assert "fifo on npu" in report("fifo", 1.5)._repr_html_()
    assert [bar.get_height() for bar in report("fifo", 1.5).plot().axes[0].patches] == [2.0, 0.0]


def test_a_report_of_requests_shows_percentiles_and_draws_latencies() -> None:
    html = requests("edf", 0.05)._repr_html_()
    assert "5.00%" in html and "p99.9 ms" in html and "load 50.0% of the lanes&#x27; time" in html
    axes = requests("edf", 0.05).plot().axes[0]
    (latencies, due) = axes.lines
    assert latencies.get_xdata()[-1] == pytest.approx(100) and latencies.get_ydata()[-1] == 100
    assert due.get_xdata()[0] == 20


def test_policies_stand_side_by_side_and_the_best_stands_out() -> None:
    whole, cut = [report("fifo", 1.0), report("weft", 1.5, 8)], [report("fifo", 1.2, 8), report("weft", 1.5, 8)]
    table = comparison_table("two", whole, cut)
    assert table.columns[:4] == ("policy", "STP", "in 1/8", "of bound")
    assert [(row.cells[:4], row.best) for row in table.rows] == [
        (("fifo", "1.000", "1.200", "50.0%"), False),
        (("weft", "1.500", "1.500", "75.0%"), True),
    ]
    assert len(table.notes) == 2 and "in 1/8" not in comparison_table("two", whole).columns


def test_policies_that_do_the_same_are_named_once() -> None:
    reports = [requests("edf", 0.05), requests("fifo", 0.1), requests("punctual", 0.05)]
    assert copies_of(reports) == {"edf": ["punctual"], "fifo": []}
    table = request_comparison_table("three", reports)
    assert [(row.cells[0], row.best) for row in table.rows] == [("edf", True), ("fifo", False)]
    assert table.notes == ("the same as edf here: punctual",)
    assert table.columns == ("policy", "missed", "net missed", "net p99 ms", "load")


# Tuning and stitching


def test_a_tuning_shows_formats_and_other_methods() -> None:
    tuning = tuned(1)
    result = TuningResult(tuning=tuning, objective="weights + activations", seconds=1.0)
    (layers,) = tuning_tables(result)
    assert [row.cells[0] for row in layers.rows] == [*(target.name for target in tuning.network.targets), "all"]
    other = OtherMethod("int8", "8 bits", 8 * tuning.network.weights, 8 * tuning.network.inputs, 0.5, False, 1)
    methods = tuning_tables(replace(result, others=(other,)))[1]
    assert [row.cells[0] for row in methods.rows] == ["FLOAT 32", "weft", "int8"]
    assert methods.rows[2].cells[2] == "4.00" and methods.rows[2].cells[6] == "0.5000 too low"
    assert tuning.network.name in result._repr_html_()
    assert [axes.get_ylabel() for axes in result.plot().axes] == ["score", "objective, share of the start"]


def test_a_stitching_shows_the_ways_to_run_the_models(tmp_path: Path) -> None:
    files = save_nets(generate("tinynet", 2, pruning=0.4, sharing=0.7, classes=[3, 4]).nets, tmp_path, dynamic=True)
    made = weft.stitch(files, form="split", measure=False, check=False)
    (ways,) = stitching_tables(made)
    assert [row.best for row in ways.rows[:2]] == [False, True] and "measured ms" not in ways.columns
    assert ways.rows[0].cells[0] == "one after another" and len(ways.notes) == 3
    left, right = made.plot().axes
    assert [len(axes.patches) for axes in (left, right)] == [len(ways.rows)] * 2
    assert (left.get_xlabel(), right.get_xlabel()) == ("predicted ms", "weights MB")
    assert "one after another" in made._repr_html_()
