"""What a server holds together with its workers, read off a made-up table of processes."""

from __future__ import annotations

import os
from pathlib import Path

from weft.serving.held_memory import held_bytes


def process(table: Path, pid: int, parent: int, *, kib: int = 0, pages: int = 0) -> None:
    folder = table / str(pid)
    folder.mkdir()
    (folder / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1")
    (folder / "statm").write_text(f"900 {pages} 3")
    if kib:
        (folder / "smaps_rollup").write_text(f"Rss:  99999 kB\nPss:  {kib} kB\nPss_Anon:  1 kB\n")


def test_a_server_its_workers_and_theirs_count_and_nobody_else(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, kib=100)
    process(tmp_path, 11, 10, kib=30)
    process(tmp_path, 12, 11, pages=2)  # who may not look at its pages one by one sees all of them
    process(tmp_path, 13, 1, kib=5000)
    assert held_bytes(10, workers=True, processes=tmp_path) == (130 << 10) + 2 * os.sysconf("SC_PAGE_SIZE")


def test_a_system_that_does_not_tell_is_no_number(tmp_path: Path) -> None:
    assert held_bytes(10, workers=True, processes=tmp_path) is None is held_bytes(10, workers=False, processes=tmp_path)


def test_a_server_without_workers_is_its_own_pages(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, kib=100, pages=7)
    process(tmp_path, 11, 10, pages=5)
    assert held_bytes(10, workers=False, processes=tmp_path) == 7 * os.sysconf("SC_PAGE_SIZE")
