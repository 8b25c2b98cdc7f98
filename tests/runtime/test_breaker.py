"""The circuit breaker, on a clock that stands still until it is set."""

from __future__ import annotations

import pytest

from weft.base.errors import Overloaded
from weft.runtime.breaker import Breaker, BreakerLimits

S = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.ns = 100 * S

    def __call__(self) -> int:
        return self.ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


def breaker(clock: Clock) -> Breaker:
    return Breaker(BreakerLimits(deaths=3, within_s=8.0, pause_s=10.0, longest_pause_s=25.0), clock)


def opened(clock: Clock) -> Breaker:
    made = breaker(clock)
    for _ in range(4):
        made.died()
    assert made.state == "open"
    return made


def test_it_lets_everybody_in_until_there_were_too_many_deaths_in_a_row(clock: Clock) -> None:
    made = breaker(clock)
    for _ in range(3):
        made.died()
        clock.ns += 100 * S  # however long the model takes to come back
        made.admit()
    assert made.state == "closed" and made.why == ""
    made.died()
    with pytest.raises(Overloaded, match=r"its worker died 4 times; it is tried again in 10\.0 s") as refused:
        made.admit()
    assert (refused.value.reason, refused.value.retry_after_s) == ("breaker", 10.0)
    assert made.state == "open" and "died 4 times" in made.why


def test_deaths_between_good_steps_count_within_some_seconds_only(clock: Clock) -> None:
    made = breaker(clock)
    for _ in range(20):  # a death every three seconds is borne
        made.died()
        made.succeeded()
        clock.ns += 3 * S
    assert made.state == "closed"
    for _ in range(4):
        made.succeeded()
        made.died()
        clock.ns += S
    assert made.state == "open"


def test_after_its_rest_one_request_is_tried_and_if_that_ends_well_all_are_let_in(clock: Clock) -> None:
    made = opened(clock)
    clock.ns += 10 * S
    made.admit()
    assert made.state == "trying"
    with pytest.raises(Overloaded):
        made.admit()
    made.succeeded()
    assert made.state == "closed" and made.why == ""
    made.admit()
    made.died()  # what was before is forgotten
    assert made.state == "closed"


def test_if_the_one_dies_the_rest_doubles_up_to_a_bound(clock: Clock) -> None:
    made = opened(clock)
    for pause_s in (10, 20, 25, 25):
        with pytest.raises(Overloaded) as refused:
            made.admit()
        assert refused.value.retry_after_s == pause_s
        clock.ns += pause_s * S
        made.admit()
        made.died()
    assert made.opened == 5


def test_a_try_that_is_never_heard_of_makes_room_for_another(clock: Clock) -> None:
    made = opened(clock)
    clock.ns += 10 * S
    made.admit()
    clock.ns += 10 * S
    made.admit()
    assert made.state == "trying"


def test_a_good_step_that_was_under_way_does_not_close_it_and_a_death_does_not_prolong_it(clock: Clock) -> None:
    made = opened(clock)
    made.succeeded()
    assert made.state == "open"
    clock.ns += S
    made.died()
    with pytest.raises(Overloaded) as refused:
        made.admit()
    assert refused.value.retry_after_s == 9.0
    clock.ns += 9 * S
    made.admit()
    made.succeeded()
    assert made.state == "closed"


def test_a_trial_that_ends_with_an_error_is_one_that_was_survived(clock: Clock) -> None:
    made = opened(clock)
    made.failed_without_death()
    assert made.state == "open", "nothing is tried yet"
    clock.ns += 10 * S
    made.check()
    assert made.state == "open", "nobody was let in"
    made.enter()
    assert made.state == "trying"
    made.failed_without_death()
    assert made.state == "closed"
