"""``weft map``: place several models on the units of one SoC; from options or from a scenario file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from weft.base.errors import InputError, unknown_name
from weft.cli import common
from weft.cli.command import Command, InOptions, given_options
from weft.cli.common import (
    complete_models,
    complete_socs,
    file_option,
    how,
    parse_shapes,
    split_names,
    what,
)
from weft.cli.printing import progress_bar, say, say_written
from weft.cli.settings import From, Typed, with_settings
from weft_map.cli import calibrate, map_dynamic
from weft_map.scenario import MappingCase, Scenario, parse_scenario, prepare, prepare_phases, read_scenario

if TYPE_CHECKING:
    from weft.models import Model


class _Group(InOptions, TyperGroup):
    """A group of commands that reads ``weft map scenario.toml`` as ``weft map --scenario scenario.toml``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].endswith(".toml"):
            args = ["--scenario", *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0].endswith(".toml"):
            raise InputError(f"write {args[0]} before the options, or after --scenario")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Group,
    invoke_without_command=True,
    no_args_is_help=True,
    help="Place the layers of several models on the units of one SoC: the best schedule, and what is proved.\n\n"
    "[bold]weft map --soc xavier --models googlenet,resnet101[/bold], or [bold]weft map scenario.toml[/bold].\n\n"
    "See docs/mapping.md.",
)
app.command("calibrate", cls=Command)(calibrate.command)
app.command("dynamic", cls=Command)(map_dynamic.command)

Unit = Annotated[list[str], typer.Option("--unit", help="UNIT=FILE, as gpu=gpu.json; one for each unit.")]
SocName = Annotated[
    str, typer.Option("--soc", "-s", autocompletion=complete_socs, help="A SoC (weft devices list) or a TOML file.")
]


@app.callback()
@with_settings
def command(
    context: typer.Context,
    *,
    soc: Annotated[
        str | None, what("--soc", "-s", autocompletion=complete_socs, help="xavier, orin, snapdragon, or a TOML file.")
    ] = None,
    models: Annotated[
        str | None,
        what(
            "--models", "-m", autocompletion=complete_models, help="Zoo names, .onnx files or profiles (.json): a,b,c"
        ),
    ] = None,
    scenario: Annotated[
        str | None, what("--scenario", help="Read all of these from a TOML file; options override it.")
    ] = None,
    phase: Annotated[int | None, what("--phase", help="The phase to map, from 1, in a scenario with phases.")] = None,
    after: Annotated[list[str] | None, what("--after", help="B=A: b begins when a has finished; repeatable.")] = None,
    repeat: Annotated[list[str] | None, what("--repeat", help="A=2: a runs twice in a row; repeatable.")] = None,
    typed: Annotated[Typed, From(Scenario)],
    z3: Annotated[bool, how("--z3", help="Also solve with Z3, as HaX-CoNN does; needs the extra z3.")] = False,
    shape: common.Shapes = None,
    json_file: common.JsonFile = None,
    html: common.HtmlFile = None,
    figure: common.FigureFile = None,
    perfetto: common.PerfettoFile = None,
    trace: common.TraceFile = None,
    devices: Annotated[
        str | None,
        file_option(
            "--devices",
            suffixes=(".json", ".csv", ".txt"),
            help="Write every layer's unit: .json, .csv, or .txt for trtexec.",
        ),
    ] = None,
) -> None:
    from weft_map.cli.map_show import add_z3, print_solution, solve_shown, write_files
    from weft_map.export import check_device_list

    if context.invoked_subcommand is not None:
        if options := given_options(context):
            raise InputError(
                f"{', '.join(options.values())}: weft map {context.invoked_subcommand} takes none of the options "
                "before its name; write its own behind it"
            )
        return
    scenario_keys = dict(typed) | ({} if soc is None else {"soc": soc})
    if models is not None:
        scenario_keys["task"] = _tasks(models, after, repeat, shape)
    elif after or repeat or shape:
        raise InputError("--after, --repeat and --shape go with --models; a scenario has keys for them")
    with progress_bar("reading"):
        case = _prepare(_scenario(scenario, scenario_keys), phase)
    if devices:
        check_device_list(devices, case.problem)
    solution = solve_shown(case)
    if z3:
        solution = add_z3(case, solution)
    print_solution(case, solution)
    write_files(
        case, solution, json_file=json_file, html=html, figure=figure, perfetto=perfetto, trace=trace, devices=devices
    )


def _scenario(path: str | None, keys: dict[str, Any]) -> Scenario:
    """The scenario of the file *path*, if any, with the keys from options (*keys*) in place of the file's."""
    if path is None:
        if "soc" not in keys or "task" not in keys:
            raise InputError("name a SoC and models (--soc xavier --models googlenet,resnet101), or a scenario file")
        return parse_scenario(keys, "options")
    if "task" in keys:
        raise InputError(f"--models and the tasks of {path} do not go together; give one of them")
    keys_of_file = read_scenario(path).model_dump()
    if "soc" in keys and keys["soc"].endswith(".toml"):  # an option's path does not depend on the scenario's folder
        keys["soc"] = str(Path(keys["soc"]).absolute())
    return parse_scenario(keys_of_file | keys, path)


