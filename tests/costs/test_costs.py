"""Cost models: against the tools they restate, by hand, and never faster than an ideal array."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import DATA
from weft.base.errors import InputError
from weft.devices import Npu, load_npu
from weft.devices.costs import COSTS, cost_model, maestro_cycles, pipelined_cycles, roofline_cycles, scalesim_cycles
from weft.models.layer import Gemm

TABLES = DATA / "npu"
MAESTRO_FILES = sorted(TABLES.glob("maestro_ws128x128_*.json"))
TPU = load_npu("tpuv3-like")


def read(name: str) -> Any:
    return json.loads((TABLES / name).read_text("utf-8"))


def array(rows: int, columns: int, **others: int) -> Npu:
    """An array whose memory is of no concern; weights enter it in no time unless said."""
    sizes = {"array_rows": rows, "array_columns": columns, "weight_rows_per_cycle": rows} | others
    ample = {"bandwidth_gb_s": 1, "weight_buffer_mib": 1, "activation_buffer_mib": 1, "vector_bytes_per_cycle": 1}
    return Npu(name="array", clock_mhz=1, **sizes, **ample)


def gemm_of(layer: dict[str, Any]) -> Gemm:
    """A layer of the data files as a product."""
    if layer["type"] in ("gemm", "bmm"):
        return Gemm(layer["M"], layer["K"], layer["N"], groups=layer.get("count", 1))
    groups, kernel = layer["groups"], layer["R"] * layer["S"]
    positions = layer["OH"] * layer["OW"]
    return Gemm(positions, layer["C"] // groups * kernel, layer["K"] // groups, groups, kernel)


# Against the tools


def test_scalesim_equals_the_tool_on_every_layer_it_simulated():
    simulated = [layer for layer in read("scalesim_ws128x128_resnet50.json")["layers"] if layer["match"] is not None]
    ours = {layer["name"]: scalesim_cycles(Gemm(layer["T"], layer["Sr"], layer["Sc"]), TPU) for layer in simulated}
    assert len(ours) == 36
    assert ours == {layer["name"]: layer["scalesim_compute_cycles"] for layer in simulated}


@pytest.mark.parametrize("path", MAESTRO_FILES, ids=lambda path: path.stem.removeprefix("maestro_ws128x128_"))
def test_maestro_is_within_a_cycle_of_the_tool_on_every_layer(path):
    for layer in read(path.name)["layers"]:
        alone = gemm_of(layer | {"count": 1})
        assert abs(maestro_cycles(alone, TPU) - layer["cycles_one"]) <= 1, layer["name"]
        assert abs(maestro_cycles(gemm_of(layer), TPU) - layer["cycles"]) <= layer["repeat"], layer["name"]


def test_the_maestro_data_covers_convolutions_depthwise_products_and_heads():
    assert len(MAESTRO_FILES) == 5
    kinds = {layer["type"] for path in MAESTRO_FILES for layer in read(path.name)["layers"]}
    assert kinds == {"conv", "dwconv", "gemm", "bmm"}


@pytest.mark.parametrize("network", ["resnext50_32x4d", "inceptionv3", "bert_large_s384"])
def test_maestro_totals_agree_with_the_tool_on_networks_known_only_in_sum(network):
    layers = read("layer_tables.json")[network]["layers"]
    ours = sum(maestro_cycles(gemm_of(layer), TPU) for layer in layers)
    assert ours == pytest.approx(read("maestro_summary.json")[network]["cycles"], abs=len(layers))


# Worked by hand


def test_pipelined_streams_its_rows_once_per_fold_and_fills_and_drains_once():
    gemm = Gemm(m=10, k=9, n=5)  # 3 folds of rows by 2 of columns on 4 x 4
    assert pipelined_cycles(gemm, array(4, 4)) == 3 * 2 * 10 + 4 + 4 - 2


def test_pipelined_packs_small_groups_on_the_diagonal():
    # k = 3 fits twice into 8 rows, n = 2 four times into 8 columns: two groups share a fold
    assert pipelined_cycles(Gemm(m=10, k=3, n=2, groups=5), array(8, 8)) == 3 * 10 + 8 + 8 - 2
    # and the other way round: four by rows, two by columns
    assert pipelined_cycles(Gemm(m=10, k=2, n=3, groups=5), array(8, 8)) == 3 * 10 + 8 + 8 - 2


def test_pipelined_packs_a_depthwise_layer_by_its_reduction():
    # k = 9 fits 14 times into 128 rows, n = 1 fits 128 times into the columns: ceil(32 / 14) = 3 folds
    gemm = Gemm(m=100, k=9, n=1, groups=32, kernel=9)
    assert pipelined_cycles(gemm, array(128, 128)) == 3 * 100 + 128 + 128 - 2


def test_pipelined_does_not_pack_groups_that_fill_the_array():
    assert pipelined_cycles(Gemm(m=10, k=5, n=8, groups=3), array(8, 8)) == 3 * 10 + 14


def test_pipelined_waits_for_weights_that_enter_row_by_row():
    gemm = Gemm(m=3, k=8, n=8)
    assert pipelined_cycles(gemm, array(8, 8, weight_rows_per_cycle=8)) == 3 + 14
    assert pipelined_cycles(gemm, array(8, 8, weight_rows_per_cycle=2)) == max(3, 8 // 2) + 14
    assert pipelined_cycles(gemm, array(8, 8, weight_rows_per_cycle=1)) == max(3, 8) + 14


def test_pipelined_engines_share_tiles_where_there_are_tiles():
    gemm = Gemm(m=10, k=4, n=24)  # 6 tiles of 4 columns
    assert pipelined_cycles(gemm, array(4, 4, engines=1)) == 6 * 10 + 6
    assert pipelined_cycles(gemm, array(4, 4, engines=6)) == 10 + 6
    assert pipelined_cycles(gemm, array(4, 4, engines=4)) == 15 + 6  # 2 x 2: 3 tiles of 5 rows beats 2 tiles of 10


def test_pipelined_engines_share_rows_where_there_is_one_tile():
    assert pipelined_cycles(Gemm(m=10, k=4, n=4), array(4, 4, engines=5)) == 10 // 5 + 6


def test_pipelined_positions_take_several_rows_a_cycle():
    assert pipelined_cycles(Gemm(m=10, k=4, n=4), array(4, 4, positions=4)) == 3 + 6


def test_a_vector_times_a_matrix_costs_a_cycle_a_fold_or_the_loading_of_it():
    gemv = Gemm(m=1, k=256, n=512)  # 2 x 4 folds on 128 x 128
    assert roofline_cycles(gemv, array(128, 128)) == 8
    assert pipelined_cycles(gemv, array(128, 128)) == 8 * 1 + 254
    assert pipelined_cycles(gemv, array(128, 128, weight_rows_per_cycle=1)) == 8 * 128 + 254
    assert scalesim_cycles(gemv, array(128, 128)) == 8 * (2 * 128 + 128 + 1 - 2) - 1
    assert maestro_cycles(gemv, array(128, 128)) == 8 * 2 + 1


def test_scalesim_loads_streams_and_drains_every_fold_and_every_group():
    # each of 2 folds: 4 rows of weights to load, 10 rows to stream, 4 - 1 to skew, 4 - 1 to drain; less one in all
    assert scalesim_cycles(Gemm(m=10, k=8, n=4), array(4, 4)) == 2 * (4 + 10 + 3 + 3) - 1
    assert scalesim_cycles(Gemm(m=10, k=8, n=4, groups=3), array(4, 4)) == 3 * 39


def test_engines_widen_the_array_of_scalesim_and_maestro():
    gemm = Gemm(m=10, k=4, n=8)
    assert scalesim_cycles(gemm, array(4, 4, engines=2)) == 2 * 4 + 8 + 10 - 2 - 1
    assert maestro_cycles(gemm, array(4, 4, engines=2)) == 10 * 2 + 1


def test_roofline_rounds_up_macs_over_units():
    gemm = Gemm(m=3, k=5, n=7)  # 105 MACs
    assert roofline_cycles(gemm, array(2, 2)) == 27
    assert roofline_cycles(gemm, array(2, 2, positions=3, engines=5)) == 2


# Never faster than an ideal array

SIZES = st.integers(1, 300)
ARRAYS = st.builds(
    lambda rows, columns, positions, engines, load: array(
        rows, columns, positions=positions, engines=engines, weight_rows_per_cycle=load
    ),
    st.integers(1, 130),
    st.integers(1, 130),
    st.integers(1, 8),
    st.integers(1, 12),
    st.integers(1, 130),
)
GEMMS = st.builds(
    lambda m, channels, n, groups, kernel: Gemm(m, channels * kernel, n, groups, kernel),
    SIZES,
    SIZES,
    SIZES,
    st.integers(1, 40),
    st.sampled_from([1, 9, 25]),
)


@pytest.mark.parametrize("name", sorted(COSTS))
@settings(max_examples=30, derandomize=True, deadline=None)
@given(gemm=GEMMS, npu=ARRAYS)
def test_no_cost_model_is_faster_than_the_roofline(name, gemm, npu):
    assert COSTS[name](gemm, npu) >= -(-gemm.macs // (npu.array_rows * npu.array_columns * npu.positions * npu.engines))


@settings(max_examples=25, derandomize=True, deadline=None)
@given(gemm=GEMMS, npu=ARRAYS)
def test_more_rows_never_take_less_time(gemm, npu):
    more = Gemm(gemm.m + 1, gemm.k, gemm.n, gemm.groups, gemm.kernel)
    for cycles in COSTS.values():
        assert cycles(more, npu) >= cycles(gemm, npu)


def test_an_unknown_cost_model_is_refused_with_the_nearest_name():
    with pytest.raises(InputError, match=r"unknown cost model 'maestr'; did you mean maestro\?"):
        cost_model("maestr")
