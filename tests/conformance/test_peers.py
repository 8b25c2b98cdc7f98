"""What other servers answered: every difference of Triton's has a reason, and the docs have the counts."""

from __future__ import annotations

from collections import Counter

import pytest

from tests import ROOT
from tests.conformance.peers.explained import Difference, read_differences, read_found, unexplained
from tests.conformance.rows import read_table


def test_every_difference_of_triton_has_one_reason() -> None:
    rows, differences = [row["name"] for row in read_found("triton")["rows"]], read_differences("triton")
    assert unexplained(rows, differences) == []
    reasons = Counter({row: sum(each.covers(row) for each in differences) for row in rows})
    assert set(reasons.values()) == {1}, [row for row, count in reasons.items() if count > 1]


def test_reasons_name_rows_that_there_are_and_that_differ() -> None:
    known, differing = {row.name for row in read_table()}, {row["name"] for row in read_found("triton")["rows"]}
    assert differing <= known
    for each in read_differences("triton"):
        for pattern in each.rows:
            alone = Difference("", "", (pattern,))
            assert any(alone.covers(row) for row in differing), pattern


def test_a_row_without_a_reason_is_named() -> None:
    assert unexplained(["a", "b"], [Difference("", "", ("a",))]) == ["b"]


@pytest.mark.parametrize(("server", "shown"), [("triton", "Triton 2.51"), ("mlserver", "MLServer 1.7.1")])
def test_the_docs_have_the_counts(server: str, shown: str) -> None:
    counts = read_found(server)["counts"]
    same, rows = (sum(each[key] for each in counts) for key in ("as_demanded", "rows"))
    assert rows == len(read_table())
    text = (ROOT / "docs" / "conformance.md").read_text("utf-8")
    assert f"| {shown} | {same} of {rows} |" in text


def test_the_docs_tell_every_reason() -> None:
    text = " ".join((ROOT / "docs" / "conformance.md").read_text("utf-8").split())
    for each in read_differences("triton"):
        assert f"**{each.title}.** {' '.join(each.because.split())}" in text
