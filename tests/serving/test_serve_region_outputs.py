"""Outputs in regions of clients that a device writes itself, on its twin, with Triton's client.

The twin takes the way of a GPU with the system's shared memory. It has no memory that clients could share by CUDA.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.cuda.nets import chain, wanted
from tests.serving import live
from tests.serving.clients import Client, told
from tests.serving.live import device_worker
from tests.support.concurrency import until
from weft.runtime.cuda.cpu_twins import TWIN
from weft.runtime.isolated.device import DeviceBackend
from weft.serving import isolation
from weft.serving.shared_memory import SystemRegion

shm = pytest.importorskip("tritonclient.utils.shared_memory")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")

WIDE = (4096, 8)
ROW_BYTES = 4 * 4096 * 8
"""A row is as long as the shortest output that a device writes into the system's shared memory."""
GUARD = 64
"""Bytes before and behind an output, which nothing may change."""

_numbers = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models")
    chain(found / "wide" / "1" / "model.onnx", sizes=("n", *WIDE))
    (found / "wide" / "weft.toml").write_text("max_batch = 4\ngrain_ms = 0.0001\nbatch_timeout_ms = 20\n")
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["segments", "gates"])
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[live.Live]:
    with pytest.MonkeyPatch.context() as patch:
        # Number 0, so that clients can register memory of CUDA, which the twin then cannot open.
        patch.setattr(isolation, "on_device", lambda device, limits, most: DeviceBackend(TWIN, limits, most, number=0))
        with live.running(folder, device="cuda:0", gates=request.param, policy="edf") as found:
            yield found


