"""Pictures as data: panels of marks, drawn in one style for all results.

A ``Panel`` has two ``Axis`` descriptions and marks: ``Bars``, ``Curve`` (points and steps too), ``Strokes``,
``ReferenceLine``, ``Shade``, ``Area``, ``HeatMap``, ``Boxes``, ``Texts``, ``Swatches``. ``draw`` makes a matplotlib
figure of panels row by row. If the panel to the left or below has the same label, it is written once; below all panels
is one legend.

A picture can be described without matplotlib, which is an extra; only ``draw`` imports it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from weft.reports.pictures import INK as INK
from weft.reports.pictures import MUTED as MUTED
from weft.reports.pictures import RULE as RULE

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure

Numbers = Sequence[float] | npt.NDArray[Any]
Dash = str | tuple[int, tuple[float, ...]]
Share = bool | Literal["none", "all", "row", "col"]
DASHED: Dash = (0, (4, 2))
"""Offset, and lengths of dash and gap, in line widths as matplotlib takes them."""
MEANS = ("geomean", "mean")
"""Labels of a last group of bars that is drawn at a distance from the others."""
MANY = 1e4
"""Ratio of the largest to the smallest value from which a logarithmic axis has ticks at powers of ten only."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis of a panel; by default limits and ticks follow from the data."""

    label: str = ""
    low: float | None = None
    high: float | None = None
    scale: Literal["linear", "log", "log2"] = "linear"
    ticks: Numbers | None = None
    names: Sequence[str] | None = None
    """Labels of the ticks; at 0, 1, 2 ... if no ticks are given."""
    slant: float = 0
    """Degrees by which the labels are rotated."""
    size: float | None = None
    """Font size of the labels in points."""
    falling: bool = False
    """Whether the axis is inverted: values decrease from left to right, or from bottom to top."""


PLAIN = Axis()


class Drawable(ABC):
    """A mark of a panel."""

    @abstractmethod
    def draw(self, axes: Axes) -> None:
        """Add the mark to *axes*."""


@dataclass(frozen=True)
class Panel:
    """A part of a figure: marks on two axes."""

    marks: Sequence[Drawable]
    title: str = ""
    x: Axis = PLAIN
    y: Axis = PLAIN
    legend: bool = False
    """Whether the panel has its own legend, instead of entries in the legend of the figure."""
    grid: Literal["y", "x", "both", ""] = "y"


@dataclass(frozen=True)
class Curve(Drawable):
    """Points joined by lines, or unjoined if *dash* is empty."""

    x: Numbers
    y: Numbers
    label: str | None = None
    colour: str = INK
    mark: str = ""
    dash: Dash = "-"
    width: float = 1.5
    size: float = 4.5
    order: float = 3
    """matplotlib's zorder."""
    steps: bool = False
    """Whether to draw steps: each value holds until the next x."""
    hollow: bool = False
    errors: Numbers | None = None

    def draw(self, axes: Axes) -> None:
        if self.errors is not None:
            axes.errorbar(self.x, self.y, yerr=self.errors, fmt="none", color=self.colour, linewidth=0.8)
        axes.plot(
            self.x, self.y, label=self.label, color=self.colour, marker=self.mark, linestyle=self.dash or "none",
            linewidth=self.width, markersize=self.size, zorder=self.order,
            drawstyle="steps-post" if self.steps else "default",
            markeredgecolor="white" if self.mark == "*" and self.size > 8 else None,
            markerfacecolor="white" if self.hollow else None, markeredgewidth=2 if self.mark == "_" else None,
        )  # fmt: skip


