"""Tensors in shared memory: which objects become regions, whose they are, and what becomes of a region that is cut off.

First regions themselves, then tensors between requests and regions, then Triton's clients with the library that
tritonclient has for it. A server that mapped regions would not survive this file.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import pickle
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serving import live
from tests.serving.clients import CLIENTS, KINDS, Client, expected, told, utils, values, x
from tests.support.concurrency import until
from weft.base.errors import AlreadyRegistered, BadRequest, Forbidden, NotFound, OverBudget, TooLarge
from weft.http.limits import ByteBudget
from weft.runtime.client_memory import Lender, LentTensor
from weft.runtime.tensors import TensorSpec
from weft.serving import grpc_wire, proto
from weft.serving.access import Caller, KeyConfig
from weft.serving.region_tensors import HERE_BYTES, STRING_BYTES_HERE, STRINGS_HERE, RegionTensors, RequestRegions
from weft.serving.regions import RegionPart, region_parts
from weft.serving.shared_memory import FOLDER, CudaMemory, SystemMemory
from weft.serving.wire import (
    InferRequest,
    InferResponse,
    ModelSpec,
    SharedTensors,
    Wanted,
    decode,
    encode,
    fit_input,
    is_large,
    to_binary,
)

shm = pytest.importorskip("tritonclient.utils.shared_memory")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not os.access(FOLDER, os.W_OK), reason=f"the system keeps no shared memory in {FOLDER}"
)

_numbers = itertools.count()


class Shared:
    """An object of shared memory, as any process can make one."""

    def __init__(self, size: int) -> None:
        self.key = f"/weft-test-{os.getpid()}-{next(_numbers)}"
        self.path = Path(FOLDER + self.key)
        self.path.write_bytes(bytes(size))

    def about(self, byte_size: object, offset: object = 0) -> dict[str, object]:
        return {"key": self.key, "offset": offset, "byte_size": byte_size}

    @property
    def opened(self) -> int:
        """How many descriptors of this process lead to it."""
        found = 0
        for each in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                found += os.readlink(each).removesuffix(" (deleted)") == str(self.path)
        return found


@pytest.fixture
def shared() -> Iterator[Callable[[int], Shared]]:
    """Makes objects of so many bytes, and takes them away."""
    made: list[Shared] = []

    def make(size: int) -> Shared:
        made.append(Shared(size))
        return made[-1]

    yield make
    for each in made:
        each.path.unlink(missing_ok=True)


def table(*, enabled: bool = True, most_regions: int = 4, most_bytes: int = 1 << 20) -> SystemMemory:
    return SystemMemory(enabled=enabled, most_regions=most_regions, most_bytes=most_bytes)


ONE, TWO = Caller("one"), Caller("two")


# Regions


def test_a_region_is_registered_told_of_and_let_go(shared: Callable[[int], Shared]) -> None:
    regions, made = table(), shared(100)
    assert regions.status(ONE) == []
    regions.register(ONE, "frames", made.about(60, offset=40))
    told_of = {"name": "frames", "key": made.key, "offset": 40, "byte_size": 60}
    assert regions.status(ONE) == regions.status(ONE, "frames") == [told_of]
    assert made.opened == 1
    regions.unregister(ONE, "frames")
    assert regions.status(ONE) == [] and made.opened == 0
    regions.unregister(ONE, "frames")  # as Triton, which does not mind
    with pytest.raises(NotFound, match="no region 'frames' of shared memory is registered; register it first"):
        regions.status(ONE, "frames")


def test_a_region_is_read_and_written_from_its_offset_on(shared: Callable[[int], Shared]) -> None:
    regions, made = table(), shared(10)
    made.path.write_bytes(b"0123456789")
    regions.register(ONE, "r", made.about(6, offset=4))
    region = regions.find(ONE, "r")
    buffer = bytearray(3)
    region.read_into(memoryview(buffer), 2)
    assert buffer == b"678" and (region.name, region.byte_size) == ("r", 6)
    region.write_from(memoryview(b"ab"), 1)
    region.write_from(memoryview(b""), 6)
    assert made.path.read_bytes() == b"01234ab789"


def test_a_name_is_given_once(shared: Callable[[int], Shared]) -> None:
    regions, made = table(), shared(100)
    regions.register(ONE, "r", made.about(50))
    with pytest.raises(AlreadyRegistered, match=f"region 'r' is registered already, for '{made.key}'") as refused:
        regions.register(ONE, "r", made.about(50))
    assert (refused.value.status, refused.value.code) == (400, "ALREADY_EXISTS")
    del refused  # whose traceback knows the region
    regions.register(ONE, "same bytes", made.about(50))
    regions.register(ONE, "overlapping", made.about(60, offset=40))
    assert made.opened == 3
    regions.unregister(ONE)
    assert made.opened == 0


def test_the_slash_of_a_key_may_be_left_out(shared: Callable[[int], Shared]) -> None:
    regions, made = table(), shared(8)
    regions.register(ONE, "r", made.about(8) | {"key": made.key.removeprefix("/")})
    assert made.opened == 1


@pytest.mark.parametrize(
    "key",
    ["", "/", "/.", "/..", "..", "//a", "/a/b", "a/b", "/../etc/passwd", "/a\0b", "/" + "a" * 256, "/" + "é" * 128],
)
def test_a_key_that_names_no_object_is_refused(key: str) -> None:
    with pytest.raises(BadRequest, match=r"region 'r': key .* names no shared memory object; it is a slash"):
        table().register(ONE, "r", {"key": key, "byte_size": 1})


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"byte_size": 1}, "key must be the name of a shared memory object, not None"),
        ({"key": 7, "byte_size": 1}, "object, not 7"),
        ({"key": "/none-of-that-name", "byte_size": 1}, "there is no such object; create it first"),
        ({"key": "/sem.mutex", "byte_size": 1}, "is a semaphore's; choose another name"),
        ({"key": "/a"}, "byte_size must be a whole number of bytes from 1, not None"),
        ({"key": "/a", "byte_size": 0}, "from 1, not 0"),
        ({"key": "/a", "byte_size": True}, "from 1, not True"),
        ({"key": "/a", "byte_size": 1.0}, "from 1, not 1.0"),
        ({"key": "/a", "byte_size": 2**63}, "byte_size must be"),
        ({"key": "/a", "byte_size": 1, "offset": -1}, "offset must be a whole number of bytes from 0, not -1"),
        ({"key": "/a", "byte_size": 1, "offset": "0"}, "offset must be a whole number of bytes from 0, not '0'"),
    ],
)
def test_what_cannot_be_registered_says_why(about: dict[str, object], said: str) -> None:
    with pytest.raises(BadRequest, match=said) as refused:
        table().register(ONE, "r", about)
    assert "region 'r'" in str(refused.value)


@pytest.mark.parametrize("name", ["", "n" * 257])
def test_names_of_regions_have_a_length(name: str) -> None:
    with pytest.raises(BadRequest, match="the name of a region has 1 to 256 characters"):
        table().register(ONE, name, {"key": "/a", "byte_size": 1})


def test_only_objects_are_opened_and_nobody_waits_for_a_pipe(shared: Callable[[int], Shared], tmp_path: Path) -> None:
    regions = table()
    (tmp_path / "secret").write_text("secret")
    link, folder, pipe = shared(8), shared(8), shared(8)
    for each in (link, folder, pipe):
        each.path.unlink()
    link.path.symlink_to(tmp_path / "secret")
    folder.path.mkdir()
    os.mkfifo(pipe.path)
    try:
        for made, said in ((link, "it is a link"), (folder, "directory"), (pipe, "is no shared memory object")):
            with pytest.raises(BadRequest, match=said):
                regions.register(ONE, "r", made.about(1))
            assert made.opened == 0
    finally:
        folder.path.rmdir()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_an_object_that_the_server_may_not_open_is_refused(shared: Callable[[int], Shared]) -> None:
    made = shared(8)
    made.path.chmod(0o400)
    with pytest.raises(BadRequest, match="the server's user may not read and write it"):
        table().register(ONE, "r", made.about(8))


def test_a_region_lies_within_its_object(shared: Callable[[int], Shared]) -> None:
    made = shared(100)
    for byte_size, offset in ((101, 0), (1, 100), (51, 50), (2**61, 2**61)):
        end = byte_size + offset
        with pytest.raises(BadRequest, match=f"'r' would end at byte {end} of '{made.key}', which has 100 bytes"):
            table(most_bytes=2**62).register(ONE, "r", made.about(byte_size, offset))
    assert made.opened == 0


def test_regions_are_bounded_for_each_owner(shared: Callable[[int], Shared]) -> None:
    regions, made = table(most_regions=2, most_bytes=150), shared(100)
    regions.register(ONE, "a", made.about(100))
    with pytest.raises(TooLarge, match="region 'b' of 51 bytes is too large: 100 of 150 are registered"):
        regions.register(ONE, "b", made.about(51))
    regions.register(ONE, "b", made.about(50))
    with pytest.raises(TooLarge, match=r"region 'c' is one too many: 2 are registered, which is the limit"):
        regions.register(ONE, "c", made.about(1))
    regions.register(TWO, "c", made.about(100))
    regions.unregister(ONE, "a")
    regions.register(ONE, "c", made.about(100))


def test_regions_belong_to_the_key_that_registered_them(shared: Callable[[int], Shared]) -> None:
    regions, first, second = table(), shared(10), shared(20)
    regions.register(ONE, "r", first.about(10))
    assert regions.status(TWO) == []
    for ask in (regions.status, regions.find):
        with pytest.raises(NotFound):
            ask(TWO, "r")
    regions.unregister(TWO, "r")
    regions.unregister(TWO)
    regions.register(TWO, "r", second.about(20))
    assert (regions.find(ONE, "r").byte_size, regions.find(TWO, "r").byte_size) == (10, 20)
    regions.close()
    assert first.opened == second.opened == 0 and regions.status(ONE) == []


def test_the_regions_of_a_key_that_counts_no_more_are_let_go(shared: Callable[[int], Shared]) -> None:
    regions, made, gone = table(), shared(10), Caller("gone")
    gone.set_limits(KeyConfig(name="gone", key="k"))
    regions.register(gone, "r", made.about(10))
    gone.removed = True
    regions.register(ONE, "mine", shared(10).about(10))
    assert made.opened == 0


def test_a_region_that_is_cut_short_is_an_error_and_not_a_signal(shared: Callable[[int], Shared]) -> None:
    regions, made = table(), shared(100_000)
    regions.register(ONE, "r", made.about(100_000))
    region = regions.find(ONE, "r")
    os.truncate(made.path, 40_000)
    region.read_into(memoryview(bytearray(40_000)), 0)
    for offset, count in ((0, 100_000), (40_000, 1), (99_999, 1)):
        said = rf"region 'r': '{made.key}' was cut to 40000 bytes since .* {offset + count} are needed; make it larger"
        with pytest.raises(BadRequest, match=said):
            region.read_into(memoryview(bytearray(count)), offset)
        with pytest.raises(BadRequest, match="was cut to 40000 bytes"):
            region.write_from(memoryview(bytes(count)), offset)
    assert made.path.stat().st_size == 40_000  # writing would have made it grow
    os.truncate(made.path, 100_000)
    region.read_into(memoryview(bytearray(100_000)), 0)


def test_a_region_outlives_the_name_of_its_object(shared: Callable[[int], Shared]) -> None:
    regions, made = table(), shared(4)
    regions.register(ONE, "r", made.about(4))
    made.path.write_bytes(b"kept")
    made.path.unlink()
    buffer = bytearray(4)
    regions.find(ONE, "r").read_into(memoryview(buffer), 0)
    assert buffer == b"kept"


def test_a_region_in_use_is_closed_when_its_last_user_is_done(shared: Callable[[int], Shared]) -> None:
    regions, made = table(), shared(8)
    regions.register(ONE, "r", made.about(8))
    region = regions.find(ONE, "r")
    regions.unregister(ONE, "r")
    region.write_from(memoryview(b"finished"), 0)
    assert made.path.read_bytes() == b"finished" and made.opened == 1
    del region
    assert made.opened == 0


def test_shared_memory_that_is_off_is_refused_by_name_and_has_nothing_to_tell(shared: Callable[[int], Shared]) -> None:
    regions, made = table(enabled=False), shared(8)
    assert not regions.offered and table().offered
    for ask in (lambda: regions.register(ONE, "r", made.about(8)), lambda: regions.find(ONE, "r")):
        with pytest.raises(Forbidden, match="shared memory is off on this server; start it with shared_memory = true"):
            ask()
    regions.unregister(ONE)
    assert regions.status(ONE) == [] and made.opened == 0


def cuda(devices: tuple[int, ...], written: list[Any]) -> CudaMemory:
    def write(lender: Lender, offset: int, data: memoryview) -> None:
        written.append((lender.terms.handle, offset, bytes(data)))

    return CudaMemory(devices, write, enabled=True, most_regions=4, most_bytes=1 << 20)


def test_a_region_of_a_gpu_is_kept_by_its_handle_and_written_by_who_has_the_gpu() -> None:
    written: list[Any] = []
    regions = cuda((0,), written)
    handle = bytes(range(64))
    regions.register(ONE, "r", {"raw_handle": {"b64": base64.b64encode(handle).decode()}, "byte_size": 64})
    regions.register(ONE, "s", {"raw_handle": handle, "device_id": 0, "byte_size": 32})
    assert regions.status(ONE, "r") == [{"name": "r", "device_id": 0, "byte_size": 64}]
    region, other = regions.find(ONE, "r"), regions.find(ONE, "s")
    assert region.terms.kind == "cuda" and bytes.fromhex(region.terms.handle) == handle and region.on_device
    assert region.terms.number != other.terms.number
    region.write_from(memoryview(b"abc"), 8)
    assert written == [(handle.hex(), 8, b"abc")]
    with pytest.raises(BadRequest, match="'r' lies on a GPU, where only tensors of numbers are read"):
        region.read_into(memoryview(bytearray(4)), 0)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"raw_handle": b"short", "byte_size": 8}, "raw_handle must be a handle of CUDA, 64 bytes"),
        ({"raw_handle": {"b64": "!"}, "byte_size": 8}, "raw_handle must be a handle of CUDA, 64 bytes"),
        ({"raw_handle": bytes(64), "byte_size": 8, "device_id": 1}, "lies on GPU 1, and models run on GPU 0"),
        (
            {"raw_handle": bytes(64), "byte_size": 8, "device_id": "0"},
            "device_id must be a whole number from 0",
        ),
        ({"raw_handle": bytes(64), "byte_size": 0}, "byte_size must be a whole number of bytes from 1"),
    ],
)
def test_a_region_of_a_gpu_that_cannot_be_says_why(about: dict[str, object], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        cuda((0,), []).register(ONE, "r", about)


def test_long_inputs_are_lent_to_a_model_that_borrows_and_not_counted() -> None:
    pages = Pages(1 << 20)
    copying = Copying(pages, budget=1 << 16).input("x", 1 << 17, 1 << 19, 64).input("s", 0, 0)
    request = copying.filled(borrows=True)
    lent = request.inputs["x"]
    assert isinstance(lent, LentTensor) and lent.shape == (1 << 17,) and lent.nbytes == 1 << 19 and lent.offset == 64
    assert not pages.threads or pages.threads == ["MainThread"]
    assert isinstance(Copying(pages).input("x", 16, 64).filled(borrows=True).inputs["x"], np.ndarray)
    with pytest.raises(TooLarge, match="524288 bytes of inputs in regions exceed the limit"):
        Copying(pages, most=1 << 18).input("x", 1 << 17, 1 << 19).filled(borrows=True)


def test_outputs_on_a_device_are_written_by_threads_of_their_own() -> None:
    pages = Pages(64)
    pages.on_device = True
    copying = Copying(pages).output("y", 16)
    copying.delivered(y=np.ones(4, np.float32))
    assert copying.later and pages.threads[0].startswith("regions of a device")


def test_there_is_no_shared_memory_of_cuda() -> None:
    regions = cuda((), [])
    assert regions.status(ONE) == []
    with pytest.raises(NotFound, match="no region 'r'"):
        regions.status(ONE, "r")
    with pytest.raises(BadRequest, match=r"CUDA shared memory is not supported.*register system"):
        regions.register(ONE, "r", {"raw_handle": b"", "device_id": 0, "byte_size": 64})
    regions.unregister(ONE)
    regions.unregister(ONE, "r")


# Tensors between requests and regions


class Pages:
    """A region of another kind: all that it takes to be one."""

    on_device = False

    def __init__(self, size: int, data: bytes = b"") -> None:
        self.name, self.data = "pages", bytearray(data.ljust(size, b"\0"))
        self.buffers: list[memoryview] = []
        self.threads: list[str] = []

    @property
    def byte_size(self) -> int:
        return len(self.data)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        buffer[:] = self.data[offset : offset + len(buffer)]
        self.buffers.append(buffer)
        self.threads.append(threading.current_thread().name)

    def write_from(self, data: memoryview, offset: int) -> None:
        self.data[offset : offset + len(data)] = data
        self.threads.append(threading.current_thread().name)


MODEL = ModelSpec(
    "model",
    "1",
    (TensorSpec("x", "FP32", (-1,)), TensorSpec("s", "BYTES", (-1,)), TensorSpec("b", "BOOL", (-1,))),
    (TensorSpec("y", "FP32", (-1,)), TensorSpec("t", "BYTES", (-1,))),
)
SPECS = {spec.name: spec for spec in MODEL.inputs}


class Copying:
    """Tensors of one request in one region, copied on an event loop."""

    def __init__(self, pages: Pages, *, budget: int = 1 << 30, most: int = 1 << 30) -> None:
        self.pages, self.budget = pages, ByteBudget(budget)
        self.copier = RegionTensors(self.budget, most)
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, RegionPart] = {}
        self.later = False
        """Whether the loop was left meanwhile."""

    def input(self, name: str, elements: int, byte_size: int, offset: int = 0) -> Copying:
        fitted = fit_input(name, SPECS[name].datatype, [elements], SPECS)
        self.inputs[name] = RegionPart("pages", offset, byte_size), fitted
        return self

    def output(self, name: str, byte_size: int, offset: int = 0) -> Copying:
        self.outputs[name] = RegionPart("pages", offset, byte_size)
        return self

    def regions(self) -> RequestRegions:
        return RequestRegions(self.copier, SharedTensors(self.inputs, self.outputs), lambda name: self.pages)

    def filled(self, *, borrows: bool = False) -> InferRequest:
        return self._run(lambda: self.regions().read_inputs(InferRequest({}, "", {}, ()), borrows=borrows))

    def delivered(self, **arrays: np.ndarray) -> InferResponse:
        request = InferRequest({}, "", {}, tuple(Wanted(name, True) for name in arrays))
        return self._run(lambda: self.regions().write_outputs(InferResponse(request, MODEL, arrays)))

    def _run(self, work: Callable[[], Any]) -> Any:
        async def main() -> Any:
            found = work()
            self.later = not isinstance(found, InferRequest | InferResponse)
            return await found if self.later else found

        try:
            return asyncio.run(main())
        finally:
            self.copier.close()


def test_an_input_is_read_in_one_copy() -> None:
    array = np.arange(150_000, dtype=np.float32)  # 600 KB
    copying = Copying(Pages(700_000, b"12345678" + array.tobytes())).input("x", 150_000, 600_000, offset=8)
    found = copying.filled().inputs["x"]
    assert not copying.later and found.tolist() == array.tolist()
    (buffer,) = copying.pages.buffers
    assert len(buffer) == 600_000 and np.shares_memory(found, np.frombuffer(buffer, np.uint8))
    assert found.flags.aligned and found.__array_interface__["data"][0] % 16 == 0


def test_large_inputs_are_read_beside_the_loop() -> None:
    elements = HERE_BYTES // 4 + 1
    copying = Copying(Pages(8 + 4 * elements)).input("x", elements, 4 * elements, offset=8)
    assert copying.filled().inputs["x"].shape == (elements,)
    assert copying.later and copying.pages.threads[0].startswith("regions")


@pytest.mark.parametrize("large", [False, True])
def test_strings_are_read_with_their_lengths(large: bool) -> None:
    strings = np.array([b"", b"a\0b", b"x" * (STRING_BYTES_HERE if large else 9)], np.object_)
    data = to_binary(strings)
    copying = Copying(Pages(len(data), data)).input("s", 3, len(data))
    assert copying.filled().inputs["s"].tolist() == strings.tolist()
    assert copying.later == large


@pytest.mark.parametrize(
    ("name", "elements", "data", "said"),
    [
        ("s", 2, b"\1\0\0\0a\xff\0\0\0b", "string 1 reaches beyond its data of 10 bytes"),
        ("s", 3, b"\1\0\0\0a", "5 bytes are too few for 3 strings"),
        ("b", 2, b"\1\2", "a byte of a BOOL tensor must be 0 or 1"),
    ],
)
def test_what_is_read_is_checked(name: str, elements: int, data: bytes, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        Copying(Pages(len(data), data)).input(name, elements, len(data)).filled()


def test_tensors_lie_within_their_region() -> None:
    said = r"'x' would end at byte 108 of region 'pages', which has 100 bytes; lower its shared_memory_offset"
    with pytest.raises(BadRequest, match=f"input {said}"):
        Copying(Pages(100)).input("x", 2, 8, offset=100).regions()
    with pytest.raises(BadRequest, match="output 'y' would end at byte 101"):
        Copying(Pages(100)).output("y", 101).regions()
    Copying(Pages(100)).input("x", 25, 100).output("y", 100).regions()


def test_what_is_read_counts_until_the_request_is_over() -> None:
    copying = Copying(Pages(200_000), budget=200_000).input("x", 50_000, 200_000)
    regions = copying.regions()
    regions.read_inputs(InferRequest({}, "", {}, ()), borrows=False)
    assert copying.budget.held_bytes == 200_000
    with pytest.raises(OverBudget):
        copying.filled()
    regions.end()
    regions.end()
    assert copying.budget.held_bytes == 0
    with pytest.raises(TooLarge, match="200000 bytes of inputs in regions exceed the limit of 199999 bytes"):
        Copying(Pages(200_000), most=199_999).input("x", 50_000, 200_000).filled()


def test_outputs_are_written_where_they_shall_lie() -> None:
    copying = Copying(Pages(64)).output("y", 40, offset=8).output("t", 16, offset=48)
    y, t = np.arange(8, dtype=np.float32)[::-2], np.array([b"ab", "ü"], np.object_)
    answer = copying.delivered(y=y, t=t)
    assert answer.shared == {"y": RegionPart("pages", 8, 16), "t": RegionPart("pages", 48, 12)} and not copying.later
    assert np.frombuffer(copying.pages.data, np.float32, 4, 8).tolist() == [7, 5, 3, 1]
    assert bytes(copying.pages.data[48:60]) == to_binary(t)
    assert not any(copying.pages.data[:8]) and not any(copying.pages.data[24:48])


@pytest.mark.parametrize(
    "arrays",
    [
        {"y": np.zeros(HERE_BYTES // 4 + 1, np.float32)},
        {"t": np.array([b"x" * STRING_BYTES_HERE, b"y"], np.object_)},
        {"t": np.array([b""] * (STRINGS_HERE + 1), np.object_)},
    ],
)
def test_large_outputs_are_written_beside_the_loop(arrays: dict[str, np.ndarray]) -> None:
    copying = Copying(Pages(2 * HERE_BYTES))
    for name in arrays:
        copying.output(name, 2 * HERE_BYTES)
    assert copying.delivered(**arrays).shared.keys() == arrays.keys()
    assert copying.later and copying.pages.threads[0].startswith("regions")


def test_an_output_that_has_no_room_says_how_much_it_needs_and_none_is_written() -> None:
    copying = Copying(Pages(64)).output("t", 8).output("y", 15, offset=8)
    said = "output 'y' has 16 bytes, and shared_memory_byte_size leaves 15 for it in region 'pages'; give it as many"
    with pytest.raises(BadRequest, match=said):
        copying.delivered(t=np.array([b"ab"], np.object_), y=np.ones(4, np.float32))
    assert not any(copying.pages.data)


def test_outputs_over_each_other_are_refused() -> None:
    arrays = {"y": np.ones(4, np.float32), "t": np.array([b"ab"], np.object_)}
    Copying(Pages(64)).output("y", 64).output("t", 48, offset=16).delivered(**arrays)
    said = "output 'y' ends at byte 16 of region 'pages', beyond byte 15, where output 't' begins; set its"
    with pytest.raises(BadRequest, match=said):
        Copying(Pages(64)).output("y", 64).output("t", 48, offset=15).delivered(**arrays)


def test_a_request_over_grpc_says_where_its_tensors_lie() -> None:
    message = proto.ModelInferRequest(raw_input_contents=[b"\1", b"\0\0\0\0"])
    for name, datatype in (("b", "BOOL"), ("x", "FP32"), ("s", "BYTES")):
        message.inputs.add(name=name, datatype=datatype, shape=[1])
    message.outputs.add(name="y")
    for key, value in RegionPart("r", 8, 4).parameters().items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        for tensor in (message.inputs[1], message.outputs[0]):
            setattr(tensor.parameters[key], kind, value)
    request = grpc_wire.decode_infer(message, MODEL)
    assert request.inputs["b"].tolist() == [True] and request.inputs["s"].tolist() == [b""] and request.shared
    assert request.shared.inputs["x"][0] == request.shared.outputs["y"] == RegionPart("r", 8, 4)
    shared = {"y": RegionPart("r", 8, 4)}
    answer = grpc_wire.encode_infer(InferResponse(request, MODEL, {"y": np.ones(1, np.float32)}, shared=shared))
    assert list(answer.raw_output_contents) == [b""]
    assert told(answer)["outputs"][0]["parameters"] == shared["y"].parameters()


def in_region(tensor: Any, part: RegionPart) -> None:
    for key, value in part.parameters().items():
        setattr(tensor.parameters[key], "string_param" if isinstance(value, str) else "int64_param", value)


def test_raw_contents_beyond_those_of_the_inputs_that_travel_are_ignored() -> None:
    message = proto.ModelInferRequest(raw_input_contents=[b"\1", b"\0\0\0\0", b"surplus"])
    for name, datatype in (("x", "FP32"), ("b", "BOOL"), ("s", "BYTES")):
        message.inputs.add(name=name, datatype=datatype, shape=[1])
    in_region(message.inputs[0], RegionPart("r", 0, 4))
    request = grpc_wire.decode_infer(message, MODEL)
    assert request.inputs["b"].tolist() == [True] and request.inputs["s"].tolist() == [b""]
    del message.raw_input_contents[1:]
    with pytest.raises(BadRequest, match="1 raw input contents for 2 inputs; send one for each"):
        grpc_wire.decode_infer(message, MODEL)


def test_classes_do_not_go_into_a_region() -> None:
    part = RegionPart("r", 0, 4).parameters()
    said = "output 'y': classes do not go into a region; ask for the tensor there, or for its classes"
    body = {
        "inputs": [{"name": name, "datatype": spec.datatype, "shape": [0], "data": []} for name, spec in SPECS.items()]
    }
    body["outputs"] = [{"name": "y", "parameters": part | {"classification": 2}}]
    with pytest.raises(BadRequest, match=said):
        decode(json.dumps(body).encode(), None, MODEL)
    message = proto.ModelInferRequest()
    for name, spec in SPECS.items():
        message.inputs.add(name=name, datatype=spec.datatype, shape=[0])
    in_region(message.outputs.add(name="y"), RegionPart("r", 0, 4))
    assert grpc_wire.decode_infer(message, MODEL).shared
    message.outputs[0].parameters["classification"].int64_param = 2
    with pytest.raises(BadRequest, match=said):
        grpc_wire.decode_infer(message, MODEL)
    assert region_parts([("y", part | {"classification": 0})], "output") == {"y": RegionPart("r", 0, 4)}


def test_an_output_in_a_region_beside_one_of_which_classes_are_asked_for() -> None:
    wanted = (Wanted("t", True), Wanted("y", True, 1))
    response = InferResponse(
        InferRequest({}, "", {}, wanted),
        MODEL,
        {"y": np.array([3, 7], np.float32), "t": np.array([b"ab"], np.object_)},
        labels={"y": ["only"]},
        shared={"t": RegionPart("r", 0, 6)},
    )
    answer = grpc_wire.encode_infer(response)
    assert list(answer.raw_output_contents) == [b"", to_binary(np.array([b"3.000000:0:only", b"7.000000:0:only"]))]
    parts, length = encode(response)
    tensors = json.loads(parts[0])["outputs"]
    assert length == len(parts[0]) and parts[1] == answer.raw_output_contents[1]
    assert tensors[0]["parameters"] == {"shared_memory_region": "r", "shared_memory_byte_size": 6}
    assert [tensor["datatype"] for tensor in tensors] == ["BYTES", "BYTES"] and "data" not in tensors[0]


def test_of_an_output_that_is_named_again_the_first_time_counts() -> None:
    one, other = RegionPart("r", 0, 4), RegionPart("s", 8, 4)
    named = [("y", one.parameters()), ("t", {}), ("y", other.parameters()), ("t", one.parameters()), ("y", {})]
    assert region_parts(named, "output") == {"y": one}


def test_where_tensors_lie_is_known_to_the_processes_that_read_large_json() -> None:
    body = (
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"shared_memory_region": "r", '
        b'"shared_memory_byte_size": 4}}, {"name": "s", "datatype": "BYTES", "shape": [0], "data": []}, '
        b'{"name": "b", "datatype": "BOOL", "shape": [0], "data": []}]}'
    )
    request = decode(body, None, MODEL)
    copy = pickle.loads(pickle.dumps(request))
    assert copy.shared == request.shared and copy.shared.inputs["x"][0] == RegionPart("r", 0, 4)
    arrays = {"y": np.zeros(100_000, np.float32), "t": np.array([b"\xff"], np.object_)}
    shared = {"y": RegionPart("r", 0, 400_000), "t": RegionPart("r", 0, 5)}
    answer = InferResponse(request, MODEL, arrays, shared=shared)
    assert not is_large(answer)
    assert encode(pickle.loads(pickle.dumps(answer))) == encode(answer)


# Through a server, with Triton's clients


@pytest.fixture(params=CLIENTS)
def speaks(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(speaks: str, server: live.Live) -> Iterator[Client]:
    with contextlib.closing(Client(speaks, server)) as made:
        yield made
    until(lambda: server.server.service.budget.held_bytes == 0, "all bytes given back")


Region = Callable[[str, int], Any]


@pytest.fixture
def region(client: Client) -> Iterator[Region]:
    """Makes regions as tritonclient's users do, and takes them away."""
    made = []

    def make(name: str, size: int) -> Any:
        made.append(shm.create_shared_memory_region(name, key_of(name), size))
        client.register_system_shared_memory(name, key_of(name), size)
        return made[-1]

    yield make
    client.unregister_system_shared_memory()
    for each in made:
        shm.destroy_shared_memory_region(each)


