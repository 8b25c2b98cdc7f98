"""The files that a wheel leaves out: where they are looked for, how they are fetched, and what is said without them."""

from __future__ import annotations

import functools
import hashlib
import http.server
import threading
from pathlib import Path

import pytest

from tests import ROOT
from weft.base.errors import ModelError
from weft.cli.main import main
from weft.models import classifiers, stored
from weft.models.sources import load_model
from weft.models.trained import TRAINED

FILES = [(file, sha256) for files in stored.FETCHED.values() for file, sha256 in files.items()]


def in_checkout(file: str) -> Path:
    """Where the sources have a file: that of a tool lies in the tool's package."""
    return (
        ROOT / "src" / (file.replace("stitching/", "weft_stitch/") if file.startswith("stitching/") else f"weft/{file}")
    )


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Path:
    """A weft without the files it fetches, and the user's folder, which is not there yet."""
    monkeypatch.setattr(stored, "_PACKAGE", tmp_path / "site-packages/weft")
    monkeypatch.setenv("WEFT_DATA", str(tmp_path / "user"))
    return tmp_path / "user"


@pytest.mark.parametrize(("file", "sha256"), FILES)
def test_the_files_of_a_checkout_are_those_that_are_fetched(file, sha256):
    assert hashlib.sha256(in_checkout(file).read_bytes()).hexdigest() == sha256
    assert stored.existing_data_path(file) == in_checkout(file)


@pytest.mark.parametrize("name", stored.FETCHED)
def test_a_network_is_fetched_from_a_checkout_and_found(installed, name):
    seen: list[Path] = []
    paths = stored.fetch(name, str(ROOT), seen.append)
    assert paths == tuple(seen) == tuple(installed / file for file in stored.FETCHED[name])
    for file, path in zip(stored.FETCHED[name], paths, strict=True):
        assert path.read_bytes() == in_checkout(file).read_bytes()
        assert stored.existing_data_path(file) == path
    assert {path for path in installed.rglob("*") if path.is_file()} == set(paths)


@pytest.mark.parametrize(
    "file", ["models/trained/cifar-cnn.onnx", "stitching/making/data/zipped/mnist-odd.onnx"]
)  # as 0.2 wrote them
def test_files_that_weft_0_2_fetched_are_found(installed, file):
    (installed / file).parent.mkdir(parents=True)
    (installed / file).write_bytes(in_checkout(file).read_bytes())
    assert stored.existing_data_path(file) == installed / file


def test_a_network_is_fetched_from_an_address(installed, monkeypatch):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=ROOT)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}/"
            (path,) = stored.fetch("mlp-m", address)
            with pytest.raises(
                ModelError, match=r"/nowhere/src/weft/.*cifar-cnn\.onnx: cannot be read: File not found"
            ):
                stored.fetch("cifar-cnn", f"{address}nowhere")
        finally:
            server.shutdown()
            serving.join()
    assert path == classifiers.model_path("mlp-m")


def test_what_is_here_is_not_fetched_again(installed):
    paths = stored.fetch("mlp-m", str(ROOT))
    assert stored.fetch("mlp-m", "/nowhere") == paths


def test_a_file_that_an_older_weft_stored_is_fetched_anew(installed):
    (path,) = stored.fetch("mlp-m", str(ROOT))
    path.write_bytes(b"another network")
    assert stored.fetch("mlp-m", str(ROOT)) == (path,)
    assert path.read_bytes() == in_checkout(path.relative_to(installed).as_posix()).read_bytes()


def test_a_connection_that_breaks_off_is_an_error_of_one_line(installed, monkeypatch):
    class HalfWay(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"half")

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), HalfWay) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            with pytest.raises(ModelError, match=r"mlp-m\.onnx: cannot be read: IncompleteRead"):
                stored.fetch("mlp-m", f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            serving.join()
    assert not installed.exists()


def test_another_file_is_refused_and_nothing_is_kept(installed, tmp_path):
    other = tmp_path / "other/src/weft/models/classifiers/mlp-m.onnx"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"not a network")
    with pytest.raises(ModelError, match=r"^mlp-m\.onnx: not the file that this weft knows: its SHA-256 differs$"):
        stored.fetch("mlp-m", str(tmp_path / "other"))
    assert not installed.exists()


def test_a_source_that_is_no_checkout_is_an_error_of_one_line(installed, tmp_path):
    with pytest.raises(
        ModelError, match=r"^[^\n]*No such file or directory; --from [^\n]* must be a checkout of weft$"
    ):
        stored.fetch("mlp-m", str(tmp_path))


def test_a_folder_that_cannot_be_written_is_an_error_of_one_line(installed):
    installed.write_bytes(b"a file where the folder should be")
    with pytest.raises(ModelError, match=r"^[^\n]*mlp-m\.onnx: cannot be written: [^\n]*$"):
        stored.fetch("mlp-m", str(ROOT))


def test_an_unknown_name_is_told_the_near_one():
    with pytest.raises(ModelError, match="cifar-cnn"):
        stored.fetch("cifar-cn", str(ROOT))


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("cifar-cnn", lambda: load_model("cifar-cnn")),
        ("cifar-cnn", lambda: TRAINED["cifar-cnn"].samples()),
        ("cifar-cnn", lambda: TRAINED["cifar-cnn"].record()),
        ("mlp-c", lambda: classifiers.model_path("mlp-c")),
        ("mlp-c", lambda: classifiers.validation("cuda-convnet")),
    ],
)
def test_without_the_files_the_error_names_the_command(installed, name, ask):
    with pytest.raises(ModelError, match=rf"^{name} is too large to come [^\n]*: weft models fetch {name} --from "):
        ask()


def test_a_file_that_should_have_come_with_weft_is_not_said_to_be_fetched(installed):
    with pytest.raises(ModelError, match=r"lenet\.onnx: not there, though it comes with weft"):
        classifiers.model_path("lenet")


def test_the_command_fetches_what_is_named_or_all(installed, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["models", "fetch", "mlp-m", "--from", str(ROOT)])
    assert "mlp-m.onnx" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["models", "fetch", "--from", str(ROOT)])
    assert all((installed / file).is_file() for file, _ in FILES)


def test_the_folder_is_the_variable_or_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_DATA", str(tmp_path))
    assert stored.folder() == tmp_path
    monkeypatch.delenv("WEFT_DATA")
    assert stored.folder() == Path.home() / ".cache/weft/data"
