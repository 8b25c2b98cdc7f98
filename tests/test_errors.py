"""What users are told when the system refuses: words, never numbers of errors."""

from __future__ import annotations

import ast
import errno

import pytest

from tests.structure import MODULES, name_of, parsed
from weft.base.errors import reason_of
from weft.http.client import unreachable

OF_THE_SYSTEM = {"OSError", "ConnectionError", "FileNotFoundError", "PermissionError", "TimeoutError"}


def shown_raw(handler: ast.ExceptHandler) -> list[int]:
    """Lines where what an error of the system says is put into a text as it is."""
    kinds = {each.id for each in ast.walk(handler.type or ast.Pass()) if isinstance(each, ast.Name)}
    if not kinds & OF_THE_SYSTEM:
        return []
    return [
        each.lineno
        for statement in handler.body
        for each in ast.walk(statement)
        if isinstance(each, ast.FormattedValue) and isinstance(each.value, ast.Name) and each.value.id == handler.name
    ]


def test_no_message_shows_an_error_of_the_system_raw():
    # to parse all modules takes seconds, and most of them name no such error
    modules = [path for path in MODULES if any(name in path.read_text("utf-8") for name in OF_THE_SYSTEM)]
    handlers = [
        (path, node) for path in modules for node in ast.walk(parsed(path)) if isinstance(node, ast.ExceptHandler)
    ]
    assert [f"{name_of(path)}:{line}" for path, handler in handlers for line in shown_raw(handler)] == []


def test_a_reason_has_neither_number_nor_path(tmp_path):
    with pytest.raises(OSError) as missing:
        (tmp_path / "none.toml").read_text()
    assert reason_of(missing.value) == "No such file or directory"
    assert reason_of(OSError("Multiple exceptions: [Errno 5] a, [Errno 7] b")) == "Multiple exceptions: a, b"
    assert reason_of(ValueError("embedded null byte")) == "embedded null byte"


def test_nobody_there_is_told_with_the_command_that_would_be():
    refused = OSError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 8000)")
    several = OSError(f"Multiple exceptions: {refused}, {refused}")
    for error in (refused, several):
        said = unreachable("http://127.0.0.1:8000", error, "weft serve")
        assert said == "nothing listens at 127.0.0.1:8000; start `weft serve` first"
    assert unreachable("http://h", OSError(errno.EHOSTUNREACH, "No route"), "x") == "http://h: cannot connect: No route"