def key_of(name: str) -> str:
    return f"/weft-test-{os.getpid()}-{name}"


def status(client: Client, name: str = "", **headers: Any) -> dict[str, Any]:
    """What is registered, by name."""
    found = client.get_system_shared_memory_status(name, **headers)
    return found["regions"] if isinstance(found, dict) else {each["name"]: each for each in found}


def content(handle: Any, dtype: Any, shape: list[int], offset: int = 0) -> np.ndarray:
    return np.array(shm.get_contents_as_numpy(handle, dtype, shape, offset))


def test_metadata_names_the_extension(client: Client) -> None:
    extensions = client.get_server_metadata()["extensions"]
    assert "system_shared_memory" in extensions and "cuda_shared_memory" not in extensions


def test_inputs_and_outputs_lie_in_regions(client: Client, region: Region, folder: Path) -> None:
    into, out = region("into", 512), region("out", 200)
    shm.set_shared_memory_region(into, [x(2)])
    tensors, outputs = [client.shared("x", [2, 64], "into", 512)], [client.shared_output("y", "out", 100, 8)]
    for _ in range(2):
        answer = client.infer("mlp", tensors, outputs=outputs)
        np.testing.assert_allclose(content(out, np.float32, [2, 10], 8), expected(folder, x(2)), rtol=1e-4, atol=1e-5)
        shm.set_shared_memory_region(out, [np.zeros(50, np.float32)])
    found = told(answer.get_output("y"))
    assert found["shape"] == [2, 10] and not found.get("data")
    place = {"shared_memory_region": "out", "shared_memory_offset": 8, "shared_memory_byte_size": 80}
    assert found["parameters"] == place
    answer = client.infer("mlp", tensors)
    np.testing.assert_allclose(answer.as_numpy("y"), expected(folder, x(2)), rtol=1e-4, atol=1e-5)


