"""What the paper does not print and we had to assume, each assumption varied on its own.

Sequence length, how fast weights enter the array, the cost model, the weight buffer, and the pieces
in which NCF's tables are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes

from weft.costs import COSTS
from weft.papers.base import Figure, Part, Published, Row, Table
from weft.papers.layerweaver import pictures
from weft.papers.layerweaver.lab import (
    COMPUTE,
    FAILSAFE_OFF,
    PAIRS,
    Models,
    Scene,
    aimt_options,
    bound,
    demand,
    geomean,
    mean,
    measured,
    one_sided,
    throughputs,
)

Paper = dict[str, Published]

TOKENS = (8, 16, 32, 48, 64, 96, 128, 256, 384)
ROWS_PER_CYCLE = (1, 2, 4, 8, 16, 32, 128)
BUFFERS_MIB = (8, 12, 16, 24, 32, 48, 64, 96)
CHUNKS_MIB = (1, 2, 4, 6, 12, 24, 48)


class Curve(NamedTuple):
    """One line of a picture."""

    name: str
    values: list[float]
    colour: str
    style: str = "-"
    mark: str = "o"


def sequence_length(
    paper: Paper, out: Path, scenes: tuple[Scene, ...], queries: int, pairs: tuple[Models, ...] = PAIRS
) -> Part:
    """Throughput over the number of tokens, and what the failsafe makes of it."""
    rows: list[Row] = []
    body: list[tuple[str, ...]] = []
    columns = []
    for letter, base in zip("ab", scenes, strict=True):
        settings = [replace(base, seq_len=tokens) for tokens in TOKENS]
        fires = [sum(one_sided(scene, pair) for pair in pairs) for scene in settings]
        curves = _policies(settings, base, queries, pairs)
        columns.append((base, curves, fires, letter))
        body += [
            (base.npu.name, str(tokens), *(f"{curve.values[i]:.3f}" for curve in curves), f"{fires[i]} of {len(pairs)}")
            for i, tokens in enumerate(TOKENS)
        ]
        rows += _length_rows(paper, letter, base, curves, fires)
    picture = _length_picture(paper, out, columns, len(pairs))
    table = Table(
        f"Sequence length: STP, geomean of {len(pairs)} pairs",
        ("device", "tokens", *(curve.name for curve in columns[0][1]), "failsafe fires"),
        tuple(body),
    )
    return Part(tuple(rows), (table,), (picture,))


def _policies(settings: Sequence[Scene], tuned: Scene, queries: int, pairs: tuple[Models, ...]) -> list[Curve]:
    """The geomean of every policy at every setting; AI-MT keeps the thresholds of *tuned*."""
    options = aimt_options(tuned, pairs)

    def along(policy: str, extra: tuple[tuple[str, bool | int | float], ...] = ()) -> list[float]:
        return [throughputs(scene, policy, queries, extra, pairs).stp for scene in settings]

    colours = pictures.POLICIES
    return [
        Curve("bound", [geomean(bound(s, pair) for pair in pairs) for s in settings], pictures.INK, "--", ""),
        Curve("weft", along("weft"), colours["weft"], mark="D"),
        Curve("layerweaver", along("layerweaver"), colours["layerweaver"], mark="o"),
        Curve("layerweaver, failsafe off", along("layerweaver", FAILSAFE_OFF), "#56b4e9", ":", "o"),
        Curve("aimt", along("aimt", options), colours["aimt"], mark="s"),
    ]


def _length_rows(paper: Paper, letter: str, base: Scene, curves: list[Curve], fires: list[int]) -> list[Row]:
    woven = next(curve.values for curve in curves if curve.name == "layerweaver")
    theirs = paper[f"stp_mean_{letter}"].value
    nearest = min(range(len(TOKENS)), key=lambda i: abs(woven[i] - theirs))
    none = max((tokens for tokens, count in zip(TOKENS, fires, strict=True) if not count), default=0)
    figure = f"Sequence length, {base.npu.name} batch {base.batch}"
    return [
        Row(
            figure, "tokens at which layerweaver's geomean lies nearest the paper's", None, TOKENS[nearest], "tokens",
            f"STP {woven[nearest]:.3f} against {theirs:.3f}; the paper names no sequence length",
        ),
        Row(
            figure, "longest sequence at which no pair trips the failsafe", None, none, "tokens",
            f"the paper's results need memory-bound language models here; at 384 tokens, MLPerf's length, {fires[-1]} "
            "pairs trip it, so the paper cannot have used that with 16-bit weights read once per batch",
        ),
    ]  # fmt: skip


def _length_picture(
    paper: Paper, out: Path, columns: list[tuple[Scene, list[Curve], list[int], str]], pairs: int
) -> Figure:
    figure, axes = pictures.canvas(13, 5.2, 1, len(columns), sharey=True)
    for one, (base, curves, fires, letter) in zip(axes, columns, strict=True):
        _draw_curves(one, list(range(len(TOKENS))), curves)
        theirs = paper[f"stp_mean_{letter}"].value
        pictures.paper_line(one, theirs, f"paper\n{theirs:.3f}")
        labels = [f"{tokens}\n({count})" for tokens, count in zip(TOKENS, fires, strict=True)]
        one.set_xticks(range(len(TOKENS)), labels)
        one.set_xlabel(f"tokens (of {pairs} pairs, how many trip the failsafe)")
        pictures.heading(one, f"({letter}) {base.npu.name}, batch {base.batch}")
    axes[0].set_ylabel("STP, geomean of the pairs")
    pictures.legend(figure, axes[0])
    return pictures.save(figure, out, "sensitivity-tokens", "Sequence length of BB, BL and XL (the paper names none)")


def _draw_curves(axes: Axes, places: Sequence[float], curves: list[Curve]) -> None:
    for curve in curves:
        axes.plot(
            places, curve.values, linestyle=curve.style, marker=curve.mark, color=curve.colour, ms=5, label=curve.name
        )


def weight_loading(
    paper: Paper, out: Path, scenes: tuple[Scene, ...], queries: int, pairs: tuple[Models, ...] = PAIRS
) -> Part:
    """How many rows of a weight tile enter the array per cycle; the presets hide the loading altogether."""
    figure, axes = pictures.canvas(13, 4.8, 1, len(scenes), sharey=True)
    rows: list[Row] = []
    body: list[tuple[str, ...]] = []
    for one, letter, base in zip(axes, "ab", scenes, strict=True):
        settings = [replace(base.on(weight_rows_per_cycle=rate), cost="pipelined") for rate in ROWS_PER_CYCLE]
        ratio = [demand(s, "BB").compute / demand(s, "BB").memory for s in settings]
        fires = [sum(one_sided(s, pair) for pair in pairs) for s in settings]
        curves = [
            Curve("bound", [geomean(bound(s, p) for p in pairs) for s in settings], pictures.INK, "--", ""),
            Curve(
                "layerweaver",
                [throughputs(s, "layerweaver", queries, (), pairs).stp for s in settings],
                pictures.POLICIES["layerweaver"],
            ),
            Curve("BERT-base: compute time over fetch time", ratio, "#d55e00", ":", "^"),
        ]
        _draw_curves(one, list(range(len(settings))), curves)
        theirs = paper[f"stp_mean_{letter}"].value
        pictures.paper_line(one, theirs, f"paper\n{theirs:.3f}")
        labels = [f"{rate}\n({count})" for rate, count in zip(ROWS_PER_CYCLE, fires, strict=True)]
        one.set_xticks(range(len(settings)), labels)
        one.set_xlabel(f"weight rows per cycle (of {len(pairs)} pairs, how many trip the failsafe)")
        hidden = f"preset: {base.npu.weight_rows_per_cycle} of {base.npu.array_rows} rows"
        pictures.heading(one, f"({letter}) {base}; {hidden}")
        body += [
            (base.npu.name, str(rate), *(f"{curve.values[i]:.3f}" for curve in curves), str(fires[i]))
            for i, rate in enumerate(ROWS_PER_CYCLE)
        ]
        rows.append(_loading_row(letter, base, ratio, curves[1].values, fires))
    axes[0].set_ylabel("STP (geomean), or ratio of times")
    pictures.legend(figure, axes[0])
    title = "How fast weight tiles enter the array (calibration; the paper's cost model charges nothing)"
    picture = pictures.save(figure, out, "sensitivity-weight-rows", title)
    header = ("device", "rows per cycle", "bound", "layerweaver", "BB compute/fetch", "failsafe fires")
    return Part(tuple(rows), (Table("Weight loading: STP, geomean", header, tuple(body)),), (picture,))


def _loading_row(letter: str, base: Scene, ratio: list[float], woven: list[float], fires: list[int]) -> Row:
    side = "compute-bound" if ratio[0] > 1 else "still memory-bound"
    return Row(
        f"Weight loading, {base.npu.name} batch {base.batch}", "STP of layerweaver with one row per cycle", None,
        woven[0], "x",
        f"BERT-base is {side} then (compute over fetch {ratio[0]:.2f}, {ratio[-1]:.2f} with loading hidden) and "
        f"{fires[0]} pairs trip the failsafe; the paper's MAESTRO costs do not charge the loading",
    )  # fmt: skip


def cost_models(
    paper: Paper, out: Path, scenes: tuple[Scene, ...], queries: int, pairs: tuple[Models, ...] = PAIRS
) -> Part:
    """The four ways to price a layer's arithmetic."""
    figure, axes = pictures.canvas(12, 7.4, 2, len(scenes), sharey="row")
    rows: list[Row] = []
    body: list[tuple[str, ...]] = []
    for column, (letter, base) in enumerate(zip("ab", scenes, strict=True)):
        settings = {name: replace(base, cost=name) for name in COSTS}
        woven = {name: throughputs(s, "layerweaver", queries, (), pairs).stp for name, s in settings.items()}
        best = {name: throughputs(s, "weft", queries, (), pairs).stp for name, s in settings.items()}
        swept = {name: _aimt(s, queries, pairs) for name, s in settings.items()}
        dram = {name: _dram(s, queries, pairs) for name, s in settings.items()}
        series = {"aimt": [*swept.values()], "layerweaver": [*woven.values()], "weft": [*best.values()]}
        top, bottom = axes[column], axes[column + len(scenes)]
        pictures.grouped_bars(top, list(COSTS), series, pictures.POLICIES)
        pictures.paper_line(top, paper[f"stp_mean_{letter}"].value, f"paper\n{paper[f'stp_mean_{letter}'].value:.3f}")
        pictures.heading(top, f"({letter}) {base}: throughput")
        pictures.grouped_bars(bottom, list(COSTS), {"DRAM": [*dram.values()]}, {"DRAM": pictures.DRAM})
        pictures.paper_line(bottom, paper[f"dram_{letter}"].value, f"paper\n{paper[f'dram_{letter}'].value:.1f} %")
        pictures.heading(bottom, f"({letter}) {base}: DRAM activity of layerweaver")
        body += [
            (base.npu.name, n, f"{swept[n]:.3f}", f"{woven[n]:.3f}", f"{best[n]:.3f}", f"{dram[n]:.1f}",
             str(sum(one_sided(settings[n], pair) for pair in pairs)))
            for n in COSTS
        ]  # fmt: skip
        rows += _cost_rows(paper, letter, base, woven, dram)
    axes[0].set_ylim(0.8, None)
    axes[0].set_ylabel("STP, geomean of the pairs")
    axes[len(scenes)].set_ylabel("active cycles (%), mean of the pairs")
    pictures.legend(figure, axes[0])
    picture = pictures.save(figure, out, "sensitivity-cost-models", "Cost models: what a layer's arithmetic takes")
    header = ("device", "cost model", "aimt", "layerweaver", "weft", "DRAM %", "failsafe fires")
    return Part(tuple(rows), (Table("Cost models: STP, geomean", header, tuple(body)),), (picture,))


