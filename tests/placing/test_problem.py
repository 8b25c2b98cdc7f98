"""The two linear rows are the busy time of a woven machine, and machines refuse what would break a limit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.placing.problems import demand, machines
from weft_cluster.placing.filling import Filling, broken_limits
from weft_cluster.placing.problem import PlacingProblem

share = st.floats(0, 1)


@settings(max_examples=18)
@given(share, share, share, share)
def test_the_larger_row_is_the_busy_time_of_a_woven_machine(
    compute: float, memory: float, other: float, overlap: float
) -> None:
    problem = PlacingProblem.of(machines(1, overlap=overlap), [demand("m", compute, memory + 1e-3, other=other)])
    c, m = problem.compute[0, 0], problem.memory[0, 0]
    busy = max(c, m) + (1 - overlap) * min(c, m) + problem.other[0, 0]
    assert problem.model_loads[0, :, 0].max() == pytest.approx(busy)


def filling(*demands: object, **kind: float) -> Filling:
    return Filling(PlacingProblem.of(machines(2, **kind), demands))  # type: ignore[arg-type]


def test_opposites_fit_where_likes_do_not() -> None:
    found = filling(demand("c", 0.7, 0.1), demand("d", 0.7, 0.1), demand("m", 0.1, 0.7), overlap=1.0)
    found.add(0, 0, 1.0)
    assert found.room(1)[0] == pytest.approx(0.1 / 0.7, abs=1e-6)
    assert found.room(2)[0] == pytest.approx(1.0)


def test_a_machine_takes_no_more_than_its_memory_holds() -> None:
    found = filling(demand("a", gib=6), demand("b", gib=5))
    found.add(0, 0, 1.0)
    assert found.room(1).tolist() == [0.0, 1.0]
    found.add(0, 1, 1.0)
    assert [line for line in broken_limits(found)] == ["gpu-1 holds 11.00 GiB, and has 10.00"]


def test_a_long_segment_keeps_away_from_a_tight_deadline_whichever_came_first() -> None:
    tight, long = demand("tight", deadline_s=0.012), demand("long", segment_s=0.005)
    for first, second in ((0, 1), (1, 0)):
        found = filling(tight, long)
        found.add(0, first, 1.0)
        assert found.room(second).tolist() == [0.0, 1.0]
    found.add(0, 0, 1.0)
    assert "tight on gpu-1 may wait 5.0 ms for long" in list(broken_limits(found))


def test_what_is_taken_off_leaves_no_trace() -> None:
    found = filling(demand("a", segment_s=0.02), demand("b"), demand("c", deadline_s=0.02))
    found.add(0, 1, 0.5)
    before = found.loads.copy(), found.bytes.copy(), found.longest_s.copy(), found.tightest_s.copy()
    found.add(0, 0, 0.3)
    assert found.remove(0, 0) == 0.3
    for was, now in zip(before, (found.loads, found.bytes, found.longest_s, found.tightest_s), strict=True):
        np.testing.assert_allclose(was, now)
    assert found.machines_with(0) == []


def test_more_of_a_model_needs_no_more_memory() -> None:
    found = filling(demand("a", gib=6))
    found.add(0, 0, 0.4)
    assert found.room(0)[0] == pytest.approx(1.0)
    found.add(0, 0, 0.6)
    assert found.bytes[0] == 6 * 2**30