def test_an_input_in_a_region_has_classes(client: Client, region: Region, folder: Path) -> None:
    shm.set_shared_memory_region(region("into", 512), [x(2)])
    tensors = [client.shared("x", [2, 64], "into", 512)]
    found = client.infer("mlp", tensors, outputs=[client.output("y", class_count=1)]).as_numpy("y")
    assert [int(text.split(b":")[1]) for (text,) in found] == expected(folder, x(2)).argmax(axis=1).tolist()


def test_tensors_in_regions_beside_those_that_travel(client: Client, region: Region) -> None:
    """Strings among them, the first and the last in a region, and one in the middle."""
    strings = utils.serialize_byte_tensor(values("BYTES"))
    size = len(strings.item())
    mixed, out = region("mixed", 100 + size), region("mixed-out", 100 + size)
    shm.set_shared_memory_region(mixed, [values("BOOL"), strings, values("FP32")])
    places = {"BOOL": (6, 0), "BYTES": (size, 6), "FP32": (24, 6 + size)}
    tensors = [
        client.shared(kind.lower(), [2, 3], "mixed", *places[kind], kind=kind)
        if kind in places
        else client.tensor(kind.lower(), values(kind))
        for kind in KINDS
    ]
    outputs = [
        client.shared_output(f"same_{kind.lower()}", "mixed-out", *places[kind])
        if kind in places
        else client.output(f"same_{kind.lower()}")
        for kind in KINDS
    ]
    answer = client.infer("echo", tensors, outputs=outputs)
    for kind, (_, dtype) in KINDS.items():
        name = f"same_{kind.lower()}"
        got = content(out, dtype, [2, 3], places[kind][1]) if kind in places else answer.as_numpy(name)
        assert got.tolist() == values(kind).tolist(), kind