def _aimt(scene: Scene, queries: int, pairs: tuple[Models, ...]) -> float:
    return throughputs(scene, "aimt", queries, aimt_options(scene, pairs), pairs).stp


def _dram(scene: Scene, queries: int, pairs: tuple[Models, ...]) -> float:
    """Mean DRAM activity of the greedy in percent, with the failsafe off so that every pair is woven."""
    return 100 * mean(measured(scene, p, "layerweaver", queries, FAILSAFE_OFF).dram_utilisation for p in pairs)


def _cost_rows(paper: Paper, letter: str, base: Scene, woven: dict[str, float], dram: dict[str, float]) -> list[Row]:
    figure = f"Cost model, {base.npu.name} batch {base.batch}"
    return [
        Row(
            figure, "STP of layerweaver with MAESTRO's formula, geomean", paper[f"stp_mean_{letter}"].value,
            woven["maestro"], "x",
            "the paper used MAESTRO with a mapping it does not print; plain K-C mapping leaves most rows of the array "
            "idle in first and grouped convolutions, which makes them long blocks no buffer hides",
        ),
        Row(
            figure, "DRAM utilisation of layerweaver with MAESTRO's formula, mean", paper[f"dram_{letter}"].value,
            dram["maestro"], "%",
            f"those long blocks stop the channel: {dram['pipelined']:.1f} % with our default cost model; the paper "
            "names the same reason for its RX pairs",
        ),
    ]  # fmt: skip


