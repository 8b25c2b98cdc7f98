"""``weft profile``: the cost of each layer of a model on a device, or of each segment on this machine, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.base.errors import InputError
from weft.cli import common, host
from weft.cli.command import refuse_parameters_of_others, refuse_unused
from weft.cli.common import complete_models, file_option, parse_shapes
from weft.cli.printing import add_row, console, plain_table, progress_bar, say, say_written, warn_of_gaps
from weft.cli.saturated import Batch, Cost, SeqLen, Tables

if TYPE_CHECKING:
    from weft.devices import Npu
    from weft.devices.costs.layer_costs import Profile

_MEASURED = "this machine runs the models as its server does, at every batch size that pays; leave it out"
ON_HOST = dict.fromkeys(("batch", "seq_len", "tables", "cost"), _MEASURED)
ON_NPU = dict.fromkeys(("lanes", "seconds", "cache"), "it is for --device host, which is measured")


def command(
    context: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            autocompletion=complete_models,
            help="A zoo name, a packaged model or an .onnx file; host: several.",
        ),
    ],
    device: host.AnyDevice = None,
    batch: Batch = 1,
    seq_len: SeqLen = 16,
    tables: Tables = "stream",
    cost: Cost = "pipelined",
    shape: common.Shapes = None,
    lanes: host.LaneCount = None,
    seconds: host.Seconds = host.SECONDS,
    cache: host.Cache = None,
    output: Annotated[
        str | None, file_option("--output", "-o", suffixes=(".json",), help="The profile to write (.json).")
    ] = None,
) -> None:
    """Estimate a model's layers on a device, or measure them on host or cuda:0; -o writes the result."""
    from weft.devices import is_measured, write_host
    from weft.devices.costs.layer_costs import estimate, write_profile
    from weft.models.sources import load_models, model_names_in

    shapes = parse_shapes(shape, models)
    if device is not None and is_measured(device):
        from weft.planning.survey.host_measurement import subject

        refuse_unused(context, f"--device {device}", ON_HOST)
        subjects = [subject(name, shapes.get(model)) for model in models for name in model_names_in(model)]
        measured = host.measure(subjects, device, lanes, seconds, cache)
        host.print_host(measured)
        if output:
            write_host(measured, output)
            say_written("profile", output)
        return
    refuse_unused(context, f"--device {device or host.DEFAULT_NPU}", ON_NPU)
    if len(models) > 1:
        raise InputError(f"one model at a time has a profile on an NPU, not {', '.join(models)}; host takes several")
    refuse_parameters_of_others(context, models)
    npu = host.named_npu(device)
    parameters: dict[str, int | str] = {"seq_len": seq_len, "tables": tables}
    with progress_bar("reading"):
        loaded = load_models(models[0], shapes=shapes.get(models[0]), parameters=parameters)
        profiles = [estimate(model, npu, batch=batch, cost=cost) for model in loaded]
    for model, profile in zip(loaded, profiles, strict=True):
        warn_of_gaps(model)
        print_profile(profile, npu)
    for profile, path in zip(profiles, _outputs(output, profiles), strict=False):
        write_profile(profile, path)
        say_written("profile", path)


def _outputs(output: str | None, profiles: Sequence[Profile]) -> list[Path]:
    """Return the paths of the profiles; those of a stitched file get the names of its models."""
    if output is None or len(profiles) == 1:
        return [Path(output)] if output else []
    path = Path(output)
    return [path.with_name(f"{path.stem}.{profile.model}{path.suffix}") for profile in profiles]


def print_profile(profile: Profile, npu: Npu) -> None:
    """Print the costs of all layers, and the resource that bounds the model."""
    fetch_s = profile.weight_bytes / npu.bandwidth_bytes_per_s
    title = f"{profile.model} on {npu.name}, batch {profile.batch}"
    table = plain_table(title, ("layer", "compute us", "fetch us", "MB"))
    for layer in profile.layers:
        fetch_us = layer.weight_bytes / npu.bandwidth_bytes_per_s * 1e6
        add_row(table, layer.name, f"{layer.compute_s * 1e6:.2f}", f"{fetch_us:.2f}", f"{layer.weight_bytes / 1e6:.3f}")
    console.print(table)
    side = "compute" if profile.compute_s > fetch_s else "memory"
    say(
        f"{len(profile.layers)} layers, {profile.compute_s * 1e3:.3f} ms of compute, "
        f"{fetch_s * 1e3:.3f} ms of fetching: {side}-bound"
    )
