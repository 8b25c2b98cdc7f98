"""Commands of the command line run in the test's process, and the list of all of them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import typer

from weft.cli.app import app
from weft.cli.main import main


class CommandResult(NamedTuple):
    """The exit code of a command, its standard output and its standard error."""

    code: int
    out: str
    error: str


def exit_code(*arguments: str) -> int:
    """Run a command; its output stays where it is captured."""
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    return int(leaving.value.code or 0)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> CommandResult:
    """Run a command and take what it has written."""
    code = exit_code(*arguments)
    captured = capsys.readouterr()
    return CommandResult(code, captured.out, captured.err)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error line of a command that must be refused."""
    code, _, error = run(capsys, *arguments)
    assert code == 2, error
    assert error.startswith("weft: ")
    assert error.count("\n") == 1
    return error


COMMAND = typer.main.get_command(app)

LEAVES = {
    f"{name} {below}".strip(): leaf
    for name, command in COMMAND.commands.items()  # type: ignore[attr-defined]
    for below, leaf in (getattr(command, "commands", {}) | {"": command}).items()
}
"""Commands without subcommands, by their full names."""
