"""Lanes that take segments ahead: in order, each once, told of beforehand where that is allowed, and never lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from weft.engine import Completion
from weft.engine.lane_queues import MOST_AHEAD, SHORT_TICKS, choose_lane, has_room, preceding_tasks
from weft.engine.policies import Candidate, Start
from weft.runtime.backend import Ended, Step, StepEnd, StepOutput
from weft.runtime.lanes import ABORT_FROM_TICKS, LaneExecutor

TICKS = SHORT_TICKS + 100_000
"""What a segment is expected to take: so long that one alone waits behind another."""


class Run:
    """A step that a lane was given; it ends when it is told to."""

    def __init__(self, lane: FakeLane, batch: int, segment: int, ended: Ended, onward: bool) -> None:
        self.lane, self.batch, self.segment, self._ended = lane, batch, segment, ended
        self.onward: Sequence[StepOutput] | None = [StepOutput(("made", batch, segment), {})] if onward else None
        self.given, self.stopped, self.segments = lane.backend.ticks, False, 1

    def stop(self) -> None:
        self.stopped = True

    def end(self, error: Exception | None = None, computed: int | None = None) -> None:
        """End now; it ran since its lane was free, if its turn had come. computed: segments, if it left at a gate."""
        now = self.lane.backend.ticks
        began = max(self.given, self.lane.free_since) if self is self.lane.steps[0] else now
        if self is self.lane.steps[0]:
            self.lane.free_since = now
        self.lane.steps.remove(self)
        last = self.segment + (self.segments if computed is None else computed) - 1
        made = () if error or last < self.segment else [StepOutput(("made", self.batch, last), {})]
        self._ended(StepEnd(began, now, made, error, computed))


class FakeLane:
    """Holds steps until they are told to end."""

    apart = False

    def __init__(self, backend: FakeBackend, index: int, ahead: int) -> None:
        self.able = True
        self.backend, self.index, self.ahead = backend, index, ahead
        self.steps: list[Run] = []
        self.free_since = 0
        self.closed = False

    def close(self, patience_s: float | None = None) -> bool:
        self.closed = True
        return not self.steps


class FakeBackend:
    """Lanes by their numbers, and a clock that is set."""

    name = platform = "fake"
    inline = False
    memory_bytes = None

    def __init__(self, ahead: int = 1) -> None:
        self.ticks, self._ahead = 1000, ahead
        self.opened: list[FakeLane] = []

    def now(self) -> int:
        return self.ticks

    def lane(self, index: int, *, pin: bool = False) -> FakeLane:
        self.opened.append(FakeLane(self, index, self._ahead))
        return self.opened[-1]


class Work:
    """A batch of so many segments, of which some are exits: what is started and taken of it."""

    def __init__(self, batch: int, segments: int = 9, exits: tuple[int, ...] = ()) -> None:
        self.batch, self._segments, self._exits = batch, segments, exits
        self.runs: list[Run] = []
        self.taken: list[int] = []
        self.body: object = batch
        self.refuses: Exception | None = None
        """What it says of what it is given."""

    @property
    def loaded(self) -> Any:
        """It is its own model."""
        return self

    def step(self, segment: int) -> Step:
        return Step(segment, (), 1)

    def start(self, step: Step, lane: Any, ended: Ended, *, here: bool) -> Run:
        segment = step.segment
        assert not here
        assert segment == len(self.taken), "it goes on from what was not taken"
        goes_on = step.segments == 1 and segment + 1 < self._segments and segment not in self._exits
        run = Run(lane, self.batch, segment, ended, goes_on)
        run.segments = step.segments
        lane.steps.append(run)
        self.runs.append(run)
        return run

    def take(self, segment: int, made: Sequence[StepOutput]) -> None:
        assert [each.values for each in made] == [("made", self.batch, segment)]
        if self.refuses:
            raise self.refuses
        self.taken += range(len(self.taken), segment + 1)


class Bench:
    """Lanes that take segments ahead, the batches on them, and what was said of these."""

    def __init__(self, lanes: int = 1, ahead: int = 1, *, shares: bool = False) -> None:
        self.backend = FakeBackend(ahead)
        self.works: dict[int, Work] = {}
        self.woken = 0
        self.lanes = LaneExecutor(
            self.backend,  # type: ignore[arg-type]
            lanes,
            self._work_of,
            self._wake,
            shares=shares,
        )
        self.lanes.watch = lambda lane, completion: self.watched.append((lane, completion))
        self.watched: list[tuple[int, Completion]] = []

    def work(self, batch: int, segments: int = 9, exits: tuple[int, ...] = ()) -> Work:
        self.works[batch] = Work(batch, segments, exits)
        return self.works[batch]

    def give(
        self,
        batch: int,
        layer: int = 0,
        ticks: int = TICKS,
        home: int | None = None,
        stream: int = 0,
        lane: int = -1,
        body: object = None,
        layers: int | None = None,
    ) -> Candidate:
        candidate = Candidate(stream, batch, layer, 0, ticks, -1, program=0, home=home)
        if batch not in self.works:
            self.work(batch)
        self.works[batch].body = stream if body is None else body
        self.lanes.submit(Start(candidate, lane=lane, layers=layers))
        return candidate

    def told(self) -> list[tuple[int, int]]:
        """Batch and layer of what the source is told of."""
        return [(done.candidate.query, done.candidate.layer) for done in self.lanes.completions()]

    def end(
        self, lane: int = 0, after: int = TICKS, error: Exception | None = None, computed: int | None = None
    ) -> list[Completion]:
        """Let the first step of a lane end after so long, and say what the source is told of."""
        self.backend.ticks += after
        self.backend.opened[lane].steps[0].end(error, computed)
        return self.lanes.completions()

    def held(self, lane: int = 0) -> list[tuple[int, int]]:
        return [(task.candidate.query, task.candidate.layer) for task in self.lanes.lanes[lane].tasks]

    def started(self, lane: int = 0) -> list[tuple[int, int]]:
        return [(run.batch, run.segment) for run in self.backend.opened[lane].steps]

    def _work_of(self, candidate: Candidate, batch: object) -> tuple[Work, bool]:
        return self.works[candidate.query], False

    def _wake(self) -> None:
        self.woken += 1


# One behind another


def test_short_segments_wait_until_they_take_a_while_together() -> None:
    one, ticks = Bench(), SHORT_TICKS // 2 - 1
    for layer in range(4):
        one.give(7, layer, ticks)
        assert one.told() == ([(7, layer)] if layer < 3 else [])  # the last one fills it: nothing goes on from it yet
    assert one.held() == one.started() == [(7, 0), (7, 1), (7, 2), (7, 3)]
    assert not one.lanes.ready()
    (known,) = one.end(after=ticks)
    assert known.candidate.layer == 3 and known.times.compute_end == one.backend.ticks + 3 * ticks
    assert one.lanes.ready()


def test_not_more_than_a_few_segments_wait_however_short_they_are() -> None:
    one = Bench()
    for layer in range(1 + MOST_AHEAD):
        assert one.lanes.ready()
        one.give(7, layer, 1)
        one.told()
    assert not one.lanes.ready() and len(one.held()) == 1 + MOST_AHEAD


def test_the_source_is_told_of_a_segment_that_runs_and_the_next_is_queued_behind_it():
    one = Bench()
    first = one.give(7)
    (known,) = one.lanes.completions()
    assert (known.candidate, known.error, known.aborted) == (first, None, False)
    assert known.times.compute_end == one.backend.ticks + TICKS
    assert one.watched == [] and one.woken == 0
    one.give(7, 1)
    assert one.started() == [(7, 0), (7, 1)]
    assert one.told() == []  # its lane has not come to it
    assert one.lanes.ready() is None
    (known,) = one.end()
    assert (known.candidate.layer, known.times.compute_end) == (1, one.backend.ticks + TICKS)
    assert one.lanes.ready() is not None
    assert [(lane, done.candidate.layer, done.times.compute_end) for lane, done in one.watched] == [
        (0, 0, 1000 + TICKS)
    ]
    assert one.works[7].taken == [0, 1]


def test_without_steps_ahead_there_is_one_at_a_time():
    one = Bench(ahead=0)
    one.give(7)
    assert one.told() == [] and one.lanes.ready() is None
    (done,) = one.end()
    assert done.times.compute_end == one.backend.ticks and len(one.watched) == 1


def test_a_lane_takes_as_many_ahead_as_it_says():
    one = Bench(ahead=3)
    for batch in range(4):
        assert one.lanes.ready() is not None
        one.give(batch)
    assert one.lanes.ready() is None and len(one.started()) == 4


def test_an_exit_and_a_last_segment_are_waited_for():
    one = Bench()
    one.work(7, segments=3, exits=(1,))
    one.give(7)
    assert one.told() == [(7, 0)]
    one.give(7, 1)
    assert one.end() == []  # it has come to the exit, and nobody knows who goes on
    assert [done.candidate.layer for done in one.end()] == [1]
    one.give(7, 2)
    assert one.told() == []
    (done,) = one.end()
    assert done.candidate.layer == 2 and done.times.compute_end == one.backend.ticks
    assert one.works[7].taken == [0, 1, 2]


def test_others_wait_behind_an_exit():
    one = Bench()
    one.work(7, segments=2, exits=(0,))
    one.give(7)
    assert one.told() == [] and one.lanes.ready() is not None
    one.give(8)
    assert one.told() == []
    assert [(done.candidate.query, done.candidate.layer) for done in one.end()] == [(7, 0), (8, 0)]


def test_what_the_batch_says_of_what_it_is_given_is_an_error_and_is_told_once():
    one = Bench()
    one.work(7).refuses = ValueError("no")
    one.give(7)
    (known,) = one.lanes.completions()
    assert known.error is one.works[7].refuses
    assert one.end() == [] and one.lanes.ready() is not None


# Several segments in one step


def test_a_step_of_several_segments_is_told_of_when_it_has_ended_and_another_may_wait_behind_it() -> None:
    one = Bench()
    one.give(7, layers=3, ticks=2 * ABORT_FROM_TICKS)
    assert one.told() == [] and one.lanes.ready() is not None and one.lanes.abortable() == ()
    one.give(8, layers=1)
    (done,) = one.end()
    assert (done.candidate.query, done.layers, done.aborted, one.works[7].taken) == (7, 3, False, [0, 1, 2])


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("computed", [0, 1, 2])
def test_a_step_that_leaves_at_a_gate_has_computed_what_it_says_whether_it_was_asked_or_not(computed, asked) -> None:
    one = Bench()
    one.give(7, layers=3)
    if asked:
        one.lanes.stop(0, 7)
        assert one.works[7].runs[0].stopped
    (left,) = one.end(computed=computed)
    assert (left.layers, left.aborted, left.error) == (computed, True, None)
    assert one.works[7].taken == list(range(computed))
    one.give(7, computed, layers=3 - computed)
    assert [(run.segment, run.segments) for run in one.works[7].runs] == [(0, 3), (computed, 3 - computed)]
    (done,) = one.end()
    assert (done.layers, done.aborted, one.works[7].taken) == (3 - computed, False, [0, 1, 2])


def test_a_stopped_step_that_comes_to_its_end_has_ended_and_a_failing_one_has_failed() -> None:
    one, error = Bench(), ValueError("no")
    one.give(7, layers=2)
    one.lanes.stop(0, 7)
    (done,) = one.end()
    assert (done.layers, done.aborted, done.error) == (2, False, None)
    one.give(8, layers=2)
    (done,) = one.end(error=error)
    assert (done.layers, done.aborted, done.error) == (0, False, error)


# Lanes with memory of their own


def test_a_batch_that_stays_where_it_began_waits_there_though_others_are_idle() -> None:
    one = Bench(lanes=2)
    one.give(7, home=1)
    one.give(8, home=1)
    assert (one.held(0), one.held(1)) == ([], [(7, 0), (8, 0)])
    assert list(one.lanes.rooms()) == [0] and one.lanes.ready() is not None


def test_lanes_that_cannot_compute_are_given_nothing_as_long_as_others_can() -> None:
    one = Bench(lanes=2)
    one.backend.opened[0].able = False
    for batch in range(2):
        assert one.lanes.ready() is not None
        one.give(batch)
    assert len(one.held(1)) == 2 and one.lanes.ready() is None
    one.give(7, home=0)  # what it held there is gone, which its requests hear of
    assert one.held(0) == [(7, 0)]
    one.backend.opened[1].able = False
    assert one.lanes.ready() is not None
    one.give(8)
    assert len(one.held(0)) == 2


# Failures


def test_a_segment_that_fails_is_told_of_with_the_next_one_and_is_seen_as_what_it_was():
    one, error = Bench(), ValueError("no")
    one.give(7)
    assert one.told() == [(7, 0)]
    one.give(7, 1)
    assert one.end(error=error) == []  # its lane came to the next one, which will fail as well
    (done,) = one.end(error=error)
    assert (done.candidate.layer, done.error) == (1, error)
    assert [done.error for _, done in one.watched] == [error, error]
    assert one.works[7].taken == [0] and one.held() == []


def test_others_behind_a_segment_that_fails_go_on():
    one = Bench()
    one.give(7)
    one.told()
    one.give(8)
    (known,) = one.end(error=ValueError("no"))
    assert (known.candidate.query, known.error) == (8, None)


def test_a_worker_that_dies_takes_all_that_lanes_hold_and_every_place_is_free_again():
    two, death = Bench(2), ConnectionError("it died")
    for batch in (1, 2):
        two.work(batch, segments=2)
        two.give(batch)
    assert two.told() == [(1, 0), (2, 0)]
    two.give(1, 1), two.give(2, 1)
    for lane in two.backend.opened:
        for run in list(lane.steps):
            run.end(death)
    failed = two.lanes.completions()
    assert [(done.candidate.query, done.candidate.layer, done.error) for done in failed] == [
        (1, 1, death),
        (2, 1, death),
    ]
    assert len(two.watched) == 4 and two.lanes.rests() == []
    two.give(3), two.give(4)
    assert [two.started(lane) for lane in range(2)] == [[(3, 0)], [(4, 0)]]


def test_a_queued_step_that_cannot_be_started_fails_and_loses_nothing():
    one = Bench()
    one.give(7)
    one.told()
    one.works[8] = broken = Work(8)
    broken.taken = [5]  # so that starting it raises
    one.give(8)
    (failed,) = one.lanes.completions()
    assert (failed.candidate.query, type(failed.error)) == (8, AssertionError)
    assert one.held() == [(7, 0)] and one.lanes.ready() is not None


# Stopping


def test_only_what_the_source_waits_for_is_stopped():
    one = Bench()
    one.give(7)
    one.told()
    one.give(7, 1)
    one.lanes.stop(0, 7)
    first, second = one.backend.opened[0].steps
    assert (first.stopped, second.stopped) == (False, True)
    second.end(InterruptedError("stopped"))
    (done,) = one.lanes.completions()
    assert (done.candidate.layer, done.aborted, done.error) == (1, True, None)
    assert one.end() == []
    assert [(done.candidate.layer, done.aborted) for _, done in one.watched] == [(1, True), (0, False)]


def test_what_is_stopped_while_it_waits_takes_no_time_of_its_lane():
    one = Bench()
    one.give(7)
    one.give(8)
    one.backend.ticks += 30
    one.lanes.stop(0, 8)
    one.backend.opened[0].steps[1].end(InterruptedError("stopped"))
    one.lanes.completions()
    one.end(after=70)
    spans = [(done.times.compute_start, done.times.compute_end) for _, done in one.watched]
    assert spans == [(1030, 1030), (1000, 1100)]
    assert one.lanes.lanes[0].busy_ticks == 100


def test_spans_of_a_lane_do_not_overlap_where_its_device_counts_from_when_it_was_given_them():
    one = Bench()
    one.give(7)
    one.give(8)
    one.end()
    one.backend.opened[0].free_since = 0
    one.end()
    spans = [(done.times.compute_start, done.times.compute_end) for _, done in one.watched]
    assert spans == [(1000, 1000 + TICKS), (1000 + TICKS, 1000 + 2 * TICKS)]
    assert one.lanes.lanes[0].busy_ticks == 2 * TICKS


def test_a_batch_is_not_told_of_beforehand_that_is_being_stopped():
    one = Bench()
    one.give(7)
    one.lanes.stop(0, 7)
    assert one.told() == []
    (done,) = one.end(error=InterruptedError("stopped"))
    assert done.aborted


def test_nothing_waits_behind_a_segment_that_may_be_stopped_and_nobody_goes_on_from_it():
    one = Bench()
    one.give(7, ticks=ABORT_FROM_TICKS)
    assert one.told() == [] and one.lanes.ready() is None
    (running,) = one.lanes.abortable()
    assert running.stoppable and running.rest == ABORT_FROM_TICKS


def test_what_may_be_stopped_and_waits_is_free_when_both_have_ended():
    one = Bench()
    one.give(7)
    long_one = one.give(8, ticks=ABORT_FROM_TICKS)
    one.backend.ticks += 30
    (running,) = one.lanes.abortable()
    assert (running.candidate, running.rest, running.stoppable) == (long_one, TICKS - 30 + ABORT_FROM_TICKS, True)
    assert [rest for _, rest in one.lanes.rests()] == [TICKS - 30, ABORT_FROM_TICKS]
    one.lanes.stop(0, 8)
    assert one.lanes.abortable() == ()
    assert [rest for _, rest in one.lanes.rests()] == [TICKS - 30, 0]


def test_the_rest_of_what_waited_counts_from_when_its_turn_came():
    one = Bench()
    one.give(7)
    one.give(8)
    one.end(after=40)
    one.backend.ticks += 10
    assert [rest for _, rest in one.lanes.rests()] == [TICKS - 10]


# Several lanes


def test_a_batch_goes_on_where_it_runs_and_others_take_what_is_idle():
    two = Bench(2)
    two.give(1)
    two.told()
    two.give(1, 1)
    assert [two.held(lane) for lane in range(2)] == [[(1, 0), (1, 1)], []]
    two.give(2)
    assert two.held(1) == [(2, 0)]


def test_who_finds_no_idle_lane_goes_where_work_ends_first():
    two = Bench(2)
    two.give(1, ticks=500)
    two.give(2, ticks=300)
    two.give(3)
    assert two.held(1) == [(2, 0), (3, 0)]
    two.give(4)
    assert two.held(0) == [(1, 0), (4, 0)]


def test_a_batch_that_goes_on_elsewhere_begins_when_what_it_goes_on_from_has_ended():
    two = Bench(2)
    two.give(1)
    two.told()
    two.give(2), two.give(3)  # on the other lane, and behind the first
    assert [two.held(lane) for lane in range(2)] == [[(1, 0), (3, 0)], [(2, 0)]]
    two.give(1, 1)
    assert two.held(1) == [(2, 0), (1, 1)] and two.started(1) == [(2, 0)]
    two.end(1)
    assert two.started(1) == [] and two.lanes.rests()[-1][1] == TICKS
    assert (1, 1) not in two.told()
    assert (1, 1) in [(done.candidate.query, done.candidate.layer) for done in two.end(0)]
    assert two.started(1) == [(1, 1)]


def test_what_waits_for_another_lane_can_be_stopped_and_those_behind_it_go_on():
    two = Bench(2)
    two.give(1)
    two.told()
    two.give(2), two.give(3)
    two.give(1, 1)
    two.lanes.stop(0, 1)
    two.lanes.stop(0, 1)
    (done,) = [done for done in two.lanes.completions() if done.aborted]
    assert (done.candidate.query, done.candidate.layer) == (1, 1) and two.held(1) == [(2, 0)]
    assert not two.backend.opened[0].steps[0].stopped and two.woken == 1


def test_batches_that_became_one_go_on_when_both_have_ended():
    two = Bench(2)
    two.give(1), two.give(2)
    two.told()
    two.lanes.joined(0, 1, 2)
    two.give(1, 1)
    assert two.held(0) == [(1, 0), (1, 1)] and two.started(0) == [(1, 0)]
    two.end(0)
    assert two.started(0) == []
    two.end(1)
    assert two.started(0) == [(1, 1)]


# More and fewer


def test_a_lane_that_goes_finishes_all_that_it_holds():
    two = Bench(2)
    for batch in range(4):
        two.work(batch, segments=1)
        two.give(batch)
    leaving = two.backend.opened[1]
    two.lanes.resize(1)
    two.end(1)
    assert not leaving.closed and two.lanes.ready() is None
    two.end(1)
    assert leaving.closed and [lane.index for lane in two.lanes.lanes] == [0]
    two.end(0)
    assert two.lanes.ready() is not None


def test_a_batch_leaves_a_lane_that_goes():
    two = Bench(2)
    two.give(1), two.give(2)
    two.told()
    two.lanes.resize(1)
    two.give(2, 1)
    assert two.held(0) == [(1, 0), (2, 1)] and two.started(0) == [(1, 0)]
    two.end(1)
    assert two.started(0) == [(1, 0), (2, 1)] and two.backend.opened[1].closed


def test_closing_says_whether_all_has_ended():
    one = Bench()
    one.give(7)
    one.give(8)
    assert not one.lanes.close(0.0)
    one.end(), one.end()
    assert one.lanes.close(0.0)


# Whatever happens


class Trial:
    """Batches on lanes under random orders and ends; keeps what the source would, and checks it."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.bench = Bench(random.randint(1, 3), random.randint(1, 2))
        self.layers: dict[int, int] = {}
        """The next layer of every batch that is in flight."""
        self.standing: set[int] = set()
        self.issued: Counter[tuple[int, int]] = Counter()
        self.told: Counter[tuple[int, int]] = Counter()

    def issue(self) -> None:
        if self.bench.lanes.ready() is None:
            return
        batch = self.random.choice([*self.standing, len(self.bench.works)])
        if batch not in self.bench.works:
            segments = self.random.randint(1, 5)
            self.bench.work(batch, segments, tuple(self.random.sample(range(segments), self.random.randint(0, 1))))
            self.layers[batch] = 0
        self.standing.discard(batch)
        ticks = self.random.choice([1, SHORT_TICKS // 3, TICKS, TICKS, 3 * TICKS, ABORT_FROM_TICKS])
        self.issued[batch, self.layers[batch]] += 1
        self.bench.give(batch, self.layers[batch], ticks)

    def end_one(self) -> None:
        busy = [lane for lane in self.bench.backend.opened if lane.steps]
        if busy:
            lane = self.random.choice(busy)
            run = self.random.choice([lane.steps[0], *[each for each in lane.steps if each.stopped]])
            self.bench.backend.ticks += self.random.randint(0, 2 * TICKS)
            run.end(InterruptedError("stopped") if run.stopped else None)

    def stop_one(self) -> None:
        if self.layers:
            self.bench.lanes.stop(0, self.random.choice(list(self.layers)))

    def resize(self) -> None:
        self.bench.lanes.resize(self.random.randint(1, 3))

    def account(self) -> None:
        for done in self.bench.lanes.completions():
            batch, layer = done.candidate.query, done.candidate.layer
            self.told[batch, layer] += 1
            assert batch not in self.standing and layer == self.layers[batch]
            work = self.bench.works[batch]
            if not done.aborted and (layer + 1 == work._segments or layer in work._exits):
                assert not any(run.batch == batch for lane in self.bench.backend.opened for run in lane.steps)
            if done.aborted:
                self.standing.add(batch)
            elif layer + 1 == work._segments:
                del self.layers[batch]
            else:
                self.layers[batch] = layer + 1
                self.standing.add(batch)

    def check(self) -> None:
        for lane in self.bench.lanes.lanes:
            assert len(lane.tasks) <= 1 + MOST_AHEAD
            waiting = [task.compute for task in lane.tasks[1:-1]]
            assert len(lane.tasks) <= 1 + lane.device.ahead or sum(waiting) < SHORT_TICKS
            started = [task for task in lane.tasks if task.started]
            assert [run for task in started if (run := task.run)] == lane.device.steps  # type: ignore[attr-defined]
            assert lane.tasks[: len(started)] == started, "one was started before another that stands before it"
        for run in (run for lane in self.bench.backend.opened for run in lane.steps):
            before = [each for each in self.bench.works[run.batch].runs if each.segment < run.segment]
            for each in before:  # it has ended, or stands before it on its lane
                steps = each.lane.steps
                assert each not in steps or (each.lane is run.lane and steps.index(each) < steps.index(run))
        assert sum(self.issued.values()) == sum(self.told.values()) + len(self.layers) - len(self.standing)


@pytest.mark.parametrize("seed", range(60))
def test_every_segment_is_told_of_once_and_in_order_whatever_ends_stops_comes_or_goes(seed):
    trial = Trial(random := Random(seed))
    for _ in range(80):
        action = random.choice([trial.issue] * 5 + [trial.end_one] * 4 + [trial.stop_one, trial.resize])
        action()
        trial.account()
        trial.check()
    while any(lane.steps for lane in trial.bench.backend.opened):
        trial.end_one()
        trial.account()
        trial.check()
    assert trial.issued == trial.told
    assert len(trial.bench.watched) == sum(trial.issued.values())
    assert trial.bench.lanes.rests() == [] and trial.bench.lanes.ready() is not None
    assert set(trial.layers) == trial.standing
    spans: dict[int, int] = {}
    for lane, done in trial.bench.watched:
        if done.times.compute_end > done.times.compute_start:
            assert done.times.compute_start >= spans.get(lane, 0), "two segments at a time on a lane"
            spans[lane] = done.times.compute_end


# The rules that both worlds share


class Held:
    def __init__(self, batch: int, *, stoppable: bool = False, compute: int = TICKS) -> None:
        self.layers = None
        self.batch, self.stoppable, self.compute, self.body = (0, batch), stoppable, compute, 0


class Line:
    def __init__(self, *tasks: Held, rest: int = 0) -> None:
        self.tasks, self.rest = tasks, rest


@pytest.mark.parametrize(
    ("lane", "room"),
    [
        (Line(), True),
        (Line(Held(1)), True),
        (Line(Held(1), Held(2)), False),
        (Line(Held(1), Held(2, compute=1)), True),
        (Line(Held(1), *[Held(2, compute=1)] * MOST_AHEAD), False),
        (Line(Held(1), Held(2, compute=1, stoppable=True)), False),
        (Line(Held(1, stoppable=True)), False),
    ],
)
def test_which_lanes_have_room(lane, room):
    assert has_room(lane, 1) is room


def test_which_lane_takes_the_next_segment():
    own, idle, soon, late = Line(Held(1), rest=9), Line(), Line(Held(2), rest=1), Line(Held(3), rest=5)
    overdue = Line(Held(4), rest=0)

    def chosen(batch: int, *lanes: Line) -> Line:
        return choose_lane((0, batch), lanes, lambda lane: lane.rest)

    assert chosen(1, idle, soon, own) is own
    assert chosen(8, late, overdue, soon, idle) is idle
    assert chosen(8, late, soon) is soon
    assert preceding_tasks(Held(1), idle, [own, idle, soon]) == list(own.tasks)
    assert preceding_tasks(Held(1), own, [own, idle, soon]) == []


# Lanes that are shares of one device


def test_a_segment_goes_to_the_share_that_the_policy_chose() -> None:
    one = Bench(lanes=3, shares=True)
    assert [state.room for state in one.lanes.held()] == [True] * 3
    given = one.give(7, lane=2)
    other = one.give(8, stream=1, lane=1)
    assert [state.holds for state in one.lanes.held()] == [(), (other,), (given,)]
    assert [state.rest for state in one.lanes.held()] == [0, TICKS, TICKS]
    assert sorted(one.told()) == [(7, 0), (8, 0)]
    one.give(7, 1, lane=2)
    assert not one.lanes.held()[2].room and one.lanes.held()[1].room


def test_what_a_stream_has_on_one_share_ends_before_it_goes_on_on_another() -> None:
    one = Bench(lanes=2, shares=True)
    one.give(7, lane=0)
    assert one.told() == [(7, 0)]
    one.give(7, 1, lane=1)
    assert one.started(0) == [(7, 0)] and one.started(1) == []
    one.end(0)
    assert one.started(1) == [(7, 1)]


def test_the_next_batch_of_a_stream_waits_for_the_last_one_on_another_share() -> None:
    one = Bench(lanes=2, shares=True)
    one.work(7, segments=1)
    one.give(7, lane=0)
    one.give(8, lane=1)
    one.give(9, stream=1, lane=1)
    assert one.started(1) == [], "one memory for a stream, and steps of a lane begin in order"
    one.end(0)
    assert one.started(1) == [(8, 0), (9, 0)]


@pytest.mark.parametrize("seed", range(60))
def test_a_body_is_never_on_two_shares_at_once_whichever_streams_its_batches_are_of(seed: int) -> None:
    random, one, segments = Random(seed), Bench(lanes=3, shares=True), 3
    stream_of = {batch: random.randrange(5) for batch in range(8)}
    waiting = dict.fromkeys(stream_of, 0)
    """Batch -> the layer it can go on with; none while that is not known."""
    for batch in stream_of:
        one.work(batch, segments, exits=(1,) if random.random() < 0.3 else ())
    for _ in range(400):
        rooms = [at for at, state in enumerate(one.lanes.held()) if state.room]
        if waiting and rooms and random.random() < 0.6:
            batch = random.choice(list(waiting))
            stream = stream_of[batch]
            one.give(batch, waiting.pop(batch), stream=stream, lane=random.choice(rooms), body=stream // 2)
        elif busy := [lane.index for lane in one.backend.opened if lane.steps]:
            one.backend.ticks += TICKS
            one.backend.opened[random.choice(busy)].steps[0].end()
        waiting.update((batch, layer + 1) for batch, layer in one.told() if layer + 1 < segments)
        on = [{one.works[run.batch].body for run in lane.steps} for lane in one.backend.opened]
        assert sum(map(len, on)) == len(set().union(*on)), "two lanes compute in one memory"
    ended = {(done.candidate.query, done.candidate.layer) for _, done in one.watched}
    assert len(one.watched) == len(ended) == 8 * segments


def test_the_time_in_which_some_lane_computes_is_counted_once() -> None:
    one = Bench(lanes=2, shares=True)
    one.give(7, lane=0)
    one.give(8, stream=1, lane=1)
    one.end(0, after=100)
    assert one.lanes.busy_ticks == 100
    one.end(1, after=50)
    one.backend.ticks += 1000
    assert one.lanes.busy_ticks == 150
    one.give(9, lane=0)
    one.backend.ticks += 7
    assert one.lanes.busy_ticks == 157


def test_elsewhere_nobody_is_shown_what_lanes_hold() -> None:
    one = Bench(lanes=2)
    one.give(7)
    assert one.lanes.held() == ()
