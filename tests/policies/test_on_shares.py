"""Policies that choose shares of a GPU, on a simulated one: nothing lost, no share used twice, nobody starves."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings

from tests.engine.hosts import Kind, ListedFeed, Load, Order, kind, loads
from weft.base.errors import InputError, InvalidStart
from weft.devices.decoupled import DeviceClocks, LayerTimes
from weft.devices.shares import Contention, GpuLikeness, Shares, ladder
from weft.engine import SimulatedHost, request_engine
from weft.engine.policies import (
    ON_SHARES,
    Candidate,
    Option,
    Policy,
    Setting,
    Start,
    View,
    make_policy,
)
from weft.engine.policies.abreast import Abreast
from weft.engine.policies.base import NO_DEADLINE, LaneState, ShareUse, Traits, Work
from weft.engine.policies.ways import MOVE_FACTOR, open_ways, ways
from weft.engine.simulated_host import Crowd, DrawnWork

COMPUTE = GpuLikeness(speeds={84: 0.7, 48: 0.42}, kernel_us=40, memory=0.1)
MEMORY = GpuLikeness(speeds={84: 0.97, 48: 0.88}, kernel_us=10, memory=0.6)
SMALL = GpuLikeness(speeds={84: 1.0, 48: 0.97}, kernel_us=5, memory=0.05)
MS = 1_000_000


TAKEN = Contention(beside=0.1, turns=0.05, filled=0.8, order=1.2, favour=0.25, memory=1.5, reach=0.05)


def shares_of(*likes: GpuLikeness) -> Shares:
    return Shares(132, ladder(132, [(84, 48), (68, 64)], streams=4), likes, TAKEN)


@dataclass(frozen=True)
class Seen:
    """A segment, its lane, and when it ran."""

    candidate: Candidate
    lane: int
    times: LayerTimes

    @property
    def span(self) -> tuple[int, int]:
        return self.times.compute_start, self.times.compute_end


class SharedHost(SimulatedHost):
    """A simulated GPU that remembers which lane took what."""

    def __init__(self, setting: Setting) -> None:
        assert setting.shares
        kinds = range(len(setting.programs))
        super().__init__(setting, crowd=Crowd(setting.shares, kinds, lambda each: DrawnWork(0, max(1, each.compute))))
        self.lane_of: dict[tuple[int, int, int], int] = {}

    def submit(self, start: Start, batch: object = None) -> None:
        assert self.held()[start.lane].room, "a lane is given more than it takes"
        self.lane_of[start.candidate[:3]] = start.lane
        super().submit(start)

    @property
    def seen(self) -> list[Seen]:
        return [Seen(each, self.lane_of[each[:3]], times) for each, times in self.log]


def on_shares(load: Load, likes: list[GpuLikeness]) -> Setting:
    return replace(load.setting, lanes=1, ahead=1, apart=False, shares=shares_of(*likes))


def run_shared(policy: str, load: Load, likes: list[GpuLikeness], **options: Option) -> tuple[SharedHost, ListedFeed]:
    """Serve a load; *likes*: what each program is like."""
    setting = on_shares(load, likes)
    feed, host = ListedFeed(load.orders, load.kinds), SharedHost(setting)
    remaining = [each.remaining for each in setting.programs]
    engine, source = request_engine(make_policy(policy, setting, options), feed, host, remaining, late=load.late)
    for term in load.terms:
        source.open(term)
    engine.run()
    return host, feed


def likes_for(load: Load) -> list[GpuLikeness]:
    return [(COMPUTE, MEMORY, SMALL)[at % 3] for at, each in enumerate(load.kinds) for _ in each.batches]


@pytest.mark.parametrize("policy", ON_SHARES)
@settings(max_examples=15, deadline=None)
@given(load=loads(soft=True, timeouts=(0,), layers=(1, 12), orders=12))
def test_every_layer_runs_once_and_in_order_and_no_share_is_used_twice(policy: str, load: Load) -> None:
    host, feed = run_shared(policy, load, likes_for(load))
    assert all(fate.what == "served" for each in feed.tickets for fate in feed.fates[each])
    runs: dict[tuple[int, int], list[Seen]] = {}
    for each in host.seen:
        runs.setdefault(each.candidate[:2], []).append(each)
    for run in runs.values():
        run.sort(key=lambda each: each.candidate.layer)
        program = load.setting.programs[run[0].candidate.program]
        assert [each.candidate.layer for each in run] == list(range(len(program)))
        for one, after in pairwise(run):
            assert one.times.compute_end <= after.times.compute_start
    seen = sorted(host.seen, key=lambda each: each.span)
    for at, one in enumerate(seen):
        for other in seen[at + 1 :]:
            if other.times.compute_start >= one.times.compute_end:
                break
            assert one.lane != other.lane, "a lane computes one at a time"
            assert one.candidate.stream != other.candidate.stream, "a stream has one place in memory"


@pytest.mark.parametrize("likes", [(COMPUTE, MEMORY), (COMPUTE, COMPUTE), (COMPUTE, SMALL), (COMPUTE, MEMORY, SMALL)])
def test_abreast_starves_nobody_and_does_about_as_much_as_the_best_rival(likes: tuple[GpuLikeness, ...]) -> None:
    orders = tuple(Order(stream, 0, 1 << 50) for stream in range(len(likes)) for _ in range(80))
    load, until = Load(tuple(kind(*[MS] * 4) for _ in likes), orders), 250 * MS

    def rates(policy: str, **options: Option) -> list[float]:
        """The part of its rate alone that each stream had, all having work."""
        host, _ = run_shared(policy, load, list(likes), **options)
        done = [0.0] * len(likes)
        for each in host.seen:
            if each.times.compute_end <= until:
                done[each.candidate.stream] += MS / until
        return done

    ours = rates("abreast")
    rivals = [rates("streams"), rates("slices"), *[rates("split", cut=cut) for cut in (0, 1)]]
    fair = [each for each in rivals if min(each) >= 0.6 / len(likes)]
    assert min(ours) >= 0.8 / len(likes)
    assert sum(ours) >= 0.97 * max(map(sum, fair))


def first(view_of: list[Candidate], shares: Shares, now: int = 0, held: tuple[Candidate, ...] = ()) -> Start | None:
    """What abreast starts; *held* is on the first lane."""
    setting = Setting((), 0, shares=shares)
    lanes = [LaneState((), 0, True)] * len(shares.lanes)
    lanes[0] = LaneState(held, sum(each.compute for each in held), len(held) < 2)
    heads = tuple(view_of)
    return make_policy("abreast", setting).decide(View(DeviceClocks.at(now), heads, heads, (), tuple(lanes)))


def waiting(stream: int, deadline_ms: float, remaining_ms: float = 2.0) -> Candidate:
    remaining = round(remaining_ms * MS)
    return Candidate(
        stream, 0, 0, 0, MS // 4, -1, stream, 0, round(deadline_ms * MS), remaining,
        work=Work(remaining), share=ShareUse(0.5, NO_DEADLINE),
    )  # fmt: skip


def test_with_time_to_spare_two_share_a_cut_and_with_none_the_urgent_one_is_alone() -> None:
    shares = shares_of(COMPUTE, MEMORY)
    calm = first([waiting(0, 100), waiting(1, 100)], shares)
    assert calm is not None and shares.lanes[calm.lane].sms < 132
    pressed = first([waiting(0, 100), waiting(1, 2.3)], shares)
    assert pressed is not None and (pressed.candidate.stream, shares.lanes[pressed.lane].sms) == (1, 132)


def test_streams_of_one_body_take_turns_on_one_lane() -> None:
    shares = Shares(132, ladder(132, [(84, 48)], streams=4), (COMPUTE, MEMORY, MEMORY), TAKEN, bodies=(0, 0, 1))
    on_lane_0 = (waiting(0, 100),)
    behind = first([waiting(1, 100)], shares, held=on_lane_0)
    assert behind is None or behind.lane == 0, "its memory is in use there"
    beside = first([waiting(2, 100)], shares, held=on_lane_0)
    assert beside is not None and beside.lane != 0
    start = first([waiting(0, 100), waiting(1, 50)], shares)
    assert start is not None and start.candidate.stream == 1, "of a body the one that is due first"


@pytest.mark.parametrize(("bodies", "waits"), [((0, 0), True), ((0, 1), False)])
def test_streams_of_one_body_run_one_after_another_whatever_their_lanes(bodies: tuple[int, ...], waits: bool) -> None:
    """In the simulation as in the server: a body has one memory."""
    load = Load((kind(MS), kind(MS)), ())
    one_memory = Shares(132, ladder(132, [(84, 48)], streams=4), (SMALL, SMALL), TAKEN, bodies=bodies)
    host = SharedHost(replace(load.setting, lanes=1, ahead=1, apart=False, shares=one_memory))
    for stream, lane in enumerate(one_memory.cuts[0]):
        host.submit(Start(Candidate(stream, 0, 0, 0, MS, -1, stream), lane=lane))
    while host.rests():
        host.idle_until(NO_DEADLINE)
        host.completions()
    first, second = sorted(each.span for each in host.seen)
    assert (second[0] >= first[1]) is waits


def test_best_effort_steps_aside_while_an_urgent_one_runs() -> None:
    shares = shares_of(COMPUTE, MEMORY)
    urgent = waiting(1, 2.3), waiting(1, 2.3, 1.75)._replace(layer=1)
    assert first([waiting(0, 100)], shares, held=urgent) is None
    assert first([waiting(0, 100)], shares, held=tuple(each._replace(deadline=100 * MS) for each in urgent)) is not None


def test_whoever_others_wait_behind_is_as_urgent_as_they_are() -> None:
    shares = shares_of(COMPUTE, MEMORY)
    followed = waiting(1, 100)._replace(share=ShareUse(0.5, round(2.3 * MS)))
    start = first([waiting(0, 100), followed], shares)
    assert start is not None and (start.candidate.stream, shares.lanes[start.lane].sms) == (1, 132)


def test_who_runs_on_the_whole_gpu_is_not_moved_for_a_little() -> None:
    """Its next segment would have to wait until the last one has ended, and be started anew."""
    shares = shares_of(COMPUTE, MEMORY)
    known = ways(shares, (0, 1))
    best = next(way for way in known if -1 not in way.lanes)
    held = shares.whole[0], -1
    found, counts = open_ways(shares, (0, 1), held, hurried=False)
    assert best.lanes[0] != held[0] and found == known
    for way, counted in zip(known, counts.tolist(), strict=True):
        assert counted == pytest.approx(
            [speed * (MOVE_FACTOR if way.lanes[0] != held[0] else 1.0) for speed in way.speeds]
        )


def test_where_somebody_is_hurried_one_is_alone_or_two_are_on_streams() -> None:
    """Other ways take time to change to, and it is not known as well how fast they are."""
    shares = shares_of(COMPUTE, MEMORY, SMALL)
    found, _ = open_ways(shares, (0, 1, 2), (-1, -1, shares.cuts[0][1]))
    assert len(found) == 3 + 3
    assert {lane for way in found for lane in way.lanes} == {-1, shares.whole[0]}
    assert all([sum([lane != -1 for lane in way.lanes]) <= 2 for way in found])


def test_a_policy_that_says_it_has_nothing_more_has_next_to_nothing_more() -> None:
    """Asked again at once, at the same instant, it starts something in 2 of 100 cases."""
    orders = tuple(Order(stream, 0, 1 << 50) for stream in range(3) for _ in range(60))
    load = Load(tuple(kind(*[MS] * 4) for _ in range(3)), orders)
    setting = on_shares(load, [COMPUTE, MEMORY, SMALL])
    feed, host = ListedFeed(load.orders, load.kinds), SharedHost(setting)
    engine, source = request_engine(
        Abreast(setting), feed, host, [each.remaining for each in setting.programs], late=load.late
    )
    for term in load.terms:
        source.open(term)
    asked = started = 0
    while not source.done():
        before = len(host.lane_of)
        if not engine.step() and not source.done():
            if len(host.lane_of) > before:  # it started something, and wants no more
                issued = len(host.lane_of)
                engine.step()
                asked, started = asked + 1, started + (len(host.lane_of) > issued)
            host.idle_until(source.next_event())
    assert asked > 100 and started <= 0.02 * asked


def test_the_end_of_a_query_is_not_left_beside_another_way() -> None:
    """Its stream goes on with the next query, which could move; what runs of the last one is due soon."""
    shares = shares_of(COMPUTE, SMALL)
    ending = waiting(1, 1, 0.25)
    start = first([waiting(0, 100), waiting(1, 100)._replace(query=1)], shares, held=(ending,))
    assert start is None or shares.lanes[start.lane].sms == 132


def test_what_a_policy_is_told_of_those_who_come_and_wait() -> None:
    """Three requests of a stream at once: the first must be done for the second, which takes as long."""
    seen: list[View] = []

    class Watching(Abreast):
        def decide(self, view: View) -> Start | None:
            seen.append(view)
            return super().decide(view)

    load = Load((kind(MS, MS),), tuple(Order(0, 0, due * MS) for due in (10, 20, 5)))
    setting = on_shares(load, [SMALL])
    feed, host = ListedFeed(load.orders, load.kinds), SharedHost(setting)
    engine, source = request_engine(Watching(setting), feed, host, [each.remaining for each in setting.programs])
    source.open(load.terms[0])
    engine.run()
    (head,) = seen[0].candidates
    assert head.share and (head.deadline, head.share.behind) == (5 * MS, 8 * MS)
    last = seen[-1].candidates[0].share
    assert last and last.behind == NO_DEADLINE


def test_ways_are_all_that_there_are_the_most_work_first() -> None:
    """One of three alone, two or three on streams, any two on the sides of two cuts."""
    found = ways(shares_of(COMPUTE, MEMORY, SMALL), (0, 1, 2))
    assert found == tuple(sorted(found, key=lambda way: -way.total))
    assert len(found) == len({way.lanes for way in found}) == 3 + 4 + 3 * 4


def test_a_way_that_is_slower_for_all_is_open_to_whoever_has_to_stay() -> None:
    """Where the end of a query runs, another can run beside it, however much better both did elsewhere."""
    shares = shares_of(COMPUTE, SMALL)
    for held in (*shares.cuts, *[(small, large) for large, small in shares.cuts], (shares.whole[0],) * 2):
        found, _ = open_ways(shares, (0, 1), held, (0,))
        assert held in [way.lanes for way in found]


def can_all_be_on_time(orders: tuple[Order, ...], kinds: tuple[Kind, ...]) -> bool:
    """Whether some order of whole requests on the whole GPU, all there from the start, keeps every deadline."""
    for each in permutations(orders):
        end, kept = 0, True
        for order in each:
            end += sum(kinds[order.stream].batches[0])
            kept &= end <= order.due
        if kept:
            return True
    return False


def test_small_cases_meet_nearly_every_deadline_that_enumeration_can() -> None:
    """All arrivals known, 10 % of margin: what is missed was lost to segments of others that were queued already."""
    rng, segment, requests, missed = random.Random(5), MS // 4, 0, 0
    while requests < 120:
        lengths = [rng.randint(1, 6) for _ in range(rng.randint(2, 4))]
        kinds = tuple(kind(*[segment] * count) for count in lengths)
        orders = tuple(Order(at, 0, rng.randint(4, 30) * segment) for at in range(len(kinds)))
        if not can_all_be_on_time(tuple(each._replace(due=round(each.due / 1.1)) for each in orders), kinds):
            continue
        _, feed = run_shared(
            "abreast", Load(kinds, orders), [(COMPUTE, MEMORY, SMALL)[at % 3] for at in range(len(kinds))]
        )
        requests += len(orders)
        missed += sum(feed.fates[each][0].when > each.due for each in feed.tickets)
    assert missed <= 0.03 * requests, missed


class Idler(Policy):
    """Waits, whatever there is."""

    traits = Traits(shares=True)

    def decide(self, view: View) -> Start | None:
        return None


def test_a_policy_that_waits_for_nothing_is_told() -> None:
    load = Load((kind(1),), (Order(0, 0, 10),))
    setting = on_shares(load, [SMALL])
    feed, host = ListedFeed(load.orders, load.kinds), SharedHost(setting)
    engine, source = request_engine(Idler(setting), feed, host, [each.remaining for each in setting.programs])
    source.open(load.terms[0])
    with pytest.raises(InvalidStart, match="Idler waits, and nothing runs"):
        engine.run()


def test_options_are_checked() -> None:
    setting = Setting((), 0, shares=shares_of())
    for name, options in (("abreast", {"floor": 101}), ("abreast", {"margin": -1}), ("slices", {"slice_us": 0})):
        with pytest.raises(InputError, match=next(iter(options))):
            make_policy(name, setting, options)