def test_large_tensors_in_regions(client: Client, region: Region) -> None:
    array = np.ones((1, 1024, 512), np.float32)
    shm.set_shared_memory_region(region("large", array.nbytes), [array])
    answer = client.infer("unmeasured", [client.shared("x", [1, 1024, 512], "large", array.nbytes)])
    assert answer.as_numpy("y") == [1.0]


def test_status_register_and_unregister(client: Client, region: Region) -> None:
    region("one", 64)
    region("two", 128)
    row = {"name": "one", "key": key_of("one"), "offset": 0, "byte_size": 64}
    assert status(client, "one") == {"one": row} and status(client).keys() == {"one", "two"}
    with pytest.raises(utils.InferenceServerException, match="'one' is registered already") as refused:
        client.register_system_shared_memory("one", key_of("two"), 64)
    assert refused.value.status() in ("400", "StatusCode.ALREADY_EXISTS")
    client.unregister_system_shared_memory("one")
    client.unregister_system_shared_memory("one")
    assert [*status(client)] == ["two"]
    with client.refused(404, match="no region 'one'"):
        status(client, "one")
    with client.refused(400, match="would end at byte 200 of .* which has 128 bytes"):
        client.register_system_shared_memory("one", key_of("two"), 100, offset=100)
    client.register_system_shared_memory("one", key_of("two"), 28, offset=100)
    assert status(client, "one")["one"]["offset"] == 100
    client.unregister_system_shared_memory()
    assert status(client) == {}


