"""How far the model of pairs is from those it was not fitted to, as they were measured on an H200."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from weft.devices.gpu_pairs import GpuPairs, PairError, left_out, read_pairs
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table
from weft_papers.gpu.sources import COLOURS

FIGURE = "model of pairs"
WITHIN = 10.0
SHOWN = 20


def predicted(out: Path) -> Exhibit:
    measured = read_pairs()
    errors = left_out(measured)
    return Exhibit((_row(measured, errors),), (_table(errors),), (_drawn(out, errors),))


def _row(measured: GpuPairs, errors: list[PairError]) -> Row:
    worst = max(errors, key=lambda each: each.error)
    why = (
        f"mean of {len(errors)} pairs and ways to share, each left out of the fit with its two models; worst "
        f"{' + '.join(worst.pair.models)} on {worst.pair.how}, {100 * worst.error:.0f} %. {measured.name}: SMs, memory "
        "and kernels' lengths are modelled, power and caches are not"
    )
    return Row(
        FIGURE, "speeds of pairs it was not fitted to, off by", WITHIN, 100 * mean(e.error for e in errors), "%", why
    )


def _table(errors: list[PairError]) -> Table:
    def both(speeds: tuple[float, ...]) -> str:
        return ", ".join(f"{each:.2f}" for each in speeds)

    worst = sorted(errors, key=lambda each: -each.error)[:SHOWN]
    body = [
        (" + ".join(e.pair.models), e.pair.how, both(e.pair.speeds), both(e.speeds), f"{100 * e.error:.0f} %")
        for e in worst
    ]
    header = ("models", "how", "measured", "predicted", "off by")
    return Table(f"{FIGURE}: the {len(body)} it is farthest from, of {len(errors)}", header, tuple(body))


def _drawn(out: Path, errors: list[PairError]) -> Figure:
    figure, (axes,) = pictures.canvas(6.2, 5.4)
    for name, colour, on_streams in (("streams", COLOURS["streams"], True), ("cuts", COLOURS["abreast"], False)):
        some = [each for each in errors if ("+" not in each.pair.how) is on_streams]
        was = [speed for each in some for speed in each.pair.speeds]
        said = [speed for each in some for speed in each.speeds]
        axes.plot(was, said, "o", color=colour, alpha=0.65, markersize=5, label=name)
    axes.plot([0, 1.1], [0, 1.1], color=pictures.INK, linewidth=1, linestyle=pictures.DASH)
    pictures.heading(
        axes, "speed of each of a pair over that alone", xlabel="measured on an H200",
        ylabel="predicted, not fitted to it", xlim=(0, 1.1), ylim=(0, 1.1),
    )  # fmt: skip
    return pictures.save(figure, out, "model-of-pairs", "What two models do to each other: measured and predicted")
