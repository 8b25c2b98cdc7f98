"""Batches that shrink at exits and are filled up: worked by hand, and what holds for every policy."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.hosts import SOFT, Kind, Load, Order, Ran, run_load
from tests.engine.workloads import SERVING
from weft.engine.policies import POLICIES

REFILLING = [name for name in SERVING if POLICIES[name].traits.refills]

TWO = Kind(((10, 20), (12, 24), (14, 28), (16, 32)), exits=(1,))
"""Two segments with an exit between them; each more in a batch adds a fifth."""


def serve(policy: str, *orders: Order, what: Kind = TWO, **options: int) -> Ran:
    return run_load(policy, Load((what,), orders), **options)


def test_there_are_policies_that_refill():
    assert {"lazy-batching", "fluid"} <= set(REFILLING)
    assert not {"adaptive", "serial"} & set(REFILLING)


# One at a time


def test_serial_computes_one_request_after_another_however_many_wait():
    ran = serve("serial", Order(0, 0, 1000), Order(0, 0, 1000, leaves=1), Order(0, 5, 1000))
    assert ran.ends == [30, 40, 70]
    assert {candidate.size for candidate in ran.host.issues} == {1}


# Adaptive batching


def test_adaptive_waits_for_its_share_of_the_deadline():
    ran = serve("adaptive", Order(0, 0, 100), Order(0, 4, 200), timeout=5)
    assert [piece.begin for piece in ran.host.pieces] == [5, 17]
    assert ran.ends == [41, 41]


def test_adaptive_begins_when_the_batch_is_full():
    ran = serve("adaptive", *[Order(0, at, 1000) for at in range(4)], timeout=95)
    assert ran.ends == [3 + 48] * 4


def test_a_batch_shrinks_at_an_exit_and_the_rest_costs_less():
    ran = serve("adaptive", Order(0, 0, 100, leaves=1), Order(0, 0, 100), Order(0, 0, 100, leaves=1), timeout=0)
    assert ran.ends == [14, 34, 14]  # three together up to the exit, then one alone


def test_a_batch_that_all_have_left_is_over():
    ran = serve("adaptive", Order(0, 0, 100, leaves=1), Order(0, 0, 100, leaves=1), Order(0, 3, 100), timeout=0)
    assert ran.ends == [12, 12, 12 + 30]
    assert ran.issues == [(0, 0, 0), (0, 1, 0), (0, 1, 1)]


# Fluid Batching


def test_fluid_fills_a_batch_up_at_an_exit():
    """As the paper draws it (Fig. 6): one left, others wait, so they catch up and all go on together."""
    ran = serve("fluid", Order(0, 0, 500), Order(0, 0, 500, leaves=1), Order(0, 4, 500), Order(0, 5, 500, leaves=1))
    assert ran.ends == [12 + 12 + 24, 12, 12 + 12 + 24, 24]
    assert ran.feed.merges == [(1, 1, 1)]
    assert [candidate.size for candidate in ran.host.issues] == [2, 2, 2]


def test_fluid_goes_on_where_the_oldest_would_be_late():
    # at 10: the newcomer takes 10 up to the exit, both together 24; 10 + 34 is not before 44, but is before 45
    tight = serve("fluid", Order(0, 0, 44), Order(0, 2, 500))
    assert tight.ends == [30, 60] and not tight.feed.merges
    loose = serve("fluid", Order(0, 0, 45), Order(0, 2, 500))
    assert loose.ends == [44, 44] and loose.feed.merges == [(1, 1, 1)]


def test_fluid_never_stops_newcomers_for_others_in_turn():
    three = Kind(((10, 10, 10), (12, 12, 12), (14, 14, 14), (16, 16, 16)), exits=(1, 2))
    ran = serve("fluid", Order(0, 0, 500), Order(0, 11, 500), Order(0, 25, 500), what=three)
    # at 20 the first stands at its second exit; the second runs to there without a stop at the first exit
    layers = [(candidate.query, candidate.layer) for candidate in ran.host.issues]
    assert layers[:4] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert layers[4:6] == [(2, 0), (2, 1)]  # room is left and one waits, so once more
    assert ran.feed.merges == [(1, 1, 2), (2, 1, 2)]


def test_fluid_takes_no_more_than_fit():
    ran = serve("fluid", *[Order(0, 0, 500) for _ in range(4)], *[Order(0, 1, 500) for _ in range(3)])
    assert not ran.feed.merges
    assert [candidate.size for candidate in ran.host.issues] == [4, 4, 3, 3]


def test_newcomers_who_all_leave_on_the_way_make_room_for_others():
    ran = serve("fluid", Order(0, 0, 900), Order(0, 5, 900, leaves=1), Order(0, 15, 900, leaves=1), Order(0, 25, 900))
    assert ran.ends == [10 + 10 + 10 + 10 + 24, 20, 30, 64]


# LazyBatching


def test_lazy_batching_stops_at_any_layer_for_what_waits():
    plain = Kind(((10, 10, 10), (12, 12, 12)))
    ran = serve("lazy-batching", Order(0, 0, 500), Order(0, 5, 500), what=plain)
    assert ran.ends == [10 + 10 + 24, 44]
    assert ran.feed.merges == [(1, 1, 1)]


def test_lazy_batching_prices_a_batch_as_so_many_single_requests():
    plain = Kind(((10, 10, 10), (12, 12, 12)))
    # at 10: 20 are left of the first and 30 of the second, so the first must be due at 60 or later
    assert serve("lazy-batching", Order(0, 0, 59), Order(0, 5, 500), what=plain).ends == [30, 60]
    assert serve("lazy-batching", Order(0, 0, 60), Order(0, 5, 500), what=plain).ends == [44, 44]


def test_lazy_batching_takes_all_that_waits_when_idle_whatever_their_deadlines():
    ran = serve("lazy-batching", *[Order(0, 0, 1) for _ in range(4)], Order(0, 0, 1))
    assert [candidate.size for candidate in ran.host.issues][:1] == [4]


# What holds for every policy


@st.composite
def loads_with_exits(draw: st.DrawFn) -> Load:
    kinds, orders = [], []
    for stream in range(draw(st.integers(1, 2))):
        ticks = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(any))
        more = draw(st.integers(0, 3))
        exits = tuple(sorted(draw(st.sets(st.integers(1, len(ticks) - 1))))) if len(ticks) > 1 else ()
        sizes = range(draw(st.integers(1, 5)))
        kinds.append(Kind(tuple(tuple(t + more * size for t in ticks) for size in sizes), exits=exits))
        for _ in range(draw(st.integers(0, 14))):
            arrival = draw(st.integers(0, 100))
            due = arrival + draw(st.integers(0, 60) | st.sampled_from([1, 1000]))
            leaves = draw(st.sampled_from((*exits, 0)))
            orders.append(Order(stream, arrival, due, strict=draw(st.booleans()), leaves=leaves))
    return Load(tuple(kinds), tuple(orders), lanes=draw(st.integers(1, 2)), late=draw(st.sampled_from(SOFT)))


@pytest.mark.parametrize("policy", SERVING)
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(load=loads_with_exits())
def test_every_request_leaves_once_by_its_own_exit_and_no_batch_is_too_large(policy: str, load: Load) -> None:
    ran = run_load(policy, load)
    for ticket, fates in ran.feed.fates.items():
        assert len(fates) == 1  # and the feed checks that nobody goes past an exit of theirs
        assert ticket.strict or fates[0].what == "served"
    for stream, each in enumerate(load.kinds):
        sizes = [candidate.size for candidate in ran.host.issues if candidate.stream == stream]
        assert all(1 <= size <= len(each.batches) for size in sizes)
    for pieces in ran.batches.values():
        layers = [piece.candidate.layer for piece in pieces if not piece.aborted]
        assert layers == list(range(len(layers)))  # each once, in order
        programs = load.setting.programs
        assert all(
            piece.end - piece.begin == programs[piece.candidate.program].compute[piece.candidate.layer]
            for piece in pieces
            if not piece.aborted
        )
        for this, following in pairwise(pieces):
            assert following.begin >= this.end
    instants = Counter()
    for piece in ran.host.pieces:
        instants.update(range(piece.begin, piece.end))
    assert max(instants.values(), default=0) <= load.lanes


@pytest.mark.parametrize("policy", REFILLING)
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(load=loads_with_exits())
def test_batches_merge_only_where_they_fit_into_one(policy: str, load: Load) -> None:
    ran = run_load(policy, load)
    largest = max(len(each.batches) for each in load.kinds)
    assert all(a + b <= largest for a, b, _ in ran.feed.merges)
