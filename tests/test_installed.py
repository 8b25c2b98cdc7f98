"""A weft that was installed from its wheel, with no checkout beside it: what it can do, and what it says it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import ROOT
from weft.models.stored import FETCHED, data_path

pytest.importorskip("hatchling", reason="hatchling builds the wheel; pip install -e .[dev] brings it")

AT_MOST_BYTES = 5_000_000
RUN = "from weft.cli.main import main; main()"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    return folder


@pytest.fixture
def weft(site, tmp_path):
    """Runs a command of the installed weft in an empty folder, for a user who has nothing yet."""

    def run(*arguments: str, code: str = RUN) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(site), "HOME": str(tmp_path / "home")}
        environment.pop("WEFT_DATA", None)
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def test_the_wheel_is_small_and_leaves_out_only_what_can_be_fetched(wheel):
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        ours = {name.removeprefix("src/") for name in listed.stdout.split() if (ROOT / name).exists()}
        fetched = {data_path(file).relative_to(ROOT / "src").as_posix() for files in FETCHED.values() for file in files}
        assert ours - names == fetched
    assert wheel.stat().st_size < AT_MOST_BYTES


def test_every_tool_of_the_wheel_is_known(weft):
    listed = weft(
        code="from weft.base.registry import *; print(*(tool.name for tool in registry().tools)); print(*others())"
    )
    assert listed.stdout.splitlines()[0].split() == ["weft", "stitch", "tune", "map", "cluster", "papers"], (
        listed.stderr
    )


def test_it_serves_a_network_that_comes_with_it(weft, tmp_path):
    assert weft(code="import weft; print(weft.__file__)").stdout.startswith(str(tmp_path.parent))
    (tmp_path / "models").mkdir()
    written = weft("models", "export", "mnist-vit", "-o", "models/mnist-vit.onnx")
    assert written.returncode == 0, written.stderr
    checked = weft("serve", "models/", "--check")
    assert checked.returncode == 0, checked.stderr
    assert "mnist-vit" in checked.stdout


def test_it_weaves_models(weft):
    done = weft("simulate", "--device", "tpuv3-like", "--models", "resnet50,bert-base", "--policy", "fifo")
    assert done.returncode == 0, done.stderr
    assert "STP" in done.stdout


def test_it_reads_the_network_and_the_images_that_tune_is_shown_with(weft):
    code = (
        "from weft.models.classifiers import *; print(model_path('lenet').stat().st_size, len(validation('lenet')[0]))"
    )
    assert weft(code=code).stdout.split() == ["1725209", "2000"]


def test_it_says_how_to_get_what_it_leaves_out_and_then_has_it(weft):
    refused = weft("models", "show", "cifar-cnn")
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    assert "weft models fetch cifar-cnn --from " in refused.stderr
    fetched = weft("models", "fetch", "cifar-cnn", "--from", str(ROOT))
    assert fetched.returncode == 0, fetched.stderr
    shown = weft("models", "show", "cifar-cnn")
    assert shown.returncode == 0 and "exit3" in shown.stdout
