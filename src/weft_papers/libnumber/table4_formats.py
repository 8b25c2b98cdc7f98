"""Table III.4: the configurations themselves, beside those that the chapter prints for the same networks."""

from __future__ import annotations

from weft_papers.base import Exhibit, Row, Table
from weft_papers.libnumber.lab import (
    LABELS,
    MARGINS,
    OURS,
    RISTRETTO,
    TITLES,
    parse_printed,
    percent,
    printed_configurations,
    shown,
    sizes,
)
from weft_papers.libnumber.recorded import NetRecord, SearchRecord

FIGURE = "Table III.4"
THEIRS = {OURS: "libnumber", RISTRETTO: "Ristretto"}


def table_4(record: SearchRecord) -> Exhibit:
    nets = [record.nets[net] for net in record.tuned(MARGINS[0])]
    return Exhibit(tuple(row for net in nets for row in _rows(net)), (_table(nets),) if nets else ())


def mean_bits(net: NetRecord, method: str, margin: float) -> float | None:
    """The mean bits of a weight."""
    run = net.passing(method, margin)
    return sizes(net.network, run.configuration).weights / net.network.weights if run else None


def printed_bits(net: NetRecord, framework: str) -> float:
    """The mean bits of a weight in the chapter's formats, with layers as large as ours."""
    targets = net.network.targets
    given = parse_printed(printed_configurations()[TITLES[net.name]][framework], len(targets))
    return sum(t.weights * bits for t, bits in zip(targets, given.weight_bits, strict=True)) / net.network.weights


def _rows(net: NetRecord) -> list[Row]:
    margin = MARGINS[0]
    rows = []
    for method, framework in THEIRS.items():
        ours, run = mean_bits(net, method, margin), net.passing(method, margin)
        if ours is None or run is None:
            continue
        text = printed_configurations()[TITLES[net.name]][framework]
        best = ", the best of its ways," if method == RISTRETTO else ""
        rows.append(
            Row(
                FIGURE, f"bits of a weight, {TITLES[net.name]}, {LABELS[method]}, {percent(margin)}",
                printed_bits(net, framework), ours, " bits",
                f"ours{best} {shown(net.network, run.configuration)}, the chapter {text}; other weights, trained here, "
                "and a threshold on images that are not reported on",
            )
        )  # fmt: skip
    return rows


def _table(nets: list[NetRecord]) -> Table:
    body = []
    for net in nets:
        for method, framework in THEIRS.items():
            printed = printed_configurations()[TITLES[net.name]][framework]
            runs = [net.passing(method, margin) for margin in MARGINS]
            texts = [shown(net.network, run.configuration) if run else "fails" for run in runs]
            body.append((TITLES[net.name], LABELS[method], printed, *texts))
    header = ("network", "method", "printed", *(f"ours at {percent(margin)}" for margin in MARGINS))
    return Table(f"{FIGURE}: In FIXED, En EXP, Tn two's complement, n bits: inputs / weights", header, tuple(body))
