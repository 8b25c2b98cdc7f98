"""Beyond the paper: fine-tuned encoders with a common body (backbone), which shares whole weights, not channels.

The paper's form is for convolutions. Here a node that several models share runs once for all of them, as in PetS (Zhou
et al., USENIX ATC 2022); adapters become small products beside the shared one, as in LoRA servers. The rivals are the
models one by one, batched products of all weights (NetFuse), and a LoRA server: the base's products for all rows, and
two small products for the rows of each model. Recorded on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from weft.base.errors import InputError
from weft.base.jsonfile import read_json
from weft.reports.exhibits import Axis, Bars, Panel, ReferenceLine
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table
from weft_stitch.making.encoders import ENCODERS

FIGURE = "encoders"
SHIPPED = "encoders.json"
ALONE, BODY, BATCHED, LORA, ONE = "one after another", "body", "batched products", "LoRA server", "rows of one model"
TINTS = {BODY: "#009e73", BATCHED: "#e69f00", LORA: "#0072b2", ONE: "#b9c0c8"}
RANK = 16  # of the adapters that benchmarks/stitch_encoders.py makes
LOW_RANK = "rank 16, low-rank parts"
THREADS = "2"  # number of threads of the rows; the table has the others too


def read() -> Mapping[str, Any]:
    """Read the shipped results of ``benchmarks/stitch_encoders.py``. Raises InputError."""
    with resources.as_file(resources.files("weft_papers") / "data" / "mts" / SHIPPED) as shipped:
        record: Mapping[str, Any] = read_json(shipped, InputError)
    return record


def encoders(out: Path, record: Mapping[str, Any]) -> Exhibit:
    """Report the recorded encoders: rows, table and picture."""
    return Exhibit(tuple(_rows(record)), (_table(record),), (_picture(out, record),))


def _rows(record: Mapping[str, Any]) -> list[Row]:
    """Rows with the speed-up of one body over the encoders one by one, by kind of tuning and length."""
    tasks, size = record["settings"]["tasks"], record["settings"]["architecture"]
    return [
        Row(
            FIGURE, f"{name} as one body over one by one, {tasks} encoders, {length} tokens", None,
            times[ALONE] / times[BODY], "x",
            f"recorded, {THREADS} threads ({size}): {times[BODY]:.1f} and {times[ALONE]:.1f} ms, batched products "
            f"{times[BATCHED]:.1f}{_lora_text(times)}; weights {measured['weights']:.2f}x; the paper has no "
            "transformers",
        )
        for name, measured in record["tuned"].items()
        for length, times in measured["ms"][THREADS].items()
    ]  # fmt: skip


def _lora_text(times: Mapping[str, float]) -> str:
    """Text with the time of a LoRA server, empty if it was not measured."""
    return f", a LoRA server {times[LORA]:.1f}" if LORA in times else ""


def _table(record: Mapping[str, Any]) -> Table:
    """Table of all recorded times, and of weights and MACs relative to the encoders one by one."""
    body = [
        (
            name, threads, length, f"{times[ALONE]:.1f}", f"{times[BATCHED]:.1f}",
            f"{times[LORA]:.1f}" if LORA in times else "", f"{times[BODY]:.1f}",
            f"{times[ALONE] / times[BODY]:.2f}", f"{measured['weights']:.3f}",
            f"{macs(record['settings']['architecture'], int(length), RANK if name == LOW_RANK else 0):.3f}",
        )
        for name, measured in record["tuned"].items()
        for threads, by_length in measured["ms"].items()
        for length, times in by_length.items()
    ]  # fmt: skip
    header = (
        "tuned", "threads", "tokens", "one by one ms", "batched ms", "LoRA server ms", "body ms", "faster x",
        "weights x", "MACs x",
    )  # fmt: skip
    return Table(f"{FIGURE}: {record['settings']['tasks']} fine-tuned encoders (recorded)", header, tuple(body))


def _picture(out: Path, record: Mapping[str, Any]) -> Figure:
    """Draw speed-ups over one by one, a panel per length and thread count; a way that was not measured has no bar."""
    tuned: Mapping[str, Any] = record["tuned"]
    panels = []
    for threads, lengths in next(iter(tuned.values()))["ms"].items():
        for length in lengths:
            times = [measured["ms"][threads][length] for measured in tuned.values()]
            series = {way: [by_way[ALONE] / by_way[way] if way in by_way else 0.0 for by_way in times] for way in TINTS}
            bars = Bars([name.replace(", ", ",\n") for name in tuned], series, TINTS)
            heading = f"{length} tokens, {threads} thread{'s' if threads != '1' else ''}"
            y = Axis(label="times faster than one by one")
            panels.append(Panel([bars, ReferenceLine(1, dash="-")], heading, y=y))
    title = f"{FIGURE}: {record['settings']['tasks']} fine-tuned encoders on a CPU (recorded)"
    return pictures.picture(out, "encoders", title, panels, size=(13, 6.6), columns=2, share_y=True)


def macs(architecture: str, length: int, rank: int = 0) -> float:
    """MACs of a body with one row of each model, over those of the models one by one.

    Counts products and attention of every layer. The body computes the last layer for one token only, except its keys
    and values. length: tokens. rank: of the adapter parts beside queries and values; 0 without them.
    """
    layers, width, *_ = ENCODERS[architecture]
    # The products of a layer have 12 width^2 weights; attention takes width * length MACs per token, twice.
    layer_macs = 12 * width**2 * length + 2 * width * length**2
    last_macs = 2 * width**2 * length + 10 * width**2 + 2 * width * length
    adapter_macs = 2 * width * rank * (2 * length * (layers - 1) + length + 1)
    return ((layers - 1) * layer_macs + last_macs + adapter_macs) / (layers * layer_macs)
