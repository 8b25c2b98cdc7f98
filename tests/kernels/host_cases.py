"""Random hosts and workloads of requests for the compiled loop: everything that a measured host may have."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from weft.devices import Host, HostModel
from weft.simulation.requests import Case, prepare
from weft.workloads.requests import Stream, Workload

MS = 1e-3


class ListedRequests(Workload):
    """Open streams arrive at given milliseconds, and requests leave by given exits, handed out in small blocks."""

    times: tuple[tuple[int, ...], ...] = ()
    taken: tuple[tuple[int, ...], ...] = ()
    block: int = 3

    def arrivals(self, index: int, seed: int | None = None) -> Iterator[np.ndarray]:
        for start in range(0, len(self.times[index]), self.block):
            yield np.array(self.times[index][start : start + self.block], float) * MS

    def exits_taken(self, index: int, seed: int | None = None) -> Iterator[np.ndarray]:
        while True:
            yield np.array(self.taken[index], np.int64)


@st.composite
def models(draw: st.DrawFn, names: tuple[str, ...]) -> HostModel:
    count = draw(st.integers(1, 4))
    times_ms = draw(st.lists(st.integers(1, 14), min_size=count, max_size=count))
    more, most = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    factors = st.sampled_from([0.5, 0.9, 1.0, 1.25, 3.0])
    runs = draw(st.integers(0, 3))
    return HostModel(
        segments=tuple(f"s{number}" for number in range(count)),
        max_batch=most,
        times_s={size: tuple((time + more * (size - 1)) * MS for time in times_ms) for size in range(1, most + 1)},
        spread=tuple(tuple(draw(factors) for _ in range(count)) for _ in range(runs)),
        overhead_s=tuple(draw(st.lists(st.sampled_from([0.0, 0.1 * MS, MS]), max_size=3))),
        loses={name: draw(st.sampled_from([0.0, 0.1, 0.3, 0.7])) for name in names if draw(st.booleans())},
        exits=tuple(sorted(draw(st.sets(st.integers(1, count - 1), max_size=2)))) if count > 1 else (),
    )


@st.composite
def streams(draw: st.DrawFn, name: str, model: HostModel) -> Stream:
    closed = draw(st.integers(0, 3)) == 0
    alone_ms = model.total_s(1) / MS
    least = round(2 * alone_ms) if closed else 1  # one that cannot be met makes a closed stream spin
    leave = {"exit_rates": [1 / (len(model.exits) + 1)] * (len(model.exits) + 1)} if model.exits else {}
    batching = {"batch_timeout_ms": draw(st.sampled_from([0, 0, 3, 20]))} if draw(st.booleans()) else {}
    return Stream(
        model=name,
        arrival="closed" if closed else "poisson",
        rate=1,
        deadline_ms=draw(st.integers(least, least + 60) | st.sampled_from([least + 8, 400])),
        priority=draw(st.sampled_from([1, 3, 9])),
        clients=draw(st.integers(1, 4)) if closed else 1,
        think_ms=draw(st.sampled_from([0, 1, 20])),
        **batching,
        **(leave if draw(st.booleans()) else {}),
    )


@st.composite
def host_cases(draw: st.DrawFn) -> Case:
    """Up to four streams on one to three lanes that slow each other down."""
    names = tuple(f"m{number}" for number in range(draw(st.integers(1, 4))))
    measured = {name: draw(models(names)) for name in names}
    lanes = draw(st.integers(1, 3))
    host = Host(
        cores=draw(st.integers(1, 4)),
        lanes=lanes,
        hand_over_s=tuple(draw(st.lists(st.sampled_from([0.0, 0.2 * MS, MS]), max_size=3))),
        step_s=draw(st.sampled_from([0.0, 0.0, 0.1 * MS, 2 * MS])),
        abort_from_s=draw(st.sampled_from([4 * MS, 10 * MS, 1.0])),
        abort_s=draw(st.sampled_from([0.0, MS])),
        models=measured,
    )
    asked = tuple(draw(streams(name, model)) for name, model in measured.items())
    arrivals = st.lists(st.integers(0, 150), max_size=16).map(lambda times: tuple(sorted(times)))
    workload = ListedRequests(
        stream=asked,
        duration_s=0.2,
        warmup_s=draw(st.sampled_from([0.0, 0.025])),
        times=tuple(() if stream.arrival == "closed" else draw(arrivals) for stream in asked),
        taken=tuple(
            tuple(draw(st.lists(st.integers(0, len(model.exits)), min_size=5, max_size=5)))
            for model in measured.values()
        ),
        block=draw(st.integers(1, 5)),
    )
    return prepare(workload, host)