def weight_buffer(out: Path, scenes: tuple[Scene, ...], queries: int, pairs: tuple[Models, ...] = PAIRS) -> Part:
    """Fraction of the bound over the size of the weight buffer."""
    figure, axes = pictures.canvas(13, 4.6, 1, len(scenes), sharey=True)
    rows: list[Row] = []
    body: list[tuple[str, ...]] = []
    for one, letter, base in zip(axes, "ab", scenes, strict=True):
        settings = [base.on(weight_buffer_mib=size, chunk_mib=min(6.0, size / 2)) for size in BUFFERS_MIB]
        results = {
            policy: [throughputs(scene, policy, queries, (), pairs) for scene in settings]
            for policy in ("weft", "layerweaver")
        }
        curves = [
            Curve(f"{policy}, {how}", [value(r) for r in results[policy]], pictures.POLICIES[policy], style, mark)
            for policy, mark in (("weft", "D"), ("layerweaver", "o"))
            for how, style, value in (
                ("geomean", "-", lambda r: r.fraction),
                ("worst pair", ":", lambda r: min(r.fractions)),
            )
        ]
        _draw_curves(one, list(range(len(BUFFERS_MIB))), curves)
        one.set_xticks(range(len(BUFFERS_MIB)), [str(size) for size in BUFFERS_MIB])
        one.set_xlabel("weight buffer (MiB; the paper's: 48)")
        pictures.heading(one, f"({letter}) {base}")
        body += [
            (base.npu.name, str(size), *(f"{curve.values[i]:.4f}" for curve in curves))
            for i, size in enumerate(BUFFERS_MIB)
        ]
        at = BUFFERS_MIB.index(16)
        rows.append(
            Row(
                f"Weight buffer, {base.npu.name} batch {base.batch}", "fraction of the bound at 16 MiB, weft, geomean",
                None, curves[0].values[at], "",
                f"layerweaver {curves[2].values[at]:.4f}; the paper fixes 48 MB and says a larger buffer would help",
            )
        )  # fmt: skip
    axes[0].set_ylabel("fraction of the bound")
    pictures.legend(figure, axes[0])
    picture = pictures.save(figure, out, "sensitivity-buffer", "Weight buffer: how near to the bound a schedule comes")
    header = ("device", "MiB", *(curve.name for curve in curves))
    return Part(tuple(rows), (Table("Weight buffer: fraction of the bound", header, tuple(body)),), (picture,))


