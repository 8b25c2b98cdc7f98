"""What the paper does not print and we had to assume, each assumption varied on its own.

Varied are the sequence length, the rate at which weights enter the array, the cost model, the size of the weight
buffer, and the size of the chunks in which NCF's tables are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from weft.devices.costs import COSTS
from weft.reports.exhibits import INK, Axis, Bars, Curve, Dash, Panel, ReferenceLine
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table
from weft_papers.layerweaver.lab import (
    COMPUTE,
    FAILSAFE_OFF,
    PAIRS,
    Models,
    Options,
    Scene,
    aimt_options,
    bound,
    demand,
    geomean,
    mean,
    one_sided,
    report_of_run,
    throughputs,
)

# values that are varied, from a fraction of the preset to several times the preset
TOKENS = (8, 16, 32, 48, 64, 96, 128, 256, 384)
ROWS_PER_CYCLE = (1, 2, 4, 8, 16, 32, 128)
BUFFERS_MIB = (8, 12, 16, 24, 32, 48, 64, 96)
CHUNKS_MIB = (1, 2, 4, 6, 12, 24, 48)
LARGEST_CHUNK_MIB = 6.0  # the preset's chunk; buffers of less than two chunks get smaller ones
# Label, policy, parts into which it may cut a layer (None: its choice), and mark of the curves over the weight buffer.
WEAVERS = (("weft", "weft", None, "D"), ("weft, whole layers", "weft", 1, "s"), ("layerweaver", "layerweaver", 1, "o"))


def _curve(name: str, values: list[float], colour: str, dash: Dash = "-", mark: str = "o") -> Curve:
    """A curve over the index of the varied value."""
    return Curve(range(len(values)), values, name, colour, mark, dash)


class Side(NamedTuple):
    """Half (a) or (b) of a picture: a scene, and its curves over the varied value."""

    base: Scene
    heading: str
    ticks: tuple[int, ...]
    curves: list[Curve]
    fires: list[int] | None = None
    """The number of pairs that trip the failsafe at each value."""
    paper: float | None = None
    """The printed throughput; None: no line for it."""


def _picture(out: Path, name: str, title: str, sides: Sequence[Side], knob: str, measure: str) -> Figure:
    """Draw the sides beside each other; *knob* labels the varied value, *measure* the curves' quantity."""
    panels = []
    for side in sides:
        printed = [] if side.paper is None else [ReferenceLine(side.paper, f"paper\n{side.paper:.3f}")]
        below = [f"\n({count})" for count in side.fires] if side.fires else [""] * len(side.ticks)
        names = [f"{tick}{count}" for tick, count in zip(side.ticks, below, strict=True)]
        label = f"{knob} (in brackets: pairs that trip the failsafe)" if side.fires else knob
        panels.append(
            Panel([*side.curves, *printed], side.heading, Axis(label=label, names=names), Axis(label=measure))
        )
    return pictures.picture(out, name, title, panels, size=(13, 4.9), columns=len(sides), share_y=True)


def _make_table(title: str, knob: str, sides: Sequence[Side]) -> Table:
    """Table with a line per device and value and a column per curve."""
    body = []
    for side in sides:
        for index, tick in enumerate(side.ticks):
            cells = [f"{curve.y[index]:.4f}" for curve in side.curves]
            fires = [str(side.fires[index])] if side.fires else []
            body.append((side.base.npu.name, str(tick), *cells, *fires))
    names = [curve.label or "" for curve in sides[0].curves]
    failsafe_header = ["failsafe fires"] if sides[0].fires else []
    return Table(title, ("device", knob, *names, *failsafe_header), tuple(body))


def _fires(settings: Sequence[Scene], pairs: tuple[Models, ...]) -> list[int]:
    """The number of pairs that trip Layerweaver's failsafe, by scene."""
    return [sum(one_sided(scene, pair) for pair in pairs) for scene in settings]


