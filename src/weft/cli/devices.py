"""``weft devices``: the presets, and what a device file says."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from weft.cli.common import add_row, console, number, plain_table

app = typer.Typer(help="List and inspect devices.", no_args_is_help=True)


@app.command("list")
def list_devices() -> None:
    """The presets that ship with weft."""
    from weft.devices import load_npu, presets

    table = plain_table("devices", ("device", "from", "TOP/s", "GB/s", "weights MiB", "ops/byte"), left=2)
    for name in presets():
        npu = load_npu(name)
        add_row(
            table,
            name,
            npu.source,
            number(npu.macs_per_s, 1, scale=2e-12),
            number(npu.bandwidth_gb_s, 0),
            number(npu.weight_buffer_mib, 0),
            number(npu.ridge_ops_per_byte, 0),
        )
    console.print(table)


@app.command("show")
def show(device: Annotated[str, typer.Argument(help="A preset or a TOML file.")]) -> None:
    """Every value of a device; a starting point for a file of your own."""
    from weft.devices import load_npu

    for key, value in load_npu(device).model_dump(exclude_none=True).items():
        text = json.dumps(value, ensure_ascii=False)  # what JSON writes of our values is TOML too
        console.print(f"{key} = {text}", highlight=False, markup=False, soft_wrap=True)
