"""MTS reproduced: the published numbers are well-formed, counts equal their closed forms, every part runs reduced."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from itertools import product

import pytest

from tests import ROOT
from tests.papers.reproductions import check_published, check_whole
from weft.base.errors import InputError
from weft_papers import PAPERS
from weft_papers.base import published
from weft_papers.mts import (
    NUMBERS,
    closed,
    counting,
    cpu,
    encoders,
    fig2_opportunity,
    fig6_latency,
    fig8_settings,
    recorded,
    reproduce,
    zipping,
)
from weft_papers.mts.lab import (
    APART,
    FORMS,
    SHARINGS,
    TASKS,
    EvaluatedModels,
    counted,
    grouped_cost,
    heads,
    memory_bytes,
)
from weft_papers.mts.recorded import HALF, IN_GROUPS, SHIPPED, SINGLE, BenchRecord, read
from weft_stitch.making.zipped import ZippedCard, ZippedRatio, ZippedTask

PAPER = published(NUMBERS)
TINY = {
    "tinynet": EvaluatedModels("tinynet", 3, 0.4, 0.7, resolution=12),
    "tiny-vgg": EvaluatedModels("tiny-vgg", 3, 0, 0.8, resolution=8),
}

# A file of the benchmark with round numbers, of which the answers can be worked out by hand

SLOPES_MS = {
    "eager": 1.0, "sequential": 0.3, "streams": 0.06, "compile": 0.2, "vmap": 0.04, "grouped-eager": 0.1,
    "grouped": 0.03, "split": 0.05, "fused": 0.01, "batch": 0.008,
}  # fmt: skip
"""Milliseconds of each task; ``mts`` takes T^2 / 1000. All take a tenth besides."""
FIXED_MS = 0.1
SHARED_WAYS = ("mts", "split", "fused", "batch")
MB = 10**6


def row(net, dtype, tasks, way, *, sharing=0.9, pruning=0.9, widths=None, batches=None):
    ms = FIXED_MS + (tasks**2 / 1000 if way == "mts" else SLOPES_MS[way] * tasks)
    weights = (1 + tasks * (1 - sharing) if way in SHARED_WAYS else tasks) * MB
    return {
        "net": net, "pruning": pruning, "dtype": dtype, "tasks": tasks, "sharing": sharing, "way": way, "ms": ms,
        "widths": widths, "batches": batches, "classes": 1000, "weight_bytes": round(weights),
        "peak_bytes": round(weights) + 2 * tasks * MB, "launches": 10, "error": 1e-4, "exact_error": None,
        "pool_bytes": None, "workspace_bytes": None, "note": None,
    }  # fmt: skip


def rows():
    every = list(product((1, 2, *TASKS), ("mts", *SLOPES_MS)))
    large = [each for each in every if each[0] in TASKS]
    for count, way in every:
        yield row("resnet18", SINGLE, count, way)
        yield row("vgg16", SINGLE, count, way)
        yield row("resnet50", HALF, count, way, pruning=0.0)
        yield row("fc", SINGLE, count, way, pruning=0.0)
    for count, way in large:
        if count <= 8:
            yield from (row("resnet18", SINGLE, count, way, sharing=sharing) for sharing in SHARINGS[1:])
        yield row("vgg16", SINGLE, count, way, widths=[1.0, 1.5] * (count // 2))
        yield row("resnet18", SINGLE, count, way, batches=[1, 2, 3, 1] * (count // 4))
    yield row("resnet50", HALF, 64, "compile") | {"ms": None, "peak_bytes": None, "note": "too slow"}


def write(path, rows):
    path.write_text(json.dumps({"machine": {"gpu": "made up"}, "versions": {}, "settings": {}, "rows": list(rows)}))
    return path


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return read(write(tmp_path_factory.mktemp("recorded") / "made-up.json", rows()))


NOTHING = BenchRecord({}, {}, {}, ())


# the data


@pytest.mark.parametrize("key", PAPER)
def test_a_published_number_is_stated_by_its_sentence(key):
    check_published(PAPER[key])


def test_the_data_file_says_what_is_not_printed_and_what_is_wrong():
    raw = json.loads((resources.files("weft_papers") / "data" / "mts" / "published.json").read_text("utf-8"))
    assert set(raw) == {"format", "paper", "not_printed", "groups_at_32", "numbers"} and raw["format"] == 1
    assert raw["groups_at_32"] == counting.GROUPS
    assert any("drawn only" in line for line in raw["not_printed"])
    assert any("blocks of zeros" in line for line in raw["not_printed"])


# closed forms


@pytest.mark.parametrize("sharing", SHARINGS)
def test_the_papers_matrix_is_as_large_as_the_models_where_it_is_said_to_be(sharing):
    even, best = closed.break_even(sharing), closed.best_group(sharing)
    assert closed.mts_weights(sharing, even) == pytest.approx(1)
    assert closed.mts_weights(sharing, even + 1) > 1 > closed.mts_weights(sharing, even - 0.5)
    assert closed.mts_weights(sharing, best) == pytest.approx(4 * sharing * (1 - sharing))
    assert closed.mts_weights(sharing, best) < min(closed.mts_weights(sharing, best * by) for by in (0.8, 1.25))


def test_one_model_is_itself_and_equal_models_are_a_batch():
    for value in (closed.mts_macs, closed.mts_weights, closed.half_macs, closed.unique_weights):
        assert value(0.7, 1) == pytest.approx(1)
    assert closed.mts_macs(1, 32) == closed.half_macs(1, 32) == 1
    assert closed.mts_weights(1, 32) == closed.unique_weights(1, 32) == 1 / 32


@pytest.mark.parametrize("form", ["separate", *FORMS])
@pytest.mark.parametrize("name", TINY)
def test_counts_of_a_lowered_graph_equal_the_closed_forms(name, form):
    setting = TINY[name]
    cases = [setting, setting._replace(tasks=2, widths=(1.0, 1.5))]
    cases += [setting._replace(batches=(1, 3, 2))] if form != "grouped" else []
    for case in cases:
        counts, formula = counted(case, form), closed.work(case, form)
        assert (counts.macs, counts.weight_bytes) == (formula.macs, formula.weight_bytes), case


def test_a_wide_net_comes_near_the_ratio_formulas():
    setting = EvaluatedModels("resnet50", 8, pruning=0.0)
    body = [layer for layer in closed.layers(setting) if not layer.is_head]
    assert {layer.name for layer in closed.layers(setting)} - {layer.name for layer in body} == heads(setting.recipe)
    alone, mts = closed.work(setting, "separate"), closed.work(setting, APART)
    assert mts.macs / alone.macs == pytest.approx(closed.mts_macs(0.9, 8), rel=0.05)
    head = 2048 * 1000
    once = (closed.work(setting, "split").weights - 8 * head) / (alone.weights - 8 * head)
    assert once == pytest.approx(closed.unique_weights(0.9, 8), rel=0.02)


def test_a_resnet50_has_the_macs_it_is_known_for():
    assert closed.work(EvaluatedModels("resnet50", 1, pruning=0.0), "separate").macs == pytest.approx(4.09e9, rel=0.01)


def test_groups_keep_all_weights_and_the_largest_activations():
    setting = TINY["tinynet"]._replace(tasks=5)
    three, two = (counted(setting._replace(tasks=size), "mts") for size in (3, 2))
    macs, kept = grouped_cost(setting, "mts", 2)
    assert macs == three.macs + two.macs
    assert kept == memory_bytes(three) + two.weight_bytes + two.table_bytes
    assert grouped_cost(setting, "mts", 1) == (counted(setting, "mts").macs, memory_bytes(counted(setting, "mts")))


# the record


def test_what_failed_is_not_in_the_record(record):
    assert all(each.tasks <= 32 for each in record.rows)
    assert len(record.rows) == len(list(rows())) - 1


def test_a_sweep_is_of_one_kind_of_models(record):
    for sweep in (
        record.sweep("resnet18"),
        record.sweep("resnet18", sharing=0.6),
        record.sweep("vgg16", mixed="widths"),
    ):
        assert {4, 8} <= set(sweep.tasks)
        kinds = {(each.net, each.dtype, each.sharing, each.mixed) for each in sweep.rows.values()}
        assert len(kinds) == 1
    assert record.sweep("resnet18", mixed="widths").tasks == ()
    assert record.sweep("vgg16", mixed="widths").rows["mts", 4].setting.widths == (1.0, 1.5, 1.0, 1.5)


def test_a_strange_way_or_file_is_refused(tmp_path):
    strange = row("resnet18", SINGLE, 4, "eager") | {"way": "by-hand"}
    with pytest.raises(InputError, match="by-hand"):
        read(write(tmp_path / "strange.json", [strange]))
    with pytest.raises(InputError, match="cannot read"):
        read(tmp_path / "missing.json")


def test_the_papers_grouping_of_measured_latencies(record):
    sweep = record.sweep("resnet18")
    found = sweep.grouping(32)  # .1 + T^2 / 1000 each: groups of 8 take .164, of 16 .356, of 32 1.124
    assert [len(group) for group in found.groups] == [8, 8, 8, 8]
    assert sweep.ms(IN_GROUPS, 32) == pytest.approx(4 * 0.164)
    assert found.cost.weight_bytes == 4 * 1.8 * MB and found.cost.activation_bytes == 16 * MB
    assert sweep.ms(IN_GROUPS, 4) == sweep.ms("mts", 4)


def test_without_a_measured_single_model_it_is_its_share_of_all(record):
    whole = record.sweep("resnet18")
    sweep = replace(whole, rows={key: each for key, each in whole.rows.items() if key[1] in TASKS}, _groupings={})
    assert sweep.grouping(32).cost.seconds == pytest.approx(whole.grouping(32).cost.seconds)


def test_the_shipped_record_is_the_benchmarks():
    shipped = resources.files("weft_papers") / "data" / "mts" / SHIPPED
    results = ROOT / "benchmarks" / "results" / "stitch_gpu.json"
    assert json.loads(shipped.read_text("utf-8")) == json.loads(results.read_text("utf-8")), "copy the results anew"


def test_the_shipped_record_of_encoders_is_the_benchmarks():
    results = ROOT / "benchmarks" / "results" / "stitch_encoders.json"
    assert encoders.read() == json.loads(results.read_text("utf-8")), "copy the results anew"


def test_encoders_as_one_body(tmp_path):
    part = encoders.encoders(tmp_path, encoders.read())
    check_whole(part)
    (column,) = [at for at, name in enumerate(part.tables[0].header) if name == "LoRA server ms"]
    assert {row[0] for row in part.tables[0].rows if row[column]} == {encoders.LOW_RANK}, "models with adapters alone"
    own = found(part, "own heads as one body over one by one, 8 encoders, 16 tokens")
    assert own.paper is None and own.ours > 1
    assert {row[0] for row in part.tables[0].rows} == encoders.read()["tuned"].keys()


def test_a_body_computes_its_last_layer_for_one_token():
    assert encoders.macs("encoder", 1) == 1, "there is no other"
    assert encoders.macs("encoder", 4096) == pytest.approx(5 / 6, rel=0.02), "five of six layers, and two products"
    assert encoders.macs("encoder", 16, rank=16) > encoders.macs("encoder", 16)


def test_the_shipped_record_is_of_models_that_answer_alike():
    record = read()
    assert record.machine["gpu"] and record.versions["torch"]
    sweep = record.sweep("resnet18")
    assert sweep.where("eager", "sequential", "streams", "grouped", "mts", "fused", "batch") == list(TASKS)
    exact = [each.exact_error for each in record.rows if each.exact_error is not None]
    assert exact and max(exact) < 1e-5
    for each in (each for each in sweep.rows.values() if each.tasks == 4 and each.way in counting.FORM_OF):
        assert each.weight_bytes == counting.expected_bytes(each, counting.FORM_OF[each.way]), each.way


# the figures


def found(part, quantity):
    (only,) = [row for row in part.rows if row.quantity == quantity]
    return only


def test_figure_2(record, tmp_path):
    part = fig2_opportunity.figure_2(tmp_path, record)
    check_whole(part)
    assert found(part, "streams over one after another, 32 dense layers").ours == pytest.approx(9.7 / 2.02)
    sweep = record.sweep("resnet50", HALF)
    assert fig2_opportunity.peak_percent(sweep, "batch", 32) / fig2_opportunity.peak_percent(
        sweep, "fused", 32
    ) == pytest.approx(0.42 / 0.356)


def test_figure_6(record, tmp_path):
    part = fig6_latency.figure_6(PAPER, tmp_path, record)
    check_whole(part)
    speed = found(part, "MTS over Sequential, 4 ResNet18")
    assert (speed.paper, speed.ours) == (2.5, pytest.approx(1.3 / 0.116))
    groups = found(part, "groups of 32 ResNet18")
    assert (groups.paper, groups.ours) == (3, 4)
    assert found(part, "MTS-no-Grouping over MTS, 32 ResNet18").ours == pytest.approx(1.124 / 0.656)
    memory = found(part, "memory of NetFuse over MTS, 32 ResNet18")
    assert memory.ours == pytest.approx(96 / (4 * 1.8 + 16))
    assert sum(row.paper is not None for row in part.rows) == 20  # all that VI-B 1 prints of Fig. 6


def test_figure_7(record, tmp_path):
    part = fig6_latency.figure_7(PAPER, tmp_path, record)
    check_whole(part)
    share = found(part, "memory of MTS over NetFuse's, ResNet50, float16, 32 tasks")
    assert (share.paper, share.ours) == (37, pytest.approx(100 * 23.2 / 96))


def test_figure_8(record, tmp_path):
    part = fig8_settings.figure_8(tmp_path, record)
    check_whole(part)
    latency = found(part, "latency of MTS at sharing 0.6 over 0.9, 8 ResNet18")
    assert latency.ours == 1 and "groups 8, 8, 8, 8" in latency.why


def test_figure_9(record, tmp_path):
    part = fig8_settings.figure_9(PAPER, tmp_path, record)
    check_whole(part)
    best = found(part, "MTS over NetFuse, at most")
    assert (best.paper, best.ours) == (2.5, pytest.approx(0.34 / 0.164))
    assert fig8_settings.setting("widths", 4).widths == (1.0, 1.5, 1.0, 1.5)
    assert fig8_settings.setting("batches", 4).batches == (1, 2, 3, 1)


def test_ours_is_set_beside_the_fastest_of_all_rivals(record):
    fastest, weights, batch = recorded.ours_rows("Fig. 6a", record.sweep("resnet18"))
    assert fastest.ours == pytest.approx(0.116 / 0.14) and "MTS at 4/8/16/32" in fastest.why
    assert weights.ours == pytest.approx(100 * 4.2 / 7.2)
    assert batch.ours == pytest.approx(0.42 / 0.356)


def test_without_recorded_rows_what_is_counted_stays(tmp_path):
    assert (
        fig2_opportunity.figure_2(tmp_path, NOTHING).rows == fig6_latency.figure_6(PAPER, tmp_path, NOTHING).rows == ()
    )
    assert (
        fig6_latency.figure_7(PAPER, tmp_path, NOTHING).rows and fig8_settings.figure_9(PAPER, tmp_path, NOTHING).rows
    )
    assert fig8_settings.figure_8(tmp_path, NOTHING).tables


def test_where_the_form_stops_paying(tmp_path):
    part = closed.limits(tmp_path)
    check_whole(part)
    assert [round(row.ours, 2) for row in part.rows] == [81, 16, 5.44, 2.25]


# counted and measured here


def test_counts_of_a_small_net(tmp_path, record):
    one = counting.study(TINY["tinynet"], (4, 8))
    few = replace(record, rows=tuple(each for each in record.rows if each.net == "resnet18" and each.tasks == 2))
    part = counting.counts(PAPER, tmp_path, [one], few, [TINY["tiny-vgg"]._replace(batches=(1, 2, 1))])
    check_whole(part)
    equal = found(part, "graphs whose MACs and weights equal the closed forms")
    assert equal.ours == 100 and equal.why.startswith("20 of 20")
    assert found(part, "recorded weights that equal the closed forms").ours == 0  # they are made up
    assert one.macs("grouped", 8) == one.macs("fused", 8) == 1 < one.macs("half", 8) < one.macs("mts", 8)
    assert one.weights("split", 8) < one.weights(APART, 8) < one.weights("mts", 8)


def test_the_times_on_the_cpu(tmp_path):
    one = cpu.time_models(TINY["tinynet"]._replace(tasks=2), rounds=2)
    assert set(one.times) == {cpu.SEQUENTIAL, cpu.SLABBED, cpu.PLANNED, *cpu.FORMS}
    assert one.macs("grouped") == 1 < one.macs("mts")
    check_whole(cpu.on_cpu(tmp_path, [one]))


def test_zipped_nets_are_shown_before_and_after(tmp_path):
    tasks = tuple(ZippedTask(name, "", (), 0.98, tmp_path, "") for name in ("odd", "large"))
    ratios = tuple(ZippedRatio(sharing, (0.6, 0.7), (0.96, 0.98), 1100) for sharing in (0.5, 0.9))
    card = ZippedCard("made-up", "", (1, 8, 8), "", "", "", "", 0, {}, tasks, 2000, ratios, 0.9)
    part = zipping.zipping(tmp_path, [card])
    check_whole(part)
    assert part.rows[0].ours == pytest.approx(1.0) and "0.550 of the weights" in part.rows[0].why


# the command


def test_it_is_registered_and_refuses_what_it_cannot_use(tmp_path):
    assert PAPERS["mts"] is reproduce
    for strange in ({"cost": "max"}, {"seq_len": 64}, {"queries": 2}):
        with pytest.raises(InputError, match=r"mts|queries"):
            reproduce(tmp_path, **strange)
