"""``--stream MODEL:rate=10,deadline=250``: requests for a model on the command line, as bench and plan take them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weft.base.errors import ModelError, WorkloadError
from weft.base.shapes import parse_shape
from weft.cli.common import as_number, model_names, parse_shapes

if TYPE_CHECKING:
    from weft.workloads.requests import Workload

LONGER = {"deadline": "deadline_ms", "think": "think_ms", "grain": "grain_ms"}
"""Short names of a stream's keys on the command line."""
LISTED = ("exits", "exit_rates")
"""Keys that take several values, with a + between them, as exit_rates=0.5+0.3+0.2."""
SHAPE, VALUE = "shape", "value"
"""Keys that say what an input is sent, as shape=ids=1x128 or value=sr=16000; they may be repeated."""


def parse_stream(text: str) -> dict[str, object]:
    """The keys of a stream, from MODEL:key=value,key=value."""
    model, _, rest = text.partition(":")
    if not model or re.match(r"\w+=", model):
        said = text.removeprefix(":") or "rate=10"
        raise WorkloadError(f"--stream {text!r} names no model; write MODEL:{said}")
    found: dict[str, object] = {"model": model}
    shapes: dict[str, object] = {}
    values: dict[str, object] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals:
            raise WorkloadError(f"--stream {text!r} is not of the form MODEL:rate=10,deadline=250")
        if key == SHAPE:
            _add_input(shapes, text, key, value, parse_shape)
        elif key == VALUE:
            _add_input(values, text, key, value, _parse_value)
        elif key in LISTED and "+" in value:
            found[key] = [as_number(each.strip()) for each in value.split("+")]
        else:
            found[LONGER.get(key, key)] = as_number(value)
    return found | ({"shapes": shapes} if shapes else {}) | ({"values": values} if values else {})


def _add_input(
    known: dict[str, object], text: str, key: str, value: str, parse: Callable[[str], tuple[str, object]]
) -> None:
    """Take what a stream says of an input, NAME=1x128; the former NAME:1x128 is read with a note."""
    before, colon, after = value.rpartition(":")
    former = "=" not in value and bool(colon and before)
    try:
        name, said = parse(f"{before}={after}" if former else value)
    except ModelError as error:
        raise WorkloadError(f"--stream {text!r}: {key}={value}: {error}") from error
    if known.setdefault(name, said) != said:
        raise WorkloadError(f"--stream {text!r}: {key} says two things of {name}; keep one of them")
    if former:
        typer.echo(f"weft: write {key}={before}={after}; the next release does not read {key}={value}", err=True)


def _parse_value(text: str) -> tuple[str, object]:
    name, equals, number = text.rpartition("=")
    if not equals or not name:
        raise ModelError(f"{text!r} is not of the form NAME=16000")
    return name, as_number(number)


def _refuse_model(path: str) -> None:
    """Refuse a model where a workload file is wanted, and show how a model is asked for."""
    if path.endswith(".onnx") or (path in model_names() and not Path(path).exists()):
        shown = f"-s {path}:rate=10,deadline=100"
        raise WorkloadError(f"{path} is a model, and a workload file (TOML) is wanted here; ask for it with {shown}")


def asked_workload(
    path: str | None,
    streams: Sequence[str] | None,
    shapes: Sequence[str] | None = None,
    *,
    read: Callable[[str], Workload] | None = None,
    **changes: Any,
) -> Workload:
    """The workload of a file or of ``--stream``, with the shapes of ``--shape`` and other keys changed.

    read: reads what is at *path*, where that is no workload file.
    """
    from weft.workloads.requests import parse_workload, read_workload

    if path is not None:
        _refuse_model(path)
        workload = (read or read_workload)(path)
        raw, where = workload.model_dump(exclude_unset=True), path
    else:
        raw, where = {"stream": [parse_stream(text) for text in streams or ()]}, "--stream"
    models = list(dict.fromkeys(str(stream["model"]) for stream in raw["stream"]))
    for model, given in parse_shapes(shapes, models).items():
        for stream in raw["stream"]:
            if stream["model"] == model:
                stream["shapes"] = {**stream.get("shapes", {}), **given}
    return parse_workload(raw | changes, where)
