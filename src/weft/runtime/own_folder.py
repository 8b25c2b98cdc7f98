"""Temporary folders that are removed soon after their process has ended, even if it was killed.

A folder has the process number in its name, for people, and holds a lock, for programs: the system frees it when the
process ends. A process that creates a folder removes those of other processes whose lock is free.
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
"""Age below which a folder is not removed: it is created before it is locked, so that its lock may still be free."""
_locks: dict[Path, int] = {}
"""Folder -> open file of its lock, for the folders of this process."""


def make_folder(prefix: str = "weft-", parent: Path | None = None) -> Path:
    """Create an empty folder of this process, in *parent* or in the system's temporary folder."""
    parent_folder = Path(tempfile.gettempdir()) if parent is None else parent
    sweep(prefix, parent_folder)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent_folder))
    if fcntl is not None:
        lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        _locks[folder] = lock
    return folder


def release(folder: Path, *, now_at: Path | None = None) -> None:
    """Free and remove the lock of a folder and keep its content. *now_at*: the folder's path if it was renamed."""
    lock = _locks.pop(folder, None)
    if lock is not None:
        with contextlib.suppress(OSError):
            ((now_at or folder) / LOCK).unlink()
        os.close(lock)


def remove(folder: Path) -> None:
    """Remove a folder and its content, the lock last: if this process ends meanwhile, another's ``sweep`` continues."""
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != LOCK:
                entry.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    release(folder)


def sweep(prefix: str, place: Path) -> None:
    """Remove the folders in *place*, named with *prefix*, of processes that have ended.

    Folders of running processes, and folders without a lock, stay.
    """
    if fcntl is None:
        return
    for folder in place.glob(f"{prefix}*-*"):
        if folder not in _locks and _is_abandoned(folder / LOCK):
            remove(folder)


def _is_abandoned(lock_path: Path) -> bool:
    """Whether no process holds a lock any more; False if it is missing, or so new that it may not be locked yet."""
    try:
        if lock_path.is_symlink() or lock_path.stat().st_mtime > time.time() - _FRESH_S:
            return False
        lock = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # the folder has no lock, or belongs to another user
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
