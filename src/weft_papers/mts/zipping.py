"""Section III: accuracy of trained nets before and after Multi-Task Zipping, which makes models share weights.

The paper takes zipped models as given and prints no accuracy. Ours were trained and zipped (He, Zhou and Thiele,
NeurIPS 2018) by ``training/zipping.py``. Their accuracies are read from the cards in the repository.
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


def _before(card: ZippedCard) -> float:
    """Mean accuracy of the tasks' own nets, in percent."""
    return 100 * mean(task.accuracy for task in card.tasks)


def _row(card: ZippedCard) -> Row:
    """Row with the accuracy lost by zipping at the ratio nearest to the paper's."""
    nearest = min(card.zipped, key=lambda ratio: abs(ratio.sharing - SHARING))
    after, merged = 100 * mean(nearest.accuracy), 100 * mean(nearest.untuned)
    return Row(
        FIGURE, f"accuracy lost by zipping {len(card.tasks)} nets at {nearest.sharing:g}, {card.name}", None,
        _before(card) - after, " points",
        f"recorded: {_before(card):.2f} % before, {after:.2f} % after, {merged:.2f} % without training them together; "
        f"{nearest.unique_weights / card.weights:.3f} of the weights are left; the paper prints no accuracy",
    )  # fmt: skip


def _table(zipped_cards: Sequence[ZippedCard]) -> Table:
    body = [cells for card in zipped_cards for ratio in card.zipped for cells in _cells(card, ratio)]
    header = ("data", "sharing", "task", "before %", "merged only %", "zipped %", "weights x")
    return Table(f"{FIGURE}: trained nets before and after zipping (recorded)", header, tuple(body))


def _cells(card: ZippedCard, ratio: ZippedRatio) -> list[tuple[str, ...]]:
    """The table cells of a net at one sharing ratio, a line per task."""
    return [
        (
            card.name, f"{ratio.sharing:g}", task.name, f"{100 * task.accuracy:.2f}", f"{100 * merged:.2f}",
            f"{100 * after:.2f}", f"{ratio.unique_weights / card.weights:.3f}",
        )
        for task, merged, after in zip(card.tasks, ratio.untuned, ratio.accuracy, strict=True)
    ]  # fmt: skip


def _picture(out: Path, zipped_cards: Sequence[ZippedCard]) -> Figure:
    """Draw the accuracy of every task over the sharing ratio: zipped, merged only, and alone."""
    panels = []
    for card in zipped_cards:
        ratios, marks = [ratio.sharing for ratio in card.zipped], []
        for index, task in enumerate(card.tasks):
            colour, mark = pictures.MODELS[index], pictures.MARKS[index]
            marks += [
                Curve(ratios, [100 * ratio.accuracy[index] for ratio in card.zipped], task.name, colour, mark),
                Curve(
                    ratios, [100 * ratio.untuned[index] for ratio in card.zipped], None, colour, dash=DASHED, width=1
                ),
                ReferenceLine(100 * task.accuracy, colour=colour, dash=":", width=0.8),
            ]
        x = Axis(label="sharing ratio", ticks=ratios)
        panels.append(Panel(marks, card.name, x, Axis(label="accuracy (%)"), legend=True))
    title = f"{FIGURE}: zipped nets (solid), merged only (dashed), alone (dotted)"
    return pictures.picture(
        out, "zipping", title, panels, size=(4.6 * len(zipped_cards), 3.9), columns=len(zipped_cards)
    )
