"""Slow, obvious twins of what the package does fast, and the small programs they are tried on.

Nothing here uses the package's arithmetic: the device is played tick by tick, the greedy choice scans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from hypothesis import strategies as st

from weft.devices import Npu
from weft.devices.costs.layer_costs import LayerCost, Profile
from weft.devices.costs.program import Program

Layers = Sequence[tuple[int, int]]
"""Fetch and compute ticks of each layer."""


def program(name: str, *layers: tuple[int, int]) -> Program:
    """A program from the fetch and compute ticks of its layers; a tick is a byte."""
    fetch, compute = tuple(f for f, _ in layers), tuple(c for _, c in layers)
    return Program(name, tuple(f"{name}{i}" for i in range(len(layers))), fetch, compute, fetch)


class Times(NamedTuple):
    """When a layer was fetched and computed."""

    fetch_start: int
    fetch_end: int
    compute_start: int
    compute_end: int


def play(layers: Layers, buffer: int, *, double_buffered: bool = False) -> list[Times]:
    """Issue *layers* in this order and let one tick pass after another.

    In a tick the channel brings in one tick of weights if there is room for it, and the array computes.
    double_buffered: a fetch does not start before the layer ahead of it computes.
    """
    fetch_start: dict[int, int] = {}
    fetch_end: dict[int, int] = {}
    compute_start: dict[int, int] = {}
    compute_end: dict[int, int] = {}
    brought = occupied = now = 0
    while len(compute_end) < len(layers):
        settled = False
        while not settled:  # all that happens at this instant, without time passing
            settled = True
            running, coming = len(compute_end), len(fetch_end)
            if running in compute_start and now == compute_start[running] + layers[running][1]:
                compute_end[running] = now
                occupied -= layers[running][0]
                running, settled = running + 1, False
            if running in fetch_end and running not in compute_start:
                compute_start[running] = now
                settled = False
            may_start = coming == 0 or not double_buffered or coming - 1 in compute_start
            if coming < len(layers) and coming not in fetch_start and may_start:
                fetch_start[coming] = now
                brought, settled = 0, False
            if coming in fetch_start and brought == layers[coming][0]:
                fetch_end[coming] = now
                settled = False
        coming = len(fetch_end)
        if coming in fetch_start and occupied < buffer:
            brought += 1
            occupied += 1
        now += 1
    return [Times(fetch_start[i], fetch_end[i], compute_start[i], compute_end[i]) for i in range(len(layers))]


class Held(NamedTuple):
    """Weights on chip and when the compute that frees them ends."""

    size: int
    done: int


def prefetchable(held: Sequence[Held], size: int, buffer: int, begin: int, end: int) -> int:
    """Ticks of later layers that fit on chip between *begin* and *end*, beside a layer of *size*."""
    brought = 0
    for now in range(begin, end):
        held = [entry for entry in held if entry.size and entry.done > now]
        occupied = size + brought + sum(entry.size for entry in held)
        brought += occupied < buffer
        if occupied == buffer and not held:
            break
    return brought


def greedy_order(programs: Sequence[Program], buffer: int, work: int) -> list[int]:
    """Layerweaver's choices, section III-D, with the clamps of docs/policies.md; stream of each issue."""
    compute_bound = [sum(p.compute) > sum(p.fetch) for p in programs]
    largest = max(size for p in programs for size in p.fetch)
    at = [0] * len(programs)
    t_m = t_c = issued = 0
    held: list[Held] = []
    order: list[int] = []
    while issued < work:
        options = []
        for stream, p in enumerate(programs):
            size, busy = p.fetch[at[stream]], p.compute[at[stream]]
            fetched = _fetch_end(t_m, held, size, buffer)
            done = max(t_c, fetched) + busy
            ahead = prefetchable(held, size, buffer, fetched, t_c)
            inherent = max(0, busy - (buffer - size))
            compute_idle = max(0, fetched - t_c)
            memory_idle = max(0, busy - (buffer - size - ahead)) - inherent
            potential = max(0, largest - (done - fetched))
            total = compute_idle + memory_idle + potential
            options.append((total, inherent > 0, -(done - fetched), stream, compute_idle, memory_idle))
        allowed = options
        if all(option[4] > 0 for option in options):
            allowed = [option for option in options if compute_bound[option[3]]] or options
        elif all(option[5] > 0 for option in options):
            allowed = [option for option in options if not compute_bound[option[3]]] or options
        stream = min(allowed)[3]
        size, busy = programs[stream].fetch[at[stream]], programs[stream].compute[at[stream]]
        t_m = _fetch_end(t_m, held, size, buffer)
        t_c = max(t_c, t_m) + busy
        held = [entry for entry in [*held, Held(size, t_c)] if entry.done > t_m]
        order.append(stream)
        issued += max(size, busy)
        at[stream] = (at[stream] + 1) % len(programs[stream])
    return order


