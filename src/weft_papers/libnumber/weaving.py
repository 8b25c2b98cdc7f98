"""Tuning and weaving together, which the dissertation leaves to the future: a pair of models on one NPU.

One model waits for its weights, the other for its products. Tuning the first leaves it less to fetch; both are then
woven by weft's own policy. System throughput is counted against the models in the width of the device, alone, before
and after, so that the numbers can be compared. MLP-C and Cuda-convnet have recorded formats that keep their accuracy;
for BERT-large the width is a question only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from weft.devices import Npu
from weft.devices.costs.layer_costs import Profile, estimate
from weft.models import Model
from weft.models.zoo import load
from weft.reports.exhibits import Axis, Bars, Panel, ReferenceLine
from weft.simulation import simulate
from weft.workloads import Saturated
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table
from weft_papers.layerweaver.lab import device
from weft_papers.libnumber.fig6_speeds import model_of
from weft_papers.libnumber.lab import COLOURS, MARGINS, OURS, TITLES, percent, shown
from weft_papers.libnumber.recorded import SearchRecord
from weft_tune.hardware import tuned_model

FIGURE = "weaving"
COMPUTING, FETCHING = "cuda-convnet", "mlp-c"
NPU = "tpuv3-like"
WIDTHS = (16, 8, 6, 4)
"""Bits of a weight of BERT-large; the device has 16."""
POLICY = "weft"


@dataclass(frozen=True, slots=True)
class Woven:
    """A pair of models on the device."""

    name: str
    weight_bytes: int
    """The weights of the model that fetches."""
    rates: tuple[float, ...]
    """Queries a second of each model."""
    alone_s: tuple[float, ...]
    """The time that each model takes alone as it is now."""
    stp: float
    """Against themselves, as they are now."""
    worth: float
    """Against the models before tuning."""


def weaving(out: Path, record: SearchRecord, queries: int) -> Exhibit:
    npu = device(NPU)
    tuned = _ours(record, npu, queries)
    asked = _what_if(npu, queries)
    tables = [_table(f"{TITLES[COMPUTING]} and {TITLES[FETCHING]}, formats that keep their accuracy", tuned)]
    tables.append(_table("ResNet-50 and BERT-large, if its weights had so many bits (no accuracy is claimed)", asked))
    rows = [*(_row(tuned[0], changed) for changed in tuned[1:]), *(_row(asked[0], changed) for changed in asked[1:])]
    return Exhibit(tuple(rows), tuple(table for table in tables if table.rows), (_picture(out, tuned, asked),))


def _woven(name: str, models: tuple[Model, Model], npu: Npu, queries: int, before: Woven | None) -> Woven:
    profiles: list[Profile] = [estimate(model, npu) for model in models]
    report = simulate(profiles, npu, POLICY, Saturated(queries, (1.0, 1.0))).report
    rates = tuple(stream.progress / report.makespan_s for stream in report.streams)
    alone = tuple(stream.standalone_s for stream in report.streams)
    reference = before.alone_s if before else alone
    worth = sum(rate * seconds for rate, seconds in zip(rates, reference, strict=True))
    return Woven(name, profiles[1].weight_bytes, rates, alone, report.stp, worth)


def _ours(record: SearchRecord, npu: Npu, queries: int) -> list[Woven]:
    models = model_of(COMPUTING), model_of(FETCHING)
    pairs = [_woven("float32 in 16 bits", models, npu, queries, None)]
    net = record.nets.get(FETCHING)
    for margin in MARGINS:
        run = net.find(OURS, margin) if net else None
        if net and run:
            smaller = tuned_model(models[1], net.network, run.configuration)
            name = f"{TITLES[FETCHING]} tuned at {percent(margin)}: {shown(net.network, run.configuration)}"
            pairs.append(_woven(name, (models[0], smaller), npu, queries, pairs[0]))
    return pairs


def _what_if(npu: Npu, queries: int) -> list[Woven]:
    computing, fetching = load("resnet50"), load("bert-large")
    pairs: list[Woven] = []
    for bits in WIDTHS:
        layers = tuple(replace(layer, weight_bits=bits) if layer.weights else layer for layer in fetching.layers)
        pair = computing, replace(fetching, layers=layers)
        pairs.append(_woven(f"BERT-large in {bits} bits", pair, npu, queries, pairs[0] if pairs else None))
    return pairs


def _row(before: Woven, after: Woven) -> Row:
    return Row(
        FIGURE, f"system throughput over that before tuning, {after.name.partition(':')[0]}", None,
        after.worth / before.worth, "x",
        f"from {before.worth:.3f} to {after.worth:.3f} models' worth on {NPU}, one query of each in turn; it fetches "
        f"{before.weight_bytes / after.weight_bytes:.2f} times less, alone it is "
        f"{before.alone_s[1] / after.alone_s[1]:.2f} times faster",
    )  # fmt: skip


def _table(title: str, pairs: list[Woven]) -> Table:
    body = tuple(
        (
            woven.name, f"{woven.weight_bytes / 1e6:.3f}", *(f"{1e6 * alone:.1f}" for alone in woven.alone_s),
            f"{woven.stp:.3f}", f"{woven.worth:.3f}", f"{woven.worth / pairs[0].worth:.2f}",
        )
        for woven in pairs
    )  # fmt: skip
    header = ("formats", "weights MB", "first alone us", "second alone us", "STP", "STP of before", "gain x")
    return Table(f"{FIGURE}: {title}", header, body)


def _picture(out: Path, tuned: list[Woven], asked: list[Woven]) -> Figure:
    panels = []
    for pairs, heading in ((tuned, f"{TITLES[COMPUTING]} + {TITLES[FETCHING]}"), (asked, "ResNet-50 + BERT-large")):
        names = [woven.name.partition(":")[0].removeprefix("BERT-large in ") for woven in pairs]
        bars = Bars(names, {"worth": [woven.worth for woven in pairs]}, {"worth": COLOURS[OURS]})
        y = Axis(label="models' worth of throughput")
        panels.append(Panel([bars, ReferenceLine(1, dash="-")], heading, Axis(size=7.5), y))
    title = f"Tuned and woven: throughput of a pair on {NPU}, against the models before tuning"
    return pictures.picture(out, "weaving", title, panels, size=(10, 3.7), columns=2)
