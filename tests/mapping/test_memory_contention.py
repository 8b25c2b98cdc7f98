"""Calibration: the fit of the published sample and of matrices of known parameters, and this machine measured."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from weft.base.errors import InputError
from weft.devices import BandwidthSharing, Pccs, load_soc
from weft.devices.soc import relative_speed
from weft_map import memory_contention
from weft_map.cli.calibrate import command
from weft_map.kernels.streaming import BLOCK, stream
from weft_map.memory_contention import host_soc, measure_host
from weft_map.pccs_fit import (
    Matrix,
    calibration_as_dict,
    fit_matrix,
    fit_pccs,
    mean_error_points,
    read_matrix,
    sample_matrix,
)

OWN, EXTERNAL = np.linspace(8, 96, 12), np.linspace(10, 120, 12)
FLAT = np.repeat(OWN[:, None], len(EXTERNAL), axis=1)


def matrix_of(model: Pccs, own=OWN, external=EXTERNAL) -> Matrix:
    achieved = [[x * relative_speed(model, float(x), float(y)) / 100 for y in external] for x in own]
    return Matrix(own, external, np.array(achieved))


def known(**changes: float) -> Pccs:
    return Pccs(
        **{"normal_bw": 35.0, "intensive_bw": 75.0, "mrmc_pct": 4.0, "pbw": 120.0, "tbwdc": 74.0, "cbp": 55.0}
        | {"rate_n": 0.66}
        | changes
    )


def refusal(own=OWN, external=EXTERNAL, achieved=FLAT, **changes) -> str:
    with pytest.raises(InputError) as caught:
        fit_pccs(own, external, achieved, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# The published sample


def test_the_sample_is_fitted_to_under_two_points_from_about_five():
    fit = fit_matrix(sample_matrix())
    assert fit.contended
    assert 4.5 < fit.start_error_points < 5.5
    assert fit.mean_error_points < 1.5
    assert mean_error_points(fit.model, sample_matrix()) == fit.mean_error_points


def test_the_five_steps_read_off_the_sample_what_can_be_read_by_eye():
    start = fit_matrix(sample_matrix()).start
    assert (start.normal_bw, start.intensive_bw, start.pbw) == (37.6, 65.7, 127.4)
    assert start.mrmc_pct == pytest.approx(100 - 100 * 36.2 / 37.6, abs=1e-3)
    # the two normal rows lose twice the first one's 3.2 points from 38.1 and 25.6 GB/s on, no more after 51.3 and 63.1
    assert start.tbwdc == pytest.approx((46.8 + 38.1 + 55.1 + 25.6) / 2)
    assert start.cbp == pytest.approx((51.3 + 63.1) / 2)
    falls = [(45.7 - 40.2) / 46.8 / 12.5, (40.2 - 40.1) / 46.8 / 13.2, (51.2 - 44.9) / 55.1 / 12.5]
    assert start.rate_n == pytest.approx(25 * sum([*falls, (44.9 - 41.6) / 55.1 / 13.2]), abs=1e-3)


def test_a_fit_is_the_same_every_time():
    assert fit_matrix(sample_matrix()) == fit_matrix(sample_matrix())


def test_the_error_is_that_of_the_plain_model():
    matrix, model = sample_matrix(), Pccs(**known().model_dump() | {"pbw": 100.0, "floor_pct": 80.0})
    plain = [
        abs(relative_speed(model, float(x), float(y)) - matrix.relative_speed_pct[i, j])
        for i, x in enumerate(matrix.own_gb_s)
        for j, y in enumerate(matrix.external_gb_s)
    ]
    assert mean_error_points(model, matrix) == pytest.approx(np.mean(plain), rel=1e-12)


# Known parameters


@pytest.mark.parametrize(
    "model",
    [
        known(),
        known(tbwdc=97.4, cbp=63.5, rate_n=0.4),
        known(normal_bw=20.0, intensive_bw=60.0, tbwdc=64.0, rate_n=1.14),
        known(mrmc_pct=0.5, tbwdc=88.9, intensive_bw=61.0, cbp=53.4),
    ],
)
def test_a_fit_recovers_the_parameters_of_a_synthetic_matrix(model):
    found = fit_matrix(matrix_of(model))
    assert found.mean_error_points < 0.05 < found.start_error_points
    for name in ("mrmc_pct", "tbwdc", "cbp", "rate_n"):
        assert getattr(found.model, name) == pytest.approx(getattr(model, name), rel=0.02, abs=0.05)
    assert abs(found.model.intensive_bw - model.intensive_bw) < 8  # a border is only known to lie between two rows
    assert found.model.normal_bw < model.normal_bw + 8


def test_a_unit_without_a_minor_region_is_fitted_too():
    model = known(normal_bw=0.0, mrmc_pct=0.0, intensive_bw=28.0, tbwdc=22.0, cbp=71.0, rate_n=0.35)
    found = fit_matrix(matrix_of(model))
    assert found.model.normal_bw == 0.0
    assert found.mean_error_points < 0.1


def test_a_unit_that_only_knows_the_minor_region_is_fitted_too():
    found = fit_matrix(matrix_of(known(normal_bw=200.0)))
    assert found.contended and found.mean_error_points < 0.05
    assert found.model.mrmc_pct == pytest.approx(4.0, abs=0.05)


def test_noise_moves_a_fit_little():
    exact = matrix_of(known())
    noise = 1 + 0.005 * np.random.default_rng(0).standard_normal(exact.achieved_gb_s.shape)
    found = fit_matrix(Matrix(OWN, EXTERNAL, exact.achieved_gb_s * noise))
    assert found.mean_error_points < 1
    assert mean_error_points(found.model, exact) < 0.7


@pytest.mark.parametrize("scale", [1e-2, 1e3])
def test_the_fit_does_not_depend_on_how_fast_the_memory_is(scale):
    exact = matrix_of(known())
    scaled = fit_pccs(OWN * scale, EXTERNAL * scale, exact.achieved_gb_s * scale)
    assert scaled.mean_error_points < 0.1


@pytest.mark.parametrize("kept", [0.02, 0.5, 0.95])
def test_any_steady_loss_gives_a_model(kept):
    found = fit_pccs(OWN, EXTERNAL, FLAT * kept)
    assert found.contended and found.mean_error_points <= found.start_error_points


def test_matrices_of_chance_give_models():
    rng = np.random.default_rng(1)
    for _ in range(10):
        rows, columns = rng.integers(3, 8, 2)
        own, external = np.cumsum(rng.uniform(1, 9, rows)), np.cumsum(rng.uniform(1, 9, columns))
        found = fit_pccs(own, external, own[:, None] * rng.uniform(0.05, 1.2, (rows, columns)))
        assert found.mean_error_points <= found.start_error_points


# No contention


@pytest.mark.parametrize("kept", [1.0, 0.99, 1.03])
def test_a_matrix_without_contention_says_so(kept):
    found = fit_pccs(OWN, EXTERNAL, FLAT * kept)
    assert not found.contended
    assert found.lost_pct == pytest.approx(100 - 100 * kept)
    assert relative_speed(found.model, 50.0, 80.0) == 100.0


def test_a_single_outlier_is_not_contention():
    spiked = FLAT.copy()
    spiked[5, -1] *= 0.7
    assert not fit_pccs(OWN, EXTERNAL, spiked).contended
    assert not fit_pccs(OWN[:3], EXTERNAL[:3], spiked[4:7, -3:] * OWN[:3, None] / OWN[4:7, None]).contended


def test_what_counts_as_noise_is_the_matrix_own():
    assert fit_pccs(OWN, EXTERNAL, FLAT * 0.95).contended
    assert not fit_pccs(OWN, EXTERNAL, FLAT * 0.95, noise_pct=6.0).contended


# Refusals


def test_a_matrix_of_the_wrong_shape_is_refused():
    assert refusal(achieved=FLAT[:, :5]).startswith("achieved_gb_s is 12 x 5; ")
    assert refusal(achieved=FLAT[0]).startswith("achieved_gb_s is 12; ")
    assert refusal(own=OWN[:2], achieved=FLAT[:2]) == "own_gb_s: a contention matrix needs 3 to 64 levels, not 2"
    assert "2 dimensions" in refusal(external=FLAT)
    assert "rows of the same length" in refusal(achieved=[[1.0], [1.0, 2.0]])
    assert "needs numbers" in refusal(own=["fast", "slow", "slower"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 0.0, 1e9])
def test_values_that_cannot_be_bandwidths_are_refused(bad):
    for name, levels in (("own_gb_s", OWN), ("external_gb_s", EXTERNAL)):
        changed = levels.copy()
        changed[3] = bad
        assert refusal(**{name.removesuffix("_gb_s"): changed}).startswith(f"{name}: {bad:g} comes after ")
    achieved = FLAT.copy()
    achieved[2, 3] = bad
    assert refusal(achieved=achieved).startswith(f"achieved_gb_s[2][3] = {bad:g} where the work alone draws 24")


def test_levels_that_do_not_increase_and_noise_that_is_none_are_refused():
    assert "8 comes after 96" in refusal(own=[*OWN[1:], 8.0])
    assert refusal(noise_pct=float("nan")).startswith("noise_pct = nan")


# Files


def test_a_calibration_file_reads_as_its_matrix(tmp_path):
    matrix = matrix_of(known())
    path = tmp_path / "matrix.json"
    path.write_text(json.dumps(calibration_as_dict(matrix, fit_matrix(matrix))), encoding="utf-8")
    assert fit_matrix(read_matrix(path)) == fit_matrix(matrix)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"own": [1]}, "unknown key 'own'"),
        ({"format": 2}, "format = 2: "),
        ({"achieved_gb_s": [[1.0]]}, "achieved_gb_s is 1 x 1; "),
        ({"own_gb_s": "fast"}, "own_gb_s = 'fast': "),
        ({"peak_gb_s": -1.0}, "peak_gb_s = -1.0: "),
    ],
)
def test_a_file_that_is_no_matrix_is_refused_by_name(tmp_path, change, message):
    matrix = matrix_of(known())
    path = tmp_path / "matrix.json"
    path.write_text(json.dumps(calibration_as_dict(matrix, fit_matrix(matrix)) | change), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_matrix(path)
    assert str(caught.value).startswith(f"{path}: {message}")


# This machine


def test_the_kernel_reads_every_number_once():
    data = np.arange(10.0 * BLOCK)
    assert stream(data, 0, 10, 0) == data.sum()
    assert stream(data, 2 * BLOCK, 1, 3) == (data[2 * BLOCK : 3 * BLOCK].sum()) / 8 + 1.75


def test_this_machine_is_measured_whatever_it_is_like():
    if len(memory_contention.physical_cores()) < 2:
        pytest.skip("one core cannot contend")
    seen: list[tuple[int, int]] = []
    before = set(threading.enumerate())
    matrix = measure_host(levels=3, seconds=0.1, on_progress=lambda *done: seen.append(done))
    assert set(threading.enumerate()) <= before
    assert seen[-1][0] == seen[-1][1] == len(seen)
    assert matrix.achieved_gb_s.shape == (3, 3) and (matrix.achieved_gb_s > 0).all()
    assert host_soc(matrix, fit_matrix(matrix), instances=2).units[0].instances == 2


@pytest.fixture
def ten_gb_s(monkeypatch):
    """Two cores that read 10 GB/s each and take a nanosecond for a step of arithmetic, by clocks of their own."""
    spent = threading.local()

    def read(data, start, blocks, steps):
        spent.ns = getattr(spent, "ns", 0.0) + blocks * (8 * BLOCK / 10 + steps)

    def sleep(seconds):
        time.sleep(min(seconds, 1e-4))  # for other threads to run; one that has not is waited for

    monkeypatch.setattr(memory_contention, "stream", read)
    monkeypatch.setattr(
        memory_contention, "time", SimpleNamespace(thread_time=lambda: getattr(spent, "ns", 0.0) / 1e9, sleep=sleep)
    )
    monkeypatch.setattr(memory_contention, "physical_cores", lambda: [0, 1])
    monkeypatch.setattr(memory_contention, "last_level_cache", lambda: 1)


def test_a_measurement_finds_what_cores_of_known_speed_read(ten_gb_s):
    """A tenth of the bandwidth, little more than half of it and all of it, whatever the other core does."""
    matrix = measure_host(levels=3)
    block_ns, steps = 8 * BLOCK / 10, np.round(8 * BLOCK / 10 * (1 / np.array([0.1, 0.55, 1.0]) - 1))
    expected = 8 * BLOCK / (block_ns + steps)
    assert expected == pytest.approx([1.0, 5.5, 10.0], rel=0.01)
    assert matrix.own_gb_s == pytest.approx(expected) and matrix.external_gb_s == pytest.approx(expected)
    assert matrix.achieved_gb_s == pytest.approx(np.repeat(expected[:, None], 3, axis=1))
    assert matrix.peak_gb_s == pytest.approx(20.0)
    assert not fit_matrix(matrix).contended


def test_one_core_is_refused_in_a_line(monkeypatch):
    monkeypatch.setattr(memory_contention, "physical_cores", lambda: [0])
    with pytest.raises(InputError, match=r"one core only, and contention takes two; fit a measured matrix instead$"):
        measure_host()


@pytest.mark.parametrize("bad", [{"levels": 2}, {"levels": 99}, {"seconds": 0.0}, {"seconds": float("nan")}])
def test_a_measurement_that_cannot_be_made_is_refused(bad):
    with pytest.raises(InputError, match="measure "):
        measure_host(**bad)


def test_a_soc_of_a_matrix_has_its_model_or_none():
    contended = matrix_of(known())
    fit = fit_matrix(contended)
    soc = host_soc(contended, fit, name="board", unit="gpu")
    assert soc.units[0].contention == fit.model and soc.bandwidth_gb_s == 120.0
    calm = Matrix(OWN, EXTERNAL, FLAT, peak_gb_s=216.0)
    soc = host_soc(calm, fit_matrix(calm))
    assert soc.units[0].contention == BandwidthSharing() and soc.bandwidth_gb_s == 216.0
    assert "no contention" in soc.source


# The command


def calibrate(*arguments: str):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, arguments)


def test_the_command_fits_a_matrix_and_writes_a_device_and_a_file(tmp_path):
    matrix = matrix_of(known())
    given, device, written = (tmp_path / name for name in ("in.json", "soc.toml", "out.json"))
    given.write_text(json.dumps(calibration_as_dict(matrix, fit_matrix(matrix))), encoding="utf-8")
    result = calibrate("--matrix", str(given), "--toml", str(device), "--json", str(written))
    assert result.exit_code == 0
    assert "rate_n" in result.output and "mean error, points" in result.output
    assert load_soc(str(device)).units[0].contention == fit_matrix(matrix).model
    assert json.loads(written.read_text("utf-8"))["fit"]["contended"] is True
    assert calibrate("--matrix", str(written)).output.splitlines()[:-2] == result.output.splitlines()[:-4]


def test_the_command_says_when_there_is_no_contention(tmp_path):
    matrix = Matrix(OWN, EXTERNAL, FLAT)
    given = tmp_path / "in.json"
    given.write_text(json.dumps(calibration_as_dict(matrix, fit_matrix(matrix))), encoding="utf-8")
    output = calibrate("--matrix", str(given)).output
    assert "no contention: 0.0 % is lost to others" in output
    assert "rate_n" not in output
    assert isinstance(calibrate("--quick", "--matrix", str(given)).exception, InputError)
