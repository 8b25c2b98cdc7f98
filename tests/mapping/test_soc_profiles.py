"""Profiles of models on a SoC: files, what ships, merging of groups, and files of trtexec."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base.errors import ModelError, ProfileError
from weft.base.jsonfile import write_json
from weft.devices.soc import Soc, load_soc
from weft.models.layer import Gemm, Layer, Model
from weft.models.zoo import export
from weft_map.estimate import find_profile, shipped_profiles
from weft_map.problem import Problem
from weft_map.profiles import (
    ProfileCost,
    ProfileGroup,
    SocProfile,
    distinct,
    merge_groups,
    parse_soc_profile,
    read_soc_profile,
    write_soc_profile,
)
from weft_map.trtexec import read_entries, read_trtexec

XAVIER, ORIN, SNAPDRAGON = (load_soc(name) for name in ("xavier-agx", "agx-orin", "snapdragon-865"))
SOCS = {soc.name: soc for soc in (XAVIER, ORIN, SNAPDRAGON)}
SHIPPED = [(soc, model, origin) for soc in SOCS for model, its in shipped_profiles(soc).items() for origin in its]

TOTALS_MS = {  # HaX-CoNN, Table 5; measured ones: Table 2 and the artifact
    ("xavier-agx", "googlenet", "measured"): (2.32, 3.84),
    ("xavier-agx", "alexnet", "measured"): (1.79, 4.41),
    ("xavier-agx", "resnet101", "measured"): (5.15, 10.5),
    ("xavier-agx", "alexnet", "derived"): (1.79, 4.41),
    ("xavier-agx", "caffenet", "derived"): (2.26, 5.51),
    ("xavier-agx", "densenet121", "derived"): (7.84, None),
    ("xavier-agx", "googlenet", "derived"): (1.98, 3.68),
    ("xavier-agx", "inception-resnet-v2", "derived"): (15.12, 17.95),
    ("xavier-agx", "inception-v4", "derived"): (8.31, 15.94),
    ("xavier-agx", "resnet18", "derived"): (1.37, 2.81),
    ("xavier-agx", "resnet50", "derived"): (2.88, 6.01),
    ("xavier-agx", "resnet101", "derived"): (5.34, 10.6),
    ("xavier-agx", "resnet152", "derived"): (7.7, 12.71),
    ("xavier-agx", "vgg19", "derived"): (5.95, 19.05),
    ("agx-orin", "caffenet", "derived"): (0.74, 1.79),
    ("agx-orin", "densenet121", "derived"): (2.19, 3.10),
    ("agx-orin", "googlenet", "derived"): (0.99, 1.52),
    ("agx-orin", "inception-resnet-v2", "derived"): (3.06, 5.15),
    ("agx-orin", "inception-v4", "derived"): (2.49, 5.66),
    ("agx-orin", "resnet18", "derived"): (0.41, 0.74),
    ("agx-orin", "resnet50", "derived"): (0.91, 1.67),
    ("agx-orin", "resnet101", "derived"): (1.56, 2.47),
    ("agx-orin", "resnet152", "derived"): (2.19, 3.26),
    ("agx-orin", "vgg19", "derived"): (1.07, 2.93),
}


def cost(time_s=1.0, demand=10.0, **others):
    return ProfileCost(time_s=time_s, demand_gb_s=demand, **others)


def group(name, time_s=1.0, units=("gpu", "dla"), leave=True, **others):
    return ProfileGroup(name=name, leave=leave, costs={unit: cost(time_s, **others) for unit in units})


def profile(*groups, **others):
    return SocProfile(model="net", soc="xavier-agx", origin="measured", groups=groups, **others)


def raw(**changes):
    costs = {"gpu": {"time_s": 0.001, "demand_gb_s": 20.0}, "dla": {"time_s": 0.002, "demand_gb_s": 10, "out_s": 1e-5}}
    base = {"format": 1, "kind": "soc-profile", "model": "net", "soc": "xavier-agx", "origin": "measured"}
    return base | {"groups": [{"name": "first", "costs": costs}, {"name": "last", "costs": costs}]} | changes


def with_group(**changes):
    made = raw()
    made["groups"][1] = made["groups"][1] | changes
    return made


# Files


def test_a_profile_comes_back_from_its_file_as_it_was(tmp_path):
    made = profile(
        ProfileGroup(name="0-9", layers="0-9", costs={"gpu": cost(in_s=0.1, out_s=0.2, energy_j=3.0)}),
        ProfileGroup(name="b", layers=("x", "y"), leave=False, costs={"gpu": cost(), "dla": cost()}),
        source="made by hand",
        precision="FP16",
        entry_s={"dla": 0.5},
        exit_s={"gpu": 0.25},
    )
    write_soc_profile(made, tmp_path / "p.json")
    assert read_soc_profile(tmp_path / "p.json") == made
    assert json.loads((tmp_path / "p.json").read_text())["format"] == 1


def test_a_profile_becomes_a_task():
    made = parse_soc_profile(raw(entry_s={"gpu": 0.1}), "it")
    task = made.task("mine", after=["other"], repeats=3)
    assert (task.name, task.after, task.repeats, task.entry_s, task.exit_s) == (
        "mine",
        ("other",),
        3,
        {"gpu": 0.1},
        None,
    )
    assert made.task().name == "net"
    assert [each.name for each in task.groups] == ["first", "last"]
    assert (task.groups[0].costs["dla"].time_s, task.groups[0].costs["dla"].out_s) == (0.002, 1e-5)
    assert made.units == ("gpu", "dla")
    assert made.total_s("gpu") == 0.002
    assert made.total_s("cpu") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], 'is no object; a profile for mapping is an object of kind "soc-profile"'),
        ({"kind": "profile"}, "is 'profile'; a profile for mapping"),
        (raw(format=2), "format = 2: Input should be 1"),
        (raw(origin="guessed"), "origin = 'guessed': Input should be 'measured', 'derived' or 'estimated'"),
        (raw(groups=[]), r"groups = \[\]: .* at least 1 item"),
        (raw(unit="gpu"), "unknown key 'unit'"),
        (raw(groups=[raw()["groups"][0]] * 2), "group 'first' comes twice; each group needs a name of its own"),
        (raw(model="two\nlines"), "must be printable, on one line"),
        (raw(entry_s={"gpu": -1}), "entry_s.gpu = -1: .* greater than or equal to 0"),
        (
            raw(entry_s={"npu": 1}),
            "entry_s = {'npu': 1}: no group runs on 'npu'; they run on dla, gpu",
        ),
        (
            with_group(layers="9-0"),
            "group 'last': groups.1.layers = '9-0': .* first layer must not come after the last",
        ),
        (with_group(costs={}), r"group 'last': groups.1.costs = {}: .* at least 1 item"),
        (with_group(leaves=True), "group 'last': unknown key 'groups.1.leaves'; did you mean 'leave'"),
        (with_group(costs={"gpu": {"time_s": -1, "demand_gb_s": 1}}), "group 'last': groups.1.costs.gpu.time_s = -1: "),
        (with_group(costs={"gpu": {"time_s": 1e7, "demand_gb_s": 1}}), "time_s = 10000000.0: .* equal to 1000000"),
        (
            with_group(costs={"gpu": {"time_s": True, "demand_gb_s": 1}}),
            "time_s = True: Input should be a valid number",
        ),
        (with_group(costs={"gpu": {"time_s": "1", "demand_gb_s": 1}}), "time_s = '1': Input should be a valid number"),
        (with_group(costs={"gpu": {"time_s": 1}}), "group 'last': groups.1.costs.gpu.demand_gb_s is missing"),
    ],
)
def test_a_bad_profile_is_one_line_with_file_group_and_value(content, message, tmp_path):
    write_json(tmp_path / "bad.json", content)
    with pytest.raises(ProfileError, match=message) as caught:
        read_soc_profile(tmp_path / "bad.json")
    assert str(caught.value).startswith(str(tmp_path / "bad.json"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e-3"])
def test_a_number_that_is_no_time_is_refused(number, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(raw()).replace("0.002", number))
    with pytest.raises(ProfileError, match=r"bad.json: .*(not a number|time_s)"):
        read_soc_profile(path)


def test_a_file_that_is_absent_huge_or_no_json_is_refused(tmp_path):
    with pytest.raises(ProfileError, match="cannot read the file"):
        read_soc_profile(tmp_path / "absent.json")
    with pytest.raises(ProfileError, match="cannot read the file"):
        read_soc_profile("a\0b.json")
    with pytest.raises(ProfileError, match="cannot read the file"):
        read_soc_profile(tmp_path)
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ProfileError, match="not a JSON file"):
        read_soc_profile(tmp_path / "text.json")
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(33 << 20)
    with pytest.raises(ProfileError, match="34603008 bytes are too many for a profile; at most 33554432"):
        read_soc_profile(tmp_path / "huge.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def damaged(draw, whole):
    """*whole* with one value in it, however deep, replaced, dropped or joined by another."""
    made = json.loads(json.dumps(whole))
    here, steps = made, draw(st.integers(0, 6))
    for _ in range(steps):
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        key = draw(st.sampled_from(keys))
        if not isinstance(here[key], dict | list) or not here[key]:
            break
        here = here[key]
    keys = list(here) if isinstance(here, dict) else list(range(len(here)))
    key, how = draw(st.sampled_from(keys)), draw(st.sampled_from(["replace", "drop", "add"]))
    if how == "drop":
        del here[key]
    elif how == "replace":
        here[key] = draw(JSON)
    elif isinstance(here, dict):
        here[draw(st.text(max_size=8))] = draw(JSON)
    else:
        here.append(draw(JSON))
    return made


@settings(max_examples=30)
@given(JSON | damaged(raw()) | damaged(raw(entry_s={"gpu": 0.5}, precision="FP16")))
def test_any_json_is_a_profile_or_a_one_line_error(value):
    try:
        made = parse_soc_profile(value, "it")
    except ProfileError as error:
        assert str(error).isprintable()
        return
    made.task()
    merge_groups(made, 1)


# What ships


def test_the_promised_profiles_are_there_and_no_others():
    expected = {*TOTALS_MS, ("xavier-agx", "fcn-resnet18", "derived")}
    expected |= {
        ("snapdragon-865", model, "derived") for model in ("googlenet", "resnet101", "inception-v4", "resnet152")
    }
    assert set(SHIPPED) == expected


@pytest.mark.parametrize(("soc", "model", "origin"), SHIPPED)
def test_a_shipped_profile_says_where_it_comes_from_and_can_be_mapped(soc, model, origin):
    made = find_profile(model, SOCS[soc], origin=origin)
    assert (made.soc, made.model, made.origin) == (soc, model, origin)
    assert made.precision
    assert made.source.startswith("DERIVED, not measured") == (origin == "derived")
    Problem(SOCS[soc], (made.task(),))
    for limit in (5, 2, 1):
        Problem(SOCS[soc], (merge_groups(made, limit).task(),))


@pytest.mark.parametrize("key", TOTALS_MS)
def test_a_shipped_profile_adds_up_to_the_published_total(key):
    soc, model, origin = key
    made = find_profile(model, SOCS[soc], origin=origin)
    for unit, printed in zip(("gpu", "dla"), TOTALS_MS[key], strict=True):
        total_s = made.total_s(unit)
        assert (total_s is None) == (printed is None)
        assert total_s is None or total_s * 1e3 == pytest.approx(printed, rel=1e-3)


def test_googlenet_is_as_printed_in_table_2():
    made = find_profile("googlenet", XAVIER)
    first = made.groups[0]
    assert (made.origin, len(made.groups), first.name, first.layers) == ("measured", 10, "0-9", "0-9")
    assert first.costs["gpu"] == ProfileCost(time_s=0.45e-3, demand_gb_s=57.289, out_s=56e-6)  # 41.97 % of 136.5 GB/s
    assert first.costs["dla"].time_s == 0.75e-3
    # the same bytes over a longer time
    for each in made.groups:
        moved = [each.costs[unit].time_s * each.costs[unit].demand_gb_s for unit in ("gpu", "dla")]
        assert moved[0] == pytest.approx(moved[1], rel=1e-4)
    ratios = [each.costs["dla"].time_s / each.costs["gpu"].time_s for each in made.groups]
    assert (min(ratios), max(ratios)) == (pytest.approx(1.40, abs=0.005), pytest.approx(2.06, abs=0.005))


def test_snapdragon_profiles_meet_the_printed_rows_of_experiments_9_and_10():
    """GPU only, and one network on each unit, the better way round; the paper's Table 6."""
    for pair, together, apart in (
        (("googlenet", "resnet101"), 98.3, 79.1),
        (("inception-v4", "resnet152"), 219.6, 178.2),
    ):
        first, second = (find_profile(model, SNAPDRAGON) for model in pair)
        gpu, dsp = ([each.total_s(unit) * 1e3 for each in (first, second)] for unit in ("gpu", "dsp"))
        assert sum(gpu) == pytest.approx(together, rel=1e-4)
        assert min(max(gpu[0], dsp[1]), max(dsp[0], gpu[1])) == pytest.approx(apart, rel=2e-3)


