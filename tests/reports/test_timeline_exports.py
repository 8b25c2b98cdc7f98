"""Perfetto files, pictures and pages of a trace: complete, right in times and bytes, and safe with any name."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.image import imread

from tests.reports.examples import CAPACITY, REPORT, alternating, page_data
from weft.base.errors import InputError
from weft.devices import Npu, parse_npu
from weft.devices.costs.layer_costs import LayerCost, Profile
from weft.engine.policies import POLICIES
from weft.reports.page import PALETTE, json_ready
from weft.reports.timeline import READABLE_SPANS, draw_timeline, readable_end_s
from weft.reports.trace import Occupancy, Span, Trace, occupancy
from weft.reports.trace_exports import DRAM_CHANNEL, PE_ARRAY, model_colours, write_html, write_perfetto
from weft.simulation import Run, simulate
from weft.workloads import Saturated


def two_layers() -> Trace:
    """One query of two layers that touch: 2 us and 1 us of fetch, 3 us and 4 us of compute."""
    spans = [
        Span("net", 0, "first", 0.0, 2e-6, 2e-6, 5e-6, 0, 1_000_000),
        Span("net", 0, "second", 2e-6, 3e-6, 5e-6, 9e-6, 0, 500_000),
    ]
    return Trace.from_spans(spans, ["net"])


def waiting() -> Trace:
    """At a byte per ns into 1000 bytes: the second fetch finds room for 400 and waits for the first compute."""
    spans = [
        Span("net", 0, "first", 0.0, 600e-9, 600e-9, 2600e-9, 0, 600),
        Span("net", 0, "second", 600e-9, 2900e-9, 2900e-9, 3000e-9, 0, 700),
    ]
    return Trace.from_spans(spans, ["net"], {"weight_buffer_bytes": 1000, "bandwidth_bytes_per_s": 1e9})


def small_npu(bandwidth_gb_s: float = 10.0) -> Npu:
    raw = {
        "name": "small",
        "bandwidth_gb_s": bandwidth_gb_s,
        "weight_buffer_mib": 1.0,
        "activation_buffer_mib": 1.0,
        "clock_mhz": 1000.0,
        "array_rows": 8,
        "array_columns": 8,
        "weight_rows_per_cycle": 8,
        "vector_bytes_per_cycle": 64.0,
    }
    return parse_npu(raw, "small")


def simulated(policy: str, seed: int = 0, npu: Npu | None = None, rounds: int = 20) -> Run:
    """Two models of random layers, one long in compute and one in fetch; some layers outgrow the buffer."""
    npu, draw = npu or small_npu(), random.Random(seed)
    profiles = []
    for model, per_byte_s in (("conv", 3.0), ("gemm", 0.3)):
        layers = []
        for number in range(draw.randint(2, 8)):
            size = draw.choice((1, 3_000, 200_000, 700_000, 1_048_576, 1_500_000)) + draw.randrange(2_000)
            compute_s = draw.uniform(0, 2 * per_byte_s) * size / npu.bandwidth_bytes_per_s
            layers.append(LayerCost(f"{model}{number}", compute_s, size))
        profiles.append(Profile(model, npu.name, 1, tuple(layers)))
    return simulate(profiles, npu, policy, Saturated(rounds))


def nothing() -> Trace:
    return Trace.from_spans([], [])


def events(trace: Trace, folder: Path, **wanted: Any) -> list[dict[str, Any]]:
    write_perfetto(trace, folder / "trace.json")
    read = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in read if all(event.get(key) == value for key, value in wanted.items())]


def bars(figure: Figure) -> int:
    return sum(
        len(collection.get_paths())
        for collection in figure.axes[0].collections
        if isinstance(collection, PolyCollection)
    )


def texts(figure: Figure) -> list[str]:
    """What is written in and beside the lanes."""
    return [text.get_text() for text in figure.axes[0].texts]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


# Weight buffer


def points_ns(buffer: Occupancy) -> list[tuple[int, int, int]]:
    columns = (np.rint(buffer.time_s * 1e9), np.rint(buffer.before), np.rint(buffer.after))
    return [(int(at), int(before), int(after)) for at, before, after in zip(*columns, strict=True)]


def test_bytes_arrive_at_the_bandwidth_and_wait_for_space_when_the_buffer_is_full() -> None:
    buffer = occupancy(waiting())
    assert points_ns(buffer) == [
        (0, 0, 0),
        (1000, 1000, 1000),
        (2600, 1000, 400),
        (2900, 700, 700),
        (3000, 700, 0),
    ]
    assert buffer.stalls.span.tolist() == [1]
    assert buffer.stalls.start_s.tolist() == pytest.approx([1000e-9])
    assert buffer.stalls.end_s.tolist() == [2600e-9]
    assert buffer.transfers.span.tolist() == [0, 1, 1]
    assert buffer.transfers.per_span_s(2).tolist() == pytest.approx([600e-9, 700e-9])


@pytest.mark.parametrize("missing", ["weight_buffer_bytes", "bandwidth_bytes_per_s"])
@pytest.mark.parametrize("value", [None, 0, -1.0, "fast", float("inf")])
def test_without_bandwidth_and_capacity_bytes_arrive_evenly_over_the_fetch(missing: str, value: Any) -> None:
    whole = waiting()
    trace = Trace.from_spans(whole.spans, whole.streams, {**whole.settings, missing: value})
    buffer = occupancy(trace)
    assert len(buffer.stalls.span) == 0
    assert points_ns(buffer)[:3] == [(0, 0, 0), (600, 600, 600), (2600, 1209, 609)]  # 2000 of 2300 ns of 700 bytes


def test_a_fetch_that_took_longer_for_another_reason_is_not_called_stalled() -> None:
    span = Span("net", 0, "slow", 0.0, 900e-9, 900e-9, 1000e-9, 0, 300)
    buffer = occupancy(Trace.from_spans([span], ["net"], waiting().settings))
    assert len(buffer.stalls.span) == 0
    assert points_ns(buffer) == [(0, 0, 0), (900, 300, 300), (1000, 300, 0)]


def test_a_fetch_that_takes_no_time_is_a_jump() -> None:
    span = Span("net", 0, "given", 1e-6, 1e-6, 1e-6, 2e-6, 0, 300)
    assert points_ns(occupancy(Trace.from_spans([span], ["net"]))) == [(1000, 0, 300), (2000, 300, 0)]


@pytest.mark.parametrize("bandwidth_gb_s", [10.0, 0.013])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_buffer_of_a_simulated_run_is_never_exceeded_and_every_fetch_ends_on_time(
    policy: str, bandwidth_gb_s: float
) -> None:
    stalled = 0
    for seed in (1, 2, 3):
        run = simulated(policy, seed, small_npu(bandwidth_gb_s))
        trace, buffer = run.trace, occupancy(run.trace)
        capacity, bandwidth = trace.settings["weight_buffer_bytes"], trace.settings["bandwidth_bytes_per_s"]
        levels = np.concatenate([buffer.before, buffer.after])
        assert levels.max() <= capacity + 1 and levels.min() >= -1 and abs(buffer.after[-1]) <= 1
        # What a fetch's stalls leave is its transfer, so with them it ends when the trace says.
        moved_s = buffer.transfers.per_span_s(len(trace))
        assert np.abs(moved_s - trace.weight_bytes / bandwidth).max() < 1e-9
        assert moved_s.sum() / trace.makespan_s == pytest.approx(run.report.dram_utilisation, rel=1e-6)
        # The buffer is full all through a stall, which ends when a compute does.
        for edge_s in (buffer.stalls.start_s, buffer.stalls.end_s):
            at = np.searchsorted(buffer.time_s, edge_s - 1e-12)
            assert np.abs(buffer.before[at] - capacity).max(initial=0) <= 1
        assert np.isin(buffer.stalls.end_s, trace.compute_end_s).all()
        stalled += len(buffer.stalls.span)
    assert stalled or policy == "double-buffer"


def test_a_fetch_held_back_on_purpose_is_idle_time_and_no_stall() -> None:
    layers = tuple(LayerCost(f"layer{number}", 5e-5, 100_000) for number in range(6))
    run = simulate([Profile("conv", "small", 1, layers)], small_npu(), "double-buffer", Saturated(5))
    buffer = occupancy(run.trace)
    assert len(buffer.stalls.span) == 0
    assert max(buffer.before) == pytest.approx(200_000)
    assert buffer.transfers.per_span_s(len(run.trace)).sum() < 0.5 * run.trace.makespan_s


def test_ten_thousand_spans_that_stall_never_overfill_the_buffer() -> None:
    layers = tuple(LayerCost(f"layer{number}", 6e-5, 300_000) for number in range(10))
    trace = simulate([Profile("conv", "small", 1, layers)], small_npu(), "fifo", Saturated(1_000)).trace
    buffer = occupancy(trace)
    assert len(buffer.stalls.span) > 9_000 and buffer.before.max() <= trace.settings["weight_buffer_bytes"] + 1


# Perfetto


def test_perfetto_has_an_event_for_each_fetch_that_takes_time_and_for_each_compute(tmp_path: Path) -> None:
    trace = alternating(3)
    fetches = events(trace, tmp_path, ph="X", tid=DRAM_CHANNEL)
    computes = events(trace, tmp_path, ph="X", tid=PE_ARRAY)
    assert len(fetches) == int((trace.weight_bytes > 0).sum()) < len(trace)
    assert len(computes) == len(trace)
    first = next(span for span in trace.spans if span.weight_bytes)
    assert fetches[0]["args"] == {
        "model": "conv",
        "query": 0,
        "layer": first.layer,
        "bytes": first.weight_bytes,
    }


def test_perfetto_times_are_microseconds_and_spans_that_touch_do_not_overlap(tmp_path: Path) -> None:
    computes = events(two_layers(), tmp_path, ph="X", tid=PE_ARRAY)
    assert [(event["ts"], event["dur"]) for event in computes] == [(2.0, 3.0), (5.0, 4.0)]
    for tid in (DRAM_CHANNEL, PE_ARRAY):
        lane = sorted(events(alternating(20), tmp_path, ph="X", tid=tid), key=lambda event: event["ts"])
        ends = [round((event["ts"] + event["dur"]) * 1000) for event in lane]
        assert all(end <= round(event["ts"] * 1000) for end, event in zip(ends, lane[1:], strict=False))


def test_perfetto_shows_each_query_once_on_the_track_of_its_stream(tmp_path: Path) -> None:
    trace = alternating(4, models=("conv", "gemm", "conv"))
    begins, ends = events(trace, tmp_path, ph="b"), events(trace, tmp_path, ph="e")
    assert {event["name"] for event in begins} == {"stream 0: conv", "stream 1: gemm", "stream 2: conv"}
    assert len({event["id"] for event in begins}) == len(begins) == len(ends) == 12
    last = max(event["ts"] for event in ends)
    assert last == pytest.approx(trace.makespan_s * 1e6, abs=1e-3)


def test_perfetto_counts_the_buffer_in_megabytes(tmp_path: Path) -> None:
    counts = events(two_layers(), tmp_path, ph="C", name="weight buffer (MB)")
    samples = [(event["ts"], event["args"]["value"]) for event in counts]
    assert samples == [(0.0, 0.0), (3.0, 1.5), (5.0, 1.5), (5.0, 0.5), (9.0, 0.5), (9.0, 0.0)]


def test_perfetto_says_how_long_a_fetch_stalled(tmp_path: Path) -> None:
    fetches = events(waiting(), tmp_path, ph="X", tid=DRAM_CHANNEL)
    assert [event["args"].get("stalled_us") for event in fetches] == [None, 1.6]
    assert all("stalled_us" not in event["args"] for event in events(waiting(), tmp_path, ph="X", tid=PE_ARRAY))


def test_perfetto_files_are_the_same_bytes_each_time_and_carry_the_settings(tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        write_perfetto(alternating(2), tmp_path / name)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    settings = json.loads((tmp_path / "one.json").read_text())["otherData"]
    assert settings == {"device": "npu", "policy": "turns", "weight_buffer_bytes": CAPACITY}


def test_perfetto_settings_of_any_kind_make_a_valid_file(tmp_path: Path) -> None:
    trace = Trace.from_spans([], [], {"at": Path("x"), "share": float("nan"), "mix": [1, 2], "none": None})
    write_perfetto(trace, tmp_path / "trace.json")
    settings = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert settings == {"at": '"x"', "share": "NaN", "mix": "[1, 2]", "none": "null"}


def test_what_json_cannot_say_becomes_text() -> None:
    assert json_ready({"at": Path("x"), "share": float("nan"), "n": (np.int64(3), np.float32(0.5), True)}) == {
        "at": "x",
        "share": "nan",
        "n": [3, 0.5, True],
    }


# Pictures


def test_a_picture_has_one_bar_per_fetch_and_compute_of_its_window(tmp_path: Path) -> None:
    trace = alternating(3)
    whole = draw_timeline(trace, tmp_path / "whole.png", end_s=trace.makespan_s)
    grounds = 2  # the lanes themselves are patches, not collections
    assert bars(whole) == len(trace) + int((trace.weight_bytes > 0).sum())
    assert len(whole.axes[0].patches) == grounds
    half = draw_timeline(trace, tmp_path / "half.png", start_s=trace.makespan_s / 2, end_s=trace.makespan_s)
    assert 0 < bars(half) < bars(whole)


def test_a_png_is_a_picture_with_colours(tmp_path: Path) -> None:
    draw_timeline(alternating(3), tmp_path / "timeline.png", title="turns")
    pixels = imread(tmp_path / "timeline.png")
    assert pixels.shape[0] > 500 and pixels.shape[1] > 1500
    blue = np.array([int(PALETTE[0][at : at + 2], 16) for at in (1, 3, 5)]) / 255
    assert (np.abs(pixels[..., :3] - blue).max(axis=-1) < 0.01).mean() > 0.02


def test_an_svg_holds_its_bars_and_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        figure = draw_timeline(alternating(2), tmp_path / name, end_s=1.0)
    drawn = (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert drawn == (tmp_path / "two.svg").read_text(encoding="utf-8")
    assert drawn.count("<path") + drawn.count("<use") > bars(figure)


@pytest.mark.parametrize("name", ["timeline.pdf", "timeline", "timeline.html"])
def test_a_picture_of_another_kind_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"\.png or \.svg"):
        draw_timeline(two_layers(), tmp_path / name)


@pytest.mark.parametrize(("start_s", "end_s"), [(1.0, 2.0), (2e-6, 2e-6), (5e-6, 1e-6)])
def test_a_window_without_anything_in_it_is_refused(tmp_path: Path, start_s: float, end_s: float) -> None:
    with pytest.raises(InputError, match="nothing to draw"):
        draw_timeline(two_layers(), tmp_path / "timeline.png", start_s=start_s, end_s=end_s)


def test_a_chosen_window_ends_with_the_third_query_or_with_what_can_be_read() -> None:
    short = alternating(10)
    third = max(span.compute_end_s for span in short.spans if span.query == 2)
    assert readable_end_s(short) == pytest.approx(third)
    deep = alternating(5, layers=READABLE_SPANS)
    assert np.count_nonzero(deep.fetch_start_s < readable_end_s(deep)) <= READABLE_SPANS


def test_ten_thousand_spans_are_drawn_as_shares_that_fill_what_was_busy(tmp_path: Path) -> None:
    trace = alternating(900)
    assert len(trace) > 10_000
    figure = draw_timeline(trace, tmp_path / "timeline.png", end_s=trace.makespan_s)
    assert bars(figure) == 4  # two models on two lanes
    busy = (trace.compute_end_s - trace.compute_start_s).sum() / trace.makespan_s
    assert f"{100 * busy:.1f} %\nbusy" in texts(figure)


def test_a_picture_shows_stalls_apart_and_does_not_count_them_as_busy(tmp_path: Path) -> None:
    trace = waiting()
    figure = draw_timeline(trace, tmp_path / "timeline.png", end_s=trace.makespan_s)
    assert legend(figure) == ["net", "stalled: buffer full"]
    assert bars(figure) == 3 + 2 + 1  # transfers, computes, the stall
    assert f"{100 * 1300 / 3000:.1f} %\nbusy" in texts(figure)
    early = draw_timeline(trace, tmp_path / "early.png", end_s=900e-9)
    assert legend(early) == ["net"] and "100.0 %\nbusy" in texts(early)


@pytest.mark.parametrize("rounds", [20, 1500])
def test_the_busy_share_of_a_whole_picture_is_the_one_of_the_report(tmp_path: Path, rounds: int) -> None:
    run = simulated("fifo", seed=1, rounds=rounds)
    figure = draw_timeline(run.trace, tmp_path / "timeline.png", end_s=run.report.makespan_s)
    assert texts(figure)[0] == f"{100 * run.report.dram_utilisation:.1f} %\nbusy"
    assert legend(figure)[-1] == "stalled: buffer full"


def test_the_curve_of_a_picture_is_cut_at_its_window(tmp_path: Path) -> None:
    figure = draw_timeline(waiting(), tmp_path / "timeline.png", start_s=500e-9, end_s=2700e-9)
    times, held = figure.axes[1].lines[0].get_data()
    assert times == pytest.approx([0.5, 1.0, 1.0, 2.6, 2.6, 2.7])  # us
    assert held * 1e6 == pytest.approx([500, 1000, 1000, 1000, 400, 500])


# Pages


def test_a_page_needs_no_network_and_names_each_layer_once(tmp_path: Path) -> None:
    trace = alternating(30, models=("conv", "gemm", "conv"))
    write_html(trace, tmp_path / "page.html", report=REPORT)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "http://" not in page and "https://" not in page
    assert not re.search(r"<(link|img|iframe)\b|\bsrc=|@import|\bfetch\(", page)
    for name in {span.layer for span in trace.spans}:
        assert page.count(f'"{name}"') == 1


def test_a_page_holds_every_span_to_the_nanosecond(tmp_path: Path) -> None:
    trace = alternating(3)
    write_html(trace, tmp_path / "page.html")
    data = page_data((tmp_path / "page.html").read_text(encoding="utf-8"))
    columns = {name: np.array(column) for name, column in data["columns"].items()}
    start = np.cumsum(columns["start"])
    end = start + columns["fetch"] + columns["wait"] + columns["compute"]
    assert start.tolist() == np.rint(trace.fetch_start_s * 1e9).tolist()
    assert end.tolist() == np.rint(trace.compute_end_s * 1e9).tolist()
    kinds = [data["kinds"][kind] for kind in columns["kind"]]
    assert [data["layers"][layer] for layer, _ in kinds] == [span.layer for span in trace.spans]
    assert [size for _, size in kinds] == trace.weight_bytes.tolist()
    assert [data["models"][data["streams"][stream]] for stream in columns["stream"]] == [
        span.model for span in trace.spans
    ]


def test_a_page_holds_the_curve_of_the_buffer_and_the_stalls(tmp_path: Path) -> None:
    write_html(waiting(), tmp_path / "page.html")
    data = page_data((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert data["buffer"] == {
        "time": [0, 1000, 1600, 300, 100],
        "rise": [0, 1000, 0, 300, 0],
        "fall": [0, 0, 600, 0, 700],
    }
    assert data["stalls"] == {"span": [1], "start": [1000], "length": [1600]}


def test_the_buffer_of_a_page_never_exceeds_its_capacity(tmp_path: Path) -> None:
    trace = simulated("layerweaver").trace
    write_html(trace, tmp_path / "page.html")
    buffer = page_data((tmp_path / "page.html").read_text(encoding="utf-8"))["buffer"]
    rise, fall = np.array(buffer["rise"]), np.array(buffer["fall"])
    before = np.cumsum(rise) - np.cumsum(fall) + fall
    assert before.max() == trace.settings["weight_buffer_bytes"]
    assert rise.sum() == fall.sum() == trace.weight_bytes.sum()


@pytest.mark.parametrize("name", ["</script><b>", "<!--<script>", "a\u2028b", "&lt;", "/*weft-data*/"])
def test_a_page_survives_any_name(tmp_path: Path, name: str) -> None:
    trace = alternating(2, models=(name, "other"))
    write_html(trace, tmp_path / "page.html", report={"streams": [{"model": name}]})
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert name not in page or (name.isascii() and "<" not in name)
    assert page.count("</script>") == 2
    assert page_data(page)["models"][0] == name


def test_pages_and_perfetto_files_of_an_empty_trace_are_valid(tmp_path: Path) -> None:
    write_html(nothing(), tmp_path / "page.html")
    assert page_data((tmp_path / "page.html").read_text(encoding="utf-8"))["columns"]["start"] == []
    assert events(nothing(), tmp_path, ph="X") == []


def test_a_path_that_cannot_be_written_is_an_input_error(tmp_path: Path) -> None:
    for write in (write_html, write_perfetto):
        with pytest.raises(InputError, match="cannot write"):
            write(two_layers(), tmp_path / "no such folder" / "out")
    with pytest.raises(InputError, match="cannot write"):
        draw_timeline(two_layers(), tmp_path / "no such folder" / "out.png")


def test_streams_of_one_model_share_its_colour() -> None:
    assert model_colours(alternating(1, models=("a", "b", "a"))) == {"a": PALETTE[0], "b": PALETTE[1]}
