"""HaX-CoNN reproduced: the published numbers are well-formed, every part runs reduced, and the targets hold."""

from __future__ import annotations

import json
from importlib import resources
from itertools import pairwise

import pytest

from tests.mapping.soc_problems import steady_solver
from tests.papers.reproductions import check_published, check_whole
from weft.base.errors import InputError
from weft_map.baselines import without_contention
from weft_papers import PAPERS
from weft_papers.base import published
from weft_papers.fluid_batching.lab import Bench
from weft_papers.haxconn import (
    contention,
    fig1_schedules,
    reproduce,
    sensitivity,
    table2_profiles,
    table6_comparison,
    table7_overhead,
    table8_pairs,
)
from weft_papers.haxconn.lab import (
    AS_SHIPPED,
    IMPROVED,
    NETWORKS,
    ORIN,
    THEIRS,
    XAVIER,
    CaseNetwork,
    Change,
    Laboratory,
    SocCase,
    chip,
    experiments,
    fit_demand,
    models,
    profile,
    total_ms,
)

PAPER = published("haxconn")
FITTED = 2.4
FEW = ("caffenet", "googlenet", "resnet18")


@pytest.fixture(scope="module", autouse=True)
def steady():
    with steady_solver():
        yield


@pytest.fixture(scope="module")
def lab():
    """In this process: a new one would load the compiled loops again, which takes longer than these searches."""
    with Bench(1) as bench:
        yield Laboratory(bench, FITTED)


@pytest.fixture(scope="module")
def few(lab):
    """A corner of Table 8, with the demands as shipped and as fitted."""
    return table8_pairs.grid(lab, networks=FEW), table8_pairs.grid(lab, lab.fitted, FEW)


def switches(outcome):
    """Changes of unit within each run of each task."""
    for task, units in zip(outcome.problem.tasks, outcome.schedule.units, strict=True):
        size = len(task.groups)
        for start in range(0, len(units), size):
            yield sum(here != there for here, there in pairwise(units[start : start + size]))


# the data


@pytest.mark.parametrize("key", PAPER)
def test_a_published_number_is_stated_by_its_sentence(key):
    check_published(PAPER[key])


def test_the_data_file_says_what_is_not_printed():
    raw = json.loads((resources.files("weft_papers") / "data" / "haxconn.json").read_text("utf-8"))
    assert set(raw) == {"format", "paper", "not_printed", "table8_best_baseline", "numbers"} and raw["format"] == 1
    assert any("iterations" in line for line in raw["not_printed"])


def test_table_8_has_a_baseline_for_every_cell_and_ten_crosses():
    cells = ["+".join(place) for place in table8_pairs.places(tuple(NETWORKS))]
    assert list(table8_pairs.best_printed()) == cells and len(cells) == 55
    crossed = [cell for cell in cells if f"t8_{cell}" not in PAPER]
    assert len(crossed) == PAPER["pairs_kept"].value
    assert all(table8_pairs.best_printed()[cell] == "GPU" for cell in crossed)
    assert sum(len(set(cell.split("+"))) == 2 for cell in crossed) == 9  # and one on the diagonal


# the laboratory


def test_scaled_demands_end_at_the_memorys_peak():
    case = models(XAVIER, "googlenet", "resnet101")
    plain, more, most = (case.under(Change(demand=scale)).problem.tables.demand for scale in (1, 2, 100))
    assert 2 * plain == pytest.approx(more)
    assert most.max() == chip(XAVIER).bandwidth_gb_s
    assert case.under(AS_SHIPPED).problem == case.problem


def test_a_split_keeps_what_is_published():
    gpu, dla = models(XAVIER, "googlenet").under(Change(split=2, floor_pct=40)).problem.soc.units
    assert (dla.contention.cbp, dla.contention.tbwdc) == (142, 93)
    assert (gpu.contention.cbp, gpu.contention.floor_pct, dla.contention.floor_pct) == (45.3, 40, 40)


def test_in_a_calm_memory_nobody_is_slowed():
    soc = without_contention(chip(XAVIER))
    assert soc.slow_down(0, 100, 100) == soc.slow_down(1, 60, 130) == 1


