"""What all pages share, the page that compares policies, names in words, and links between pages of one folder."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from importlib.resources import files
from pathlib import Path

import pytest

from tests.reports.examples import NASTY, alternating, page_data, policy_report
from tests.reports.examples import parallel_outcome as outcome
from weft.reports.page import PALETTE, whole_page
from weft.reports.trace_exports import write_html
from weft.reports.words import group_meaning, layer_meaning
from weft.serving import pages
from weft.simulation import comparison_page
from weft.simulation.comparison_page import NONE, write_comparison_page, write_request_comparison_page
from weft.simulation.request_report import RequestReport, RequestStream
from weft_map.pages.page import write_mapping_page
from weft_tune.numbers.format import parse_format
from weft_tune.pages.page import format_meaning

TEMPLATES = {
    "timeline.html": "weft.reports",
    "comparison.html": "weft.simulation",
    "mapping.html": "weft_map.pages",
    "tuning.html": "weft_tune.pages",
    "plan.html": "weft.planning",
    "placement.html": "weft_cluster.placing",
}
"""Template -> the package that has it."""
FC = "fully connected layer: a matrix product"


def requests(policy: str, missed: float) -> RequestReport:
    times_s = (5e-3, 4e-3, 6e-3, 8e-3, 9e-3, 9.5e-3)
    stream = RequestStream("net", 0.01, 100.0, 50, 50, 0, 0, 5, missed, 1.0, 3, *times_s, ())
    silent = replace(stream, model="still", p99_s=None)
    return RequestReport("host", policy, "drop", 1.0, 0.9, 1.0, missed, missed, 0.0, 0.0, 1.0, 7, (stream, silent), 0.6)


# What is shared


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_page_has_the_shared_style_and_script_and_asks_nobody(template: str) -> None:
    text = whole_page(template, TEMPLATES[template])
    assert "--model-0: " in text and "function timeAxis(" in text and "/*weft:" not in text
    assert not re.search(r"https?://|@import|url\(|\bfetch\(|innerHTML|document\.write|<link|<iframe", text)
    assert text.count("</script>") == text.count("<script") == 2
    assert f'<meta name="weft-page" content="{template.removesuffix(".html")}" data-beside="[]">' in text


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_table_that_is_wider_than_the_window_casts_a_shadow_where_it_goes_on(template: str) -> None:
    style = re.search(r"^\.scroll \{(.*?)^\}", whole_page(template, TEMPLATES[template]), re.MULTILINE | re.DOTALL)
    assert style and "overflow-x: auto" in style[1]
    assert style[1].count("local") == style[1].count("var(--panel)") == style[1].count("var(--edge)") == 2


def test_pages_of_the_server_have_the_same_colours() -> None:
    colours = files("weft.reports").joinpath("colours.css").read_text("utf-8").rstrip()
    served = (bytes(page.body).decode() for page in (pages.dashboard(), pages.docs()))
    for page in (whole_page("timeline.html"), *served):
        assert page.count(colours) == 1


def test_models_have_a_colour_for_light_and_one_for_dark() -> None:
    colours = files("weft.reports").joinpath("colours.css").read_text("utf-8")
    found = re.findall(r"--model-(\d): (#[0-9a-f]{6});", colours)
    assert tuple(colour for _, colour in found[:8]) == PALETTE
    assert [int(place) for place, _ in found] == [*range(8), *range(8)]
    assert len({colour for _, colour in found}) == 16


# Policies side by side


def test_a_comparison_holds_every_policy_with_its_figures_and_its_timeline(tmp_path: Path) -> None:
    runs = [(policy_report("fifo", 1.0), alternating(2)), (policy_report("weft", 1.5, "in pieces"), alternating(3))]
    write_comparison_page(tmp_path / "page.html", runs, title="conv + gemm")
    data = page_data((tmp_path / "page.html").read_text("utf-8"))
    assert data["policies"] == ["fifo", "weft"] and data["best"] == 1 and data["models"] == ["conv", "gemm"]
    heads = [head[0] for head in data["table"]["heads"]]
    assert dict(zip(heads, data["table"]["rows"][1], strict=True)) == {
        "Policy": "weft", "STP": "1.500", "Of the bound": "75.0 %", "ANTT": NONE, "Worst slowdown": NONE,
        "PE array busy": "50.0 %", "DRAM busy": "75.0 %", "Queries": "4 / 0",
    }  # fmt: skip
    charts = {chart["title"]: chart for chart in data["charts"]}
    assert charts["STP"]["bars"] == [[[-1, 1.0]], [[-1, 1.5]]] and charts["STP"]["limit"] == 2.0
    assert charts["Slowdown by model"]["bars"] == [[[0, 2.0], [1, None]]] * 2
    assert [len(trace["columns"]["start"]) for trace in data["traces"]] == [24, 36]
    assert data["verdict"] == "weft has the highest STP"
    starved = "no query of gemm was completed"
    assert data["remarks"][1:] == [f"fifo: {starved}", "weft: in pieces", f"weft: {starved}"]


def test_a_comparison_shows_pieces_where_one_policy_chose_them(tmp_path: Path) -> None:
    alike = [replace(policy_report("fifo", 1.25), pieces=4)]
    write_comparison_page(
        tmp_path / "page.html", [(policy_report("fifo", 1.0), alternating(1))], title="t", in_pieces=alike
    )
    table = page_data((tmp_path / "page.html").read_text("utf-8"))["table"]
    assert (table["heads"][2][0], table["rows"][0][2]) == ("STP in 1/4", "1.250")


def test_a_long_timeline_ends_early_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_page, "MOST_SPANS", 10)
    write_comparison_page(tmp_path / "page.html", [(policy_report("fifo", 1.0), alternating(2))], title="t")
    (trace,) = page_data((tmp_path / "page.html").read_text("utf-8"))["traces"]
    assert len(trace["columns"]["start"]) == 10 and trace["left_out"] == 14


def test_a_comparison_of_requests_shows_what_was_missed(tmp_path: Path) -> None:
    write_request_comparison_page(
        tmp_path / "page.html", [requests("fifo", 0.2), requests("edf", 0.05)], title="w.toml"
    )
    data = page_data((tmp_path / "page.html").read_text("utf-8"))
    assert data["best"] == 1 and data["traces"] == []
    assert data["table"]["rows"][1] == ["edf", "5.0 %", "5.0 %", "5.0 %", "8.0 ms of 10", NONE, "60.0 %"]
    assert data["charts"][1]["bars"][0] == [[0, pytest.approx(0.8)], [1, None]]


def test_names_cannot_break_out_of_a_comparison(tmp_path: Path) -> None:
    runs = [(policy_report(NASTY, 1.0, NASTY), alternating(1, models=(NASTY, "b")))]
    write_comparison_page(tmp_path / "page.html", runs, title=NASTY)
    text = (tmp_path / "page.html").read_text("utf-8")
    assert text.count("</script>") == 2 and page_data(text)["policies"] == [NASTY]


# Names in words


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("EXP 2 4", "2 bits, a power of two: zero and ±0.125 (1 bit of exponent, bias 4)"),
        ("EXP 4 7", "4 bits, powers of two: zero and ±0.01562 to 1 (3 bits of exponent, bias 7)"),
        ("FIXED 4 0", "4 bits, fixed point: a sign, 3 bits of magnitude in steps of 0.25, up to ±1.75"),
        ("BIN 1", "1 bit: plus or minus 0.5"),
        ("TWOS 8 4", "8 bits in two's complement: -8 to 7.938 in steps of 0.0625"),
    ],
)
def test_a_format_says_which_numbers_it_has(name: str, meaning: str) -> None:
    assert format_meaning(parse_format(name)) == meaning


def test_floats_say_their_fields() -> None:
    assert format_meaning(parse_format("FLOAT 16")).startswith(
        "16 bits, floating point, as in IEEE 754: a sign, 5 bits"
    )
    assert "as in" not in format_meaning(parse_format("FLOAT 8"))


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("layer1.0.conv2", "convolution"),
        ("block3.3x3.reduce", "1x1 convolution, to fewer or more channels"),
        ("mixed.branch7x7", "convolution with a window of 7 by 7"),
        ("encoder.3.attention.query", "attention: a matrix product that makes its queries, keys or values"),
        ("a.zzz[2/3]", "part 2 of 3 of a layer larger than its share of the weight buffer"),
        ("fc[1/2]", f"part 1 of 2 of a layer larger than its share of the weight buffer: {FC}"),
        ("conv1..conv3", "all layers from conv1 to conv3"),
        ("zzz", ""),
    ],
)  # fmt: skip
def test_a_layer_says_what_it_does_as_far_as_its_name_tells(name: str, meaning: str) -> None:
    assert layer_meaning(name) == meaning


def test_a_group_says_which_layers_it_holds() -> None:
    assert group_meaning("conv1 .. relu3") == "the layers from conv1 to relu3, one after the other on one unit"
    assert group_meaning("0-9") == "layers 0 to 9 of the network, counted from 0, on one unit"
    assert group_meaning("fc") == "one layer: fully connected layer: a matrix product"
    assert "does not say" in group_meaning("g4")


def test_a_timeline_holds_the_meaning_of_its_layers(tmp_path: Path) -> None:
    write_html(alternating(1, models=("conv", "x")), tmp_path / "page.html")
    data = page_data((tmp_path / "page.html").read_text("utf-8"))
    told = {
        name: data["meanings"][place] if place >= 0 else ""
        for name, place in zip(data["layers"], data["meaning"], strict=True)
    }
    assert told["conv.layer0"] == "convolution" and told["x.layer0"] == ""


# Links between pages


def links(path: Path) -> list[list[str]]:
    found = re.search(r'data-beside="([^"]*)"', path.read_text("utf-8"))
    assert found is not None
    return list(json.loads(unescape(found[1])))


def test_pages_of_different_kinds_in_a_folder_link_to_each_other(tmp_path: Path) -> None:
    write_html(alternating(1), tmp_path / "a&b.html")
    assert links(tmp_path / "a&b.html") == []
    write_mapping_page(tmp_path / "map.html", [outcome()])
    assert links(tmp_path / "a&b.html") == [["Map: map", "map.html"]]
    assert links(tmp_path / "map.html") == [["Timeline: a&b", "a%26b.html"]]
    write_html(alternating(2), tmp_path / "later.html")
    assert links(tmp_path / "map.html") == [["Timeline: a&b", "a%26b.html"], ["Timeline: later", "later.html"]]
    assert links(tmp_path / "a&b.html") == [["Map: map", "map.html"]]
    assert len(page_data((tmp_path / "map.html").read_text("utf-8"))["outcomes"]) == 1


def test_other_files_beside_a_page_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "own.html").write_text("<p>mine</p>")
    (tmp_path / "bytes.html").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.html").mkdir()
    write_html(alternating(1), tmp_path / "page.html")
    assert links(tmp_path / "page.html") == []
    assert (tmp_path / "own.html").read_text() == "<p>mine</p>"
