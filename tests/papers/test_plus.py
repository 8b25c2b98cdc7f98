"""Layerweaver+ reproduced: the published numbers are well-formed, and every part runs on a small part of its sweep."""

from __future__ import annotations

import json
import re
from importlib import resources
from itertools import pairwise

import pytest

from tests.papers.reproductions import check_whole
from weft.base.errors import InputError
from weft_papers import PAPERS
from weft_papers.base import published
from weft_papers.layerweaver_plus import fig5_throughput, fig6_tails, lab, reproduce, sensitivity
from weft_papers.layerweaver_plus.lab import BASELINE, PAIRS, PLUS, PRECISE, RATIOS, WOVEN, StreamPair

PAPER = published("layerweaver-plus")
SHORT = StreamPair(("MN", "BL"), duration_s=0.6)


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """A new process would load the compiled loops again, which takes longer than these searches."""
    monkeypatch.setattr(lab.os, "cpu_count", lambda: 1)


# the data


@pytest.mark.parametrize("key", PAPER)
def test_a_published_number_is_stated_by_its_sentence(key):
    number = PAPER[key]
    assert number.printed in number.sentence
    assert number.value == float(re.search(r"[0-9.]+", number.printed)[0])
    assert number.section


def test_the_data_file_says_what_is_not_printed():
    raw = json.loads((resources.files("weft_papers") / "data" / "layerweaver-plus.json").read_text("utf-8"))
    assert set(raw) == {"format", "paper", "not_printed", "numbers"} and raw["format"] == 1
    assert any("Fig. V.5" in line for line in raw["not_printed"])


# the laboratory


def test_the_sweep_is_the_papers():
    assert len(PAIRS) == 9 and len(RATIOS) == 13
    assert RATIOS[0] == (64, 1) and RATIOS[6] == (1, 1) and RATIOS[-1] == (1, 64)
    assert all(a[0] / a[1] == 2 * b[0] / b[1] for a, b in pairwise(RATIOS))


def test_a_scene_is_the_papers_workload():
    load = StreamPair(("RN", "BB"), (4.0, 1.0)).workload(1000.0)
    assert [stream.model for stream in load.stream] == ["resnet50", "bert-base"]
    assert load.rates == (200.0, 800.0)
    assert [stream.deadline_ms for stream in load.stream] == [
        PAPER["deadline_vision"].value, PAPER["deadline_language"].value,
    ]  # fmt: skip


def test_the_device_is_the_papers():
    npu = lab.device(lab.DEVICE)
    assert 2 * npu.macs_per_s / 1e12 == PAPER["peak"].value
    assert npu.bandwidth_gb_s == PAPER["bandwidth"].value


def test_at_capacity_the_busier_resource_has_exactly_a_second_of_work_per_second():
    scene = StreamPair(("RN", "BB"), (1.0, 3.0))
    rate = lab.capacity(scene)
    priced = lab.case(scene, rate)
    busy = {"total_compute": 0.0, "total_fetch": 0.0}
    for requests, term in zip(priced.workload.rates, priced.terms, strict=True):
        program = priced.setting.programs[term.programs + 15]
        for resource in busy:
            busy[resource] += requests / 16 * getattr(program, resource) * priced.clock.tick_s
    assert max(busy.values()) == pytest.approx(1.0)


def test_a_threshold_is_found_from_either_side():
    for start in (0.1, 100.0):
        found = fig6_tails._threshold(lambda rate: rate >= 7.0, start)
        assert 7.0 <= found <= 7.0 * 1.01


# the figures, reduced


def test_sustainable_throughput_of_one_pair_at_three_ratios(tmp_path):
    found = fig5_throughput.sweep(SHORT, pairs=(("MN", "BL"),), ratios=((16.0, 1.0), (1.0, 1.0), (1.0, 16.0)))
    check_whole(fig5_throughput.figure_5(tmp_path, found))
    assert min(found.over(WOVEN, BASELINE)) >= 0.99
    assert min(found.over(PLUS, PRECISE)) >= 0.97
    assert found.over(WOVEN, BASELINE)[1] > 1.5


def test_tail_latency_where_the_baseline_misses_half(tmp_path):
    found = fig6_tails.panels(PAPER, SHORT, None, fig6_tails.PANELS[1:])
    check_whole(fig6_tails.figure_6(PAPER, tmp_path, found))
    for panel in found:
        assert panel.baseline_breaks.runs_of[BASELINE].worst >= 0.5
        assert panel.baseline_breaks.runs_of[PLUS].worst <= 0.01
        assert panel.plus_sustains.runs_of[PLUS].worst <= 0.01


def test_deadlines_of_one_combination(tmp_path):
    study = fig5_throughput.study(SHORT, None, fig5_throughput.COMBINATIONS[2:3], (15.0, 30.0), (130.0,))
    check_whole(fig5_throughput.figure_7(tmp_path, study))
    slack, default = (
        fig5_throughput.DeadlineStudy(study.bases, (30.0,), (), {}).varied(study.bases[0], 0)[0],
        study.bases[0],
    )
    assert study.answers[slack, BASELINE].rate > 1.5 * study.answers[default, BASELINE].rate


def test_assumptions_are_varied(tmp_path):
    check_whole(sensitivity.batching(tmp_path, SHORT, None, (2.0,), (8, 16)))
    check_whole(sensitivity.sequence_length(tmp_path, SHORT, None, (16,)))
    check_whole(sensitivity.stretch(tmp_path, SHORT, None, (100, 300), sensitivity.STRETCHED[1:2]))


# the whole


def test_the_paper_is_registered():
    assert PAPERS["layerweaver-plus"] is reproduce


@pytest.mark.parametrize(("wrong", "said"), [({"cost": "maestro"}, "pipelined"), ({"queries": 1}, "at least 8")])
def test_settings_it_cannot_use_are_refused(tmp_path, wrong, said):
    with pytest.raises(InputError, match=said):
        reproduce(tmp_path, **wrong)