def test_cuda_memory_is_refused_by_name(client: Client) -> None:
    client.unregister_cuda_shared_memory()
    client.unregister_cuda_shared_memory("part")
    found = client.get_cuda_shared_memory_status()
    assert found in ([], {"regions": {}})
    with client.refused(404):
        client.get_cuda_shared_memory_status("part")
    with client.refused(400, match="CUDA shared memory is not supported"):
        client.register_cuda_shared_memory("part", b"aGFuZGxl", 0, 64)


def test_what_does_not_fit_into_a_region_is_refused(client: Client, region: Region) -> None:
    region("small", 256)

    def ask(region: str, size: int, offset: int = 0, out: int | None = None) -> None:
        outputs = None if out is None else [client.shared_output("y", "small", out)]
        client.infer("mlp", [client.shared("x", [1, 64], region, size, offset)], outputs=outputs)

    ask("small", 256, out=40)
    with client.refused(404, match="no region 'another' of shared memory is registered"):
        ask("another", 256)
    with client.refused(400, match="input 'x' would end at byte 260 of region 'small', which has 256 bytes"):
        ask("small", 256, 4)
    with client.refused(400, match="252 bytes of data, its shape and datatype need 256"):
        ask("small", 252)
    with client.refused(400, match="output 'y' would end at byte 257 of region 'small'"):
        ask("small", 256, out=257)
    with client.refused(400, match="output 'y' has 40 bytes, and shared_memory_byte_size leaves 39 for it"):
        ask("small", 256, out=39)