def _fetch_end(now: int, held: Sequence[Held], size: int, buffer: int) -> int:
    """When the last tick of *size* is on chip, bringing in one after another."""
    brought = 0
    while brought < size:
        brought += brought + sum(entry.size for entry in held if entry.done > now) < buffer
        now += 1
    return now


def in_turn(programs: Sequence[Program], order: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(stream, query, layer) of each issue of an order of streams."""
    issued = [0] * len(programs)
    for stream in order:
        query, layer = divmod(issued[stream], len(programs[stream]))
        yield stream, query, layer
        issued[stream] += 1


def largest_lag(
    programs: Sequence[Program], order: Sequence[int], mix: Sequence[float], quota: Sequence[int] | None = None
) -> Fraction:
    """Rounds between the furthest and the least advanced stream, at its largest.

    A round is ``mix[i]`` queries of stream i; a layer counts by its share of the longer of its two times. A stream that
    has issued its *quota* of queries is not behind any more.
    """
    progress = [Fraction(0)] * len(programs)
    worst = Fraction(0)
    behind = set(range(len(programs)))
    gains = [_shares(program, part) for program, part in zip(programs, mix, strict=True)]
    for stream, query, layer in in_turn(programs, order):
        progress[stream] += gains[stream][layer]
        if quota and (query + 1, layer + 1) == (quota[stream], len(programs[stream])):
            behind.remove(stream)
        if behind:
            worst = max(worst, max(progress) - min(progress[other] for other in behind))
    return worst


def _shares(program: Program, per_round: float) -> list[Fraction]:
    """What each layer advances its stream by, in rounds."""
    longer = [max(fetch, compute) for fetch, compute in zip(program.fetch, program.compute, strict=True)]
    return [Fraction(each, sum(longer)) / Fraction(per_round) for each in longer]


def largest_share(programs: Sequence[Program], mix: Sequence[float]) -> Fraction:
    """The most a single layer advances its stream, in rounds."""
    return max(
        Fraction(max(p.work), p.total_work) / Fraction(part) for p, part in zip(programs, mix, strict=True)
    )  # fmt: skip


@st.composite
def scenes(draw: st.DrawFn, streams: int = 4, layers: int = 6, ticks: int = 30) -> tuple[tuple[Program, ...], int]:
    """Random programs and a buffer that holds each of their layers, some of them exactly.

    Layers may cost nothing, but not so many of them that a run of some ticks has thousands of issues.
    """
    buffer = draw(st.integers(1, ticks))
    sizes = st.integers(0, buffer) | st.sampled_from([0, 1, buffer])
    times = st.integers(0, 2 * ticks) | st.sampled_from([0, 1, buffer, ticks])
    pieces = st.lists(st.tuples(sizes, times), min_size=1, max_size=layers)
    pieces = pieces.filter(lambda rows: sum(map(max, rows)) >= 4 * len(rows))
    count = draw(st.integers(1, streams))
    return tuple(program(f"m{i}", *draw(pieces)) for i in range(count)), buffer


BYTES_PER_S = 100e9
"""Bandwidth of the small device: a tick is a byte is 10 ps."""


def small_npu(buffer: int, bandwidth_gb_s: float = BYTES_PER_S / 1e9, **others: float) -> Npu:
    """A device of which only the channel and the weight buffer (*buffer* bytes) matter."""
    return Npu(
        name="small",
        bandwidth_gb_s=bandwidth_gb_s,
        weight_buffer_mib=buffer / 2**20,
        activation_buffer_mib=1,
        clock_mhz=1000,
        array_rows=1,
        array_columns=1,
        weight_rows_per_cycle=1,
        vector_bytes_per_cycle=1,
        **others,
    )


def profile(name: str, *layers: tuple[int, int], batch: int = 1) -> Profile:
    """The profile of a program on the small device; its layers are (bytes, ticks)."""
    costs = (LayerCost(f"{name}{i}", ticks / BYTES_PER_S, size) for i, (size, ticks) in enumerate(layers))
    return Profile(name, "small", batch, tuple(costs))


@st.composite
def profiles(draw: st.DrawFn, streams: int = 4, layers: int = 6, ticks: int = 40) -> tuple[list[Profile], Npu]:
    """Random profiles and a small device; some layers fill its buffer, some are larger and will be cut."""
    buffer = draw(st.integers(2, ticks))
    sizes = st.integers(1, buffer) | st.sampled_from([1, buffer, buffer + 1, 3 * buffer])
    times = st.integers(0, 2 * ticks) | st.sampled_from([0, 1, buffer])
    pieces = st.lists(st.tuples(sizes, times), min_size=1, max_size=layers)
    models = draw(st.lists(pieces, min_size=1, max_size=streams))
    batches = st.integers(1, 16)
    npu = small_npu(buffer, chunk_mib=draw(st.integers(max(2, buffer // 3), buffer)) / 2**20)
    return [profile(f"m{i}", *rows, batch=draw(batches)) for i, rows in enumerate(models)], npu
