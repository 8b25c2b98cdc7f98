"""Stitched files on a device in the form fused, read from the file, on the twin: the same answers as from the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.runtime.cuda.stitched import (
    CUT,
    Steady,
    begin,
    check_answers,
    described_file,
    is_fused,
    opened,
    samples,
    through,
    without_tools,
    write_family,
)
from tests.stitching.families import Drawing, plant
from weft.base.errors import ModelError
from weft.runtime.backend import BatchPart, LoadOptions, Step
from weft.runtime.cuda.cpu_twins import TWIN
from weft.runtime.cuda.device import HostDevice
from weft.runtime.cuda.engine import CudaEngine
from weft.runtime.cuda.preparing import prepare_on
from weft.runtime.cuda.rounds import StitchedDeviceModel
from weft.runtime.metadata import FAMILY_KEY
from weft.runtime.onnxruntime_cpu.allowance import Allowance
from weft.runtime.onnxruntime_cpu.model import CpuModel
from weft.runtime.onnxruntime_cpu.preparing import prepare
from weft_stitch.on_device import fused_file

SAME = "in the form fused: a row of each model takes 1 ms fused, 1 ms with ONNX Runtime"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return described_file(tmp_path_factory.mktemp("fused") / "body.onnx")


@pytest.fixture(scope="module")
def body(file: Path) -> CpuModel:
    return prepare(file, LoadOptions(max_batch=2))


@pytest.fixture(scope="module")
def model(file: Path) -> StitchedDeviceModel:
    return opened(file)


# --- what it computes -------------------------------------------------------------------------------------------------


def test_every_mix_of_tasks_gives_what_the_cpu_gives(model: StitchedDeviceModel, body: CpuModel) -> None:
    assert is_fused(model) and len(model.segments) == 6 and model.remarks == (SAME,)
    assert [each.rows for each in model._rungs] == [1, 2]
    for mix in ((1, 1, 1), (1, 0, 0), (0, 2, 0), (2, 0, 1), (0, 3, 2), (0, 0, 5)):
        check_answers(through(model, samples(model, mix)), body, samples(model, mix))


@pytest.mark.parametrize(("architecture", "form"), [("tiny-dense", "mts"), ("tiny-vgg", "separate")])
def test_other_nets_and_forms_of_the_file(architecture: str, form: str, tmp_path: Path) -> None:
    path = described_file(tmp_path / "body.onnx", architecture, form)
    found, body = opened(path), prepare(path, LoadOptions(max_batch=2))
    assert is_fused(found) and len(found.segments) > 1
    for mix in ((1, 1, 1), (0, 2, 0), (3, 0, 1)):
        check_answers(through(found, samples(found, mix)), body, samples(found, mix))


def test_where_rows_change_the_steps_it_stays_whole(tmp_path: Path) -> None:
    path = described_file(tmp_path / "body.onnx", "tiny-mobile")
    found, body = opened(path), prepare(path, LoadOptions(max_batch=2))
    assert len(found.segments) == 1
    assert found.remarks == (SAME, "stays whole: it has other steps for other numbers of rows")
    check_answers(through(found, samples(found, (2, 0, 1))), body, samples(found, (2, 0, 1)))


def test_batches_in_turns_keep_what_is_theirs(model: StitchedDeviceModel, body: CpuModel) -> None:
    given = [samples(model, mix, 10 * at) for at, mix in enumerate([(1, 0, 2), (0, 2, 1), (3, 0, 0)])]
    values = [begin(model, each).values for each in given]
    for segment in range(1, len(model.segments)):
        made = [model.launch(Step(segment, [BatchPart(each)], 0)).outputs[0] for each in values]
        values = [each.values for each in made]
    for one, each in zip(given, made, strict=True):
        check_answers(dict(each.answers), body, one)


def test_inputs_that_are_read_as_they_come_are_cast(tmp_path: Path) -> None:
    drawing = Drawing([3, 3])
    left = drawing.add("conv", "image", width=[5, 6], kernel=3)
    right = drawing.add("conv", drawing.add("unary", "image"), width=[5, 6])
    drawing.add("conv", drawing.add("global_pool", drawing.add("add", left, right)), width=[3, 4])
    planted = plant(drawing, np.random.default_rng(0))
    path = write_family(tmp_path / "body.onnx", planted.family, planted.sharing)
    found = opened(path, LoadOptions(grain_s=1e-9, max_pieces=4, max_batch=2, precision="fp16"))
    assert is_fused(found) and len(found.segments) > 1
    given = {
        f"net{task}.image": np.random.default_rng(task).standard_normal((1, 3, 4, 4), np.float32) for task in (0, 1)
    }
    answers, wanted = found.run(given), prepare(path, LoadOptions(max_batch=2)).run(given)
    for name, each in wanted.items():
        assert answers[name].dtype == np.float32
        assert np.abs(answers[name] - each).max() <= 0.01 * np.abs(each).max()


def test_fp16_is_half_of_the_weights_and_tells_how_far_it_is_off(file: Path, model: StitchedDeviceModel) -> None:
    half = opened(file, LoadOptions(grain_s=1e-9, max_pieces=6, max_batch=4, precision="fp16"))
    assert is_fused(half) and half.remarks[-1].startswith("fp16: differs from float32 by up to ")
    assert half._weights.bytes < 0.6 * model._weights.bytes


# --- coming and going -------------------------------------------------------------------------------------------------


def test_it_is_learned_once(file: Path, body: CpuModel, tmp_path: Path) -> None:
    learned = opened(file, CUT, tmp_path)
    again = opened(file, CUT, tmp_path, learn=False)
    assert is_fused(again) and (again.segments, again.remarks) == (learned.segments, learned.remarks)
    check_answers(through(again, samples(again, (2, 1, 0))), body, samples(again, (2, 1, 0)))
    assert [each.name for each in tmp_path.rglob("*.*") if each.is_file()] == ["prepared.json"], "no weights"


def test_a_model_that_rests_answers_when_it_is_back(file: Path, body: CpuModel) -> None:
    engine = CudaEngine(TWIN)
    engine._device = Steady()
    found = engine.open(file, LoadOptions(grain_s=1e-9, max_pieces=3, max_batch=4, rests=True), None, learn=True)
    assert (
        isinstance(found, StitchedDeviceModel)
        and is_fused(found)
        and found.residency.moving_bytes > found._weights.bytes > 0
    )
    for turn, mix in enumerate([(1, 0, 2), (0, 1, 0)]):
        found.restore()
        check_answers(through(found, samples(found, mix, turn)), body, samples(found, mix, turn))
        found.evict()


def test_weights_lie_there_once_for_all_rounds(file: Path) -> None:
    one, several = (opened(file, LoadOptions(grain_s=1e-9, max_pieces=2, max_batch=most)) for most in (1, 16))
    assert len(several._rungs) > len(one._rungs) == 1
    added = several._weights.bytes - one._weights.bytes
    assert added < 0.1 * one._weights.bytes, "tables by row"


def test_shapes_that_were_found_are_kept(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing them takes a GPU; here it is made up."""
    tuned: list[Any] = []

    def tune(module: Any, example: Any, enough: Callable[[], bool]) -> None:
        tuned.append(module)
        for at, layer in enumerate(module.fused_layers):
            layer.shape = layer.shape._replace(warps=at + 1, flat=at % 2 == 0)

    monkeypatch.setattr(fused_file, "tune_within", tune)
    monkeypatch.setattr(fused_file, "TIMED_ON", "cpu")
    opened(file, CUT, tmp_path)
    assert len(tuned) == 2, "one and two rows"
    again = opened(file, CUT, tmp_path, learn=False)
    assert len(tuned) == 2
    layers = again._device_segments[0]._round.module.fused_layers
    assert [layer.shape.warps for layer in layers] == list(range(1, len(layers) + 1))
    assert layers[0].shape.flat is True


