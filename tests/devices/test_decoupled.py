"""The decoupled NPU worked by hand: two clocks, one buffer, whole ticks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.naive import Held, in_turn, play, scenes, small_npu
from tests.engine.naive import prefetchable as naive_prefetchable
from weft.base.errors import DeviceError, ProfileError
from weft.devices import Npu, load_npu
from weft.devices.costs.layer_costs import LayerCost, Profile
from weft.devices.costs.program import Clock, lower
from weft.devices.decoupled import DeviceClocks, LayerTimes, Resident, fetch_end, issue, prefetchable

MIB = 2**20


def device(bandwidth_gb_s: float = 100.0, buffer_bytes: int = 100, **others: float) -> Npu:
    return small_npu(buffer_bytes, bandwidth_gb_s, **others)


def issued(buffer: int, *layers: tuple[int, int]) -> list[LayerTimes]:
    """Times of layers (fetch, compute) issued one after another to a fresh device."""
    state, times = DeviceClocks(), []
    for fetch, compute in layers:
        state, when = issue(state, fetch, compute, buffer)
        times.append(when)
    return times


# Issuing


def test_a_lone_layer_is_fetched_and_then_computed():
    assert issued(100, (30, 20)) == [LayerTimes(0, 30, 30, 50)]


def test_the_next_fetch_runs_under_this_compute():
    assert issued(100, (30, 20), (10, 5)) == [LayerTimes(0, 30, 30, 50), LayerTimes(30, 40, 50, 55)]


def test_the_array_waits_for_weights_that_come_late():
    assert issued(100, (30, 5), (40, 5)) == [LayerTimes(0, 30, 30, 35), LayerTimes(30, 70, 70, 75)]


def test_a_full_buffer_stalls_the_fetch_until_weights_are_freed_and_it_goes_on():
    # 60 of 100 are taken until 160: 40 of the next 50 come in by 100, the last 10 from 160 on
    first, second = issued(100, (60, 100), (50, 1))
    assert first == LayerTimes(0, 60, 60, 160)
    assert second == LayerTimes(60, 160 + 10, 170, 171)


def test_a_fetch_may_stall_more_than_once():
    # buffer 10: 4 + 4 resident until 54 and 104; 2 of 10 by 10, 4 more after 54, the last 4 after 104
    times = issued(10, (4, 50), (4, 50), (10, 1))
    assert times[:2] == [LayerTimes(0, 4, 4, 54), LayerTimes(4, 8, 54, 104)]
    assert times[2] == LayerTimes(8, 104 + 4, 108, 109)


def test_an_exact_fit_does_not_wait_as_the_strict_comparison_of_the_printed_code_would():
    # 10 - 4 = 6 free at once and 4 freed at 54 hold a layer of 10 exactly; the layer behind ends at 104
    state = DeviceClocks(8, 104, 54, (Resident(4, 54), Resident(0, 104)))
    assert fetch_end(state, 10, 10, 8) == 54 + 4
    # exactly what is free: no waiting either
    assert fetch_end(state, 6, 10, 8) == 8 + 6


def test_weights_are_freed_when_their_compute_ends_and_not_when_it_starts():
    full = DeviceClocks(10, 100, 10, (Resident(10, 100),))
    assert fetch_end(full, 1, 10, 10) == 100 + 1
    assert full.free(10) == 0
    after, _ = issue(full, 1, 5, 10)
    assert after.resident == (Resident(1, 106),)


def test_weights_whose_compute_ends_as_a_fetch_ends_are_gone_by_then():
    state, _ = issue(DeviceClocks(), 10, 20, 40)
    state, when = issue(state, 20, 7, 40)
    assert when == LayerTimes(10, 30, 30, 37)  # the first layer computes until 30
    assert state.resident == (Resident(20, 37),)
    assert state.free(40) == 40 - 20


def test_a_layer_that_needs_no_weights_passes_a_full_buffer():
    full = DeviceClocks(10, 100, 10, (Resident(10, 100),))
    assert issue(full, 0, 5, 10)[1] == LayerTimes(10, 10, 100, 105)


def test_a_layer_that_needs_no_compute_frees_its_weights_as_they_arrive():
    state, when = issue(DeviceClocks(), 10, 0, 10)
    assert when == LayerTimes(0, 10, 10, 10)
    assert state.resident == ()
    assert state.free(10) == 10


def test_a_fetch_told_to_wait_starts_then():
    state = DeviceClocks(channel_free=10, array_free=40, array_began=20, resident=(Resident(10, 40),))
    assert issue(state, 5, 5, 100, not_before=20)[1] == LayerTimes(20, 25, 40, 45)
    assert issue(state, 5, 5, 100, not_before=3)[1] == LayerTimes(10, 15, 40, 45)


def test_the_distance_is_how_far_the_channel_is_ahead():
    state, _ = issue(DeviceClocks(), 30, 100, 1000)
    assert state.distance == 130 - 30
    state, _ = issue(state, 20, 7, 1000)
    assert state.distance == 137 - 50


@settings(max_examples=30, derandomize=True, deadline=None)
@given(scene=scenes(streams=1, layers=10))
def test_issuing_equals_a_device_played_tick_by_tick(scene):
    (program,), buffer = scene
    layers = list(zip(program.fetch, program.compute, strict=True)) * 2
    assert [tuple(when) for when in issued(buffer, *layers)] == [tuple(when) for when in play(layers, buffer)]


# What could still be fetched


def test_the_channel_could_fetch_until_the_array_is_free():
    # on chip at 10, array free at 30, room for all that comes in between
    assert prefetchable(DeviceClocks(0, 30), 10, 100, 10) == 20


def test_prefetching_stops_where_the_buffer_is_full():
    state = DeviceClocks(10, 100, 40, (Resident(60, 100),))
    assert prefetchable(state, 20, 100, 30) == 100 - 60 - 20


def test_prefetching_goes_on_as_layers_finish():
    state = DeviceClocks(10, 100, 40, (Resident(60, 50), Resident(10, 100)))
    # room for 10 by 40, then 60 freed at 50: 50 more until 100
    assert prefetchable(state, 20, 100, 30) == 10 + 50


def test_nothing_can_be_prefetched_where_the_array_already_waits():
    assert prefetchable(DeviceClocks(0, 30), 40, 100, 40) == 0


@settings(max_examples=30, derandomize=True, deadline=None)
@given(scene=scenes(streams=2, layers=8), pick=st.integers(0, 15))
def test_prefetchable_equals_a_count_tick_by_tick(scene, pick):
    programs, buffer = scene
    state = DeviceClocks()
    order = [i % len(programs) for i in range(12)]
    for stream, _, layer in in_turn(programs, order):
        size = programs[pick % len(programs)].fetch[pick % len(programs[pick % len(programs)])]
        fetched = fetch_end(state, size, buffer, state.channel_free)
        held = [Held(*entry) for entry in state.resident]
        assert prefetchable(state, size, buffer, fetched) == naive_prefetchable(
            held, size, buffer, fetched, state.array_free
        )
        state, _ = issue(state, programs[stream].fetch[layer], programs[stream].compute[layer], buffer)


# Ticks


def test_a_tick_is_a_byte_on_a_fast_channel():
    clock = Clock.of(device(100.0, 64))
    assert (clock.ticks_per_byte, clock.buffer, clock.tick_s) == (1, 64, 1e-11)
    for preset in ("tpuv3-like", "nnpi-like", "weaver-plus"):
        assert Clock.of(load_npu(preset)).ticks_per_byte == 1


def test_a_tick_is_a_fraction_of_a_byte_on_a_slow_channel():
    clock = Clock.of(device(1.0, 64))  # a byte takes 1 ns, a tick at most 20 ps
    assert (clock.ticks_per_byte, clock.buffer) == (50, 64 * 50)
    assert clock.tick_s == pytest.approx(2e-11)
    assert clock.ticks(1e-6) == 50_000


def test_a_time_is_rounded_to_the_nearest_tick():
    clock = Clock.of(device(100.0))
    assert [clock.ticks(ticks * 1e-11) for ticks in (0.4, 0.6, 1.4, 1000.0)] == [0, 1, 1, 1000]


@settings(max_examples=25, derandomize=True, deadline=None)
@given(bandwidth=st.floats(1e-3, 1e4), seconds=st.floats(0, 1))
def test_rounding_a_time_loses_at_most_half_a_tick_of_at_most_twenty_picoseconds(bandwidth, seconds):
    clock = Clock.of(device(bandwidth))
    assert clock.tick_s <= 2e-11 * (1 + 1e-9)
    assert abs(clock.ticks(seconds) * clock.tick_s - seconds) <= 0.5 * clock.tick_s + 1e-15


# Programs


def profile(*layers: tuple[float, int]) -> Profile:
    costs = tuple(LayerCost(f"l{i}", seconds, size) for i, (seconds, size) in enumerate(layers))
    return Profile("m", "small", 1, costs)


def test_lowering_counts_sizes_and_times_in_ticks():
    program = lower(profile((5e-10, 30), (2e-10, 40)), device(100.0))
    assert (program.fetch, program.compute, program.weight_bytes) == ((30, 40), (50, 20), (30, 40))
    assert (program.total_fetch, program.total_compute, program.largest_fetch) == (70, 70, 40)
    assert (program.work, program.total_work) == ((50, 40), 90)
    assert not program.compute_bound
    slow = lower(profile((5e-10, 30)), device(1.0))
    assert (slow.fetch, slow.compute, slow.weight_bytes) == ((30 * 50,), (25,), (30,))


def test_a_layer_as_large_as_the_buffer_stays_whole():
    assert lower(profile((1e-9, 100)), device(buffer_bytes=100)).names == ("l0",)


def test_a_layer_larger_than_the_buffer_streams_in_chunks_that_keep_its_bytes_and_its_time():
    program = lower(profile((1.3e-9, 101), (1e-10, 5)), device(buffer_bytes=100))  # chunks of at most 100 // 8 = 12
    assert program.names[0] == "l0[1/9]"
    assert len(program) == 9 + 1
    assert max(program.fetch[:9]) == 12
    assert sum(program.weight_bytes) == 101 + 5
    assert abs(sum(program.compute[:9]) - 130) <= 9 / 2  # each chunk rounds to a tick


@settings(max_examples=25, derandomize=True, deadline=None)
@given(size=st.integers(1, 4000), ticks=st.integers(0, 5000), buffer=st.integers(2, 300), chunk=st.integers(1, 400))
def test_chunks_fit_the_buffer_and_add_up_whatever_the_sizes(size, ticks, buffer, chunk):
    npu = device(buffer_bytes=buffer, chunk_mib=max(1e-6, chunk / MIB))
    program = lower(profile((ticks * 1e-11, size)), npu)
    assert sum(program.fetch) == size
    assert len(program) == (1 if size <= buffer else -(-size // min(chunk, buffer)))
    assert max(program.fetch) <= buffer
    assert abs(program.total_compute - ticks) <= len(program) / 2


def test_a_layer_that_would_need_endless_chunks_is_refused_with_the_way_out():
    with pytest.raises(DeviceError, match=r"'l0' has 1000000 weight bytes .* 83334 chunks of 12 bytes; enlarge"):
        lower(profile((1e-9, 10**6)), device(buffer_bytes=100))


def test_a_model_that_takes_no_measurable_time_is_refused():
    with pytest.raises(ProfileError, match="m: no layer takes a measurable time on small"):
        lower(profile((1e-15, 0)), device())
