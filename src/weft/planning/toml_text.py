"""Settings written as TOML, which Python reads and does not write."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def as_toml(values: Mapping[str, Any]) -> str:
    """The text of a file with these keys; reading it gives them back.

    Lists of tables come last, each table under a heading; tables elsewhere stand on one line.
    """
    tables = {key: value for key, value in values.items() if _is_tables(value)}
    lines = _lines({key: value for key, value in values.items() if key not in tables})
    for key, rows in tables.items():
        for row in rows:
            lines += [*([""] if lines else []), f"[[{_key(key)}]]", *_lines(row)]
    return "\n".join(lines) + "\n"


def _is_tables(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(each, Mapping) for each in value)


def _lines(values: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_spelled(value)}" for key, value in values.items()]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _spelled(name)


def _spelled(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(_lines(value))
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_spelled(each) for each in value)}]"
    if isinstance(value, float):
        return repr(value)
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007F")