def _bounds(settings: Sequence[Scene], pairs: tuple[Models, ...]) -> Curve:
    """The curve of the bound, as geometric mean of the pairs."""
    return _curve("bound", [geomean(bound(scene, pair) for pair in pairs) for scene in settings], INK, "--", "")


def _stps(
    settings: Sequence[Scene], policy: str, queries: int, pairs: tuple[Models, ...], options: Options = ()
) -> list[float]:
    """Throughput of a policy, as geometric mean of the pairs, by scene."""
    return [throughputs(scene, policy, queries, options, pairs).stp for scene in settings]


def sequence_length(
    paper: Paper, out: Path, scenes: tuple[Scene, ...], queries: int, pairs: tuple[Models, ...] = PAIRS
) -> Exhibit:
    """Vary the number of tokens: throughput, and the pairs that trip the failsafe."""
    sides = []
    for letter, base in zip("ab", scenes, strict=True):
        settings = [replace(base, seq_len=tokens) for tokens in TOKENS]
        heading = f"({letter}) {base.npu.name}, batch {base.batch}"
        curves = _length_curves(settings, base, queries, pairs)
        fires, printed = _fires(settings, pairs), paper[f"stp_mean_{letter}"].value
        sides.append(Side(base, heading, TOKENS, curves, fires, printed))
    title = "Sequence length of BB, BL and XL (the paper names none)"
    picture = _picture(out, "sensitivity-tokens", title, sides, "tokens", "STP, geomean of the pairs")
    rows = tuple(row for side in sides for row in _length_rows(side))
    return Exhibit(rows, (_make_table("Sequence length: STP, geomean of the pairs", "tokens", sides),), (picture,))


def _length_curves(settings: list[Scene], tuned: Scene, queries: int, pairs: tuple[Models, ...]) -> list[Curve]:
    """Curves over the sequence length; AI-MT keeps its thresholds for the scene *tuned*, as the paper keeps them."""
    colours = pictures.POLICIES
    failsafe_off = _stps(settings, "layerweaver", queries, pairs, FAILSAFE_OFF)
    aimt_stps = _stps(settings, "aimt", queries, pairs, aimt_options(tuned, pairs))
    return [
        _bounds(settings, pairs),
        _curve("weft", _stps(settings, "weft", queries, pairs), colours["weft"], mark="D"),
        _curve("layerweaver", _stps(settings, "layerweaver", queries, pairs), colours["layerweaver"]),
        _curve("layerweaver, failsafe off", failsafe_off, "#56b4e9", ":"),
        _curve("aimt", aimt_stps, colours["aimt"], mark="s"),
    ]


def _length_rows(side: Side) -> list[Row]:
    """Rows of a side: the length nearest to the printed throughput, the failsafe's effect, and AI-MT's wins."""
    bounds, _, woven, failsafe_off, aimt = (curve.y for curve in side.curves)  # in the order of _length_curves
    at_64 = TOKENS.index(64)
    assert side.fires is not None and side.paper is not None
    printed = side.paper
    nearest = min(range(len(TOKENS)), key=lambda index: abs(woven[index] - printed))
    longest = max((tokens for tokens, count in zip(TOKENS, side.fires, strict=True) if not count), default=0)
    lost = max(without - with_ for with_, without in zip(woven, failsafe_off, strict=True))
    behind = [str(tokens) for tokens, ours, theirs in zip(TOKENS, woven, aimt, strict=True) if theirs > ours]
    figure = f"Sequence length, {side.base.npu.name} batch {side.base.batch}"
    return [
        Row(
            figure, "tokens at which layerweaver's geomean lies nearest the paper's", None, TOKENS[nearest], "tokens",
            f"STP {woven[nearest]:.3f} against {printed:.3f}; the paper names no sequence length",
        ),
        Row(
            figure, "longest sequence at which no pair trips the failsafe", None, longest, "tokens",
            f"the paper's results need memory-bound language models here; at 384 tokens, MLPerf's length, "
            f"{side.fires[-1]} pairs trip it, so the paper cannot have used that with weights read once per batch",
        ),
        Row(
            figure, "most throughput lost by the failsafe at any length", None, lost, "x",
            "without the failsafe layerweaver gains no more than this, so the failsafe is right where it fires",
        ),
        Row(
            figure, "lengths at which swept aimt is ahead of layerweaver", None, len(behind), f"of {len(TOKENS)}",
            f"at {', '.join(behind) or 'no'} tokens; at 64 layerweaver keeps "
            f"{woven[at_64] / bounds[at_64]:.3f} of the bound, aimt {aimt[at_64] / bounds[at_64]:.3f}; the paper "
            "varies batches only and says Layerweaver wins in all cases",
        ),
    ]  # fmt: skip