@dataclass(frozen=True)
class Bars(Drawable):
    """Groups of bars, a group per label with a bar per series; a single series has no legend entry."""

    labels: Sequence[str]
    series: Mapping[str, Numbers]
    colours: Mapping[str, str]
    """By series, or by label if there is one series; a series without a colour is drawn in ink."""
    flat: bool = False
    """Whether the bars are horizontal, from top to bottom."""
    values: str = ""
    """The format of the numbers at the ends of the bars; none if empty."""
    words: Sequence[str] | None = None
    """Texts at the ends of the last series' bars, instead of numbers."""

    @property
    def width(self) -> float:
        """Width of a bar with its gap, as a share of the distance between groups."""
        return 0.84 / len(self.series)

    def places(self, name: str | None = None) -> npt.NDArray[np.float64]:
        """Return the middles of the groups, or of the bars of the series *name*, in units of the axis.

        A last group of means is set apart.
        """
        middles = np.arange(len(self.labels), dtype=float)
        if self.labels[-1] in MEANS:
            middles[-1] += 0.5
        if name is None:
            return middles
        return middles + (list(self.series).index(name) - (len(self.series) - 1) / 2) * self.width

    def draw(self, axes: Axes) -> None:
        middles, several = self.places(), len(self.series) > 1
        for number, (name, values) in enumerate(self.series.items()):
            colour = self.colours.get(name) or [self.colours.get(label, INK) for label in self.labels]
            bar: Callable[..., BarContainer] = axes.barh if self.flat else axes.bar
            label = name if several else None
            bars = bar(self.places(name), values, 0.94 * self.width, label=label, color=colour, zorder=2)
            if self.words is not None and number == len(self.series) - 1:
                axes.bar_label(bars, self.words, padding=2, fontsize=8)
            elif self.values:
                axes.bar_label(bars, fmt=self.values, padding=2, fontsize=8)
        if self.flat:
            axes.set_yticks(middles, self.labels)
            axes.set_ylim(middles[-1] + 0.6, -0.6)
            axes.margins(x=0.12)
            return
        if self.labels[-1] in MEANS:
            axes.axvline(middles[-1] - 0.75, color=RULE, linewidth=1)
        axes.set_xticks(middles, self.labels)
        axes.set_xlim(-0.6, middles[-1] + 0.6)
        axes.tick_params(axis="x", length=0, labelsize=8 if len(self.labels) > 10 else 8.5)


@dataclass(frozen=True)
class Strokes(Drawable):
    """Short strokes of *width*: a published value on a bar, a bound over a group."""

    x: Numbers
    y: Numbers
    width: float
    label: str | None = None
    colour: str = INK
    upright: bool = False
    """Whether the strokes are vertical, with x and y exchanged, for horizontal bars."""

    def draw(self, axes: Axes) -> None:
        middles = np.asarray(self.x, dtype=float)
        stroke = axes.vlines if self.upright else axes.hlines
        stroke(
            self.y, middles - self.width / 2, middles + self.width / 2, color=self.colour, lw=1.6, zorder=4,
            label=self.label or "",
        )  # fmt: skip


@dataclass(frozen=True)
class ReferenceLine(Drawable):
    """A line across the panel at a value; *text* is in the right margin, raised by *lift* points."""

    value: float
    text: str = ""
    colour: str = INK
    dash: Dash = DASHED
    lift: float = 0
    upright: bool = False
    """Whether *value* is on the x axis; *text* is then next to the lower end of the line."""
    width: float = 1
    label: str | None = None

    def draw(self, axes: Axes) -> None:
        line = axes.axvline if self.upright else axes.axhline
        order = 1.5 if self.text else 2.5  # without a text in the margin, the line must be visible over the bars
        line(self.value, color=self.colour, linewidth=self.width, linestyle=self.dash, zorder=order, label=self.label)
        if self.text and self.upright:
            axes.annotate(
                f"{self.text} ", (self.value, 0.03), xycoords=axes.get_xaxis_transform(), ha="right", fontsize=8,
                color=self.colour,
            )  # fmt: skip
        elif self.text:
            axes.annotate(
                self.text, (1.0, self.value), xycoords=axes.get_yaxis_transform(), xytext=(4, self.lift),
                textcoords="offset points", va="center", fontsize=8, color=self.colour, annotation_clip=False,
            )  # fmt: skip


