"""Options that several commands share, and the parsing of their values: names, sizes, shapes, streams."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.base.errors import InputError, ModelError, ShapeNeeded, WorkloadError
from weft.base.files import check_file, check_folder
from weft.base.shapes import parse_shape
from weft.cli.command import PRICED
from weft.cli.printing import STANDARD_OUTPUT, console
from weft.reports.pictures import SUFFIXES, require_matplotlib

if TYPE_CHECKING:
    from weft.engine.policies import Option
    from weft.workloads.requests import Workload


def compile_for_next_time() -> None:
    """Compile the simulation of hosts in a process that outlives this command, unless it is in the cache."""
    from weft.simulation.requests.compiled import compile_in_background

    if compile_in_background() and sys.stderr.isatty():
        sys.stderr.write("simulations are compiled in the background, once; from the next minute on they are faster\n")


def in_panel(panel: str) -> Callable[..., Any]:
    """Return a function that declares options in a panel of the help."""
    return partial(typer.Option, rich_help_panel=panel)


what, how, out = map(in_panel, ("What", "How", "Output"))
"""Options for the subject of a command, for the way it works, and for its output."""


def file_option(
    *names: str,
    help: str,
    suffixes: Sequence[str] = (),
    panel: str | None = "Output",
    require: Callable[[], None] | None = None,
) -> Any:
    """Declare an option for a file to write; a path that cannot be written is refused before any work.

    suffixes: those that the file may have; empty: any. panel: of the help. require: raises InputError if a package that
    writes the file is not installed.
    """

    def check(context: typer.Context, param: typer.CallbackParam, value: str | None) -> str | None:
        option = max(param.opts, key=len)
        if option == "--json":  # tables must not be mixed into a result on standard output
            console.stderr = value == STANDARD_OUTPUT
        if value is not None and not context.resilient_parsing and (option, value) != ("--json", STANDARD_OUTPUT):
            if require is not None:
                require()
            _check_place(option, Path(value), suffixes, context.meta.setdefault("files to write", {}))
        return value

    return typer.Option(*names, metavar="FILE", rich_help_panel=panel, callback=check, help=help)


def folder_option(*names: str, help: str, replaced: bool = False, panel: str | None = "Output", **settings: Any) -> Any:
    """Declare an option for a folder to write; a path that cannot be written is refused before any work.

    replaced: whether the folder is written as a whole beside an older folder, which it then replaces.
    """

    def check(context: typer.Context, param: typer.CallbackParam, value: str | None) -> str | None:
        if value is not None and not context.resilient_parsing:
            check_folder_place(max(param.opts, key=len), Path(value), replaced=replaced)
        return value

    return typer.Option(*names, metavar="FOLDER", rich_help_panel=panel, callback=check, help=help, **settings)


def check_folder_place(option: str, path: Path, *, replaced: bool = False) -> None:
    """Raise InputError for a path at which no folder can be written; called before minutes of work.

    replaced: as of ``folder_option``.
    """
    if replaced and not path.absolute().parent.is_dir():
        raise InputError(f"{option} {path}: there is no folder {path.absolute().parent}")
    if path.is_file():
        raise InputError(f"{option} {path}: name a folder, it is a file")
    try:
        check_folder(path, replaced=replaced)
    except OSError as problem:
        raise InputError(f"{option} {path}: cannot write: {problem.strerror or problem}") from problem


def _check_place(option: str, path: Path, suffixes: Sequence[str], option_of_path: dict[Path, str]) -> None:
    """Raise InputError for a file that cannot be written; *option_of_path*: path -> option, of files checked before."""
    try:
        problem_text = _why_not_writable(option, path, suffixes, option_of_path)
    except OSError as problem:
        problem_text = f"cannot write: {problem.strerror or problem}"
    if problem_text:
        raise InputError(f"{option} {path}: {problem_text}")


def _why_not_writable(option: str, path: Path, suffixes: Sequence[str], option_of_path: dict[Path, str]) -> str:
    """Return why a file cannot be written; empty if it can. The path is added to *option_of_path*."""
    if str(path) == STANDARD_OUTPUT:
        return "name a file; only --json goes to standard output"
    if not path.parent.is_dir():
        return f"cannot write: there is no folder {path.parent}"
    if path.is_dir():
        return "cannot write: it is a folder; name a file"
    if suffixes and path.suffix.lower() not in suffixes:
        return f"its name ends in {' or '.join(filter(None, (', '.join(suffixes[:-1]), suffixes[-1])))}"
    if option_of_path.setdefault(resolved := Path(os.path.realpath(path)), option) != option and (
        path.is_file() or not path.exists()
    ):
        return f"{option_of_path[resolved]} is written there already; name another file"
    check_file(path)
    return ""


def _name_completion(all_names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a function that completes the last name of a list with commas, by the names that *all_names* returns."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in all_names() if name.startswith(last)]

    return complete


def model_names() -> Iterable[str]:
    """Return all names of models that weft knows."""
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


complete_models, complete_devices = _name_completion(model_names), _name_completion(_device_names)
complete_socs, complete_policies = _name_completion(_soc_names), _name_completion(_policy_names)

Policies = Annotated[
    str,
    how(
        "--policies",
        "-p",
        autocompletion=complete_policies,
        help="Policies to compare, a,b,c; 'all' for all that apply.",
    ),
]
PolicyOptions = Annotated[list[str] | None, how("--option", help="NAME=VALUE of the policy; repeatable.")]
Shapes = Annotated[
    list[str] | None,
    what("--shape", help="[MODEL:]INPUT=1x3x224x224, or [MODEL:]AXIS=128 for a free dimension; repeatable."),
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


def split_names(text: str, needed_by: str = "") -> list[str]:
    """Split a list with commas; *needed_by*: an option whose list must not be empty."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if needed_by and not names:
        raise InputError(f"{needed_by} {text!r} names nothing; leave it out, or write names with commas between")
    return names


