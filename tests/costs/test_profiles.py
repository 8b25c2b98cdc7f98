"""Profiles: how a model becomes costs, and what a file may and may not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base.errors import InputError, ModelError, ProfileError, WorkloadError
from weft.devices import Npu
from weft.devices.costs.layer_costs import (
    LayerCost,
    Profile,
    cut,
    estimate,
    read_profile,
    spill,
    write_profile,
)
from weft.models.layer import Gemm, Layer, Model

HZ = 1e9
NPU = Npu(
    name="small",
    bandwidth_gb_s=100,
    weight_buffer_mib=1,
    activation_buffer_mib=1,
    clock_mhz=1000,
    array_rows=4,
    array_columns=4,
    weight_rows_per_cycle=4,
    vector_bytes_per_cycle=16,
)
FILL = 4 + 4 - 2
"""Cycles in which the array fills and drains."""


def gemm(name: str, m: int = 10, k: int = 4, n: int = 4, **others: Any) -> Layer:
    return Layer(
        name, "gemm", "Gemm", Gemm(m, k, n), weights=k * n, input_elements=m * k, output_elements=m * n, **others
    )


def relu(name: str, elements: int = 80) -> Layer:
    """Reads and writes *elements* of two bytes each: 20 cycles for 80 of them."""
    return Layer(name, "elementwise", "Relu", input_elements=elements, output_elements=elements)


def scores(name: str, heads: int = 3) -> Layer:
    product = Gemm(5, 2, 2, groups=heads)  # two heads fit on the array's diagonal
    return Layer(name, "matmul", "MatMul", product, input_elements=20, output_elements=20, reuses_weights=False)


def cycles(profile: Profile) -> list[int]:
    return [round(layer.compute_s * HZ) for layer in profile.layers]


# Estimates


def test_weightless_layers_are_folded_into_the_layer_before_and_the_first_ones_into_the_layer_after():
    model = Model("m", (relu("in"), relu("in2"), gemm("a"), relu("x"), relu("y"), gemm("b")))
    profile = estimate(model, NPU)
    assert [layer.name for layer in profile.layers] == ["a", "b"]
    assert cycles(profile) == [2 * 20 + 10 + FILL + 2 * 20, 10 + FILL]
    assert [layer.weight_bytes for layer in profile.layers] == [16 * 2, 16 * 2]


def test_a_folded_layer_keeps_the_larger_activation():
    profile = estimate(Model("m", (gemm("a"), relu("x", 300))), NPU)
    assert profile.layers[0].activation_bytes == profile.peak_activation_bytes == 300 * 2


def test_values_wider_than_the_device_are_stored_at_its_width_and_narrower_ones_at_their_own():
    assert [
        estimate(Model("m", (gemm("a", weight_bits=bits),)), NPU).weight_bytes for bits in (32, 16, 8, 4)
    ] == [32, 32, 16, 8]  # fmt: skip


def test_a_batch_adds_rows_where_weights_are_shared():
    layer = gemm("a", m=10)
    assert cycles(estimate(Model("m", (layer,)), NPU, batch=8)) == [80 + FILL]
    assert estimate(Model("m", (layer,)), NPU, batch=8).weight_bytes == 16 * 2
    assert estimate(Model("m", (layer,)), NPU, batch=8).peak_activation_bytes == 8 * 10 * 4 * 2


def test_a_batch_adds_products_where_both_operands_are_activations():
    model = Model("m", (gemm("a"), scores("s", heads=3)))
    alone, batched = (estimate(model, NPU, batch=batch) for batch in (1, 2))
    assert cycles(alone) == [10 + FILL + 2 * 5 + FILL]  # 3 heads in 2 folds
    assert cycles(batched) == [20 + FILL + 3 * 5 + FILL]  # 6 heads in 3


def test_a_batch_looks_up_more_of_a_table_but_reads_a_streamed_one_once():
    table = {"name": "t", "kind": "embedding", "op": "Gather", "output_elements": 8}
    gathered, streamed = Layer(**table, lookups=8), Layer(**table, weights=100)
    assert [estimate(Model("m", (gathered,)), NPU, batch=batch).weight_bytes for batch in (1, 3)] == [16, 48]
    assert [estimate(Model("m", (streamed,)), NPU, batch=batch).weight_bytes for batch in (1, 3)] == [200, 200]


def test_a_streamed_table_is_read_in_chunks():
    table = Layer("t", "embedding", "Gather", weights=2**17, output_elements=8)  # 2^18 bytes; a chunk is 2^17
    profile = estimate(Model("m", (table, gemm("a"))), NPU)
    assert [(layer.name, layer.weight_bytes) for layer in profile.layers] == [
        ("t[1/2]", 2**17), ("t[2/2]", 2**17), ("a", 32),
    ]  # fmt: skip


def test_what_comes_before_a_streamed_table_is_not_computed_after_it():
    table = Layer("t", "embedding", "Gather", weights=2**17, output_elements=32)  # 4 cycles, in two chunks
    profile = estimate(Model("m", (relu("in"), table, gemm("a"))), NPU)
    assert cycles(profile) == [20 + 2, 2, 10 + FILL]
    assert [layer.name for layer in estimate(Model("m", (relu("in"), table)), NPU).layers] == ["t[1/2]", "t[2/2]"]


def test_a_cost_model_is_chosen_by_name_and_a_wrong_one_refused():
    model = Model("m", (gemm("a", m=10, k=4, n=4),))
    assert cycles(estimate(model, NPU, cost="roofline")) == [10 * 4 * 4 // 16]
    assert cycles(estimate(model, NPU, cost="maestro")) == [10 * 2 + 1]
    with pytest.raises(InputError, match=r"unknown cost model 'rooflin'; did you mean roofline\?"):
        estimate(model, NPU, cost="rooflin")


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_of_nothing_is_refused(batch):
    with pytest.raises(WorkloadError, match=f"batch = {batch} must be at least 1"):
        estimate(Model("m", (gemm("a"),)), NPU, batch=batch)


# Cutting and spilling


def test_a_cut_keeps_every_byte_and_all_of_the_time():
    pieces = cut(LayerCost("a", 1.0, 10, 7), 4)
    assert [(p.name, p.weight_bytes, p.activation_bytes) for p in pieces] == [
        ("a[1/3]", 3, 7), ("a[2/3]", 3, 7), ("a[3/3]", 4, 7),
    ]  # fmt: skip
    assert sum(p.compute_s for p in pieces) == pytest.approx(1.0)


def test_a_spill_moves_twice_the_overflow_of_each_layer():
    profile = Profile("m", "d", 1, (LayerCost("a", 1.0, 10, 50), LayerCost("b", 1.0, 10, 100)))
    assert [layer.weight_bytes for layer in spill(profile, 60).layers] == [10, 10 + 2 * 40]


# Values


@pytest.mark.parametrize("seconds", [-1e-9, float("nan"), float("inf"), 1.1e6])
def test_a_time_that_is_no_time_is_refused(seconds):
    with pytest.raises(ProfileError, match=r"compute_s = .* is not a time"):
        LayerCost("a", seconds, 1)


@pytest.mark.parametrize("key", ["weight_bytes", "activation_bytes"])
@pytest.mark.parametrize("size", [-1, 2**48 + 1])
def test_a_size_that_is_no_size_is_refused(key, size):
    with pytest.raises(ProfileError, match=f"{key} = {size} is not a size"):
        LayerCost(**{"name": "a", "compute_s": 1.0, "weight_bytes": 1, key: size})


def test_a_layer_that_costs_nothing_is_refused():
    with pytest.raises(ProfileError, match="'a' costs nothing"):
        LayerCost("a", 0.0, 0)


def test_a_profile_without_layers_or_batch_is_refused():
    with pytest.raises(ProfileError, match="at least one layer"):
        Profile("m", "d", 1, ())
    with pytest.raises(ProfileError, match="batch = 0"):
        Profile("m", "d", 0, (LayerCost("a", 1.0, 1),))


# Files

GOOD: dict[str, Any] = {
    "format": 1,
    "model": "m",
    "device": "chip",
    "batch": 2,
    "layers": [
        {"name": "a", "compute_s": 1e-6, "weight_bytes": 100, "activation_bytes": 5},
        {"name": "b", "compute_s": 0, "weight_bytes": 7},
    ],
}


def with_layer(**changes: Any) -> str:
    """The good file, its first layer changed, as text."""
    return json.dumps(GOOD | {"layers": [GOOD["layers"][0] | changes, GOOD["layers"][1]]})


def read_text(path: Path, text: str | bytes) -> Profile:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_profile(path)


def refused(path: Path, text: str | bytes) -> str:
    """What follows the path in the one line with which a file is refused."""
    with pytest.raises(ProfileError) as caught:
        read_text(path, text)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "profile.json"


def test_a_file_says_what_each_layer_costs(path):
    profile = read_text(path, json.dumps(GOOD))
    assert (profile.model, profile.device, profile.batch) == ("m", "chip", 2)
    assert profile.layers == (LayerCost("a", 1e-6, 100, 5), LayerCost("b", 0.0, 7, 0))


def test_a_profile_written_and_read_again_is_the_same(path):
    profile = estimate(Model("m", (gemm("a"), relu("x"), gemm("b", m=7))), NPU, batch=3)
    write_profile(profile, path)
    again = read_profile(path)
    assert (again.model, again.device, again.batch) == (profile.model, profile.device, profile.batch)
    assert again.layers == profile.layers


def test_a_path_that_cannot_be_written_is_the_callers_mistake(tmp_path):
    with pytest.raises(InputError, match="cannot write"):
        write_profile(Profile("m", "d", 1, (LayerCost("a", 1.0, 1),)), tmp_path / "no" / "folder.json")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (with_layer(compute_s=-1), "layers.0.compute_s = -1: "),
        (with_layer(compute_s=float("nan")), "NaN is not a number a file may hold"),
        (with_layer(compute_s=float("inf")), "Infinity is not a number a file may hold"),
        (with_layer(compute_s=float("-inf")), "-Infinity is not a number a file may hold"),
        (with_layer().replace("1e-06", "1e999"), "layers.0.compute_s = inf: "),
        (with_layer(compute_s="fast"), "layers.0.compute_s = 'fast': "),
        (with_layer(weight_bytes=-1), "layers.0.weight_bytes = -1: "),
        (with_layer(weight_bytes=1.5), "layers.0.weight_bytes = 1.5: "),
        (with_layer(weight_bytes=True), "layers.0.weight_bytes = True: "),
        (with_layer(weight_bytes=2**60), f"layers.0.weight_bytes = {2**60}: "),
        (with_layer(weight_bytes=0), "layer 'a' has weight_bytes = 0; add its compute_s to the layer before it"),
        (with_layer(activation_bytes=-1), "layers.0.activation_bytes = -1: "),
        (with_layer(name=3), "layers.0.name = 3: "),
        (with_layer(weight_bites=3), "unknown key 'layers.0.weight_bites'"),
        (json.dumps(GOOD | {"modle": "x"}), "unknown key 'modle'; did you mean 'model'?"),
        (json.dumps(GOOD | {"format": 2}), "format = 2: "),
        (json.dumps(GOOD | {"batch": 0}), "batch = 0: "),
        (json.dumps(GOOD | {"layers": []}), "layers = []: "),
        (json.dumps({key: value for key, value in GOOD.items() if key != "device"}), "device is missing"),
        (json.dumps(GOOD | {"model": ["x"] * 1000}), "model = ['x', 'x', "),
        ("[]", "the file = []: "),
        ("hello", "not a JSON file: "),
        ("", "not a JSON file: "),
        (json.dumps(GOOD)[:-1], "not a JSON file: "),
        (with_layer().replace("100", "9" * 5000), "not a JSON file: "),
        ("[" * 100_000, "not a JSON file: "),
        ('{"a":' * 100_000, "not a JSON file: "),
        (b"\xff\xfe\x00", "not a JSON file: it is not text"),
    ],
    ids=str,
)
def test_a_file_that_cannot_be_true_is_refused_in_a_line_that_names_the_place(path, text, complaint):
    assert refused(path, text).startswith(complaint)


@pytest.mark.parametrize("where", ["missing.json", "nul\0nul.json", "."])
def test_a_file_that_cannot_be_opened_is_refused(tmp_path, where):
    with pytest.raises(ProfileError):
        read_profile(f"{tmp_path}/{where}")


GOOD_BYTES = json.dumps(GOOD).encode()
TOKENS = [*rb'0 - 1e999 NaN null [ ] { } , " \ud800'.split(), b"\xff", b"9" * 50, b""]


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """The good file with some stretches of it replaced."""
    text = GOOD_BYTES
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(text)))
        end = begin + draw(st.integers(0, 12))
        text = text[:begin] + draw(st.sampled_from(TOKENS) | st.binary(max_size=3)) + text[end:]
    return text


@settings(max_examples=50, derandomize=True, deadline=None)
@given(text=mutations())
def test_a_damaged_file_is_read_or_refused_in_a_line_and_nothing_else(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    try:
        profile = read_text(path, text)
    except ProfileError as error:
        assert "\n" not in str(error)
    else:
        assert profile.layers
        assert all(layer.weight_bytes > 0 and 0 <= layer.compute_s <= 1e6 for layer in profile.layers)


def test_two_layers_of_one_name_are_refused(path):
    text = json.dumps(
        {"format": 1, "model": "m", "device": "d", "batch": 1,
         "layers": [{"name": "a", "compute_s": 1, "weight_bytes": 1}] * 2}
    )  # fmt: skip
    assert "two layers are called 'a'" in refused(path, text)


def test_a_misspelt_key_of_a_layer_is_refused_with_the_nearest(path):
    layer = {"name": "a", "compute_s": 1, "weight_byte": 1}
    text = json.dumps({"format": 1, "model": "m", "device": "d", "batch": 1, "layers": [layer]})
    assert "weight_bytes" in refused(path, text)


def test_a_model_without_weights_has_nothing_to_weave():
    with pytest.raises(ModelError, match="nothing to weave"):
        estimate(Model("adder", (relu("add"),)), NPU)
