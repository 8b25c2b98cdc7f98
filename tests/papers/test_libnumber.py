"""libnumber reproduced: published numbers are well-formed, sizes follow by hand, every part runs on a record."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from dataclasses import replace
from importlib import resources

import pytest

from tests import ROOT
from tests.papers.reproductions import check, check_published, check_whole
from weft.base.errors import InputError
from weft.models.classifiers import model_path, validation
from weft.models.zoo import load
from weft_papers import libnumber
from weft_papers.base import published
from weft_papers.libnumber import (
    checked,
    fig2_widths,
    fig5_compression,
    fig6_speeds,
    large,
    reproduce,
    sensitivity,
    table5_search,
)
from weft_papers.libnumber.jobs import COVERING, MACS, SearchJob, jobs, settings, shift_first_biases, sixteen_bits
from weft_papers.libnumber.lab import (
    BIAS_RULE,
    BOTH,
    EXHAUSTIVE,
    FAITHFUL,
    MARGINS,
    NETS,
    OURS,
    RELAXED,
    REPAIRED,
    RESTRICTED,
    RISTRETTO,
    SERIAL,
    SMALL,
    START,
    STRIPES,
    TITLES,
    WHOLE,
    formats_text,
    parse_printed,
    printed_configurations,
)
from weft_papers.libnumber.recorded import (
    ScoredRun,
    SearchRecord,
    parse_record,
    read,
    run_json,
    targets_json,
    tuning_json,
)
from weft_tune.evaluation import CallableEvaluator
from weft_tune.network import Network, Target
from weft_tune.numbers.configuration import AnyFormat, Configuration
from weft_tune.numbers.format import EXP, FIXED, TwosComplement
from weft_tune.quantised.opened import find_targets
from weft_tune.tuner import find_formats

sys.path.append(str(ROOT / "benchmarks"))
from number_bench import KINDS, NetworkBench, Splits, read_splits

PAPER = published(libnumber.PAPER)

SHOWN = ("mlp-c", "lenet")

# A record with round numbers, of which the answers can be worked out by hand


def formed(network: Network, weight: AnyFormat, given: AnyFormat) -> Configuration:
    return Configuration(
        {f"{t.name}.weight": weight for t in network.targets} | {f"{t.name}.input": given for t in network.targets}
    )


def run(method, margin, configuration, *, iterations=100, samples=1000, feasible=True, option=None, note=""):
    return ScoredRun(method, margin, configuration, 0.95, 0.94, 0.99, feasible, iterations, samples, 1.0, option, note)


def runs(net: Network):
    for margin, bits in zip(MARGINS, (2, 4), strict=True):
        yield run(OURS, margin, formed(net, EXP(bits), FIXED(bits)))
        yield run(BOTH, margin, formed(net, EXP(bits), FIXED(bits)))
        yield run(RISTRETTO, margin, formed(net, TwosComplement(2, 0), TwosComplement(2, 0)), feasible=False)
        yield run(RISTRETTO + REPAIRED, margin, formed(net, TwosComplement(8, 0), TwosComplement(8, 0)))
        yield run(RISTRETTO, margin, formed(net, TwosComplement(2 * bits, 0), TwosComplement(8, 0)), option=COVERING)
        yield run(RELAXED, margin, formed(net, TwosComplement(5, 0), TwosComplement(5, 0)))
        yield run(STRIPES, margin, formed(net, FIXED(16), FIXED(4)))
        yield run(WHOLE, margin, formed(net, EXP(bits), FIXED(bits)), samples=2500)
        yield run(FAITHFUL, margin, formed(net, EXP(bits), FIXED(bits)), samples=4000)
        yield run(RESTRICTED, margin, formed(net, FIXED(3), FIXED(3)))
        yield run(EXHAUSTIVE, margin, formed(net, FIXED(2), FIXED(2)), note="49 configurations")
        yield run(BIAS_RULE, margin, formed(net, FIXED(5), FIXED(5)), option="keep")
        yield run(BIAS_RULE, margin, formed(net, FIXED(5), FIXED(5)), option="chapter", iterations=60)
    yield run(OURS, 0.1, formed(net, EXP(2), FIXED(2)))
    yield run(SERIAL, 0.01, formed(net, FIXED(16), FIXED(8)))
    yield run(SERIAL, 0.01, formed(net, FIXED(16), FIXED(4)), option=MACS)
    yield run(SMALL, 0.01, formed(net, FIXED(8), FIXED(8)), option=0.05)
    yield run(START, 0.01, formed(net, FIXED(8), FIXED(8)), option=-1)


def entry(name: str, network: Network):
    return {
        "sha256": hashlib.sha256(model_path(name).read_bytes()).hexdigest(),
        "training": "made up",
        "targets": targets_json(network),
        "validation": 0.99,
        "test": 0.98,
        "images": {"small": 200, "full": 1000, "test": 2000},
        "widths": {
            "bits": list(range(1, 17)),
            "weights": [0.1, 0.5] + [0.98] * 14,
            "both": [0.1] * 5 + [0.979] * 11,
        },
        "int8": {
            "int8": {"validation": 0.99, "test": 0.98, "weights": 10, "scale_bytes": 5, "file_bytes": 100},
        },
        "runs": [run_json(each) for each in runs(network)],
    }


def score(configuration: Configuration, subset: str) -> float:
    return 1.0 - sum(4.0**-form.bits for form in configuration.values())


@pytest.fixture(scope="module")
def raw():
    networks = {
        name: find_targets(model_path(name), {"image": validation(name).inputs()[:20]}, layers=KINDS[name])
        for name in SHOWN
    }
    nets = {name: entry(name, network) for name, network in networks.items()}
    search = find_formats(networks["lenet"], CallableEvaluator(score, name="test"), margin=0.05)
    nets["lenet"]["path"] = tuning_json(search)
    made = {"format": 1, "machine": {"cores": 1}, "settings": {"small_share": 0.2, "bias": "repair"}, "nets": nets}
    return json.loads(json.dumps(made))


@pytest.fixture(scope="module")
def record(raw):
    return parse_record(raw, "made up")


NOTHING = SearchRecord({}, {}, {})


def found(part, quantity):
    (only,) = [row for row in part.rows if row.quantity == quantity]
    return only


# the data


@pytest.mark.parametrize("key", PAPER)
def test_a_published_number_is_stated_by_its_sentence(key):
    check_published(PAPER[key])


def test_the_data_file_says_what_is_not_printed():
    file = json.loads((resources.files("weft_papers") / "data" / "libnumber.json").read_text("utf-8"))
    assert set(file) == {"format", "paper", "not_printed", "configurations", "numbers"} and file["format"] == 1
    assert any("drawn only" in line for line in file["not_printed"])


@pytest.mark.parametrize("name", table5_search.networks(PAPER))
def test_printed_spaces_are_powers_of_the_42_formats(name):
    layers, printed = int(PAPER[f"layers_{name}"].value), PAPER[f"space_{name}"]
    assert f"{table5_search.space(layers):.2e}".startswith(f"{printed.value:.2f}e+")


def test_a_printed_configuration_is_read():
    assert parse_printed("I3 / E3-E2-E3", 3) == ("I3", ("E3", "E2", "E3"))
    assert parse_printed("I8 / I8 in every layer", 4).weight_bits == (8, 8, 8, 8)
    with pytest.raises(InputError, match="10 formats for 11 layers"):
        parse_printed(printed_configurations()["GoogleNet"]["libnumber"], 11)


@pytest.mark.parametrize("title", large.MODELS)
def test_the_large_networks_have_as_many_layers_as_the_table(title):
    (net,) = [each for each in large.large_networks() if each.title == title]
    assert len(net.network.targets) == PAPER[f"layers_{title.lower().replace(' ', '-')}"].value
    assert sum(each.macs for each in net.work) == sum(each.macs for each in net.network.targets)


def test_large_networks_are_as_large_as_they_are_known_to_be():
    weights = {each.title: each.network.weights for each in large.large_networks()}
    assert weights["AlexNet"] == 2_332_704 and weights["VGG-16"] == 14_710_464
    assert 7.5e6 < weights["NiN"] < 7.7e6 and 15.7e6 < weights["Tiny YOLO"] < 15.9e6
    macs = {each.title: sum(work.macs for work in each.work) for each in large.large_networks()}
    assert macs["NiN"] == pytest.approx(1.1e9, rel=0.02) and macs["Tiny YOLO"] == pytest.approx(3.49e9, rel=0.02)
    assert macs["ResNet-50"] == sum(layer.macs for layer in load("resnet50").layers if layer.kind == "conv")


# the record


def test_a_record_survives_its_file(raw, record):
    lenet = record.nets["lenet"]
    assert lenet.find(OURS, 0.07).configuration["conv1.weight"] == EXP(2)
    assert tuning_json(lenet.path) == raw["nets"]["lenet"]["path"]
    assert [run_json(each) for each in lenet.runs] == raw["nets"]["lenet"]["runs"]


def test_a_method_is_shown_at_its_best_that_passes(record):
    best = record.nets["lenet"].passing(RISTRETTO, 0.07)
    assert best.option == COVERING and best.configuration["conv1.weight"].bits == 4
    assert record.nets["lenet"].passing("nobody's", 0.07) is None
    published = record.nets["lenet"].passing(RISTRETTO, 0.07, plain=True)
    assert published.method == RISTRETTO + REPAIRED and published.configuration["conv1.weight"].bits == 8


@pytest.mark.parametrize("damage", [{"format": 2}, {"nets": {"lenet": {}}}, {"nets": 3}])
def test_a_strange_file_is_refused(raw, damage):
    with pytest.raises(InputError, match="file"):
        parse_record(raw | damage, "file")


def test_the_shipped_record_is_of_the_shipped_networks():
    record = read()
    assert list(record.nets) and all(checked.same_model(net) for net in record.nets.values())
    for net in record.nets.values():
        assert net.images["small"] < net.images["full"] <= net.images["test"]
        for margin in MARGINS:
            ours = net.find(OURS, margin)
            assert ours and ours.feasible and ours.validation >= (1 - margin) * net.validation - 1e-9


# the jobs


@pytest.mark.parametrize("net", NETS)
def test_jobs_are_different_and_known(net, record):
    every = jobs(net)
    assert len(set(every)) == len(every) and SearchJob(OURS, 0.07) in every
    known = set(inspect.signature(find_formats).parameters)
    assert all(known.issuperset(settings(record.nets["lenet"].network, job)) for job in every)


def test_a_shifted_start_moves_every_bias_by_one():
    network = Network("net", (Target("a", 1, 1, 0.6, 3.0),))
    (moved,) = shift_first_biases(network, 1).targets
    assert (moved.weight_max, moved.input_max) == (0.3, 1.5)
    assert sixteen_bits(network)["a.input"] == FIXED(16, -2)


def test_a_search_is_recorded_on_few_images(tmp_path, raw):
    images = validation("lenet")
    few = type(images)(images.image[:40], images.label[:40])
    with NetworkBench("lenet", Splits(few, few, few), tmp_path) as bench:
        (ours,), search = bench.run(SearchJob(OURS, 0.1))
        assert ours.feasible and ours.iterations == search.iterations > 5 and ours.validation == ours.test
        (again,), _ = bench.run(SearchJob(OURS, 0.1))
        assert again.configuration == ours.configuration and "interrupted" in again.note
        theirs, _ = bench.run(SearchJob(RISTRETTO, 0.1))
        assert isinstance(theirs[0].configuration["conv1.weight"], TwosComplement)
        assert bench.images == {"small": 8, "full": 40, "test": 40}
        whole = replace(ours, seconds=0.0)
        assert parse_record(
            {
                "format": 1,
                "machine": {},
                "settings": {},
                "nets": {"lenet": raw["nets"]["lenet"] | {"runs": [run_json(whole)]}},
            },
            "made",
        ).nets["lenet"].runs == (whole,)


def test_data_that_is_not_there_is_named_with_the_way_to_get_it(tmp_path):
    with pytest.raises(InputError, match=r"mnist\.npz: not there; run"):
        read_splits(tmp_path, "lenet")


# the figures


def test_figure_2_5(record, tmp_path):
    part = fig2_widths.figure_2_5(PAPER, tmp_path, record)
    check_whole(part)
    lenet = found(part, "bits for full accuracy, LeNet")
    assert (lenet.paper, lenet.ours) == (3, 3) and lenet.why.startswith("6 with its inputs")


def test_table_4(record):
    part = fig5_compression.table_4(record)
    check(part)
    ours = found(part, "bits of a weight, LeNet, weft tune, 7 %")
    assert (ours.paper, ours.ours) == (2, 2)
    mlp = found(part, "bits of a weight, MLP-C, Ristretto, 7 %")
    assert (mlp.paper, mlp.ours) == (8, 4) and mlp.why.startswith("ours, its best variant, T8 / T4")


def test_printed_sizes(record, tmp_path):
    part = large.printed_sizes(PAPER, tmp_path, record)
    check_whole(part)
    lenet = [row for row in part.tables[0].rows if row[0] == "LeNet"]
    assert lenet == [("LeNet", "0.03", "0.004", "16.00", "16.00", "16.00", "16.00", "0.0")]
    assert found(part, "storage smaller by the printed formats").ours == pytest.approx(8.28, rel=0.1)
    assert found(part, "storage below Ristretto's, MLP-C, by the printed formats").ours == pytest.approx(73.7, abs=0.1)


def test_table_5(record, tmp_path):
    part = table5_search.table_5(PAPER, tmp_path, record)
    check_whole(part)
    assert found(part, "printed search spaces that are 42^(layers + 1)").ours == 100
    scored = found(part, "configurations scored, LeNet, 7 %")
    assert scored.ours == 100 and "; 60 by the chapter's steps alone" in scored.why
    assert found(part, "saved by the small set at 7 %, mean").ours == 2.5
    assert found(part, "images of the fast search over the faithful one's at 1 %, geomean").ours == pytest.approx(0.25)
    assert found(part, "larger than the optimum, LeNet, 1 %").ours == pytest.approx(50)


def test_what_was_searched_for_the_small_set_is_shown(tmp_path):
    """At whatever margin it was recorded."""
    shipped = read()
    margins = {run.margin for net in shipped.nets.values() for run in net.runs if run.method == WHOLE}
    shown = [
        row.quantity for row in table5_search.table_5(PAPER, tmp_path, shipped).rows if "small set" in row.quantity
    ]
    assert margins and len(shown) == 2 * len(margins)


def test_figure_4(record, tmp_path):
    part = table5_search.figure_4(PAPER, tmp_path, record)
    check_whole(part)
    search = record.nets["lenet"].path
    assert found(part, "threshold of LeNet at 1 %").ours == search.thresholds["full"]


def test_figure_5(record, tmp_path):
    part = fig5_compression.figure_5(PAPER, tmp_path, record)
    check_whole(part)
    assert found(part, "parameters smaller at 7 %, by the mean size").ours == pytest.approx(16)
    assert found(part, "parameters smaller at 1 %, geomean").ours == pytest.approx(8)
    assert found(part, "storage below that of relaxed Ristretto, its best variant at 7 %, mean").ours == pytest.approx(
        60
    )
    lenet = record.nets["lenet"]
    theirs = 4 * lenet.network.weights + 8 * lenet.network.inputs
    below = found(part, "storage below that of Ristretto, its best variant at 7 %, mean")
    assert f"LeNet {100 * (1 - 2 * (lenet.network.weights + lenet.network.inputs) / theirs):.1f}" in below.why
    assert "its own answer fails for MLP-C, LeNet" in below.why
    assert found(part, "accuracy lost on the untouched test images at 1 %, most").ours == pytest.approx(100 * 4 / 98)


def test_figure_6(record, tmp_path):
    part = fig6_speeds.figure_6(PAPER, tmp_path, record)
    check_whole(part)
    assert found(part, "FPGA speed-up over FLOAT 32 at 7 %, geomean").ours == pytest.approx(16)
    assert found(part, "the same over Stripes").ours == pytest.approx(700)  # 16 bits: two in a word
    serial = found(part, "ideal bit-serial speed-up over 16 bits at 1 %, geomean")
    assert (serial.paper, serial.ours) == (4.19, pytest.approx(2))
    assert found(part, "ideal, tuned for products instead of storage, geomean").ours == pytest.approx(4)


def test_weaving_gains_from_fewer_weight_bytes(record, tmp_path):
    part = fig6_speeds.weaving(tmp_path, record, queries=8)
    check_whole(part)
    gains = [row.ours for row in part.rows]
    assert all(gain > 1 for gain in gains) and gains[-3:] == sorted(gains[-3:])


def test_sensitivity(record, tmp_path):
    part = sensitivity.sensitivity(tmp_path, record)
    check_whole(part)
    least = found(part, "least storage gain over share of the images in the small set, LeNet, 1 %")
    assert least.ours == 4 and "0.05: 4.00 (1000 images), 0.2: 8.00" in least.why
    assert found(part, "storage smaller at 1 %, LeNet").ours == 8


def test_recorded_configurations_are_scored_again(record, tmp_path):
    one = replace(record, nets={"lenet": replace(record.nets["lenet"], validation=0.99)})
    (plain, *rest) = checked.score_again(one, images=200)
    assert plain.run is None and plain.score > 0.97 and plain.agrees
    assert rest and not all(each.agrees for each in rest)  # their formats are made up
    check_whole(checked.checks(tmp_path, (plain, *rest)))


def test_another_model_is_not_scored(record):
    other = replace(record, nets={"lenet": replace(record.nets["lenet"], sha256="0")})
    assert checked.score_again(other) == []


def test_without_records_what_is_computed_stays(tmp_path):
    assert large.printed_sizes(PAPER, tmp_path, NOTHING).rows and table5_search.table_5(PAPER, tmp_path, NOTHING).rows
    assert fig5_compression.figure_5(PAPER, tmp_path, NOTHING).rows == fig5_compression.table_4(NOTHING).rows == ()
    assert (
        fig2_widths.figure_2_5(PAPER, tmp_path, NOTHING).rows
        == table5_search.figure_4(PAPER, tmp_path, NOTHING).rows
        == ()
    )
    assert checked.checks(tmp_path, []).rows == sensitivity.sensitivity(tmp_path, NOTHING).rows == ()


def test_formats_are_shown_as_the_table_has_them(record):
    network = record.nets["lenet"].network
    assert formats_text(network, formed(network, EXP(3), FIXED(4))) == "I4 / E3-E3"
    assert TITLES["lenet"] == "LeNet"


# the command


def test_it_refuses_what_it_cannot_use(tmp_path):
    for strange in ({"cost": "max"}, {"seq_len": 64}, {"queries": 2}):
        with pytest.raises(InputError, match=r"libnumber|queries"):
            reproduce(tmp_path, **strange)
