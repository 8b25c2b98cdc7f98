"""``weft stitch``: models that share weights as one ONNX file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from glob import escape
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from weft.base.errors import InputError, StitchError, unknown_name
from weft.cli.command import told_in_options
from weft.cli.common import JsonFile, Shapes, complete_models, file_option, model_names, out, parse_shapes
from weft.cli.printing import (
    add_row,
    console,
    number,
    plain_table,
    progress_bar,
    say,
    say_written,
    stage_bars,
    write_result,
)
from weft.cli.settings import From, Typed, with_settings
from weft_stitch.options import TORCH_ONLY, StitchOptions

if TYPE_CHECKING:
    from weft_stitch.advice import Advice
    from weft_stitch.bodies.body_stitching import BodyStitching
    from weft_stitch.stitching_run import Stitching
    from weft_stitch.summary import LayerRow, Summary


def _names(text: str) -> tuple[str, ...]:
    """The names in a comma-separated list."""
    return tuple(part.strip() for part in text.split(","))


def _seconds(milliseconds: float) -> float:
    """--latency-target in seconds; ``InputError`` if it is not above 0."""
    if not 0 < milliseconds < inf:
        raise InputError(f"--latency-target {milliseconds:g}: give milliseconds above 0")
    return milliseconds / 1e3


def _rows(text: str | None, count: int) -> tuple[int, ...] | None:
    """The rows of each model, from the text of --batch: one number for all, or a number for each."""
    if text is None:
        return None
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in numbers) or len(numbers) not in (1, count):
        raise InputError(f"--batch {text!r} is neither a number from 1 nor {count} of them with commas")
    return tuple(int(part) for part in numbers) * (count if len(numbers) == 1 else 1)


@with_settings
def command(
    context: typer.Context,
    *,
    models: Annotated[
        list[str],
        typer.Argument(
            autocompletion=complete_models,
            help="Models of one structure: a.onnx b.onnx ..., names of weft models list, or folders of adapters.",
        ),
    ],
    output: Annotated[
        str, file_option("--output", "-o", suffixes=(".onnx",), panel=None, help="The .onnx file to write.")
    ],
    shapes: Shapes = None,
    typed: Annotated[Typed, From(StitchOptions, names=_names, latency_target_s=_seconds)],
    layers: Annotated[bool, out("--layers", help="Show every layer and the parts that are shared.")] = False,
    json_file: JsonFile = None,
    sharing_file: Annotated[
        str | None, file_option("--write-sharing", help="Write the sharing that was found.")
    ] = None,
) -> None:
    """Make one graph of models that share weights: exact, and smaller or faster than one after another.

    [bold]weft stitch cats.onnx dogs.onnx birds.onnx -o pets.onnx[/bold]. See docs/stitching.md.
    """
    from weft_stitch.bodies.body_stitching import BodyStitching
    from weft_stitch.onnx_writer import refuse_overwriting
    from weft_stitch.pages import body_report, stitching_report
    from weft_stitch.sharing_map import write_sharing
    from weft_stitch.stitching_run import carry_out

    if typed.get("form") == TORCH_ONLY:
        raise StitchError(f"--form {TORCH_ONLY} runs in torch on CUDA only; use weft.stitch(..., form='{TORCH_ONLY}')")
    other_inputs = filter(None, (typed.get("sharing"), typed.get("base")))
    refuse_overwriting([*models, *other_inputs], [output, json_file, sharing_file])  # before minutes of planning
    with TemporaryDirectory(prefix="weft-stitch-") as scratch:  # the files are timed at the end
        with told_in_options(context), stage_bars() as show:
            files = tuple(_model_file(model, Path(scratch)) for model in models)
            sizes, rows = _sizes(shapes, models) if shapes else None, _rows(typed.get("batches"), len(models))
            options = StitchOptions(**{**typed, "models": files, "shapes": sizes, "batches": rows})
            stitching = carry_out(_with_packaged_shapes(options, models), lambda progress: show(*progress))
        if isinstance(stitching, BodyStitching):
            print_body(stitching, layers=layers)
            stitching.to_onnx(output)
            say_written("stitched", output, ", ".join(stitching.names))
            write_result(json_file, body_report(stitching, stitching.outputs(output)))
            return
        print_stitching(stitching, layers=layers)
        _write(stitching, Path(output))
        served = _advise(stitching, Path(output)) if stitching.options.dynamic and stitching.options.measures else []
        write_result(json_file, stitching_report(stitching, stitching.outputs(output), served))
        if sharing_file:
            write_sharing(sharing_file, stitching.sharing, stitching.family)
            say_written("sharing", sharing_file)


def _model_file(model: str, scratch: Path) -> str:
    """The path of a model file; a packaged model is written into the folder *scratch*."""
    from weft.models.sources import named_file

    if path := named_file(model, scratch):
        return str(path)
    if not model.endswith(".onnx") and not Path(model).exists():
        raise StitchError(unknown_name("model", model, model_names()) + " (a file ends in .onnx)")
    return model


def _write(stitching: Stitching, output: Path) -> None:
    """Write the graphs; mention files of earlier runs that are left beside them."""
    outputs = stitching.to_onnx(output)
    for group, path in zip(stitching.groups, outputs, strict=True):
        say_written("stitched", path, ", ".join(group.names))
    for path in _earlier_outputs(output):
        if path not in (*outputs, *stitching.files.values()):
            say_written("left", path, "of an earlier run, and no part of this one")


def _advise(stitching: Stitching, output: Path) -> list[Advice]:
    """Time each group and its models as a server would run them, and print which to serve."""
    from weft_stitch.advice import advise

    advices = []
    with progress_bar("timing what is served") as advance:
        for path in stitching.outputs(output):
            on_case = partial(advance, None)  # None: the bar keeps its name
            advices.append(advise(path, stitching.files, threads=stitching.options.used_threads, on_case=on_case))
    for advice in advices:
        say(f"served    {advice.line}", style="yellow" if advice.serve == "apart" else "", soft_wrap=True)
    return advices


def _earlier_outputs(output: Path) -> list[Path]:
    """Existing files whose names could be those of this run's groups."""
    numbered = output.parent.glob(f"{escape(output.stem)}.*{output.suffix}")
    names = [output, *(path for path in numbered if path.name[len(output.stem) + 1 : -len(output.suffix)].isdecimal())]
    return [path for path in sorted(names) if path.exists()]


