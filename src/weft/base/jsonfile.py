"""Reading and writing our JSON files, and turning validation reports into one line."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from weft.base.errors import InputError, reason_of
from weft.base.files import write_text


def read_json(path: str | Path, error: type[InputError]) -> Any:
    """The parsed file; anything that is not strict JSON raises *error* (NaN and Infinity included)."""

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
    """Write *value*; a path that cannot be written is the caller's mistake."""
    write_text(path, as_json(value))


def as_json(value: Any) -> str:
    """*value* as our files spell it."""
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def printable(text: str) -> str:
    """A validator for names: they end up in one-line messages and tables."""
    if not text.isprintable():
        raise ValueError("must be printable, on one line")
    return text


def first_problem(error: ValidationError, *schemas: type[BaseModel]) -> str:
    """The first complaint of a pydantic report: where, what, the value, and near names for a wrong key."""
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"]) or "the file"
    if problem["type"] == "extra_forbidden":
        near = get_close_matches(
            str(problem["loc"][-1]), [key for schema in schemas for key in schema.model_fields], n=1
        )
        return f"unknown key {where!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    if problem["type"] == "missing":
        return f"{where} is missing"
    if not problem["loc"] and problem["type"] == "value_error":  # what is said of the whole names its part
        return problem["msg"].removeprefix("Value error, ")
    value = repr(problem["input"])
    shown = value if len(value) <= 60 else value[:57] + "..."
    rest, said = len(error.errors()) - 1, problem["msg"].removeprefix("Value error, ")
    return f"{where} = {shown}: {said}" + (f" (and {rest} more problems)" if rest else "")
