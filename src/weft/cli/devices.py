"""``weft devices``: the presets, and the values of a device."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.cli.command import Command
from weft.cli.common import complete_devices
from weft.cli.host import print_host
from weft.cli.printing import add_row, console, number, plain_table, say

app = typer.Typer(help="List and inspect devices.", no_args_is_help=True)


@app.command("list", cls=Command)
def list_devices() -> None:
    """List the devices that come with weft."""
    _list_npus()
    console.print()
    _list_gpus()
    console.print()
    _list_socs()


@app.command("show", cls=Command)
def show(
    device: Annotated[str, typer.Argument(autocompletion=complete_devices, help="A preset or a TOML file.")],
) -> None:
    """Print all values of a device, as a start for a file of your own."""
    from weft.devices import Host, Soc, as_toml, load_any, soc_as_toml

    loaded = load_any(device)
    if isinstance(loaded, Host):
        print_host(loaded)
        return
    text = soc_as_toml(loaded) if isinstance(loaded, Soc) else as_toml(loaded)
    say(text, soft_wrap=True, end="")


def _list_npus() -> None:
    from weft.devices import TiledNpu, load_simulated, presets

    table = plain_table(
        "devices", ("device", "kind", "lanes", "from", "TOP/s", "GB/s", "weights or tiles MiB", "ops/byte"), left=4
    )
    for name in presets():
        device = load_simulated(name)
        on_chip_mib = device.bram_bits / 2**23 if isinstance(device, TiledNpu) else device.weight_buffer_mib
        add_row(
            table,
            name,
            device.kind,
            " + ".join(device.together().names),
            device.source,
            number(device.macs_per_s, 2, scale=2e-12),
            number(device.bandwidth_gb_s, 1),
            number(on_chip_mib, 1),
            number(device.ridge_ops_per_byte, 0),
        )
    console.print(table)


def _list_gpus() -> None:
    from weft.devices.gpu_pairs import gpus, read_pairs

    table = plain_table(
        "gpus, for requests with --policies abreast and its like", ("gpu", "models", "SMs", "cuts"), left=2
    )
    pairs = read_pairs()
    for name in gpus():
        cuts = ", ".join(f"{large}+{small}" for large, small in pairs.cuts)
        add_row(table, name, ", ".join(pairs.models), str(pairs.sms), cuts)
    console.print(table)


def _list_socs() -> None:
    from weft.devices import load_soc, socs

    table = plain_table("socs, for weft map", ("soc", "units", "contention", "from", "GB/s"), left=4)
    for name in socs():
        soc = load_soc(name)
        add_row(
            table,
            name,
            ", ".join(unit.name if unit.instances == 1 else f"{unit.instances} {unit.name}" for unit in soc.units),
            ", ".join(dict.fromkeys(unit.contention.model for unit in soc.units)),
            soc.source,
            number(soc.bandwidth_gb_s, 1),
        )
    console.print(table)
