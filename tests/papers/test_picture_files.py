"""The pictures of the papers as files."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from weft.base.errors import InputError
from weft.reports.exhibits import Curve, Panel
from weft_papers.pictures import picture

PANELS = [Panel([Curve([0, 1], [0, 1])])]


def test_a_picture_is_written_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture(tmp_path, "a", "title", PANELS, size=(2, 2))
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert sorted(file.name for file in before) == ["a.png", "a.svg"]

    def half(figure: Figure, path: Path, **settings: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(KeyboardInterrupt):
        picture(tmp_path, "a", "title", PANELS, size=(2, 2))
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file/papers: cannot write: Not a directory"):
        picture(tmp_path / "file" / "papers", "a", "title", PANELS, size=(2, 2))
