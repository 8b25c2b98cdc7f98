"""Files: written whole or not at all, beside their place first, then moved there; and what is no regular file."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from weft.base.errors import InputError, reason_of

_MOST_LINKS = 40
"""As many as Linux follows."""
_ONLY_IN_PLACE = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EXDEV, errno.EROFS)
"""Nothing may be moved here: the folder belongs to others, or the file is a mount. What is there may be written yet."""

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def kind_of(mode: int) -> str:
    """What a thing in a folder is, in words, by its mode (``st_mode``)."""
    return _KINDS.get(stat.S_IFMT(mode), "a file")


def kind_at(path: str | os.PathLike[str]) -> str:
    """The same by its path; empty where nothing is there, or it cannot be looked at."""
    try:
        return kind_of(os.stat(path).st_mode)
    except (OSError, ValueError):  # ValueError: a path with a zero in it
        return ""


def refuse_special_file(path: str | os.PathLike[str], error: type[InputError] = InputError) -> None:
    """Raise *error* if a path is a pipe, a socket or a device: opening one may block for ever."""
    if (kind := kind_at(path)) not in ("", "a file", "a directory"):
        raise error(f"{os.fspath(path)} is {kind}, not a file; name a regular file")


@contextmanager
def replacing(path: str | os.PathLike[str], error: type[InputError] = InputError) -> Iterator[Path]:
    """A path to write to, with the name of *path*; what stands there takes its place when the block ends well.

    Where *path* is a link, that is the place of what it links to. Other files that the block writes beside it go along.
    What cannot be written is the caller's mistake and raises *error*. Pipes, devices and the open files of this process
    (/dev/stdout, /dev/fd/3) are written to as they are, from where they stand.
    """
    target = Path(path)
    try:
        descriptor, real = _descriptor(target), Path(os.path.realpath(target))
        as_it_is = descriptor is not None or not _replaceable(target)
        with _folder(None if as_it_is else real) as folder:
            beside = Path(folder, target.name)
            yield beside
            others = [each for each in beside.parent.iterdir() if each != beside]
            if as_it_is and others:
                raise OSError("more than one file is needed; name a file")
            for each in others:
                _move(each, real.with_name(each.name))
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


def _replaceable(target: Path) -> bool:
    """Whether nothing or a file stands there; what may not be written is refused."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return True
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return stat.S_ISREG(mode)


def _folder(real: Path | None) -> TemporaryDirectory[str]:
    """Where to write first: beside *real*, or elsewhere if that cannot be and a file is there to be filled."""
    if real:
        try:
            return TemporaryDirectory(prefix=".", dir=real.parent, ignore_cleanup_errors=True)
        except OSError as problem:
            if problem.errno not in _ONLY_IN_PLACE or not real.exists():
                raise
    return TemporaryDirectory(ignore_cleanup_errors=True)


def _pour(written: Path, place: Path | int) -> None:
    """Write what *written* holds to *place*; an open file goes on after what this process has printed."""
    sys.stdout.flush()
    with written.open("rb") as source, open(place if isinstance(place, Path) else os.dup(place), "wb") as file:
        shutil.copyfileobj(source, file)


def _move(written: Path, real: Path) -> None:
    try:
        if real.exists():
            shutil.copymode(real, written)
        written.replace(real)
    except OSError as problem:
        if problem.errno not in _ONLY_IN_PLACE:
            raise
        _pour(written, real)


@contextmanager
def replacing_folder(path: str | os.PathLike[str], error: type[InputError] = InputError) -> Iterator[Path]:
    """An empty folder to fill; it takes the place of *path* when the block ends well, and what stood there is gone.

    Where *path* is a link, that is the place of what it links to. Where the system can let two folders change places,
    there is no moment without one. What cannot be written raises *error*.
    """
    real = Path(os.path.realpath(path))
    try:
        with TemporaryDirectory(prefix=".", dir=real.parent, ignore_cleanup_errors=True) as scratch:
            filled = Path(scratch, real.name)
            filled.mkdir()
            yield filled
            _put_in_place(filled, real)
    except OSError as problem:
        raise error(f"{path}: cannot write: {problem.strerror or problem}") from problem


def _put_in_place(filled: Path, real: Path) -> None:
    if not real.exists():
        filled.rename(real)
        return
    shutil.copymode(real, filled)
    if not _exchanged(filled, real):
        before = filled.with_name(f"{filled.name}.before")
        real.rename(before)
        try:
            filled.rename(real)
        except OSError:
            before.rename(real)
            raise


def _exchanged(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; False where the system does not do that."""
    import ctypes

    if not sys.platform.startswith("linux"):
        return False
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = ctypes.c_int(-100), ctypes.c_uint(2)  # AT_FDCWD, RENAME_EXCHANGE
    return call is not None and bool(call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)


def make_folder(path: Path) -> None:
    """Make a folder and those that it lies in, where they are not there yet."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"{path}: cannot make the folder: {reason_of(problem)}") from problem


def check_file(path: Path) -> None:
    """Raise the OSError with which ``replacing`` would fail now; nothing is left behind.

    Whether a file can be made beside the place is found out by making one: permissions alone do not tell of file
    systems that take no files, such as /proc.
    """
    if _descriptor(path) is None and _replaceable(path):
        with _folder(Path(os.path.realpath(path))):
            return


def check_folder(path: Path, *, replaced: bool) -> None:
    """Raise the OSError with which writing a folder would fail now; nothing is left behind.

    replaced: whether ``replacing_folder`` will write it; else ``make_folder``, and files one by one.
    """
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    there = real.parent if replaced else next(folder for folder in (real, *real.parents) if folder.exists())
    with TemporaryDirectory(prefix=".", dir=there, ignore_cleanup_errors=True):
        return


def write_text(path: str | os.PathLike[str], text: str, error: type[InputError] = InputError) -> None:
    """Write a text file."""
    with replacing(path, error) as beside:
        beside.write_text(text, encoding="utf-8")
