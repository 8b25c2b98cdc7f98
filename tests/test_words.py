"""The check of words and the draw of reasons see what they are for."""

from pathlib import Path

import pytest

from tests.reasons import places_in
from tests.words import in_prose, in_source

HERE = Path("here.py")


@pytest.mark.parametrize(
    "source",
    [
        "for each in requests: pass",
        "def told(): pass",
        "def notify(found): pass",
        "class Ear: pass",
        '"""Whoever waits."""',
        "x = 1  # nobody waits",
        'x = 1\n"""So many at most."""',
    ],
)
def test_a_banned_word_is_found_where_it_stands(source: str) -> None:
    assert [finding.line for finding in in_source(source, HERE)] == [2 if "\n" in source else 1]


def test_words_in_code_spans_in_strings_and_where_they_are_only_read_are_not_found() -> None:
    assert not list(in_source('error("nobody is there")\nprint(each)\n"""Set ``shall``."""\n', HERE))
    assert [finding.line for finding in in_prose("`who`\n\nYou shall.", HERE)] == [3]


def test_locks_retries_and_constants_need_a_reason_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "LIMIT = 3\n"
        "SIZE = 64 << 20  # what a client may send at once\n"
        "# measured on two machines\n"
        "FIRST_S = 0.1\n"
        "SECOND_S = -0.2\n"
        "\n"
        "COUNT = 4\n"
        '"""How often it is tried."""\n'
        "lock = Lock()\n"
        "for attempt in range(COUNT):\n"
        "    try:\n"
        "        work()\n"
        "        break\n"
        "    except OSError:\n"
        "        continue\n"
    )
    places = places_in(path, tmp_path)
    assert [(place.line, place.kind, place.explained) for place in places] == [
        (1, "constant", False),
        (2, "constant", True),
        (4, "constant", True),
        (5, "constant", True),
        (7, "constant", True),
        (9, "lock", False),
        (10, "retry", False),
    ]
