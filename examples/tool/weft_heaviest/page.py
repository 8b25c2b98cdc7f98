"""How heaviest layers are shown: a table for terminals and notebooks, a figure, and a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.reports.page import write_page
from weft.reports.tables import ResultTable, TableRow, number
from weft_heaviest import HeaviestLayers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tables(result: HeaviestLayers) -> tuple[ResultTable, ...]:
    rows = [
        TableRow(
            (layer.name, number(layer.weights, 2, scale=1e-6), number(result.share(layer), 1, scale=100, suffix="%"))
        )
        for layer in result.layers
    ]
    return (ResultTable(f"heaviest layers of {result.model.name}", ("layer", "weights M", "share"), tuple(rows)),)


def figure(result: HeaviestLayers) -> Figure:
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(6, 3), layout="constrained")
    axes = drawing.add_subplot()
    axes.barh([layer.name for layer in result.layers], [result.share(layer) for layer in result.layers])
    axes.invert_yaxis()
    axes.set_xlabel("share of all weights")
    return drawing


def write_html(result: HeaviestLayers, path: str) -> None:
    """Write a page that needs no network."""
    table = tables(result)[0]
    data = {"title": table.title, "columns": table.columns, "rows": [row.cells for row in table.rows]}
    write_page(path, "heaviest.html", data, "weft_heaviest")
