"""Reproduced papers: the published numbers are well-formed, every part runs, and the headline numbers hold."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

from tests.papers.reproductions import check
from weft.base.errors import InputError
from weft.reports.trace import Span, Trace
from weft_papers import PAPERS
from weft_papers.base import Figure, Reproduction, Row, Table, beside, published
from weft_papers.layerweaver import fig14_pairs, fig17_timelines, fig19_scaling, ours, sensitivity, table1_alone
from weft_papers.layerweaver.lab import (
    CUT_PAIRS,
    FOURS,
    PAIRS,
    Scene,
    Throughputs,
    bound,
    device,
    geomean,
    mean,
    one_sided,
    report_of_run,
    scenes,
    throughputs,
)

PAPER = published("layerweaver")
TWO = (("MN", "BB"), ("RN", "NCF"))
A, B = scenes(16, "pipelined")


@pytest.fixture(autouse=True)
def few_values(monkeypatch):
    """Of everything that is varied, the values that something is said of."""
    monkeypatch.setattr(sensitivity, "TOKENS", (16, 64, 384))
    monkeypatch.setattr(sensitivity, "ROWS_PER_CYCLE", (1, 128))
    monkeypatch.setattr(sensitivity, "BUFFERS_MIB", (16, 48))
    monkeypatch.setattr(sensitivity, "CHUNKS_MIB", (6, 48))
    monkeypatch.setattr(fig19_scaling, "BATCHES", (1, 16))
    monkeypatch.setattr(ours, "TOKENS", (16, 64))
    monkeypatch.setattr(ours, "CUT_TOKENS", (16, 64))


@pytest.fixture(scope="module")
def halves():
    return fig14_pairs.panel("a", A, 10, TWO), fig14_pairs.panel("b", B, 10, TWO)


# the data


@pytest.mark.parametrize("key", PAPER)
def test_a_published_number_is_stated_by_its_sentence(key):
    number = PAPER[key]
    assert number.printed in number.sentence
    printed = float(re.search(r"[0-9.]+", number.printed)[0])
    as_ratio = number.unit == "x" and number.printed.endswith("%")
    assert number.value == pytest.approx(1 + printed / 100 if as_ratio else printed)
    assert number.section and number.unit


def test_the_data_file_says_what_is_not_printed():
    raw = json.loads((resources.files("weft_papers") / "data" / "layerweaver.json").read_text("utf-8"))
    assert set(raw) == {"format", "paper", "not_printed", "numbers"} and raw["format"] == 1
    assert any("Fig. 14" in line for line in raw["not_printed"])


def test_the_distance_to_the_paper_is_said_in_words():
    assert beside(1.605, 1.6, "why") == "agrees within 1 %: why"
    assert beside(1.76, 1.6, "why") == "10.0 % above: why"
    assert beside(1.2, 1.6, "why") == "25.0 % below: why"


# the value types


def test_a_reproduction_is_ready_for_json(tmp_path):
    whole = Reproduction(
        "some-paper",
        (Row("Fig. 1", "speed", None, 2.0, "x", "not printed"),),
        (Table("t", ("a", "b"), (("1", "2"),)),),
        (Figure("a picture", tmp_path / "fig.png"),),
        {"seq_len": 16},
    )
    assert whole.figures == (tmp_path / "fig.png",)
    assert json.loads(json.dumps(whole.as_dict(), allow_nan=False)) == {
        "format": 1,
        "paper": "some-paper",
        "settings": {"seq_len": 16},
        "rows": [
            {"figure": "Fig. 1", "quantity": "speed", "paper": None, "ours": 2.0, "unit": "x", "why": "not printed"}
        ],
        "tables": [{"title": "t", "header": ["a", "b"], "rows": [["1", "2"]]}],
        "figures": [{"name": "a picture", "file": "fig.png"}],
    }


# the laboratory


def test_the_combinations_are_the_papers():
    assert len(PAIRS) == 16 and len(FOURS) == 9
    assert all(len(set(models)) == 4 and not {"RX", "BL"} & set(models) for models in FOURS)


def test_where_the_failsafe_fires_throughput_is_one():
    cold = Scene(device("nnpi-like"), 1)
    assert one_sided(cold, ("RN", "BB"))
    assert throughputs(cold, "layerweaver", 8, (), [("RN", "BB")]) == Throughputs((1.0,), (bound(cold, ("RN", "BB")),))


def test_two_stitched_pairs_share_the_time_equally():
    woven = [
        report_of_run(A, pair, "layerweaver", 8).stp
        for pair in (("IC", "BB"), ("MN", "XL"), ("IC", "XL"), ("MN", "BB"))
    ]
    assert fig19_scaling.stitched(A, ("IC", "MN", "BB", "XL"), 8) == max(mean(woven[:2]), mean(woven[2:]))


def test_the_idlest_window_is_found():
    # ten layers of 1 s, back to back but for a gap of 2 s after the sixth
    starts = [*range(6), *range(8, 12)]
    spans = [Span("m", i, "l", s - 0.5 if s else 0.0, float(s), float(s), s + 1.0, 0, 1) for i, s in enumerate(starts)]
    trace = Trace.from_spans(spans, ["m"], {"bandwidth_bytes_per_s": 1e9})
    start, end = fig17_timelines.idlest(trace, 4.0, 0.5)
    assert end == pytest.approx(start + 4.0) and start <= 6.0 and end >= 8.0
    assert fig17_timelines.Strip("s", trace, start, end).busy[0] == pytest.approx(0.5)
    assert fig17_timelines.Strip("s", trace, 0.0, 6.0).busy[0] == pytest.approx(1.0)


# the figures, on two pairs


def test_the_models_alone(tmp_path):
    for part in (
        table1_alone.table_one(PAPER),
        table1_alone.figure_3(PAPER, tmp_path, 16, "pipelined"),
        table1_alone.figure_4(tmp_path, 16, "pipelined"),
        table1_alone.layer_latencies(PAPER, 16, "pipelined"),
    ):
        check(part)


def test_a_bert_does_as_many_operations_per_byte_as_it_has_tokens():
    # two operations per weight and token, two bytes per weight; attention adds a little
    assert table1_alone.intensity(A, "BB") == pytest.approx(16, rel=0.02)


def test_the_figures_of_the_pairs(tmp_path, halves):
    for draw in (fig14_pairs.figure_14, fig14_pairs.sweep_picture, fig14_pairs.figure_15, fig14_pairs.figure_16):
        check(draw(PAPER, tmp_path, halves))


def test_unprinted_bars_say_so(tmp_path, halves):
    (table, _) = fig14_pairs.figure_14(PAPER, tmp_path, halves).tables
    assert table.header[-1] == "paper" and {row[-1] for row in table.rows} == {"not printed"}


def test_the_timelines(tmp_path):
    check(fig17_timelines.figure_17(tmp_path, A, 12))
    check(fig17_timelines.figure_18(tmp_path, B, 12))


def test_batches_and_four_models(tmp_path):
    check(fig19_scaling.figure_19(tmp_path, (A, B), 8, TWO))
    check(fig19_scaling.figure_20(PAPER, tmp_path, 16, "pipelined", 8, FOURS[:1]))


def test_the_sensitivities(tmp_path):
    check(sensitivity.sequence_length(PAPER, tmp_path, (A, B), 8, TWO))
    check(sensitivity.weight_loading(PAPER, tmp_path, (A, B), 8, TWO))
    check(sensitivity.cost_models(PAPER, tmp_path, (A, B), 8, TWO))
    check(sensitivity.weight_buffer(tmp_path, (A, B), 8, TWO))
    check(sensitivity.table_chunks(tmp_path, (A, B), 8))
    check(ours.near_the_bound(tmp_path, (A, B), 8, TWO))
    check(ours.small_buffer((A, B), 8, TWO[:1]))


def test_one_weight_row_per_cycle_makes_bert_compute_bound_on_the_memory_centric_npu():
    slow = A.on(weight_rows_per_cycle=1)
    assert one_sided(slow, ("MN", "BB")) and not one_sided(A, ("MN", "BB"))


# the whole


def test_a_reproduction_reports_its_steps_in_order(tmp_path):
    class Enough(Exception):
        pass

    seen: list[tuple[str, int]] = []

    def progress(name: str, done: int, total: int) -> None:
        seen.append((name, done))
        assert total > 15
        if done == 1:
            raise Enough

    with pytest.raises(Enough):
        PAPERS["layerweaver"](tmp_path, progress=progress)
    assert seen == [("Table I", 0), ("Fig. 3", 1)]


@pytest.mark.parametrize(
    ("bad", "message"), [({"seq_len": 0}, "seq_len = 0"), ({"queries": 3}, "queries = 3"), ({"cost": "guess"}, "guess")]
)
def test_impossible_settings_are_refused(tmp_path, bad, message):
    with pytest.raises(InputError, match=message):
        PAPERS["layerweaver"](tmp_path, **bad)


@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize("scene", [A, B], ids=str)
def test_with_a_quarter_of_the_buffer_weft_cuts_layers_and_reaches_97_percent_of_the_bound(scene, tokens):
    small = replace(scene, seq_len=tokens).on(weight_buffer_mib=12.0)
    assert geomean(throughputs(small, "weft", 24, (), CUT_PAIRS).fractions) >= 0.97


@pytest.mark.parametrize(("letter", "scene", "least"), [("a", A, 1.55), ("b", B, 1.50)])
def test_the_headline_numbers_of_figure_14(letter, scene, least):
    half = fig14_pairs.panel(letter, scene, 30)
    woven, fifo = half.stps("layerweaver"), half.stps("fifo")
    assert geomean(w / f for w, f in zip(woven, fifo, strict=True)) >= least
    assert mean(report.pe_utilisation for report in half.reports["layerweaver"]) >= 0.97
    assert geomean(woven) > geomean(half.stps("aimt"))
    fractions = np.array([report.fraction_of_bound for report in half.reports["weft"]])
    assert geomean(fractions) >= 0.995 and fractions.min() >= 0.985
    assert all(report.fraction_of_bound <= 1 for reports in half.reports.values() for report in reports)
