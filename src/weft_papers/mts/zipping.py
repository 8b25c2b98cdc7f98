"""III: where weight-shared models come from. Multi-Task Zipping of trained nets, accuracy before and after.

The paper takes zipped models as given and prints no accuracy. Ours were trained and zipped by ``training/zipping.py``
(He, Zhou and Thiele, NeurIPS 2018) and lie in the repository with their cards: recorded, not trained anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.reports.exhibits import DASHED, Axis, Curve, Panel, ReferenceLine
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table
from weft_papers.layerweaver.lab import mean
from weft_stitch.making.zipped import ZIPPED, ZippedCard, ZippedRatio, read_card

FIGURE = "III"
SHARING = 0.9  # the sharing ratio of the paper's evaluation


def cards() -> list[ZippedCard]:
    """Read the cards of the zipped nets in the repository."""
    return [read_card(name) for name in ZIPPED]


def zipping(out: Path, zipped_cards: Sequence[ZippedCard]) -> Exhibit:
    """Report the accuracy of nets before and after zipping."""
    return Exhibit(tuple(map(_row, zipped_cards)), (_table(zipped_cards),), (_picture(out, zipped_cards),))


def _before(one: ZippedCard) -> float:
    """Mean accuracy of the tasks' own nets, in percent."""
    return 100 * mean(task.accuracy for task in one.tasks)


def _row(one: ZippedCard) -> Row:
    """Row with the accuracy lost by zipping at the ratio nearest to the paper's."""
    nearest = min(one.zipped, key=lambda ratio: abs(ratio.sharing - SHARING))
    after, merged = 100 * mean(nearest.accuracy), 100 * mean(nearest.untuned)
    return Row(
        FIGURE, f"accuracy lost by zipping {len(one.tasks)} nets at {nearest.sharing:g}, {one.name}", None,
        _before(one) - after, " points",
        f"recorded: {_before(one):.2f} % before, {after:.2f} % after, {merged:.2f} % without training them together; "
        f"{nearest.unique_weights / one.weights:.3f} of the weights are left; the paper prints no accuracy",
    )  # fmt: skip


def _table(zipped_cards: Sequence[ZippedCard]) -> Table:
    body = [cells for one in zipped_cards for ratio in one.zipped for cells in _cells(one, ratio)]
    header = ("data", "sharing", "task", "before %", "merged only %", "zipped %", "weights x")
    return Table(f"{FIGURE}: trained nets before and after zipping (recorded)", header, tuple(body))


def _cells(one: ZippedCard, ratio: ZippedRatio) -> list[tuple[str, ...]]:
    """The table cells of a net at one sharing ratio, a line per task."""
    return [
        (
            one.name, f"{ratio.sharing:g}", task.name, f"{100 * task.accuracy:.2f}", f"{100 * merged:.2f}",
            f"{100 * after:.2f}", f"{ratio.unique_weights / one.weights:.3f}",
        )
        for task, merged, after in zip(one.tasks, ratio.untuned, ratio.accuracy, strict=True)
    ]  # fmt: skip


def _picture(out: Path, zipped_cards: Sequence[ZippedCard]) -> Figure:
    """Draw the accuracy of every task over the sharing ratio: zipped, merged only, and alone."""
    panels = []
    for net in zipped_cards:
        ratios, marks = [zipped.sharing for zipped in net.zipped], []
        for place, task in enumerate(net.tasks):
            colour, mark = pictures.MODELS[place], pictures.MARKS[place]
            marks += [
                Curve(ratios, [100 * zipped.accuracy[place] for zipped in net.zipped], task.name, colour, mark),
                Curve(
                    ratios, [100 * zipped.untuned[place] for zipped in net.zipped], None, colour, dash=DASHED, width=1
                ),
                ReferenceLine(100 * task.accuracy, colour=colour, dash=":", width=0.8),
            ]
        x = Axis(label="sharing ratio", ticks=ratios)
        panels.append(Panel(marks, net.name, x, Axis(label="accuracy (%)"), legend=True))
    title = f"{FIGURE}: zipped nets (solid), merged only (dashed), alone (dotted)"
    return pictures.picture(
        out, "zipping", title, panels, size=(4.6 * len(zipped_cards), 3.9), columns=len(zipped_cards)
    )
