"""Figure III.6: speed-ups of the recorded formats on hardware, by three models of speed that are computed now.

(a) The chapter synthesises for an FPGA; ours is a proxy: as many products at once as operands fit into a word.
(b) Bit-serial hardware takes one cycle for each bit of an input: ideally, and with the waste of a real array.

``weaving`` combines tuning and weaving, which the dissertation leaves to future work: a memory-bound and a
compute-bound model run together on one NPU under weft's own policy. Tuning the memory-bound one leaves it fewer bytes
to fetch. System throughput before and after is relative to the untuned models alone, so that both can be compared.
MLP-C and Cuda-convnet have recorded formats that keep their accuracy; for BERT-large the widths are hypothetical.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from weft.devices import Npu
from weft.devices.costs.layer_costs import Profile, estimate
from weft.models import Model, import_onnx
from weft.models.classifiers import model_path
from weft.models.zoo import load
from weft.reports.exhibits import Axis, Bars, Panel, ReferenceLine
from weft.simulation import simulate
from weft.workloads import Saturated
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, beside
from weft_papers.layerweaver.lab import device, geomean
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
    formats_text,
    percent,
)
from weft_papers.libnumber.recorded import NetRecord, SearchRecord
from weft_tune.hardware import LayerWork, Speedup, bit_serial, bit_serial_ideal, tuned_model, word_packing, work_of
from weft_tune.numbers.configuration import Configuration

FIGURE = "Fig. III.6"
FPGA_METHODS = (OURS, RISTRETTO, STRIPES)
SERIAL_METHODS = (SERIAL, RISTRETTO, STRIPES)
SERIAL_FOR_MACS = f"{SERIAL} {MACS}"
"""The method SERIAL with the option MACS, as if it were a method of its own."""
SpeedModel = Callable[[Sequence[LayerWork], Configuration], Speedup]
"""Predicts the speed-up of a network on some hardware from the work of its layers and their formats."""


@lru_cache(maxsize=8)
def model_of(name: str) -> Model:
    """The network as the cost models read it from the project's ONNX file."""
    return import_onnx(model_path(name))


def figure_6(paper: Paper, out: Path, record: SearchRecord) -> Exhibit:
    """Reproduce Fig. III.6: speed-ups of the recorded formats by models of an FPGA and of bit-serial hardware."""
    rows = [*_fpga_rows(paper, record), *_serial_rows(paper, record)]
    tables = [_table(record, FPGA_METHODS, MARGINS[0], {"word packing": word_packing})]
    serial = {"bit-serial, ideal": bit_serial_ideal, "bit-serial, structural": bit_serial}
    tables.append(_table(record, (SERIAL, SERIAL_FOR_MACS, RISTRETTO, STRIPES), SERIAL_MARGIN, serial))
    filled = [table for table in tables if table.rows]
    return Exhibit(tuple(rows), tuple(filled), (_picture(paper, out, record),) if rows else ())


def speedups(record: SearchRecord, method: str, margin: float, model: SpeedModel) -> dict[str, float]:
    """Network -> speed-up by *model*, for the networks that the method keeps within the margin."""
    times_faster = {}
    for name in record.tuned(margin):
        net = record.nets[name]
        if configuration := _configuration(net, method, margin):
            times_faster[name] = model(work_of(model_of(name), net.network), configuration).network
    return times_faster


def _configuration(net: NetRecord, method: str, margin: float) -> Configuration | None:
    """The configuration that a method found for a network, or None if it misses the margin."""
    kind, option = (SERIAL, MACS) if method == SERIAL_FOR_MACS else (method, None)
    run = net.find(kind, margin, option) if kind == SERIAL else net.passing(kind, margin)
    return run.configuration if run else None


def _common(record: SearchRecord, methods: Sequence[str], margin: float, model: SpeedModel) -> dict[str, list[float]]:
    """Method -> speed-ups, of the networks that all methods keep within the margin; empty if there is none."""
    by_method = {method: speedups(record, method, margin, model) for method in methods}
    shared = [net for net in record.tuned(margin) if all(net in speeds for speeds in by_method.values())]
    return {method: [speeds[net] for net in shared] for method, speeds in by_method.items()} if shared else {}


