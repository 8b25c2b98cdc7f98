"""The pictures of the papers as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.base.errors import InputError
from weft_papers.pictures import canvas, save


def test_a_picture_is_written_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure, _ = canvas(2, 2)
    save(figure, tmp_path, "a", "title")
    before = {each: each.read_bytes() for each in tmp_path.iterdir()}
    assert sorted(each.name for each in before) == ["a.png", "a.svg"]

    def half(path: Path, **settings: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(figure, "savefig", half)
    with pytest.raises(KeyboardInterrupt):
        save(figure, tmp_path, "a", "title")
    assert {each: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file/papers: cannot write: Not a directory"):
        save(canvas(2, 2)[0], tmp_path / "file" / "papers", "a", "title")
