"""TOML files: reading, and writing, which Python's ``tomllib`` does not do."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.base.errors import InputError, reason_of


def read_toml(path: str | Path, error: type[InputError], what: str) -> dict[str, Any]:
    """Parse a TOML file; *error* if it cannot be read or parsed. *what*: a noun for its content, for the message."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:  # ValueError: not UTF-8, or a path with a zero in it
        raise error(f"{path}: cannot read the {what}: {reason_of(problem)}") from problem
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as problem:  # ValueError: also a number of more than 4300 digits
        raise error(f"{path}: not a TOML file: {problem}") from problem


def as_toml(values: Mapping[str, Any]) -> str:
    """Return the text of a TOML file with these keys.

    Lists of tables come last, each table under a heading; other tables are inline.
    """
    tables = {key: value for key, value in values.items() if _is_tables(value)}
    lines = _lines({key: value for key, value in values.items() if key not in tables})
    for key, rows in tables.items():
        for row in rows:
            lines += [*([""] if lines else []), f"[[{_key(key)}]]", *_lines(row)]
    return "\n".join(lines) + "\n"


def _is_tables(value: Any) -> bool:
    """Return whether a value is a non-empty list of tables."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value_text(value)}" for key, value in values.items()]


def _key(name: str) -> str:
    """Return a key, quoted if it is not a bare key of TOML."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value_text(name)


def _value_text(value: Any) -> str:
    """Return a value as TOML on one line; tables are inline."""
    if isinstance(value, Mapping):
        inside = ", ".join(_lines(value))
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value_text, value))}]"
    if isinstance(value, float):
        return repr(value)
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007F")
