"""``weft stitch``: models that share weights as one ONNX file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from glob import escape
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.base.errors import InputError, StitchError
from weft.cli.common import (
    JsonFile,
    Shapes,
    file_option,
    how,
    out,
    parse_bytes,
    parse_shapes,
    what,
)
from weft.cli.plans import options_of, stage_bars, told_in_options
from weft.cli.printing import progress_bar, say, told, write_result

if TYPE_CHECKING:
    from weft_stitch.advice import Advice
    from weft_stitch.whole_run import Stitching


def command(
    context: typer.Context,
    models: Annotated[
        list[str], typer.Argument(help="ONNX files of one structure, a.onnx b.onnx ..., or folders of adapters.")
    ],
    output: Annotated[
        str, file_option("--output", "-o", suffixes=(".onnx",), panel=None, help="The .onnx file to write.")
    ],
    names: Annotated[str | None, what("--names", help="Of the models, as a,b,c; else their files'.")] = None,
    batches: Annotated[
        str | None, what("--batch", "-b", help="Rows where a file leaves them open: 4, or 1,2,4.")
    ] = None,
    shapes: Shapes = None,
    sharing: Annotated[str | None, what("--sharing", help="A map of what is shared, instead of looking.")] = None,
    tolerance: Annotated[
        float,
        what("--tolerance", help="Weights that differ by no more are the same; of a body, what part may be lost."),
    ] = 0.0,
    base: Annotated[
        str | None, what("--base", help="The model that those of a body, or adapters, were made from.")
    ] = None,
    body: Annotated[
        bool | None,
        what(
            "--body/--no-body",
            show_default="for whole numbers",
            help="Share whole weights of models of any operators, as encoders.",
        ),
    ] = None,
    islands: Annotated[bool, what("--islands", help="Run what differs or is not understood model by model.")] = False,
    form: Annotated[
        str,
        how(
            "--form",
            help="planned (the best for each layer), mts, grouped, split, half, separate; fused is for torch only.",
        ),
    ] = "planned",
    dynamic: Annotated[bool, how("--dynamic", help="Any number of rows of each model: for weft serve.")] = False,
    measure: Annotated[
        bool | None,
        how(
            "--measure/--no-measure",
            show_default="by the clock, for cpu",
            help="Plan by the clock, or by a described machine.",
        ),
    ] = None,
    machine: Annotated[str, how("--machine", help="The described machine: cpu (one core), h200.")] = "cpu",
    threads: Annotated[int | None, how("--threads", show_default="1", help="Of ONNX Runtime when it measures.")] = None,
    slack: Annotated[
        float | None,
        how(
            "--slack", show_default="0.05", help="A plan with fewer weights may be slower by this part; 0: the fastest."
        ),
    ] = None,
    slabs: Annotated[
        bool | None,
        how("--slabs/--no-slabs", show_default="slabs, for cpu", help="Convolutions in slabs where that is faster."),
    ] = None,
    memory_cap: Annotated[
        str | None, how("--memory-cap", help="Weights and activations at most, as 64m; in groups if need be.")
    ] = None,
    latency_target: Annotated[
        float | None, how("--latency-target", help="Milliseconds for all models; with the least memory.")
    ] = None,
    check: Annotated[bool, how("--check/--no-check", help="Compare with the models before writing.")] = True,
    layers: Annotated[bool, out("--layers", help="Show every layer and what is shared where.")] = False,
    json_file: JsonFile = None,
    sharing_file: Annotated[str | None, file_option("--write-sharing", help="Write the map of what is shared.")] = None,
) -> None:
    """Make one graph of models that share weights: exact, and smaller or faster than one after another.

    [bold]weft stitch cats.onnx dogs.onnx birds.onnx -o pets.onnx[/bold]. See docs/stitching.md.
    """
    from weft_stitch.bodies.whole_run import BodyStitching
    from weft_stitch.cli.stitch_show import print_body, print_stitching
    from weft_stitch.options import TORCH_ONLY, StitchOptions
    from weft_stitch.pages.body import body_report
    from weft_stitch.pages.report import stitching_report
    from weft_stitch.sharing_map import write_sharing
    from weft_stitch.whole_run import carry_out

    if form == TORCH_ONLY:
        raise StitchError(f"--form {form} runs in torch on CUDA only; use weft.stitch(..., form='{form}')")
    _keep_models([*models, *filter(None, (sharing, base))], [output, json_file, sharing_file])
    with told_in_options(context), stage_bars() as show:
        options = options_of(
            StitchOptions,
            context,
            models=tuple(models),
            names=None if names is None else tuple(part.strip() for part in names.split(",")),
            batches=_rows(batches, len(models)),
            shapes=_sizes(shapes, models) if shapes else None,
            memory_cap_bytes=parse_bytes("--memory-cap", memory_cap),
            latency_target_s=_seconds(latency_target),
        )
        made = carry_out(options, lambda progress: show(*progress))
    if isinstance(made, BodyStitching):
        print_body(made, layers=layers)
        made.to_onnx(output)
        told("stitched", output, ", ".join(made.names))
        write_result(json_file, body_report(made, made.outputs(output)))
        return
    print_stitching(made, layers=layers)
    _write(made, Path(output))
    served = _advised(made, Path(output)) if made.options.dynamic and made.options.measures else []
    write_result(json_file, stitching_report(made, made.outputs(output), served))
    if sharing_file:
        write_sharing(sharing_file, made.sharing, made.family)
        told("sharing", sharing_file)


def _write(made: Stitching, output: Path) -> None:
    """Write the graphs, and name files of earlier runs beside them."""
    outputs = made.to_onnx(output)
    for group, path in zip(made.groups, outputs, strict=True):
        told("stitched", path, ", ".join(group.names))
    for path in _stale(output):
        if path not in (*outputs, *made.files.values()):
            told("left", path, "of an earlier run, and no part of this one")


def _advised(made: Stitching, output: Path) -> list[Advice]:
    """Run each group and its models as a server would, and say which to serve."""
    from weft_stitch.advice import advise

    found = []
    with progress_bar("timing what is served") as advance:
        for path in made.outputs(output):
            told = partial(advance, None)
            found.append(advise(path, made.files, threads=made.options.used_threads, on_case=told))
    for each in found:
        say(f"served    {each.line}", style="yellow" if each.serve == "apart" else "", soft_wrap=True)
    return found


def _stale(output: Path) -> list[Path]:
    """Files that could be taken for groups of this run."""
    numbered = output.parent.glob(f"{escape(output.stem)}.*{output.suffix}")
    names = [output, *(each for each in numbered if each.name[len(output.stem) + 1 : -len(output.suffix)].isdecimal())]
    return [each for each in sorted(names) if each.exists()]


def _keep_models(read: Sequence[str], written: Sequence[str | None]) -> None:
    """Refuse to write where something is read from, before minutes of planning."""
    taken = {Path(each).resolve() for each in read}
    for path in written:
        if path and Path(path).resolve() in taken:
            raise InputError(f"{path} is one of the models; write to another file")


def _seconds(milliseconds: float | None) -> float | None:
    if milliseconds is not None and not 0 < milliseconds < inf:
        raise InputError(f"--latency-target {milliseconds:g}: give milliseconds above 0")
    return None if milliseconds is None else milliseconds / 1e3


def _rows(text: str | None, count: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts) or len(parts) not in (1, count):
        raise InputError(f"--batch {text!r} is neither a number from 1 nor {count} of them with commas")
    return tuple(int(part) for part in parts) * (count if len(parts) == 1 else 1)


def _sizes(texts: Sequence[str], models: Sequence[str]) -> list[Mapping[str, tuple[int, ...]] | None]:
    """The shapes for each file; one that names no file is for all of them."""
    given: list[str] = []
    for text in texts:
        named = any(text.startswith(f"{model}:") for model in models)
        given += [text] if named else [f"{model}:{text}" for model in models]
    found = parse_shapes(given, models)
    return [found.get(model) for model in models]
