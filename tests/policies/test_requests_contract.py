"""What every policy obeys when requests arrive. A policy gets these tests by being in ``POLICIES``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.workloads import SERVING, Served, case_of, cases, flow, serve_case
from weft.base.errors import InputError
from weft.devices.decoupled import DeviceClocks, issue
from weft.engine import Offer, Requests
from weft.engine.batches import most_batches
from weft.engine.lateness import LATE, late_work
from weft.engine.policies import POLICIES, make_policy
from weft.engine.policies.base import NO_DEADLINE, Candidate, LateWork, Setting
from weft.kernels import request_state as k
from weft.simulation.requests import Case, simulate_requests


class Scene(NamedTuple):
    """A workload under a policy, and what became of it."""

    policy: str
    case: Case
    late: str
    served: Served


Claim = Callable[[Scene], None]
CLAIMS: list[Claim] = []
"""What is true of every run."""
CLAIMS_OF_WHOLE_BATCHES: list[Claim] = []
"""The same under policies whose batches keep their requests; test_refilling.py has the others."""


def claim(check: Claim) -> Claim:
    CLAIMS.append(check)
    return check


def claim_of_whole_batches(check: Claim) -> Claim:
    CLAIMS_OF_WHOLE_BATCHES.append(check)
    return check


@pytest.mark.parametrize("policy", SERVING)
@settings(max_examples=12, derandomize=True, deadline=None)
@given(case=cases(), late=st.sampled_from(LATE))
def test_what_is_claimed_of_every_run_is_true(policy, case, late):
    whole = not POLICIES[policy].traits.refills
    scene = Scene(
        policy, case, late, serve_case(policy, case, late=late, kind=watched(policy, late) if whole else Requests)
    )
    for check in CLAIMS + CLAIMS_OF_WHOLE_BATCHES * whole:
        check(scene)


def watched(policy: str, late: str) -> type[Requests]:
    """Requests that see to it that a late one is on offer only where nothing on time is, or it does no harm."""
    place = late_work(make_policy(policy, Setting((), 1)), late)

    class Watched(Requests):
        def offer(self, device: DeviceClocks) -> Offer:
            offer = super().offer(device)
            on_time = [head for head in offer.heads if head.deadline < NO_DEADLINE]
            clock = max(device.channel_free, device.array_free)
            if late == "drop" or place is not LateWork.AMONG_OTHERS:
                assert all(head.deadline >= clock for head in on_time)
            assert place is not LateWork.AMONG_OTHERS or len(on_time) == len(offer.heads)
            if place is LateWork.WOVEN and on_time:
                assert set(on_time) <= set(offer.candidates) <= set(offer.heads)
                for late_one in set(offer.candidates) - set(on_time):
                    end = issue(device, late_one.fetch, late_one.compute, self._setting.buffer)[0].array_free
                    assert in_time(on_time, end) == in_time(on_time, device.array_free)
            else:
                assert list(offer.candidates) == (on_time or list(offer.heads))
            return offer

    return Watched


def in_time(heads: list[Candidate], start: int) -> int:
    """How many are on time if all who can be go one after another by deadline; deadlines are in order."""
    count, now = 0, start
    for head in sorted(heads, key=lambda head: head.deadline):
        if now + head.remaining <= head.deadline:
            count, now = count + 1, now + head.remaining
    return count


def batches(served: Served) -> dict[tuple[int, int], list]:
    """What was issued of each batch, in order: candidates and their times."""
    found = defaultdict(list)
    for candidate, times in served.log:
        found[candidate.stream, candidate.query].append((candidate, times))
    return found


@claim
def every_request_is_answered_once_or_counted_as_dropped_or_refused(scene):
    case, late, served = scene.case, scene.late, scene.served
    seen = Counter((answer.stream, answer.arrival) for answer in served.answers)
    end = case.clock.ticks(case.workload.duration_s)
    for stream, (term, times) in enumerate(zip(case.terms, case.workload.times, strict=True)):
        mine = Counter({arrival: count for (owner, arrival), count in seen.items() if owner == stream})
        if term.clients:
            assert sum(mine.values()) >= term.clients
            assert all(0 <= arrival < end for arrival in mine)
        else:
            assert mine == Counter(times)
    assert all(answer.end < 0 or answer.end >= answer.arrival for answer in served.answers)
    assert late == "drop" or all(answer.end >= 0 for answer in served.answers)


@claim
def the_report_counts_what_the_answers_say(scene):
    case, late, served = scene.case, scene.late, scene.served
    run = simulate_requests(case, scene.policy, late=late)
    warm = case.clock.ticks(case.workload.warmup_s)
    for index, stream in enumerate(run.report.streams):
        mine = [answer for answer in served.answers if answer.stream == index and answer.arrival >= warm]
        waits = [answer.end - answer.arrival for answer in mine if answer.end >= 0]
        late_ones = sum(wait > case.terms[index].deadline for wait in waits)
        assert (stream.arrived, stream.completed) == (len(mine), len(waits))
        assert stream.dropped == sum(answer.end == -1 for answer in mine)
        assert stream.refused == sum(answer.end == -2 for answer in mine)
        assert stream.violated == late_ones + stream.dropped + stream.refused
        assert late != "drop" or late_ones == 0
        assert stream.arrived == stream.completed + stream.dropped + stream.refused
        if waits:
            assert stream.mean_latency_s == pytest.approx(sum(waits) / len(waits) * run.tick_s)
            assert stream.max_latency_s == pytest.approx(max(waits) * run.tick_s)
    assert run.report.decisions == len(served.log) == run.tally.clocks[k.STEPS]


@claim_of_whole_batches
def the_layers_of_a_batch_run_once_and_in_order_and_its_requests_are_answered_with_the_last(scene):
    case, late, served = scene.case, scene.late, scene.served
    ended = Counter()
    queries = defaultdict(list)
    for (stream, query), issues in batches(served).items():
        queries[stream].append(query)
        program = case.setting.programs[issues[0][0].program]
        assert {candidate.program for candidate, _ in issues} == {issues[0][0].program}
        assert [candidate.layer for candidate, _ in issues] == list(range(len(issues)))
        assert len(issues) == len(program) or late == "drop"
        assert [(c.fetch, c.compute) for c, _ in issues] == list(
            zip(program.fetch[: len(issues)], program.compute[: len(issues)], strict=True)
        )
        if len(issues) == len(program):
            ended[stream, issues[-1][1].compute_end] += issues[0][0].program - case.terms[stream].programs + 1
    answered = Counter((answer.stream, answer.end) for answer in served.answers if answer.end >= 0)
    assert ended == answered or (late == "drop" and answered <= ended)
    assert all(sorted(found) == list(range(len(found))) for found in queries.values())


@claim
def nothing_is_issued_before_it_arrives_and_nothing_overlaps_on_the_channel_or_on_the_array(scene):
    log = scene.served.log
    times = [when for _, when in log]
    for this, following in pairwise(times):
        assert following.fetch_start >= this.fetch_end
        assert following.compute_start >= this.compute_end
    for candidate, when in log:
        assert when.fetch_start >= candidate.arrival
        assert when.compute_start >= when.fetch_end >= when.fetch_start + candidate.fetch
        assert when.compute_end == when.compute_start + candidate.compute


@claim
def the_buffer_is_never_exceeded_when_a_fetch_ends(scene):
    log, buffer = scene.served.log, scene.case.setting.buffer
    for now in {when.fetch_end for _, when in log}:
        held = [c.fetch for c, when in log if when.fetch_end <= now < when.compute_end]
        assert sum(held) <= buffer


@claim_of_whole_batches
def of_each_stream_one_batch_is_on_time_and_only_a_few_are_under_way(scene):
    case, late, served = scene.case, scene.late, scene.served
    place = late_work(make_policy(scene.policy, case.setting), late)
    under_way: dict[int, set[int]] = defaultdict(set)
    for candidate, _ in served.log:
        mine = under_way[candidate.stream]
        mine.add(candidate.query)
        if late != "drop":  # a batch that is dropped does not say so here
            assert len(mine) <= (1 if place is LateWork.AMONG_OTHERS else most_batches(place))
        if candidate.layer == len(case.setting.programs[candidate.program]) - 1:
            mine.remove(candidate.query)


@pytest.mark.parametrize("policy", SERVING)
@settings(max_examples=6, derandomize=True, deadline=None)
@given(case=cases(), late=st.sampled_from(LATE))
def test_the_same_run_twice_is_the_same(policy, case, late):
    once, again = (simulate_requests(case, policy, late=late, record=True) for _ in range(2))
    assert once.report == again.report
    assert once.tally.answers == again.tally.answers
    assert once.tally.issues.tolist() == again.tally.issues.tolist()


# Overload


def overload() -> Case:
    """Three streams, each of which alone is more than the device can serve."""
    return case_of(
        [
            flow((2, 20), (2, 20), batch=3, arrivals=tuple(range(0, 600, 4)), deadline=60, timeout=5),
            flow((25, 2), (25, 2), batch=2, arrivals=tuple(range(0, 600, 5)), deadline=150, priority=3),
            flow((5, 5), clients=4, think=1, deadline=30, priority=9),
        ],
        buffer=60,
        end=600,
    )


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("policy", SERVING)
def test_overload_neither_hangs_nor_loses_a_request(policy, late):
    case = overload()
    for compiled in (True, False):
        report = simulate_requests(case, policy, late=late, compiled=compiled).report
        assert [stream.arrived for stream in report.streams[:2]] == [150, 120]
        for stream in report.streams:
            assert stream.completed + stream.dropped + stream.refused == stream.arrived
        assert report.violation_rate > 0.3
        assert report.makespan_s >= 0.5


# Policies that do not serve requests


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in SERVING])
def test_a_policy_for_saturated_streams_says_that_it_does_not_serve_requests(policy):
    with pytest.raises(InputError, match=policy) as caught:
        simulate_requests(overload(), policy)
    assert "\n" not in str(caught.value)
