"""When a request is due: whatever number its client gives, the deadline is one that every clock can hold."""

from __future__ import annotations

import pytest

from weft.base.errors import BadRequest
from weft.engine.policies.base import NO_DEADLINE
from weft.serving.request_parameters import MOST_WHOLE, ModelTerms, due_of, whole_number

NOW = 2**59


@pytest.mark.parametrize("timeout_us", [2**53, 2**62, 2**63 - 1, MOST_WHOLE])
def test_a_timeout_of_64_bits_is_a_deadline_that_never_comes(timeout_us: int) -> None:
    due = due_of({"timeout": timeout_us}, NOW, ModelTerms())
    assert due.strict and NOW + 3600 * 10**9 < due.deadline_ns < NO_DEADLINE


def test_so_is_a_deadline_of_the_transport() -> None:
    assert due_of({}, NOW, ModelTerms(), deadline=2**80).deadline_ns < NO_DEADLINE
    assert due_of({"timeout": MOST_WHOLE}, NOW, ModelTerms(), deadline=NOW + 5).deadline_ns == NOW + 5


@pytest.mark.parametrize("value", [-1, MOST_WHOLE + 1, 1.0, True, "1"])
def test_what_64_bits_do_not_hold_is_refused_with_the_range(value: object) -> None:
    with pytest.raises(BadRequest, match=f"priority = .* from 0 to {MOST_WHOLE}"):
        whole_number({"priority": value}, "priority")
