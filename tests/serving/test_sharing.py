"""What a server knows of its GPU's shares: kinds that follow the programs, and what was learned of pairs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.devices.host import GpuCuts
from weft.devices.shares import LEAST_FACTOR, LEAST_OBSERVED, MOST_FACTOR, GpuLikeness, Pair, SeenSpeeds
from weft.engine.policies.ways import open_ways, ways
from weft.serving.gpu_sharing import UNCUT, UNMEASURED, UPDATE_TICKS, GpuSharing, LaneRun, sharing_for
from weft.serving.statistics import SHARES_KEPT, ShareTimes

HEAVY = GpuLikeness(speeds={84: 0.7, 48: 0.42}, kernel_us=40, memory=0.1)
SMALL = GpuLikeness(speeds={84: 1.0, 48: 0.97}, kernel_us=5, memory=0.05)
H200 = GpuCuts(sms=132, cuts=((84, 48), (68, 64)))
LARGE_LANE, SMALL_LANE = 5, 6
MS = 1_000_000


@pytest.fixture
def sharing() -> GpuSharing:
    found = GpuSharing()
    assert found.recut(H200) and not found.recut(H200)
    found.put(0, [HEAVY], 0)
    found.put(1, [SMALL, SMALL], 1)
    return found


def test_only_policies_that_choose_shares_need_a_device_for_that() -> None:
    assert sharing_for("punctual", None) is None
    assert isinstance(sharing_for("abreast", "cuda:0"), GpuSharing)


def test_a_gpu_that_nobody_knows_yet_has_streams_of_the_whole() -> None:
    found = GpuSharing()
    assert found.cuts == UNCUT and len(found.shares.whole) == 4 and not found.shares.cuts
    found.put(0, [UNMEASURED], 0)
    assert found.shares.speeds([0], [0]) == [1.0]
    assert UNMEASURED.fill(132) == 1.0 and UNMEASURED.speed(66, 132) == 0.5


def test_new_cuts_know_the_kinds_that_there_are(sharing: GpuSharing) -> None:
    assert list(sharing.shares.kinds) == [HEAVY, SMALL, SMALL] and list(sharing.shares.bodies) == [0, 1, 1]
    assert [sharing.name(lane) for lane in (0, 4, LARGE_LANE, SMALL_LANE, 99)] == ["132", "132 high", "84", "48", "132"]


def test_a_program_that_takes_the_place_of_another_is_another_kind(sharing: GpuSharing) -> None:
    before = ways(sharing.shares, (0, 1))
    sharing.put(1, [HEAVY], 7)
    assert list(sharing.shares.kinds) == [HEAVY, HEAVY, SMALL] and list(sharing.shares.bodies) == [0, 7, 1]
    after = ways(sharing.shares, (0, 1))
    assert after != before
    sharing.put(1, [SMALL], 7)
    assert ways(sharing.shares, (0, 1)) != after, "of the same body, too"


def test_decisions_follow_what_was_learned_of_a_body_until_it_is_gone(sharing: GpuSharing) -> None:
    pair, before = Pair(0, LARGE_LANE, 1, SMALL_LANE), [ways(sharing.shares, (0, other)) for other in (1, 2)]
    for _ in range(2 * LEAST_OBSERVED):
        sharing.observe(LaneRun(LARGE_LANE, 0, 0, MS), 4 * MS, [LaneRun(SMALL_LANE, 1, 0, MS)])
    assert sharing.shares.seen.factor(pair) > 1.3
    assert [ways(sharing.shares, (0, other)) != old for other, old in zip((1, 2), before, strict=True)] == [True, True]
    sharing.forget(1)
    assert not sharing.shares.seen and sharing.shares.seen.factor(pair) == 1.0


def test_what_ran_alone_on_the_whole_is_told_from_what_did_not(sharing: GpuSharing) -> None:
    assert sharing.observe(LaneRun(0, 0, 0, MS), MS, ()) == (True, 1.0)
    assert sharing.observe(LaneRun(LARGE_LANE, 0, MS, 2 * MS), MS, ()) == (False, 0.7)
    beside = sharing.observe(LaneRun(0, 0, 2 * MS, 3 * MS), MS, [LaneRun(1, 1, 0, 3 * MS)])
    assert not beside.alone and beside.speed < 1.0
    later = sharing.observe(LaneRun(2, 1, 10 * MS, 11 * MS), MS, ())
    assert later.alone, "what ended before it began was not beside it"


def test_a_lane_that_is_no_more_teaches_nothing(sharing: GpuSharing) -> None:
    assert sharing.observe(LaneRun(40, 0, 0, MS), MS, ()) == (False, 1.0)


def test_speeds_follow_what_was_seen_of_a_pair(sharing: GpuSharing) -> None:
    kinds, lanes, at = (0, 1), (LARGE_LANE, SMALL_LANE), 0
    predicted = sharing.shares.predicted(kinds, lanes)[0]
    took = round(MS / predicted / 0.8)
    for _ in range(4 * LEAST_OBSERVED):
        other = LaneRun(SMALL_LANE, 1, at, at + took)
        seen = sharing.observe(LaneRun(LARGE_LANE, 0, at, at + took), MS, [other])
        at += took
    assert seen.speed == pytest.approx(0.8 * predicted, rel=0.12)
    assert sharing.shares.speeds(kinds, lanes)[0] == seen.speed
    assert sharing.shares.speeds((0, 2), lanes)[0] == seen.speed, "another batch size of the same body"
    assert sharing.shares.speeds(kinds, (0, 1)) == sharing.shares.predicted(kinds, (0, 1)), "another way"


def test_a_way_that_is_better_than_it_looks_is_found() -> None:
    """Streams are truly 8 % faster than predicted, and the sides of cuts 5 % slower; only then streams are best."""
    sharing, free, tried = GpuSharing(), [0, 0], []
    sharing.recut(H200)
    sharing.put(0, [SMALL], 0)
    sharing.put(1, [SMALL], 1)
    for _ in range(40 * LEAST_OBSERVED):
        open_to, counts = open_ways(sharing.shares, (0, 1), (-1, -1), hurried=False)
        tried.append(open_to[int(counts.sum(axis=1).argmax())].lanes)
        lanes, off = ((0, 1), 1.08) if tried[-1] == (0, 0) else (tried[-1], 0.95)
        one = free.index(min(free))
        took = round(MS / off / sharing.shares.predicted((0, 1), lanes)[one])
        free[one] += took
        beside = LaneRun(lanes[1 - one], 1 - one, 0, free[one])
        sharing.observe(LaneRun(lanes[one], one, free[one] - took, free[one]), MS, [beside])
    assert tried[0] != (0, 0) and tried[-LEAST_OBSERVED:] == [(0, 0)] * LEAST_OBSERVED
    assert len(set(tried)) > 2, "others were tried, too"
    for lanes in {(0, 1), *tried} - {(0, 0)}:
        assert sharing.shares.hope((0, 1), lanes) == 1.0, "nothing is left to hope for"


def test_a_segment_that_its_lane_was_late_for_teaches_nothing_of_pairs(sharing: GpuSharing) -> None:
    for at in range(0, 400 * MS, 2 * MS):
        sharing.observe(LaneRun(LARGE_LANE, 0, at, at + MS), 4 * MS, [LaneRun(SMALL_LANE, 1, at, at + MS)])
    assert not sharing.shares.seen


def test_decisions_hear_of_what_was_learned_now_and_then(sharing: GpuSharing) -> None:
    """All ways have to be worked out again each time."""
    told = set()
    for at in range(0, 1000 * MS, MS):
        ratio = 0.5 + at / (500 * MS)
        sharing.observe(LaneRun(LARGE_LANE, 0, at, at + MS), round(ratio * MS), [LaneRun(SMALL_LANE, 1, at, at + MS)])
        told.add(tuple(sharing.shares.tagged((0, 1))))
    assert 5 < len(told) <= 1 + 1000 * MS // (4 * UPDATE_TICKS)


def test_nothing_is_learned_of_a_pair_that_did_not_run_together_all_the_time(sharing: GpuSharing) -> None:
    for others_end in (MS // 2, 8 * MS // 10):
        sharing.observe(LaneRun(LARGE_LANE, 0, 0, MS), MS // 4, [LaneRun(SMALL_LANE, 1, 0, others_end)])
    several = [LaneRun(1, 1, 0, MS), LaneRun(2, 2, 0, MS)]
    sharing.observe(LaneRun(0, 0, 0, MS), MS // 4, several)
    sharing.observe(LaneRun(0, 0, 0, MS), None, several[:1])
    assert not sharing.shares.seen


def test_the_last_minutes_of_a_model_are_told_by_share() -> None:
    times, second = ShareTimes(), 1_000_000_000
    times.sample(0)
    assert times.lately(second) == {}
    times.total_ns["84"] += second
    times.sample(2 * second)
    times.total_ns["84"] += second
    times.total_ns["132"] += second // 2
    assert times.lately(4 * second) == {"84": 0.5, "132": 0.25}
    for at in range(SHARES_KEPT):
        times.sample((4 + at) * second)
    assert times.lately((4 + SHARES_KEPT) * second) == {"84": 0.0, "132": 0.0}


@given(ratios=st.lists(st.floats(0.0, 1e6), max_size=60))
def test_a_factor_stays_within_its_bounds_and_near_what_was_told(ratios: list[float]) -> None:
    seen, pair = SeenSpeeds(), Pair(0, 0, 1, 1)
    for ratio in ratios:
        seen.learn(pair, ratio)
    assert LEAST_FACTOR <= seen.factor(pair) <= MOST_FACTOR