def _fpga_rows(paper: Paper, record: SearchRecord) -> list[Row]:
    """Rows with our speed-up on the FPGA proxy, and over two other methods."""
    speeds = _common(record, FPGA_METHODS, MARGINS[0], word_packing)
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
    """Rows with our speed-up on bit-serial hardware: ideal, with a real array's waste, and tuned for MACs."""
    ideal, real = (_common(record, SERIAL_METHODS, SERIAL_MARGIN, model) for model in (bit_serial_ideal, bit_serial))
    if not ideal:
        return []
    speed_up, printed = geomean(ideal[SERIAL]), paper["bit_serial"].value
    others = ", ".join(f"{LABELS[method]} {geomean(ideal[method]):.2f}" for method in (RISTRETTO, STRIPES))
    rows = [
        Row(f"{FIGURE}(b)", f"ideal bit-serial speed-up over 16 bits at {percent(SERIAL_MARGIN)}, geomean", printed,
            speed_up, "x", beside(speed_up, printed, f"our networks, not the chapter's five; {others}")),
        Row(f"{FIGURE}(b)", "the same with the waste of a real array", None, geomean(real[SERIAL]), "x",
            "fully connected layers gain nothing there: their weights arrive no faster"),
    ]  # fmt: skip
    if faster := speedups(record, SERIAL_FOR_MACS, SERIAL_MARGIN, bit_serial_ideal):
        rows.append(
            Row(f"{FIGURE}(b)", "ideal, tuned for products instead of storage, geomean", None, geomean(faster.values()),
                "x", "the objective is the user's to choose: sum(l.macs * l.input_bits for l in layers)")
        )  # fmt: skip
    return rows


def _table(record: SearchRecord, methods: Sequence[str], margin: float, models: Mapping[str, SpeedModel]) -> Table:
    """Table of the speed-ups of every network under every method, a column per hardware model."""
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
    """Draw speed-ups by three hardware models, a bar per network and method."""
    panels = []
    for title, methods, margin, model, key in (
        ("(a) FPGA, packing proxy, over FLOAT 32", FPGA_METHODS, MARGINS[0], word_packing, "fpga"),
        ("(b) bit-serial, ideal, over 16 bits", SERIAL_METHODS, SERIAL_MARGIN, bit_serial_ideal, "bit_serial"),
        ("(b) bit-serial, structural", SERIAL_METHODS, SERIAL_MARGIN, bit_serial, None),
    ):
        bars = [_bars(record, methods, margin, model)] if record.tuned(margin) else []
        printed = [ReferenceLine(paper[key].value, f"printed {paper[key].value:g}")] if key else []
        heading = f"{title}, {percent(margin)}"
        panels.append(Panel([*bars, *printed], heading, Axis(size=7), Axis(label="times faster")))
    title = f"{FIGURE}: what the formats gain, by model"
    return pictures.picture(out, "fig3-6-speeds", title, panels, size=(12, 3.9), columns=3)


def _bars(record: SearchRecord, methods: Sequence[str], margin: float, model: SpeedModel) -> Bars:
    """Bars of the speed-ups of every network and their geometric mean, by method; 0 where a method fails."""
    nets, series, colours = record.tuned(margin), {}, {}
    for method in methods:
        speeds = speedups(record, method, margin, model)
        label = LABELS[OURS if method == SERIAL else method]
        known = [speeds[net] for net in nets if net in speeds]
        series[label] = [*(speeds.get(net, 0.0) for net in nets), geomean(known) if known else 0.0]
        colours[label] = COLOURS[method]
    return Bars([*(TITLES[net] for net in nets), "geomean"], series, colours)


WEAVING = "weaving"
COMPUTING, FETCHING = "cuda-convnet", "mlp-c"
"""The compute-bound and the memory-bound model."""
NPU = "tpuv3-like"
WIDTHS = (16, 8, 6, 4)
"""Bits of a weight of BERT-large; the device has 16."""
POLICY = "weft"


@dataclass(frozen=True, slots=True)
class Woven:
    """A pair of models woven on the device: the first is compute-bound, the second memory-bound."""

    name: str
    weight_bytes: int
    """Bytes of the weights of the memory-bound model."""
    rates: tuple[float, ...]
    """Queries a second of each model."""
    alone_s: tuple[float, ...]
    """Seconds that a query of each model takes alone, in its present formats."""
    stp: float
    """System throughput, relative to the models alone in their present formats."""
    stp_over_untuned: float
    """System throughput, relative to the models alone before tuning."""


def weaving(out: Path, record: SearchRecord, queries: int) -> Exhibit:
    """Report the throughput of woven pairs before and after the formats of the memory-bound model are tuned.

    queries: of each model in a run.
    """
    npu = device(NPU)
    tuned = _weave_tuned(record, npu, queries)
    narrowed = _weave_narrowed(npu, queries)
    tables = [_weaving_table(f"{TITLES[COMPUTING]} and {TITLES[FETCHING]}, formats that keep their accuracy", tuned)]
    tables.append(
        _weaving_table("ResNet-50 and BERT-large, if its weights had so many bits (no accuracy is claimed)", narrowed)
    )
    rows = [_row(pairs[0], after) for pairs in (tuned, narrowed) for after in pairs[1:]]
    picture = _weaving_picture(out, tuned, narrowed)
    return Exhibit(tuple(rows), tuple(table for table in tables if table.rows), (picture,))


