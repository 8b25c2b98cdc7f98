"""Perfetto files, pictures and pages of a trace: complete, right in their times, and safe with any name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.image import imread

from weft.errors import InputError
from weft.reports.html import PALETTE, model_colours, write_html
from weft.reports.perfetto import DRAM_CHANNEL, PE_ARRAY, buffer_occupancy, json_ready, write_perfetto
from weft.reports.timeline import READABLE_SPANS, draw_timeline, readable_end_s
from weft.trace import Span, Trace

CAPACITY = 3_000_000
REPORT = {
    "stp": 1.7,
    "bound_stp": 1.8,
    "fraction_of_bound": 0.94,
    "antt": 1.6,
    "max_slowdown": 1.9,
    "pe_utilisation": np.float64(0.5),
    "dram_utilisation": float("nan"),
    "makespan_s": 0.01,
    "streams": [
        {
            "model": "conv",
            "queries": np.int64(2),
            "standalone_s": 1e-3,
            "mean_latency_s": 2e-3,
            "slowdown": 2.0,
        }
    ],
}


def alternating(queries: int, models: tuple[str, ...] = ("conv", "gemm"), layers: int = 6) -> Trace:
    """Streams take turns; fetches are serial, computes are serial and follow their fetch."""
    spans: list[Span] = []
    fetch_free_s = compute_free_s = 0.0
    for query in range(queries):
        for layer in range(layers):
            for stream, model in enumerate(models):
                # Stream 0 computes long, the others fetch long; each first layer has no weights.
                weight_bytes = 0 if layer == 0 else 100_000 * (1 + 9 * min(stream, 1))
                fetch_end_s = fetch_free_s + weight_bytes / 25e9
                start_s = max(fetch_end_s, compute_free_s)
                end_s = start_s + (30e-6 if stream == 0 else 7e-6)
                name = f"{model}.layer{layer}"
                spans.append(Span(model, query, name, fetch_free_s, fetch_end_s, start_s, end_s, stream, weight_bytes))
                fetch_free_s, compute_free_s = fetch_end_s, end_s
    return Trace.from_spans(spans, models, {"device": "npu", "policy": "turns", "weight_buffer_bytes": CAPACITY})


def two_layers() -> Trace:
    """One query of two layers that touch: 2 us and 1 us of fetch, 3 us and 4 us of compute."""
    spans = [
        Span("net", 0, "first", 0.0, 2e-6, 2e-6, 5e-6, 0, 1_000_000),
        Span("net", 0, "second", 2e-6, 3e-6, 5e-6, 9e-6, 0, 500_000),
    ]
    return Trace.from_spans(spans, ["net"])


def nothing() -> Trace:
    return Trace.from_spans([], [])


def events(trace: Trace, folder: Path, **wanted: Any) -> list[dict[str, Any]]:
    write_perfetto(trace, folder / "trace.json")
    read = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in read if all(event.get(key) == value for key, value in wanted.items())]


def page_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def bars(figure: Figure) -> int:
    return sum(
        len(collection.get_paths())
        for collection in figure.axes[0].collections
        if isinstance(collection, PolyCollection)
    )


# Weight buffer


def test_bytes_are_held_from_fetch_start_to_compute_end() -> None:
    times_ns, held = buffer_occupancy(two_layers())
    assert times_ns.tolist() == [0, 2_000, 5_000, 9_000]
    assert held.tolist() == [1_000_000, 1_500_000, 500_000, 0]


def test_a_layer_that_ends_as_another_is_fetched_frees_its_bytes_first() -> None:
    spans = [
        Span("a", 0, "x", 0.0, 1e-6, 1e-6, 2e-6, 0, 70),
        Span("a", 0, "y", 2e-6, 3e-6, 3e-6, 4e-6, 0, 70),
    ]
    times_ns, held = buffer_occupancy(Trace.from_spans(spans, ["a"]))
    assert list(zip(times_ns.tolist(), held.tolist(), strict=True)) == [(0, 70), (4_000, 0)]


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
    assert [event["args"]["value"] for event in counts] == [1.0, 1.5, 0.5, 0.0]


def test_perfetto_files_are_the_same_bytes_each_time_and_carry_the_settings(tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        write_perfetto(alternating(2), tmp_path / name)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert json.loads((tmp_path / "one.json").read_text())["otherData"]["policy"] == "turns"


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
    assert f"{100 * busy:.1f} %\nbusy" in {text.get_text() for text in figure.axes[0].texts}


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
