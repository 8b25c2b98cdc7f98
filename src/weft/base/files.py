"""Atomic writes of files and folders, and checks of paths.

A file is written next to its target first, in a temporary folder, and then renamed, so that readers never see half of
it. Pipes, devices and open files of this process are written in place.
"""

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
"""Most links that are followed from a path, as in Linux; a longer chain is a loop."""
_ONLY_IN_PLACE = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EXDEV, errno.EROFS)
"""Errors of a rename after which writing in place may still work: a foreign folder, or a file that is a mount."""

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def kind_of(mode: int) -> str:
    """Return the kind of a file in words, by its mode (``st_mode``)."""
    return _KINDS.get(stat.S_IFMT(mode), "a file")


def kind_at(path: str | os.PathLike[str]) -> str:
    """Return the kind of the file at a path; empty if there is none, or if it cannot be examined."""
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
    """Yield a temporary path with the name of *path*; it replaces *path* if the block ends without an exception.

    Links are followed: the file that *path* links to is replaced. Other files that the block writes next to the
    temporary path are moved along. A path that cannot be written raises *error*. Pipes, devices and the open files of
    this process (/dev/stdout, /dev/fd/3) are written in place, from their current position on.
    """
    target = Path(path)
    try:
        descriptor, resolved = _descriptor(target), Path(os.path.realpath(target))
        in_place = descriptor is not None or not _replaceable(target)
        with _temporary_folder(None if in_place else resolved) as folder:
            draft = Path(folder, target.name)
            yield draft
            others = [path for path in draft.parent.iterdir() if path != draft]
            if in_place and others:
                raise OSError("more than one file is needed; name a file")
            # the named file last: a reader that sees it finds the files it refers to
            for other in others:
                _move(other, resolved.with_name(other.name))
            if in_place:
                _copy_into(draft, target if descriptor is None else descriptor)
            else:
                _move(draft, resolved)
    except OSError as problem:
        raise error(f"{target}: cannot write: {problem.strerror or problem}") from problem


def _descriptor(path: Path) -> int | None:
    """Return the file descriptor that a name like /dev/stdout stands for; None for any other path.

    Opening the name instead would truncate that file: the output of other processes in it would be lost.
    """
    open_files = {os.path.realpath(folder) for folder in ("/dev/fd", "/proc/self/fd")}
    for _ in range(_MOST_LINKS):
        folder = os.path.realpath(path.parent)
        if folder in open_files and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            break
        path = Path(folder, os.readlink(path))
    return None


def _replaceable(target: Path) -> bool:
    """Return whether *target* is absent or a regular file; PermissionError if it may not be written."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return True
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return stat.S_ISREG(mode)


def _temporary_folder(resolved: Path | None) -> TemporaryDirectory[str]:
    """Make a temporary folder next to *resolved*; in the system's folder if that is forbidden and *resolved* exists.

    In the system's folder also for None: the target is written in place.
    """
    if resolved:
        try:
            return TemporaryDirectory(prefix=".", dir=resolved.parent, ignore_cleanup_errors=True)
        except OSError as problem:
            if problem.errno not in _ONLY_IN_PLACE or not resolved.exists():
                raise
    return TemporaryDirectory(ignore_cleanup_errors=True)


def _copy_into(draft: Path, target: Path | int) -> None:
    """Write the content of *draft* to a path or a file descriptor, after everything this process has printed."""
    sys.stdout.flush()
    with draft.open("rb") as source, open(target if isinstance(target, Path) else os.dup(target), "wb") as file:
        shutil.copyfileobj(source, file)


def _move(draft: Path, resolved: Path) -> None:
    """Rename *draft* to *resolved*, with the mode of the file it replaces.

    Where a rename is impossible, the file is written in place.
    """
    try:
        if resolved.exists():
            shutil.copymode(resolved, draft)
        draft.replace(resolved)
    except OSError as problem:
        if problem.errno not in _ONLY_IN_PLACE:
            raise
        _copy_into(draft, resolved)


@contextmanager
def replacing_folder(path: str | os.PathLike[str], error: type[InputError] = InputError) -> Iterator[Path]:
    """Yield an empty folder to fill; it replaces the folder *path* if the block ends without an exception.

    Links are followed. Where the system can exchange two folders in one step, there is always one at *path*. A folder
    that cannot be written raises *error*.
    """
    resolved = Path(os.path.realpath(path))
    try:
        with TemporaryDirectory(prefix=".", dir=resolved.parent, ignore_cleanup_errors=True) as scratch:
            filled = Path(scratch, resolved.name)
            filled.mkdir()
            yield filled
            _put_in_place(filled, resolved)
    except OSError as problem:
        raise error(f"{path}: cannot write: {problem.strerror or problem}") from problem


def _put_in_place(filled: Path, resolved: Path) -> None:
    """Rename the folder *filled* to *resolved*; a folder *resolved* is exchanged with it."""
    if not resolved.exists():
        filled.rename(resolved)
        return
    shutil.copymode(resolved, filled)
    if not _exchange(filled, resolved):
        # two renames: readers may find no folder in between, and the old one returns if the second fails
        old_folder = filled.with_name(f"{filled.name}.before")
        resolved.rename(old_folder)
        try:
            filled.rename(resolved)
        except OSError:
            old_folder.rename(resolved)
            raise


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one atomic step; return False if the system cannot."""
    import ctypes

    if not sys.platform.startswith("linux"):
        return False
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    working_directory, exchange = ctypes.c_int(-100), ctypes.c_uint(2)  # AT_FDCWD, RENAME_EXCHANGE
    return call is not None and bool(
        call(working_directory, os.fsencode(first), working_directory, os.fsencode(second), exchange) == 0
    )


def make_folder(path: Path) -> None:
    """Make a folder and its parents if they are missing; InputError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"{path}: cannot make the folder: {reason_of(problem)}") from problem


def check_file(path: Path) -> None:
    """Raise the OSError with which ``replacing`` would fail now; no file is left behind.

    A temporary folder is really made: permissions alone do not tell that a file system takes no files, such as /proc.
    """
    if _descriptor(path) is None and _replaceable(path):
        with _temporary_folder(Path(os.path.realpath(path))):
            return


def check_folder(path: Path, *, replaced: bool) -> None:
    """Raise the OSError with which writing a folder would fail now; no file is left behind.

    replaced: whether ``replacing_folder`` will write it, for which its parent must exist. Otherwise ``make_folder``
    makes it, with missing parents, and files are written into it one by one.
    """
    resolved = Path(os.path.realpath(path))
    if resolved.exists() and not resolved.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    nearest = (
        resolved.parent if replaced else next(folder for folder in (resolved, *resolved.parents) if folder.exists())
    )
    with TemporaryDirectory(prefix=".", dir=nearest, ignore_cleanup_errors=True):
        return


def write_text(path: str | os.PathLike[str], text: str, error: type[InputError] = InputError) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with replacing(path, error) as draft:
        draft.write_text(text, encoding="utf-8")
