"""Fig. 19 and 20: other batch sizes, and four models at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from weft.reports.exhibits import MUTED, Axis, Bars, Panel, Strokes, Texts
from weft_papers import pictures
from weft_papers.base import Exhibit, Paper, Row, Table
from weft_papers.layerweaver.lab import (
    FAILSAFE_OFF,
    FOURS,
    PAIRS,
    Models,
    Options,
    Scene,
    Throughputs,
    aimt_options,
    bound,
    device,
    geomean,
    joined_names,
    one_sided,
    report_of_run,
    throughputs,
)

BATCHES = (1, 2, 4, 8, 16)  # on the axis of the figure
STARVED = 0.02
"""A model counts as starved if it gets less than this fraction of an equal share of the time."""


def figure_19(out: Path, scenes: tuple[Scene, ...], queries: int, pairs: tuple[Models, ...] = PAIRS) -> Exhibit:
    """Draw Fig. 19: throughput over the batch size; AI-MT keeps the thresholds tuned at the batch of Fig. 14."""
    panels, rows, body = [], [], []
    for letter, base in zip("ab", scenes, strict=True):
        results = [_at_batch(replace(base, batch=batch), base, queries, pairs) for batch in BATCHES]
        series = {policy: [result[policy].stp for result in results] for policy in results[0]}
        fire_counts = [sum(one_sided(replace(base, batch=batch), pair) for pair in pairs) for batch in BATCHES]
        bars = Bars([str(batch) for batch in BATCHES], series, pictures.POLICIES)
        tops = [max(stps) + 0.02 for stps in zip(*series.values(), strict=True)]
        count_texts = [f"failsafe\n{count} of {len(pairs)}" for count in fire_counts]
        heading = f"({letter}) {base.npu.name}, {base.seq_len} tokens (Fig. 14: batch {base.batch})"
        y = Axis(label="STP, geomean of the pairs", low=0.8, high=1.85)
        marks = [bars, Texts(bars.places(), tops, count_texts, MUTED, 7.5)]
        panels.append(Panel(marks, heading, Axis(label="batch size"), y))
        rows += _batch_rows(f"Fig. 19{letter}", base, series, fire_counts, len(pairs))
        body += [
            (
                *(base.npu.name, str(batch)),
                *(f"{result.stp:.3f}" for result in results[index].values()),
                *(f"{result.fraction:.3f}" for result in results[index].values()),
                *(str(fire_counts[index]), "not printed"),
            )
            for index, batch in enumerate(BATCHES)
        ]
    title = "Fig. 19: system throughput over the batch size"
    picture = pictures.picture(out, "fig19-batch", title, panels, size=(11, 4.5), columns=len(scenes), share_y=True)
    fractions = ("aimt/bound", "layerweaver/bound", "weft/bound")
    header = ("device", "batch", "aimt", "layerweaver", "weft", *fractions, "failsafe fires", "paper")
    table = Table(f"Fig. 19: STP, geomean of {len(pairs)} pairs", header, tuple(body))
    return Exhibit(tuple(rows), (table,), (picture,))


def _at_batch(scene: Scene, tuned_scene: Scene, queries: int, pairs: tuple[Models, ...]) -> dict[str, Throughputs]:
    """Throughput of three policies in *scene*; AI-MT has the thresholds tuned in *tuned_scene*."""
    return {
        "aimt": throughputs(scene, "aimt", queries, aimt_options(tuned_scene, pairs), pairs),
        "layerweaver": throughputs(scene, "layerweaver", queries, (), pairs),
        "weft": throughputs(scene, "weft", queries, (), pairs),
    }


def _batch_rows(figure: str, base: Scene, series: dict[str, list[float]], fires: list[int], pairs: int) -> list[Row]:
    """Rows of a half of Fig. 19: Layerweaver's throughput at each batch.

    series: policy -> throughput by batch. fires: pairs that trip the failsafe, by batch. pairs: number of pairs.
    """
    trend = (
        "larger batches make all models compute-bound" if base.batch == 1 else "smaller batches make all memory-bound"
    )
    behind_text = (
        "; with NCF, layers now compute longer than the buffer takes to fill, so the bound is out of reach, and weft, "
        "which steers by the bound's mix and prices, falls behind layerweaver"
    )
    # Differences of up to 0.005 are not explained.
    return [
        Row(
            figure, f"STP of layerweaver, geomean, {base.npu.name}, batch {batch}", None, series["layerweaver"][i], "x",
            f"drawn, not printed; the trend agrees: {trend}, and the failsafe disables {fires[i]} of {pairs} pairs; "
            f"aimt {series['aimt'][i]:.3f}, weft {series['weft'][i]:.3f}"
            + (behind_text if series["weft"][i] < series["layerweaver"][i] - 0.005 else ""),
        )
        for i, batch in enumerate(BATCHES)
    ]  # fmt: skip


def figure_20(
    paper: Paper, out: Path, seq_len: int, cost: str, queries: int, fours: tuple[Models, ...] = FOURS
) -> Exhibit:
    """Draw Fig. 20: four models at once, on the NPU that the paper states and in the two scenes of Fig. 14."""
    settings = (("nnpi-like", 1, "as printed"), ("tpuv3-like", 1, "scenario (a)"), ("nnpi-like", 16, "scenario (b)"))
    colours = {**pictures.POLICIES, "stitched pairs": "#56b4e9"}
    panels, rows, tables = [], [], []
    for name, batch, label in settings:
        scene = Scene(device(name), batch, seq_len, cost)
        results = _four(scene, queries, fours)
        series = {policy: [*values, geomean(values)] for policy, values in results.items()}
        bars = Bars([*(joined_names(models) for models in fours), "geomean"], series, colours)
        bounds = Strokes(bars.places()[:-1], [bound(scene, models) for models in fours], 0.88, "bound")
        panels.append(Panel([bars, bounds], f"{scene} ({label})", y=Axis(label="STP", low=0.8)))
        rows += _four_rows(paper, f"Fig. 20, {name} batch {batch}", scene, results, queries, fours)
        tables.append(_four_table(scene, results, queries, fours))
    title = "Fig. 20: four models at once (one at a time: 1.00)"
    picture = pictures.picture(out, "fig20-four-models", title, panels, size=(13, 3.2 * len(settings) + 0.9))
    return Exhibit(tuple(rows), tuple(tables), (picture,))


def _four(scene: Scene, queries: int, fours: tuple[Models, ...]) -> dict[str, list[float]]:
    """Throughput of every combination of four models, by policy."""
    return {
        "aimt": list(throughputs(scene, "aimt", queries, aimt_options(scene, fours), fours).stps),
        "stitched pairs": [stitched(scene, models, queries) for models in fours],
        "layerweaver": list(throughputs(scene, "layerweaver", queries, (), fours).stps),
        "weft": list(throughputs(scene, "weft", queries, (), fours).stps),
    }


def stitched(scene: Scene, models: Models, queries: int) -> float:
    """STP of four models as two woven pairs, each for half of the time; the better of the two ways to pair them."""
    first, second, third, fourth = models
    pairings = (((first, third), (second, fourth)), ((first, fourth), (second, third)))
    return max(sum(throughputs(scene, "layerweaver", queries, (), pairing).stps) / 2 for pairing in pairings)


def _four_rows(
    paper: Paper,
    figure: str,
    scene: Scene,
    results: dict[str, list[float]],
    queries: int,
    fours: tuple[Models, ...],
) -> list[Row]:
    """Rows of a scene of Fig. 20: Layerweaver against AI-MT and stitched pairs, starved models, and weft."""
    means = {policy: geomean(values) for policy, values in results.items()}
    disabled = sum(one_sided(scene, models) for models in fours)
    if disabled == len(fours):
        why = (
            "as printed it cannot pay: at batch 1 all models fetch longer than they compute on this NPU (Fig. 4b, and "
            "the text of Fig. 19), the failsafe fires, and no schedule exceeds the bound of "
            f"{geomean(bound(scene, models) for models in fours):.2f}; the paper's NPU or batch is probably another"
        )
    else:
        why = f"our AI-MT is tuned on the {len(fours)} combinations and stronger than the paper's, as in Fig. 14"
    over_aimt = 100 * (means["layerweaver"] / means["aimt"] - 1)
    over_stitched = 100 * (means["layerweaver"] / means["stitched pairs"] - 1)
    greedy_shares = least_shares(scene, "layerweaver", fours, queries, FAILSAFE_OFF)
    smallest_share = min(least_shares(scene, "weft", fours, queries))
    return [
        Row(figure, "layerweaver over aimt, geomean", paper["four_over_aimt"].value, over_aimt, "%", why),
        Row(
            figure, "four woven over two stitched pairs, geomean", paper["four_over_stitched"].value, over_stitched,
            "%",
            'the paper prints "<1 %"; stitched: the better of the two pairings, half of the time for each pair, free '
            "to choose its mix; a gain well above that comes from starving a model that layerweaver finds unprofitable",
        ),
        Row(
            figure, "combinations in which layerweaver starves a model", None,
            sum(share < STARVED for share in greedy_shares), "combinations",
            f"a model gets under {100 * STARVED:g} % of an equal share, failsafe off; the smallest share is "
            f"{100 * min(greedy_shares):.2f} %; the paper does not say whether it happens there",
        ),
        Row(
            figure, "STP of weft, geomean", None, means["weft"], "x",
            "not in the paper; STP rewards serving the best pair, and so does weft, but no model gets less than "
            f"{100 * smallest_share:.1f} % of an equal share",
        ),
    ]  # fmt: skip


def least_shares(
    scene: Scene, policy: str, fours: tuple[Models, ...], queries: int, options: Options = ()
) -> list[float]:
    """For each combination, the share of the worst-served model: standalone time of its work over the makespan.

    It is relative to an equal share, 1 / number of models.
    """
    shares = []
    for models in fours:
        report = report_of_run(scene, models, policy, queries, options)
        shares.append(
            min(stream.progress * stream.standalone_s * len(models) / report.makespan_s for stream in report.streams)
        )
    return shares


def _four_table(scene: Scene, results: dict[str, list[float]], queries: int, fours: tuple[Models, ...]) -> Table:
    """Table of a scene of Fig. 20: STP by policy, and the queries that each of the four models completed."""
    body = []
    for index, models in enumerate(fours):
        report = report_of_run(scene, models, "layerweaver", queries, FAILSAFE_OFF)
        cells = (f"{values[index]:.3f}" for values in results.values())
        done = " ".join(str(stream.queries) for stream in report.streams)
        body.append((joined_names(models), *cells, f"{bound(scene, models):.3f}", done, "not printed"))
    header = ("models", *results, "bound", "queries, layerweaver without failsafe", "paper")
    return Table(f"Fig. 20: STP of four models on {scene}", header, tuple(body))