def test_the_best_profile_there_is_comes_first(tmp_path):
    assert find_profile("resnet101", XAVIER).origin == "measured"
    assert find_profile("resnet101", XAVIER, origin="derived").origin == "derived"
    assert find_profile("resnet101", ORIN).origin == "derived"
    assert find_profile("vgg16", ORIN).origin == "estimated"
    assert find_profile("resnet101", XAVIER, origin="estimated").origin == "estimated"
    assert len(find_profile("resnet152", ORIN, origin="estimated", max_groups=7).groups) == 7
    assert len(find_profile("resnet101", XAVIER, max_groups=4).groups) == 4


def test_a_model_file_is_estimated(tmp_path):
    export("resnet18", tmp_path / "mine.onnx", resolution=32, classes=10)
    made = find_profile(str(tmp_path / "mine.onnx"), XAVIER, shapes={"input": (1, 3, 32, 32)}, max_groups=5)
    assert (made.origin, len(made.groups)) == ("estimated", 5)


def test_a_shape_asks_for_an_estimate():
    assert find_profile("googlenet", XAVIER, shapes={"input": (1, 3, 224, 224)}).origin == "estimated"


def test_a_profile_file_is_read_and_one_of_another_soc_is_refused(tmp_path):
    path = tmp_path / "mine.json"
    write_json(path, raw())
    assert find_profile(str(path), XAVIER) == parse_soc_profile(raw(), "it")
    with pytest.raises(ProfileError, match="a profile for xavier-agx, and models are mapped to agx-orin; take that"):
        find_profile(str(path), ORIN)
    with pytest.raises(ProfileError, match="the profile is measured, not derived"):
        find_profile(str(path), XAVIER, origin="derived")


