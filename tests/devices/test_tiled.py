"""The tiled NPU: boards and designs, the cost formula against its own loop nest, and the look-up tables."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product as pairs
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base.errors import DeviceError, InputError
from weft.devices import (
    TiledNpu,
    as_toml,
    load_device,
    load_npu,
    load_platform,
    parse_tiled,
    platforms,
    presets,
)
from weft.devices.costs.tiled import EDGES, READINGS, TiledChoice, choices, layer_times_s, lookup_table
from weft.devices.tiled import Batching, Edges, Elementwise, PReading
from weft.engine.policies import POLICIES
from weft.kernels.tiled import ProductWork, time_s, work
from weft.models.layer import Gemm, Layer, Model
from weft.models.sources import load_model
from weft.simulation.requests import prepare, simulate_requests
from weft.workloads.requests import parse_workload

TABLE_1 = {  # preset: design, and the percentages of DSPs and BRAM the paper prints
    "zc706-resnet50": ((4652, 7, 128), 99.56, 99.96),
    "zcu104-resnet50": ((6832, 10, 172), 99.53, 99.99),
    "zc706-inception-v3": ((2742, 4, 225), 100.0, 99.94),
    "zcu104-inception-v3": ((6186, 9, 192), 100.0, 99.99),
    "zcu104-inception-v3-printed": ((6832, 10, 172), None, 99.99),  # 100.0 is printed, which this design is not
}
SMALL: dict[str, Any] = {
    "kind": "tiled",
    "name": "small",
    "t_r": 4,
    "t_p": 2,
    "t_c": 3,
    "clock_mhz": 1.0,
    "bandwidth_gb_s": 0.001,
}


def refused(raw: dict[str, Any]) -> str:
    with pytest.raises(DeviceError) as caught:
        parse_tiled(raw, "file.toml")
    message = str(caught.value)
    assert message.startswith("file.toml: ")
    assert "\n" not in message
    return message


def model_of(*layers: Layer) -> Model:
    return Model("net", layers)


def conv(m: int, k: int, n: int, groups: int = 1, *, kind: str = "conv", shared: bool = True) -> Layer:
    return Layer("layer", kind, "Conv", gemm=Gemm(m, k, n, groups), reuses_weights=shared)


# Boards and designs


@pytest.mark.parametrize("preset", TABLE_1)
def test_presets_use_the_share_of_their_board_that_table_one_prints(preset):
    design, dsp_percent, bram_percent = TABLE_1[preset]
    device = load_device(preset)
    assert isinstance(device, TiledNpu) and device.platform
    assert (device.t_r, device.t_p, device.t_c) == design
    board = load_platform(device.platform)
    assert 100 * device.bram_bits / board.bram_bits == pytest.approx(bram_percent, abs=0.02)
    if dsp_percent is not None:
        assert 100 * device.dsps / board.dsps == pytest.approx(dsp_percent, abs=0.02)


def test_the_design_that_would_fit_the_misprinted_row_does():
    raw = {"kind": "tiled", "name": "x", "platform": "zcu104", "t_r": 6186, "t_p": 9, "t_c": 192}
    device, board = parse_tiled(raw, "x"), load_platform("zcu104")
    assert device.dsps == board.dsps
    assert 100 * device.bram_bits / board.bram_bits == pytest.approx(99.99, abs=0.005)


@pytest.mark.parametrize("name", platforms())
def test_a_board_tells_the_reason_of_every_bandwidth(name):
    board = load_platform(name)
    assert board.name == name
    assert board.calibrated_gb_s("table-2") == board.bandwidth_gb_s
    assert all(entry.reason for entry in board.calibration)
    with pytest.raises(DeviceError, match=f"{name}: unknown calibration 'table'"):
        board.calibrated_gb_s("table")


def test_a_design_takes_clock_and_bandwidth_of_its_board_unless_it_says_otherwise():
    raw = {"kind": "tiled", "name": "x", "platform": "zc706", "t_r": 2, "t_p": 2, "t_c": 2}
    device = parse_tiled(raw, "x")
    assert (device.clock_mhz, device.bandwidth_gb_s) == (150.0, 2.4)
    assert parse_tiled({**raw, "bandwidth_gb_s": 9.0}, "x").bandwidth_gb_s == 9.0
    assert refused({key: value for key, value in raw.items() if key != "platform"}).startswith(
        "file.toml: clock_mhz is missing"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"t_c": 129}, "needs 903 DSPs (T_P x T_C) and zc706 has 900; lower t_p or t_c"),
        ({"t_r": 4654}, "needs 20133952 bits of BRAM (double-buffered tiles) and zc706 has 20132659; lower t_r"),
        ({"element_bits": 17}, "needs 21383144 bits of BRAM (double-buffered tiles) and zc706 has 20132659; lower t_r"),
    ],
)
def test_a_design_that_exceeds_its_board_is_one_line_with_resource_demand_and_bound(change, message):
    raw = {"kind": "tiled", "name": "big", "platform": "zc706", "t_r": 4652, "t_p": 7, "t_c": 128}
    assert message in refused({**raw, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"t_p": 0}, "t_p = 0"),
        ({"t_q": 1}, "unknown key 't_q'; did you mean"),
        ({"batching": "q"}, "batching = 'q'"),
        ({"p_reading": "sideways"}, "p_reading = 'sideways'"),
        ({"edges": "sharp"}, "edges = 'sharp'"),
        ({"elementwise": "slow"}, "elementwise = 'slow'"),
        ({"stackable": 1}, "stackable = 1"),
        ({"bandwidth_gb_s": math.inf}, "bandwidth_gb_s = inf"),
        ({"clock_mhz": -1.0}, "clock_mhz = -1.0"),
        ({"platform": 7}, "platform = 7"),
        ({"name": "a\nb"}, "name"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(change, message):
    assert message in refused({**SMALL, **change})


def test_a_board_of_ones_own_is_a_file(tmp_path: Path):
    board = tmp_path / "mine.toml"
    board.write_text('name = "mine"\ndsps = 6\nbram_bits = 100000\nclock_mhz = 10.0\nbandwidth_gb_s = 1.0\n')
    assert parse_tiled({**SMALL, "platform": str(board)}, "x").dsps == 6
    assert "needs 8 DSPs" in refused({**SMALL, "t_c": 4, "platform": str(board)})
    board.write_text('name = "mine"\ndsps = 6\n')
    with pytest.raises(DeviceError, match="bram_bits is missing"):
        load_platform(str(board))
    with pytest.raises(DeviceError, match=r"unknown platform 'zc70'; did you mean zc706.* \(a platform file ends in"):
        load_platform("zc70")


def test_load_npu_refuses_a_tiled_device_and_load_device_takes_both():
    with pytest.raises(DeviceError, match=r'^zc706-resnet50: a tiled NPU .* needs a device of kind "npu"$'):
        load_npu("zc706-resnet50")
    assert Counter(load_device(name).kind for name in presets()) == {"tiled": 5, "npu": 3}


@pytest.mark.parametrize("preset", presets())
def test_what_is_written_of_a_device_reads_back_the_same(preset, tmp_path: Path):
    path = tmp_path / "device.toml"
    path.write_text(as_toml(load_device(preset)), encoding="utf-8")
    assert load_device(str(path)) == load_device(preset)


def test_stackable_pes_pair_up_or_split_within_the_buffers_as_built():
    device = TiledNpu(**{**SMALL, "t_r": 9, "t_p": 7, "t_c": 5})
    assert device.shapes == ((1.0, 9, 7, 5), (2.0, 4, 14, 2), (0.5, 4, 3, 10))
    for _, t_r, t_p, t_c in device.shapes:
        assert t_p * t_c <= device.dsps
        assert t_r * t_p <= 9 * 7 and t_r * t_c <= 9 * 5
    assert len(TiledNpu(**{**SMALL, "stackable": False}).shapes) == 1
    assert [shape.k for shape in TiledNpu(**{**SMALL, "t_p": 1}).shapes] == [1.0, 2.0]  # a tree of one cannot split
    assert [shape.k for shape in TiledNpu(**{**SMALL, "t_r": 1}).shapes] == [1.0]


# The loop nest, enumerated


def lay_out(lanes: int, columns: int, t_c: int, reading: PReading) -> list[list[tuple[int, int]]]:
    """The (lane, column) each PE works on, pass by pass."""
    units = [[(lane, column) for column in range(columns)] for lane in range(lanes)]
    if reading in ("straddle", "refetch"):
        units = [[unit for lane in units for unit in lane]]
    elif reading == "groups" and columns <= t_c:
        beside = t_c // columns
        units = [[unit for lane in units[at : at + beside] for unit in lane] for at in range(0, lanes, beside)]
    return [row[at : at + t_c] for row in units for at in range(0, len(row), t_c)]


def enumerate_work(gemm: Gemm, tile: tuple[int, int, int], batch: int, b_r: int, reading: PReading) -> tuple[int, ...]:
    """Cycles, elements, fill and drain counted tile by tile."""
    t_r, t_p, t_c = tile
    lanes = batch - b_r + 1
    members = [max(0, min(b_r, batch - lane * b_r)) for lane in range(lanes)]
    assert sum(members) == batch
    passes = lay_out(lanes, gemm.n, t_c, reading)
    cycles = moved = fill = drain = 0
    for group, top, (number, pes) in pairs(range(gemm.groups), range(0, b_r * gemm.m, t_r), enumerate(passes)):
        rows = min(t_r, b_r * gemm.m - top)
        real = {lane: max(0, min(rows, members[lane] * gemm.m - top)) for lane, _ in pes}
        if reading == "straddle":  # a piece of a sample's columns is fetched in the pass where it begins
            slices = [lane for lane, column in pes if column % t_c == 0]
        else:
            slices = sorted({lane for lane, _ in pes})
        for at in range(0, gemm.k, t_p):
            width = min(t_p, gemm.k - at)
            load = width * (sum(real[lane] for lane in slices) + len(pes))
            fill = load if (group, top, number, at) == (0, 0, 0, 0) else fill
            cycles += rows
            moved += load
        written = sum(real[lane] for lane, _ in pes)
        drain = max(drain, written)
        moved += written
    return cycles, moved, fill, drain


def counted(gemm: Gemm, tile: tuple[int, int, int], batch: int, b_r: int, reading: PReading) -> ProductWork:
    """The same by the formula."""
    sizes = np.array([gemm.m, gemm.k, gemm.n, gemm.groups], float)
    return work(sizes, np.array(tile, float), batch, b_r, READINGS[reading])


sizes = st.integers(1, 9)
gemms = st.builds(Gemm, m=sizes, k=sizes, n=sizes, groups=st.integers(1, 3))
tiles = st.tuples(st.integers(1, 20), st.integers(1, 6), st.integers(1, 12))
readings = st.sampled_from(get_args(PReading))


@settings(max_examples=50)
@given(gemm=gemms, tile=tiles, batch=st.integers(1, 6), data=st.data(), reading=readings)
def test_the_formula_counts_what_the_loop_nest_does(gemm, tile, batch, data, reading):
    b_r = data.draw(st.integers(1, batch))
    assert counted(gemm, tile, batch, b_r, reading) == enumerate_work(gemm, tile, batch, b_r, reading)


def enumerated_time_s(layer: Layer, device: TiledNpu, batch: int) -> float:
    """The layer's best time over every split and shape its device allows, from the enumeration."""
    bytes_per_s, element_bytes = device.bandwidth_gb_s * 1e9, device.element_bits / 8
    if layer.gemm is None:
        moved = batch * (layer.input_elements + layer.output_elements) * element_bytes
        return moved / bytes_per_s if device.elementwise == "ddr" else 0.0
    singly = {
        "fluid": False,
        "p": False,
        "r": not layer.reuses_weights,
        "fc": not layer.reuses_weights or layer.kind == "conv",
        "none": True,
    }[device.batching]
    size = 1 if singly else batch
    if device.batching == "fluid" and layer.reuses_weights:
        splits = list(range(1, size + 1))
    else:
        splits = [size] if device.batching in ("r", "fc", "none") else [1]
    times = []
    for (_, *tile), b_r in pairs(device.shapes, splits):
        cycles, moved, fill, drain = enumerate_work(layer.gemm, tuple(tile), size, b_r, device.p_reading)
        compute, traffic = cycles / (device.clock_mhz * 1e6), moved * element_bytes / bytes_per_s
        edges = (fill + drain) * element_bytes / bytes_per_s
        times.append(
            {
                "added": max(compute, traffic) + edges,
                "within": edges + max(compute, traffic - edges),
                "none": max(compute, traffic),
            }[device.edges]
        )
    return min(times) * (batch // size)


devices = st.builds(
    TiledNpu,
    name=st.just("any"),
    t_r=st.integers(1, 20),
    t_p=st.integers(1, 6),
    t_c=st.integers(1, 12),
    clock_mhz=st.just(1.0),
    bandwidth_gb_s=st.sampled_from([0.0005, 0.002, 0.01]),
    element_bits=st.sampled_from([8, 16]),
    batching=st.sampled_from(get_args(Batching)),
    stackable=st.booleans(),
    p_reading=readings,
    elementwise=st.sampled_from(get_args(Elementwise)),
    edges=st.sampled_from(get_args(Edges)),
)
layers = st.builds(
    Layer,
    name=st.just("layer"),
    kind=st.sampled_from(["conv", "gemm", "matmul"]),
    op=st.just("Any"),
    gemm=st.none() | gemms,
    input_elements=sizes,
    output_elements=sizes,
    reuses_weights=st.booleans(),
)


@settings(max_examples=40)
@given(device=devices, some=st.lists(layers, min_size=1, max_size=3), batch=st.integers(1, 5))
def test_a_layer_takes_the_best_the_loop_nest_can_do_under_all_options(device, some, batch):
    found = layer_times_s(model_of(*some), device, batch)
    assert found == pytest.approx([enumerated_time_s(layer, device, batch) for layer in some], rel=1e-12)


# Worked by hand


def test_a_product_of_one_tile_is_its_roofline_and_its_edges():
    once = counted(Gemm(4, 2, 3), (4, 2, 3), 1, 1, "straddle")
    # 4 rows, one step, one pass; 4x2 inputs, 2x3 weights, 4x3 outputs
    assert once == (4, 8 + 6 + 12, 8 + 6, 12)
    s_per_cycle, s_per_element = 3.0, 2.0
    times = {name: time_s(once, s_per_cycle, s_per_element, code) for name, code in EDGES.items()}
    assert times == {"added": 2 * 26 + 2 * 26, "within": 3 * 4 + 2 * 26, "none": 2 * 26}


@pytest.mark.parametrize(("reading", "passes"), [("straddle", 3), ("refetch", 3), ("groups", 4), ("broadcast", 4)])
def test_what_samples_side_by_side_gain_depends_on_the_reading(reading, passes):
    """4 samples of 3 columns over 4 PEs: end to end 3 passes; whole ones, one per pass."""
    assert counted(Gemm(5, 1, 3), (9, 1, 4), 4, 1, reading).cycles == 5 * passes


def test_samples_below_each_other_share_their_weights_and_samples_side_by_side_do_not():
    below, beside = (counted(Gemm(1, 100, 50), (8, 4, 4), 8, b_r, "straddle") for b_r in (8, 1))
    assert beside.elements - below.elements == 7 * 100 * 50


def test_sizes_beyond_64_bits_do_not_wrap_around():
    huge = 2**31
    layer = conv(huge, huge, huge)
    assert layer_times_s(model_of(layer), TiledNpu(**SMALL), 8)[0] > 8 * huge**3 / 6 / 1e6


# Choices and look-up tables


def test_fluid_is_never_slower_than_what_it_generalises():
    model = load_model("resnet50")
    base = load_device("zc706-resnet50")
    assert isinstance(base, TiledNpu)
    for batch in (1, 3, 8):
        fluid = layer_times_s(model, base, batch)
        for other in ({"batching": "r"}, {"batching": "p"}, {"stackable": False}):
            times = layer_times_s(model, base.model_copy(update=other), batch)
            assert all(ours <= theirs for ours, theirs in zip(fluid, times, strict=True))
            assert batch == 1 or sum(fluid) < sum(times)


def test_shallow_layers_lie_side_by_side_and_deep_ones_below_each_other():
    model = load_model("resnet50")
    rigid = load_device("zcu104-resnet50").model_copy(update={"stackable": False})
    chosen = dict(zip([layer.name for layer in model.layers], choices(model, rigid, 8), strict=True))
    products = {layer.name for layer in model.layers if layer.gemm}
    assert {chosen[name].b_p for name in products if name.startswith("layer2")} == {8}
    assert {chosen[name].b_r for name in products if name.startswith("layer4")} == {8}


def test_hardware_that_takes_convolutions_singly_batches_the_last_layer_only():
    model = model_of(conv(9, 4, 5), conv(1, 4, 5, kind="gemm"))
    device = TiledNpu(**{**SMALL, "batching": "fc"})
    single, batched = layer_times_s(model, device, 1), layer_times_s(model, device, 4)
    assert batched[0] == pytest.approx(4 * single[0])
    assert batched[1] < 4 * single[1]
    assert [choice.at_once for choice in choices(model, device, 4)] == [1, 4]
    serial = layer_times_s(model, TiledNpu(**{**SMALL, "batching": "none"}), 4)
    assert serial == pytest.approx([4 * time for time in single])


def test_products_of_two_activations_never_share_a_right_hand_side():
    model = model_of(conv(4, 4, 4, 2, kind="matmul", shared=False))
    assert choices(model, TiledNpu(**SMALL), 3)[0].b_r == 1
    assert choices(model, TiledNpu(**{**SMALL, "batching": "r"}), 3)[0].at_once == 1


def test_the_table_holds_a_split_and_a_setting_for_every_product_and_batch():
    model = load_model("resnet50")
    device = load_device("zc706-resnet50")
    assert isinstance(device, TiledNpu)
    table = lookup_table(model, device, 8)
    assert (len(table.layers), table.max_batch, table.bits_per_entry) == (54, 8, 3 + 2)
    assert table.storage_bits == 54 * 8 * 5
    for batch, row in enumerate(table.rows, 1):
        assert sum(choice.time_s for choice in row) == pytest.approx(sum(layer_times_s(model, device, batch)))
        assert all(1 <= choice.b_r <= batch and choice.b_p == batch - choice.b_r + 1 for choice in row)
    assert lookup_table(model, device, 1).bits_per_entry == 2
    assert lookup_table(model, device, 9).bits_per_entry == 4 + 2


def test_among_equals_the_shape_as_built_and_samples_below_each_other_win():
    ample = TiledNpu(**{**SMALL, "t_r": 100, "bandwidth_gb_s": 1000.0, "edges": "none"})
    assert choices(model_of(conv(4, 2, 3)), ample, 2)[0] == TiledChoice(2, 2, 1.0, 8e-6)


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_below_one_is_refused(batch):
    model, device = model_of(conv(1, 1, 1)), TiledNpu(**SMALL)
    with pytest.raises(InputError, match=f"at least one sample, not {batch}"):
        layer_times_s(model, device, batch)
    with pytest.raises(InputError, match=f"batches from 1, not up to {batch}"):
        lookup_table(model, device, batch)


# What the scheduler takes


@pytest.mark.parametrize("policy", ["serial", "adaptive", "fluid", "top-up", "lazy-batching", "fifo"])
def test_each_decision_takes_its_time_at_every_layer_or_at_exits_as_the_policy_is_asked(policy):
    stream = {"model": "resnet50", "arrival": "uniform", "rate": 2, "deadline_ms": 400, "max_batch": 1}
    leaving = {"exits": 3, "exit_rates": [0.25, 0.25, 0.0, 0.5]}
    load = parse_workload({"stream": [stream | leaving], "duration_s": 20, "warmup_s": 0}, "w.toml")
    base, runs = load_device("zc706-resnet50"), {}
    for decision_us in (0.0, 50.0):
        case = prepare(load, base.model_copy(update={"decision_us": decision_us}))
        runs[decision_us] = simulate_requests(case, policy).report
    free, charged = runs.values()
    program = case.setting_of(POLICIES[policy]).programs[0]
    products_and_heads_of_exits, exits = 54 + 3, 4
    assert len(program) == (products_and_heads_of_exits if POLICIES[policy].traits.by_layer else exits)
    asked = np.array([*program.exits, len(program)])[next(load.exits_taken(0))[: charged.streams[0].arrived]]
    assert len(set(asked)) == 3 and charged.decisions == free.decisions == asked.sum()
    added_s = charged.streams[0].mean_latency_s - free.streams[0].mean_latency_s  # nobody waits for another
    assert added_s == pytest.approx(50e-6 * asked.mean(), abs=1e-9 * asked.mean())
