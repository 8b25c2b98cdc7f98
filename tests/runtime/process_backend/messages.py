"""What the server and the process that runs models say to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from weft.base import errors
from weft.runtime.backend import LoadedModel

TOLD = (*LoadedModel.__annotations__, "residency")
"""What the server knows of a model: all attributes of the protocol."""


class Call(NamedTuple):
    """Do something that may take long, and answer."""

    key: int
    method: str
    arguments: tuple[Any, ...]


class Reply(NamedTuple):
    key: int
    result: Any
    problem: tuple[str, str] | None = None


class Sent(NamedTuple):
    """A part of a batch: arrays that come with it, or the number of what is there."""

    arrays: dict[str, Any] | None
    number: int
    rows: Sequence[int] | None


class Begin(NamedTuple):
    run: int
    lane: int
    pin: bool
    model: int
    segment: int
    parts: tuple[Sent, ...]
    rows: int


class Halt(NamedTuple):
    run: int
    lane: int


class Free(NamedTuple):
    """Nobody needs these values any more."""

    number: int


class Over(NamedTuple):
    """A step has ended; of each of its results, the number of what stays there (or 0) and what clients are told."""

    run: int
    began: int
    ended: int
    made: tuple[tuple[int, dict[str, Any]], ...]
    problem: tuple[str, str] | None = None


def described(error: Exception) -> tuple[str, str]:
    """An error as it travels: few kinds survive being sent."""
    return type(error).__name__, str(error)


def restored(problem: tuple[str, str]) -> Exception:
    """What a problem is here: the same kind where it is one of ours or Python's own, else a RuntimeError."""
    kind, text = problem
    known: Any = getattr(errors, kind, None) or {"MemoryError": MemoryError, "ValueError": ValueError}.get(kind)
    return known(text) if known else RuntimeError(f"{kind}: {text}")
