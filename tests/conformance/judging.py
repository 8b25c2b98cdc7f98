"""One row at a time: what is needed is put there, the row is sent, and its answer is compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.matching import differences
from tests.conformance.over_grpc import GrpcTarget, judge_grpc
from tests.conformance.over_http import HttpTarget, NoAnswer, judge_http
from tests.conformance.rows import GrpcRow, HttpRow

MEMORY = Path("/dev/shm")
"""Where regions of shared memory are files."""


@dataclass(frozen=True)
class PlanRequest:
    """A server that is asked, by the ways it has."""

    http: HttpTarget | None
    grpc: GrpcTarget | None

    def takes(self, row: HttpRow | GrpcRow) -> bool:
        """Whether a row can be sent at all."""
        return (self.http if isinstance(row, HttpRow) else self.grpc) is not None

    def prepare(self, text: str) -> None:
        """Send what comes before or after a row; a server that does not know it is judged by the row itself."""
        over_http = text.partition(" ")[2].startswith("/")
        target: HttpTarget | GrpcTarget | None = self.http if over_http else self.grpc
        if target is not None:
            with contextlib.suppress(NoAnswer):
                target.ask_plainly(text)


def judge(asked: PlanRequest, row: HttpRow | GrpcRow) -> list[str]:
    """All in which a server differs from a row; nothing where it does not."""
    with shared(row.memory):
        for text in row.before:
            asked.prepare(text)
        try:
            return _answered(asked, row) + _held(row.answer_memory)
        except NoAnswer as error:
            return [f"no answer: {error}"]
        finally:
            for text in row.after:
                asked.prepare(text)


def _answered(asked: PlanRequest, row: HttpRow | GrpcRow) -> list[str]:
    if isinstance(row, HttpRow):
        assert asked.http is not None
        return judge_http(row, asked.http.ask(row))
    assert asked.grpc is not None
    return judge_grpc(row, asked.grpc.ask(row))


@contextlib.contextmanager
def shared(memory: Mapping[str, str]) -> Iterator[None]:
    """Regions of shared memory, until the block ends."""
    for key, content in memory.items():
        (MEMORY / key).write_bytes(bytes.fromhex(content))
    try:
        yield
    finally:
        for key in memory:
            (MEMORY / key).unlink(missing_ok=True)


def _held(memory: Mapping[str, str]) -> list[str]:
    return [
        said
        for key, content in memory.items()
        for said in differences(content, (MEMORY / key).read_bytes().hex(), f"memory {key}")
    ]
