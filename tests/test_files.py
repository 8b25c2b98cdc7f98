"""Where results are written: what stands there already, what is not a file, and what cannot be."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.base.errors import InputError, ModelError
from weft.base.files import replacing, write_text
from weft.models.onnx_import.importer import read_onnx
from weft.runtime.onnxruntime_cpu.sessions import open_model
from weft.serving.exit_rules import read_exit_record
from weft_stitch.reading.onnx_program import takes_whole_numbers

PRINTS = "from weft.base.files import write_text; print('printed'); write_text({path!r}, 'written '); print('too')"


def shell(script: str, folder: Path, path: str = "/dev/stdout") -> str:
    """What bash says to *script*, in which WRITE prints, writes to *path* and prints again."""
    write = f'{sys.executable} -c "{PRINTS.format(path=path)}"'
    command = ["bash", "-c", script.replace("WRITE", write)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60).stdout


# What is not a file


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
@pytest.mark.parametrize("kept", [">", ">>"])
def test_a_file_that_standard_output_goes_to_loses_nothing(tmp_path: Path, path: str, kept: str) -> None:
    (tmp_path / "link").symlink_to("/dev/stdout")
    shell(f"(echo before; WRITE; echo after) {kept} o.txt", tmp_path, path)
    assert (tmp_path / "o.txt").read_text() == "before\nprinted\nwritten too\nafter\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "o.txt"]


def test_a_result_goes_into_the_file_that_standard_output_goes_to(tmp_path: Path) -> None:
    weft = f"{sys.executable} -m weft.cli.main models show mnist-vit --json /dev/stdout"
    shell(f"(echo before; {weft}; echo after) > o.txt", tmp_path)
    lines = (tmp_path / "o.txt").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after") and "{" in lines and "\0" not in "".join(lines)


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    assert shell("WRITE | cat", tmp_path) == "printed\nwritten too\n"


def test_what_a_shell_reads_from_is_written_to(tmp_path: Path) -> None:
    write = "from sys import argv; from weft.base.files import write_text; write_text(argv[1], 'written')"
    assert shell(f'{sys.executable} -c "{write}" >(cat); wait $!', tmp_path) == "written"


def test_a_named_pipe_stays_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    assert shell("cat pipe.json & WRITE > /dev/null; wait", tmp_path, "pipe.json") == "written "
    assert (tmp_path / "pipe.json").is_fifo()


@pytest.mark.parametrize("read", [read_onnx, takes_whole_numbers, lambda path: open_model(path, 1)])
def test_a_model_that_is_a_pipe_is_named_and_not_opened(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "net.onnx")
    with pytest.raises(ModelError, match="is a named pipe"):
        read(tmp_path / "net.onnx")


def test_a_record_of_exits_that_is_a_pipe_is_named_and_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "exits.npz")
    with pytest.raises(ModelError, match=r"exits\.npz is a named pipe"):
        read_exit_record(tmp_path / "net.onnx", "exits.npz", 2)


def test_an_open_file_that_only_reads_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as file, pytest.raises(InputError, match="cannot write: Bad file descriptor"):
        other = os.open(file.name, os.O_RDONLY)
        try:
            write_text(f"/dev/fd/{other}", "written")
        finally:
            os.close(other)


# What cannot be written


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("file/x.json", "Not a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("loop/x.json", "Too many levels of symbolic links"),
        ("none/x.json", "No such file or directory"),
        ("x" * 256, "File name too long"),
        ("folder", "Is a directory"),
        ("/proc/x.json", "No such file or directory"),
    ],
)
def test_what_cannot_be_written_is_said(tmp_path: Path, place: str, why: str) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    path = tmp_path / place
    with pytest.raises(ModelError) as caught:
        write_text(path, "written", ModelError)
    assert str(caught.value) == f"{path}: cannot write: {why}"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder", "loop"]


def test_the_longest_name_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250 + ".json")
    write_text(path, "written")
    assert path.read_text() == "written"


def test_a_clean_up_that_fails_does_not_hide_the_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write: No space left"), replacing(tmp_path / "a.txt") as beside:
        beside.parent.rename(tmp_path / "moved")
        raise OSError(errno.ENOSPC, "No space left")


# What stands there already


def test_a_file_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    path.chmod(0o444)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everything
    with pytest.raises(InputError, match="cannot write: Permission denied"):
        write_text(path, "after")
    assert path.read_text() == "before"


@pytest.mark.parametrize("refused", ["mkdir", "replace"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EBUSY, errno.EXDEV])
def test_where_nothing_can_be_moved_the_file_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, number: int
) -> None:
    path, original = tmp_path / "a.txt", getattr(os, refused)
    path.write_text("before, and longer")
    path.chmod(0o640)

    def refuse(place: str, *others: object) -> None:
        if tmp_path in Path(place).parents:
            raise OSError(number, os.strerror(number))
        original(place, *others)

    monkeypatch.setattr(os, refused, refuse)
    write_text(path, "after")
    assert path.read_text() == "after" and path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_may_not_be_written_takes_no_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(place: str, *others: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(InputError, match=r"new\.txt: cannot write: Permission denied"):
        write_text(tmp_path / "new.txt", "written")
