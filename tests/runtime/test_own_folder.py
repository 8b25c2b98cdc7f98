"""Temporary folders of processes that were killed are removed by the next one; those of others stay."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weft.runtime.own_folder import LOCK, make_folder, release, remove, sweep

pytest.importorskip("fcntl")

OTHER = """
import sys
from pathlib import Path
from weft.runtime.own_folder import make_folder
print(make_folder(parent=Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def aged(folder: Path) -> Path:
    """As if it had been made an hour ago."""
    hour_ago = time.time() - 3600
    os.utime(folder / LOCK, (hour_ago, hour_ago))
    return folder


def test_a_folder_carries_its_process_and_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    folder = make_folder(parent=tmp_path)
    assert folder.name.startswith(f"weft-{os.getpid()}-")
    (folder / "inner").mkdir()
    remove(folder)
    assert list(tmp_path.iterdir()) == []


def test_who_ends_while_it_removes_a_folder_leaves_the_rest_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(parent=tmp_path)
    for name in "abcdefgh":
        (folder / name).write_text(name)
        (folder / f"inner-{name}").mkdir()
    locked: list[bool] = []
    unlink, rmtree = Path.unlink, shutil.rmtree
    monkeypatch.setattr(
        Path, "unlink", lambda path, **more: (locked.append((folder / LOCK).exists()), unlink(path, **more))
    )
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, **more: (locked.append((folder / LOCK).exists()), rmtree(path, **more))
    )
    remove(folder)
    assert len(locked) >= 17 and all(locked[:17]) and not folder.exists()


def test_the_folder_of_a_process_that_was_killed_is_removed_by_the_next(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout and other.stdin
    folder = aged(Path(other.stdout.readline().strip()))
    (folder / "large").write_bytes(bytes(1000))
    remove(make_folder(parent=tmp_path))
    assert (folder / "large").exists()
    other.kill()
    other.communicate()
    mine = make_folder(parent=tmp_path)
    assert list(tmp_path.iterdir()) == [mine]
    remove(mine)


def test_young_folders_those_of_this_process_and_those_without_a_lock_stay(tmp_path: Path) -> None:
    mine, young = aged(make_folder(parent=tmp_path)), tmp_path / "weft-1-young"
    for name in ("weft-1-young", "weft-1-unlocked", "weft-1-linked", "other-1-x"):
        (tmp_path / name).mkdir()
    (young / LOCK).touch()
    (tmp_path / "elsewhere").touch()
    (tmp_path / "weft-1-linked" / LOCK).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "other-1-x" / LOCK).touch()
    aged(tmp_path / "other-1-x")
    before = set(tmp_path.iterdir())
    sweep("weft-", tmp_path)
    assert set(tmp_path.iterdir()) == before
    aged(young)
    sweep("weft-", tmp_path)
    assert set(tmp_path.iterdir()) == before - {young}
    remove(mine)


def test_a_folder_that_found_its_place_is_not_temporary_any_more(tmp_path: Path) -> None:
    folder = make_folder(".building-", tmp_path)
    folder.rename(tmp_path / "entry")
    release(folder, now_at=tmp_path / "entry")
    assert list((tmp_path / "entry").iterdir()) == []


def test_who_comes_late_does_not_bring_back_a_folder_that_is_gone(tmp_path: Path) -> None:
    from weft.runtime.onnxruntime_cpu.cache import new_folder

    scratch = make_folder(parent=tmp_path)
    remove(scratch)
    with pytest.raises(FileNotFoundError):
        new_folder(scratch / "segments")
    assert list(tmp_path.iterdir()) == []