def weight_loading(
    paper: Paper, out: Path, scenes: tuple[Scene, ...], queries: int, pairs: tuple[Models, ...] = PAIRS
) -> Exhibit:
    """Vary the rows of a weight tile that enter the array per cycle; in the presets the loading costs no time."""
    sides = []
    for letter, base in zip("ab", scenes, strict=True):
        settings = [replace(base.on(weight_rows_per_cycle=rate), cost="pipelined") for rate in ROWS_PER_CYCLE]
        ratios = [demand(scene, "BB").compute / demand(scene, "BB").memory for scene in settings]
        woven = _stps(settings, "layerweaver", queries, pairs)
        curves = [
            _bounds(settings, pairs),
            _curve("layerweaver", woven, pictures.POLICIES["layerweaver"]),
            _curve("BERT-base: compute time over fetch time", ratios, "#d55e00", ":", "^"),
        ]
        preset = f"preset: {base.npu.weight_rows_per_cycle} of {base.npu.array_rows} rows"
        heading, printed = f"({letter}) {base}; {preset}", paper[f"stp_mean_{letter}"].value
        sides.append(Side(base, heading, ROWS_PER_CYCLE, curves, _fires(settings, pairs), printed))
    title = "How fast weight tiles enter the array (calibration; the paper's cost model charges nothing)"
    measure = "STP (geomean), or ratio of times"
    picture = _picture(out, "sensitivity-weight-rows", title, sides, "weight rows per cycle", measure)
    rows = tuple(map(_loading_row, sides))
    return Exhibit(
        rows, (_make_table("Weight loading: STP, geomean of the pairs", "rows per cycle", sides),), (picture,)
    )


def _loading_row(side: Side) -> Row:
    """Row with Layerweaver's throughput when one weight row enters per cycle."""
    _, woven, ratio = (curve.y for curve in side.curves)  # in the order of weight_loading
    assert side.fires is not None
    bert = "compute-bound" if ratio[0] > 1 else "still memory-bound"
    return Row(
        f"Weight loading, {side.base.npu.name} batch {side.base.batch}", "STP of layerweaver with one row per cycle",
        None, woven[0], "x",
        f"BERT-base is {bert} then (compute over fetch {ratio[0]:.2f}, {ratio[-1]:.2f} with loading hidden) and "
        f"{side.fires[0]} pairs trip the failsafe; the paper's MAESTRO costs do not charge the loading",
    )  # fmt: skip


class Priced(NamedTuple):
    """Results under one cost model on one device: geometric mean of the throughput of three policies, and more."""

    aimt: float
    layerweaver: float
    weft: float
    dram: float
    """Mean DRAM activity of layerweaver in percent, the failsafe off so that every pair is woven."""
    fires: int
    """The number of pairs that trip the failsafe."""


def cost_models(
    paper: Paper, out: Path, scenes: tuple[Scene, ...], queries: int, pairs: tuple[Models, ...] = PAIRS
) -> Exhibit:
    """Vary the model of a layer's computing time; AI-MT is tuned anew for each."""
    results = [{name: _price(replace(base, cost=name), queries, pairs) for name in COSTS} for base in scenes]
    picture = _cost_picture(paper, out, scenes, results)
    lines = [
        (base.npu.name, name, *(f"{value:.3f}" for value in priced[:3]), f"{priced.dram:.1f}", str(priced.fires))
        for base, by_name in zip(scenes, results, strict=True)
        for name, priced in by_name.items()
    ]
    header = ("device", "cost model", "aimt", "layerweaver", "weft", "DRAM %", "failsafe fires")
    rows = [
        row
        for letter, base, by_name in zip("ab", scenes, results, strict=True)
        for row in _cost_rows(paper, letter, base, by_name)
    ]
    return Exhibit(tuple(rows), (Table("Cost models: STP, geomean of the pairs", header, tuple(lines)),), (picture,))


