"""What every policy obeys, whatever it decides. A policy gets these tests by being in ``POLICIES``."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.naive import BYTES_PER_S, Times, in_turn, largest_lag, play, profiles
from weft.devices import Npu
from weft.devices.costs.layer_costs import Profile
from weft.devices.costs.program import Program
from weft.engine.policies import POLICIES, make_policy
from weft.engine.policies.bound import demand_of, mix_prices, prices
from weft.reports.trace import Span, read_trace, write_trace
from weft.simulation import Run, simulate
from weft.simulation.saturated import make_setting
from weft.workloads import Saturated


class Scene(NamedTuple):
    """A run and all that went into it."""

    policy: str
    models: list[Profile]
    npu: Npu
    workload: Saturated
    programs: tuple[Program, ...]
    run: Run

    @property
    def spans(self) -> list[Span]:
        return list(self.run.trace.spans)

    @property
    def times(self) -> list[Times]:
        """Of every span, in ticks (bytes of the channel)."""
        return [Times(*(ticks(seconds) for seconds in span[3:7])) for span in self.spans]

    @property
    def buffer(self) -> int:
        return self.npu.weight_buffer_bytes


def ticks(seconds: float) -> int:
    whole = round(seconds * BYTES_PER_S)
    assert whole == pytest.approx(seconds * BYTES_PER_S, abs=1e-6)
    return whole


@st.composite
def workloads(draw: st.DrawFn, streams: int) -> Saturated:
    rounds = draw(st.integers(1, 3))
    mix = draw(st.none() | st.tuples(*(st.sampled_from([1.0, 2.0, 3.0, 1.5]) for _ in range(streams))))
    return Saturated(rounds, mix, draw(st.sampled_from([0.05, 0.25, 1.0])))


@st.composite
def scenes(draw: st.DrawFn, policy: str) -> Scene:
    models, npu = draw(profiles(streams=4, layers=5))
    workload = draw(workloads(len(models)))
    run = simulate(models, npu, policy, workload)
    programs = make_setting(models, npu, workload, pieces=run.report.pieces).programs
    return Scene(policy, models, npu, workload, programs, run)


Claim = Callable[[Scene], None]
CLAIMS: list[Claim] = []
"""What is true of every run; a scene takes longer to run than to be looked at, so all look at the same ones."""


def claim(check: Claim) -> Claim:
    CLAIMS.append(check)
    return check


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=12, derandomize=True, deadline=None)
@given(data=st.data())
def test_what_is_claimed_of_every_run_is_true(policy, data):
    scene = data.draw(scenes(policy))
    for check in CLAIMS:
        check(scene)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=5, derandomize=True, deadline=None)
@given(data=st.data())
def test_a_run_again_a_plain_run_and_a_trace_read_again_are_the_same_to_the_last_bit(tmp_path_factory, policy, data):
    scene = data.draw(scenes(policy))
    for compiled in (True, False):
        again = simulate(scene.models, scene.npu, scene.policy, scene.workload, compiled=compiled)
        assert list(again.trace.spans) == scene.spans
        assert again.report == scene.run.report
        assert again.trace.settings == scene.run.trace.settings
    path = tmp_path_factory.getbasetemp() / f"{policy}.json"
    write_trace(scene.run.trace, path)
    read = read_trace(path)
    assert list(read.spans) == scene.spans
    assert (read.streams, read.settings) == (scene.run.trace.streams, scene.run.trace.settings)
    assert read.makespan_s == scene.run.trace.makespan_s


@claim
def every_layer_is_issued_once_and_in_order_query_after_query(scene):
    for index, program in enumerate(scene.programs):
        mine = [(span.query, span.layer, span.weight_bytes) for span in scene.spans if span.stream == index]
        assert mine == [
            (i // len(program), program.names[i % len(program)], program.weight_bytes[i % len(program)])
            for i in range(len(mine))
        ]
        assert all(span.model == program.model for span in scene.spans if span.stream == index)


@claim
def the_run_ends_when_its_work_is_issued_and_not_a_layer_later(scene):
    done = [scene.programs[stream].work[layer] for stream, _, layer in issues(scene)]
    if scene.workload.mix is None:
        work = scene.workload.rounds * sum(p.total_work for p in scene.programs)
        assert sum(done) >= work > sum(done) - last_that_costs(done)
    else:
        rarest = min(scene.workload.mix)
        quota = [max(1, round(part / rarest * scene.workload.rounds)) for part in scene.workload.mix]
        assert [stream.queries for stream in scene.run.report.streams] == quota
        assert len(done) == sum(count * len(p) for count, p in zip(quota, scene.programs, strict=True))


def issues(scene: Scene) -> list[tuple[int, int, int]]:
    return list(in_turn(scene.programs, scene.run.trace.stream.tolist()))


def last_that_costs(done: list[int]) -> int:
    return next(work for work in reversed(done) if work)


@claim
def nothing_overlaps_on_the_channel_or_on_the_array_and_no_compute_starts_before_its_weights_are_there(scene):
    times = scene.times
    for this, following in pairwise(times):
        assert following.fetch_start >= this.fetch_end
        assert following.compute_start >= this.compute_end
    for when, span in zip(times, scene.spans, strict=True):
        assert when.compute_start >= when.fetch_end >= when.fetch_start + span.weight_bytes
        assert when.compute_end >= when.compute_start


@claim
def the_buffer_is_never_exceeded_when_a_fetch_ends_or_a_compute_starts(scene):
    times, sizes = scene.times, [span.weight_bytes for span in scene.spans]
    for now in {instant for when in times for instant in (when.fetch_end, when.compute_start)}:
        held = [size for when, size in zip(times, sizes, strict=True) if when.fetch_end <= now < when.compute_end]
        assert sum(held) <= scene.buffer


@claim
def the_times_are_those_of_a_device_played_tick_by_tick(scene):
    """The device never holds more than its buffer at any tick, so neither does the run."""
    layers = [(scene.programs[s].fetch[i], scene.programs[s].compute[i]) for s, _, i in issues(scene)]
    assert scene.times == play(layers, scene.buffer, double_buffered=scene.policy == "double-buffer")


@claim
def no_run_beats_its_bound_or_uses_a_resource_more_than_all_the_time(scene):
    report = scene.run.report
    assert 0 < report.stp <= report.bound_stp * (1 + 1e-9)
    assert report.fraction_of_bound == pytest.approx(report.stp / report.bound_stp)
    assert 0 <= report.pe_utilisation <= 1 + 1e-12
    assert 0 <= report.dram_utilisation <= 1 + 1e-12


@claim
def the_reports_numbers_are_those_counted_from_the_spans(scene):
    report, spans, programs = scene.run.report, scene.spans, scene.programs
    setting = make_setting(scene.models, scene.npu, scene.workload)
    makespan = max(span.compute_end_s for span in spans)
    assert (report.device, report.policy, report.makespan_s) == ("small", scene.policy, makespan)
    assert report.pe_utilisation == pytest.approx(sum(s.compute_end_s - s.compute_start_s for s in spans) / makespan)
    assert report.dram_utilisation == pytest.approx(sum(s.weight_bytes for s in spans) / BYTES_PER_S / makespan)

    demands = [demand_of(program, setting.buffer) for program in setting.programs]  # of whole layers, if cut or not
    quota = [stream.queries for stream in report.streams]
    dual = mix_prices(demands, quota) if scene.workload.mix else prices(demands)
    assert report.bound_stp == pytest.approx(dual.bound)
    worth, slowdowns, worst = 0.0, [], []
    for index, (stream, program, demand) in enumerate(zip(report.streams, programs, demands, strict=True)):
        mine = [span for span in spans if span.stream == index]
        ends = [span.compute_end_s for span in mine if span.layer == program.names[-1]]
        assert (stream.model, stream.queries) == (program.model, len(ends))
        assert stream.standalone_s == pytest.approx(demand.alone / BYTES_PER_S)
        begun = len(mine) - len(ends) * len(program)
        spent = dual.compute * sum(program.compute[:begun]) + dual.memory * sum(program.fetch[:begun])
        share = spent / dual.of(demand) if begun else 0.0
        assert stream.progress == pytest.approx(len(ends) + share)
        worth += (len(ends) + share) * stream.standalone_s
        latencies = [end - before for before, end in zip([0.0, *ends], ends, strict=False)]
        if latencies:
            mean = math.fsum(latencies) / len(latencies)
            assert stream.mean_latency_s == pytest.approx(mean)
            assert stream.max_latency_s == pytest.approx(max(latencies))
            assert stream.slowdown == pytest.approx(mean / stream.standalone_s)
            slowdowns.append(mean / stream.standalone_s)
            worst.append(max(latencies) / stream.standalone_s)
        else:
            assert (stream.mean_latency_s, stream.max_latency_s, stream.slowdown) == (None, None, None)
    assert report.stp == pytest.approx(worth / makespan)
    if len(slowdowns) == len(programs):
        assert report.antt == pytest.approx(sum(slowdowns) / len(slowdowns))
        assert report.max_slowdown == pytest.approx(max(worst))
    else:
        assert (report.antt, report.max_slowdown) == (None, None)


@claim
def the_reported_lag_is_the_one_counted_from_the_order(scene):
    setting = make_setting(scene.models, scene.npu, scene.workload, pieces=scene.run.report.pieces)
    band = make_policy(scene.policy, setting).band
    remark = scene.run.report.remark or ""
    if band is None or (scene.policy == "weft" and scene.workload.mix is None and scene.run.report.max_lag is None):
        assert scene.run.report.max_lag is None  # weft may have gone on as another policy, which keeps no band
    elif "kept at a mix of" in remark:  # a trial found a better one than the bound's
        mix = [float(part) for part in remark.rpartition("kept at a mix of ")[2].split(",")[0].split(":")]
        lag = float(largest_lag(scene.programs, scene.run.trace.stream.tolist(), mix, setting.quota))
        assert scene.run.report.max_lag == pytest.approx(lag, rel=0.02, abs=0.02)  # the remark rounds the mix
    else:
        lag = float(largest_lag(scene.programs, scene.run.trace.stream.tolist(), band.mix, setting.quota))
        assert scene.run.report.max_lag == pytest.approx(lag, abs=1e-6)