def test_an_entry_is_a_task_of_its_own():
    case = SocCase(ORIN, (CaseNetwork("resnet18", 2), CaseNetwork("resnet18", slower=3, demand=2)))
    first, second = case.problem.tasks
    assert (first.name, second.name, first.repeats) == ("ResNet18", "ResNet18 (2)", 2)
    assert second.groups[0].costs["gpu"].time_s == pytest.approx(3 * first.groups[0].costs["gpu"].time_s)
    assert second.groups[0].costs["dla"].demand_gb_s == pytest.approx(2 * first.groups[0].costs["dla"].demand_gb_s)


def test_a_case_is_searched_once(lab):
    case = models(ORIN, "resnet18", "googlenet")
    found = lab.find([case, case])[case]
    assert lab.find([case])[case] is found
    assert found.certificate.proved and found.gain() >= 1 - 1e-9
    assert found.outcome.makespan_s == pytest.approx(found.best_s)
    turned = models(ORIN, "googlenet", "resnet18")
    assert all(
        lab.find([turned])[turned].ms(name) == pytest.approx(found.ms(name)) for name in ("herald", "h2h", "heft")
    )
    assert found.gain(THEIRS) == min(found.baselines[name] for name in THEIRS) / found.best_s


# the readings


def test_gpu_only_is_the_sum_of_table_5_where_the_paper_agrees_with_itself():
    for row in experiments(PAPER):
        apart = row.window_ms(PAPER, "gpu-only") / row.alone_ms() - 1
        assert abs(apart) < 0.05 or row.number in (1, 6), row.name
    assert experiments(PAPER)[6].window_ms(PAPER, "gpu-only") == pytest.approx(1000 / 378)


def test_fcn_takes_what_experiment_5_leaves_for_it():
    row = experiments(PAPER)[4]
    assert row.alone_ms() == pytest.approx(15.41, rel=1e-3)
    assert row.case.entries[-1].slower == pytest.approx(4, rel=0.01)


def test_the_demand_is_fitted_to_the_split_networks():
    assert fit_demand(PAPER, (1.0, FITTED, 3.5)) == FITTED


def test_the_faster_network_runs_more_often():
    repeats = [entry.repeats for entry in table8_pairs.pair("resnet18", "inception-resnet-v2").entries]
    assert repeats == [7, 1]  # 3.06 / 0.41 ms
    assert [entry.repeats for entry in table8_pairs.pair("vgg19", "resnet101").entries] == [1, 1]


def test_random_problems_are_as_described():
    problem = contention.random_problem(3)
    assert problem.tables.steps.tolist() == [12, 12]
    ratios = problem.tables.time[..., 1] / problem.tables.time[..., 0]
    assert ratios.min() >= 1.2 and ratios.max() <= 2.2
    assert problem.tables.demand[..., 0].min() >= 30 and problem.tables.demand[..., 0].max() <= 105


# the parts, reduced


def test_tables_2_and_5(tmp_path):
    part = table2_profiles.table_2(PAPER, tmp_path)
    check_whole(part)
    assert next(row.ours for row in part.rows if row.quantity.startswith("largest difference")) < 0.001
    groups = table2_profiles.estimated_groups()
    assert len(groups) == len(table2_profiles.GROUPS)
    whole = profile("googlenet", XAVIER, "estimated").total_s("gpu")
    assert sum(group.time_ms["gpu"] for group in groups) == pytest.approx(1e3 * whole)
    check_whole(table2_profiles.table_5(PAPER, tmp_path))
    assert len(table2_profiles.totals(PAPER)) == 39
    assert all(one.derived == pytest.approx(one.printed, rel=1e-3) for one in table2_profiles.totals(PAPER))


def test_the_three_cases(tmp_path, lab):
    part = fig1_schedules.figure_1(PAPER, tmp_path, lab)
    check_whole(part)
    serial, apart, once, free = (row.ours for row in part.rows)
    assert serial == pytest.approx(PAPER["fig1_case1"].value, rel=0.01)
    assert serial > apart > PAPER["fig1_case2"].value  # ResNet101 alone on the DLA, and slowed
    assert apart > once >= free


def test_experiments(tmp_path, lab):
    rows = [row for row in experiments(PAPER) if row.number in (3, 4, 8)]
    found = table6_comparison.compare(PAPER, lab, rows=rows)
    check_whole(table6_comparison.table_6(tmp_path, found, lab))
    for one in (*found.shipped, *found.scaled):
        assert one.certificate.proved and one.gain() >= 1 - 1e-9
    for free, once in zip(found.scaled, found.once, strict=True):
        assert once.best_s >= free.best_s * (1 - 1e-9)
        assert all(count <= 1 for count in switches(once.outcome))
    for one in found.chained:
        assert one.best_s == pytest.approx(one.baselines["gpu-only"])


