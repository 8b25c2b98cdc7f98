"""Rows of the table, as they stand in ``table/*.toml``: a request each, and what must come back.

A row with ``each = KEY`` stands for many: one for every datatype of ``datatypes.toml`` that has this key, with
``$key`` replaced by what the datatype has there.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from string import Template
from typing import Any

TABLE = Path(__file__).parent / "table"
DATATYPES = Path(__file__).parent / "datatypes.toml"
ORIGINS = ("protocol", "triton", "weft")
"""Who says what must come back: the protocol itself, Triton for its extensions, or weft where neither does."""

CONSTANTS = {
    "run": f"conformance-{os.getpid()}",
    "long_id": "i" * 65536,
    "too_long_id": "i" * 65537,
    "deep": "[" * 5000 + "]" * 5000,
    "zeros": ", ".join(["0"] * 2000),
}
"""What stands for ``$key`` in every row: what is too long to be read in a table, and a name that nobody else has."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A request, and what must come back."""

    name: str
    """Its file, what it is about, and the datatype if it is one of many."""
    by: str
    """One of ``ORIGINS``."""
    before: tuple[str, ...] = ()
    """Requests that come first and whose answers do not matter: ``POST /path BODY``, or ``CALL MESSAGE`` for gRPC."""
    after: tuple[str, ...] = ()
    """The same, to leave the server as it was."""
    memory: Mapping[str, str] = field(default_factory=dict)
    """Regions of shared memory that must be there: their keys, and what they hold in hexadecimal digits."""
    answer_memory: Mapping[str, str] = field(default_factory=dict)
    """What they must hold when the answer has come."""


@dataclass(frozen=True, kw_only=True)
class HttpRow(Row):
    """A request over HTTP."""

    http: str
    """Verb and path."""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""
    binary: str | None = None
    """What follows the JSON, in hexadecimal digits; the header that tells where it begins is added."""
    packed: str = ""
    """How the body is compressed: gzip or deflate."""
    cut: int = 0
    """Bytes that are missing at its end."""
    exactly: str = ""
    """All bytes of the request where nothing shall be added; ``{host}`` is replaced."""
    status: tuple[int, ...]
    """Any of them will do."""
    answer: Any = None
    """What the JSON of the answer must hold; None: anything."""
    answer_headers: Mapping[str, str] = field(default_factory=dict)
    answer_binary: str | None = None
    """What must follow the JSON of the answer."""
    empty: bool = False
    """Whether the answer must have no body."""
    schema: str = ""
    """The shape in ``schema.json`` that the answer must have."""


@dataclass(frozen=True, kw_only=True)
class GrpcRow(Row):
    """A call over gRPC."""

    grpc: str
    """The call, with its service where that is not the protocol's own."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """What is sent; more than one in streams."""
    raw_inputs: tuple[str, ...] = ()
    """Raw contents of every message, in hexadecimal digits."""
    hex: str | None = None
    """The bytes of the message itself, where it is none of the protocol's."""
    deadline_s: float | None = None
    code: tuple[str, ...]
    """Any of them will do."""
    answers: tuple[Any, ...] | None = None
    """What the messages that come back must hold; None: anything."""
    answer_hex: str | None = None


def read_table() -> list[HttpRow | GrpcRow]:
    """All rows, by file and in their order."""
    return [row for path in sorted(TABLE.glob("*.toml")) for row in _read(path)]


def _read(path: Path) -> Iterator[HttpRow | GrpcRow]:
    found = tomllib.loads(path.read_text("utf-8"))
    for raw in found["row"]:
        for values in _each(raw.pop("each", "")):
            filled = _filled({"by": found["by"], **raw}, values)
            kind = f" [{values['datatype']}]" if "datatype" in values else ""
            way = "grpc" if "grpc" in raw else "http"
            yield _made(filled | {"name": f"{path.stem}/{way}: {filled['name']}{kind}"})


def _each(key: str) -> list[dict[str, str]]:
    if not key:
        return [CONSTANTS]
    found = [CONSTANTS | each for each in tomllib.loads(DATATYPES.read_text("utf-8"))["datatype"] if key in each]
    if not found:
        raise ValueError(f"no datatype has the key {key!r}")
    return found


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    """A value of the file with what stands for ``$key`` in all its texts."""
    if isinstance(value, str):
        return Template(value).safe_substitute(values)
    if isinstance(value, list):
        return tuple(_filled(each, values) for each in value)
    if isinstance(value, dict):
        return {_filled(key, values): _filled(each, values) for key, each in value.items()}
    return value


def _made(raw: dict[str, Any]) -> HttpRow | GrpcRow:
    kind = GrpcRow if "grpc" in raw else HttpRow
    if unknown := raw.keys() - {each.name for each in fields(kind)} - {"answer", "message"}:
        raise ValueError(f"{raw['name']}: unknown keys: {', '.join(sorted(unknown))}")
    if kind is HttpRow:
        if "answer" in raw:
            raw["answer"] = _parsed(raw["answer"], raw["name"])
        return HttpRow(**raw | {"status": _several(raw["status"])})
    texts = _several(raw.pop("message", raw.pop("messages", ())))
    raw["messages"] = tuple(_parsed(text, raw["name"]) for text in texts)
    told = raw.pop("answer", raw.pop("answers", None))
    raw["answers"] = None if told is None else tuple(_parsed(text, raw["name"]) for text in _several(told))
    return GrpcRow(**raw | {"code": _several(raw["code"])})


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}: {error}: {text[:200]}") from error