def test_a_profile_nobody_has_is_an_error_with_what_there_is():
    with pytest.raises(
        ProfileError, match=r"no measured profile of vgg19 on xavier-agx is shipped; there are: alexnet \(me"
    ):
        find_profile("vgg19", XAVIER, origin="measured")
    with pytest.raises(ProfileError, match="no derived profile of vgg19 on mine is shipped; there are: none"):
        find_profile(
            "vgg19",
            Soc.model_validate({"name": "mine", "bandwidth_gb_s": 1.0, "units": [{"name": "u"}]}),
            origin="derived",
        )
    with pytest.raises(ModelError, match="unknown model 'googlenett'; did you mean googlenet"):
        find_profile("googlenett", XAVIER)
    with pytest.raises(ProfileError, match="max_groups = 0 must be at least 1"):
        find_profile("googlenet", XAVIER, max_groups=0)


@pytest.mark.parametrize("name", ["..", "", "/", "xavier-agx/..", "a\0b"])
def test_no_name_of_a_soc_leads_out_of_what_ships(name):
    assert shipped_profiles(name) == {}


# Merging


def test_the_least_work_is_joined_first():
    made = merge_groups(profile(group("a", 5.0), group("b", 1.0), group("c", 1.5), group("d", 9.0)), 3)
    assert [each.name for each in made.groups] == ["a", "b .. c", "d"]
    assert made.groups[1].costs["gpu"].time_s == 2.5


