"""Outputs that a device writes into clients' regions itself: each request's rows into its own, and never too early."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.cuda.nets import WIDTH, chain, drawn
from weft.runtime.backend import BatchPart, LoadOptions, OutputTarget, Step
from weft.runtime.client_memory import LENT_FROM_BYTES, LendingTerms
from weft.runtime.cuda.device import BorrowedFile, BorrowedPart, HostDevice
from weft.runtime.cuda.model import DeviceModel
from weft.runtime.cuda.preparing import prepare_on

ROW_BYTES = 4 * WIDTH
UNTOUCHED = 0xAB


class Memory:
    """A client's memory, of which parts are lent."""

    def __init__(self, size: int) -> None:
        self.bytes = bytearray([UNTOUCHED]) * size

    def part(self, offset: int, byte_size: int, least_bytes: int = 0) -> BorrowedPart:
        def write(data: memoryview) -> None:
            self.bytes[offset : offset + len(data)] = data

        return BorrowedPart(byte_size, write, least_bytes)

    def target(self, offset: int, byte_size: int, rows: tuple[int, int] | None = None) -> OutputTarget:
        return OutputTarget({"y": self.part(offset, byte_size)}, rows)

    def rows(self, offset: int, count: int) -> Any:
        return np.frombuffer(self.bytes, np.float32, count * WIDTH, offset).reshape(count, WIDTH)

    def untouched(self, start: int = 0, end: int | None = None) -> bool:
        return set(self.bytes[start:end]) <= {UNTOUCHED}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chain(tmp_path_factory.mktemp("models") / "chain.onnx")


@pytest.fixture(params=[False, True], ids=["segments", "gates"])
def model(path: Path, request: pytest.FixtureRequest) -> DeviceModel:
    device = HostDevice()
    if request.param:
        device.use_stops(np.zeros(8, np.uint32))
    model = prepare_on(device, path, LoadOptions(grain_s=1e-9, max_batch=4))
    assert isinstance(model, DeviceModel) and model.timing.gated == request.param
    return model


def started(model: DeviceModel, feeds: list[Any], targets: list[OutputTarget], slot: int = 0) -> Any:
    """The launch of a batch up to its end; without gates, segment by segment."""
    count, rows = len(model.segments), sum(len(feed["x"]) for feed in feeds)
    parts = [BatchPart(feed) for feed in feeds]
    if model.timing.gated:
        return model.launch(Step(0, parts, rows, count, targets), slot)
    for segment in range(count):
        launched = model.launch(Step(segment, parts, rows, targets=targets))
        parts = [BatchPart(output.values) for output in launched.outputs]
    return launched


def run(model: DeviceModel, feeds: list[Any], targets: list[OutputTarget]) -> Any:
    (output,), computed = started(model, feeds, targets).wait()
    assert computed is None
    return output