def _weave(name: str, models: tuple[Model, Model], npu: Npu, queries: int, before: Woven | None) -> Woven:
    """Simulate a pair woven by weft, one query of each in turn.

    before: the pair before tuning; None if this is the pair before tuning.
    """
    profiles: list[Profile] = [estimate(model, npu) for model in models]
    report = simulate(profiles, npu, POLICY, Saturated(queries, (1.0, 1.0))).report
    rates = tuple(stream.progress / report.makespan_s for stream in report.streams)
    alone = tuple(stream.standalone_s for stream in report.streams)
    reference = before.alone_s if before else alone
    stp_over_untuned = sum(rate * seconds for rate, seconds in zip(rates, reference, strict=True))
    return Woven(name, profiles[1].weight_bytes, rates, alone, report.stp, stp_over_untuned)


def _weave_tuned(record: SearchRecord, npu: Npu, queries: int) -> list[Woven]:
    """Weave Cuda-convnet and MLP-C: untuned, then with MLP-C tuned at each margin that has a result."""
    models = model_of(COMPUTING), model_of(FETCHING)
    pairs = [_weave("float32 in 16 bits", models, npu, queries, None)]
    net = record.nets.get(FETCHING)
    for margin in MARGINS:
        run = net.find(OURS, margin) if net else None
        if net and run:
            smaller = tuned_model(models[1], net.network, run.configuration)
            name = f"{TITLES[FETCHING]} tuned at {percent(margin)}: {formats_text(net.network, run.configuration)}"
            pairs.append(_weave(name, (models[0], smaller), npu, queries, pairs[0]))
    return pairs


def _weave_narrowed(npu: Npu, queries: int) -> list[Woven]:
    """Weave ResNet-50 and BERT-large with weights of WIDTHS bits; no accuracy is claimed."""
    resnet, bert = load("resnet50"), load("bert-large")
    pairs: list[Woven] = []
    for bits in WIDTHS:
        layers = tuple(replace(layer, weight_bits=bits) if layer.weights else layer for layer in bert.layers)
        pair = resnet, replace(bert, layers=layers)
        pairs.append(_weave(f"BERT-large in {bits} bits", pair, npu, queries, pairs[0] if pairs else None))
    return pairs


def _row(before: Woven, after: Woven) -> Row:
    """Row with the system throughput of a pair over that before tuning."""
    return Row(
        WEAVING, f"system throughput over that before tuning, {after.name.partition(':')[0]}", None,
        after.stp_over_untuned / before.stp_over_untuned, "x",
        f"from {before.stp_over_untuned:.3f} to {after.stp_over_untuned:.3f} times the models alone on {NPU}, one "
        f"query of each in turn; the tuned model fetches {before.weight_bytes / after.weight_bytes:.2f} times less, "
        f"alone it is {before.alone_s[1] / after.alone_s[1]:.2f} times faster",
    )  # fmt: skip


def _weaving_table(title: str, pairs: list[Woven]) -> Table:
    """Table of woven pairs; the first one is the pair before tuning."""
    body = tuple(
        (
            woven.name, f"{woven.weight_bytes / 1e6:.3f}", *(f"{1e6 * alone:.1f}" for alone in woven.alone_s),
            f"{woven.stp:.3f}", f"{woven.stp_over_untuned:.3f}",
            f"{woven.stp_over_untuned / pairs[0].stp_over_untuned:.2f}",
        )
        for woven in pairs
    )  # fmt: skip
    header = ("formats", "weights MB", "first alone us", "second alone us", "STP", "STP over untuned", "gain x")
    return Table(f"{WEAVING}: {title}", header, body)


def _weaving_picture(out: Path, tuned: list[Woven], narrowed: list[Woven]) -> Figure:
    """Draw the throughput of the pairs, relative to the models alone before tuning."""
    panels = []
    for pairs, heading in ((tuned, f"{TITLES[COMPUTING]} + {TITLES[FETCHING]}"), (narrowed, "ResNet-50 + BERT-large")):
        names = [woven.name.partition(":")[0].removeprefix("BERT-large in ") for woven in pairs]
        bars = Bars(names, {"throughput": [woven.stp_over_untuned for woven in pairs]}, {"throughput": COLOURS[OURS]})
        y = Axis(label="throughput over the models alone before tuning")
        panels.append(Panel([bars, ReferenceLine(1, dash="-")], heading, Axis(size=7.5), y))
    title = f"Tuned and woven: throughput of a pair on {NPU}, against the models before tuning"
    return pictures.picture(out, "weaving", title, panels, size=(10, 3.7), columns=2)
