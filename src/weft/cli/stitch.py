"""``weft stitch``: models that share weights as one ONNX file."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.common import JsonFile, Shapes, parse_bytes
from weft.cli.stitch_steps import Request, Steps
from weft.cli.unused import refuse_unused
from weft.errors import InputError, StitchError, unknown_name

WHAT, HOW, FILES = "What to stitch", "How to run it", "Files and tables"
"""Parts of the help."""
HERE = "cpu"
"""The machine that can be measured."""


def command(
    context: typer.Context,
    models: Annotated[list[str], typer.Argument(help="ONNX files of one structure: a.onnx b.onnx ...")],
    output: Annotated[str, typer.Option("--output", "-o", help="The .onnx file to write.")],
    names: Annotated[
        str | None, typer.Option("--names", rich_help_panel=WHAT, help="Of the models, as a,b,c; else their files'.")
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option("--batch", "-b", rich_help_panel=WHAT, help="Rows where a file leaves them open: 4, or 1,2,4."),
    ] = None,
    shape: Shapes = None,
    sharing: Annotated[
        str | None, typer.Option("--sharing", rich_help_panel=WHAT, help="A map of what is shared, instead of looking.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", rich_help_panel=WHAT, help="Weights that differ by no more are the same.")
    ] = 0.0,
    islands: Annotated[
        bool,
        typer.Option("--islands", rich_help_panel=WHAT, help="Run what differs or is not understood model by model."),
    ] = False,
    form: Annotated[
        str,
        typer.Option(
            "--form",
            rich_help_panel=HOW,
            help="planned (the best for each layer), mts, grouped, split, half, separate; fused is for torch only.",
        ),
    ] = "planned",
    dynamic: Annotated[
        bool, typer.Option("--dynamic", rich_help_panel=HOW, help="Any number of rows of each model: for weft serve.")
    ] = False,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            rich_help_panel=HOW,
            show_default=False,
            help="Plan by the clock (the default), or by a described machine.",
        ),
    ] = None,
    machine: Annotated[
        str, typer.Option("--machine", rich_help_panel=HOW, help="The described machine: cpu (one core), h200.")
    ] = "cpu",
    threads: Annotated[
        int, typer.Option("--threads", rich_help_panel=HOW, help="Of ONNX Runtime when it measures.")
    ] = 1,
    slack: Annotated[
        float,
        typer.Option(
            "--slack", rich_help_panel=HOW, help="A plan with fewer weights may be slower by this part; 0: the fastest."
        ),
    ] = 0.05,
    slabs: Annotated[
        bool,
        typer.Option("--slabs/--no-slabs", rich_help_panel=HOW, help="Convolutions in slabs where that is faster."),
    ] = True,
    memory_cap: Annotated[
        str | None,
        typer.Option(
            "--memory-cap", rich_help_panel=HOW, help="Weights and activations at most, as 64m; in groups if need be."
        ),
    ] = None,
    latency_target: Annotated[
        float | None,
        typer.Option(
            "--latency-target", rich_help_panel=HOW, help="Milliseconds for all models; with the least memory."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", rich_help_panel=HOW, help="Compare with the models before writing.")
    ] = True,
    layers: Annotated[
        bool, typer.Option("--layers", rich_help_panel=FILES, help="Show every layer and what is shared where.")
    ] = False,
    json_file: JsonFile = None,
    write_sharing: Annotated[
        str | None, typer.Option("--write-sharing", rich_help_panel=FILES, help="Write the map of what is shared.")
    ] = None,
) -> None:
    """Make one graph of models that share weights: exact, and smaller or faster than one after another.

    [bold]weft stitch cats.onnx dogs.onnx birds.onnx -o pets.onnx[/bold]. See docs/stitching.md.
    """
    asked = Request(
        models=tuple(models),
        names=_listed("--names", names, len(models)),
        batches=_rows(batch, len(models)),
        shapes=tuple(shape or ()),
        sharing=sharing,
        tolerance=tolerance,
        islands=islands,
        form=form,
        dynamic=dynamic,
        measure=machine == HERE if measure is None else measure,
        machine=machine,
        threads=threads,
        slack=slack,
        slabs=slabs,
        memory_bytes=parse_bytes("--memory-cap", memory_cap),
        seconds=None if latency_target is None else latency_target / 1e3,
        check=check,
        output=Path(output),
    )
    _refuse_early(asked, [json_file, write_sharing])
    _refuse_idle(context, asked)
    steps = Steps(asked)
    steps.stitch()
    steps.check()
    steps.summarise()
    steps.show(layers=layers)
    steps.write(json_file, write_sharing)


def _refuse_early(asked: Request, others: Sequence[str | None]) -> None:
    """What would come to nothing after minutes of planning."""
    from weft.stitching.assembly import PLANNED
    from weft.stitching.metadata import servable
    from weft.stitching.planning.planner import ANYWHERE

    if asked.form == "fused":
        raise StitchError(
            "--form fused runs in torch on CUDA only; use weft.stitching.stitch(..., form='fused').module()"
        )
    if asked.form not in (PLANNED, *ANYWHERE):
        raise StitchError(f"--form: {unknown_name('form', asked.form, (PLANNED, *ANYWHERE))}")
    if asked.output.suffix != ".onnx" or asked.output.is_dir():
        raise InputError(f"{asked.output}: name an .onnx file to write")
    taken = {Path(model).resolve() for model in (*asked.models, asked.sharing) if model}
    for path in (asked.output, *(Path(each) for each in others if each)):
        if str(path) == "-":
            raise InputError("-: name a file; there is no way to write to the terminal")
        if not path.parent.is_dir():
            raise InputError(f"{path}: cannot write: there is no folder {path.parent}")
        if path.is_dir():
            raise InputError(f"{path}: cannot write: it is a folder; name a file")
        if path.resolve() in taken:
            raise InputError(f"{path} is one of the models, or written already; write to another file")
        taken.add(path.resolve())
    strange = [file for file, name in zip(asked.models, asked.names, strict=True) if not servable(name or _stem(file))]
    if asked.dynamic and strange:
        raise InputError(f"{strange[0]}: its name is none that weft serve takes; name the models with --names a,b,c")
    if asked.measure and asked.machine != HERE:
        raise InputError(f"--measure runs on this machine's {HERE}, not on {asked.machine}; leave out one of them")
    if asked.threads < 1:
        raise InputError(f"--threads {asked.threads}: give 1 or more")
    if not 0 <= asked.tolerance < inf:
        raise InputError(f"--tolerance {asked.tolerance}: give the largest difference of two weights, 0 for none")
    if not 0 <= asked.slack < inf:
        raise InputError(f"--slack {asked.slack}: give 0 for the fastest plan, or how much slower it may be, as 0.05")
    if asked.seconds is not None and not 0 < asked.seconds < inf:
        raise InputError(f"--latency-target {asked.seconds * 1e3:g}: give milliseconds above 0")


def _refuse_idle(context: typer.Context, asked: Request) -> None:
    """Options that would come to nothing beside the others."""
    from weft.stitching.assembly import PLANNED

    if asked.form != PLANNED:
        refuse_unused(context, f"--form {asked.form}", {"slack": f"only --form {PLANNED} chooses between plans"})
    if asked.in_groups and asked.slack:
        way = "--memory-cap and --latency-target"
        refuse_unused(context, way, {"slack": "each group is as fast as they allow; leave it out, or give 0"})
    if asked.machine != HERE and asked.slabs:
        refuse_unused(context, f"--machine {asked.machine}", {"slabs": f"slabs are for the {HERE}; leave it out"})
    if not (asked.measure or asked.check):
        refuse_unused(context, "--no-measure --no-check", {"threads": "nothing is run; leave it out"})


def _stem(file: str) -> str:
    path = Path(file)
    return "folder" if path.is_dir() else path.stem


def _listed(option: str, text: str | None, count: int) -> tuple[str, ...]:
    from weft.stitching.metadata import servable

    if text is None:
        return ("",) * count
    parts = tuple(part.strip() for part in text.split(","))
    if len(parts) != count or not all(parts):
        raise InputError(f"{option} {text!r} names {len(parts)} for {count} models; give one for each, as a,b,c")
    if len(set(parts)) < count:
        raise InputError(f"{option} {text!r} gives two models one name; give each its own")
    if strange := [part for part in parts if not servable(part)]:
        raise InputError(f"{option}: {strange[0]!r} is no name for a model; it takes letters, digits, '.', '_' and '-'")
    return parts


def _rows(text: str | None, count: int) -> tuple[int | None, ...]:
    if text is None:
        return (None,) * count
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts) or len(parts) not in (1, count):
        raise InputError(f"--batch {text!r} is neither a number from 1 nor {count} of them with commas")
    return tuple(int(part) for part in parts) * (count if len(parts) == 1 else 1)