def _sizes(texts: Sequence[str], models: Sequence[str]) -> list[Mapping[str, tuple[int, ...]] | None]:
    """The input shapes of each model, from the texts of --shape; a text that names no model is for all of them."""
    qualified: list[str] = []
    for text in texts:
        named = any(text.startswith(f"{model}:") for model in models)
        qualified += [text] if named else [f"{model}:{text}" for model in models]
    parsed = parse_shapes(qualified, models)
    return [parsed.get(model) for model in models]


def _with_packaged_shapes(options: StitchOptions, models: Sequence[str]) -> StitchOptions:
    """Fill in the usual input shapes of packaged models where *options* give none; a body needs no shapes."""
    from weft.models.packaged import PACKAGED

    usual = [PACKAGED[model].shapes if model in PACKAGED else {} for model in models]
    if options.as_body or not any(usual):
        return options
    given = options.shapes or [None] * len(models)
    return replace(
        options, shapes=[{**shapes, **(own or {})} or None for shapes, own in zip(usual, given, strict=True)]
    )


LAYERS = ("layer", "form", "shared in", "shared out", "MMACs", "weights kB", "of separate", "launches", "predicted ms")
"""Columns of the table of layers."""

SPARE = ("tables MB", "launches", "shared in", "predicted ms", "activations MB", "MMACs", "shared out", "of separate")
"""Columns to leave out on a narrow terminal, in this order."""
LONG_NAME = 40
"""Width of the first column; longer names wrap, so that number columns keep their room."""
GAP = 2
"""Characters between two columns, as ``plain_table`` pads them."""


