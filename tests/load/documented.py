"""Names that ``docs/formats.md`` documents."""

from __future__ import annotations

import re

from tests import ROOT

FORMATS = ROOT / "docs" / "formats.md"


def documented(title: str) -> set[str]:
    """Names in the first column of the tables of a section of docs/formats.md."""
    section = FORMATS.read_text("utf-8").split(f"## {title}", 1)[1].split("\n## ", 1)[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