def test_a_client_that_cuts_its_region_off_ends_nobody_but_its_own_requests(
    client: Client, region: Region, folder: Path
) -> None:
    region("into", 4 * 64)
    region("out", 40)
    tensors, outputs = [client.shared("x", [1, 64], "into", 256)], [client.shared_output("y", "out", 40)]
    client.infer("mlp", tensors, outputs=outputs)
    os.truncate(FOLDER + key_of("out"), 0)
    with client.refused(400, match="region 'out': .* was cut to 0 bytes since it was registered"):
        client.infer("mlp", tensors, outputs=outputs)
    assert Path(FOLDER + key_of("out")).stat().st_size == 0
    os.truncate(FOLDER + key_of("into"), 100)
    with client.refused(400, match="region 'into': .* was cut to 100 bytes"):
        client.infer("mlp", tensors)
    answer = client.infer("mlp", [client.tensor("x", x(1))])
    np.testing.assert_allclose(answer.as_numpy("y"), expected(folder, x(1)), rtol=1e-4, atol=1e-5)


def test_requests_of_a_stream_lie_in_regions_too(server: live.Live, folder: Path) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    handle = shm.create_shared_memory_region("streamed", key_of("streamed"), 256 + 40)
    try:
        shm.set_shared_memory_region(handle, [x(1)])
        with contextlib.closing(Client("grpc", server)) as client:
            client.register_system_shared_memory("streamed", key_of("streamed"), 296)
            client.inner.start_stream(lambda result, error: answers.put((result, error)))
            outputs = [client.shared_output("y", "streamed", 40, 256)]
            client.inner.async_stream_infer("mlp", [client.shared("x", [1, 64], "streamed", 256)], outputs=outputs)
            assert answers.get(timeout=live.PATIENCE_S)[1] is None
            client.inner.stop_stream()
            client.unregister_system_shared_memory("streamed")
        found = content(handle, np.float32, [1, 10], 256)
        np.testing.assert_allclose(found, expected(folder, x(1)), rtol=1e-4, atol=1e-5)
    finally:
        shm.destroy_shared_memory_region(handle)


