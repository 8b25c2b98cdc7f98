"""What a compiled cluster keeps, as arrays; machines keep what ``request_state`` says. Times are ticks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.kernels.request_state import Bools, Ints

Floats = npt.NDArray[np.float64]

SLACK, TWO_CHOICES, TWO_IN_FLIGHT, TWO_AGED, RANDOM, ROUND_ROBIN = range(6)
"""Routers."""
WORK_ARRAY, WORK_CHANNEL, WAITING, UP = range(4)
"""Columns of a report."""
IN_FLIGHT = UP
"""What gates know of a machine in the place of that."""
PERIOD, REQUEST, NUMBER = range(3)
"""Columns of ``ClusterState.at``."""


class ClusterTables(NamedTuple):
    """What stays the same: streams are models on machines, those of a machine beside each other."""

    first: Ints
    """(models + 1): where the streams of each model begin in the next three."""
    stream: Ints
    """Streams, model by model."""
    until: Floats
    """Up to where the share of each reaches, of its model's requests."""
    machine: Ints
    """(streams): where it is."""
    begin: Ints
    """(machines + 1): the first stream of each machine."""
    compute: Ints
    """(streams): what gates take a request to need of the array..."""
    fetch: Ints
    """... of the channel..."""
    besides: Ints
    """... and on the way and besides."""
    rest_compute: Ints
    """Of every layer of the programs: what is left of the array's work from there on..."""
    rest_fetch: Ints
    """... and of the channel's."""
    buffer: Ints
    """(machines): ticks that a machine may be given ahead."""
    largest: Ints
    """(machines): its longest fetch."""
    failures: Ints
    """(failures, 3): machine, and the periods from which and until which it is down."""


class ClusterRules(NamedTuple):
    """How gates route, and what they know."""

    router: int
    gates: int
    period: int
    lag: int
    """How many periods a report is old when it is first used."""


class ClusterState(NamedTuple):
    """What gates know and how far the run is; machines have a ``LoopState``."""

    at: Ints
    """The period that comes next, the first request of the block that was not routed, and how many came before it."""
    reports: Ints
    """(lag + 1, machines, 4): a ring of reports, by period."""
    sent: Ints
    """(gates, lag + 1, machines, 2): work that a gate sent in each period, a ring."""
    ahead: Ints
    """(gates, machines, 4): array and channel work before a new request, requests there, and those in flight."""
    as_of: Ints
    """(gates, machines): since when."""
    up: Bools
    """(machines): whether it runs."""
    turns: Ints
    """(gates, models): requests of each model that a gate has seen."""


class ClusterRequests(NamedTuple):
    """A block of requests in order, and room to sort them by stream."""

    time: Ints
    model: Ints
    draws: Floats
    """(requests, 2): for routers that draw lots."""
    routed: Ints
    """(requests): the stream that each went to."""
    by_stream: Ints
    """Times of a period's requests, stream by stream."""
    many: Ints
    """(streams): how many of a period's requests came to each."""
    known: Ints
    """(streams, 2): where those begin and end in ``by_stream``."""
