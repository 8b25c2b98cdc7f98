"""Temporary folders that do not outlive their process for long, however it ends.

A folder carries the number of its process in its name, for people, and a lock in it, for programs: the system frees it
when the process is gone, killed or not. Whoever makes a folder removes those beside it whose lock is free.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # no locks on this system; folders of killed processes stay
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
_FRESH_S = 60.0
"""A folder is made before it is locked, so that younger ones are left alone."""
_held: dict[Path, int] = {}
"""The locks of this process, open as long as their folders are there."""


def make_folder(prefix: str = "weft-", parent: Path | None = None) -> Path:
    """An empty folder of this process, in *parent* or among the temporary ones."""
    place = Path(tempfile.gettempdir()) if parent is None else parent
    sweep(prefix, place)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=place))
    if fcntl is not None:
        lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        _held[folder] = lock
    return folder


def release(folder: Path, *, now_at: Path | None = None) -> None:
    """It is no temporary folder any more, or has become another one: the lock goes, the rest stays."""
    lock = _held.pop(folder, None)
    if lock is not None:
        with contextlib.suppress(OSError):
            ((now_at or folder) / LOCK).unlink()
        os.close(lock)


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it, the lock last: the next process goes on where this one may end."""
    with contextlib.suppress(OSError):
        for each in folder.iterdir():
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each, ignore_errors=True)
            elif each.name != LOCK:
                each.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    release(folder)


def sweep(prefix: str, place: Path) -> None:
    """Remove the folders of processes that are gone; those of others, and what has no lock, stay."""
    if fcntl is None:
        return
    for folder in place.glob(f"{prefix}*-*"):
        if folder not in _held and _abandoned(folder / LOCK):
            remove(folder)


def _abandoned(path: Path) -> bool:
    """Whether nobody holds a lock any more."""
    try:
        if path.is_symlink() or path.stat().st_mtime > time.time() - _FRESH_S:
            return False
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # it has no lock, or is not ours
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
