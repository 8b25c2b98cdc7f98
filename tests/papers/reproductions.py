"""What every part of a reproduced paper owes its reader, for the tests of all papers."""

from __future__ import annotations

import math
import re

from weft_papers.base import Exhibit, Published


def check(part: Exhibit) -> None:
    """Finite numbers with reasons, tables without gaps, pictures that show something."""
    for row in part.rows:
        assert math.isfinite(row.ours), row
        assert row.paper is None or math.isfinite(row.paper)
        assert row.figure and row.quantity and len(row.why) > 10
    for table in part.tables:
        assert table.rows and all(len(row) == len(table.header) for row in table.rows), table.title
    for picture in part.pictures:
        assert picture.path.stat().st_size > 5000 and picture.svg.stat().st_size > 5000


def check_whole(part: Exhibit) -> None:
    """The same of a part that has all three."""
    assert part.rows and part.tables and part.pictures
    check(part)


def check_published(number: Published) -> None:
    """The sentence that is quoted states the number."""
    assert number.printed in number.sentence
    assert number.value == float(re.search(r"[0-9.]+", number.printed)[0])
    assert number.section and number.unit
