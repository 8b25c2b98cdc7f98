"""Options that several commands share, and the roads from what a user writes to our values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.base.errors import InputError, ModelError, ShapeNeeded, WorkloadError
from weft.base.files import check_file, check_folder
from weft.cli.printing import STANDARD_OUTPUT, console, progress_bar, warn_of_gaps
from weft.reports.pictures import SUFFIXES, require_matplotlib

if TYPE_CHECKING:
    from weft.devices import Npu
    from weft.devices.costs.layer_costs import Profile
    from weft.engine.policies import Option
    from weft.workloads import Saturated


def in_panel(panel: str) -> Callable[..., Any]:
    """Declares options that the command's help lists under *panel*."""
    return partial(typer.Option, rich_help_panel=panel)


what, how, out = map(in_panel, ("What", "How", "Output"))
"""Options that say what a command is about, how it goes about it, and what comes out of it."""


def file_option(
    *names: str,
    help: str,
    suffixes: Sequence[str] = (),
    panel: str | None = "Output",
    require: Callable[[], None] | None = None,
) -> Any:
    """An option that names a file to write; where that cannot be, it is refused before any work.

    require: raises InputError where a package that writes the file is not installed.
    """

    def check(context: typer.Context, param: typer.CallbackParam, value: str | None) -> str | None:
        option = max(param.opts, key=len)
        if option == "--json":
            console.stderr = value == STANDARD_OUTPUT
        if value is not None and not context.resilient_parsing and (option, value) != ("--json", STANDARD_OUTPUT):
            if require is not None:
                require()
            _check_place(option, Path(value), suffixes, context.meta.setdefault("files to write", {}))
        return value

    return typer.Option(*names, metavar="FILE", rich_help_panel=panel, callback=check, help=help)


def folder_option(*names: str, help: str, replaced: bool = False, panel: str | None = "Output", **settings: Any) -> Any:
    """An option that names a folder to write; where that cannot be, it is refused before any work.

    replaced: whether the folder is written whole, in the place of an older one, beside which it is made first.
    """

    def check(context: typer.Context, param: typer.CallbackParam, value: str | None) -> str | None:
        if value is not None and not context.resilient_parsing:
            check_folder_place(max(param.opts, key=len), Path(value), replaced=replaced)
        return value

    return typer.Option(*names, metavar="FOLDER", rich_help_panel=panel, callback=check, help=help, **settings)


def check_folder_place(option: str, path: Path, *, replaced: bool = False) -> None:
    """Refuse a place that no folder can be written to, before minutes of work."""
    if replaced and not path.absolute().parent.is_dir():
        raise InputError(f"{option} {path}: there is no folder {path.absolute().parent}")
    if path.is_file():
        raise InputError(f"{option} {path}: name a folder, it is a file")
    try:
        check_folder(path, replaced=replaced)
    except OSError as problem:
        raise InputError(f"{option} {path}: cannot write: {problem.strerror or problem}") from problem


def _check_place(option: str, path: Path, suffixes: Sequence[str], taken: dict[Path, str]) -> None:
    try:
        why = _why_not(option, path, suffixes, taken)
    except OSError as problem:
        why = f"cannot write: {problem.strerror or problem}"
    if why:
        raise InputError(f"{option} {path}: {why}")


def _why_not(option: str, path: Path, suffixes: Sequence[str], taken: dict[Path, str]) -> str:
    if str(path) == STANDARD_OUTPUT:
        return "name a file; only --json goes to standard output"
    if not path.parent.is_dir():
        return f"cannot write: there is no folder {path.parent}"
    if path.is_dir():
        return "cannot write: it is a folder; name a file"
    if suffixes and path.suffix.lower() not in suffixes:
        return f"its name ends in {' or '.join(filter(None, (', '.join(suffixes[:-1]), suffixes[-1])))}"
    if taken.setdefault(real := Path(os.path.realpath(path)), option) != option and (
        path.is_file() or not path.exists()
    ):
        return f"{taken[real]} is written there already; name another file"
    check_file(path)
    return ""


