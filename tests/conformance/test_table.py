"""The whole table against a real server, and the table against what it promises itself."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.judging import PlanRequest, judge
from tests.conformance.models import write_repository
from tests.conformance.over_grpc import grpc_target, sent_of
from tests.conformance.over_http import HttpTarget, request_of
from tests.conformance.rows import ORIGINS, GrpcRow, HttpRow, read_table
from tests.conformance.schema import described
from tests.serving import live

ROWS = read_table()
LEAST_ROWS = 250


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlanRequest]:
    folder = write_repository(tmp_path_factory.mktemp("repository"))
    with live.running(folder, learn_s=0) as server, grpc_target(server.grpc_address, live.PATIENCE_S) as target:
        yield PlanRequest(HttpTarget(server.url, live.PATIENCE_S), target)


def marked(row: HttpRow | GrpcRow) -> Any:
    """A row as a test."""
    marks = [pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")] if row.memory else []
    return pytest.param(row, id=row.name.encode("ascii", "replace").decode(), marks=marks)


@pytest.mark.parametrize("row", list(map(marked, ROWS)))
def test_a_row_is_answered_as_it_says(asked: PlanRequest, row: HttpRow | GrpcRow) -> None:
    assert judge(asked, row) == []


def test_the_table_is_large_and_says_who_demands_each_row() -> None:
    assert len(ROWS) >= LEAST_ROWS
    assert {row.by for row in ROWS} == set(ORIGINS)
    assert [name for name, count in Counter(row.name for row in ROWS).items() if count > 1] == []


def test_every_row_can_be_written_as_bytes() -> None:
    for row in ROWS:
        assert request_of(row, "127.0.0.1:8000") if isinstance(row, HttpRow) else sent_of(row)


def test_every_schema_that_a_row_names_is_there() -> None:
    named = {row.schema for row in ROWS if isinstance(row, HttpRow) and row.schema}
    assert named <= described()["components"]["schemas"].keys()


@pytest.mark.skipif("WEFT_OIP_SCHEMA" not in os.environ, reason="WEFT_OIP_SCHEMA names no rest_predict_v2.yaml")
def test_our_schemas_say_what_the_protocols_own_file_says() -> None:
    yaml = pytest.importorskip("yaml")
    whole = yaml.safe_load(Path(os.environ["WEFT_OIP_SCHEMA"]).read_text("utf-8"))
    for name, ours in described()["components"]["schemas"].items():
        theirs = whole["components"]["schemas"][name]
        for key in ("type", "required", "properties", "items"):
            assert ours.get(key) == theirs.get(key), (name, key)