# --- which way --------------------------------------------------------------------------------------------------------


class Said(HostDevice):
    """A twin that says how long things take, one after another."""

    def __init__(self, *times_s: float) -> None:
        super().__init__()
        self.times_s = list(times_s)

    def timed(self, run: Callable[[], None]) -> float:
        return self.times_s.pop(0) if self.times_s else 1.0


@pytest.mark.parametrize("fused_s", [1e-3, 3e-3])
def test_the_quicker_way_is_taken(file: Path, fused_s: float) -> None:
    found = prepare_on(Said(fused_s, 2e-3), file, LoadOptions(max_batch=1))
    assert is_fused(found) == (fused_s < 2e-3)
    how = "in the form fused" if fused_s < 2e-3 else "not in the form fused"
    told = f"{how}: a row of each model takes {1e3 * fused_s:.3g} ms fused, 2 ms with ONNX Runtime"
    assert found.remarks[0] == told


def test_where_time_is_short_the_other_way_is_not_tried(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Allowance, "is_half_used", lambda allowance: True)
    found = prepare_on(Said(3e-3, 2e-3), file, LoadOptions(max_batch=1))
    assert is_fused(found) and found.remarks[0].startswith("in the form fused: there was no time to try ONNX Runtime")


def test_half_of_an_allowance() -> None:
    with Allowance(3600.0) as much, Allowance() as endless, Allowance(1e-9) as none:
        assert [much.is_half_used(), endless.is_half_used(), none.is_half_used()] == [False, False, True]


def test_what_onnx_runtime_cannot_run_is_run_all_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise RuntimeError("no such operator\nat all")

    monkeypatch.setattr("weft.runtime.cuda.onnx_files.OnnxFile._optimise", fails)
    found = opened(file)
    assert is_fused(found) and found.remarks[0] == "in the form fused: ONNX Runtime cannot run it (no such operator)"


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda patch: patch.setitem(sys.modules, "torch", None), "torch"),
        (without_tools, "pip install 'weft[stitch]'"),
    ],
)
def test_where_the_form_cannot_be_had_onnx_runtime_runs_it(
    file: Path, body: CpuModel, break_it: Callable[[Any], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "torch":
        monkeypatch.delitem(sys.modules, "weft_stitch.on_device.fused_file")
    break_it(monkeypatch)
    found = opened(file)
    assert not is_fused(found) and found.remarks[0].startswith("not in the form fused: ") and reason in found.remarks[0]
    check_answers(through(found, samples(found, (1, 0, 2))), body, samples(found, (1, 0, 2)))


def test_a_file_that_says_nonsense_is_left_to_onnx_runtime(file: Path, tmp_path: Path) -> None:
    model = onnx.load(file)
    next(each for each in model.metadata_props if each.key == FAMILY_KEY).value = '{"version": 1, "layers": 5}'
    onnx.save(model, tmp_path / "odd.onnx")
    found = opened(tmp_path / "odd.onnx")
    assert found.remarks[0].startswith("not in the form fused: its weft.family cannot be read: layers = 5")


def test_it_is_not_for_bf16(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="computed in fp32 and fp16, not in bf16"):
        fused_file.FusedFile(HostDevice(), file, LoadOptions(precision="bf16"), Allowance(), tmp_path)
