"""Files are written whole or not at all: beside their place first, then moved there."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from weft.errors import InputError

_MOST_LINKS = 40
"""As many as Linux follows."""


@contextmanager
def replacing(path: str | os.PathLike[str], error: type[InputError] = InputError) -> Iterator[Path]:
    """A path to write to, with the name of *path*; what stands there takes its place when the block ends well.

    What cannot be written is the caller's mistake and raises *error*. Pipes, devices and the open files of this process
    (/dev/stdout, /dev/fd/3) are written to as they are, from where they stand.
    """
    target = Path(path)
    try:
        descriptor, real = _descriptor(target), Path(os.path.realpath(target))
        as_it_is = descriptor is not None or (target.exists() and not target.is_file())
        with TemporaryDirectory(prefix=".", dir=None if as_it_is else real.parent) as folder:
            beside = Path(folder, target.name)
            yield beside
            if as_it_is:
                _pour(beside, target if descriptor is None else descriptor)
            else:
                _move(beside, real)
    except OSError as problem:
        raise error(f"{target}: cannot write: {problem.strerror or problem}") from problem


def _descriptor(path: Path) -> int | None:
    """The number of the open file that a name like /dev/stdout stands for.

    To open the name instead would be to start that file afresh: what others wrote to it would be lost.
    """
    open_files = {os.path.realpath(each) for each in ("/dev/fd", "/proc/self/fd")}
    for _ in range(_MOST_LINKS):
        folder = os.path.realpath(path.parent)
        if folder in open_files and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            break
        path = Path(folder, os.readlink(path))
    return None


def _pour(written: Path, place: Path | int) -> None:
    """Write what *written* holds to *place*; an open file goes on after what this process has printed."""
    sys.stdout.flush()
    with written.open("rb") as source, open(place if isinstance(place, Path) else os.dup(place), "wb") as file:
        shutil.copyfileobj(source, file)


def _move(written: Path, real: Path) -> None:
    if real.exists():
        shutil.copymode(real, written)
    written.replace(real)


def write_text(path: str | os.PathLike[str], text: str, error: type[InputError] = InputError) -> None:
    """Write a text file."""
    with replacing(path, error) as beside:
        beside.write_text(text, encoding="utf-8")
