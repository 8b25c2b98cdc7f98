"""A server with the models of the table and one real classifier, for programs that ask as their users would."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator

import pytest

from tests import ROOT
from tests.conformance.models import write_repository
from tests.serving import live
from weft.models.classifiers import model_path

collect_ignore_glob = [] if importlib.util.find_spec("tritonclient") else ["test_*.py"]
"""The tests are for Triton's clients, and speak gRPC with their messages."""

Program = Callable[..., list[str]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[live.Live]:
    folder = write_repository(tmp_path_factory.mktemp("repository"))
    (folder / "lenet" / "1").mkdir(parents=True)
    shutil.copy(model_path("lenet"), folder / "lenet" / "1" / "model.onnx")
    with live.running(folder, learn_s=0) as server:
        yield server


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Program:
    """Runs one of ``examples/clients`` as from a command line; the lines that it prints."""

    def run(name: str, *args: str, code: int = 0) -> list[str]:
        path = ROOT / "examples" / "clients" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"examples_clients_{name}", path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.main(args) == code
        return capsys.readouterr().out.splitlines()

    return run
