"""Fluid Batching reproduced: the published numbers are well-formed, every part runs reduced, and the targets hold."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources

import pytest

from tests.papers.reproductions import check_published, check_whole
from weft.base.errors import InputError
from weft.devices import load_platform
from weft.devices.costs.tiled import layer_times_s, lookup_table
from weft_papers import PAPERS
from weft_papers.base import published
from weft_papers.fluid_batching import (
    fig7_traffic,
    fig10_strategies,
    reproduce,
    sensitivity,
    table1_designs,
    table2_comparison,
)
from weft_papers.fluid_batching.lab import (
    BALANCED,
    DRAWN,
    EXIT_RATES,
    EXITS,
    FLUID,
    LAZY,
    OURS,
    PLAIN,
    SEEDS,
    SERIAL,
    SPOTS,
    TIMEOUTS,
    Bench,
    RunPoint,
    macs_per_sample,
    network,
    npu,
    printed_npu,
    simulate_point,
)

PAPER = published("fluid-batching")
SMALL, LARGE = SPOTS[0], SPOTS[3]
SHORT = 400
FEW = (SERIAL, PLAIN, FLUID, OURS)


@pytest.fixture(scope="module")
def bench():
    """In this process: a new one would load the compiled loops again, which takes longer than these runs."""
    with Bench(1) as one:
        yield one


# the data


@pytest.mark.parametrize("key", PAPER)
def test_a_published_number_is_stated_by_its_sentence(key):
    check_published(PAPER[key])


def test_the_data_file_says_what_is_not_printed():
    raw = json.loads((resources.files("weft_papers") / "data" / "fluid-batching.json").read_text("utf-8"))
    assert set(raw) == {"format", "paper", "not_printed", "numbers"} and raw["format"] == 1
    assert any("bandwidth" in line for line in raw["not_printed"])


# the laboratory


def test_the_workload_is_the_papers():
    for model, rates in EXIT_RATES.items():
        assert [PAPER[f"exit_{model}_{place}"].value for place in range(1, EXITS + 2)] == [
            round(100 * rate, 9) for rate in rates
        ]
    assert list(TIMEOUTS.values()) == [PAPER[f"timeout_{size}"].value for size in ("small", "medium", "large")]
    load = RunPoint(SMALL, FLUID, 15, 200, 300).workload()
    assert load.stream[0].max_batch == PAPER["max_batch"].value
    assert load.rates == (15,) and load.duration_s == 20


@pytest.mark.parametrize("spot", SPOTS, ids=lambda spot: spot.name)
def test_the_npu_is_table_1s(spot):
    device = printed_npu(spot, table1_designs.PRINTED if spot == table1_designs.MISPRINTED else None)
    printed = [PAPER[f"{size}_{spot.key}"].value for size in ("rows", "tree", "pes")]
    assert [device.t_r, device.t_p, device.t_c] == printed
    assert device.clock_mhz == PAPER[f"clock_{spot.board}"].value


@pytest.mark.parametrize("spot", SPOTS, ids=lambda spot: spot.name)
def test_resources_are_those_printed(spot):
    share = table1_designs.shares(printed_npu(spot), load_platform(spot.board))
    assert share.dsps == pytest.approx(PAPER[f"dsps_{spot.key}"].value, abs=0.02)
    assert share.bram == pytest.approx(PAPER[f"bram_{spot.key}"].value, abs=0.02)


def test_a_sample_needs_less_than_the_whole_network():
    whole = network("resnet50", EXITS).macs
    assert 0.69 * whole < macs_per_sample("resnet50") < whole


def test_a_baseline_gets_hardware_of_its_own():
    device = npu(SMALL, LAZY.hardware)
    assert device.batching == "r" and not device.stackable
    assert (device.t_p, device.t_c) == (7, 128)
    assert npu(SMALL, FLUID.hardware).batching == "fluid"


def test_a_bench_runs_a_point_once(bench):
    point = RunPoint(SMALL, FLUID, 15, 200, SHORT)
    assert bench.measure([point, point])[point] is bench.measure([point])[point]
    assert simulate_point(point, point.device) == bench.measure([point])[point]


def test_what_is_reached_while_busy_and_how_long_gives_what_is_used(bench):
    point = RunPoint(SMALL, PLAIN, 15, 200, 4000)
    found = bench.measure([point])[point]
    needed = 15 * macs_per_sample("resnet50") / point.device.macs_per_s
    assert found.used == pytest.approx(100 * needed, rel=0.05)
    assert 50 < found.efficiency < 75 and found.busy < 100


# the parts, reduced


def test_table_1_and_its_searches(tmp_path):
    part = table1_designs.table_1(PAPER, tmp_path, [SMALL])
    check_whole(part)
    found = {row.quantity: row.ours for row in part.rows}
    assert found["T_P that the search finds for ResNet-50, ZC706"] == 7
    assert found["T_C that the search finds for ResNet-50, ZC706"] == 128
    assert found["a batch of 16, ResNet-50, ZCU104"] == pytest.approx(PAPER["batch16"].value, rel=0.05)


def test_the_look_up_table_has_an_entry_for_each_product():
    table = lookup_table(network("resnet50", EXITS), printed_npu(SMALL), 8)
    assert table.storage_bits == (54 + EXITS) * 8 * (3 + 2)


def test_no_way_of_batching_beats_fluid_in_any_quarter(tmp_path):
    check_whole(fig10_strategies.figure_1b(tmp_path))
    found = fig10_strategies.quarters(SMALL)
    for place in range(EXITS + 1):
        bound = found.gops[fig10_strategies.STACKED][place]
        assert all(values[place] <= bound * (1 + 1e-9) for values in found.gops.values())
        assert bound < found.peak


def test_near_the_peak_only_with_more_bandwidth(tmp_path):
    calibrated, _, fast, _ = fig10_strategies.scenes()
    check_whole(fig10_strategies.figure_10(tmp_path, [fast], (1, 4, 8)))
    peak = fig10_strategies.peak_gops(SMALL)
    assert fig10_strategies.throughput_gops(SMALL, fig10_strategies.STACKED, fast.bandwidth_gb_s, 4) > 0.95 * peak
    assert printed_npu(SMALL).bandwidth_gb_s == calibrated.bandwidth_gb_s
    whole = 2e-9 * 8 * network("resnet50").macs / sum(layer_times_s(network("resnet50"), printed_npu(SMALL), 8))
    assert whole < 0.75 * peak


def test_a_row_of_table_2(tmp_path, bench):
    found = table2_comparison.compare(PAPER, bench, 4000, spots=[SMALL])
    check_whole(table2_comparison.table_2(tmp_path, found))
    lazy, fluid = found.at(SMALL, LAZY), found.at(SMALL, FLUID)
    assert lazy.mean_ms > fluid.mean_ms and lazy.late > fluid.late
    assert lazy.calls > 10 * fluid.calls


def test_traffic_and_what_is_borne(tmp_path, bench):
    plan = replace(fig7_traffic.FIGURES[0], rates=(7, 25), schedulers=FEW, limited=(FLUID,))
    found = fig7_traffic.sweep(PAPER, bench, 1000, plan)
    check_whole(fig7_traffic.figure(PAPER, tmp_path, found))
    assert found.at(SERIAL, 25).rate < 18 < 24 < found.at(FLUID, 25).rate
    assert 13 < found.limits[FLUID].rate < found.under_overload(FLUID).rate


def test_violations_over_the_deadline(tmp_path, bench):
    plan = replace(fig7_traffic.PANELS[1], deadlines_ms=(60.0, 100.0, 400.0), schedulers=FEW)
    found = fig7_traffic.panel(PAPER, bench, SHORT, plan)
    check_whole(fig7_traffic.figure_9(tmp_path, [found]))
    for scheduler in FEW:
        late = [found.at(scheduler, deadline).late for deadline in plan.deadlines_ms]
        assert late == sorted(late, reverse=True)
    assert found.shortest(FLUID) == 400 and found.shortest(SERIAL) is None


def test_assumptions_are_varied(tmp_path, bench):
    check_whole(sensitivity.bandwidth(PAPER, tmp_path, bench, SHORT, None, (100, 120), [SMALL]))
    check_whole(sensitivity.decisions(PAPER, tmp_path, bench, SHORT, None, (0,), [SMALL]))
    check_whole(sensitivity.readings(PAPER, tmp_path, bench, SHORT, None, sensitivity.READINGS[-3:], [LARGE]))


def test_a_reading_changes_what_it_names():
    point = table2_comparison.table_point(PAPER, LARGE, FLUID, SHORT)
    by_name = {reading.name: reading for reading in sensitivity.READINGS}
    assert by_name["as used"].of(point) == point
    assert by_name["P: one input for all PEs"].of(point).device.p_reading == "broadcast"
    assert by_name["heads with a convolution"].of(point).workload().stream[0].exit_head == "conv"
    assert by_name["design as printed"].of(point).device.t_p == 10
    assert by_name["design as printed"].of(table2_comparison.table_point(PAPER, SMALL, FLUID, SHORT)) is None


# the targets


@pytest.mark.parametrize("spot", SPOTS, ids=lambda spot: spot.name)
def test_table_2_is_met_and_ours_is_better(spot, bench):
    points = {one: table2_comparison.table_point(PAPER, spot, one, 30_000) for one in (FLUID, PLAIN, OURS, BALANCED)}
    found = bench.measure(points.values())
    fluid, plain, ours, balanced = (found[points[one]] for one in (FLUID, PLAIN, OURS, BALANCED))
    assert fluid.mean_ms == pytest.approx(PAPER[f"fluid_mean_{spot.key}"].value, rel=0.1)
    assert fluid.late == pytest.approx(PAPER[f"fluid_late_{spot.key}"].value, abs=3)
    assert fluid.late < plain.late
    assert ours.late <= 0.75 * fluid.late and ours.mean_ms <= 1.01 * fluid.mean_ms
    assert balanced.late < fluid.late and balanced.mean_ms <= fluid.mean_ms and balanced.p99_ms <= 1.07 * fluid.p99_ms


@pytest.mark.parametrize(("spot", "least"), [(SMALL, 24.5), (LARGE, 50)], ids=["ResNet-50", "Inception-v3"])
def test_what_is_sustained_under_overload(spot, least, bench):
    point = RunPoint(spot, FLUID, 3 * least, 400, 10_000)
    assert bench.measure([point])[point].rate >= least


# the whole


def test_the_paper_is_registered():
    assert PAPERS["fluid-batching"] is reproduce
    assert len({scheduler.name for scheduler in DRAWN}) == len(DRAWN)
    assert min(SEEDS) >= 1000


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"cost": "maestro"}, "leave both out"), ({"seq_len": 8}, "leave both out"), ({"queries": 1}, "8")],
)
def test_settings_it_cannot_use_are_refused(tmp_path, wrong, said):
    with pytest.raises(InputError, match=said):
        reproduce(tmp_path, **wrong)