def test_overhead_and_changes(tmp_path):
    costs = table7_overhead.measure(("resnet18", "vgg16"))
    check_whole(table7_overhead.table_7(PAPER, tmp_path, costs))
    assert all(cost.optimum.cpu_s > 0 for cost in costs)
    phases = table7_overhead.run(PAPER, (2,))
    check_whole(table7_overhead.figure_7(PAPER, tmp_path, phases))
    values = [phases[0].at(ms) for ms in (0, *table7_overhead.updates_ms(PAPER), 1e6)]
    assert values == sorted(values, reverse=True)
    assert values[0] == phases[0].start_ms and values[-1] == pytest.approx(phases[0].oracle_ms)


def test_the_papers_updates():
    assert table7_overhead.updates_ms(PAPER) == [25, 100, 250, 500, 1500]


def test_slow_down_of_googlenet(tmp_path, lab):
    found = fig1_schedules.meet(lab, ("resnet18",))
    check_whole(fig1_schedules.figure_6(PAPER, tmp_path, found, FITTED))
    for one in found:
        assert one.slow_down(one.naive) > 1 and one.best.makespan_s <= one.naive.makespan_s
    plain, more = (one.slow_down(one.naive) for one in found)
    assert more > plain


def test_pairs_and_instances(tmp_path, few):
    check_whole(table8_pairs.table_8(PAPER, tmp_path, *few))
    check_whole(table8_pairs.figure_5(PAPER, tmp_path, *few))
    for grid in few:
        assert all(one.certificate.proved and one.gain() >= 1 - 1e-9 for one in grid.cells.values())
    assert few[0].improved == len(few[0].pairs) == 3


def test_the_value_of_knowing_contention(tmp_path, lab, few):
    found = [
        contention.ContentionStudy("pairs", [*map(contention.plan_blindly, few[1].pairs)]),
        contention.random_study((1, 2), 6),
    ]
    check_whole(contention.report_losses(tmp_path, found))
    assert max(found[0].losses) > 1 and min(found[0].losses) > -1e-6
    assert all(0 <= error < 100 for study in found for error in study.errors)


def test_assumptions_are_varied(tmp_path, lab):
    knob = sensitivity.knobs(FITTED)[1]
    least = knob._replace(values=(knob.values[0], 1.0))
    study = sensitivity.study(PAPER, lab, least, lab.fitted, FEW[1:])
    check_whole(sensitivity.sensitivity(tmp_path, [study]))
    assert study.grids[1].change == lab.fitted
    assert study.experiments[0][0].outcome.problem.soc.units[1].contention.tbwdc == pytest.approx(0, abs=0.01)


# the targets


def test_measured_googlenet_and_resnet101_are_well_under_gpu_only(lab):
    found = lab.find([table6_comparison.MEASURED])[table6_comparison.MEASURED]
    assert found.best_s <= 0.85 * found.baselines["gpu-only"]
    assert 1e3 * found.baselines["gpu-only"] == pytest.approx(7.47)


def test_experiment_3_comes_to_what_is_printed(lab):
    row = experiments(PAPER)[2]
    found = lab.find([row.case])[row.case]
    assert row.as_printed(found.best_ms) == pytest.approx(row.printed(PAPER, "haxconn"), rel=0.01)


def test_pairs_with_googlenet_improve(lab):
    """The paper: any pair with GoogLeNet does."""
    found = lab.find([table8_pairs.pair("googlenet", other) for other in NETWORKS if other != "googlenet"])
    assert all(one.gain(THEIRS) >= IMPROVED for one in found.values())


# the whole


def test_the_paper_is_registered():
    assert PAPERS["haxconn"] is reproduce
    assert total_ms("densenet121", XAVIER, "dla") is None


@pytest.mark.parametrize("wrong", [{"cost": "maestro"}, {"seq_len": 8}, {"queries": 1}])
def test_settings_it_cannot_use_are_refused(tmp_path, wrong):
    with pytest.raises(InputError, match="leave seq_len, queries and cost out"):
        reproduce(tmp_path, **wrong)