def test_a_boundary_that_cannot_be_left_at_goes_first():
    made = merge_groups(profile(group("a"), group("b"), group("c", 50.0, leave=False), group("d", 50.0)), 3)
    assert [each.name for each in made.groups] == ["a", "b", "c .. d"]
    assert made.groups[2].leave


def test_a_costly_boundary_goes_before_a_cheap_one():
    first = group("a", 2.0, out_s=0.0), group("b", 2.0, out_s=1.5), group("c", 2.0, out_s=0.0)
    assert [each.name for each in merge_groups(profile(*first), 2).groups] == ["a", "b .. c"]


def test_a_unit_is_given_up_last():
    made = profile(group("a"), group("b", 0.1, units=("gpu",)), group("c", 3.0), group("d", 4.0))
    assert [each.name for each in merge_groups(made, 3).groups] == ["a", "b", "c .. d"]
    last = merge_groups(made, 1).groups[0]
    assert tuple(last.costs) == ("gpu",)


def test_what_no_unit_runs_together_cannot_be_joined():
    made = profile(group("a", units=("gpu",)), group("b", units=("dla",)), group("c", units=("dla",)))
    assert len(merge_groups(made, 2).groups) == 2
    with pytest.raises(
        ProfileError, match=r"net: cannot be merged to 1 groups: no unit runs both 'a' and 'b .. c'; allow 2"
    ):
        merge_groups(made, 1)


