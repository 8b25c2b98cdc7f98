"""``weft tune``: the smallest number format for each layer of a model that keeps it accurate, as a command."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from weft.cli.printing import (
    add_row,
    console,
    counted,
    number,
    plain_table,
    print_table,
    say,
    say_written,
    stage_bars,
    write_result,
)
from weft.cli.settings import From, Typed, with_settings
from weft.reports.pictures import require_matplotlib
from weft_tune.options import TuneOptions, usual_output

if TYPE_CHECKING:
    from weft_tune.result import TuningResult
    from weft_tune.runtime_target.fastest import RuntimeTuning
    from weft_tune.tuning_run import TuneProgress


DrawnPage = Annotated[str | None, file_option("--html", help="Write an interactive page.", require=require_matplotlib)]
"""The page includes the picture of the search, hence matplotlib."""
NO_PICTURE = "it draws the search for the smallest formats; --json has all that was measured"
"""Why --figure and --html are refused with --target."""
INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended: 128 and the number of SIGINT, as in shells."""


def _parse_scale(text: str) -> float:
    """Parse ``1/255`` or a number."""
    numerator, slash, denominator = text.partition("/")
    try:
        value = float(numerator) / float(denominator) if slash else float(numerator)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not math.isfinite(value) or value == 0:
        raise InputError(f"--scale {text!r} is no number to multiply by; write 1/255 or 0.0039")
    return value


def _parse_layers(text: str) -> str | tuple[str, ...] | None:
    """Parse --layers: None for all layers, else one word or several names."""
    if text == "all":
        return None
    names = tuple(split_names(text))
    if not names:
        raise InputError("--layers names nothing; write conv, fc, all or names: conv1,conv2")
    return names[0] if len(names) == 1 else names


