"""``weft profile``: what each layer of a model costs on a device, as JSON."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.cli.common import (
    Batch,
    Cost,
    DeviceName,
    SeqLen,
    Shapes,
    Tables,
    add_row,
    console,
    parse_shapes,
    plain_table,
    warn_of_gaps,
)
from weft.cli.unused import refuse_parameters_of_others


def command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A zoo name, a packaged model or an .onnx file.")],
    device: DeviceName = "tpuv3-like",
    batch: Batch = 1,
    seq_len: SeqLen = 16,
    tables: Tables = "stream",
    cost: Cost = "pipelined",
    shape: Shapes = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write the profile as JSON.")] = None,
) -> None:
    """Price a model's layers on a device; write the profile with -o."""
    from weft.devices import load_npu
    from weft.models.sources import load_model
    from weft.profiles import estimate, write_profile

    refuse_parameters_of_others(context, [model])
    npu = load_npu(device)
    shapes = parse_shapes(shape, [model]).get(model)
    found = load_model(model, shapes=shapes, parameters={"seq_len": seq_len, "tables": tables})
    warn_of_gaps(found)
    profile = estimate(found, npu, batch=batch, cost=cost)
    fetch_s = profile.weight_bytes / npu.bandwidth_bytes_per_s
    table = plain_table(f"{profile.model} on {npu.name}, batch {batch}", ("layer", "compute us", "fetch us", "MB"))
    for layer in profile.layers:
        fetch_us = layer.weight_bytes / npu.bandwidth_bytes_per_s * 1e6
        add_row(table, layer.name, f"{layer.compute_s * 1e6:.2f}", f"{fetch_us:.2f}", f"{layer.weight_bytes / 1e6:.3f}")
    console.print(table)
    side = "compute" if profile.compute_s > fetch_s else "memory"
    console.print(
        f"{len(profile.layers)} layers, {profile.compute_s * 1e3:.3f} ms of compute, "
        f"{fetch_s * 1e3:.3f} ms of fetching: {side}-bound",
        highlight=False,
    )
    if output:
        write_profile(profile, output)
        console.print(f"wrote {output}", highlight=False)
