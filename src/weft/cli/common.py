"""Options that several commands share, and the roads from what a user writes to our values."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Protocol

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weft.errors import InputError, ModelError, WorkloadError

if TYPE_CHECKING:
    from weft.costs.profiles import Profile
    from weft.devices import Npu
    from weft.models import Model
    from weft.policies import Option
    from weft.workloads import Saturated

FILE_WIDTH = 140
"""Columns where standard output is no terminal."""


class Advance(Protocol):
    """Moves a progress bar: one further, or to *done* of *of*."""

    def __call__(self, description: str | None = None, done: int | None = None, of: int | None = None) -> None: ...


console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)

Models = Annotated[str, typer.Option("--models", "-m", help="Zoo names, packaged models or .onnx files: a,b,c")]
ProfileFiles = Annotated[
    list[str] | None, typer.Option("--profile", help="A profile JSON to run beside the models; repeatable.")
]
Batch = Annotated[int, typer.Option("--batch", "-b", help="Samples per query.")]
SeqLen = Annotated[int, typer.Option("--seq-len", help="Tokens per sample, for models that take text.")]
Tables = Annotated[str, typer.Option("--tables", help="ncf: 'stream' its tables for every query, or 'gather' rows.")]
Queries = Annotated[int, typer.Option("--queries", "-n", help="Rounds of work: a query of every model each.")]
Cost = Annotated[str, typer.Option("--cost", help="Cost model: pipelined, scalesim, maestro or roofline.")]
Mix = Annotated[str | None, typer.Option("--mix", help="Queries of each model per round, as 1:1 or 2:1:3.")]
MaxLag = Annotated[float, typer.Option("--max-lag", help="Rounds a model may fall behind the mix.")]
Spill = Annotated[bool, typer.Option("--spill", help="Pay for activations that do not fit instead of refusing.")]
Pieces = Annotated[
    int | None,
    typer.Option("--pieces", help="Cut layers larger than this part of the buffer, 8 for an eighth; 1 cuts none."),
]
Shapes = Annotated[
    list[str] | None, typer.Option("--shape", help="[MODEL:]INPUT=1x3x224x224 for an open dimension; repeatable.")
]
JsonFile = Annotated[str | None, typer.Option("--json", help="Write the result as JSON.")]


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
    from weft.costs.profiles import estimate, read_profile
    from weft.models.sources import load_model

    names = split_names(models)
    given = parse_shapes(shapes, names)
    parameters: dict[str, int | str] = {"seq_len": seq_len, "tables": tables}
    profiles = []
    for name in names:
        model = load_model(name, shapes=given.get(name), parameters=parameters)
        warn_of_gaps(model)
        profiles.append(estimate(model, npu, batch=batch, cost=cost))
    for path in files or ():
        profiles.append(read_profile(path))
        if profiles[-1].device != npu.name:
            typer.echo(f"weft: {path} was made for {profiles[-1].device}, and runs on {npu.name} here", err=True)
    if not profiles:
        raise InputError("nothing to run: give --models, --profile, or both")
    return profiles


def split_names(text: str) -> list[str]:
    """What stands between commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_shapes(texts: Sequence[str] | None, models: Sequence[str]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Model -> input -> shape."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for text in texts or ():
        target, equals, dims = text.rpartition("=")
        model, _, name = target.rpartition(":")
        if not equals or not name:
            raise ModelError(f"--shape {text!r} is not of the form INPUT=1x3x224x224")
        if not model and len(models) != 1:
            raise ModelError(f"--shape {text!r}: say which model, as {models[0] if models else 'MODEL'}:{text}")
        model = model or models[0]
        if model not in models:
            raise ModelError(f"--shape {text!r}: {model!r} is not among the models {', '.join(models)}")
        try:
            found.setdefault(model, {})[name] = tuple(int(part) for part in dims.split("x"))
        except ValueError:
            raise ModelError(f"--shape {text!r}: {dims!r} is not a shape like 1x3x224x224") from None
    return found


_MOST_GUESSES = 3
"""One unknown shape explains most of those after it; the rest are a number."""


def warn_of_gaps(model: Model) -> None:
    """Say what of a model could not be counted: operators without arithmetic, shapes that stayed unknown."""
    ops, more = ", ".join(model.unknown_ops), len(model.guesses) - _MOST_GUESSES
    lines = [f"no arithmetic known for {ops}; counted as activation traffic"] if ops else []
    lines += model.guesses[:_MOST_GUESSES]
    lines += [f"{more} more shapes are not known; weft models show --json lists them"] if more > 0 else []
    for line in lines:
        typer.echo(f"weft: {model.name}: {line}", err=True)


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
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    raise InputError(f"--option {text!r}: {value!r} is neither true, false nor a number")


def plain_table(title: str, columns: Sequence[str], *, left: int = 1) -> Table:
    """A table whose first *left* columns are text and the others numbers."""
    table = Table(
        title=escape(title), title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=index >= left)
    return table


def add_row(table: Table, *cells: str, style: str = "") -> None:
    """A row of plain text: names come from files and may hold what rich takes for markup."""
    table.add_row(*map(escape, cells), style=style)


def number(value: float | None, digits: int = 3, *, scale: float = 1, suffix: str = "") -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}{suffix}"


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Advance]:
    """A bar that goes away when done; yields a function that advances it and may rename it. Silent off a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if not sys.stderr.isatty():
        yield lambda description=None, done=None, of=None: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)

        def advance(description: str | None = None, done: int | None = None, of: int | None = None) -> None:
            if done is None:
                progress.advance(task)
            progress.update(task, description=description or what, completed=done, total=of)

        yield advance
