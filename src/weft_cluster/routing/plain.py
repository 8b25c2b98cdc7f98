"""The plain run of a cluster: an engine for every machine, and a router. ``compiled`` is its twin.

*lowered* is the cluster in ticks (``LoweredCluster``); a node is a machine, a stream a model on a node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from weft.engine import SimulatedNpu, request_engine
from weft.engine.arrivals import DROPPED, Arrivals
from weft.engine.policies.base import NO_DEADLINE
from weft.engine.tickets import Terms, Ticket
from weft.kernels import request_state as k
from weft.simulation.requests import estimates
from weft.simulation.requests.plain import bin_of
from weft_cluster.routing.cluster import ClusterSetting
from weft_cluster.routing.lowered import ClusterTally, LoweredCluster, TickedRequests
from weft_cluster.routing.router import ROUTERS, Estimate, Replica, RoutedRequest


def serve(lowered: LoweredCluster, setting: ClusterSetting, blocks: Iterable[TickedRequests]) -> ClusterTally:
    """Run a cluster until all requests are answered: period by period, first the gates, then the machines."""
    machines = [_Machine(lowered, node, setting.late) for node in range(len(lowered.policies))]
    gates = [_Gate(lowered, setting, len(machines)) for _ in range(setting.gates)]
    requests = enumerate((*request, draws) for block in blocks for *request, draws in zip(*block, strict=True))
    upcoming = next(requests, None)  # number, and (time, model, draws), of the next request to route
    reports = [[machine.report(0) for machine in machines]]
    routed: list[int] = []
    period = 0
    while upcoming is not None:
        _apply_failures(lowered, machines, period)
        for gate in gates:
            gate.update_estimates(period, reports)
        until = (period + 1) * lowered.period
        while upcoming is not None and upcoming[1][0] < until:  # [1][0]: its time
            number, (now, model, draws) = upcoming
            routed.append(gates[number % setting.gates].route(int(model), int(now), tuple(map(float, draws))))
            machines[_node(lowered, routed[-1])].take(routed[-1], int(now))
            upcoming = next(requests, None)
        for machine in machines:
            machine.run(until)
        reports.append([machine.report(until) for machine in machines])
        period += 1
    _apply_failures(lowered, machines, period)
    for machine in machines:
        machine.run(NO_DEADLINE)
    return _make_tally(lowered, machines, routed)


def _node(lowered: LoweredCluster, stream: int) -> int:
    """The node of a stream."""
    return next(node for node, first in enumerate(lowered.begin[1:]) if stream < first)


def _apply_failures(lowered: LoweredCluster, machines: Sequence[_Machine], period: int) -> None:
    """Stop the machines that fail in a period, and start those that come back."""
    for node, begin, end in lowered.failures:
        if begin == period:
            machines[node].stop()
        elif end == period:
            machines[node].start(period * lowered.period)


class _Gate:
    """A gate: a router with the machines' reports, and the work that the gate sent since."""

    def __init__(self, lowered: LoweredCluster, setting: ClusterSetting, machines: int) -> None:
        self._lowered, self._lag, self._gates = lowered, setting.lag, setting.gates
        self._router = ROUTERS[setting.router]
        self._turns = [0] * len(lowered.replicas)
        self._sent: list[list[list[int]]] = []
        """[period][machine]: work sent, ticks of the array and of the channel."""
        self._machines = machines
        self._estimates: list[Estimate] = []

    def update_estimates(self, period: int, reports: Sequence[Sequence[Estimate]]) -> None:
        """Begin a period: take the newest report that has arrived, plus the work sent since; *reports*: by period."""
        newest = max(0, period - self._lag)
        self._estimates = [
            estimate._replace(in_flight=latest.waiting)
            for estimate, latest in zip(reports[newest], reports[period], strict=True)
        ]
        for sent in self._sent[newest:]:
            self._estimates = [
                estimate.carried(compute * self._gates, fetch * self._gates, self._lowered.period)
                for estimate, (compute, fetch) in zip(self._estimates, sent, strict=True)
            ]
        self._sent.append([[0, 0] for _ in range(self._machines)])

    def route(self, model: int, now: int, draws: tuple[float, ...]) -> int:
        """Choose the stream for a request, and count its work."""
        request = RoutedRequest(self._lowered.replicas[model], self._turns[model], (draws[0], draws[1]))
        self._turns[model] += 1
        place = self._router(self._estimates, request, now)
        self._count_sent(request.replicas[place], now)
        return self._lowered.streams[model][place]

    def _count_sent(self, replica: Replica, now: int) -> None:
        self._estimates[replica.machine] = self._estimates[replica.machine].sent(replica, now, self._gates)
        sent = self._sent[-1][replica.machine]
        sent[0] += replica.compute
        sent[1] += replica.fetch