def _completed(known: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Completes the last of several names with commas between them."""

    def complete(incomplete: str) -> list[str]:
        before, comma, begun = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in known() if name.startswith(begun)]

    return complete


def model_names() -> Iterable[str]:
    """All names of models that weft knows."""
    from weft.models.packaged import PACKAGED
    from weft.models.trained import TRAINED
    from weft.models.zoo import ZOO

    return (*ZOO, *TRAINED, *PACKAGED)


def _device_names() -> Iterable[str]:
    from weft.devices import HOST, presets

    return (HOST, *presets())


def _soc_names() -> Iterable[str]:
    from weft.devices import socs

    return socs()


def _policy_names() -> Iterable[str]:
    from weft.engine.policies import POLICIES

    return POLICIES


complete_models, complete_devices = _completed(model_names), _completed(_device_names)
complete_socs, complete_policies = _completed(_soc_names), _completed(_policy_names)

Models = Annotated[
    str, what("--models", "-m", autocompletion=complete_models, help="Zoo names, packaged models or .onnx files: a,b,c")
]
ProfileFiles = Annotated[
    list[str] | None, what("--profile", help="A profile JSON to run beside the models; repeatable.")
]
Batch = Annotated[int, what("--batch", "-b", help="Samples per query.")]
SeqLen = Annotated[int, what("--seq-len", help="Tokens per sample, for models that take text.")]
Tables = Annotated[str, what("--tables", help="ncf: 'stream' its tables for every query, or 'gather' rows.")]
Queries = Annotated[int, how("--queries", "-n", help="Rounds of work: a query of every model each.")]
Cost = Annotated[str, how("--cost", help="Cost model: pipelined, scalesim, maestro or roofline.")]
Mix = Annotated[str | None, what("--mix", help="Queries of each model per round, as 1:1 or 2:1:3.")]
MaxLag = Annotated[float, how("--max-lag", help="Rounds a model may fall behind the mix.")]
Spill = Annotated[bool, how("--spill", help="Pay for activations that do not fit instead of refusing.")]
Pieces = Annotated[
    int | None,
    how(
        "--pieces",
        show_default="none, or as many as weft finds best",
        help="Cut layers larger than this part of the buffer, 8 for an eighth; 1 cuts none.",
    ),
]
Policies = Annotated[
    str,
    how(
        "--policies",
        "-p",
        autocompletion=complete_policies,
        help="Names to compare, a,b,c; 'all' for all that have something to say.",
    ),
]
PolicyOptions = Annotated[list[str] | None, how("--option", help="NAME=VALUE of the policy; repeatable.")]
Shapes = Annotated[
    list[str] | None,
    what("--shape", help="[MODEL:]NAME=1x3x224x224, of an input, or of an axis as seq=128; repeatable."),
]
JsonFile = Annotated[str | None, file_option("--json", help="Write the result as JSON; - is standard output.")]
FigureFile = Annotated[
    str | None,
    file_option("--figure", suffixes=SUFFIXES, help="Draw a picture, as .png or .svg.", require=require_matplotlib),
]
HtmlFile = Annotated[str | None, file_option("--html", help="Write an interactive page.")]
PerfettoFile = Annotated[str | None, file_option("--perfetto", help="Write a trace for ui.perfetto.dev.")]
TraceFile = Annotated[str | None, file_option("--trace", help="Write the trace as JSON.")]
DeviceFile = Annotated[str | None, file_option("--toml", help="Write the result as a device file.")]


def read_profiles(
    npu: Npu,
    models: str,
    files: Sequence[str] | None,
    *,
    batch: int,
    cost: str,
    seq_len: int,
    tables: str,
    shapes: Sequence[str] | None,
) -> list[Profile]:
    """Profiles of the named models on the device, then those read from files."""
    from weft.devices.costs.layer_costs import estimate, read_profile
    from weft.models.sources import load_models

    names = split_names(models)
    given = parse_shapes(shapes, names)
    parameters: dict[str, int | str] = {"seq_len": seq_len, "tables": tables}
    profiles = []
    with shapes_of_several(names), progress_bar("reading", len(names)) as advance:
        for name in names:
            for model in load_models(name, shapes=given.get(name), parameters=parameters):
                warn_of_gaps(model)
                profiles.append(estimate(model, npu, batch=batch, cost=cost))
            advance()
    for path in files or ():
        profiles.append(read_profile(path))
        if profiles[-1].device != npu.name:
            typer.echo(f"weft: {path} was made for {profiles[-1].device}, and runs on {npu.name} here", err=True)
    if not profiles:
        raise InputError("nothing to run: give --models, --profile, or both")
    return profiles


def split_names(text: str, needed_by: str = "") -> list[str]:
    """What stands between commas; *needed_by*: an option that has to name something."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if needed_by and not names:
        raise InputError(f"{needed_by} {text!r} names nothing; leave it out, or write names with commas between")
    return names


def parse_shapes(texts: Sequence[str] | None, models: Sequence[str]) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes that were given with ``--shape``: model -> input or axis -> sizes."""
    from weft.base.shapes import parse_shapes
    from weft.workloads.requests import served_name

    try:
        return parse_shapes(texts, models, {served_name(model): model for model in models}) if texts else {}
    except ModelError as error:
        raise ModelError(f"--shape {error}") from error


@contextmanager
def shapes_of_several(models: Sequence[str]) -> Iterator[None]:
    """Advice to pass ``--shape`` says for which model, where there are several."""
    try:
        yield
    except ShapeNeeded as error:
        if len(models) == 1:
            raise
        raise error.among_several() from error


def make_workload(queries: int, mix: str | None, max_lag: float) -> Saturated:
    from weft.workloads import Saturated

    try:
        parts = tuple(float(part) for part in mix.split(":")) if mix else None
    except ValueError:
        raise WorkloadError(f"--mix {mix!r} is not of the form 1:1") from None
    return Saturated(queries, parts, max_lag)


def parse_bytes(option: str, text: str | None) -> int | None:
    """A size like 512m or 2g; units are powers of 1024."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if not match:
        raise InputError(f"{option} {text!r} is not a size like 512m or 2g")
    return round(float(match[1]) * float(1024 ** " kmgt".index(match[2] or " ")))


def parse_options(texts: Sequence[str] | None) -> dict[str, Option]:
    """NAME=VALUE pairs; values are true, false or numbers."""
    options: dict[str, Option] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--option {text!r} is not of the form NAME=VALUE")
        options[name] = _option(text, value)
    return options


def _option(text: str, value: str) -> Option:
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    found = as_number(value)
    if isinstance(found, str):
        raise InputError(f"--option {text!r}: {value!r} is neither true, false nor a number")
    return found


def as_number(text: str) -> int | float | str:
    """The number that a text says, or the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
