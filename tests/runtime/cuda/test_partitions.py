"""A GPU cut in two by the driver; the cut itself is tested where there is one (tests/gpu)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weft.runtime.cuda.partitions import HIGH, LOW, NoPartitions, another_stream, cut, follow


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_SUPPORTED = 801


class FakeDriver(ModuleType):
    """As much of the driver as a cut needs: a card of 132 multiprocessors, of which it cuts off multiples of 8."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)

    def __init__(self, *, cuts: bool = True) -> None:
        super().__init__("driver")
        self.cuts, self.made, self._streams = cuts, [], iter(range(1, 100))
        self.current: list[str] = ["the whole"]
        """Contexts, the current one last."""
        self.done: list[tuple[str, str, int]] = []

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, index

    def cuDeviceGetDevResource(self, device: int, kind: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, resource(132)

    def cuDevSmResourceSplitByCount(self, groups: int, whole: Any, flags: int, least: int) -> tuple[Any, ...]:
        if not self.cuts:
            return Result.CUDA_ERROR_NOT_SUPPORTED, [], 0, None
        got = min(whole.sm.smCount, -(-least // 8) * 8)
        return Result.CUDA_SUCCESS, [resource(got)], 1, resource(whole.sm.smCount - got)

    def cuDevResourceGenerateDesc(self, resources: list[Any], count: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, resources[0]

    def cuGreenCtxCreate(self, described: Any, device: int, flags: int) -> tuple[Any, ...]:
        self.made.append(described.sm.smCount)
        return Result.CUDA_SUCCESS, f"context of {described.sm.smCount}"

    def cuCtxGetStreamPriorityRange(self) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, 0, -5

    def cuCtxFromGreenCtx(self, context: str) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, f"driver's {context}"

    def cuCtxPushCurrent(self, context: str) -> tuple[Any, ...]:
        self.current.append(context)
        return (Result.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self.current.pop()

    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, f"event in {self.current[-1]}"

    def cuEventRecord(self, event: str, stream: int) -> tuple[Any, ...]:
        self.done.append(("recorded", event, stream))
        return (Result.CUDA_SUCCESS,)

    def cuStreamWaitEvent(self, stream: int, event: str, flags: int) -> tuple[Any, ...]:
        self.done.append(("waited", event, stream))
        return (Result.CUDA_SUCCESS,)

    def CUstream(self, handle: int) -> int:
        return handle

    def cuGreenCtxStreamCreate(self, context: str, flags: int, priority: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, next(self._streams) * 10 - priority


def resource(sms: int) -> Any:
    return SimpleNamespace(sm=SimpleNamespace(smCount=sms))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    found, package = FakeDriver(), ModuleType("cuda.bindings")
    package.driver = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    yield found


def test_the_two_parts_are_what_was_asked_for_and_what_is_left(driver: FakeDriver) -> None:
    small, large = cut(0, 48)
    assert (small.sms, large.sms) == (48, 84) and driver.made == [48, 84]
    assert len({*small.streams, *large.streams}) == 4
    assert (small.streams[LOW] % 10, small.streams[HIGH] % 10) == (0, 5)


def test_others_follow_a_part_by_an_event_of_its_own_context(driver: FakeDriver) -> None:
    small, large = cut(0, 48)
    assert driver.current == ["the whole"]
    assert (small.ended, large.ended) == tuple(f"event in driver's context of {sms}" for sms in (48, 84))
    follow(small, 77)
    assert driver.done == [("recorded", small.ended, small.streams[LOW]), ("waited", small.ended, 77)]


def test_a_part_has_as_many_streams_as_are_asked_for(driver: FakeDriver) -> None:
    small, _ = cut(0, 48)
    more = {another_stream(small) for _ in range(3)}
    assert len(more | {*small.streams}) == 5 and all(each % 10 == 0 for each in more)


def test_the_card_gives_a_few_more_where_it_does_not_divide_so(driver: FakeDriver) -> None:
    assert [part.sms for part in cut(0, 44)] == [48, 84]


def test_why_a_gpu_cannot_be_cut_is_told(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoPartitions, match="nothing is left of 132"):
        cut(0, 132)
    driver.cuts = False
    with pytest.raises(NoPartitions, match="CUDA_ERROR_NOT_SUPPORTED"):
        cut(0, 48)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(NoPartitions, match="cuda-bindings is not installed"):
        cut(0, 48)