def _parse_groups(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse the values of --group, each NAME=layer,layer: name -> its layers."""
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
    typed: Annotated[Typed, From(TuneOptions, scale=_parse_scale, layers=_parse_layers, groups=_parse_groups)],
    json_file: JsonFile = None,
    figure: FigureFile = None,
    html: DrawnPage = None,
) -> None:
    """Find the smallest number format for each layer that keeps a model accurate.

    [bold]weft tune model.onnx --data validation.npz --margin 0.01[/bold], or, for any framework,
    [bold]weft tune net.toml --command 'python eval.py {config}' --score 'Accuracy: (.*)'[/bold]. With
    [bold]--target onnxruntime[/bold] it measures which formats are fastest on this machine. See docs/tuning.md.
    """
    from weft_tune.result import TuningResult
    from weft_tune.tuning_run import carry_out, carry_out_fastest

    target, output = typed.get("target"), Path(typed.get("output") or usual_output(model))
    if target is not None:
        unused = dict.fromkeys(("figure", "html"), NO_PICTURE) | {"shapes": "samples have sizes"}
        refuse_unused(context, "--target", unused)
    check_folder_place("--output", output)
    search_progress, scores = SearchProgress(), None
    try:
        with told_in_options(context), terminated_like_interrupted(), stage_bars() as show_stage:
            sizes = parse_shapes(shapes, [model]).get(model, {})
            options = TuneOptions(**{**typed, "model": model, "shapes": sizes, "output": output})
            scores = options.scores
            run = carry_out if options.target is None else carry_out_fastest
            result = run(options, lambda progress: show_stage(progress.stage, search_progress.text(progress)))
    except KeyboardInterrupt:
        where = "before the search began" if target is None else "before anything was written"
        if scores and scores.exists():
            where = (
                f"at iteration {search_progress.iteration}; its scores are in {scores}, and the same command goes on "
                "from there"
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
        self._start_objective = math.inf

    def text(self, progress: TuneProgress) -> str:
        """The text of *progress*; remembers the iteration."""
        from weft_tune.result import PHASES

        search = progress.search
        if search is None:
            return (
                progress.detail
                if progress.score is None
                else f"configuration {progress.tried}, score {progress.score:.4f}"
            )
        self.iteration = search.iteration
        if self._start_objective == math.inf:
            self._start_objective = search.objective
        share = (
            f"{search.objective / self._start_objective:.1%} of the start, "
            if 0 < self._start_objective < math.inf
            else ""
        )
        needs = f", needs {search.threshold:.4f}" if search.threshold > -math.inf else ""
        phase = f"phase {search.phase}, {PHASES[search.phase]}, {search.iteration}"
        return f"{phase}: {share}score {search.score:.4f}{needs}"


DOUBTFUL_BITS = 4
"""If all objects have at most this many bits and yet no score changed, the measurement is doubtful."""
LAYER_COLUMNS = ("layer", "format", "why not int8", "ms before", "ms, all int8", "ms after")
"""Columns of the table of a target's layers."""


def print_result(result: TuningResult) -> None:
    """Print a search for the smallest formats: tables, then sentences, then the files."""
    from weft_tune.pages.page import tables

    for table in tables(result):
        print_table(table)
        console.print()
    _print_rest(sentences(result), result.files)


def print_fastest(result: RuntimeTuning) -> None:
    """Print a search for the fastest formats: a table, then sentences, then the files."""
    _print_layers(result)
    console.print()
    _print_rest(fastest_sentences(result), result.files)


def _print_rest(lines: Sequence[str], files: Mapping[str, Path]) -> None:
    """Print the sentences about the result, then the files with their sizes."""
    for line in lines:
        say(line)
    console.print()
    width = max(map(len, files), default=0)
    for kind, path in files.items():
        say(f"{kind:{width}}  {path}  ({path.stat().st_size / 1e3:,.1f} kB)")


def write_pictures(result: TuningResult, figure: str | None, html: str | None) -> None:
    """Draw the search and write the page, where the options name a file for them."""
    if figure is not None:
        from weft_tune.pages.picture import draw_search

        draw_search(result.tuning, figure)
        say_written("figure", figure)
    if html is not None:
        from weft_tune.pages.page import write_tuning_page

        write_tuning_page(html, result, sentences(result))
        say_written("page", html)


def sentences(result: TuningResult) -> list[str]:
    """The result of a search for the smallest formats, in sentences."""
    from weft_tune.pages.page import kilobytes

    tuning, threshold = result.tuning, result.tuning.thresholds["full"]
    lines = [
        f"score: {tuning.score:.4f} after {tuning.base['full']:.4f} before, at least {threshold:.4f} asked"
        f"{_test_text(result)}{_kept_share_text(result)}",
        f"size: weights {kilobytes(32 * tuning.network.weights)} kB -> {kilobytes(tuning.weight_bits)} kB, "
        f"{tuning.weight_reduction:.1f} times smaller; with one sample's activations {tuning.reduction:.1f} times",
        *_price_lines(result),
        f"search: {tuning.iterations} configurations, {_samples_text(result)}{result.seconds:.1f} s"
        + (f"; {tuning.reused} scores were known from before" if tuning.reused else ""),
        *_doubts(result),
    ]
    if result.exported_score is not None:
        warning = "" if result.exported_score >= threshold else ": less than asked; try --export simulated"
        lines.append(f"the written model scores {result.exported_score:.4f} in ONNX Runtime{warning}")
    lines += _run_times(result)
    if failures := result.failures:
        lines.append(f"failed: {len(failures)} configurations, left out; the first: {failures[0].failure}")
    return lines


def _run_times(result: TuningResult) -> list[str]:
    """The speed of the written model in ONNX Runtime; the smallest file is often slower."""
    if result.run_s is None:
        return []
    before_s, after_s = result.run_s
    times = f"in ONNX Runtime here: {1e3 * after_s:.3g} ms a sample after {1e3 * before_s:.3g} ms before"
    if after_s > before_s:
        return [f"{times}, {after_s / before_s:.1f} times slower; the smallest file is not the fastest"]
    return [f"{times}, {before_s / after_s:.1f} times faster"]


def _samples_text(result: TuningResult) -> str:
    """The number of samples that were scored, in words; nothing where the evaluator does not count them."""
    count = sum(result.tuning.samples.values())
    return f"{count:,} samples, " if count else ""


def _doubts(result: TuningResult) -> list[str]:
    """Results that look like a mistake in the measurement."""
    tuning = result.tuning
    scores = {trial.score for trial in tuning.trials if trial.subset == "full" and not trial.failure}
    if tuning.base["full"] == 0:
        return ["doubtful: the network scored 0 before anything was rounded; check the samples and what scores them"]
    narrow = all(tuning.configuration[name].bits <= DOUBTFUL_BITS for name in tuning.network.objects)
    if scores == {tuning.base["full"]} and narrow:
        return ["doubtful: no format changed the score; check that what scores the network uses the formats"]
    return []


def _test_text(result: TuningResult | RuntimeTuning) -> str:
    """The scores on the test set in words; empty without a test set."""
    if result.test_score is None or result.test_base is None:
        return ""
    return f"; on the test set {result.test_score:.4f} after {result.test_base:.4f}"


def _kept_share_text(result: TuningResult) -> str:
    """The share of the score on the test set that the result keeps, in words; empty without a test set."""
    if result.test_score is None or result.test_base is None:
        return ""
    return f" ({result.test_score / result.test_base if result.test_base else 0.0:.2%} of it)"


def _price_lines(result: TuningResult) -> list[str]:
    """Sentences about the objective, the latency on a device and the estimated speed-ups, as far as they are known."""
    from weft_tune.objective import DEFAULT

    tuning, lines = result.tuning, []
    if result.objective != DEFAULT:
        lines.append(f"objective: {tuning.objective:.6g} after {tuning.base_objective:.6g} before ({result.objective})")
    if result.latency_s is not None:
        before_s, after_s = result.latency_s
        lines.append(f"latency: {1e3 * after_s:.4g} ms after {1e3 * before_s:.4g} ms before, alone on {result.device}")
    if result.speedups:
        listed = ", ".join(f"{name} {value:.2f}" for name, value in result.speedups.items())
        lines.append(f"speed-up of these layers, estimated: {listed}")
    return lines


def _print_layers(result: RuntimeTuning) -> None:
    """Print a table of the layers: their formats, the reasons, and their times."""
    title = f"{result.network}: fastest in {result.target}, keeping {1 - result.margin:.4g} of the score"
    table = plain_table(title, LAYER_COLUMNS, left=3)
    for layer in result.layers:
        times = (number(time, scale=1e3) for time in (layer.before_s, layer.int8_s, layer.after_s))
        add_row(table, layer.name, layer.format, layer.why, *times)
    total_cells = (number(result.before.median_s, scale=1e3), "", number(result.after.median_s, scale=1e3))
    add_row(table, "the whole model", result.kind, "", *total_cells, style="bold")
    console.print(table)


def fastest_sentences(result: RuntimeTuning) -> list[str]:
    """The result of a search for the fastest formats, in sentences."""
    before_ms, after_ms = 1e3 * result.before.median_s, 1e3 * result.after.median_s
    return [
        _verdict(result, before_ms, after_ms),
        f"score: {result.score:.4f} after {result.base:.4f} before, at least {result.threshold:.4f} asked "
        f"({result.metric}{_test_text(result)})",
        f"size: {result.bytes_after / 1e3:,.1f} kB after {result.bytes_before / 1e3:,.1f} kB before; the smallest file "
        "is not the fastest: weft tune without --target makes smaller ones, for room and not for speed",
        f"measured: {counted(result.rows, 'sample')} a run, one thread, medians of {len(result.before.seconds)} turns "
        f"that the models took one after another, on {result.processor}",
        f"search: {len(result.tried)} variants, {result.seconds:.1f} s",
    ]


def _verdict(result: RuntimeTuning, before_ms: float, after_ms: float) -> str:
    """A sentence about the speed before and after."""
    if not result.changed:
        return f"speed: nothing was faster than the model as it is ({before_ms:.3f} ms), so that is the result"
    changed = sum(layer.format == result.kind for layer in result.layers)
    return (
        f"speed: {after_ms:.3f} ms after {before_ms:.3f} ms before, {result.speedup:.2f} times as fast, with {changed} "
        f"of {counted(len(result.layers), 'layer')} in {result.kind}"
    )
