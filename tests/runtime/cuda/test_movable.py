"""Models that leave a device and come back, on the twin: nothing is there meanwhile, and all is right afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from tests.runtime.cuda.nets import chain, drawn, wanted
from weft.runtime.backend import LoadOptions
from weft.runtime.cuda import segments
from weft.runtime.cuda.cpu_twins import TWIN
from weft.runtime.cuda.device import ALIGNED_BYTES, EVICTED_BYTE, HostMovable, aligned_offsets
from weft.runtime.cuda.engine import CudaEngine


def test_tensors_lie_apart_in_one_memory() -> None:
    assert aligned_offsets([1, ALIGNED_BYTES, 0, 3]) == ([0, ALIGNED_BYTES, 2 * ALIGNED_BYTES, 2 * ALIGNED_BYTES], 768)
    assert aligned_offsets([]) == ([], 0)


@pytest.mark.parametrize("kept", [True, False])
def test_contents_leave_and_those_that_are_kept_come_back(kept: bool) -> None:
    memory = HostMovable(64, kept=kept)
    tensor = memory.tensor(8, (2, 3), TensorProto.FLOAT16)
    tensor[...] = [[1, 2, 3], [4, 5, 6]]
    for _ in range(2):
        memory.evict()
        assert (tensor.view(np.uint8) == EVICTED_BYTE).all()
        memory.restore()
        assert np.array_equal(tensor, [[1, 2, 3], [4, 5, 6]]) == kept


@pytest.fixture(autouse=True)
def small_weights_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SHARED_FROM_BYTES", 1)


@pytest.fixture
def model(tmp_path: Path) -> Any:
    path = chain(tmp_path / "chain.onnx")
    return path, CudaEngine(TWIN).open(path, LoadOptions(grain_s=1e-9, max_batch=4, rests=True), None, learn=True)


def test_a_model_that_rests_has_left_and_says_what_comes_back(model: Any) -> None:
    _, found = model
    memories = found._memories()
    assert found.residency.moving_bytes == sum(each.byte_size for each in memories) > 0 and found.residency.return_s > 0
    assert len(memories) == len(found._weights.memories) + len(found._rungs)
    assert all((each._bytes == EVICTED_BYTE).all() for each in memories)


def test_its_answers_are_right_whenever_it_has_come_back(model: Any) -> None:
    path, found = model
    for seed in range(3):
        found.restore()
        feed = drawn(1 + seed, seed)
        np.testing.assert_allclose(found.run(feed)["y"], wanted(path, feed), rtol=1e-4, atol=1e-6)
        found.evict()


def test_a_model_that_is_not_there_computes_nothing(model: Any) -> None:
    _, found = model
    with pytest.raises(MemoryError, match="the model is not in the device's memory"):
        found.run(drawn(1))


def test_a_model_comes_back_whole_or_not_at_all(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, found = model
    last = found._memories()[-1]
    with monkeypatch.context() as patch:
        patch.setattr(last, "restore", full)
        with pytest.raises(MemoryError, match="no room"):
            found.restore()
    assert all((each._bytes == EVICTED_BYTE).all() for each in found._memories())
    with pytest.raises(MemoryError, match="is not in the device's memory"):
        found.run(drawn(1))
    found.restore()
    np.testing.assert_allclose(found.run(drawn(1))["y"], wanted(path, drawn(1)), rtol=1e-4, atol=1e-6)


def full() -> None:
    raise MemoryError("no room")


def test_a_model_that_is_closed_has_nothing_left_to_move(model: Any) -> None:
    _, found = model
    found.close()
    assert found._memories() == []
    found.evict()
    found.restore()


def test_weights_lie_once_however_many_segments_need_them(tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx")
    found: Any = CudaEngine(TWIN).open(path, LoadOptions(grain_s=1e-9, max_batch=2), None, learn=True)
    assert (found.residency.moving_bytes, found.residency.return_s) == (0, 0.0)
    assert found._weights.bytes == 3 * 8 * 8 * 4 and len(found._weights.memories) == 3