def test_what_was_read_for_who_leaves_is_given_back(server: live.Live, shared: Callable[[int], Shared]) -> None:
    made, budget = shared(131_072), server.server.service.budget
    place = RegionPart("left", 0, 131_072).parameters()
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 64, 512], "parameters": place}
    body = json.dumps({"inputs": [tensor]}).encode()
    head = f"POST /v2/models/unmeasured/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with contextlib.closing(Client("http", server)) as client:
        client.register_system_shared_memory("left", made.key, 131_072)
        with live.Gate(server, "unmeasured", 1) as gate:
            with socket.create_connection(("127.0.0.1", server.server.http_port or 0)) as connection:
                connection.sendall(head.encode() + body)
                gate.wait()
                assert budget.held_bytes == 131_072
            until(lambda: budget.held_bytes == 0, "the bytes given back")
        client.unregister_system_shared_memory("left")
    until(lambda: made.opened == 0, "the descriptor closed")


# Who may


@pytest.fixture(scope="module")
def keyed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[live.Live]:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text('[[keys]]\nname = "one"\nkey = "first"\n[[keys]]\nname = "two"\nkey = "second"\n')
    with live.running(folder / "mlp.onnx", keys_file=file) as running:
        yield running


@pytest.fixture(scope="module")
def unshared(folder: Path) -> Iterator[live.Live]:
    with live.running(folder / "mlp.onnx", shared_memory=False) as running:
        yield running


