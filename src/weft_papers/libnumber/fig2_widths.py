"""Figure II.5: accuracy over the bits of fixed point (recorded), and histograms of the weights (computed now)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft.models.classifiers import model_path
from weft.reports.exhibits import Axis, Curve, Drawable, Panel, ReferenceLine
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table
from weft_papers.libnumber.lab import LENET, TITLES, by_title
from weft_papers.libnumber.recorded import NetRecord, SearchRecord
from weft_tune.weighted_layers import find_layers, load_flat

FIGURE = "Fig. II.5"
FULL = 0.995
"""A score counts as full accuracy from this fraction of the accuracy in float32."""


def figure_2_5(paper: Paper, out: Path, record: SearchRecord) -> Exhibit:
    """Draw Fig. II.5: accuracy over the width of fixed point, and the distribution of the weights."""
    nets = [record.nets[name] for name in by_title(record.nets) if record.nets[name].widths]
    if not nets:
        return Exhibit()
    return Exhibit(tuple(_rows(paper, nets)), (_table(nets),), (_picture(out, nets),))


def bits_needed(net: NetRecord, scores: Sequence[float]) -> int:
    """The fewest bits from which on every number of bits has the full accuracy of float32 (see FULL).

    scores: accuracy for each number of bits.
    """
    assert net.widths
    full_accuracy = [score >= FULL * net.test for score in scores]
    below = [bits for bits, is_full in zip(net.widths.bits, full_accuracy, strict=True) if not is_full]
    return max(below, default=0) + 1


def target_weights(net: NetRecord) -> npt.NDArray[np.float32]:
    """The weights of the tuned layers of the project's model, as one vector."""
    names = {layer for target in net.network.targets for layer in target.layers}
    layers = find_layers(load_flat(model_path(net.name)))
    return np.concatenate([layer.weight.ravel() for layer in layers if layer.name in names])


def _rows(paper: Paper, nets: Sequence[NetRecord]) -> list[Row]:
    """Rows with the bits that full accuracy needs, over all networks and for LeNet."""
    weights = {net.name: bits_needed(net, net.widths.weights) for net in nets if net.widths}
    both = {net.name: bits_needed(net, net.widths.both) for net in nets if net.widths}
    text = ", ".join(f"{TITLES[name]} {bits} ({both[name]} with inputs)" for name, bits in weights.items())
    rows = [
        Row(FIGURE, "bits for full accuracy, all networks", paper["full_accuracy_bits"].value, max(weights.values()),
            " bits", f"recorded, {100 * FULL:g} % of float32's on the test images, weights only: {text}; one width for "
            "all layers, ranges from the largest weight"),
    ]  # fmt: skip
    if LENET in weights:
        rows.append(
            Row(FIGURE, "bits for full accuracy, LeNet", paper["full_accuracy_lenet"].value, weights[LENET], " bits",
                f"{both[LENET]} with its inputs; a range that takes in the largest weight wastes a bit here, which "
                "tuning the bias gets back")
        )  # fmt: skip
    return rows


def _table(nets: Sequence[NetRecord]) -> Table:
    """Table of the accuracy of every network at every width."""
    body = [
        (TITLES[net.name], str(bits), f"{100 * weights:.2f}", f"{100 * both:.2f}", f"{100 * net.test:.2f}")
        for net in nets
        if net.widths
        for bits, weights, both in zip(*net.widths, strict=True)
    ]
    header = ("network", "bits", "weights only %", "weights and inputs %", "float32 %")
    return Table(f"{FIGURE}(a): accuracy on the test images over the width (recorded)", header, tuple(body))


def _picture(out: Path, nets: Sequence[NetRecord]) -> Figure:
    """Draw accuracy over the width for weights only and for weights and inputs, and the weights' distributions."""
    weights_only: list[Drawable] = []
    both: list[Drawable] = []
    distributions: list[Drawable] = []
    for index, net in enumerate(nets):
        assert net.widths
        colour, mark = pictures.MODELS[index], pictures.MARKS[index]
        for marks, scores in ((weights_only, net.widths.weights), (both, net.widths.both)):
            marks += [
                Curve(net.widths.bits, [100 * score for score in scores], TITLES[net.name], colour, mark),
                ReferenceLine(100 * net.test, colour=colour, dash=":", width=0.8),
            ]
        weights = target_weights(net)
        counts, edges = np.histogram(weights, bins=81, range=(-0.5, 0.5))
        distributions.append(Curve((edges[1:] + edges[:-1]) / 2, 100 * counts / len(weights), None, colour))
    x, y = Axis(label="bits of fixed point", ticks=range(2, 17, 2)), Axis(label="accuracy (%)")
    panels = [
        Panel(weights_only, "(a) weights only", x, y),
        Panel(both, "(a) weights and inputs", x, y),
        Panel(distributions, "(b) weights", Axis(label="value"), Axis(label="% of the weights")),
    ]
    title = f"{FIGURE}: redundancy of the weights (dotted: float32)"
    return pictures.picture(out, "fig2-5-widths", title, panels, size=(12, 3.8), columns=3)