@pytest.fixture
def by_server(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each write of the server into a region."""
    counts, write = list[int](), SystemRegion.write_from

    def counted(region: SystemRegion, data: memoryview, offset: int) -> None:
        counts.append(len(data))
        write(region, data, offset)

    monkeypatch.setattr(SystemRegion, "write_from", counted)
    return counts


class Camera:
    """A client with images in one region, and one for what becomes of them."""

    def __init__(
        self, server: live.Live, rows: int, seed: int = 0, *, room: int | None = None, speaks: str = "grpc"
    ) -> None:
        """room: what its requests say is left for the output; by default what it takes."""
        self.array = np.random.default_rng(seed).standard_normal((rows, *WIDE)).astype(np.float32)
        self.client, self.name = Client(speaks, server), f"weft-{os.getpid()}-{next(_numbers)}"
        self.room, self._rows = self.array.nbytes if room is None else room, rows
        self._handle = shm.create_shared_memory_region(self.name, f"/{self.name}", 3 * self.array.nbytes)
        shm.set_shared_memory_region(self._handle, [self.array])
        self.client.register_system_shared_memory(self.name, f"/{self.name}", 3 * self.array.nbytes)
        self.clear()

    def clear(self) -> None:
        shm.set_shared_memory_region(self._handle, [np.full_like(self.array, 7.0)], offset=self.array.nbytes + GUARD)

    def ask(self, output: str = "region", **options: Any) -> Any:
        """Ask with the image in the region; the output goes there, into the answer (``sent``), or to another region.

        ``over``: there, over the image. options: of the client's ``infer``.
        """
        tensor = self.client.shared("x", [self._rows, *WIDE], self.name, self.array.nbytes)
        place = self.client.output("y") if output == "sent" else None
        if place is None:
            at = self.array.nbytes + GUARD if output == "region" else 0
            output = "region" if output == "over" else output
            name = self.name if output == "region" else output
            place = self.client.shared_output("y", name, self.room, at)
        return self.client.infer("wide", [tensor], outputs=[place], **options)

    @property
    def written(self) -> Any:
        return np.array(
            shm.get_contents_as_numpy(self._handle, np.float32, self.array.shape, self.array.nbytes + GUARD)
        )

    @property
    def guarded(self) -> bool:
        """Whether nothing was written beside the output."""
        whole = shm.get_contents_as_numpy(self._handle, np.uint8, [3 * self.array.nbytes])
        start = self.array.nbytes + GUARD
        rest = whole[start + self.array.nbytes :], whole[start - GUARD : start]
        return bool((whole[: self.array.nbytes] == self.array.view(np.uint8).ravel()).all()) and not any(
            part.any() for part in rest
        )

    def close(self) -> None:
        self.client.unregister_system_shared_memory(self.name)
        self.client.unregister_cuda_shared_memory()
        self.client.close()
        shm.destroy_shared_memory_region(self._handle)


@pytest.fixture
def camera(server: live.Live) -> Iterator[Callable[..., Camera]]:
    with contextlib.ExitStack() as stack:

        def make(*args: Any, **settings: Any) -> Camera:
            return stack.enter_context(contextlib.closing(Camera(server, *args, **settings)))

        yield make
    until(lambda: gc.collect() is not None and device_worker(server).call("borrowed") == 0, "no region is kept open")


def check(camera: Camera, folder: Path) -> None:
    expected = wanted(folder / "wide" / "1" / "model.onnx", {"x": camera.array})
    np.testing.assert_allclose(camera.written, expected, rtol=1e-4, atol=1e-5)
    assert camera.guarded


@pytest.mark.parametrize("speaks", ["http", "grpc"])
def test_the_device_writes_an_output_and_the_answer_has_none_of_its_bytes(
    camera: Callable[..., Camera], by_server: list[int], folder: Path, speaks: str
) -> None:
    one = camera(2, room=2 * ROW_BYTES + 100, speaks=speaks)
    for _ in range(2):
        answer = told(one.ask().get_output("y"))
        check(one, folder)
        place = {"shared_memory_offset": one.array.nbytes + GUARD, "shared_memory_byte_size": one.array.nbytes}
        assert answer["shape"] == [2, *WIDE] and answer["parameters"] == {"shared_memory_region": one.name} | place
        assert not answer.get("data")
        one.clear()
    assert by_server == []


def test_the_rows_of_a_batch_go_to_their_clients(
    camera: Callable[..., Camera], by_server: list[int], folder: Path
) -> None:
    cameras = [camera(1 + seed % 2, seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as threads:
        for _ in range(4):
            answers = [told(answer.get_response()) for answer in threads.map(Camera.ask, cameras)]
            assert max(answer["parameters"]["weft_batch"] for answer in answers) > 1
            for one in cameras:
                check(one, folder)
                one.clear()
    assert by_server == []


def test_a_batch_of_clients_with_regions_and_without(
    camera: Callable[..., Camera], by_server: list[int], folder: Path
) -> None:
    cameras = [camera(1, seed) for seed in range(6)]
    for one in cameras[:3]:
        one.clear()
    with ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(one.ask, ("sent", "region")[at % 2]) for at, one in enumerate(cameras * 4)]
    for at, (one, answer) in enumerate(zip(cameras * 4, asked, strict=True)):
        if at % 2:
            check(one, folder)
        else:
            expected = wanted(folder / "wide" / "1" / "model.onnx", {"x": one.array})
            np.testing.assert_allclose(answer.result().as_numpy("y"), expected, rtol=1e-4, atol=1e-5)
            assert (one.written == 7.0).all()
    assert by_server == []


def test_an_output_that_does_not_fit_is_refused_and_others_are_not(camera: Callable[..., Camera], folder: Path) -> None:
    small, others = camera(2, room=2 * ROW_BYTES - 1), [camera(1, seed) for seed in range(3)]
    with ThreadPoolExecutor(4) as threads:
        refused, asked = threads.submit(small.ask), [threads.submit(one.ask) for one in others]
        error = refused.exception()
    assert f"output 'y' has {2 * ROW_BYTES} bytes, and shared_memory_byte_size leaves {2 * ROW_BYTES - 1}" in str(error)
    assert (small.written == 7.0).all()
    for one, answer in zip(others, asked, strict=True):
        assert answer.exception() is None
        check(one, folder)


def test_the_server_writes_where_a_device_might_write_too_late_or_over_an_input(
    camera: Callable[..., Camera], folder: Path, by_server: list[int]
) -> None:
    """A strict request may be answered before its batch has ended; a retry would read its own output."""
    one = camera(1)
    one.ask(timeout=20_000_000)
    check(one, folder)
    assert by_server == [one.array.nbytes]
    one.ask("over")
    assert by_server == 2 * [one.array.nbytes]


def test_a_region_that_was_cut_off_is_an_error_and_not_written(camera: Callable[..., Camera]) -> None:
    one, other = camera(1), camera(1, 1)
    os.truncate(f"/dev/shm/{other.name}", 100)
    with one.client.refused(400, match=f"region '{other.name}': .* was cut to 100 bytes since it was registered"):
        one.ask(other.name)
    assert os.stat(f"/dev/shm/{other.name}").st_size == 100
    os.truncate(f"/dev/shm/{other.name}", 3 * ROW_BYTES)
    one.ask(other.name)


def test_a_region_that_is_unregistered_meanwhile_is_written_for_those_before(
    server: live.Live, camera: Callable[..., Camera], folder: Path
) -> None:
    one = camera(1)
    with live.Gate(server, "wide", 1) as gate, ThreadPoolExecutor(1) as thread:
        asked = thread.submit(one.ask)
        gate.wait()
        with contextlib.closing(Client("http", server)) as another:
            another.unregister_system_shared_memory(one.name)
        gate.open()
        asked.result()
    check(one, folder)
    with one.client.refused(404, match="no region"):
        one.ask()


def test_another_worker_writes_to_the_same_region(
    server: live.Live, camera: Callable[..., Camera], by_server: list[int], folder: Path
) -> None:
    one = camera(2)
    one.ask()
    worker = device_worker(server)
    worker.kill("a test")
    until(
        lambda: device_worker(server) not in (worker, None) and device_worker(server).alive
        and device_worker(server).opened, "a worker",
    )  # fmt: skip
    one.clear()
    one.ask()
    check(one, folder)
    assert by_server == []


def test_memory_of_a_gpu_that_cannot_be_opened_is_an_error_of_its_own_requests(
    camera: Callable[..., Camera], folder: Path
) -> None:
    one, others = camera(1), [camera(1, seed) for seed in range(3)]
    one.client.register_cuda_shared_memory("gpu", b64encode(bytes(64)), 0, ROW_BYTES)
    with ThreadPoolExecutor(4) as threads:
        refused, asked = threads.submit(one.ask, "gpu"), [threads.submit(other.ask) for other in others]
        error = refused.exception()
    assert "CUDA shared memory needs a GPU, and this is its twin" in str(error)
    for other, answer in zip(others, asked, strict=True):
        assert answer.exception() is None
        check(other, folder)
