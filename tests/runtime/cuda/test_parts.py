"""Models on parts of a device, on its twin: what is captured for which part, what it is like, and what runs without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.cuda.nets import chain, drawn, wanted
from weft.devices.host import GpuCuts
from weft.devices.shares import GpuLikeness
from weft.runtime.backend import BatchPart, LoadOptions, Step
from weft.runtime.cuda.device import TWIN_CUTS, Device, HostDevice
from weft.runtime.cuda.model import DeviceModel
from weft.runtime.cuda.preparing import prepare_on
from weft.runtime.cuda.rounds import likeness_by_rows
from weft.runtime.onnxruntime_cpu.model import Blueprint, SegmentSpec
from weft.runtime.stitched import TaskSpec

SHARED = LoadOptions(grain_s=1e-9, max_batch=4, shares=True)
SEGMENTS, RUNGS = 6, 3
PARTS = len(TWIN_CUTS.parts)
WHOLE_LANES = (*range(TWIN_CUTS.streams + 1),)
"""Streams of the whole, that of high priority among them."""


class Parted(HostDevice):
    """A twin that notes for which part something was captured, and which of that runs."""

    def __init__(self, most: int = 1 << 30, free: Callable[[int], int] = lambda taken: 1 << 40) -> None:
        """most: captures that succeed. free: bytes, given how many were made."""
        super().__init__()
        self.at, self.owner, self._free = 0, 0, free
        self.made: Counter[int] = Counter()
        self.ran: list[tuple[int, int]] = []
        """Owner and part."""
        self.left, self.owners = [most], [0]

    def model_view(self, part: int = 0) -> Device:
        found = copy(self)
        found.at = part
        if not part:
            self.owners[0] += 1
            found.owner = self.owners[0]
        return found

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        if not self.left[0]:
            raise RuntimeError("no more graphs\nand more")
        self.left[0] -= 1
        self.made[self.at] += 1
        at = self.owner, self.at

        def replay() -> None:
            self.ran.append(at)
            run()

        return replay

    def memory(self) -> tuple[int, int]:
        return self._free(sum(self.made.values())), 1 << 40


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chain(tmp_path_factory.mktemp("models") / "chain.onnx")


def opened(device: HostDevice, path: Path, options: LoadOptions = SHARED, cache: Path | None = None) -> DeviceModel:
    found = prepare_on(device, path, options, cache)
    assert isinstance(found, DeviceModel)
    return found


def on_lane(device: HostDevice, model: DeviceModel, lane: int, rows: int) -> Any:
    values: Any = drawn(rows)
    with device.lane_context(lane):
        for segment in range(len(model.segments)):
            made = model.launch(Step(segment, [BatchPart(values)], rows)).outputs[0]
            values = made.values
    return made.answers["y"]


def check(device: Parted, model: DeviceModel, path: Path, lane: int, rows: int) -> set[tuple[int, int]]:
    """What ran on a lane, where the answers are right."""
    device.ran.clear()
    np.testing.assert_allclose(on_lane(device, model, lane, rows), wanted(path, drawn(rows)), rtol=1e-5)
    return set(device.ran)


def test_every_batch_size_is_captured_for_every_part_and_runs_on_its_lane(path: Path) -> None:
    device = Parted()
    model = opened(device, path)
    assert all(device.made[part] == SEGMENTS * RUNGS for part in range(1, PARTS + 1))
    assert model.shares.cuts == TWIN_CUTS and not any("parts" in each for each in model.remarks)
    for rows in (1, 3, 4):
        for lane in WHOLE_LANES:
            assert check(device, model, path, lane, rows) == {(1, 0)}
        for part in range(1, PARTS + 1):
            assert check(device, model, path, TWIN_CUTS.lane_of(part), rows) == {(1, part)}


def test_what_a_model_is_like_is_known_for_every_number_of_rows(path: Path) -> None:
    model = opened(Parted(), path)
    assert sorted(model.shares.like) == [1, 2, 3, 4] and model.shares.like[3] == model.shares.like[4]
    for like in model.shares.like.values():
        assert like.speeds.keys() == {TWIN_CUTS.sms, *TWIN_CUTS.parts} and like.kernel_us > 0 and 0 < like.memory <= 1


def test_models_have_what_they_capture_to_themselves(path: Path) -> None:
    device = Parted()
    one, other = opened(device, path), opened(device, path)
    assert check(device, one, path, 0, 1) == {(1, 0)} and check(device, other, path, 0, 1) == {(2, 0)}


def test_nothing_is_captured_for_parts_where_nobody_shares(path: Path) -> None:
    device = Parted()
    model = opened(device, path, LoadOptions(grain_s=1e-9, max_batch=4))
    assert set(device.made) == {0} and not device.owners[0] and model.shares is None


def test_batch_sizes_that_the_memory_leaves_out_run_on_parts_as_on_the_whole(path: Path) -> None:
    device = Parted(free=lambda made: max(0, 200 - made) << 30)
    model = opened(device, path)
    (remark,) = [each for each in model.remarks if "parts" in each]
    assert remark == "on parts of the device at 2 of 3 batch sizes: a quarter of the free memory is taken"
    assert sorted(model.shares.like) == [1, 3, 4], "a request alone and full batches first"
    lane = TWIN_CUTS.lane_of(2)
    assert [check(device, model, path, lane, rows) for rows in (1, 2, 4)] == [{(1, 2)}, {(1, 0)}, {(1, 2)}]


def test_what_cannot_be_captured_on_parts_runs_there_as_on_the_whole(path: Path) -> None:
    whole = Parted()
    opened(whole, path, LoadOptions(grain_s=1e-9, max_batch=4))
    device = Parted(most=whole.made[0] + 2)
    model = opened(device, path)
    assert "on parts of the device at 0 of 3 batch sizes: no more graphs" in model.remarks and not model.shares.like
    assert check(device, model, path, TWIN_CUTS.lane_of(1), 2) == {(1, 0)}


def test_a_device_without_memory_for_a_copy_serves_all_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device: HostDevice) -> float:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(HostDevice, "bandwidth", full)
    device = Parted()
    model = opened(device, path)
    assert "on no part of the device: CUDA out of memory" in model.remarks and not model.shares.like
    assert check(device, model, path, TWIN_CUTS.lane_of(1), 2) == {(1, 0)}


def test_a_model_that_cannot_be_captured_at_all_runs_by_calls_on_every_lane(path: Path) -> None:
    device = Parted(most=0)
    model = opened(device, path)
    assert any("cannot be captured and run by calls" in each for each in model.remarks)
    for lane in (0, TWIN_CUTS.lane_of(1), TWIN_CUTS.lane_of(PARTS)):
        assert check(device, model, path, lane, 2) == set()


def test_a_device_that_cannot_be_cut_says_so_and_is_known_all_the_same(path: Path) -> None:
    device = HostDevice(GpuCuts(sms=8), "for a test")
    model = opened(device, path)
    assert "shares the device on plain streams: for a test" in model.remarks
    assert sorted(model.shares.like) == [1, 2, 3, 4] and model.shares.like[1].speeds == {8: 1.0}
    for lane in (0, 3, 4):
        np.testing.assert_allclose(on_lane(device, model, lane, 2), wanted(path, drawn(2)), rtol=1e-5)


def test_parts_and_likeness_come_back_from_the_cache(path: Path, tmp_path: Path) -> None:
    learned = opened(Parted(), path, cache=tmp_path)
    device = Parted()
    again = prepare_on(device, path, SHARED, tmp_path, learn=False)
    assert isinstance(again, DeviceModel) and again.shares.like == learned.shares.like
    assert device.made == Counter(dict.fromkeys(range(PARTS + 1), SEGMENTS * RUNGS))
    assert check(device, again, path, TWIN_CUTS.lane_of(3), 2) == {(1, 3)}


def test_batches_of_a_stitched_model_are_like_the_rounds_they_are_computed_in() -> None:
    likes = {size: GpuLikeness(speeds={8: 1.0}, kernel_us=size) for size in (1, 4)}
    tasks = tuple(TaskSpec(name=name, inputs={"x": name}, outputs={"y": name}) for name in "ab")
    segment = SegmentSpec(name="whole", inputs=(), outputs=())
    blueprint = Blueprint(
        inputs=(), outputs=(), segments=(segment,), warm_shapes=None, tasks=tasks, max_batch=8, round_rows=4, like=likes
    )
    found = likeness_by_rows(blueprint)
    assert found[1].kernel_us == 1 and found[8].kernel_us == 4 and 3 not in found
