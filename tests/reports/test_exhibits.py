"""Pictures as data: where bars stand, what is written once, what the legend names."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from weft.reports.exhibits import Axis, Bars, Boxes, Curve, HeatMap, Panel, ReferenceLine, Strokes, Swatches, draw

INK = {"a": "#111111", "b": "#222222"}


def drawn(*panels, **layout):
    return draw("title", panels, size=(4, 3), **layout)


def names(legend):
    return [text.get_text() for text in legend.get_texts()]


def test_a_mean_stands_apart_and_strokes_meet_their_bars() -> None:
    bars = Bars(["x", "y", "geomean"], {"a": [1, 2, 1.5], "b": [2, 3, 2.5]}, INK)
    assert bars.places().tolist() == [0, 1, 2.5]
    axes = drawn(Panel([bars, Strokes(bars.places("b"), [2.1, 3.1, 2.6], bars.width)])).axes[0]
    middles = [patch.get_x() + patch.get_width() / 2 for patch in axes.patches[3:]]
    ends = [segment[:, 0] for segment in axes.collections[0].get_segments()]
    assert [sum(pair) / 2 for pair in ends] == pytest.approx(middles)


def test_lying_bars_go_from_top_to_bottom_and_say_their_words() -> None:
    axes = drawn(Panel([Bars(["x", "y"], {"a": [1, 2]}, INK, flat=True, words=["one", "two"])])).axes[0]
    assert [patch.get_width() for patch in axes.patches] == [1, 2] and axes.yaxis.get_inverted()
    assert [text.get_text() for text in axes.texts] == ["one", "two"]


def test_a_label_that_a_neighbour_has_is_written_once() -> None:
    panel = Panel([Curve([0, 1], [0, 1])], x=Axis(label="time"), y=Axis(label="speed"))
    axes = drawn(*[panel] * 4, columns=2).axes
    assert [one.get_ylabel() for one in axes] == ["speed", "", "speed", ""]
    assert [one.get_xlabel() for one in axes] == ["", "", "time", "time"]


def test_one_legend_names_what_the_panels_without_their_own_show() -> None:
    lone, own = (
        Panel([Bars(["x"], {"a": [1]}, INK)]),
        Panel([Curve([0], [0], "hidden"), Curve([0], [1], "too")], legend=True),
    )
    assert not drawn(lone).legends
    figure = drawn(lone, own, Panel([Curve([0], [0], "p"), Swatches({"q": "#333333"}), Curve([1], [1], "p")]))
    assert names(figure.legends[0]) == ["p", "q"] and names(figure.axes[1].get_legend()) == ["hidden", "too"]


def test_a_logarithmic_axis_says_plain_numbers() -> None:
    figure = drawn(Panel([Curve([1, 2], [0.5, 300])], y=Axis(scale="log")))
    figure.canvas.draw()
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    shown = [text.get_text() for text in axes.get_yticklabels() if low <= text.get_position()[1] <= high]
    assert shown == ["0.5", "1", "2", "5", "10", "20", "50", "100", "200"]


def test_words_in_a_heat_map_can_be_read_on_their_colour() -> None:
    panel = Panel([HeatMap(np.array([[0.0, 1.0]]), [["dark", "light"]])], x=Axis(names=["l", "r"]))
    texts = drawn(panel).axes[0].texts
    assert [text.get_color() for text in texts] == ["white", "#1f2933"]


def test_a_value_to_compare_with_is_named_in_the_margin_and_boxes_have_their_colours() -> None:
    boxes = Boxes([0, 2], [0, 0], [1, 1], [1, 2], ["#ff0000", "#00ff00"])
    axes = drawn(Panel([boxes, ReferenceLine(3, "peak")])).axes[0]
    assert axes.texts[0].get_text() == "peak" and axes.lines[0].get_ydata()[0] == 3
    assert axes.collections[0].get_facecolor()[1].tolist() == [0, 1, 0, 1]
    assert axes.collections[0].get_paths()[1].get_extents().bounds == (2, 0, 1, 2)


def test_panels_that_do_not_fill_the_last_row_leave_it_empty() -> None:
    panel = Panel([Curve([0], [0])])
    assert [axes.get_visible() for axes in drawn(panel, panel, panel, columns=2).axes] == [True, True, True, False]


def test_a_picture_is_described_without_matplotlib() -> None:
    code = "import sys; import weft.reports.exhibits; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
