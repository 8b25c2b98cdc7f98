"""``weft tune``: the smallest number format for each layer of a model that keeps it accurate."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.common import JsonFile
from weft.cli.tune_steps import BASELINES, EXPORTS, Steps
from weft.cli.tune_subject import Request
from weft.errors import EvaluationError, InputError, unknown_name

WHAT, HOW, COMMAND, FILES = "What to tune", "How to search", "Scores from a command", "Files and tables"
"""Parts of the help."""
INTERRUPTED = 130
"""The exit code of what Ctrl-C ended."""


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="An .onnx file; a network described in a .toml file; or lenet, mlp-m, mlp-c, cuda-convnet, "
            "which come with images to try it."
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option("--data", rich_help_panel=WHAT, help="Labelled samples (.npz): the model's inputs and 'label'."),
    ] = None,
    scale: Annotated[
        str | None, typer.Option("--scale", rich_help_panel=WHAT, help="Multiply the samples by it, as 1/255.")
    ] = None,
    test: Annotated[
        str | None,
        typer.Option("--test", rich_help_panel=WHAT, help="Other labelled samples, scored once, at the end."),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option("--metric", rich_help_panel=WHAT, show_default="top1", help="top1, top5, or file.py:function."),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option("--margin", rich_help_panel=WHAT, show_default="0.01", help="Part of the score that may be lost."),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option("--network", rich_help_panel=WHAT, help="Take layers and settings from a TOML file."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers", rich_help_panel=WHAT, show_default="all", help="conv, fc, all, or names: conv1,block2.*"
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option("--group", rich_help_panel=WHAT, help="NAME=a,b: layers that share formats; repeatable."),
    ] = None,
    output_name: Annotated[
        str | None, typer.Option("--scored-output", rich_help_panel=WHAT, help="The model's output that is scored.")
    ] = None,
    platform: Annotated[
        str | None,
        typer.Option(
            "--platform",
            rich_help_panel=HOW,
            show_default="fpga",
            help="Which formats there are: fpga, int8, small-floats, stripes, or a TOML file.",
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective",
            rich_help_panel=HOW,
            show_default="weights + activations",
            help="What is made small: an expression over bits and sizes.",
        ),
    ] = None,
    layerwise: Annotated[
        str | None,
        typer.Option(
            "--layerwise",
            rich_help_panel=HOW,
            show_default="WGT-ONLY",
            help="What may differ from layer to layer: WGT-ONLY, BOTH, ACT-ONLY or NONE.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            "-d",
            rich_help_panel=HOW,
            help="A device (weft devices list): lets the objective say latency_s, and writes a profile for it.",
        ),
    ] = None,
    small: Annotated[
        float | None,
        typer.Option(
            "--small", rich_help_panel=HOW, show_default="0.2", help="Part of the samples that the first pass uses."
        ),
    ] = None,
    bias_rule: Annotated[
        str,
        typer.Option(
            "--bias-rule",
            rich_help_panel=HOW,
            help="When biases are raised: keep (nothing may be lost), repair (also where a width fails), "
            "chapter (until the margin is spent).",
        ),
    ] = "repair",
    faithful: Annotated[
        bool, typer.Option("--faithful", rich_help_panel=HOW, help="Score every candidate in full. Same result.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option("--workers", rich_help_panel=HOW, help="Processes; all cores by default, one command at a time."),
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline",
            rich_help_panel=HOW,
            help=f"Run another method beside: {', '.join(BASELINES)}; repeatable.",
        ),
    ] = None,
    evaluation: Annotated[
        str | None,
        typer.Option("--command", rich_help_panel=COMMAND, help="A shell command with {config} for the formats' file."),
    ] = None,
    small_command: Annotated[
        str | None,
        typer.Option("--small-command", rich_help_panel=COMMAND, help="The same on few samples, for the first pass."),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option("--score", rich_help_panel=COMMAND, help="Regular expression; its group is the score."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", rich_help_panel=COMMAND, help="Seconds a command may take.")
    ] = None,
    on_failure: Annotated[
        str,
        typer.Option("--on-failure", rich_help_panel=COMMAND, help="stop, or skip what cannot be scored and go on."),
    ] = "stop",
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", rich_help_panel=FILES, show_default="MODEL-tuned", help="Folder for the results."
        ),
    ] = None,
    export: Annotated[
        str, typer.Option("--export", rich_help_panel=FILES, help=f"The tuned model as {', '.join(EXPORTS)}.")
    ] = "qdq",
    database: Annotated[
        str | None,
        typer.Option(
            "--database",
            rich_help_panel=FILES,
            show_default="scores.db in that folder",
            help="Keeps scores: what is in it is not asked again.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", rich_help_panel=FILES, help="Forget the scores of earlier runs.")
    ] = False,
    no_pictures: Annotated[
        bool, typer.Option("--no-pictures", rich_help_panel=FILES, help="Draw nothing, and write no page.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Find the smallest number format for each layer that keeps a model accurate.

    [bold]weft tune model.onnx --data validation.npz --margin 0.01[/bold], or, for any framework,
    [bold]weft tune net.toml --command 'python eval.py {config}' --score 'Accuracy: (.*)'[/bold]. See docs/tuning.md.
    """
    asked = Request(
        model=model,
        data=data,
        scale=_scale(scale),
        test=test,
        metric=metric,
        margin=margin,
        network=network,
        layers=_layers(layers),
        groups=_groups(group),
        output_name=output_name,
        platform=platform,
        objective=objective,
        layerwise=layerwise,
        device=device,
        small=small,
        bias_rule=bias_rule,
        faithful=faithful,
        workers=workers,
        baselines=tuple(dict.fromkeys(baseline or ())),
        command=evaluation,
        small_command=small_command,
        score=score,
        timeout_s=timeout,
        on_failure=on_failure,
        output=None if output is None else Path(output),
        export=export,
        database=None if database is None else Path(database),
        fresh=fresh,
        pictures=not no_pictures,
        json_file=None if json_file is None else Path(json_file),
    )
    _refuse_early(asked)
    with terminated_like_interrupted(), Steps(asked) as steps:
        try:
            steps.search()
            steps.compare()
            steps.write()
        except KeyboardInterrupt:
            steps.tell_interrupted()
            raise typer.Exit(INTERRUPTED) from None
        except EvaluationError as error:
            if error.output.strip():
                typer.echo(error.output.rstrip(), err=True)
            raise steps.failed(error) from error
        steps.show()