def table_chunks(out: Path, scenes: tuple[Scene, ...], queries: int) -> Part:
    """NCF's tables are larger than the buffer, so they are read in pieces: how large may these be?"""
    pairs = tuple((cnn, "NCF") for cnn in COMPUTE)
    figure, axes = pictures.canvas(13, 4.4, 1, len(scenes), sharey=True)
    body: list[tuple[str, ...]] = []
    for one, letter, base in zip(axes, "ab", scenes, strict=True):
        settings = [base.on(chunk_mib=size) for size in CHUNKS_MIB]
        curves = [
            Curve(
                policy,
                [throughputs(scene, policy, queries, (), pairs).fraction for scene in settings],
                pictures.POLICIES[policy],
                mark=mark,
            )
            for policy, mark in (("weft", "D"), ("layerweaver", "o"))
        ]
        _draw_curves(one, list(range(len(CHUNKS_MIB))), curves)
        one.set_xticks(range(len(CHUNKS_MIB)), [str(size) for size in CHUNKS_MIB])
        one.set_xlabel("largest piece of a table (MiB; default: 6, an eighth of the buffer)")
        pictures.heading(one, f"({letter}) {base}, the four NCF pairs")
        body += [
            (base.npu.name, str(size), *(f"{curve.values[i]:.4f}" for curve in curves))
            for i, size in enumerate(CHUNKS_MIB)
        ]
    axes[0].set_ylabel("fraction of the bound, geomean")
    pictures.legend(figure, axes[0])
    picture = pictures.save(figure, out, "sensitivity-chunks", "Pieces in which NCF's tables are read")
    header = ("device", "MiB", "weft", "layerweaver")
    return Part((), (Table("Pieces of NCF's tables: fraction of the bound, geomean", header, tuple(body)),), (picture,))