def _price(scene: Scene, queries: int, pairs: tuple[Models, ...]) -> Priced:
    """Run all pairs under the scene's cost model."""
    woven = [report_of_run(scene, pair, "layerweaver", queries, FAILSAFE_OFF) for pair in pairs]
    return Priced(
        throughputs(scene, "aimt", queries, aimt_options(scene, pairs), pairs).stp,
        throughputs(scene, "layerweaver", queries, (), pairs).stp,
        throughputs(scene, "weft", queries, (), pairs).stp,
        100 * mean(report.dram_utilisation for report in woven),
        sum(one_sided(scene, pair) for pair in pairs),
    )


def _cost_picture(paper: Paper, out: Path, scenes: tuple[Scene, ...], results: list[dict[str, Priced]]) -> Figure:
    """Draw throughput and DRAM activity under every cost model, with the printed values."""
    colours, throughput, activity = {**pictures.POLICIES, "DRAM": pictures.POLICIES["layerweaver"]}, [], []
    for letter, base, by_name in zip("ab", scenes, results, strict=True):
        series = {key: [getattr(priced, key) for priced in by_name.values()] for key in ("aimt", "layerweaver", "weft")}
        stp, dram = paper[f"stp_mean_{letter}"].value, paper[f"dram_{letter}"].value
        marks = [Bars([*by_name], series, colours), ReferenceLine(stp, f"paper\n{stp:.3f}")]
        y = Axis(label="STP, geomean of the pairs", low=0.8)
        throughput.append(Panel(marks, f"({letter}) {base}: throughput", y=y))
        bars = Bars([*by_name], {"DRAM": [priced.dram for priced in by_name.values()]}, colours)
        y = Axis(label="active cycles (%), mean of the pairs")
        marks = [bars, ReferenceLine(dram, f"paper\n{dram:.1f} %")]
        activity.append(Panel(marks, f"({letter}) {base}: DRAM activity of layerweaver", y=y))
    title, layout = "Cost models: what a layer's arithmetic takes", {"columns": len(scenes), "share_y": "row"}
    return pictures.picture(out, "sensitivity-cost-models", title, [*throughput, *activity], size=(12, 7.4), **layout)


def _cost_rows(paper: Paper, letter: str, base: Scene, results: dict[str, Priced]) -> list[Row]:
    """Rows of a device under MAESTRO's cost formula, which the paper used; *results*: by cost model."""
    figure, maestro = f"Cost model, {base.npu.name} batch {base.batch}", results["maestro"]
    rows = [
        Row(
            figure, "STP of layerweaver with MAESTRO's formula, geomean", paper[f"stp_mean_{letter}"].value,
            maestro.layerweaver, "x",
            "the paper used MAESTRO with a mapping it does not print; plain K-C mapping leaves most rows of the array "
            "idle in first and grouped convolutions, which makes them long blocks no buffer hides",
        ),
        Row(
            figure, "DRAM utilisation of layerweaver with MAESTRO's formula, mean", paper[f"dram_{letter}"].value,
            maestro.dram, "%",
            f"those long blocks stop the channel: {results['pipelined'].dram:.1f} % with our default cost model; the "
            "paper names the same reason for its RX pairs",
        ),
    ]  # fmt: skip
    if maestro.weft < maestro.layerweaver:
        why = (
            f"below layerweaver's {maestro.layerweaver:.3f}: with such blocks the bound is out of reach, and weft, "
            "which steers by the bound's mix and prices, loses more than layerweaver"
        )
        rows.append(Row(figure, "STP of weft with MAESTRO's formula, geomean", None, maestro.weft, "x", why))
    return rows