def test_joined_groups_add_times_and_average_demands():
    left = ProfileGroup(name="a", layers="0-3", costs={"gpu": cost(1.0, 30.0, in_s=0.1, out_s=9.0, energy_j=1.0)})
    right = ProfileGroup(
        name="b", layers="4-9", leave=False, costs={"gpu": cost(3.0, 10.0, in_s=9.0, out_s=0.2, energy_j=2.0)}
    )
    (both,) = merge_groups(profile(left, right), 1).groups
    assert both.costs["gpu"] == cost(4.0, 15.0, in_s=0.1, out_s=0.2, energy_j=3.0)
    assert (both.layers, both.leave, both.name) == ("0-9", False, "a .. b")
    unknown = merge_groups(profile(left, group("c", units=("gpu",))), 1).groups[0]
    assert unknown.costs["gpu"].energy_j is None
    assert unknown.layers == ("0-3",)


def test_groups_of_no_time_keep_the_larger_demand():
    (both,) = merge_groups(profile(group("a", 0.0, demand=3.0), group("b", 0.0, demand=5.0)), 1).groups
    assert both.costs["gpu"] == cost(0.0, 5.0)


def test_times_that_add_up_to_too_much_are_refused():
    with pytest.raises(ProfileError, match=r"group 'a .. b': time_s = 1800000.0: .* equal to 1000000"):
        merge_groups(profile(group("a", 9e5), group("b", 9e5)), 1)


def test_nothing_is_merged_where_nothing_must():
    made = profile(group("a"), group("b"))
    assert merge_groups(made, 2) is made
    with pytest.raises(ProfileError, match="max_groups = 0"):
        merge_groups(made, 0)


UNITS = st.sets(st.sampled_from(["gpu", "dla", "dsp"]), min_size=1).map(lambda them: tuple(sorted({*them, "gpu"})))


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 100), UNITS, st.booleans()), min_size=1, max_size=12),
    st.integers(1, 12),
)
def test_merging_keeps_work_bytes_and_validity(parts, limit):
    made = profile(
        *(
            ProfileGroup(name=f"g{n}", leave=leave, layers=(f"l{n}",), costs={u: cost(time, demand) for u in units})
            for n, (time, demand, units, leave) in enumerate(parts)
        )
    )
    merged = merge_groups(made, limit)
    assert len(merged.groups) == min(limit, len(parts))
    assert parse_soc_profile(merged.model_dump(mode="json"), "it") == merged
    assert [layer for each in merged.groups for layer in each.layers] == [f"l{n}" for n in range(len(parts))]
    for whole in (made, merged):
        whole.task()
    gpu = [[each.costs["gpu"] for each in whole.groups] for whole in (made, merged)]
    assert sum(c.time_s for c in gpu[1]) == pytest.approx(sum(c.time_s for c in gpu[0]), abs=1e-9)
    moved = [sum(c.time_s * c.demand_gb_s for c in whole) for whole in gpu]
    assert moved[1] == pytest.approx(moved[0], rel=1e-6, abs=1e-6)
    assert merge_groups(made, limit) == merged