def print_stitching(stitching: Stitching, *, layers: bool) -> None:
    """Print the result: a table of the ways to run the models, tables of layers if wanted, then sentences."""
    from weft_stitch.pages import sentences, ways_table

    ways = ways_table(stitching)
    styles = ["bold" if row.best else "" for row in ways.rows]
    _print_table(ways.title, ways.columns, [row.cells for row in ways.rows], styles)
    for summary in stitching.summaries:
        for form, why in summary.impossible.items():
            say(f"no {form}: {why}")
    if layers:
        for group, summary in enumerate(stitching.summaries):
            _print_layers(summary, f"group {group}, " if len(stitching.groups) > 1 else "")
            _print_spaces(summary)
    console.print()
    for sentence in sentences(stitching):
        say(sentence)
    for net in stitching.family.nets:
        if net.stored != "float32":
            say(f"{net.name} is {net.stored}: it is read, computed and written in float32")
    if stitching.difference is not None:
        note = f"largest difference to the models: {stitching.difference.relative:.1e} of an output's largest number"
        if stitching.difference.rounding_difference:
            coarse = stitching.difference.rounding_difference
            note += f", {coarse:.1e} to files in half precision or tuned ones as they run by themselves"
        say(note)


def print_body(stitching: BodyStitching, *, layers: bool) -> None:
    """Print the result of stitching to one body."""
    from weft_stitch.pages import BODY_WAYS, STEPS, body_sentences, step_rows, way_rows

    _print_table(f"{len(stitching.names)} models as one body", BODY_WAYS, way_rows(stitching), ["", "bold"])
    if layers:
        console.print()
        _print_table("steps with weights", STEPS, step_rows(stitching), left=2)
    console.print()
    for sentence in body_sentences(stitching):
        say(sentence)


def _print_table(
    title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]], styles: Sequence[str] = (), *, left: int = 1
) -> None:
    """Print a table without the ``SPARE`` columns that do not fit the terminal."""
    shown = list(range(len(columns)))
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    widths[0] = min(widths[0], LONG_NAME)
    for spare in SPARE:
        if sum(widths[column] + GAP for column in shown) - GAP <= console.width:
            break
        shown = [column for column in shown if columns[column] != spare or _only_time(columns, shown, column)]
    table = plain_table(title, [columns[column] for column in shown], left=left)
    table.columns[0].min_width = widths[0]
    for cells, style in zip(rows, styles or [""] * len(rows), strict=True):
        add_row(table, *(cells[column] for column in shown), style=style)
    console.print(table)


def _only_time(columns: Sequence[str], shown: Sequence[int], column: int) -> bool:
    """Whether *column* is the only shown column with a time."""
    return [other for other in shown if columns[other].endswith(" ms")] == [column]


def _print_layers(summary: Summary, prefix: str) -> None:
    """Print the layers of one graph, and the time of each alone in every form that was tried."""
    console.print()
    _print_table(
        f"{prefix}layers, each with what follows it", LAYERS, [_layer_cells(row) for row in summary.layers], left=2
    )
    forms = list(dict.fromkeys(form for row in summary.layers for form in row.seconds))
    if forms:
        console.print()
        rows = [(row.name, *(number(row.seconds.get(form), 1, scale=1e6) for form in forms)) for row in summary.layers]
        _print_table("layers alone, in us", ("layer", *forms), rows)


def _layer_cells(row: LayerRow) -> tuple[str, ...]:
    """The cells of a layer in the table of layers."""
    return (
        row.name,
        f"{row.form} in slabs" if row.slabs else row.form,
        "{} of {}".format(*row.shared_inputs),
        "{} of {}".format(*row.shared_outputs),
        number(row.macs, 2, scale=1e-6),
        number(row.weight_bytes, 1, scale=1e-3),
        number(row.weight_bytes / row.separate_weight_bytes, 3),
        str(row.launches),
        number(row.predicted_s, scale=1e3),
    )


def _print_spaces(summary: Summary) -> None:
    """Print how many channels of each space the models share."""
    from weft_stitch.pages import percents

    console.print()
    columns = ("space", "channels of the models", "shared by all", "by some", "own")
    rows = []
    for row in summary.spaces:
        widths = str(row.widths[0]) if len(set(row.widths)) == 1 else ", ".join(map(str, row.widths))
        rows.append((row.name, widths, *(f"{percent}%" for percent in percents((row.by_all, row.by_some, row.own)))))
    _print_table("channels, by the value that carries them first", columns, rows, left=2)
