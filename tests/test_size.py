"""What ``tests/size.py`` counts as a line of code."""

from __future__ import annotations

import pytest

from tests.size import code_lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('"""A module."""\n\n# why\nx = 1  # one\n"""What x is."""\n', 1),
        ('def f(\n    a,\n):\n    """It says."""\n    return """two\n    lines"""\n', 5),
        ('class Ä: "a docstring on the line of its class"\n', 1),
        ("x = (\n\n    1,  # a comment\n    # another\n)\n", 3),
    ],
)
def test_comments_blank_lines_and_docstrings_are_no_code(text: str, lines: int) -> None:
    assert code_lines(text) == lines
