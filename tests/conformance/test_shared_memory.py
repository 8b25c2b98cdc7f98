"""Triton's own clients with tensors in system shared memory."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import shared_memory

from tests.serving.clients import CLIENTS, Client, told
from tests.serving.live import Live

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")

ROW = np.array([[1.5, -2.0]], np.float32)


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, served: Live) -> Iterator[Client]:
    with contextlib.closing(Client(request.param, served)) as made:
        yield made


@pytest.fixture
def memory() -> Iterator[Any]:
    """Makes regions of so many bytes, with names of their own, and removes them."""
    made: list[Any] = []

    def make(size: int) -> tuple[Any, str, str]:
        name = f"weft-{uuid.uuid4().hex[:12]}"
        made.append(shared_memory.create_shared_memory_region(name, f"/{name}", size))
        return made[-1], name, f"/{name}"

    yield make
    for each in made:
        shared_memory.destroy_shared_memory_region(each)


def in_region(client: Client, region: str) -> Any:
    """The one input, in a region."""
    made = import_module(f"tritonclient.{client.protocol}").InferInput("INPUT0", [1, 2], "FP32")
    made.set_shared_memory(region, ROW.nbytes)
    return made


def names(client: Client) -> set[str]:
    """The regions that the server knows."""
    status = client.get_system_shared_memory_status()
    regions = status["regions"].values() if isinstance(status, dict) else status
    return {each["name"] for each in regions}


def test_regions_come_and_go(client: Client, memory: Any) -> None:
    (_, first, first_key), (_, second, second_key) = memory(8), memory(16)
    client.register_system_shared_memory(first, first_key, 8)
    client.register_system_shared_memory(second, second_key, 8, offset=8)
    assert {first, second} <= names(client)
    client.unregister_system_shared_memory(first)
    assert first not in names(client) and second in names(client)
    client.unregister_system_shared_memory()
    assert names(client) == set()


def test_inputs_and_outputs_in_shared_memory(client: Client, memory: Any) -> None:
    (taken, inside, inside_key), (made, outside, outside_key) = memory(8), memory(8)
    shared_memory.set_shared_memory_region(taken, [ROW])
    client.register_system_shared_memory(inside, inside_key, 8)
    client.register_system_shared_memory(outside, outside_key, 8)
    output = client.output("OUTPUT0")
    output.set_shared_memory(outside, 8)
    answer = client.infer("identity_fp32", [in_region(client, inside)], outputs=[output])
    assert told(answer.get_output("OUTPUT0"))["shape"] == [1, 2]
    assert shared_memory.get_contents_as_numpy(made, np.float32, [1, 2]).tolist() == ROW.tolist()
    client.unregister_system_shared_memory()


def test_a_region_that_was_not_registered(client: Client) -> None:
    with client.refused(400, 404, match="nothing"):
        client.infer("identity_fp32", [in_region(client, "nothing")])


def test_memory_of_cuda_is_refused_by_name(client: Client) -> None:
    status = client.get_cuda_shared_memory_status()
    assert not (status["regions"] if isinstance(status, dict) else status)
    with client.refused(400, 501, match="(?i)cuda"):
        client.register_cuda_shared_memory("part", b"aGFuZGxl", 0, 64)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_program(served: Live, program: Any, protocol: str) -> None:
    address = served.address if protocol == "http" else served.grpc_address
    said = program("shared_memory", "--protocol", protocol, "--address", address)
    assert said == [f"sums: {list(range(1, 17))}", f"differences: {list(range(-1, 15))}"]