@dataclass(frozen=True)
class Shade(Drawable):
    """The area between two values of an axis, shaded."""

    low: float
    high: float
    colour: str
    upright: bool = False
    alpha: float = 0.12

    def draw(self, axes: Axes) -> None:
        (axes.axvspan if self.upright else axes.axhspan)(
            self.low, self.high, color=self.colour, alpha=self.alpha, linewidth=0, zorder=0
        )


@dataclass(frozen=True)
class Area(Drawable):
    """The area between two lines, shaded."""

    x: Numbers
    low: Numbers | float
    high: Numbers | float
    colour: str

    def draw(self, axes: Axes) -> None:
        axes.fill_between(self.x, self.low, self.high, color=self.colour, alpha=0.25, linewidth=0)


@dataclass(frozen=True)
class Texts(Drawable):
    """Texts at positions, moved by *offset* points."""

    x: Numbers
    y: Numbers
    words: Sequence[str]
    colour: str = INK
    size: float = 8
    align: Literal["left", "center", "right"] = "center"
    offset: tuple[float, float] = (0, 0)

    def draw(self, axes: Axes) -> None:
        for x, y, word in zip(self.x, self.y, self.words, strict=True):
            axes.annotate(
                word, (x, y), self.offset, textcoords="offset points", fontsize=self.size, ha=self.align,
                color=self.colour, zorder=5,
            )  # fmt: skip


@dataclass(frozen=True)
class HeatMap(Drawable):
    """Cells coloured by their values, rows from top to bottom."""

    values: npt.NDArray[Any]
    words: Sequence[Sequence[str]] | None = None
    """Texts of the cells."""
    palette: str = "cividis"
    low: float | None = None
    high: float | None = None
    meaning: str = ""
    """Label of a colour bar next to the panel; no colour bar if empty."""
    level: float | None = None
    """A value whose contour is a dashed white line."""
    level_text: str = ""
    square: bool = False

    def draw(self, axes: Axes) -> None:
        image = axes.imshow(
            self.values, cmap=self.palette, vmin=self.low, vmax=self.high, aspect="equal" if self.square else "auto"
        )
        if self.meaning:
            axes.get_figure(root=True).colorbar(image, ax=axes, label=self.meaning)  # type: ignore[union-attr]
        if self.level is not None and self.values.min() < self.level < self.values.max():
            lines = axes.contour(self.values, levels=[self.level], colors="white", linestyles="dashed")
            axes.clabel(lines, fmt=lambda _: self.level_text, fontsize=8)
        for row, words in enumerate(self.words or ()):
            for column, word in enumerate(words):
                shade = image.to_rgba(self.values[row, column])[:3] @ np.array([0.299, 0.587, 0.114])  # ITU-R BT.601
                axes.text(
                    column,
                    row,
                    word,
                    ha="center",
                    va="center",
                    fontsize=10 if self.values.size < 50 else 7.5,
                    color="white" if shade < 0.5 else INK,
                )


@dataclass(frozen=True)
class Boxes(Drawable):
    """Filled rectangles: lower left corners, sizes, and a colour for each."""

    x: Numbers
    y: Numbers
    width: Numbers
    height: Numbers
    colours: Sequence[str]

    def draw(self, axes: Axes) -> None:
        x, y = np.asarray(self.x, dtype=float), np.asarray(self.y, dtype=float)
        right, top = x + np.asarray(self.width, dtype=float), y + np.asarray(self.height, dtype=float)
        corners = np.stack([np.stack(pair, axis=-1) for pair in ((x, y), (right, y), (right, top), (x, top))], axis=1)
        from matplotlib.collections import PolyCollection

        axes.add_collection(PolyCollection(list(corners), facecolors=self.colours, linewidth=0))


