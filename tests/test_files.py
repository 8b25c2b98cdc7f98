"""Where results are written: what stands there already, what is not a file, and what cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft.errors import InputError
from weft.files import write_text

PRINTS = "from weft.files import write_text; print('printed'); write_text({path!r}, 'written '); print('too')"


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
    write = "from sys import argv; from weft.files import write_text; write_text(argv[1], 'written')"
    assert shell(f'{sys.executable} -c "{write}" >(cat); wait $!', tmp_path) == "written"


def test_a_named_pipe_stays_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    assert shell("cat pipe.json & WRITE > /dev/null; wait", tmp_path, "pipe.json") == "written "
    assert (tmp_path / "pipe.json").is_fifo()


def test_an_open_file_that_only_reads_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as file, pytest.raises(InputError, match="cannot write: Bad file descriptor"):
        other = os.open(file.name, os.O_RDONLY)
        try:
            write_text(f"/dev/fd/{other}", "written")
        finally:
            os.close(other)