@pytest.mark.parametrize("speaks", ["http", "grpc"])
def test_another_key_knows_nothing_of_a_region(speaks: str, keyed: live.Live, shared: Callable[[int], Shared]) -> None:
    made, mine, other = shared(256), shared(256), shared(256)
    one, two = ({"headers": {"authorization": f"Bearer {key}"}} for key in ("first", "second"))
    with contextlib.closing(Client(speaks, keyed)) as client:
        tensors = [client.shared("x", [1, 64], "r", 256)]
        client.register_system_shared_memory("r", made.key, 256, **one)
        client.infer("mlp", tensors, **one)
        assert status(client, **two) == {}
        with client.refused(404):
            status(client, "r", **two)
        with client.refused(404, match="no region 'r'"):
            client.infer("mlp", tensors, **two)
        client.unregister_system_shared_memory("r", **two)
        client.unregister_system_shared_memory(**two)
        client.register_system_shared_memory("r", mine.key, 256, **two)
        assert [status(client, **who)["r"]["key"] for who in (one, two)] == [made.key, mine.key]
        with client.refused(401):
            client.register_system_shared_memory("r", other.key, 256)
        for who in (one, two):
            client.unregister_system_shared_memory(**who)
    assert made.opened == mine.opened == other.opened == 0


@pytest.mark.parametrize("speaks", ["http", "grpc"])
def test_a_server_that_shares_no_memory_says_so(
    speaks: str, unshared: live.Live, shared: Callable[[int], Shared]
) -> None:
    made, codes = shared(256), ("403", "StatusCode.PERMISSION_DENIED")
    with contextlib.closing(Client(speaks, unshared)) as client:
        assert "system_shared_memory" not in client.get_server_metadata()["extensions"]
        assert status(client) == {}
        client.unregister_system_shared_memory()
        with pytest.raises(utils.InferenceServerException, match="shared memory is off on this server") as refused:
            client.register_system_shared_memory("r", made.key, 256)
        assert refused.value.status() in codes
        with pytest.raises(utils.InferenceServerException, match="shared memory is off on this server") as refused:
            client.infer("mlp", [client.shared("x", [1, 64], "r", 256)])
        assert refused.value.status() in codes


def test_a_server_that_ends_lets_go_of_all_regions(folder: Path, shared: Callable[[int], Shared]) -> None:
    made = shared(256)
    with live.running(folder / "mlp.onnx", grpc_port=None) as running:
        with contextlib.closing(Client("http", running)) as client:
            client.register_system_shared_memory("r", made.key, 256)
        assert made.opened == 1
    assert made.opened == 0


def test_regions_are_closed_although_requests_used_them(server: live.Live, shared: Callable[[int], Shared]) -> None:
    made = shared(256)
    for speaks in ("http", "grpc"):
        with contextlib.closing(Client(speaks, server)) as client:
            client.register_system_shared_memory("r", made.key, 256)
            client.infer("mlp", [client.shared("x", [1, 64], "r", 256)], outputs=[client.shared_output("y", "r", 256)])
            with contextlib.suppress(utils.InferenceServerException):
                client.infer("mlp", [client.shared("x", [1, 64], "r", 4)])
            client.unregister_system_shared_memory("r")
        until(lambda: made.opened == 0, "the descriptor closed")