@dataclass(frozen=True)
class Swatches(Drawable):
    """Entries of the legend: meanings of colours."""

    colours: Mapping[str, str]

    def draw(self, axes: Axes) -> None:
        for label, colour in self.colours.items():
            axes.fill_between([], [], color=colour, label=label)


def draw(
    title: str,
    panels: Sequence[Panel],
    *,
    size: tuple[float, float],
    columns: int = 1,
    share_x: Share = False,
    share_y: Share = False,
    legend_columns: int = 8,
) -> Figure:
    """Draw a figure of *size* inches with the panels row by row under *title*.

    share_x, share_y: which panels share an axis, as matplotlib's ``subplots`` takes it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    rows = -(-len(panels) // columns)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=share_x, sharey=share_y)
    for index, axes in enumerate(grid.flat):
        if index >= len(panels):
            axes.set_visible(False)
            continue
        panel = panels[index]
        left = panels[index - 1] if index % columns else None
        below = panels[index + columns] if index + columns < len(panels) else None
        _draw_panel(axes, panel)
        axes.set_xlabel("" if below and below.x.label == panel.x.label else panel.x.label, fontsize=9)
        axes.set_ylabel("" if left and left.y.label == panel.y.label else panel.y.label, fontsize=9)
    shared = [axes for axes, panel in zip(grid.flat, panels, strict=False) if not panel.legend]
    _draw_shared_legend(figure, shared, legend_columns)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    """Draw all of a panel but its axis labels, which neighbouring panels may share."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.tick_params(colors=INK, length=3, labelsize=8.5)
    axes.set_axisbelow(True)
    for mark in panel.marks:
        mark.draw(axes)
    if panel.grid:
        axes.grid(axis=panel.grid, color=RULE, linewidth=0.6)
    _set_axis(axes, "x", panel.x)
    _set_axis(axes, "y", panel.y)
    axes.set_title(panel.title, loc="left", fontsize=9.5, color=INK)
    if panel.legend:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)


def _set_axis(axes: Axes, name: Literal["x", "y"], axis: Axis) -> None:
    """Set scale, ticks and limits of one axis as *axis* describes them, after the marks are drawn."""
    line = axes.xaxis if name == "x" else axes.yaxis
    set_scale, set_limits = (axes.set_xscale, axes.set_xlim) if name == "x" else (axes.set_yscale, axes.set_ylim)
    if axis.scale != "linear":
        from matplotlib.ticker import LogLocator, NullLocator

        set_scale("log", base=2 if axis.scale == "log2" else 10)
        if axis.scale == "log":
            low, high = line.get_data_interval()
            line.set_major_locator(LogLocator(subs=(1, 2, 5) if high < MANY * low else (1,), numticks=30))
        line.set_major_formatter(lambda value, _: f"{value:g}")
        line.set_minor_locator(NullLocator())
    ticks = range(len(axis.names)) if axis.ticks is None and axis.names is not None else axis.ticks
    if ticks is not None:
        line.set_ticks(ticks, labels=axis.names or [f"{tick:g}" for tick in ticks])
    if (axis.low, axis.high) != (None, None):
        set_limits(axis.low, axis.high)
    if axis.falling:
        line.set_inverted(True)
    if axis.size:
        line.set_tick_params(labelsize=axis.size)
    if axis.slant:
        for text in line.get_ticklabels():
            text.set(rotation=axis.slant, ha="right", rotation_mode="anchor")


def _draw_shared_legend(figure: Figure, shared: Iterable[Axes], columns: int) -> None:
    """Draw a legend of all entries of these axes below the panels, each label once; none for a single entry."""
    entries: dict[str, Artist] = {}
    for axes in shared:
        handles, labels = axes.get_legend_handles_labels()
        for label, handle in zip(labels, handles, strict=True):
            entries.setdefault(label, handle)
    if len(entries) > 1:
        figure.legend(
            list(entries.values()), list(entries), loc="outside lower center", ncols=min(columns, len(entries)),
            frameon=False, fontsize=9, labelcolor=INK,
        )  # fmt: skip