def test_names_stay_each_their_own():
    assert distinct(["a", "a", "b", "a", "a #2"]) == ["a", "a #3", "b", "a #4", "a #2"]
    made = profile(group("a .. x"), group("b .. c"), group("a .. y"), group("d .. c"))
    assert [each.name for each in merge_groups(made, 2).groups] == ["a .. c", "a .. c #2"]


# trtexec


def kernel(name, average_ms, **others):
    return {"name": name, "timeMs": average_ms * 100, "averageMs": average_ms, "percentage": 1.0, **others}


def files(folder, **units):
    found = {}
    for unit, content in units.items():
        found[unit] = folder / f"{unit}.json"
        found[unit].write_text(json.dumps(content))
    return found


def layer(name, kind="conv"):
    return Layer(name, kind, "Conv", Gemm(100, 10, 10), 100, input_elements=1000, output_elements=1000)


GPU = [
    {"count": 100},
    kernel("Reformatting CopyNode for Input Tensor 0 to conv1 + relu1", 0.01),
    kernel("conv1 + relu1", 0.2, medianMs=0.19),
    kernel("conv2 + add2 + relu2", 0.3),
    kernel("conv3", 0.4),
]
DLA = [{"count": 100}, kernel("conv1 + relu1", 0.5), kernel("conv2 + add2 + relu2", 0.6), kernel("conv3", 0.7)]


def test_files_of_two_units_are_laid_side_by_side(tmp_path, caplog):
    made = read_trtexec(files(tmp_path, gpu=GPU, dla=DLA), "net", XAVIER)
    assert [each.name for each in made.groups] == ["conv1 + relu1", "conv2 + add2 + relu2", "conv3"]
    times = [{unit: round(c.time_s * 1e3, 6) for unit, c in each.costs.items()} for each in made.groups]
    assert times == [{"gpu": 0.21, "dla": 0.5}, {"gpu": 0.3, "dla": 0.6}, {"gpu": 0.4, "dla": 0.7}]
    assert made.groups[0].costs["gpu"].out_s == pytest.approx(XAVIER.transition_us * 1e-6)
    assert (made.origin, made.groups[0].costs["gpu"].demand_gb_s) == ("measured", 0)
    assert "no demands are given for gpu; they are taken as 0" in caplog.text
    assert "demands: 0 for gpu, dla" in made.source
    assert len(read_trtexec(files(tmp_path, gpu=GPU, dla=DLA), "net", XAVIER, max_groups=2).groups) == 2


def test_a_kernel_that_reaches_across_joins_what_it_covers(tmp_path):
    dla = [kernel("conv1 + relu1 + conv2 + add2 + relu2", 1.0), kernel("conv3", 0.7)]
    made = read_trtexec(files(tmp_path, gpu=GPU, dla=dla), "net", XAVIER)
    assert [each.name for each in made.groups] == ["conv1 + relu1 .. conv2 + add2 + relu2", "conv3"]
    assert made.groups[0].costs["gpu"].time_s == pytest.approx(0.51e-3)
    assert made.groups[0].costs["dla"].time_s == pytest.approx(1.0e-3)
    assert made.groups[0].layers == ("conv1 + relu1", "conv2 + add2 + relu2")


def test_a_unit_without_a_kernel_may_not_run_its_group(tmp_path):
    made = read_trtexec(files(tmp_path, gpu=[*GPU, kernel("softmax", 0.1)], dla=DLA), "net", XAVIER)
    assert [tuple(each.costs) for each in made.groups] == [("gpu", "dla")] * 3 + [("gpu",)]
    assert made.groups[-1].name == "softmax"


