"""Servers for the clients of the protocol (an open one, one with a key, one with a certificate), and machines that
compute nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.hosts import Machine
from tests.serving import live


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes machines and closes them."""
    made: list[Machine] = []

    def make(*args: Any, **settings: Any) -> Machine:
        made.append(Machine(monkeypatch, *args, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.serving.clients import repository

    return repository(tmp_path_factory.mktemp("repository"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[live.Live]:
    with live.running(folder, policy="edf", late="keep") as running:
        yield running


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[live.Live]:
    """Wants a key, and no large bodies."""
    with live.running(folder / "mlp.onnx", api_key="open-sesame", max_body_bytes=1 << 16) as running:
        yield running


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate and its key."""
    from tests.serving.clients import certificate

    return certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def encrypted(folder: Path, trusted: tuple[Path, Path]) -> Iterator[live.Live]:
    cert, key = trusted
    with live.running(folder / "mlp.onnx", tls_cert=cert, tls_key=key) as running:
        yield running
