"""Observation of ended segments: statistics, the timeline of the lanes, and learned segment times.

``Recorder`` keeps the last seconds of the lanes, for the dashboard and as a Perfetto trace. The observer does not take
part in scheduling; it influences decisions only through the times it learns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from weft.devices.decoupled import LayerTimes
from weft.engine.engine import Completion
from weft.engine.policies import Policy
from weft.engine.tickets import Batch
from weft.runtime.lanes import LaneExecutor
from weft.serving.gpu_sharing import GpuSharing, LaneRun, ObservedContention
from weft.serving.streams import ServedStream, ServedStreams
from weft.serving.tickets import BatchWork

SPANS = 12_000
"""Spans that are kept, a few megabytes: some seconds of short segments, minutes of long ones."""
OUT_OF_ORDER_NS = 1_000_000_000
"""Limit on how much later a lane may report a span than the others; ``since`` stops searching there."""


class LaneSpan(NamedTuple):
    """A segment on a lane; times in nanoseconds on the clock of the lanes."""

    lane: int
    model: str
    segment: str
    """Number of the segment, and of all segments of the model: 3/8."""
    start_ns: int
    end_ns: int
    predicted_ns: int
    rows: int
    query: int
    """Number of the batch within its stream."""
    outcome: str
    traced: bool = True
    """Whether one of its requests is traced (``client_settings``); the dashboard shows it all the same."""
    parts_ns: tuple[int, ...] = ()
    """Predicted times of the segments from *segment* on that were started together; empty for a single one."""

    def by_segment(self) -> list[LaneSpan]:
        """Return a span for each segment; only the whole time is known, which is divided as predicted."""
        if not self.parts_ns:
            return [self]
        number, _, count = self.segment.partition("/")
        spans, start = [], self.start_ns
        for segment, ticks in enumerate(self.parts_ns, int(number)):
            end = start + (self.end_ns - self.start_ns) * ticks // self.predicted_ns
            part = self._replace(segment=f"{segment}/{count}", start_ns=start, end_ns=end)
            spans.append(part._replace(predicted_ns=ticks, parts_ns=()))
            start = end
        return spans


class Recorder:
    """The last spans; the observer of the lanes appends to ``spans``."""

    def __init__(self, name: Callable[[int], str] = "lane {}".format) -> None:
        """name: returns the name of a lane by its number."""
        self._name = name
        self.spans: deque[LaneSpan] = deque(maxlen=SPANS)

    def since(self, start_ns: int) -> list[LaneSpan]:
        """Return the spans that ended after *start_ns*, oldest first."""
        spans = []
        for span in self._newest_first():  # lanes report a little out of order
            if span.end_ns > start_ns:
                spans.append(span)
            elif span.end_ns < start_ns - OUT_OF_ORDER_NS:
                break
        return spans[::-1]

    def _newest_first(self) -> Iterator[LaneSpan]:
        """Iterate over the last spans, one for each segment."""
        return islice((part for span in reversed(self.spans) for part in reversed(span.by_segment())), SPANS)

    def as_perfetto(self) -> dict[str, Any]:
        """Return the traced spans in Chrome's trace event format, with a track per lane."""
        spans = [span for span in self._newest_first() if span.traced][::-1]
        lanes = sorted({span.lane for span in spans})
        names: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": lane, "name": "thread_name", "args": {"name": self._name(lane)}}
            for lane in lanes
        ]
        return {"displayTimeUnit": "ms", "traceEvents": names + [_event(span) for span in spans]}


def _event(span: LaneSpan) -> dict[str, Any]:
    """Convert a span to a complete event ("X") of Chrome's format, with times in microseconds."""
    return {
        "ph": "X",
        "pid": 1,
        "tid": span.lane,
        "name": span.model,
        "cat": span.outcome,
        "ts": span.start_ns / 1e3,
        "dur": (span.end_ns - span.start_ns) / 1e3,
        "args": {
            "segment": span.segment,
            "rows": span.rows,
            "query": span.query,
            "predicted_us": span.predicted_ns / 1e3,
            "outcome": span.outcome,
        },
    }


