"""SoCs: the presets, files that cannot be used refused in one line, and what contention does to a unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from weft.base.errors import DeviceError
from weft.cli.devices import app as devices
from weft.devices import (
    BandwidthSharing,
    Pccs,
    Soc,
    load_any,
    load_device,
    load_npu,
    load_soc,
    parse_soc,
    soc_as_toml,
    socs,
)
from weft.devices.soc import relative_speed
from weft_map.kernels.soc import slow_down

GPU = Pccs(normal_bw=38.1, intensive_bw=96.2, mrmc_pct=4.9, pbw=127.5, tbwdc=87.2, cbp=45.3, rate_n=1.11)
DLA = Pccs(normal_bw=0.0, intensive_bw=27.9, mrmc_pct=0.0, pbw=127.5, tbwdc=22.0, cbp=71.0, rate_n=0.35)

SMALL: dict[str, Any] = {"kind": "soc", "name": "small", "bandwidth_gb_s": 100.0, "units": [{"name": "gpu"}]}

amounts = st.floats(0, 300)
pccs = st.builds(
    Pccs,
    normal_bw=amounts,
    intensive_bw=amounts,
    mrmc_pct=st.floats(0, 100),
    pbw=st.floats(1, 300),
    tbwdc=amounts,
    cbp=amounts,
    rate_n=st.floats(0, 5),
    floor_pct=st.floats(1, 100),
)
models = st.one_of(st.just(BandwidthSharing()), pccs)


def soc_with(contention: Pccs | BandwidthSharing) -> Soc:
    return parse_soc(SMALL | {"units": [{"name": "gpu", "contention": contention.model_dump()}]}, "file.toml")


def refused(raw: dict[str, Any]) -> str:
    """The one line with which a description is refused."""
    with pytest.raises(DeviceError) as caught:
        parse_soc(raw, "file.toml")
    message = str(caught.value)
    assert message.startswith("file.toml: ") and "\n" not in message
    return message


# The presets


def test_every_preset_loads_under_its_own_name_with_units_and_a_source():
    assert socs() == ["agx-orin", "snapdragon-865", "xavier-agx"]
    for name in socs():
        soc = load_soc(name)
        assert soc.name == name and soc.source
        assert [unit.instances for unit in soc.units] == [1, 1]
        assert all(unit.peak_tflops for unit in soc.units)
    assert [load_soc(name).bandwidth_gb_s for name in socs()] == [204.8, 34.1, 136.5]  # HaX-CoNN, Table 4


def test_xavier_has_the_published_constants():
    assert [unit.contention for unit in load_soc("xavier-agx").units] == [GPU, DLA]


def test_orin_is_slowed_like_xavier_at_the_same_share_of_its_memory():
    xavier, orin = load_soc("xavier-agx"), load_soc("agx-orin")
    ratio = orin.bandwidth_gb_s / xavier.bandwidth_gb_s
    for unit in range(2):
        for own in (10.0, 25.0, 60.0, 95.0, 120.0):
            for others in (5.0, 30.0, 70.0, 120.0):
                expected = xavier.slow_down(unit, own, others)
                assert orin.slow_down(unit, own * ratio, others * ratio) == pytest.approx(expected, rel=0.01)


def test_snapdragon_shares_its_memory_in_proportion():
    soc = load_soc("snapdragon-865")
    assert soc.slow_down(0, 14.1, 20.0) == 1.0
    assert soc.slow_down(0, 14.1, 54.1) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("short", "name"), [("xavier", "xavier-agx"), ("orin", "agx-orin"), ("Snapdragon", "snapdragon-865")]
)
def test_a_part_of_a_name_that_no_other_has_will_do(short, name):
    assert load_soc(short) == load_soc(name) == load_any(short)


def test_a_part_that_several_have_names_them():
    with pytest.raises(DeviceError, match=r"^SoC 'agx' may be agx-orin or xavier-agx; write more of the name$"):
        load_soc("agx")


@pytest.mark.parametrize("name", ["", "tegra-x1", "!!!!"])
def test_an_unknown_name_is_refused_with_socs_only(name):
    with pytest.raises(DeviceError, match="unknown SoC") as caught:
        load_soc(name)
    assert "known: agx-orin, snapdragon-865, xavier-agx (a SoC file ends in .toml)" in str(caught.value)


def test_an_npu_is_no_soc_and_a_soc_no_npu():
    with pytest.raises(DeviceError, match=r"^tpuv3-like: an NPU, and models are mapped to a SoC; known: agx-orin, "):
        load_soc("tpuv3-like")
    for load in (load_npu, load_device):
        with pytest.raises(DeviceError, match=r"^xavier-agx: a SoC of several units.*weft map --soc xavier-agx$"):
            load("xavier-agx")


def test_any_kind_of_device_loads_and_an_unknown_one_is_refused_with_all(tmp_path):
    assert load_any("tpuv3-like") == load_npu("tpuv3-like")
    with pytest.raises(
        DeviceError, match=r"^unknown device '!!!!'; known: agx-orin, h200, nnpi-like, .*zcu104-resnet50"
    ):
        load_any("!!!!")


# Files


@pytest.mark.parametrize("name", socs())
def test_a_soc_written_as_a_file_loads_again(tmp_path: Path, name):
    path = tmp_path / "soc.toml"
    path.write_text(soc_as_toml(load_soc(name)), encoding="utf-8")
    assert load_soc(str(path)) == load_any(str(path)) == load_soc(name)


def test_a_unit_left_plain_shares():
    unit = parse_soc(SMALL, "file.toml").units[0]
    assert unit.contention == BandwidthSharing() and unit.instances == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bandwith_gb_s": 1.0}, "unknown key 'bandwith_gb_s'; did you mean 'bandwidth_gb_s'?"),
        ({"units": [{"name": "gpu", "instanses": 2}]}, "unknown key 'units.0.instanses'; did you mean 'instances'?"),
        ({"units": []}, "units = []: "),
        ({"units": [{}]}, "units.0.name is missing"),
        ({"units": [{"name": "a\nb"}]}, r"units.0.name = 'a\nb': "),
        ({"units": [{"name": "gpu"}, {"name": "gpu"}]}, "each its own; got gpu, gpu"),
        ({"units": [{"name": "gpu", "instances": 0}]}, "units.0.instances = 0: "),
        ({"units": [{"name": "gpu", "efficiency": 1.5}]}, "units.0.efficiency = 1.5: "),
        ({"units": [{"name": "gpu", "peak_tflops": -1.0}]}, "units.0.peak_tflops = -1.0: "),
        ({"bandwidth_gb_s": 0.0}, "bandwidth_gb_s = 0.0: "),
        ({"bandwidth_gb_s": float("nan")}, "bandwidth_gb_s = nan: "),
        ({"transition_us": -1.0}, "transition_us = -1.0: "),
        ({"kind": "npu"}, "is of kind 'npu'"),
        ({"kind": None}, "is of kind None"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(change, message):
    assert message in refused(SMALL | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "queue"}, "units.0.contention"),
        ({"rate": 1.0}, "did you mean 'rate_n'?"),
        ({"rate_n": -1.0}, "rate_n = -1.0: "),
        ({"cbp": float("inf")}, "cbp = inf: "),
        ({"pbw": 0.0}, "pbw = 0.0: "),
        ({"mrmc_pct": 101.0}, "mrmc_pct = 101.0: "),
        ({"floor_pct": 0.0}, "floor_pct = 0.0: "),
    ],
)
def test_contention_parameters_are_checked(change, message):
    contention = GPU.model_dump() | change
    assert message in refused(SMALL | {"units": [{"name": "gpu", "contention": contention}]})


def test_a_missing_contention_parameter_is_named():
    contention = {key: value for key, value in GPU.model_dump().items() if key != "cbp"}
    assert "cbp is missing" in refused(SMALL | {"units": [{"name": "gpu", "contention": contention}]})


def test_the_commands_list_and_show_socs(tmp_path):
    listed = CliRunner().invoke(devices, ["list"]).output
    assert "tpuv3-like" in listed and "xavier-agx" in listed and "gpu, dla" in listed
    path = tmp_path / "soc.toml"
    path.write_text(CliRunner().invoke(devices, ["show", "orin"]).output, encoding="utf-8")
    assert load_soc(str(path)) == load_soc("agx-orin")


# Contention


def test_the_minor_region_loses_up_to_mrmc_at_the_calibrated_peak():
    assert relative_speed(GPU, 30.0, 127.5 / 2) == pytest.approx(100 - 4.9 / 2)
    assert relative_speed(GPU, 38.1, 127.5) == pytest.approx(100 - 4.9)
    assert relative_speed(GPU, 38.1, 500.0) == pytest.approx(100 - 4.9)  # nothing is known beyond


def test_the_normal_region_drops_from_one_total_demand_to_one_external_demand():
    assert relative_speed(GPU, 60.0, 20.0) == pytest.approx(100 - 4.9 * 20 / 127.5)  # 80 is below 87.2: as minor
    assert relative_speed(GPU, 60.0, 40.0) == pytest.approx(100 - (100 - 87.2) * 1.11)
    assert relative_speed(GPU, 60.0, 45.3) == pytest.approx(100 - (60 - 41.9) * 1.11)
    assert relative_speed(GPU, 60.0, 100.0) == pytest.approx(100 - (60 - 41.9) * 1.11)  # flat after 45.3


def test_the_intensive_region_drops_from_the_first_byte_to_the_same_plateau():
    plateau = (107 - 41.9) * 1.11
    assert relative_speed(GPU, 107.0, 10.0) == pytest.approx(100 - plateau * 10 / 45.3)
    assert relative_speed(GPU, 107.0, 80.0) == pytest.approx(100 - plateau) == pytest.approx(27.739)
    assert relative_speed(DLA, 40.0, 35.5) == pytest.approx(100 - (40 + 49) * 0.35 / 2)


def test_the_dla_has_no_minor_region():
    assert relative_speed(DLA, 10.0, 30.0) == pytest.approx(100 - (40 - 22) * 0.35)
    assert relative_speed(DLA, 10.0, 12.0) == 100.0


def test_the_floor_holds_where_the_lines_would_cross_zero():
    assert relative_speed(GPU, 136.5, 136.5) == 10.0  # 100 - 94.6 * 1.11 is below
    assert load_soc("xavier").slow_down(0, 136.5, 136.5) == 10.0


def test_sharing_starts_where_the_memory_is_full():
    soc = soc_with(BandwidthSharing())
    assert soc.slow_down(0, 60.0, 40.0) == 1.0
    assert soc.slow_down(0, 60.0, 90.0) == 1.5


@given(models, amounts, amounts)
def test_the_compiled_slow_down_is_the_plain_one(model, own, others):
    soc = soc_with(model)
    assert slow_down(soc.contention_table()[0], own, others) == soc.slow_down(0, own, others)


@given(models, amounts, amounts, amounts)
def test_more_traffic_of_others_never_makes_a_unit_faster(model, own, others, more):
    soc = soc_with(model)
    assert soc.slow_down(0, own, others + more) >= soc.slow_down(0, own, others) >= 1.0


@given(models, amounts)
def test_a_unit_alone_or_one_that_asks_for_nothing_is_not_slowed(model, amount):
    soc = soc_with(model)
    assert soc.slow_down(0, amount, 0.0) == soc.slow_down(0, 0.0, amount) == 1.0


@given(pccs, amounts, amounts)
def test_no_unit_falls_below_its_floor(model, own, others):
    assert model.floor_pct <= relative_speed(model, own, others) <= 100


def test_each_row_of_the_table_is_a_unit():
    soc = load_soc("xavier")
    table = soc.contention_table()
    for unit, demand in ((0, 60.0), (1, 20.0)):
        assert slow_down(table[unit], demand, 90.0) == soc.slow_down(unit, demand, 90.0)
    assert table[0, 1] == table[1, 1] == 136.5
