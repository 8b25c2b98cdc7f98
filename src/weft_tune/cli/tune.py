"""``weft tune``: the smallest number format for each layer of a model that keeps it accurate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.base.errors import EvaluationError, InputError
from weft.cli.command import refuse_unused, terminated_like_interrupted, told_in_options
from weft.cli.common import (
    FigureFile,
    JsonFile,
    Shapes,
    check_folder_place,
    complete_models,
    file_option,
    parse_shapes,
    split_names,
)
from weft.cli.printing import stage_bars, write_result
from weft.cli.settings import From, Typed, with_settings
from weft.reports.pictures import require_matplotlib
from weft_tune.options import TuneOptions, usual_output

if TYPE_CHECKING:
    from weft_tune.tuning_run import TuneProgress

DrawnPage = Annotated[str | None, file_option("--html", help="Write an interactive page.", require=require_matplotlib)]
"""The page includes the picture of the search, hence matplotlib."""
DRAWN = "it draws the search for the smallest formats; --json has all that was measured"
INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended: 128 and the number of SIGINT, as in shells."""


def _scale(text: str) -> float:
    """Parse ``1/255`` or a number."""
    above, slash, below = text.partition("/")
    try:
        value = float(above) / float(below) if slash else float(above)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not math.isfinite(value) or value == 0:
        raise InputError(f"--scale {text!r} is no number to multiply by; write 1/255 or 0.0039")
    return value


def _layers(text: str) -> str | tuple[str, ...] | None:
    if text == "all":
        return None
    names = tuple(split_names(text))
    if not names:
        raise InputError("--layers names nothing; write conv, fc, all or names: conv1,conv2")
    return names[0] if len(names) == 1 else names


def _groups(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    groups: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, members = text.partition("=")
        names = tuple(split_names(members))
        if not equals or not name.strip() or not names:
            raise InputError(f"--group {text!r} is not of the form NAME=layer,layer")
        if name.strip() in groups:
            raise InputError(f"--group {name.strip()} is given twice; name its layers once")
        groups[name.strip()] = names
    return groups


@with_settings
def command(
    context: typer.Context,
    *,
    model: Annotated[
        str,
        typer.Argument(
            autocompletion=complete_models,
            help="An .onnx file; any name of weft models list; a network described in a .toml file; or lenet, mlp-m, "
            "mlp-c, cuda-convnet, which come with images to try it.",
        ),
    ],
    shapes: Shapes = None,
    typed: Annotated[Typed, From(TuneOptions, scale=_scale, layers=_layers, groups=_groups)],
    json_file: JsonFile = None,
    figure: FigureFile = None,
    html: DrawnPage = None,
) -> None:
    """Find the smallest number format for each layer that keeps a model accurate.

    [bold]weft tune model.onnx --data validation.npz --margin 0.01[/bold], or, for any framework,
    [bold]weft tune net.toml --command 'python eval.py {config}' --score 'Accuracy: (.*)'[/bold]. With
    [bold]--target onnxruntime[/bold] it measures which formats are fastest on this machine. See docs/tuning.md.
    """
    from weft_tune.cli.tune_show import print_fastest, print_result, write_pictures
    from weft_tune.result import TuningResult
    from weft_tune.tuning_run import carry_out, carry_out_fastest

    target, output = typed.get("target"), Path(typed.get("output") or usual_output(model))
    if target is not None:
        refuse_unused(context, "--target", dict.fromkeys(("figure", "html"), DRAWN) | {"shapes": "samples have sizes"})
    check_folder_place("--output", output)
    shown, scores = SearchProgress(), None
    try:
        with told_in_options(context), terminated_like_interrupted(), stage_bars() as show:
            sizes = parse_shapes(shapes, [model]).get(model, {})
            options = TuneOptions(**{**typed, "model": model, "shapes": sizes, "output": output})
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
    """The progress of a tuning in words; it remembers the last iteration, for the message after Ctrl-C."""

    def __init__(self) -> None:
        self.iteration = 0
        self._first = math.inf

    def text(self, progress: TuneProgress) -> str:
        from weft_tune.result import PHASES

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
