"""What the chapter does not print and we had to assume, each assumption varied on its own.

Batch timeout and batch limit, sequence length, and the one number of our own policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from weft_papers import pictures
from weft_papers.base import Exhibit, Row, Table, Tick
from weft_papers.layerweaver.lab import geomean
from weft_papers.layerweaver_plus.lab import (
    BASELINE,
    OURS,
    PLUS,
    SCHEDULERS,
    WOVEN,
    Answers,
    Ratio,
    Scheduler,
    StreamPair,
    ask,
)

TIMEOUTS_MS = (0.0, 1.0, 2.0, 5.0)
BATCHES = (4, 8, 16, 32, 64)
TOKENS = (16, 64, 128, 384)
STRETCHES = (100, 150, 200, 300)
PAIR = ("RN", "BB")
STRETCHED: tuple[tuple[tuple[str, str], Ratio], ...] = tuple(
    (pair, ratio) for pair in (("RN", "BB"), ("MN", "BL")) for ratio in ((4.0, 1.0), (1.0, 1.0), (1.0, 4.0))
)


def batching(
    out: Path,
    base: StreamPair,
    tick: Tick | None = None,
    timeouts: Sequence[float] = TIMEOUTS_MS,
    batches: Sequence[int] = BATCHES,
) -> Exhibit:
    """Is the baseline tuned fairly? Both schedulers over both settings of the batcher."""
    base = StreamPair(PAIR, (1.0, 1.0), base.seq_len, base.duration_s)
    grid = [replace(base, max_batch=batch, timeout_ms=timeout) for batch in batches for timeout in timeouts]
    found = ask([base, *grid], (BASELINE, PLUS), tick)
    figure, axes = pictures.canvas(10.5, 4.4, 1, 2)
    for one, scheduler in zip(axes, (BASELINE, PLUS), strict=True):
        rates = np.array([found[scene, scheduler].rate for scene in grid]).reshape(len(batches), len(timeouts))
        one.imshow(rates, cmap="cividis", aspect="auto", vmin=0, vmax=max(answer.rate for answer in found.values()))
        for row, column in np.ndindex(*rates.shape):
            dark = rates[row, column] < 0.6 * max(answer.rate for answer in found.values())
            one.text(
                column, row, f"{rates[row, column]:.0f}", ha="center", va="center", color="white" if dark else "black"
            )
        one.set_xticks(range(len(timeouts)), [f"{timeout:g}" for timeout in timeouts])
        one.set_yticks(range(len(batches)), [str(batch) for batch in batches])
        one.grid(False)
        one.set_xlabel("batch timeout (ms)")
        one.set_ylabel("largest batch")
        pictures.heading(one, f"{scheduler.name}: sustainable requests/s")
    title = f"Batching of {base.name}: the reproduction uses {base.timeout_ms:g} ms and {base.max_batch}"
    picture = pictures.save(figure, out, "sensitivity-batching", title)
    body = tuple(
        (str(s.max_batch), f"{s.timeout_ms:g}", f"{found[s, BASELINE].rate:.0f}", f"{found[s, PLUS].rate:.0f}",
         f"{found[s, PLUS].rate / found[s, BASELINE].rate:.3f}")
        for s in grid
    )  # fmt: skip
    header = ("largest batch", "timeout ms", "baseline requests/s", "layerweaver+ requests/s", "over baseline")
    table = Table(f"Batching of {base.name}: sustainable load", header, body)
    return Exhibit(_batching_rows(base, grid, found), (table,), (picture,))


def _batching_rows(base: StreamPair, grid: Sequence[StreamPair], found: Answers) -> tuple[Row, ...]:
    rows = []
    for scheduler in (BASELINE, PLUS):
        best = max(grid, key=lambda scene: found[scene, scheduler].rate)
        gain = found[best, scheduler].rate / found[base, scheduler].rate
        rows.append(
            Row(
                "batching", f"best {scheduler.name} over the one used, {base.name}", None, gain, "x",
                f"the paper prints neither; best: at most {best.max_batch} after {best.timeout_ms:g} ms; used in "
                f"Fig. V.5 to V.7 for all: {base.max_batch} after {base.timeout_ms:g} ms",
            )
        )  # fmt: skip
    floor = max(found[scene, BASELINE].rate for scene in grid)
    top = max(found[scene, PLUS].rate for scene in grid)
    rows.append(
        Row(
            "batching", f"layerweaver+ over baseline, each at its best, {base.name}", None, top / floor, "x",
            f"{found[base, PLUS].rate / found[base, BASELINE].rate:.3f} with the settings used for both",
        )
    )  # fmt: skip
    return tuple(rows)


def sequence_length(out: Path, base: StreamPair, tick: Tick | None = None, lengths: Sequence[int] = TOKENS) -> Exhibit:
    """The paper names no sequence length: the longer the text, the more the language models compute."""
    bases = [StreamPair(pair, (1.0, 1.0), base.seq_len, base.duration_s) for pair in (("RN", "BB"), ("MN", "BL"))]
    scenes = {one: [replace(one, seq_len=tokens) for tokens in lengths] for one in bases}
    found = ask([scene for varied in scenes.values() for scene in varied], SCHEDULERS, tick)
    figure, axes = pictures.canvas(10.5, 4.2, 1, len(bases))
    body, rows = [], []
    for axis, (one, varied) in zip(axes, scenes.items(), strict=True):
        over = {
            s: [found[scene, s].stp / found[scene, BASELINE].stp for scene in varied]
            for s in (BASELINE, WOVEN, PLUS, OURS)
        }
        _lines(axis, over, [str(tokens) for tokens in lengths])
        pictures.heading(axis, one.name, xlabel="tokens", ylabel="STP over baseline")
        for index, tokens in enumerate(lengths):
            cells = (f"{found[varied[index], s].rate:.0f}" for s in SCHEDULERS)
            body.append((one.name, str(tokens), *cells))
        rows.append(
            Row(
                "sequence length", f"layerweaver+ over baseline, {one.name}, {lengths[-1]} tokens", None,
                over[PLUS][-1], "x",
                f"not printed; {over[PLUS][0]:.3f} at {lengths[0]} tokens; layerweaver {over[WOVEN][-1]:.3f}, weft+ "
                f"{over[OURS][-1]:.3f} at {lengths[-1]}",
            )
        )  # fmt: skip
    picture = pictures.save(figure, out, "sensitivity-tokens", "Sequence length of the language models")
    header = ("streams", "tokens", *(f"{s.name} requests/s" for s in SCHEDULERS))
    return Exhibit(tuple(rows), (Table("Sequence length: sustainable load", header, tuple(body)),), (picture,))


def _lines(axis: Axes, over: dict[Scheduler, list[float]], ticks: Sequence[str]) -> None:
    for mark, (scheduler, values) in zip("^soD", over.items(), strict=False):
        colour = pictures.POLICIES[scheduler.name]
        axis.plot(range(len(ticks)), values, marker=mark, ms=5, color=colour, label=scheduler.name)
    axis.set_xticks(range(len(ticks)), ticks)


def stretch(
    out: Path,
    base: StreamPair,
    tick: Tick | None = None,
    stretches: Sequence[int] = STRETCHES,
    combinations: Sequence[tuple[tuple[str, str], Ratio]] = STRETCHED,
) -> Exhibit:
    """How long weft+ takes a woven rest to last."""
    scenes = [StreamPair(pair, ratio, base.seq_len, base.duration_s) for pair, ratio in combinations]
    variants = {
        value: Scheduler(f"weft+ {value}", OURS.policy, OURS.late, (("stretch", value),)) for value in stretches
    }
    found = ask(scenes, (PLUS, *variants.values()), tick)
    over = {
        value: [found[scene, variant].stp / found[scene, PLUS].stp for scene in scenes]
        for value, variant in variants.items()
    }
    figure, (axis,) = pictures.canvas(9, 4.4)
    for index, (value, ratios) in enumerate(over.items()):
        axis.plot(
            range(len(scenes)), ratios, linestyle="", marker=pictures.MARKS[index], ms=7, color=pictures.MODELS[index],
            label=f"stretch {value}",
        )  # fmt: skip
    axis.axhline(1, color=pictures.INK, lw=1, linestyle=pictures.DASH)
    axis.set_xticks(range(len(scenes)), [scene.name for scene in scenes])
    axis.set(xlim=(-0.5, len(scenes) - 0.5), ylabel="STP of weft+ over layerweaver+")
    picture = pictures.save(figure, out, "sensitivity-stretch", "weft+: how long a woven rest is taken to last (%)")
    rows = tuple(
        Row(
            "stretch", f"weft+ with stretch {value} over layerweaver+, geomean", None, geomean(ratios), "x",
            f"not in the paper; least {min(ratios):.3f}, most {max(ratios):.3f} over {len(scenes)} points",
        )
        for value, ratios in over.items()
    )  # fmt: skip
    body = tuple(
        (scene.name, *(f"{ratios[index]:.3f}" for ratios in over.values())) for index, scene in enumerate(scenes)
    )
    header = ("streams", *(f"stretch {value}" for value in stretches))
    return Exhibit(rows, (Table("weft+ over layerweaver+ by its stretch: sustainable STP", header, body),), (picture,))