def _prepare(scenario: Scenario, phase: int | None) -> MappingCase:
    """The case to solve: of *phase* (from 1), of the only phase, or of all tasks if there are no phases."""
    count = len(scenario.phase)
    if phase is None:
        if count > 1:
            raise InputError(f"the scenario has {count} phases; say which with --phase, or run weft map dynamic")
        return prepare_phases(scenario)[0] if count else prepare(scenario)
    if not 1 <= phase <= count:
        raise InputError(f"--phase {phase}: the scenario has {count} phases, from 1")
    return prepare_phases(scenario)[phase - 1]


def _tasks(
    models: str, after: Sequence[str] | None, repeat: Sequence[str] | None, shapes: Sequence[str] | None
) -> list[dict[str, Any]]:
    """The scenario's ``task`` entries from --models, --after, --repeat and --shape."""
    model_names = split_names(models)
    if not model_names:
        raise InputError("--models names nothing; give at least one model")
    # A scenario gives its tasks distinct names, whatever its SoC.
    names = parse_scenario({"soc": "any", "task": [{"model": name} for name in model_names]}, "--models").names
    predecessors = _parse_pairs("--after", after, names)
    counts = _parse_pairs("--repeat", repeat, names)
    repeats = {name: _parse_repeats(name, values[-1]) for name, values in counts.items()}
    shapes_of_model = parse_shapes(shapes, model_names)
    return [
        {
            "model": model,
            "name": name,
            "after": [
                _check_known("--after", predecessor, names)
                for value in predecessors.get(name, ())
                for predecessor in value.split("+")
            ],
            "repeats": repeats.get(name, 1),
            "shapes": shapes_of_model.get(model),
        }
        for model, name in zip(model_names, names, strict=True)
    ]


def _parse_pairs(option: str, texts: Sequence[str] | None, names: Sequence[str]) -> dict[str, list[str]]:
    """Parse options of the form TASK=VALUE: task -> its values; raises InputError for other texts or unknown tasks."""
    values: dict[str, list[str]] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise InputError(f"{option} {text!r} is not of the form {'B=A' if option == '--after' else 'A=2'}")
        values.setdefault(_check_known(option, name, names), []).append(value)
    return values


def _check_known(option: str, name: str, names: Sequence[str]) -> str:
    if name not in names:
        raise InputError(f"{option}: {unknown_name('task', name, names)}")
    return name


def _parse_repeats(name: str, text: str) -> int:
    """Parse the value of ``--repeat NAME=VALUE``."""
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--repeat {name}={text}: give a whole number from 1")
    return int(text)


@app.command("import-trt", cls=Command)
def import_trt(
    unit: Unit,
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="The .onnx file that was profiled, or just a name; then give --demands."),
    ],
    output: Annotated[
        str, file_option("--output", "-o", panel=None, suffixes=(".json",), help="The profile to write (.json).")
    ],
    soc: SocName = "xavier",
    demands: Annotated[
        str | None, typer.Option("--demands", help="JSON: unit -> name of a kernel or layer -> GB/s.")
    ] = None,
    max_groups: Annotated[
        int | None, typer.Option("--max-groups", help="Merge groups until there are at most this many.")
    ] = None,
) -> None:
    """Make a profile from the files that trtexec --exportProfile wrote, one for each unit."""
    from weft.devices import load_soc
    from weft_map.profiles import write_soc_profile
    from weft_map.trtexec import read_trtexec

    files = {}
    for text in unit:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise InputError(f"--unit {text!r} is not of the form gpu=gpu.json")
        if name in files:
            raise InputError(f"--unit {name} is given twice; give one file for each unit")
        files[name] = path
    soc_description = load_soc(soc)
    profile = read_trtexec(files, _model(model), soc_description, demands=_demands(demands), max_groups=max_groups)
    write_soc_profile(profile, output)
    totals = [(name, profile.total_s(name)) for name in profile.units]
    times = ", ".join(f"{name} {total * 1e3:.3f} ms" if total else f"{name} in part" for name, total in totals)
    say(f"{profile.model} on {profile.soc}: {len(profile.groups)} groups; {times}")
    say_written("profile", output)


def _model(name: str) -> Model | str:
    """The model with its layers if it is an .onnx file; otherwise the name alone.

    A model of the zoo is not loaded, because its layers have other names than TensorRT's kernels.
    """
    from weft.models.sources import load_model

    return load_model(name) if name.endswith(".onnx") else name


def _demands(path: str | None) -> dict[str, dict[str, float]] | None:
    """Read demands from a JSON file: unit -> name of a kernel or layer -> GB/s."""
    from weft.base.errors import ProfileError
    from weft.base.jsonfile import read_json

    if path is None:
        return None
    raw = read_json(path, ProfileError)
    if not isinstance(raw, dict) or not all(isinstance(by_name, dict) for by_name in raw.values()):
        raise ProfileError(f'{path}: demands are an object of objects, as {{"gpu": {{"conv1": 41.5}}}}')
    return raw
