"""Figure III.4: one search step by step, LeNet's two convolutions at 1 %. Recorded with every trial."""

from __future__ import annotations

from pathlib import Path

from weft_papers.base import Exhibit, Figure, Paper, Row, Table
from weft_papers.libnumber.lab import LENET, shown
from weft_papers.libnumber.recorded import SearchRecord
from weft_papers.pictures import make_folder
from weft_tune.pages.picture import draw_search
from weft_tune.result import Tuning

FIGURE = "Fig. III.4"


def figure_4(paper: Paper, out: Path, record: SearchRecord) -> Exhibit:
    net = record.nets.get(LENET)
    if net is None or net.path is None:
        return Exhibit()
    return Exhibit(tuple(_rows(paper, net.path)), (_table(net.path),), (_picture(out, net.path),))


def _rows(paper: Paper, search: Tuning) -> list[Row]:
    coarse = [trial for trial in search.trials if trial.phase == 1 and trial.step == "coarse"]
    kept = [trial for trial in coarse if trial.chosen]
    bits = min((form.bits for trial in kept[-1:] for form in trial.configuration.values()), default=32)
    threshold = search.thresholds["full"]
    return [
        Row(FIGURE, "threshold of LeNet at 1 %", paper["lenet_threshold"].value, threshold, "",
            f"our LeNet scores {search.base['full']:.4f} in float32 on the validation images"),
        Row(FIGURE, "bits after the coarse search", paper["lenet_coarse_bits"].value, bits, " bits",
            "one format for all: from FLOAT 32 by halves to FIXED, then bisection"),
        Row(FIGURE, "configurations of the coarse search", paper["lenet_coarse_iterations"].value, len(coarse), "",
            "FLOAT 32 is the base and not counted; EXP is tried below what FIXED came to as long as it passes"),
    ]  # fmt: skip


def _table(search: Tuning) -> Table:
    body = tuple(
        (str(kept.phase), kept.step, shown(search.network, kept.configuration, bias=True), f"{kept.score:.4f}",
         f"{kept.objective:.0f}")
        for kept in search.path
    )  # fmt: skip
    header = ("phase", "step", "inputs / weights (bias)", "score", "bits")
    return Table(f"{FIGURE}: the way of the search, LeNet at 1 % (recorded)", header, body)


def _picture(out: Path, search: Tuning) -> Figure:
    path = out / "fig3-4-search.png"
    make_folder(out)
    for suffix in (".png", ".svg"):
        draw_search(search, path.with_suffix(suffix))
    return Figure(f"{FIGURE}: tuning the two convolutions of LeNet at 1 % (recorded)", path)
