"""Reading and writing of JSON files, and one-line messages for validation errors of pydantic."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from weft.base.errors import InputError, reason_of
from weft.base.files import write_text


def read_json(path: str | Path, error: type[InputError]) -> Any:
    """Parse a JSON file; *error* if it cannot be read or is not strict JSON (NaN and Infinity are refused)."""

    def refuse(token: str) -> Any:
        raise error(f"{path}: {token} is not a number a file may hold")

    try:
        return json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=refuse)
    except OSError as problem:
        raise error(f"{path}: cannot read the file: {reason_of(problem)}") from problem
    except UnicodeDecodeError as problem:
        raise error(f"{path}: not a JSON file: it is not text") from problem
    except (ValueError, RecursionError) as problem:  # ValueError: also a number of more than 4300 digits
        raise error(f"{path}: not a JSON file: {problem}") from problem


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file, whole or not at all; InputError if the path cannot be written."""
    write_text(path, as_json(value))


def as_json(value: Any) -> str:
    """Return *value* as JSON in the layout of weft's files."""
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def printable(text: str) -> str:
    """Validate a name and return it; ValueError unless it is printable, since names appear in one-line messages."""
    if not text.isprintable():
        raise ValueError("must be printable, on one line")
    return text


def first_problem(error: ValidationError, *schemas: type[BaseModel]) -> str:
    """Return the first problem of a pydantic report: place, message, value, and near names for an unknown key."""
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"]) or "the file"
    if problem["type"] == "extra_forbidden":
        suggestions = get_close_matches(
            str(problem["loc"][-1]), [key for schema in schemas for key in schema.model_fields], n=1
        )
        return f"unknown key {where!r}" + (f"; did you mean {suggestions[0]!r}?" if suggestions else "")
    if problem["type"] == "missing":
        return f"{where} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"] and problem["type"] == "value_error":  # a validator of the whole model names the part itself
        return message
    value = repr(problem["input"])
    short_value = value if len(value) <= 60 else value[:57] + "..."
    further = len(error.errors()) - 1
    return f"{where} = {short_value}: {message}" + (f" (and {further} more problems)" if further else "")
