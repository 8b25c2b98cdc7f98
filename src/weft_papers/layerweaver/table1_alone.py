"""Section II-C, Table I and the layer latencies of III-E: the models alone, before any weaving (Fig. 3 and 4)."""

from __future__ import annotations

from pathlib import Path

from weft.devices.costs.program import Clock
from weft.reports.exhibits import Axis, Bars, Curve, Panel, ReferenceLine
from weft_papers import pictures
from weft_papers.base import Exhibit, Paper, Row, Table, beside
from weft_papers.layerweaver.lab import (
    COMPUTE,
    MEMORY,
    MODELS,
    Scene,
    demand,
    device,
    network,
    profile,
)

BATCHES = (1, 2, 4, 8, 16, 32, 64)
NPUS = ("tpuv3-like", "nnpi-like", "weaver-plus")


def table_one(paper: Paper) -> Exhibit:
    """Compare the peak throughput of the two NPUs of Table I."""
    rows = []
    for letter, name in (("a", "tpuv3-like"), ("b", "nnpi-like")):
        npu, peak = device(name), paper[f"peak_{letter}"].value
        ours = 2 * npu.macs_per_s / 1e12
        why = "two operations per MAC unit and cycle at the printed array and clock; the printed peak is rounded"
        rows.append(Row("Table I", f"peak throughput, {name}", peak, ours, "TOP/s", beside(ours, peak, why)))
    return Exhibit(tuple(rows))


def intensity(scene: Scene, model: str) -> float:
    """Operations per off-chip byte; the only off-chip traffic is reading weights and embedding tables."""
    return 2 * network(model, scene.seq_len).macs * scene.batch / profile(scene, model).weight_bytes


def figure_3(paper: Paper, out: Path, seq_len: int, cost: str) -> Exhibit:
    """Draw Fig. 3: arithmetic intensity over the batch size, with the ridge points of the NPUs."""
    intensities = {
        model: [intensity(Scene(device("tpuv3-like"), batch, seq_len, cost), model) for batch in BATCHES]
        for model in MODELS
    }
    curves = [
        Curve(BATCHES, values, model, colour, mark, "-" if model in COMPUTE else "--")
        for (model, values), colour, mark in zip(intensities.items(), pictures.MODELS, pictures.MARKS, strict=False)
    ]
    ridges = [
        ReferenceLine(ridge, f"{name} {ridge:.0f}", lift=lift)
        for name, lift in zip(NPUS, (0, 5, -5), strict=True)
        for ridge in (device(name).ridge_ops_per_byte,)
    ]
    x = Axis(label="batch size", scale="log2", ticks=BATCHES)
    panel = Panel([*curves, *ridges], x=x, y=Axis(label="operations per off-chip byte", scale="log"))
    title = f"Fig. 3: arithmetic intensity at 16 bits, {seq_len} tokens (dashed rules: balance of the NPUs)"
    picture = pictures.picture(out, "fig03-intensity", title, [panel], size=(8.6, 5.2))
    table = Table(
        f"Fig. 3: operations per off-chip byte, {seq_len} tokens (paper: drawn, not printed)",
        ("model", *(f"batch {batch}" for batch in BATCHES)),
        tuple((model, *(f"{value:.3g}" for value in values)) for model, values in intensities.items()),
    )
    return Exhibit(_ridge_rows(paper) + _side_rows(intensities, seq_len), (table,), (picture,))


def _ridge_rows(paper: Paper) -> tuple[Row, ...]:
    """Rows with the balance points of the NPUs, in operations per byte."""
    rows = []
    for letter, name in (("a", "tpuv3-like"), ("b", "nnpi-like")):
        printed = 1000 * paper[f"peak_{letter}"].value / paper[f"bandwidth_{letter}"].value
        ours = device(name).ridge_ops_per_byte
        why = "the paper's is Table I's rounded peak over its bandwidth, ours the exact peak over the same bandwidth"
        rows.append(Row("Fig. 3", f"balance point of {name}", printed, ours, "op/byte", beside(ours, printed, why)))
    return tuple(rows)


def _side_rows(intensities: dict[str, list[float]], seq_len: int) -> tuple[Row, ...]:
    """Rows that count memory-intensive models above the ridge of the memory-centric NPU.

    intensities: model -> value for each batch. This is the only statement of the text on Fig. 3 that can be counted.
    """
    ridge = device("tpuv3-like").ridge_ops_per_byte
    rows = []
    for batch, printed in ((1, 0), (16, 3)):
        ours = sum(intensities[model][BATCHES.index(batch)] > ridge for model in MEMORY)
        why = (
            "the text says so without a number of its own; it holds for "
            f"{ridge / batch:.0f} tokens {'or fewer' if batch == 1 else 'or more'}, and the paper names no length"
        )
        quantity = f"memory-intensive models above the line of tpuv3-like, batch {batch}, {seq_len} tokens"
        rows.append(Row("Fig. 3", quantity, printed, ours, "models", why))
    return tuple(rows)