def _refuse_early(asked: Request) -> None:
    """What would come to nothing after minutes of searching."""
    for option, value, known in (
        ("--export", asked.export, EXPORTS),
        ("--on-failure", asked.on_failure, ("stop", "skip")),
        *(("--baseline", each, tuple(BASELINES)) for each in asked.baselines),
    ):
        if value not in known:
            raise InputError(f"{option}: {unknown_name('choice', value, known)}")
    if asked.margin is not None and not 0 <= asked.margin < 1:
        raise InputError(
            f"--margin {asked.margin:g}: give a part of the score, from 0 to below 1; 0.01 is one per cent"
        )
    if asked.small is not None and not 0 < asked.small <= 1:
        raise InputError(f"--small {asked.small:g}: give a part of the samples, above 0 and at most 1")
    if asked.workers is not None and asked.workers < 1:
        raise InputError(f"--workers {asked.workers}: give 1 or more")
    if asked.timeout_s is not None and not 0 < asked.timeout_s < math.inf:
        raise InputError(f"--timeout {asked.timeout_s:g}: give seconds above 0")
    if asked.folder.exists() and not asked.folder.is_dir():
        raise InputError(f"{asked.folder}: name a folder for the results, it is a file")
    for path in (asked.json_file, asked.database):
        if path is not None and not path.parent.is_dir():
            raise InputError(f"{path}: cannot write: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            raise InputError(f"{path}: cannot write: it is a folder; name a file")


def _scale(text: str | None) -> float | None:
    """``1/255`` or a number."""
    if text is None:
        return None
    above, slash, below = text.partition("/")
    try:
        value = float(above) / float(below) if slash else float(above)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not math.isfinite(value) or value == 0:
        raise InputError(f"--scale {text!r} is no number to multiply by; write 1/255 or 0.0039")
    return value


def _layers(text: str | None) -> str | tuple[str, ...] | None:
    if text is None or text == "all":
        return None
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise InputError("--layers names nothing; write conv, fc, all or names: conv1,conv2")
    return names[0] if len(names) == 1 else names


def _groups(texts: Sequence[str] | None) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for text in texts or ():
        name, equals, members = text.partition("=")
        names = tuple(each.strip() for each in members.split(",") if each.strip())
        if not equals or not name.strip() or not names:
            raise InputError(f"--group {text!r} is not of the form NAME=layer,layer")
        if name.strip() in found:
            raise InputError(f"--group {name.strip()} is given twice; name its layers once")
        found[name.strip()] = names
    return found


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """A job manager's SIGTERM ends a search as Ctrl-C does: its commands are stopped, its scores are kept."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread: whoever runs us there looks after signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
