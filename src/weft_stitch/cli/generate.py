"""``weft models generate``: weight-shared models without training, to try ``weft stitch`` with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.base.errors import InputError
from weft.cli.command import refuse_unused
from weft.cli.common import folder_option
from weft.cli.printing import progress_bar, say_written

ARCHITECTURES = (
    "resnet18, resnet50, vgg16, mobilenet; to try things quickly tinynet, tiny-sigmoid, tiny-vgg, tiny-dense, "
    "tiny-mobile. Fine-tuned transformers: encoder, base-encoder, tiny-encoder."
)

_OF_NETS = ("pruning", "sharing", "norm", "widths", "batch", "resolution", "permute")
"""Options that only apply to convolutional networks."""
_OF_ENCODERS = ("rank", "frozen", "full")
"""Options that only apply to encoders."""


def command(
    context: typer.Context,
    architecture: Annotated[str, typer.Argument(help=ARCHITECTURES)],
    output: Annotated[str, folder_option("--output", "-o", panel=None, help="The folder to write the .onnx files to.")],
    tasks: Annotated[int, typer.Option("--tasks", "-t", help="Number of models.")] = 4,
    pruning: Annotated[float, typer.Option("--pruning", help="The part of every inner width that is pruned.")] = 0.0,
    sharing: Annotated[float, typer.Option("--sharing", help="The part of the channels that all models share.")] = 0.9,
    norm: Annotated[
        str, typer.Option("--norm", help="Normalisations: per_task, shared, or folded (biases only).")
    ] = "per_task",
    widths: Annotated[str | None, typer.Option("--widths", help="A factor on each model's widths: 1,0.9,1.25")] = None,
    classes: Annotated[
        str | None, typer.Option("--classes", help="Classes of all models, or of each: 10,100,5")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", "-b", help="The fixed number of rows of the files; by default the number is open."),
    ] = None,
    resolution: Annotated[int | None, typer.Option("--resolution", help="Height and width of the pictures.")] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", help="Encoders: rank of the update that is added to queries and values.")
    ] = None,
    frozen: Annotated[
        float | None, typer.Option("--frozen", help="Encoders: the part of the layers that equals the base model's.")
    ] = None,
    full: Annotated[
        float | None,
        typer.Option(
            "--full", help="Encoders: the part of the layers, spread over the model, that is each model's own."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random weights.")] = 0,
    permute: Annotated[
        bool, typer.Option("--permute/--no-permute", help="Each model has its channels in an order of its own.")
    ] = True,
) -> None:
    """Write models of one architecture that share a part of their weights, drawn at random."""
    from weft_stitch.making.encoders import ENCODERS, EncoderRecipe
    from weft_stitch.making.generator import FamilyRecipe, save_nets

    for option, fraction in (("--pruning", pruning), ("--sharing", sharing)):
        if not 0 <= fraction <= 1 or (option == "--pruning" and fraction == 1):
            raise InputError(f"{option} {fraction:g}: give a part from 0 to {'below ' * (option == '--pruning')}1")
    if tasks < 1:
        raise InputError(f"--tasks {tasks}: give 1 or more")
    if architecture in ENCODERS:
        refuse_unused(context, "encoders", dict.fromkeys(_OF_NETS, "it is for convolutional networks"))
        class_counts = tuple(map(int, _numbers("--classes", classes, int) or (3,)))
        classes_of_models = class_counts if len(class_counts) > 1 else class_counts[0]
        _save(
            architecture,
            tasks,
            EncoderRecipe(
                architecture, tasks, frozen=frozen, full=full, rank=rank, classes=classes_of_models, seed=seed
            ).save(Path(output)),
        )
        return
    refuse_unused(context, architecture, dict.fromkeys(_OF_ENCODERS, "it is for encoders"))
    settings: dict[str, Any] = {
        "pruning": pruning, "sharing": sharing, "norm": norm, "resolution": resolution, "seed": seed,
        "permute": permute, "batches": 1 if batch is None else batch, "widths": _numbers("--widths", widths, float),
        "classes": _one_or_many(_numbers("--classes", classes, int)),
    }  # fmt: skip
    nets = FamilyRecipe(architecture, tasks, **settings).nets()
    _save(architecture, tasks, (save_nets([net], Path(output), dynamic=batch is None)[0] for net in nets))


def _save(architecture: str, tasks: int, paths: Iterable[Path]) -> None:
    """Write models one after another: iterating *paths* draws and writes each."""
    with progress_bar(f"drawing {architecture}", tasks) as advance:
        for path in paths:
            advance()
            say_written("model", path)


def _numbers(option: str, text: str | None, kind: Callable[[str], float]) -> list[float] | None:
    """The numbers of an option, separated by commas; None if it is not given."""
    if text is None:
        return None
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} {text!r} are not numbers with commas between them") from None


def _one_or_many(numbers: list[float] | None) -> Any:
    """The only number of *numbers*, if it is one, else all of them (None stays None)."""
    return numbers[0] if numbers and len(numbers) == 1 else numbers