def figure_4(out: Path, seq_len: int, cost: str) -> Exhibit:
    """Draw Fig. 4: share of active cycles of both resources, each model alone."""
    colours = {"PE array": pictures.PE, "DRAM channel": pictures.DRAM}
    panels, body, active = [], [], {}
    for letter, name in (("a", "tpuv3-like"), ("b", "nnpi-like")):
        for batch in (1, 16):
            scene = Scene(device(name), batch, seq_len, cost)
            shares = {model: _shares(scene, model) for model in MODELS}
            active.update({(name, batch, model): share for model, share in shares.items()})
            series = dict(zip(colours, zip(*shares.values(), strict=True), strict=True))
            y = Axis(label="active cycles (%)", low=0, high=105)
            panels.append(Panel([Bars([*MODELS], series, colours)], f"({letter}) {name}, batch {batch}", y=y))
            body += [(name, str(batch), model, f"{pe:.1f}", f"{dram:.1f}") for model, (pe, dram) in shares.items()]
    title, layout = f"Fig. 4: each model alone, {seq_len} tokens", {"columns": 2, "share_x": True, "share_y": True}
    picture = pictures.picture(out, "fig04-active-cycles", title, panels, size=(11, 6.6), **layout)
    table = Table(
        f"Fig. 4: active cycles of each model alone, {seq_len} tokens (paper: drawn, not printed)",
        ("device", "batch", "model", "PE %", "DRAM %"),
        tuple(body),
    )
    return Exhibit(_figure_4_rows(active), (table,), (picture,))


def _shares(scene: Scene, model: str) -> tuple[float, float]:
    """Active cycles of PE array and DRAM channel in percent of the time of a query alone."""
    query = demand(scene, model)
    return 100 * query.compute / query.alone, 100 * query.memory / query.alone


def _figure_4_rows(active: dict[tuple[str, int, str], tuple[float, float]]) -> tuple[Row, ...]:
    """Rows on what the text says of Fig. 4; *active*: (NPU, batch, model) -> percent of active cycles of each resource.

    The resources are the PE array, then the DRAM channel.
    """
    lowest = {
        (npu, batch): min(active[npu, batch, model][0] for model in COMPUTE)
        for npu in ("tpuv3-like", "nnpi-like")
        for batch in (1, 16)
    }
    return (
        Row(
            "Fig. 4b", "lowest PE activity of a compute-intensive model alone, nnpi-like, batch 16", None,
            lowest["nnpi-like", 16], "%",
            'the text says "fully saturated"; what is missing waits for the weights of late layers with few positions',
        ),
        Row(
            "Fig. 4b", "lowest PE activity of a compute-intensive model alone, nnpi-like, batch 1", None,
            lowest["nnpi-like", 1], "%",
            'the text says "relatively low" for some; at batch 1 all four fetch longer than they compute on this NPU',
        ),
        Row(
            "Fig. 4a", "highest DRAM activity of a compute-intensive model alone, tpuv3-like, batch 16", None,
            max(active["tpuv3-like", 16, model][1] for model in COMPUTE), "%",
            'the text says "very low"; weights are read once for the whole batch',
        ),
    )  # fmt: skip


def layer_latencies(paper: Paper, seq_len: int, cost: str) -> Exhibit:
    """Reproduce section III-E: mean time of a layer, as the time alone over the layers, at batch 1 on both NPUs."""
    layer_us: dict[tuple[str, str], float] = {}
    for name in ("tpuv3-like", "nnpi-like"):
        scene = Scene(device(name), 1, seq_len, cost)
        for model in MODELS:
            # A table read in several pieces, named "[1/4]" and so on, counts as one layer.
            layers = sum("[" not in layer.name or "[1/" in layer.name for layer in profile(scene, model).layers)
            layer_us[name, model] = demand(scene, model).alone * Clock.of(scene.npu).tick_s * 1e6 / layers
    shortest, longest = min(layer_us, key=layer_us.__getitem__), max(layer_us, key=layer_us.__getitem__)
    low, high = paper["layer_latency_min"].value, paper["layer_latency_max"].value
    table = Table(
        "III-E: average time of a layer at batch 1 in us (a table in pieces counts as one layer)",
        ("model", "tpuv3-like", "nnpi-like"),
        tuple(
            (model, f"{layer_us['tpuv3-like', model]:.1f}", f"{layer_us['nnpi-like', model]:.1f}") for model in MODELS
        ),
    )
    shortest_why = (
        "7 MB of weights alone take 1.9 us a layer here and MAESTRO's formula gives 2.8 us; the paper does not say "
        "which model and NPU it means"
    )
    longest_why = (
        "NCF's 63.5 MB of tables count as four layers beside its four dense ones; counted with the dense layers only, "
        "the average is 234 us, the nearest to 221 us of all models, which is why whole tables are streamed"
    )
    rows = tuple(
        Row(
            "III-E",
            f"{extreme} average layer ({model} on {npu})",
            printed,
            layer_us[npu, model],
            "us",
            beside(layer_us[npu, model], printed, why),
        )
        for extreme, (npu, model), printed, why in (
            ("shortest", shortest, low, shortest_why),
            ("longest", longest, high, longest_why),
        )
    )
    return Exhibit(rows, (table,))
