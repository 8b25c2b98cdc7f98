"""``weft heaviest``."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.cli.common import JsonFile, file_option, what
from weft.cli.printing import print_table, told, write_result


def command(
    model: Annotated[str, typer.Argument(help="A zoo name or an .onnx file.")],
    count: Annotated[int, what("--count", "-n", min=1, help="How many layers to show.")] = 5,
    html: Annotated[str | None, file_option("--html", help="Write a page.", suffixes=(".html",))] = None,
    json_file: JsonFile = None,
) -> None:
    """Show which layers hold most of a model's weights."""
    from weft import load_model
    from weft_heaviest import heaviest, page

    result = heaviest(load_model(model), count)
    for shown in page.tables(result):
        print_table(shown)
    if html:
        page.write_html(result, html)
        told("page", html)
    write_result(json_file, {"model": model, "layers": {layer.name: layer.weights for layer in result.layers}})
