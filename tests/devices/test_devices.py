"""Device descriptions: the papers' numbers in the presets, and files that cannot be used refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from weft.base.errors import DeviceError
from weft.devices import Npu, check_activations, load_device, load_npu, parse_npu, presets
from weft.devices.costs.layer_costs import LayerCost, Profile
from weft.devices.costs.program import Clock
from weft.simulation import simulate
from weft.workloads import Saturated

SMALL: dict[str, Any] = {
    "name": "small",
    "bandwidth_gb_s": 100.0,
    "weight_buffer_mib": 2.0,
    "activation_buffer_mib": 1.0,
    "clock_mhz": 1000.0,
    "array_rows": 4,
    "array_columns": 8,
    "weight_rows_per_cycle": 4,
    "vector_bytes_per_cycle": 16.0,
}


def file_of(tmp_path: Path, text: str) -> str:
    path = tmp_path / "device.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refused(raw: dict[str, Any]) -> str:
    """The one line with which a description is refused."""
    with pytest.raises(DeviceError) as caught:
        parse_npu(raw, "file.toml")
    message = str(caught.value)
    assert message.startswith("file.toml: ")
    assert "\n" not in message
    return message


# The presets


def test_every_preset_loads_under_its_own_name():
    decoupled = ["nnpi-like", "tpuv3-like", "weaver-plus"]
    boards = ["zc706-inception-v3", "zc706-resnet50"]
    tiled = [*boards, "zcu104-inception-v3", "zcu104-inception-v3-printed", "zcu104-resnet50"]
    assert presets() == [*decoupled, *tiled]
    for name in presets():
        device = load_device(name)
        assert device.name == name
        assert device.source
        assert device.kind == ("npu" if name in decoupled else "tiled")


def test_the_memory_centric_preset_has_the_numbers_of_table_one():
    npu = load_npu("tpuv3-like")
    assert npu.macs_per_s == 128 * 128 * 700e6
    assert npu.bandwidth_bytes_per_s == 225e9
    assert npu.weight_buffer_bytes == 48 * 2**20
    assert npu.activation_buffer_mib == 36 + 24
    assert round(npu.ridge_ops_per_byte) == 102


def test_the_compute_centric_preset_has_the_numbers_of_table_one():
    npu = load_npu("nnpi-like")
    assert npu.macs_per_s == 12 * 4096 * 927e6
    assert npu.bandwidth_bytes_per_s == 68e9
    assert npu.weight_buffer_bytes == 48 * 2**20
    # 92 TOP/s over 68 GB/s is the published 1353 op/B; 12 x 4096 MACs at 927 MHz are 91.1 TOP/s
    assert npu.ridge_ops_per_byte == pytest.approx(1353, rel=0.01)


def test_the_inference_npu_of_layerweaver_plus_has_a_ridge_of_1280():
    npu = load_npu("weaver-plus")
    assert 2 * npu.macs_per_s == 128e12
    assert npu.ridge_ops_per_byte == 1280
    assert npu.weight_buffer_mib == 50


def test_an_unknown_preset_is_refused_with_the_nearest_name():
    with pytest.raises(DeviceError, match=r"unknown device 'tpuv3'; did you mean tpuv3-like\? .*ends in \.toml"):
        load_npu("tpuv3")


def test_a_name_like_no_preset_is_refused_with_all_of_them():
    with pytest.raises(DeviceError, match="known: nnpi-like, tpuv3-like, weaver-plus, zc706-inception-v3, "):
        load_npu("!!!!!!!!")


# Files


def test_a_file_describes_a_device(tmp_path):
    lines = [f"{key} = {value!r}" for key, value in SMALL.items()]
    npu = load_npu(file_of(tmp_path, "\n".join(lines).replace("'", '"')))
    assert npu == Npu(**SMALL)
    assert npu.macs_per_s == 4 * 8 * 1e9


def test_an_unknown_key_is_refused_with_a_near_one():
    message = refused(SMALL | {"bandwith_gb_s": 1.0})
    assert message == "file.toml: unknown key 'bandwith_gb_s'; did you mean 'bandwidth_gb_s'?"


@pytest.mark.parametrize("value", [0, -1.0, -225, float("nan"), float("inf"), float("-inf"), 1e300, 1e-300, "fast"])
@pytest.mark.parametrize("key", ["bandwidth_gb_s", "weight_buffer_mib", "activation_buffer_mib", "clock_mhz"])
def test_a_quantity_that_is_not_positive_and_finite_is_refused_by_name(key, value):
    message = refused(SMALL | {key: value})
    assert message.startswith(f"file.toml: {key} = {value!r}: ")


@pytest.mark.parametrize("value", [0, -3, 1.5, 2**40])
@pytest.mark.parametrize("key", ["array_rows", "array_columns", "engines", "positions", "weight_rows_per_cycle"])
def test_a_count_that_is_no_count_is_refused_by_name(key, value):
    assert refused(SMALL | {key: value}).startswith(f"file.toml: {key} = {value!r}: ")


@pytest.mark.parametrize("key", ["name", "bandwidth_gb_s", "array_rows", "weight_rows_per_cycle"])
def test_a_missing_key_is_named(key):
    assert refused({k: v for k, v in SMALL.items() if k != key}) == f"file.toml: {key} is missing"


@pytest.mark.parametrize("name", ["", "two\nlines", "bell\a"])
def test_a_name_that_cannot_be_printed_is_refused(name):
    assert refused(SMALL | {"name": name}).startswith("file.toml: name = ")


def test_another_kind_of_device_is_refused():
    assert "'npu'" in refused(SMALL | {"kind": "gpu"})
    assert "a SoC of several units, and this needs an NPU" in refused(SMALL | {"kind": "soc"})


@pytest.mark.parametrize(
    "text",
    ["name = ", "{}", "a = 1\na = 2", "x = " + "9" * 5000, "x = " + "[" * 5000],
    ids=["half a line", "json", "a key twice", "a number of 5000 digits", "5000 brackets"],
)
def test_a_file_that_is_not_toml_is_refused_in_a_line(tmp_path, text):
    path = file_of(tmp_path, text)
    with pytest.raises(DeviceError, match="not a TOML file") as caught:
        load_npu(path)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_text_are_refused(tmp_path):
    path = tmp_path / "device.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DeviceError, match="cannot read the device file"):
        load_npu(str(path))


@pytest.mark.parametrize("path", ["/nowhere/device.toml", "nul\0nul.toml"])
def test_a_file_that_is_not_there_is_refused(path):
    with pytest.raises(DeviceError, match="cannot read the device file"):
        load_npu(path)


def test_a_folder_is_not_a_device(tmp_path):
    folder = tmp_path / "device.toml"
    folder.mkdir()
    with pytest.raises(DeviceError, match="cannot read the device file"):
        load_npu(str(folder))


# Values


def test_a_device_cannot_be_changed():
    npu = Npu(**SMALL)
    with pytest.raises(ValidationError, match="frozen"):
        npu.array_rows = 5


def test_a_chunk_is_an_eighth_of_the_buffer_unless_said_and_never_more_than_all_of_it():
    assert Npu(**SMALL).chunk_bytes == 2**21 // 8
    assert Npu(**SMALL, chunk_mib=0.5).chunk_bytes == 2**19
    assert Npu(**SMALL, chunk_mib=3.0).chunk_bytes == 2**21


def test_a_buffer_holds_at_least_a_byte():
    assert Npu(**SMALL | {"weight_buffer_mib": 1e-6}).weight_buffer_bytes == 1  # 1.05 bytes
    assert Npu(**SMALL | {"weight_buffer_mib": 1e-6}).chunk_bytes == 1


# Activations


def profile(model: str, activation_bytes: int) -> Profile:
    return Profile(model, "small", 1, (LayerCost(f"{model}0", 1e-6, 1000, activation_bytes),))


def test_activations_that_fill_the_buffer_exactly_are_accepted():
    check_activations(Npu(**SMALL), [("a", 2**19), ("b", 2**19)])


def test_activations_that_overflow_by_a_byte_are_refused_with_the_models_the_sizes_and_the_way_out():
    with pytest.raises(DeviceError) as caught:
        check_activations(Npu(**SMALL), [("cnn", 2**19 + 1), ("bert", 2**19)])
    message = str(caught.value)
    for part in ("small", "1.00 MiB together", "cnn 0.50", "bert 0.50", "has 1.00 MiB", "--batch", "--spill"):
        assert part in message
    assert "\n" not in message


def test_simulate_refuses_what_does_not_fit_and_spill_pays_for_it_on_the_channel():
    npu = Npu(**SMALL)
    heavy, light = profile("heavy", 3 * 2**19), profile("light", 2**19)  # 2 MiB for 1 MiB
    with pytest.raises(DeviceError, match=r"heavy 1\.50, light 0\.50"):
        simulate([heavy, light], npu, "fifo", Saturated(1))
    trace = simulate([heavy, light], npu, "fifo", Saturated(1), spill=True).trace
    # each keeps half of what it needs on chip; the other half goes out and comes back
    assert trace.weight_bytes.tolist() == [1000 + 2 * (3 * 2**19) // 2, 1000 + 2 * (2**19) // 2]


def test_spill_changes_nothing_where_everything_fits():
    npu = Npu(**SMALL)
    fits = [profile("a", 1000), profile("b", 2000)]
    assert simulate(fits, npu, "fifo", Saturated(1), spill=True).trace.weight_bytes.tolist() == [1000, 1000]


def test_a_buffer_the_channel_cannot_fill_in_time_is_refused():
    slow = {**load_npu("tpuv3-like").model_dump(), "weight_buffer_mib": 1e9, "bandwidth_gb_s": 1e-6}
    with pytest.raises(DeviceError, match="GB/s takes too long to fill"):
        Clock.of(parse_npu(slow, "slow"))


@pytest.mark.parametrize(("key", "value"), [("engines", True), ("clock_mhz", "12"), ("name", "two\nlines")])
def test_values_of_another_kind_are_refused(key, value):
    with pytest.raises(DeviceError, match=key):
        parse_npu({**load_npu("tpuv3-like").model_dump(), key: value}, "odd")
