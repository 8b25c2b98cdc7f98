"""Processes that simulate beside this one: whatever is begun comes to the same, whoever computes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.planning.machines import arrangement, asked, brief, host
from weft.planning.finals import Finalist, finals
from weft.planning.process_pool import Helpers, PendingResult
from weft.planning.trials import trial_of

__all__ = ["brief"]


@pytest.fixture(scope="module")
def helped() -> Iterator[Helpers]:
    """A process beside this one that is ready."""
    with Helpers(1) as found:
        assert elsewhere(found, found.begin(os.getpid)) == found.process_ids[0]
        yield found


def elsewhere(helpers: Helpers, promise: PendingResult[Any]) -> Any:
    """What a process has made of a promise that nobody here asks for."""
    with helpers._changed:
        helpers._changed.wait_for(lambda: promise.outcome)
    return promise.result()


def here_alone(home: int) -> str:
    if os.getpid() != home:
        os._exit(1)
    return "here"


def test_alone_only_what_is_asked_for_is_computed():
    computed: list[int] = []
    helpers = Helpers()
    first, second = helpers.begin(computed.append, 1), helpers.begin(computed.append, 2)
    second.result()
    assert (computed, first.outcome) == ([2], [])


def test_finalists_are_the_same_with_help(brief, helped):
    question = asked(("a", 40.0, 60.0), ("b", 20.0, 60.0))
    machines = [host(lanes, a=[8.0], b=[2.0]) for lanes in (2, 1)]
    options = [arrangement(machine, policy) for machine in machines for policy in ("punctual", "edf", "fifo", "fair")]

    def told(helpers: Helpers | None) -> list[tuple[Any, ...]]:
        found = finals(question, [trial_of(question, option, 0) for option in options], helpers=helpers)
        return [_told(each) for each in found.finalists]

    def _told(each: Finalist) -> tuple[Any, ...]:
        twins = [twin.arrangement.label for twin in each.twins]
        return (
            each.trial.arrangement.label,
            [report.streams for report in each.reports],
            each.factors,
            each.at_best,
            twins,
        )

    assert told(helped) == told(None)


def test_a_process_that_dies_costs_nothing_but_its_help():
    with Helpers(1) as helpers:
        promise = helpers.begin(here_alone, os.getpid())
        ((_, thread),) = helpers._children
        thread.join()  # it has begun with it, and ended
        assert promise.result() == "here"
        assert helpers.begin(max, 1, 2).result() == 2
