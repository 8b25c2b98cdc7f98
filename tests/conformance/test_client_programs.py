"""The programs in ``examples/clients``, each run against a server and judged by what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import ROOT
from tests.serving.live import Live
from weft.models.classifiers import validation

Program = Any

SUMS = [number + 1 for number in range(16)]
DIFFERENCES = [number - 1 for number in range(16)]


def both(served: Live) -> list[str]:
    return ["--http", served.address, "--grpc", served.grpc_address]


def one(served: Live, protocol: str) -> list[str]:
    return ["--protocol", protocol, "--address", served.address if protocol == "http" else served.grpc_address]


def test_health(served: Live, program: Program) -> None:
    said = program("health", "simple", *both(served))
    assert said == [f"{way}: live yes, ready yes, simple yes" for way in ("HTTP", "gRPC")]


def test_metadata(served: Live, program: Program) -> None:
    said = program("metadata", "simple", "--http", served.address)
    assert said[0].startswith("weft ") and "binary_tensor_data" in said[0]
    assert said[1].startswith("simple (") and said[1].endswith("versions 1")
    assert said[2:4] == ["  input INPUT0: INT32 [-1, 16]", "  input INPUT1: INT32 [-1, 16]"]
    assert said[4:6] == ["  output OUTPUT0: INT32 [-1, 16]", "  output OUTPUT1: INT32 [-1, 16]"]
    assert said[7].endswith("executions")


def test_sums_and_differences(served: Live, program: Program) -> None:
    said = program("simple", *both(served))
    assert said == [f"{way}: sums {SUMS}, differences {DIFFERENCES}" for way in ("HTTP, binary", "HTTP, JSON", "gRPC")]


def test_strings(served: Live, program: Program) -> None:
    assert program("strings", *both(served)) == [f"{way}: {' '.join(map(str, SUMS))}" for way in ("HTTP", "gRPC")]


@pytest.mark.parametrize("name", ["async_requests", "aio"])
def test_many_requests_at_once(served: Live, program: Program, name: str) -> None:
    said = program(name, "--count", "6", *both(served))
    assert said == [f"{way}: [1, 2, 3, 4, 5, 6]" for way in ("HTTP", "gRPC")]


def test_streams(served: Live, program: Program) -> None:
    said = program("streams", "--count", "3", "--grpc", served.grpc_address)
    assert said[:3] == ["0: 1", "1: 2", "2: 3"]
    assert said[3].startswith("refused: ") and "no-such-model" in said[3]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_model_is_taken_out_and_brought_back(served: Live, program: Program, protocol: str) -> None:
    said = program("repository", "spare", *one(served, protocol))
    assert said == ["spare is READY", "unloaded: UNAVAILABLE", "loaded: READY"]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_pictures_are_classified_by_a_real_network(
    served: Live, program: Program, tmp_path: Path, protocol: str
) -> None:
    image = pytest.importorskip("PIL.Image")
    shown = validation("lenet")
    paths = [str(tmp_path / f"{place}.png") for place in range(8)]
    for path, pixels in zip(paths, shown.image, strict=False):
        image.fromarray(np.ascontiguousarray(pixels[0])).save(path)
    said = program("image_classification", "lenet", *paths, "--classes", "2", *one(served, protocol))
    found = [line.partition(": ")[2].split(" ")[0] for line in said]
    assert sum(name == str(label) for name, label in zip(found, shown.label, strict=False)) >= 7
    assert all(line.count("(") == 2 for line in said)


def test_every_program_is_run_by_a_test() -> None:
    here = Path(__file__)
    tests = here.read_text("utf-8") + here.with_name("test_shared_memory.py").read_text("utf-8")
    programs = [path.stem for path in sorted((ROOT / "examples" / "clients").glob("*.py"))]
    assert len(programs) >= 9
    assert [name for name in programs if f'"{name}"' not in tests] == []