def test_a_kernel_of_no_known_layer_goes_with_the_one_before(tmp_path):
    dla = [DLA[1], kernel("(Unnamed Layer* 4) [Shuffle]", 0.05), *DLA[2:]]
    made = read_trtexec(files(tmp_path, gpu=GPU, dla=dla), "net", XAVIER)
    assert [round(each.costs["dla"].time_s * 1e3, 6) for each in made.groups] == [0.55, 0.6, 0.7]


def test_the_groups_and_bytes_of_a_model_are_used_where_it_is_known(tmp_path):
    layers = (
        layer("conv1"),
        layer("conv2"),
        Layer("add2", "elementwise", "Add", None, 0, 0, 0, 2000, 1000),
        layer("conv3"),
    )
    model = Model("net", layers, block_ends=(2, 3))  # two activations cross after conv1
    made = read_trtexec(files(tmp_path, gpu=GPU, dla=DLA), model, XAVIER)
    assert [each.layers for each in made.groups] == [("conv1", "conv2", "add2"), ("conv3",)]
    assert made.groups[0].costs["gpu"].time_s == pytest.approx(0.51e-3)
    moved_bytes = 2 * (100 + 2000)
    assert made.groups[1].costs["dla"].demand_gb_s == pytest.approx(moved_bytes / 1e9 / 0.7e-3)
    assert made.groups[1].costs["dla"].out_s == pytest.approx(XAVIER.transition_us * 1e-6 + 2000 / (136.5e9 / 2))
    assert "the model's bytes over the time for gpu, dla" in made.source


def test_a_profile_of_another_network_is_refused(tmp_path):
    model = Model("net", (layer("conv1"), layer("conv2"), layer("conv3")), block_ends=(1, 2))
    added = ["reshape_before_conv2", "conv2 copy", "(Unnamed Layer* 4) [Shuffle]", "conv2 output reformatter 0"]
    read_trtexec(files(tmp_path, gpu=[*GPU, *(kernel(name, 0.1) for name in added)]), model, XAVIER)
    other = [*GPU, kernel("stem + relu", 1.0), kernel("head", 0.59)]
    message = (
        "gpu.json: no node of the model is named as 'stem . relu' is; 2 of 5 kernels and 1.590 of 2.500 ms match none"
    )
    with pytest.raises(ProfileError, match=message):
        read_trtexec(files(tmp_path, gpu=other), model, XAVIER)
    assert len(read_trtexec(files(tmp_path, gpu=other), "net", XAVIER).groups) == 5


def test_more_bytes_than_the_memory_has_are_told(tmp_path, caplog):
    model = Model("net", (layer("conv1"),))
    made = read_trtexec(files(tmp_path, gpu=[kernel("conv1", 1e-6)]), model, XAVIER)
    assert made.groups[0].costs["gpu"].demand_gb_s == XAVIER.bandwidth_gb_s
    assert "the bytes of 'conv1'" in caplog.text and "more than the memory has" in caplog.text


def test_demands_are_taken_from_where_they_are_given(tmp_path, caplog):
    demands = {"gpu": {"conv1": 30.0, "conv2 + add2 + relu2": 20.0, "conv3": 136.5}, "dla": {"conv1": 7}}
    made = read_trtexec(files(tmp_path, gpu=GPU, dla=DLA), "net", XAVIER, demands=demands)
    assert [each.costs["gpu"].demand_gb_s for each in made.groups] == [30, 20, XAVIER.bandwidth_gb_s]
    assert [each.costs["dla"].demand_gb_s for each in made.groups] == [7, 0, 0]
    assert "no demand of 'conv3' on dla is given; it is taken as 0" in caplog.text
    with pytest.raises(ProfileError, match=r"demand of 'conv1' on gpu = 137 GB/s is more than the memory's 136.5"):
        read_trtexec(files(tmp_path, gpu=GPU), "net", XAVIER, demands={"gpu": {"conv1": 137}})
    for bad in (-1, float("nan"), "much"):
        with pytest.raises(ProfileError, match=r"demand of 'conv1' on gpu = .* is not GB/s"):
            read_trtexec(files(tmp_path, gpu=GPU), "net", XAVIER, demands={"gpu": {"conv1": bad}})