class _RoutedArrivals(Arrivals):
    """A feed of requests that gates append as they route them, in order of time."""

    def __init__(self, terms: Sequence[Terms]) -> None:
        super().__init__(terms, [iter(()) for _ in terms], end=NO_DEADLINE)
        self.coming: deque[tuple[int, int]] = deque()
        """Stream and arrival of each request."""

    def take(self, now: int) -> Iterator[Ticket]:
        while self.coming and self.coming[0][1] <= now:
            yield self._ticket(*self.coming.popleft())

    def next_arrival(self) -> int:
        return self.coming[0][1] if self.coming else NO_DEADLINE

    def exhausted(self) -> bool:
        return not self.coming


class _Machine:
    """A simulated machine: an engine that is lost when the machine fails, and a new one when it comes back."""

    def __init__(self, lowered: LoweredCluster, node: int, late: str) -> None:
        self._policy, self._first, self._late = lowered.policies[node], lowered.begin[node], late
        self._terms = lowered.terms[self._first : lowered.begin[node + 1]]
        self.endings: list[tuple[int, int, int]] = []
        """(stream, arrival, end) of each request; the end of a lost one is DROPPED."""
        self.computed = 0
        self._up = False
        self.start(0)

    def start(self, now: int) -> None:
        """Start an idle engine."""
        self._up = True
        self._feed, self._executor = _RoutedArrivals(self._terms), SimulatedNpu(self._policy.setting)
        self._engine, self._source = request_engine(
            self._policy, self._feed, self._executor, estimates(self._policy), late=self._late
        )
        for term in self._terms:
            self._source.open(term)
        self._executor.idle_until(now)

    def stop(self) -> None:
        """Stop the engine; all requests on the machine are lost."""
        self._up = False
        for stream in range(len(self._terms)):
            queue = self._source.queues[stream]
            tickets = [*queue.waiting, *queue.late, *(ticket for batch in queue.batches for ticket in batch.members)]
            self.endings += [(self._first + stream, ticket.arrival, DROPPED) for ticket in tickets]
        self.finish()
        self._feed = _RoutedArrivals(self._terms)

    def finish(self) -> None:
        """Record the answers and the work of the engine."""
        self.endings += [(self._first + request.stream, request.arrival, request.end) for request in self._feed.answers]
        self.computed += sum(head.compute for head, _ in self._executor.log)

    @property
    def through(self) -> int:
        """When the array's last work ends."""
        return self._executor.ready().array_free

    def take(self, stream: int, now: int) -> None:
        """Queue a request that a gate sent."""
        self._feed.coming.append((stream - self._first, now))

    def run(self, until: int) -> None:
        """Serve until a time; NO_DEADLINE: until all is done. A machine that is down loses its requests."""
        if not self._up:
            self.endings += [(self._first + stream, arrival, DROPPED) for stream, arrival in self._feed.coming]
            self._feed.coming.clear()
        elif until == NO_DEADLINE:
            self._engine.run()
            self.finish()
        else:
            while self._executor.now() < until:
                if not self._engine.step():
                    self._executor.idle_until(min(self._source.next_event(), until))
            self._engine.account()

    def report(self, now: int) -> Estimate:
        """The machine's report: the work ahead of a new request that is on time."""
        if not self._up:
            return Estimate(up=False, as_of=now)
        device = self._executor.ready()
        array, channel, waiting = max(0, device.array_free - now), max(0, device.channel_free - now), 0
        for stream in range(len(self._terms)):
            queue, program = self._source.queues[stream], self._policy.setting.programs[stream]
            array += len(queue.waiting) * program.total_compute
            channel += len(queue.waiting) * program.total_fetch
            waiting += len(queue.waiting) + len(queue.late) + len(queue.batches)
            for batch in queue.batches:
                if not batch.late:
                    array += sum(program.compute[batch.layer :])
                    channel += sum(program.fetch[batch.layer :])
        return Estimate(array, channel, waiting, up=True, as_of=now)


def _make_tally(lowered: LoweredCluster, machines: Sequence[_Machine], routed: list[int]) -> ClusterTally:
    """Count the endings of all machines as the compiled run does, without the warm-up.

    routed: the stream of each request.
    """
    counts, histogram = np.zeros((len(lowered.terms), 10), np.int64), np.zeros(k.BINS, np.int64)
    for stream, arrival, end in (ending for machine in machines for ending in machine.endings):
        if arrival < lowered.warm:
            continue
        row = counts[stream]
        row[k.ARRIVED] += 1
        if end < 0:
            row[k.VIOLATED] += 1
            row[k.DROPPED if end == DROPPED else k.REFUSED] += 1
            continue
        latency = end - arrival
        row[k.COMPLETED] += 1
        row[k.LATENCY_SUM] += latency
        row[k.LATENCY_MAX] = max(row[k.LATENCY_MAX], latency)
        row[k.VIOLATED] += latency > lowered.terms[stream].deadline
        histogram[bin_of(latency)] += 1
    busy = np.array([machine.computed for machine in machines], np.int64)
    through = np.array([machine.through for machine in machines], np.int64)
    return ClusterTally(counts, histogram, busy, through, np.array(routed, np.int64))