class SegmentObserver:
    """Counts ended segments and learns their times; on the engine's thread."""

    def __init__(
        self,
        policy: Policy,
        lanes: LaneExecutor,
        streams: ServedStreams,
        recorder: Recorder,
        sharing: GpuSharing | None,
    ) -> None:
        """policy: the current policy; if it refills batches, the learned times include the gap between segments.

        recorder: gets a span per segment. sharing: learns contention; None if models do not share a GPU.
        """
        self.policy = policy
        self._lanes, self._streams, self._recorder, self._sharing = lanes, streams, recorder, sharing
        # by lane: the batch of the last segment, and when that segment ended
        self._last_batch: dict[int, Batch] = {}
        self._last_end: dict[int, int] = {}
        self._hand_overs = self._hand_over_ns = 0  # number and sum of the gaps in ``hand_over_s``

    @property
    def hand_over_s(self) -> float:
        """Mean time from the end of a segment to the start of the next of the same batch on the same lane."""
        return self._hand_over_ns / self._hand_overs / 1e9 if self._hand_overs else 0.0

    def ended(self, lane: int, completion: Completion) -> None:
        """Count a segment, or several that were started together, add it to the timeline, and learn its time."""
        candidate, times, work, aborted, error = (
            completion.candidate, completion.times, completion.work, completion.aborted, completion.error,
        )  # fmt: skip
        assert isinstance(work, BatchWork)
        if aborted and completion.layers is not None:
            if not completion.layers:  # it was revoked before it began
                return
            aborted = False
        stream, batch = work.stream, work.batch
        if not batch.ended:
            self._note_hand_over(lane, batch, times)
        self._last_end[lane] = times.compute_end
        took = times.compute_end - times.compute_start
        work.compute_ns += took
        program, layers = self._streams.programs[candidate.program], completion.layers
        expected = program.compute[candidate.layer : candidate.layer + layers] if layers else (candidate.compute,)
        span = LaneSpan(
            lane,
            stream.model.name,
            f"{candidate.layer + 1}/{len(program)}",
            times.compute_start,
            times.compute_end,
            sum(expected),
            candidate.size * stream.rows,
            candidate.query,
            "aborted" if aborted else "failed" if error else "done",
            any([ticket.traced for ticket in work.tickets]),
            expected if len(expected) > 1 else (),
        )
        self._recorder.spans.append(span)
        if aborted:
            for model in work.rows_by_model():
                model.statistics.aborts += 1
        elif not error:
            self._learn(lane, completion, work, took)

    def _learn(self, lane: int, completion: Completion, work: BatchWork, took: int) -> None:
        """Count a computed segment for its models, and learn the time *took*, corrected by contention on a GPU."""
        candidate, stream = completion.candidate, work.stream
        # A policy that refills makes small batches, and the gap between their segments is part of their cost.
        gap_ticks = round(self.hand_over_s * 1e9) if self.policy.traits.refills else 0
        contention = self._observe_contention(lane, completion, stream) if self._sharing else None
        expected_ticks = round(candidate.compute / contention.speed) if contention else candidate.compute
        learns = not completion.aborted  # the time of a batch that left includes what it takes to leave
        error_ticks = abs(took + gap_ticks - expected_ticks) if stream.measured and learns else 0
        segment_rows = max(1, candidate.size * stream.rows)
        for model, rows in work.rows_by_model().items():  # requests may have joined the batch while it was computed
            model_rows = min(rows, segment_rows)
            model.statistics.computed(segment_rows, model_rows, took_ns=took, error_ns=error_ticks)
            if self._sharing:
                model.statistics.shares.total_ns[self._sharing.name(lane)] += took * model_rows // segment_rows
        if not learns:
            return
        if contention is None or contention.alone:
            self._streams.learn(stream, candidate, took, gap_ticks, layers=completion.layers)
        elif not stream.measured:  # beside other segments only the first observation counts, at its speed alone
            self._streams.learn(stream, candidate, round(took * contention.speed), layers=completion.layers)

    def _observe_contention(self, lane: int, completion: Completion, stream: ServedStream) -> ObservedContention:
        """Return how segments on other lanes, which are shares of a GPU, slowed a segment down."""
        assert self._sharing
        candidate, times, now = completion.candidate, completion.times, self._lanes.now()
        running = [
            LaneRun(other.index, other.task.candidate.program, other.task.began, now)
            for other in self._lanes.lanes
            if other.task and other.task.began is not None
        ]
        expected = candidate.compute if stream.measured and not completion.aborted else None
        run = LaneRun(lane, candidate.program, times.compute_start, times.compute_end)
        return self._sharing.observe(run, expected, running)

    def _note_hand_over(self, lane: int, batch: Batch, times: LayerTimes) -> None:
        """Record the gap between two segments of a batch on a lane, or that *batch* preempted the lane's last batch."""
        previous, self._last_batch[lane] = self._last_batch.get(lane), batch
        if previous is batch:
            self._hand_overs += 1
            self._hand_over_ns += times.compute_start - self._last_end[lane]
        elif previous is not None and not previous.ended:
            self._note_preemption(lane, previous, batch)

    def _note_preemption(self, lane: int, previous: Batch, batch: Batch) -> None:
        """Count a preemption of *previous* by *batch* on a lane.

        Not if the first batch continues on another lane, or waits until the second one can be merged into it.
        """
        stream = previous.members[0].stream
        if previous.running and not self._lanes.holds(lane, (stream, previous.query)):
            return  # continues on another lane
        if self.policy.traits.refills and stream == batch.members[0].stream:
            return  # waits for the requests of *batch* to catch up and join
        if isinstance(previous.work, BatchWork):
            for model in previous.work.rows_by_model():
                model.statistics.preemptions += 1
