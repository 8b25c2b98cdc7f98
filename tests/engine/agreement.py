"""Random loads, and the check that the server and the simulator give the same requests the same fates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st

from tests.engine.hosts import MS, Kind, Load, Machine, Order, run_load
from weft.engine.lateness import SOFT
from weft.engine.steering import ExitShares, Steering
from weft.runtime.lanes import ABORT_FROM_TICKS

TICK = MS
"""Ticks of the simulated host are milliseconds of the server, so that segments are worth a lane."""

LONG_MS = ABORT_FROM_TICKS // MS


def served_by_machine(monkeypatch, policy: str, load: Load) -> Machine:
    """The same requests at the same instants, through the server's dispatcher and its real threads."""
    lanes = {"lanes": load.lanes, "ahead": load.ahead, "apart": load.apart}
    machine = Machine(monkeypatch, policy, **lanes, late=load.late, most_waiting=load.places)
    try:
        models = [
            machine.model(
                *each.batches,
                name=f"m{index}",
                batch_timeout_ms=each.timeout,
                exits=each.exits,
                steering=each.steering,
                queue_size=each.places,
                gated=load.gated,
            )
            for index, each in enumerate(load.kinds)
        ]
        for order in load.orders:

            def send(order: Order = order) -> None:
                machine.offer(
                    models[order.stream],
                    order.due - order.arrival,
                    priority=order.priority,
                    strict=order.strict,
                    sure=order.sure or None,
                )

            machine.at(order.arrival, send)
        machine.run()
    finally:
        machine.close()
    return machine


def scaled(load: Load) -> Load:
    """The load in the server's ticks."""
    kinds = tuple(
        replace(
            each, batches=tuple(tuple(t * TICK for t in ticks) for ticks in each.batches), timeout=each.timeout * TICK
        )
        for each in load.kinds
    )
    start = 1_000 * MS  # where the machine's clock starts
    orders = tuple(
        order._replace(arrival=start + order.arrival * TICK, due=start + order.due * TICK) for order in load.orders
    )
    return replace(load, kinds=kinds, orders=orders)


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    """A model: some have segments long enough to be stopped, some have exits that are steered, some short queues."""
    long_one = draw(st.integers(0, 3)) == 0
    ticks = draw(st.lists(st.integers(*((LONG_MS, 60) if long_one else (1, LONG_MS - 4))), min_size=1, max_size=4))
    sizes, more = range(draw(st.integers(1, 3))), draw(st.integers(0, 1))
    exits = tuple(sorted(draw(st.sets(st.integers(1, len(ticks) - 1), max_size=2)))) if len(ticks) > 1 else ()
    floor = draw(st.sampled_from([None, 0.25, 0.5]))
    return Kind(
        tuple(tuple(t + more * size for t in ticks) for size in sizes),
        draw(st.sampled_from([0, 0, 3, 20])),
        exits,
        Steering(0.75, floor) if exits else None,
        draw(st.sampled_from([256, 256, 2])),
    )


@st.composite
def shared_loads(draw: st.DrawFn) -> Load:
    """Streams are numbered in the order in which they first have a request, as a server numbers them."""
    models = draw(st.lists(kinds(), min_size=1, max_size=4))
    strict = draw(st.sampled_from([st.just(False), st.just(True), st.booleans()]))
    one = st.tuples(
        st.integers(0, len(models) - 1),
        st.integers(0, 120),
        st.integers(1, 150),
        st.sampled_from([1, 3, 9]),
        strict,
        st.tuples(*[st.integers(0, 64).map(lambda n: n / 64)] * 2),
    )
    orders = sorted(draw(st.lists(one, min_size=1, max_size=16)), key=lambda each: each[1])
    numbers: dict[int, int] = {}
    for stream, *_ in orders:
        numbers.setdefault(stream, len(numbers))
    return Load(
        tuple(models[stream] for stream in numbers),
        tuple(
            Order(numbers[model], at, at + allowed, priority, strict, sure=sure[: len(models[model].exits)])
            for model, at, allowed, priority, strict, sure in orders
        ),
        lanes=draw(st.integers(1, 3)),
        late=draw(st.sampled_from(SOFT)),
        abortable=frozenset(numbers[s] for s in numbers if min(map(min, models[s].batches)) >= LONG_MS),
        places=draw(st.sampled_from([4096, 4096, 5])),
    )


def assert_same_fates(monkeypatch: pytest.MonkeyPatch, policy: str, load: Load) -> None:
    """Listed requests have the same fates in both worlds."""
    monkeypatch.setattr(
        ExitShares, "count_exit", lambda *_: False
    )  # a server learns where samples leave; a simulation is told
    simulated = run_load(policy, scaled(load))
    machine = served_by_machine(monkeypatch, policy, load)
    assert machine.issues == simulated.issues
    assert [(FATES[sent.fate], machine.start + sent.replies[0][0]) for sent in machine.sent] == simulated.fates


FATES = {"served": "served", "expired": "dropped", "unmeetable": "refused", "queue_full": "refused"}
"""What a client of the server is told, and what became of its request."""
