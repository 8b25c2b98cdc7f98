"""Figure III.6: what the recorded formats would gain on hardware, by three models that are computed anew.

(a) The chapter synthesises for an FPGA; ours is a proxy: as many products at once as operands fit into a word.
(b) Bit-serial hardware takes one cycle for each bit of an input: ideally, and with the waste of a real array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from weft.models import Model, import_onnx
from weft.models.classifiers import model_path
from weft.reports.exhibits import Axis, Bars, Panel, ReferenceLine
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, beside
from weft_papers.layerweaver.lab import geomean
from weft_papers.libnumber.jobs import MACS, SERIAL_MARGIN
from weft_papers.libnumber.lab import (
    COLOURS,
    LABELS,
    MARGINS,
    OURS,
    RISTRETTO,
    SERIAL,
    STRIPES,
    TITLES,
    percent,
)
from weft_papers.libnumber.recorded import NetRecord, SearchRecord
from weft_tune.hardware import LayerWork, Speedup, bit_serial, bit_serial_ideal, word_packing, work_of
from weft_tune.numbers.configuration import Configuration

FIGURE = "Fig. III.6"
ON_FPGA = (OURS, RISTRETTO, STRIPES)
SERIALLY = (SERIAL, RISTRETTO, STRIPES)
SpeedModel = Callable[[Sequence[LayerWork], Configuration], Speedup]


@lru_cache(maxsize=8)
def model_of(name: str) -> Model:
    """One of the four, as the cost models see it."""
    return import_onnx(model_path(name))


def figure_6(paper: Paper, out: Path, record: SearchRecord) -> Exhibit:
    rows = [*_fpga_rows(paper, record), *_serial_rows(paper, record)]
    tables = [_table(record, ON_FPGA, MARGINS[0], {"word packing": word_packing})]
    serial = {"bit-serial, ideal": bit_serial_ideal, "bit-serial, structural": bit_serial}
    tables.append(_table(record, (SERIAL, f"{SERIAL} {MACS}", RISTRETTO, STRIPES), SERIAL_MARGIN, serial))
    filled = [table for table in tables if table.rows]
    return Exhibit(tuple(rows), tuple(filled), (_picture(paper, out, record),) if rows else ())


def speedups(record: SearchRecord, method: str, margin: float, model: SpeedModel) -> dict[str, float]:
    """Network -> how many times faster, where the method keeps the margin."""
    times_faster = {}
    for name in record.tuned(margin):
        net = record.nets[name]
        if configuration := _configuration(net, method, margin):
            times_faster[name] = model(work_of(model_of(name), net.network), configuration).network
    return times_faster


def _configuration(net: NetRecord, method: str, margin: float) -> Configuration | None:
    kind, option = (SERIAL, MACS) if method == f"{SERIAL} {MACS}" else (method, None)
    run = net.find(kind, margin, option) if kind == SERIAL else net.passing(kind, margin)
    return run.configuration if run else None


def _common(record: SearchRecord, methods: Sequence[str], margin: float, model: SpeedModel) -> dict[str, list[float]]:
    """The speeds of the networks that all methods have."""
    every = {method: speedups(record, method, margin, model) for method in methods}
    shared = [net for net in record.tuned(margin) if all(net in speeds for speeds in every.values())]
    return {method: [speeds[net] for net in shared] for method, speeds in every.items()} if shared else {}


def _fpga_rows(paper: Paper, record: SearchRecord) -> list[Row]:
    speeds = _common(record, ON_FPGA, MARGINS[0], word_packing)
    if not speeds:
        return []
    ours = geomean(speeds[OURS])
    listed = ", ".join(f"{speed:.2f}" for speed in speeds[OURS])
    rows = [
        Row(f"{FIGURE}(a)", f"FPGA speed-up over FLOAT 32 at {percent(MARGINS[0])}, geomean", paper["fpga"].value, ours,
            "x", beside(ours, paper["fpga"].value, f"a packing proxy, not synthesis, for our networks: {listed}")),
    ]  # fmt: skip
    for method, key in ((STRIPES, "fpga_over_stripes"), (RISTRETTO, "fpga_over_ristretto")):
        gain = 100 * (ours / geomean(speeds[method]) - 1)
        why = f"the same proxy for its formats: {', '.join(f'{speed:.2f}' for speed in speeds[method])}"
        rows.append(Row(f"{FIGURE}(a)", f"the same over {LABELS[method]}", paper[key].value, gain, "%", why))
    return rows


def _serial_rows(paper: Paper, record: SearchRecord) -> list[Row]:
    ideal, real = (_common(record, SERIALLY, SERIAL_MARGIN, model) for model in (bit_serial_ideal, bit_serial))
    if not ideal:
        return []
    value, theirs = geomean(ideal[SERIAL]), paper["bit_serial"].value
    others = ", ".join(f"{LABELS[method]} {geomean(ideal[method]):.2f}" for method in (RISTRETTO, STRIPES))
    rows = [
        Row(f"{FIGURE}(b)", f"ideal bit-serial speed-up over 16 bits at {percent(SERIAL_MARGIN)}, geomean", theirs,
            value, "x", beside(value, theirs, f"our networks, not the chapter's five; {others}")),
        Row(f"{FIGURE}(b)", "the same with the waste of a real array", None, geomean(real[SERIAL]), "x",
            "fully connected layers gain nothing there: their weights arrive no faster"),
    ]  # fmt: skip
    if macs := speedups(record, f"{SERIAL} {MACS}", SERIAL_MARGIN, bit_serial_ideal):
        rows.append(
            Row(f"{FIGURE}(b)", "ideal, tuned for products instead of storage, geomean", None, geomean(macs.values()),
                "x", "the objective is the user's to choose: sum(l.macs * l.input_bits for l in layers)")
        )  # fmt: skip
    return rows


def _table(record: SearchRecord, methods: Sequence[str], margin: float, models: Mapping[str, SpeedModel]) -> Table:
    body = []
    for method in methods:
        speeds = {title: speedups(record, method, margin, model) for title, model in models.items()}
        label = LABELS.get(method, f"{LABELS[SERIAL]}, for products")
        for net in record.tuned(margin):
            cells = [f"{by_net[net]:.2f}" if net in by_net else "fails" for by_net in speeds.values()]
            body.append((TITLES[net], label, *cells))
    header = ("network", "method", *(f"{title} x" for title in models))
    return Table(f"{FIGURE}: speed-ups of recorded formats at {percent(margin)}, computed", header, tuple(body))


def _picture(paper: Paper, out: Path, record: SearchRecord) -> Figure:
    panels = []
    for title, methods, margin, model, key in (
        ("(a) FPGA, packing proxy, over FLOAT 32", ON_FPGA, MARGINS[0], word_packing, "fpga"),
        ("(b) bit-serial, ideal, over 16 bits", SERIALLY, SERIAL_MARGIN, bit_serial_ideal, "bit_serial"),
        ("(b) bit-serial, structural", SERIALLY, SERIAL_MARGIN, bit_serial, None),
    ):
        bars = [_bars(record, methods, margin, model)] if record.tuned(margin) else []
        printed = [ReferenceLine(paper[key].value, f"printed {paper[key].value:g}")] if key else []
        heading = f"{title}, {percent(margin)}"
        panels.append(Panel([*bars, *printed], heading, Axis(size=7), Axis(label="times faster")))
    title = f"{FIGURE}: what the formats gain, by model"
    return pictures.picture(out, "fig3-6-speeds", title, panels, size=(12, 3.9), columns=3)


def _bars(record: SearchRecord, methods: Sequence[str], margin: float, model: SpeedModel) -> Bars:
    nets, series, colours = record.tuned(margin), {}, {}
    for method in methods:
        speeds = speedups(record, method, margin, model)
        label = LABELS[OURS if method == SERIAL else method]
        known = [speeds[net] for net in nets if net in speeds]
        series[label] = [*(speeds.get(net, 0.0) for net in nets), geomean(known) if known else 0.0]
        colours[label] = COLOURS[method]
    return Bars([*(TITLES[net] for net in nets), "geomean"], series, colours)
