"""Why a server answers rows otherwise than they demand: ``NAME.toml`` beside this file, a reason with its rows each.

What a server answered when it was last asked is kept as ``NAME.json``, so that a test can tell that all is explained.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Difference:
    """Something that a server does otherwise."""

    title: str
    because: str
    rows: tuple[str, ...]
    """Names of rows, with * for any characters."""

    def covers(self, row: str) -> bool:
        return any(fnmatchcase(row, pattern) for pattern in self.rows)


def read_differences(server: str) -> list[Difference]:
    """What is known of a server; nothing where nobody wrote it down."""
    path = HERE / f"{server}.toml"
    if not path.is_file():
        return []
    found = tomllib.loads(path.read_text("utf-8"))["difference"]
    return [Difference(each["title"], each["because"], tuple(each["rows"])) for each in found]


def unexplained(rows: Iterable[str], differences: Iterable[Difference]) -> list[str]:
    """The rows that no reason is given for."""
    known = list(differences)
    return [row for row in rows if not any(each.covers(row) for each in known)]


def read_found(server: str) -> dict[str, Any]:
    """What a server answered when it was last asked: the counts, and the rows that differed."""
    found: dict[str, Any] = json.loads((HERE / f"{server}.json").read_text("utf-8"))
    return found