def test_each_request_gets_its_rows_and_nothing_else_is_written(model: DeviceModel) -> None:
    feeds, memory = [drawn(1, 1), drawn(2, 2)], Memory(1000)
    expected = [model.run(feed)["y"] for feed in feeds]
    output = run(model, feeds, [memory.target(100, 400, (0, 1)), memory.target(500, 2 * ROW_BYTES, (1, 3))])
    np.testing.assert_allclose(memory.rows(100, 1), expected[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(memory.rows(500, 2), expected[1], rtol=1e-4, atol=1e-6)
    # Three rows are computed as four: the padding is written nowhere.
    assert memory.untouched(0, 100) and memory.untouched(100 + ROW_BYTES, 500)
    assert memory.untouched(500 + 2 * ROW_BYTES)
    assert output.answers == {} and output.written.requests == (0, 1)
    assert output.written.outputs == {"y": ((3, WIDTH), np.dtype(np.float32))}


def test_a_whole_batch_goes_to_one_region(model: DeviceModel) -> None:
    feed, memory = drawn(3), Memory(3 * ROW_BYTES)
    output = run(model, [feed], [memory.target(0, 3 * ROW_BYTES)])
    np.testing.assert_array_equal(memory.rows(0, 3), model.run(feed)["y"])
    assert output.answers == {} and output.written.requests == (0,)


def test_rows_of_requests_without_a_region_come_back(model: DeviceModel) -> None:
    feeds, memory = [drawn(1, 1), drawn(2, 2)], Memory(100)
    output = run(model, feeds, [memory.target(0, 100, (0, 1))])
    expected = np.concatenate([model.run(feed)["y"] for feed in feeds])
    np.testing.assert_allclose(output.answers["y"], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(memory.rows(0, 1), output.answers["y"][:1])
    assert output.written.requests == (0,) and not output.written.outputs


@pytest.mark.parametrize("part", [(0, 2 * ROW_BYTES - 1, 0), (0, 1 << 20, 2 * ROW_BYTES + 1)])
def test_what_does_not_fit_comes_back_and_others_are_written(model: DeviceModel, part: tuple[int, int, int]) -> None:
    feeds, memory = [drawn(2, 1), drawn(1, 2)], Memory(1000)
    unfit = OutputTarget({"y": memory.part(*part)}, (0, 2))
    output = run(model, feeds, [unfit, memory.target(500, ROW_BYTES, (2, 3)), OutputTarget({}, (0, 2))])
    assert output.written.requests == (1,) and output.answers["y"].shape == (3, WIDTH)
    assert memory.untouched(0, 500)
    np.testing.assert_array_equal(memory.rows(500, 1), output.answers["y"][2:])


def test_shapes_that_were_not_captured_come_back(model: DeviceModel) -> None:
    memory = Memory(1 << 12)
    output = run(model, [drawn(9)], [memory.target(0, 1 << 12)])  # no batch size holds nine rows
    assert output.answers["y"].shape == (9, WIDTH) and output.written is None and memory.untouched()


def test_outputs_are_written_at_the_end_of_a_launch_although_another_has_used_the_memory(path: Path) -> None:
    model, feeds, memory = gated(path), [drawn(4, 1), drawn(4, 2)], Memory(8 * ROW_BYTES)
    expected = [model.run(feed)["y"] for feed in feeds]
    targets = [[memory.target(at * 4 * ROW_BYTES, 4 * ROW_BYTES)] for at in range(2)]
    launches = [started(model, [feed], target) for feed, target in zip(feeds, targets, strict=True)]
    assert memory.untouched()
    for launched in launches:
        launched.wait()
    np.testing.assert_array_equal(memory.rows(0, 8), np.concatenate(expected))


def test_a_launch_that_a_gate_ends_writes_nothing(path: Path) -> None:
    """The memory of its outputs then holds rows of an earlier batch, which belong to other clients."""
    stops = np.zeros(8, np.uint32)
    model, memory, feed = gated(path, stops), Memory(100), drawn(1)
    model.run(drawn(1, 5))
    stops[3] = 1
    launched = started(model, [feed], [memory.target(0, ROW_BYTES)], 3)
    assert launched.wait() == ((), 0) and memory.untouched()
    stops[3] = 0
    started(model, [feed], [memory.target(0, ROW_BYTES)], 3).wait()
    np.testing.assert_array_equal(memory.rows(0, 1), model.run(feed)["y"])


def gated(path: Path, stops: Any = None) -> DeviceModel:
    device = HostDevice()
    device.use_stops(np.zeros(8, np.uint32) if stops is None else stops)
    model = prepare_on(device, path, LoadOptions(grain_s=1e-9, max_batch=4))
    assert isinstance(model, DeviceModel)
    return model


def test_a_file_that_was_cut_off_is_left_as_it_is() -> None:
    file, device = os.memfd_create("region"), HostDevice()
    os.ftruncate(file, 10 + LENT_FROM_BYTES)
    region = BorrowedFile(LendingTerms(1, "file", 8, 2 + LENT_FROM_BYTES), file)
    part, rows = region.target(2, LENT_FROM_BYTES), np.arange(LENT_FROM_BYTES // 4, dtype=np.float32)
    assert part.accepts(LENT_FROM_BYTES) and not part.accepts(LENT_FROM_BYTES - 1)
    device.write_out([(part, rows)]).wait()
    assert os.pread(file, 1 << 20, 10) == rows.tobytes()
    os.ftruncate(file, 100)
    device.write_out([(part, rows)]).wait()
    assert os.fstat(file).st_size == 100
    region.close()
