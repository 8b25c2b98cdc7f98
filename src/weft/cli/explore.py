"""``weft explore``: the design that suits some models on a board, by exhaustive search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from weft.base.errors import InputError
from weft.cli import common
from weft.cli.command import Command
from weft.cli.common import complete_models, how, parse_shapes, shapes_of_several, what
from weft.cli.printing import (
    add_row,
    console,
    number,
    plain_table,
    progress_bar,
    say,
    say_written,
    warn_of_gaps,
    write_result,
)

if TYPE_CHECKING:
    from weft.devices import Board
    from weft.devices.costs.explore import Exploration
    from weft.models.layer import Model

app = typer.Typer(help="Search for the hardware that suits a model.", no_args_is_help=True)


@app.command("npu", cls=Command)
def explore_npu(
    model: Annotated[
        list[str],
        what("--model", "-m", autocompletion=complete_models, help="A zoo name or an .onnx file; repeatable."),
    ],
    platform: Annotated[str, what("--platform", help="zc706, zcu104 or a TOML file.")] = "zc706",
    max_batch: Annotated[int, how("--max-batch", help="Batch sizes from 1 to this number.")] = 8,
    weights: Annotated[
        str | None, how("--weights", show_default="all the same", help="Weights of the batch sizes, as 1,1,2.")
    ] = None,
    batching: Annotated[
        Literal["fluid", "r", "p", "fc", "none"], how("--batching", help="How batches enter a product.")
    ] = "fluid",
    stackable: Annotated[bool, how("--stackable/--no-stackable", help="Whether PEs may pair up or split.")] = True,
    p_reading: Annotated[
        Literal["straddle", "refetch", "groups", "broadcast"],
        how("--p-reading", help="How samples side by side read their input."),
    ] = "straddle",
    elementwise: Annotated[
        Literal["free", "ddr"], how("--elementwise", help="The cost of layers that are not a matrix product.")
    ] = "free",
    edges: Annotated[
        Literal["added", "within", "none"], how("--edges", help="How the time to fill and drain a layer is counted.")
    ] = "added",
    bandwidth: Annotated[
        str | None,
        how(
            "--bandwidth",
            show_default="the platform's",
            help="Memory bandwidth in GB/s, or a calibration of the platform.",
        ),
    ] = None,
    shape: common.Shapes = None,
    top: Annotated[int, how("--top", help="Designs to list.")] = 10,
    figure: common.FigureFile = None,
    json_file: common.JsonFile = None,
    toml: common.DeviceFile = None,
) -> None:
    """Find the tiled NPU <T_R, T_P, T_C> with the highest throughput over the batch sizes."""
    from weft.base.files import write_text
    from weft.devices import as_toml, load_platform
    from weft.devices.costs.explore import explore

    if top < 1:
        raise InputError(f"--top {top}: list at least one design")
    board = load_platform(platform)
    models = _load_models(model, shape)
    with progress_bar("exploring", 1) as advance:
        exploration = explore(
            models,
            board,
            max_batch=max_batch,
            weights=_parse_weights(weights),
            batching=batching,
            stackable=stackable,
            p_reading=p_reading,
            elementwise=elementwise,
            edges=edges,
            bandwidth_gb_s=_parse_bandwidth(bandwidth, board),
            progress=lambda done, of: advance(done=done, of=of),
        )
    _print(exploration, models, top)
    if figure:
        from weft.simulation.designs import draw_designs

        draw_designs(exploration, figure)
        say_written("figure", figure)
    write_result(json_file, exploration_as_dict(exploration))
    if toml:
        write_text(toml, as_toml(exploration.device().model_copy(update={"platform": platform})))
        say_written("device", toml)


def exploration_as_dict(exploration: Exploration) -> dict[str, object]:
    """Return the search for a JSON file: every design as columns, and the indices of the best and of the fronts."""
    t_r, t_p, t_c = (sizes.tolist() for sizes in exploration.tile)
    return {
        "format": 1,
        "platform": exploration.platform.name,
        "models": list(exploration.models),
        "weights": list(exploration.weights),
        "options": exploration.template.model_dump(exclude={"kind", "name", "source", "platform", "t_r", "t_p", "t_c"}),
        "best": exploration.best,
        "latency_front": exploration.latency_front,
        "size_front": exploration.size_front,
        "designs": {"t_r": t_r, "t_p": t_p, "t_c": t_c, "score": exploration.scores.tolist()},
        "times_s": dict(zip(exploration.models, exploration.times_s.tolist(), strict=True)),
    }


def _load_models(names: list[str], shapes: list[str] | None) -> list[Model]:
    from weft.models.sources import load_model

    sizes = parse_shapes(shapes, names)
    with shapes_of_several(names), progress_bar("reading"):
        models = [load_model(name, shapes=sizes.get(name)) for name in names]
    for loaded in models:
        warn_of_gaps(loaded)
    return models


def _parse_weights(text: str | None) -> list[float] | None:
    try:
        return [float(part) for part in text.split(",")] if text is not None else None
    except ValueError:
        raise InputError(f"--weights {text!r} is not of the form 1,1,2") from None


def _parse_bandwidth(text: str | None, board: Board) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        return board.calibrated_gb_s(text)


def _print(exploration: Exploration, models: list[Model], top: int) -> None:
    from weft.devices.costs.tiled import lookup_table

    board, device, max_batch = exploration.platform, exploration.device(), exploration.max_batch
    names = ", ".join(exploration.models)
    columns = ["<T_R, T_P, T_C>", "score", "of best", "DSP %", "BRAM %", "batch 1 ms", f"batch {max_batch} /s"]
    table = plain_table(f"{names} on {board.name}", columns)
    for index in exploration.ranked(top):
        design = exploration.device(index)
        add_row(
            table,
            f"<{design.t_r}, {design.t_p}, {design.t_c}>",
            number(float(exploration.scores[index]), 1),
            number(float(exploration.scores[index] / exploration.scores[exploration.best]), 4),
            number(design.dsps / board.dsps, 2, scale=100),
            number(design.bram_bits / board.bram_bits, 2, scale=100),
            number(float(exploration.latency_s[index]), 2, scale=1e3),
            number(float(exploration.throughput[index]), 2),
            style="bold" if index == exploration.best else "",
        )
    console.print(table)
    say(f"{len(exploration)} designs at {device.clock_mhz:g} MHz and {device.bandwidth_gb_s:g} GB/s")
    for loaded in models:
        entries = lookup_table(loaded, device, max_batch)
        say(
            f"{loaded.name}: look-up table of {len(entries.layers)} layers x {entries.max_batch} batch sizes, "
            f"{entries.storage_bits} bits"
        )
