"""Which models are in a device's memory: who leaves for whom, and what never does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.base.errors import Failed, WorkerDied
from weft.runtime.isolated.residency import CLAIM_S, Residency


def of(most: int, *models: tuple[int, int]) -> Residency:
    found = Residency(most)
    for number, (moving, staying) in enumerate(models):
        found.add(number, moving, staying)
    return found


def test_models_come_back_as_long_as_there_is_room_and_then_the_one_used_least_recently_leaves() -> None:
    found = of(23, (10, 1), (10, 1), (10, 1))
    assert (found.make_room_for(0), found.make_room_for(1)) == ([], [])
    assert found.make_room_for(0) is None  # it is there, and was used just now
    assert found.make_room_for(2) == [1]
    assert [found.is_there(number) for number in range(3)] == [True, False, True] and found.returns == 3


def test_as_many_leave_as_are_in_the_way_of_a_large_one() -> None:
    found = of(100, (30, 0), (30, 0), (30, 0), (90, 0))
    assert [found.make_room_for(number) for number in range(4)] == [[], [], [], [0, 1, 2]]


def test_one_of_which_something_is_under_way_stays() -> None:
    found = of(20, (10, 0), (10, 0), (10, 0))
    found.make_room_for(0)
    found.make_room_for(1)
    found.begin(0)
    assert found.make_room_for(2) == [1]
    found.begin(2)
    with pytest.raises(WorkerDied, match="full of models that are being computed") as full:
        found.make_room_for(1)
    assert full.value.again_s > 0 and found.is_there(0) and found.is_there(2)
    found.end(0)
    assert found.make_room_for(1) == [0]


def test_one_that_never_fits_says_what_it_needs() -> None:
    found = of(100 << 20, (90 << 20, 0), (1 << 20, 20 << 20))
    with pytest.raises(Failed, match=r"it needs 90 MiB of the device.s memory, and 80 are left beside what models"):
        found.make_room_for(0)
    found.remove(1)
    assert found.make_room_for(0) == []


def test_what_never_leaves_is_there_and_what_did_not_come_back_is_not() -> None:
    found = of(10, (0, 8))
    assert found.is_there(0) and found.make_room_for(0) is None and found.is_there(7) and found.make_room_for(7) is None
    found.add(1, 2, 0)
    found.make_room_for(1)
    found.failed(1)
    assert found.is_there(1) and found.make_room_for(1) == [] and found.make_room_for(1) == []
    found.unsent(1, [])
    assert found.is_there(1)  # as before: nobody knows
    found.confirm(1)
    assert found.make_room_for(1) is None


def test_what_was_not_told_to_move_did_not() -> None:
    found = of(20, (10, 0), (10, 0), (20, 0))
    found.make_room_for(0)
    found.make_room_for(1)
    leaving = found.make_room_for(2)
    assert leaving == [0, 1]
    found.unsent(2, leaving)
    assert [found.is_there(number) for number in range(3)] == [True, True, False]
    assert found.make_room_for(2) == [0, 1]


def test_a_model_without_pause_gives_way_to_one_that_waits_for_its_room() -> None:
    found = of(10, (10, 0), (10, 0))
    found.make_room_for(0)
    found.begin(0)
    with pytest.raises(WorkerDied, match="full of models"):
        found.make_room_for(1)
    with pytest.raises(WorkerDied, match="it gives way to a model that waits"):
        found.make_room_for(0)
    assert found.make_room_for(0, begins=False) is None  # what has begun goes on to its end
    found.end(0)
    assert found.make_room_for(1) == [0] and found.make_room_for(0) == [1]


def test_one_that_is_leaving_comes_back_on_another_lane_when_it_has_left() -> None:
    found = of(20, (10, 0), (10, 0), (10, 0))
    found.make_room_for(0)
    found.make_room_for(1)
    assert found.make_room_for(2, lane=1) == [0]
    with pytest.raises(WorkerDied, match="just leaving") as leaving:
        found.make_room_for(0, lane=2)
    assert leaving.value.again_s > 0 and found.is_there(1)
    found.confirm(2, [0])
    assert found.make_room_for(0, lane=2) == [1]


def test_one_that_is_leaving_may_come_back_behind_that_on_the_same_lane() -> None:
    found = of(10, (10, 0), (10, 0))
    found.make_room_for(0, lane=1)
    assert found.make_room_for(1, lane=1) == [0] and found.make_room_for(0, lane=1) == [1]


def test_nobody_gives_way_to_one_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    found, now_s = of(10, (10, 0), (10, 0)), [100.0]
    monkeypatch.setattr("weft.runtime.isolated.residency.time.monotonic", lambda: now_s[0])
    found.make_room_for(0)
    found.begin(0)
    with pytest.raises(WorkerDied):
        found.make_room_for(1)
    now_s[0] += CLAIM_S
    assert found.make_room_for(0) is None


@given(
    models=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=5),
    most=st.integers(5, 40),
    asked=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=40),
)
def test_the_memory_is_never_exceeded_and_nothing_leaves_that_is_under_way(
    models: list[tuple[int, int]], most: int, asked: list[tuple[int, bool]]
) -> None:
    found, there, busy, waited = of(most, *models), list[int](), set[int](), set[int]()
    for number, ends in asked:
        if number >= len(models):
            continue
        if ends and number in busy:
            busy.discard(number)
            found.end(number)
        try:
            leaving = found.make_room_for(number)
        except (WorkerDied, Failed) as error:
            if "gives way" in str(error):
                assert number in there and waited - {number}
                continue
            waited.add(number)
            lacking = sum(models[each][0] for each in busy if each in there) + models[number][0]
            assert number not in there
            assert lacking + sum(staying for _, staying in models) > most or isinstance(error, Failed)
            continue
        assert (leaving is None) == (number in there)
        assert not busy & set(leaving or ())
        if leaving is None:
            there.remove(number)
        else:
            idle = [each for each in there if each not in busy]
            assert leaving == idle[: len(leaving)]
        there = [each for each in there if each not in (leaving or ())] + [number]
        assert sum(staying for _, staying in models) + sum(models[each][0] for each in there) <= most
        assert sorted(there) == [each for each in range(len(models)) if found.is_there(each)]
        if number not in busy:
            busy.add(number)
            found.begin(number)
