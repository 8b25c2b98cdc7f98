"""What JSON is made of: counted exactly, bounded before it is parsed, and no key given twice."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import ROOT
from tests.serving.wire_examples import JSON, MODEL
from weft.base.errors import BadRequest, RequestError, TooLarge
from weft.serving import json_text
from weft.serving.json_text import LIMITS, Structure, check_keys, check_parts, exact_structure
from weft.serving.wire import decode

sys.path.append(str(ROOT / "benchmarks"))
hostile_json = pytest.importorskip("hostile_json")

TEXTS = st.text(st.sampled_from('ab\\"{}[]:,\u00e9\u2028'), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> Structure:
    """The parts of a value, one by one."""
    if isinstance(value, str):
        return Structure(0, 0, 0, 1, 0)
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    own = Structure(
        isinstance(value, dict),
        isinstance(value, list),
        len(value) if isinstance(value, dict) else 0,
        0,
        max(0, len(value) - 1) if isinstance(value, dict | list) else 0,
    )
    return Structure(*map(sum, zip(own, *map(counted, inner), strict=True)))


@given(VALUES, st.booleans())
def test_parts_are_counted_whatever_stands_in_strings(value: Any, ascii_only: bool) -> None:
    assert exact_structure(json.dumps(value, ensure_ascii=ascii_only).encode()) == counted(value)


@given(VALUES)
def test_what_has_no_key_twice_is_taken_however_few_keys_were_seen(value: Any) -> None:
    text = json.dumps(value).encode()
    check_keys(text, counted(value).keys)
    check_keys(text, -1)


def body(**changes: str) -> str:
    text = json.dumps({"id": "a:b", **JSON})
    for old, new in changes.items():
        text = text.replace(f'"{old}":', f'{new}, "{old}":', 1)
    return text


@pytest.mark.parametrize(
    ("key", "again"),
    [
        ("inputs", '"inputs": []'),
        ("inputs", '"inp\\u0075ts": []'),
        ("inputs", '"inputs" : ":"'),
        ("id", '"id": "x"'),
        ("name", '"name": "x"'),
        ("data", '"\\u0064ata": [1]'),
        ("inputs", '"other": {"inputs": 1, "inputs": 2}'),
        ("inputs", '"other": [{"deep": [{"inputs": 1, "inputs": 12345678901234567890123}]}]'),
    ],
)
def test_a_key_given_twice_is_named(key: str, again: str) -> None:
    decode(body().encode(), None, MODEL)
    with pytest.raises(BadRequest, match=f"key '{key}' is given twice"):
        decode(body(**{key: again}).encode(), None, MODEL)


def test_keys_of_different_objects_may_be_the_same() -> None:
    decode(body(inputs='"other": [{"inputs": {"inputs": "inputs: {"}}, {"id": 1}]').encode(), None, MODEL)


@pytest.mark.parametrize("kind", Structure._fields)
def test_too_many_parts_are_refused_before_they_are_parsed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = {"objects": b"{}", "lists": b"[]", "keys": b'{"a":1}', "strings": b'""', "commas": b"1,1"}[kind]
    limits = Structure(*[10**6] * 5)._replace(**{kind: 31 if kind == "commas" else 16 + (kind == "lists")})
    monkeypatch.setattr(json_text, "LIMITS", limits)
    monkeypatch.setattr(json_text, "UNCOUNTED_BYTES", 0)
    check_parts(b"[" + b",".join([piece] * 16) + b"]")
    text = b"[" + b",".join([piece] * 17) + b"]"
    with pytest.raises(TooLarge, match=f"{getattr(limits, kind) + 1 + (kind == 'commas')} {kind}, more than the limit"):
        check_parts(text)
    check_parts(json.dumps(text.decode()).encode())


def test_small_requests_cannot_have_too_many_parts() -> None:
    assert min(LIMITS) >= json_text.UNCOUNTED_BYTES // 2


BODIES = [each for kind in hostile_json.KINDS.values() for each in kind]


@pytest.mark.parametrize("attack", BODIES, ids=[each.name for each in BODIES])
@pytest.mark.parametrize("size", [1 << 10, 1 << 20])
def test_the_bodies_of_the_attacks_are_refused(attack: Any, size: int) -> None:
    with pytest.raises(RequestError):
        decode(attack.filled(size), None, MODEL)
