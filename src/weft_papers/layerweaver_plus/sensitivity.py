"""What the chapter does not print and we had to assume, each assumption varied on its own.

Varied are the batcher's timeout and size limit, the sequence length, and the option "stretch" of our own policy. All
else is as in *base*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from weft.reports.exhibits import Axis, Curve, HeatMap, Panel, ReferenceLine
from weft_papers import pictures
from weft_papers.base import Exhibit, Row, Table, Tick
from weft_papers.layerweaver.lab import geomean
from weft_papers.layerweaver_plus.lab import (
    BASELINE,
    OURS,
    PLUS,
    SCHEDULERS,
    WOVEN,
    Ratio,
    Scheduler,
    StreamPair,
    SustainedLoads,
    search_loads,
)

# values that are tried of the batch timeout, the largest batch, the sequence length and "stretch" in percent
TIMEOUTS_MS = (0.0, 1.0, 2.0, 5.0)
BATCHES = (4, 8, 16, 32, 64)
TOKENS = (16, 64, 128, 384)
STRETCHES = (100, 150, 200, 300)
PAIR = ("RN", "BB")
# The pairs and ratios at which the option "stretch" is varied.
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
    """Vary timeout and size limit of the batcher, to see whether the baseline is tuned fairly."""
    base = StreamPair(PAIR, (1.0, 1.0), base.seq_len, base.duration_s)
    grid = [replace(base, max_batch=batch, timeout_ms=timeout) for batch in batches for timeout in timeouts]
    answers = search_loads([base, *grid], (BASELINE, PLUS), tick)
    highest = max(answer.rate for answer in answers.values())
    x = Axis(label="batch timeout (ms)", names=[f"{timeout:g}" for timeout in timeouts])
    y = Axis(label="largest batch", names=[str(batch) for batch in batches])
    panels = []
    for scheduler in (BASELINE, PLUS):
        rates = np.array([answers[scene, scheduler].rate for scene in grid]).reshape(len(batches), len(timeouts))
        heat = HeatMap(rates, [[f"{rate:.0f}" for rate in row] for row in rates], low=0, high=highest)
        panels.append(Panel([heat], f"{scheduler.name}: sustainable requests/s", x, y, grid=""))
    title = f"Batching of {base.name}: the reproduction uses {base.timeout_ms:g} ms and {base.max_batch}"
    picture = pictures.picture(out, "sensitivity-batching", title, panels, size=(10.5, 4.4), columns=2)
    body = tuple(
        (str(scene.max_batch), f"{scene.timeout_ms:g}", f"{answers[scene, BASELINE].rate:.0f}",
         f"{answers[scene, PLUS].rate:.0f}", f"{answers[scene, PLUS].rate / answers[scene, BASELINE].rate:.3f}")
        for scene in grid
    )  # fmt: skip
    header = ("largest batch", "timeout ms", "baseline requests/s", "layerweaver+ requests/s", "over baseline")
    table = Table(f"Batching of {base.name}: sustainable load", header, body)
    return Exhibit(_batching_rows(base, grid, answers), (table,), (picture,))


def _batching_rows(base: StreamPair, grid: Sequence[StreamPair], answers: SustainedLoads) -> tuple[Row, ...]:
    """Rows on the batcher's settings: what each scheduler gains by its best, and layerweaver+ over baseline with those.

    base: the settings of Fig. V.5 to V.7. grid: all that were tried.
    """
    rows = []
    for scheduler in (BASELINE, PLUS):
        best = max(grid, key=lambda scene: answers[scene, scheduler].rate)
        gain = answers[best, scheduler].rate / answers[base, scheduler].rate
        rows.append(
            Row(
                "batching", f"best {scheduler.name} over the one used, {base.name}", paper=None, ours=gain, unit="x",
                why=f"the paper prints neither; best: at most {best.max_batch} after {best.timeout_ms:g} ms; used in "
                f"Fig. V.5 to V.7 for all: {base.max_batch} after {base.timeout_ms:g} ms",
            )
        )  # fmt: skip
    baseline_best = max(answers[scene, BASELINE].rate for scene in grid)
    plus_best = max(answers[scene, PLUS].rate for scene in grid)
    quantity = f"layerweaver+ over baseline, each at its best, {base.name}"
    rows.append(
        Row(
            "batching", quantity, paper=None, ours=plus_best / baseline_best, unit="x",
            why=f"{answers[base, PLUS].rate / answers[base, BASELINE].rate:.3f} with the settings used for both",
        )
    )  # fmt: skip
    return tuple(rows)


def sequence_length(out: Path, base: StreamPair, tick: Tick | None = None, lengths: Sequence[int] = TOKENS) -> Exhibit:
    """Vary the number of tokens, which the paper does not state; with more tokens, encoders compute more per weight."""
    bases = [StreamPair(pair, (1.0, 1.0), base.seq_len, base.duration_s) for pair in (("RN", "BB"), ("MN", "BL"))]
    scenes = {pair: [replace(pair, seq_len=tokens) for tokens in lengths] for pair in bases}
    answers = search_loads([scene for pair_scenes in scenes.values() for scene in pair_scenes], SCHEDULERS, tick)
    x, y = Axis(label="tokens", names=[str(tokens) for tokens in lengths]), Axis(label="STP over baseline")
    panels, body, rows = [], [], []
    for pair, pair_scenes in scenes.items():
        over = {
            scheduler: [answers[scene, scheduler].stp / answers[scene, BASELINE].stp for scene in pair_scenes]
            for scheduler in (BASELINE, WOVEN, PLUS, OURS)
        }
        curves = [
            Curve(range(len(lengths)), values, scheduler.name, pictures.POLICIES[scheduler.name], mark)
            for mark, (scheduler, values) in zip("^soD", over.items(), strict=True)
        ]
        panels.append(Panel(curves, pair.name, x, y))
        for index, tokens in enumerate(lengths):
            cells = (f"{answers[pair_scenes[index], scheduler].rate:.0f}" for scheduler in SCHEDULERS)
            body.append((pair.name, str(tokens), *cells))
        rows.append(
            Row(
                "sequence length", f"layerweaver+ over baseline, {pair.name}, {lengths[-1]} tokens", None,
                over[PLUS][-1], "x",
                f"not printed; {over[PLUS][0]:.3f} at {lengths[0]} tokens; layerweaver {over[WOVEN][-1]:.3f}, weft+ "
                f"{over[OURS][-1]:.3f} at {lengths[-1]}",
            )
        )  # fmt: skip
    title = "Sequence length of the language models"
    picture = pictures.picture(out, "sensitivity-tokens", title, panels, size=(10.5, 4.2), columns=len(bases))
    header = ("streams", "tokens", *(f"{scheduler.name} requests/s" for scheduler in SCHEDULERS))
    return Exhibit(tuple(rows), (Table("Sequence length: sustainable load", header, tuple(body)),), (picture,))


def stretch(
    out: Path,
    base: StreamPair,
    tick: Tick | None = None,
    stretches: Sequence[int] = STRETCHES,
    combinations: Sequence[tuple[tuple[str, str], Ratio]] = STRETCHED,
) -> Exhibit:
    """Vary weft+'s option "stretch": the estimated duration of the rest of a woven query, in percent of it alone."""
    scenes = [StreamPair(pair, ratio, base.seq_len, base.duration_s) for pair, ratio in combinations]
    variants = {
        value: Scheduler(f"weft+ {value}", OURS.policy, OURS.late, (("stretch", value),)) for value in stretches
    }
    answers = search_loads(scenes, (PLUS, *variants.values()), tick)
    ratios_of = {
        value: [answers[scene, variant].stp / answers[scene, PLUS].stp for scene in scenes]
        for value, variant in variants.items()
    }
    points = [
        Curve(range(len(scenes)), ratios, f"stretch {value}", colour, mark, "", size=7)
        for (value, ratios), colour, mark in zip(ratios_of.items(), pictures.MODELS, pictures.MARKS, strict=False)
    ]
    x = Axis(names=[scene.name for scene in scenes], low=-0.5, high=len(scenes) - 0.5)
    panel = Panel([*points, ReferenceLine(1)], x=x, y=Axis(label="STP of weft+ over layerweaver+"))
    title = "weft+: the assumed duration of a woven query's remaining work (% of that alone)"
    picture = pictures.picture(out, "sensitivity-stretch", title, [panel], size=(9, 4.4))
    rows = tuple(
        Row(
            "stretch", f"weft+ with stretch {value} over layerweaver+, geomean", None, geomean(ratios), "x",
            f"not in the paper; least {min(ratios):.3f}, most {max(ratios):.3f} over {len(scenes)} points",
        )
        for value, ratios in ratios_of.items()
    )  # fmt: skip
    body = tuple(
        (scene.name, *(f"{ratios[index]:.3f}" for ratios in ratios_of.values())) for index, scene in enumerate(scenes)
    )
    header = ("streams", *(f"stretch {value}" for value in stretches))
    return Exhibit(rows, (Table("weft+ over layerweaver+ by its stretch: sustainable STP", header, body),), (picture,))