def parse_shapes(texts: Sequence[str] | None, models: Sequence[str]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of ``--shape``: model -> input or axis -> sizes."""
    from weft.base.shapes import parse_shapes
    from weft.workloads.requests import served_name

    try:
        return parse_shapes(texts, models, {served_name(model): model for model in models}) if texts else {}
    except ModelError as error:
        raise ModelError(f"--shape {error}") from error


@contextmanager
def shapes_of_several(models: Sequence[str]) -> Iterator[None]:
    """In errors that advise ``--shape``, name the model if there are several."""
    try:
        yield
    except ShapeNeeded as error:
        if len(models) == 1:
            raise
        raise error.among_several() from error


def parse_bytes(option: str, text: str | None) -> int | None:
    """Parse a size like 512m or 2g; units are powers of 1024."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if not match:
        raise InputError(f"{option} {text!r} is not a size like 512m or 2g")
    return round(float(match[1]) * float(1024 ** " kmgt".index(match[2] or " ")))


def written_bytes(size: int | None) -> str | None:
    """Return a size as a text that ``parse_bytes`` reads, such as 256m."""
    if size is None:
        return None
    unit = max((unit for unit in range(5) if size % 1024**unit == 0), default=0)  # the power of 1024
    return f"{size >> 10 * unit}{' kmgt'[unit].strip()}"


def parse_options(texts: Sequence[str] | None) -> dict[str, Option]:
    """Parse NAME=VALUE pairs; values are true, false or numbers."""
    options: dict[str, Option] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--option {text!r} is not of the form NAME=VALUE")
        options[name] = _option(text, value)
    return options


def _option(text: str, value: str) -> Option:
    """Parse the value of a policy's option; *text*: the whole option, for the error message."""
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    number = as_number(value)
    if isinstance(number, str):
        raise InputError(f"--option {text!r}: {value!r} is neither true, false nor a number")
    return number


def as_number(text: str) -> int | float | str:
    """Return the number in a text, or the text itself."""
    # int first, since float also accepts integers and rounds those beyond 2**53
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# Streams: ``--stream MODEL:rate=10,deadline=250``

FULL_KEYS = {"deadline": "deadline_ms", "think": "think_ms", "grain": "grain_ms"}
"""Short names of a stream's keys on the command line."""
LIST_KEYS = ("exits", "exit_rates")
"""Keys that take several values, with a + between them, as exit_rates=0.5+0.3+0.2."""
SHAPE, VALUE = "shape", "value"
"""Keys for the content of an input, as shape=ids=1x128 or value=sr=16000; they may be repeated."""


def parse_stream(text: str) -> dict[str, object]:
    """Parse MODEL:key=value,key=value as the keys of a stream in a workload file."""
    model, _, rest = text.partition(":")
    if not model or re.match(r"\w+=", model):
        raise WorkloadError(f"--stream {text!r} names no model; write MODEL:{text.removeprefix(':') or 'rate=10'}")
    keys: dict[str, object] = {"model": model}
    shapes: dict[str, object] = {}
    values: dict[str, object] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise WorkloadError(f"--stream {text!r} is not of the form MODEL:rate=10,deadline=250")
        if key == SHAPE:
            _add_input(shapes, text, key, value, parse_shape)
        elif key == VALUE:
            _add_input(values, text, key, value, _parse_value)
        elif key in LIST_KEYS and "+" in value:
            keys[key] = [as_number(word.strip()) for word in value.split("+")]
        else:
            keys[FULL_KEYS.get(key, key)] = as_number(value)
    return keys | ({"shapes": shapes} if shapes else {}) | ({"values": values} if values else {})


def _add_input(
    inputs: dict[str, object], text: str, key: str, value: str, parse: Callable[[str], tuple[str, object]]
) -> None:
    """Parse the shape or value of an input, NAME=1x128, and add it to *inputs*.

    text: the whole option, for error messages. The former form NAME:1x128 is read with a warning.
    """
    before, colon, after = value.rpartition(":")
    former = "=" not in value and bool(colon and before)
    try:
        name, content = parse(f"{before}={after}" if former else value)
    except ModelError as error:
        raise WorkloadError(f"--stream {text!r}: {key}={value}: {error}") from error
    if inputs.setdefault(name, content) != content:
        raise WorkloadError(f"--stream {text!r}: {key} says two things of {name}; keep one of them")
    if former:
        typer.echo(f"weft: write {key}={before}={after}; the next release does not read {key}={value}", err=True)


def _parse_value(text: str) -> tuple[str, object]:
    name, equals, number = text.rpartition("=")
    if not equals or not name:
        raise ModelError(f"{text!r} is not of the form NAME=16000")
    return name, as_number(number)


def _refuse_model(path: str) -> None:
    """Raise WorkloadError if *path* is a model and no workload file, with advice on the option for models."""
    if path.endswith(".onnx") or (path in model_names() and not Path(path).exists()):
        example = f"-s {path}:rate=10,deadline=100"
        raise WorkloadError(f"{path} is a model, and a workload file (TOML) is wanted here; ask for it with {example}")


def requested_workload(
    path: str | None,
    streams: Sequence[str] | None,
    shapes: Sequence[str] | None = None,
    *,
    read: Callable[[str], Workload] | None = None,
    **changes: Any,
) -> Workload:
    """Return the workload of a file or of ``--stream``, with the shapes of ``--shape``.

    read: reads *path*, by default as a workload file. changes: further keys of the workload to replace.
    """
    from weft.workloads.requests import parse_workload, read_workload

    if path is not None:
        _refuse_model(path)
        workload = (read or read_workload)(path)
        raw, where = workload.model_dump(exclude_unset=True), path
    else:
        raw, where = {"stream": [parse_stream(text) for text in streams or ()]}, "--stream"
    return with_shapes(parse_workload(raw | changes, where), shapes)


def with_shapes(workload: Workload, texts: Sequence[str] | None) -> Workload:
    """Return the workload with the shapes of ``--shape`` in its streams; they override those of the file.

    A shape for a stream of profiles, which cannot use it, raises InputError.
    """
    if not texts:
        return workload
    shapes = parse_shapes(texts, list(dict.fromkeys(stream.model for stream in workload.stream)))
    for stream in workload.stream:
        if stream.profiles and stream.model in shapes:
            raise InputError(f"--shape does not apply to {stream.model}, whose stream has profiles: {PRICED}")
    streams = tuple(
        stream.model_copy(update={"shapes": {**stream.shapes, **shapes[stream.model]}})
        if stream.model in shapes
        else stream
        for stream in workload.stream
    )
    return workload.model_copy(update={"stream": streams})
