"""The design-space search: what it finds for the papers' boards, its fronts, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.commands import run
from weft.base.errors import InputError
from weft.devices import Board, TiledNpu, load_device, load_platform, presets
from weft.devices.costs.explore import Exploration, design_points, explore, pareto_front
from weft.devices.costs.tiled import layer_times_s
from weft.models.layer import Gemm, Layer, Model
from weft.models.sources import load_model

TINY = Board(name="tiny", dsps=24, bram_bits=40_000, clock_mhz=100.0, bandwidth_gb_s=0.5)


def net(name: str, *gemms: Gemm) -> Model:
    return Model(name, tuple(Layer(f"l{place}", "conv", "Conv", gemm=gemm) for place, gemm in enumerate(gemms)))


WIDE = net("wide", Gemm(400, 9, 16), Gemm(100, 144, 16), Gemm(100, 144, 16), Gemm(1, 16, 10))
DEEP = net("deep", Gemm(30, 200, 5), Gemm(4, 300, 7), Gemm(4, 8, 7, 3))


# What it finds


@pytest.mark.parametrize(("model", "designs"), [("resnet50", {(7, 128)}), ("inception-v3", {(4, 224), (4, 225)})])
def test_the_search_on_the_smaller_board_finds_the_designs_of_table_one(model, designs):
    best = explore([load_model(model)], load_platform("zc706")).device()
    assert (best.t_p, best.t_c) in designs


def test_every_printed_number_of_rows_is_the_most_the_memory_holds():
    for name in presets():
        device = load_device(name)
        if isinstance(device, TiledNpu) and device.platform:
            tile = design_points(load_platform(device.platform))
            place = np.flatnonzero((tile.t_p == device.t_p) & (tile.t_c == device.t_c))
            assert tile.t_r[place].tolist() == [device.t_r]


def test_the_points_are_all_that_fit_and_no_rows_more_would():
    tile = design_points(TINY, even=False)
    found = {(int(p), int(c)): int(r) for r, p, c in zip(*tile, strict=True)}
    assert found.keys() == {(p, c) for p in range(1, 25) for c in range(1, 25) if p * c <= 24}
    for (t_p, t_c), t_r in found.items():
        bits = [32 * (rows * t_p + t_p * t_c + rows * t_c) for rows in (t_r, t_r + 1)]
        assert bits[0] <= TINY.bram_bits < bits[1]


@pytest.mark.parametrize("batching", ["fluid", "r", "fc"])
@pytest.mark.parametrize("stackable", [True, False])
def test_every_design_has_the_times_that_pricing_it_alone_gives(batching, stackable):
    found = explore([WIDE, DEEP], TINY, max_batch=3, batching=batching, stackable=stackable, elementwise="ddr")
    for index in range(0, len(found), 7):
        device = found.device(index)
        for place, model in enumerate((WIDE, DEEP)):
            alone = [math.fsum(layer_times_s(model, device, batch)) for batch in (1, 2, 3)]
            assert found.times_s[place, :, index] == pytest.approx(alone, rel=1e-12)
            rates = [2e-9 * model.macs * batch / time for batch, time in zip((1, 2, 3), alone, strict=True)]
            assert found.gops[place, :, index] == pytest.approx(rates)


def test_layers_that_are_no_product_cost_every_design_alike():
    pool = Layer("pool", "pool", "MaxPool", input_elements=1000, output_elements=250)
    with_pool = Model("pooled", (*WIDE.layers, pool))
    free, paid = (explore([with_pool], TINY, elementwise=reading) for reading in ("free", "ddr"))
    assert paid.times_s[0, 1] - free.times_s[0, 1] == pytest.approx(2 * 1250 * 2 / 0.5e9)


def test_weights_say_which_batches_count():
    alone = explore([WIDE], TINY, max_batch=2, weights=[1, 0])
    assert alone.scores == pytest.approx(alone.gops[0, 0])
    together = explore([WIDE], TINY, max_batch=2, weights=[1, 3])
    assert together.scores == pytest.approx(together.gops[0, 0] + 3 * together.gops[0, 1])


def test_several_models_count_by_the_geometric_mean_of_their_scores():
    wide, deep, both = (explore(models, TINY, max_batch=2) for models in ([WIDE], [DEEP], [WIDE, DEEP]))
    assert both.scores == pytest.approx(np.sqrt(wide.scores * deep.scores))
    assert both.models == ("wide", "deep")
    assert both.scores[both.best] == both.scores.max()


def test_more_bandwidth_or_clock_never_hurts():
    base = explore([WIDE], TINY, max_batch=2)
    for more in ({"bandwidth_gb_s": 1.0}, {"clock_mhz": 200.0}):
        faster = explore([WIDE], TINY, max_batch=2, **more)
        assert (faster.times_s <= base.times_s).all()
        assert faster.scores.max() > base.scores.max()


def test_progress_counts_up_to_its_number_of_steps():
    seen: list[tuple[int, int]] = []
    explore([WIDE, DEEP], TINY, max_batch=3, progress=lambda done, of: seen.append((done, of)))
    assert [done for done, _ in seen] == list(range(seen[0][1]))
    assert {of for _, of in seen} == {2 * 3}


# Fronts


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30))
def test_the_front_is_every_point_nothing_dominates_once(points):
    costs, values = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    undominated = {
        (c, v) for c, v in points if not any(a <= c and b >= v and (a, b) != (c, v) for a, b in points)
    }  # fmt: skip
    front = pareto_front(costs, values)
    assert [points[index] for index in front] == sorted(undominated)


def test_the_best_design_is_on_the_front_of_sizes():
    found = explore([WIDE], TINY, max_batch=4)
    assert found.scores[found.size_front[-1]] == found.scores[found.best]
    latencies = found.latency_s[found.latency_front]
    assert (np.diff(latencies) > 0).all() and (np.diff(found.throughput[found.latency_front]) > 0).all()
    assert latencies[0] == found.latency_s.min()
    assert found.throughput[found.latency_front[-1]] == found.throughput.max()


# Refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_batch": 0}, "max_batch = 0 must be at least 1"),
        ({"weights": [1.0]}, "weights has 1 numbers for 8 batch sizes; give one for each size from 1"),
        ({"max_batch": 2, "weights": [0, 0]}, "must be finite, none negative and not all zero"),
        ({"max_batch": 2, "weights": [2, -1]}, "must be finite"),
        ({"max_batch": 2, "weights": [1, math.inf]}, "must be finite"),
        ({"bandwidth_gb_s": 0.0}, "bandwidth_gb_s = 0.0"),
        ({"clock_mhz": math.nan}, "clock_mhz = nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        explore([WIDE], TINY, **settings)


def test_a_search_over_nothing_is_refused():
    with pytest.raises(InputError, match="give at least one model"):
        explore([], TINY)
    pool = Layer("pool", "pool", "MaxPool", input_elements=4, output_elements=1)
    with pytest.raises(InputError, match="pools: no layer is a matrix product"):
        explore([Model("pools", (pool,))], TINY)
    with pytest.raises(InputError, match="do not hold the tiles of any design"):
        explore([WIDE], TINY.model_copy(update={"bram_bits": 64}))


# The command

BOARD = 'name = "tiny"\ndsps = 24\nbram_bits = 40000\nclock_mhz = 100.0\nbandwidth_gb_s = 0.5\n'
FAST = '[[calibration]]\nname = "fast"\nbandwidth_gb_s = 4.0\nreason = "a try"\n'


@pytest.fixture
def board(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(BOARD + FAST, encoding="utf-8")
    return str(path)


def test_the_command_prints_draws_and_writes_the_best_design(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, board: str
) -> None:
    png, out, device = tmp_path / "designs.png", tmp_path / "designs.json", tmp_path / "best.toml"
    code, shown, error = run(
        capsys, "explore", "npu", "--platform", board, "-m", "ncf", "-m", "resnet50", "--max-batch", "2",
        "--weights", "1,2", "--top", "3", "--figure", str(png), "--json", str(out), "--toml", str(device),
    )  # fmt: skip
    assert code == 0, error
    assert png.read_bytes().startswith(b"\x89PNG") and not png.with_suffix(".svg").exists()
    written = json.loads(out.read_text("utf-8"))
    best = load_device(str(device))
    assert isinstance(best, TiledNpu)
    columns = written["designs"]
    assert [columns[key][written["best"]] for key in ("t_r", "t_p", "t_c")] == [best.t_r, best.t_p, best.t_c]
    assert columns["score"][written["best"]] == max(columns["score"])
    assert np.array(written["times_s"]["ncf"]).shape == (2, len(columns["t_r"]))
    assert f"<{best.t_r}, {best.t_p}, {best.t_c}>" in shown
    assert sum(line.startswith("<") for line in shown.splitlines()) == 1 + 3  # the heading
    assert "look-up table of 54 layers x 2 batch sizes, 324 bits" in shown


def test_the_command_takes_a_bandwidth_or_the_name_of_one(capsys: pytest.CaptureFixture[str], board: str) -> None:
    arguments = ("explore", "npu", "--platform", board, "-m", "ncf", "--max-batch", "1", "--bandwidth")
    assert "at 100 MHz and 4 GB/s" in run(capsys, *arguments, "fast")[1]
    assert "at 100 MHz and 2.5 GB/s" in run(capsys, *arguments, "2.5")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--platform", "zc70", "-m", "ncf"), "unknown platform 'zc70'; did you mean zc706"),
        (("-m", "resnet5"), "unknown model 'resnet5'"),
        (("-m", "ncf", "--weights", "1,one"), "--weights '1,one' is not of the form 1,1,2"),
        (("-m", "ncf", "--weights", "1,1"), "--weights has 2 numbers for 8 batch sizes"),
        (("-m", "ncf", "--max-batch", "0"), "--max-batch 0 must be at least 1"),
        (("-m", "ncf", "--bandwidth", "slow"), "zc706: unknown calibration 'slow'"),
        (("-m", "ncf", "--bandwidth", "-3"), "--bandwidth -3.0"),
        (("-m", "ncf", "--top", "0"), "--top 0"),
        (
            ("-m", "ncf", "--max-batch", "1", "--figure", "designs.gif"),
            "--figure designs.gif: its name ends in .png or .svg",
        ),
    ],
)
def test_the_command_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, _, error = run(capsys, "explore", "npu", *arguments)
    assert code == 2
    assert error.startswith("weft: ") and error.count("\n") == 1
    assert message in error


def test_an_exploration_counts_its_designs():
    found = explore([WIDE], TINY, max_batch=1)
    assert isinstance(found, Exploration)
    assert len(found) == len(found.scores) == found.times_s.shape[-1]