def weight_buffer(out: Path, scenes: tuple[Scene, ...], queries: int, pairs: tuple[Models, ...] = PAIRS) -> Exhibit:
    """Vary the size of the weight buffer: fraction of the bound."""
    sides = []
    for letter, base in zip("ab", scenes, strict=True):
        settings = [base.on(weight_buffer_mib=size, chunk_mib=min(LARGEST_CHUNK_MIB, size / 2)) for size in BUFFERS_MIB]
        curves = []
        for name, policy, pieces, mark in WEAVERS:
            results = [throughputs(scene, policy, queries, (), pairs, pieces) for scene in settings]
            colour, style = pictures.POLICIES[policy], "--" if policy == "weft" and pieces else "-"
            curves += [
                _curve(f"{name}, geomean", [result.fraction for result in results], colour, style, mark),
                _curve(f"{name}, worst pair", [min(result.fractions) for result in results], colour, ":", mark),
            ]
        sides.append(Side(base, f"({letter}) {base}", BUFFERS_MIB, curves))
    title = "Weight buffer: how near to the bound a schedule comes"
    knob = "weight buffer (MiB; the paper's: 48)"
    picture = _picture(out, "sensitivity-buffer", title, sides, knob, "fraction of the bound")
    rows = tuple(map(_buffer_row, sides))
    return Exhibit(rows, (_make_table("Weight buffer: fraction of the bound", "MiB", sides),), (picture,))


def _buffer_row(side: Side) -> Row:
    """Row with weft's fraction of the bound at 16 MiB."""
    index = BUFFERS_MIB.index(16)
    # The geomeans of WEAVERS; every second curve is a worst pair.
    weft, whole, woven = (curve.y[index] for curve in side.curves[::2])
    return Row(
        f"Weight buffer, {side.base.npu.name} batch {side.base.batch}",
        "fraction of the bound at 16 MiB, weft, geomean", None, weft, "",
        f"{whole:.4f} with whole layers, layerweaver {woven:.4f}; the paper fixes 48 MB and says a larger buffer "
        "would help",
    )  # fmt: skip


def table_chunks(out: Path, scenes: tuple[Scene, ...], queries: int) -> Exhibit:
    """Vary the size of the pieces in which NCF's tables are read, which together are larger than the buffer."""
    pairs = tuple((cnn, "NCF") for cnn in COMPUTE)
    sides = []
    for letter, base in zip("ab", scenes, strict=True):
        settings = [base.on(chunk_mib=size) for size in CHUNKS_MIB]
        curves = [
            _curve(
                policy,
                [throughputs(scene, policy, queries, (), pairs, pieces=1).fraction for scene in settings],
                pictures.POLICIES[policy],
                mark=mark,
            )
            for policy, mark in (("weft", "D"), ("layerweaver", "o"))
        ]
        sides.append(Side(base, f"({letter}) {base}, the four NCF pairs", CHUNKS_MIB, curves))
    title = "Pieces in which NCF's tables are read"
    knob = "largest piece of a table (MiB; default: 6, an eighth of the buffer)"
    picture = _picture(out, "sensitivity-chunks", title, sides, knob, "fraction of the bound, geomean")
    rows = tuple(map(_chunk_row, sides))
    return Exhibit(rows, (_make_table("Pieces of NCF's tables: fraction of the bound", "MiB", sides),), (picture,))


def _chunk_row(side: Side) -> Row:
    """Row with Layerweaver's fraction of the bound when a table is read in one piece."""
    weft, woven = (curve.y[-1] for curve in side.curves)  # in the order of table_chunks
    return Row(
        f"NCF tables, {side.base.npu.name} batch {side.base.batch}",
        "fraction of the bound of layerweaver with tables in one piece, geomean of the NCF pairs", None, woven, "",
        f"weft {weft:.4f}; one piece of 35 MB fills most of the buffer, and until it is through nothing else can be "
        "fetched; the paper does not say how it reads them",
    )  # fmt: skip