def test_files_without_an_average_or_a_count_are_understood(tmp_path):
    (path,) = files(tmp_path, gpu=[{"count": 10}, {"name": "a", "timeMs": 5.0}, {"name": "b", "medianMs": 2}]).values()
    assert [(each.name, each.time_s) for each in read_entries(path)] == [("a", 0.5e-3), ("b", 2e-3)]
    (path,) = files(tmp_path, gpu=[kernel("a", 1.0), kernel("Reformatting CopyNode for Output Tensor 0", 0.5)]).values()
    assert [each.time_s for each in read_entries(path)] == [1.5e-3]


def test_names_inside_a_kernel_are_told_apart(tmp_path):
    (path,) = files(tmp_path, gpu=[kernel("PWN(PWN(a/Sigmoid), a/Mul) + b || c", 1.0)]).values()
    assert read_entries(path)[0].layers >= {"a/Sigmoid", "a/Mul", "b", "c"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "not a profile of trtexec, which is a list; write it with --exportProfile"),
        ([], "holds no kernel"),
        ([{"count": 3}], "holds no kernel"),
        ([{"count": 0}], "count = 0 must be a whole number from 1"),
        ([{"count": "many"}], "count = 'many' must be a whole number"),
        ([3], "entry 0 has no name: 3"),
        ([{"averageMs": 1}], "entry 0 has no name"),
        ([kernel("a", 1), {"name": "b"}], "entry 1, 'b': has neither averageMs nor medianMs nor timeMs"),
        ([{"name": "b", "averageMs": -1}], "entry 0, 'b': averageMs = -1 is not a time"),
        ([{"name": "b", "averageMs": "1"}], "averageMs = '1' is not a time"),
        (
            [
                kernel("Reformatting CopyNode to {ForeignNode[conv1...fc]}", 0.1),
                kernel("{ForeignNode[conv1...fc]}", 3.0),
            ],
            "entry 1, '{ForeignNode.*one blob of many layers .* cut after each group and take differ",
        ),
        ([kernel("unheard", 3.0)], "none of its 1 kernels .'unheard', .... has a name that lays it beside the others"),
    ],
)
def test_a_bad_file_of_trtexec_is_one_line(content, message, tmp_path):
    with pytest.raises(ProfileError, match=message) as caught:
        read_trtexec(files(tmp_path, gpu=GPU, dla=content), "net", XAVIER)
    assert str(caught.value).startswith(str(tmp_path / "dla.json"))
    assert "\n" not in str(caught.value)


def test_units_are_those_of_the_soc():
    with pytest.raises(ProfileError, match="xavier-agx: unknown unit 'gpus'; did you mean gpu"):
        read_trtexec({"gpus": Path("absent.json")}, "net", XAVIER)
    with pytest.raises(ProfileError, match="no trtexec profile was named"):
        read_trtexec({}, "net", XAVIER)


ENTRY = st.fixed_dictionaries(
    {"name": st.sampled_from(["a", "b", "c", "a + b", "b + c", "d", "Reformatting CopyNode x", "PWN(a, c)"])},
    optional={"averageMs": st.floats(0, 1e3), "timeMs": st.floats(0, 1e3), "medianMs": st.floats(0, 1e3)},
)


@settings(max_examples=20)
@given(
    JSON | damaged(GPU) | st.lists(ENTRY, max_size=6), JSON | damaged(DLA) | st.lists(ENTRY, max_size=6), st.booleans()
)
def test_any_two_files_are_a_profile_or_a_one_line_error(tmp_path_factory, first, second, known):
    folder = tmp_path_factory.getbasetemp()
    model = Model("net", (layer("a"), layer("b"), layer("c")), block_ends=(1, 2)) if known else "net"
    try:
        made = read_trtexec(files(folder, gpu=first, dla=second), model, XAVIER)
    except ProfileError as error:
        assert str(error).isprintable()
        return
    Problem(XAVIER, (made.task(),))
    assert parse_soc_profile(made.model_dump(mode="json"), "it") == made
    assert all(one.name != other.name for one, other in pairwise(made.groups))
