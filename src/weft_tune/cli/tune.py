"""``weft tune``: the smallest number format for each layer of a model that keeps it accurate."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.base.errors import EvaluationError, InputError
from weft.cli.common import (
    FigureFile,
    JsonFile,
    check_folder_place,
    complete_devices,
    file_option,
    folder_option,
    how,
    in_panel,
    out,
    split_names,
    what,
)
from weft.cli.plans import options_of, stage_bars, told_in_options
from weft.cli.printing import write_result
from weft.cli.unused import refuse_unused
from weft.reports.pictures import require_matplotlib

if TYPE_CHECKING:
    from weft_tune.whole_run import TuneProgress

scored = in_panel("Scores from a command")
"""Options of networks whose score a command prints."""
DrawnPage = Annotated[str | None, file_option("--html", help="Write an interactive page.", require=require_matplotlib)]
"""The page holds the picture of the search."""
DRAWN = "it draws the search for the smallest formats; --json has all that was measured"
INTERRUPTED = 130
"""The exit code of what Ctrl-C ended."""


def command(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="An .onnx file; a network described in a .toml file; or lenet, mlp-m, mlp-c, cuda-convnet, "
            "which come with images to try it."
        ),
    ],
    data: Annotated[str | None, what("--data", help="Labelled samples (.npz): the model's inputs and 'label'.")] = None,
    scale: Annotated[str | None, what("--scale", help="Multiply the samples by it, as 1/255.")] = None,
    test: Annotated[str | None, what("--test", help="Other labelled samples, scored once, at the end.")] = None,
    metric: Annotated[
        str | None,
        what(
            "--metric",
            show_default="top1",
            help="top1, top5, or file.py:function; with --target and without labels, agreement or closeness "
            "with the model as it was.",
        ),
    ] = None,
    margin: Annotated[
        float | None, what("--margin", show_default="0.01", help="Part of the score that may be lost.")
    ] = None,
    network: Annotated[str | None, what("--network", help="Take layers and settings from a TOML file.")] = None,
    layers: Annotated[
        str | None, what("--layers", show_default="all", help="conv, fc, all, or names: conv1,block2.*")
    ] = None,
    groups: Annotated[
        list[str] | None, what("--group", help="NAME=a,b: layers that share formats; repeatable.")
    ] = None,
    scored_output: Annotated[
        str | None, what("--scored-output", show_default="the first", help="The output that is scored.")
    ] = None,
    target: Annotated[
        str | None,
        how(
            "--target",
            help="Find what a runtime computes fastest on this machine, measured, instead of what is smallest: "
            "onnxruntime.",
        ),
    ] = None,
    platform: Annotated[
        str | None,
        how(
            "--platform",
            show_default="fpga",
            help="Which formats there are: fpga, int8, small-floats, stripes, or a TOML file.",
        ),
    ] = None,
    objective: Annotated[
        str | None,
        how(
            "--objective",
            show_default="weights + activations",
            help="What is made small: an expression over bits and sizes.",
        ),
    ] = None,
    layerwise: Annotated[
        str | None,
        how(
            "--layerwise",
            show_default="WGT-ONLY",
            help="What may differ from layer to layer: WGT-ONLY, BOTH, ACT-ONLY or NONE.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        how(
            "--device",
            "-d",
            autocompletion=complete_devices,
            help="A device (weft devices list): lets the objective say latency_s, and writes a profile for it.",
        ),
    ] = None,
    small: Annotated[
        float | None, how("--small", show_default="0.2", help="Part of the samples that the first pass uses.")
    ] = None,
    bias_rule: Annotated[
        str,
        how(
            "--bias-rule",
            help="When biases are raised: keep (nothing may be lost), repair (also where a width fails), "
            "chapter (until the margin is spent).",
        ),
    ] = "repair",
    faithful: Annotated[bool, how("--faithful", help="Score every candidate in full. Same result.")] = False,
    workers: Annotated[
        int | None, how("--workers", show_default="all cores; 1 for a command", help="Processes side by side.")
    ] = None,
    baselines: Annotated[
        list[str] | None,
        how("--baseline", help="Run another method beside: ristretto, relaxed-ristretto, stripes, int8; repeatable."),
    ] = None,
    command: Annotated[
        str | None, scored("--command", help="A shell command with {config} for the formats' file.")
    ] = None,
    small_command: Annotated[
        str | None, scored("--small-command", help="The same on few samples, for the first pass.")
    ] = None,
    score: Annotated[str | None, scored("--score", help="Regular expression; its group is the score.")] = None,
    timeout: Annotated[float | None, scored("--timeout", help="Seconds a command may take.")] = None,
    on_failure: Annotated[str, scored("--on-failure", help="stop, or skip what cannot be scored and go on.")] = "stop",
    output: Annotated[
        str | None, folder_option("--output", "-o", show_default="MODEL-tuned", help="Folder for the results.")
    ] = None,
    export: Annotated[str, out("--export", help="The tuned model as qdq, packed, simulated, qonnx or none.")] = "qdq",
    database: Annotated[
        str | None,
        out(
            "--database",
            show_default="scores.db in that folder",
            help="Keeps scores: what is in it is not asked again.",
        ),
    ] = None,
    fresh: Annotated[bool, out("--fresh", help="Forget the scores of earlier runs.")] = False,
    json_file: JsonFile = None,
    figure: FigureFile = None,
    html: DrawnPage = None,
) -> None:
    """Find the smallest number format for each layer that keeps a model accurate.

    [bold]weft tune model.onnx --data validation.npz --margin 0.01[/bold], or, for any framework,
    [bold]weft tune net.toml --command 'python eval.py {config}' --score 'Accuracy: (.*)'[/bold]. With
    [bold]--target onnxruntime[/bold] the fastest formats, measured here. See docs/tuning.md.
    """
    from weft_tune.cli.tune_show import print_result, write_pictures
    from weft_tune.cli.tune_target import print_fastest
    from weft_tune.options import TuneOptions, usual_output
    from weft_tune.result import TuningResult
    from weft_tune.whole_run import carry_out, carry_out_fastest

    if target is not None:
        refuse_unused(context, "--target", dict.fromkeys(("figure", "html"), DRAWN))
    if output is None:
        check_folder_place("--output", usual_output(model))
    shown, scores = SearchProgress(), None
    try:
        with told_in_options(context), terminated_like_interrupted(), stage_bars() as show:
            options = options_of(
                TuneOptions,
                context,
                scale=_scale(scale),
                layers=_layers(layers),
                groups=_groups(groups),
                baselines=tuple(baselines or ()),
                timeout_s=timeout,
                output=output or usual_output(model),
            )
            scores = options.scores
            carry = carry_out if options.target is None else carry_out_fastest
            result = carry(options, lambda progress: show(progress.stage, shown.text(progress)))
    except KeyboardInterrupt:
        where = "before the search began" if target is None else "before anything was written"
        if scores and scores.exists():
            where = (
                f"at iteration {shown.iteration}; its scores are in {scores}, and the same command goes on from there"
            )
        typer.echo(f"weft: stopped {where}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except EvaluationError as error:
        if error.output.strip():
            typer.echo(error.output.rstrip(), err=True)
        raise
    if isinstance(result, TuningResult):
        print_result(result)
        write_pictures(result, figure, html)
    else:
        print_fastest(result)
    write_result(json_file, result.as_dict())


class SearchProgress:
    """How far a tuning is, in words; it remembers where the search was last."""

    def __init__(self) -> None:
        self.iteration = 0
        self._first = math.inf

    def text(self, progress: TuneProgress) -> str:
        from weft_tune.trials import PHASES

        search = progress.search
        if search is None:
            return (
                progress.detail
                if progress.score is None
                else f"configuration {progress.tried}, score {progress.score:.4f}"
            )
        self.iteration = search.iteration
        if self._first == math.inf:
            self._first = search.objective
        share = f"{search.objective / self._first:.1%} of the start, " if 0 < self._first < math.inf else ""
        needs = f", needs {search.threshold:.4f}" if search.threshold > -math.inf else ""
        phase = f"phase {search.phase}, {PHASES[search.phase]}, {search.iteration}"
        return f"{phase}: {share}score {search.score:.4f}{needs}"


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
    names = tuple(split_names(text))
    if not names:
        raise InputError("--layers names nothing; write conv, fc, all or names: conv1,conv2")
    return names[0] if len(names) == 1 else names


def _groups(texts: Sequence[str] | None) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for text in texts or ():
        name, equals, members = text.partition("=")
        names = tuple(split_names(members))
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
