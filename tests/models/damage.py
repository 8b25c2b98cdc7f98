"""What becomes of the bytes of a file."""

from __future__ import annotations

from hypothesis import strategies as st


def changed(valid: bytes) -> st.SearchStrategy[bytes]:
    """A file of which a few bytes have other values."""

    def edited(edits: list[tuple[int, int]]) -> bytes:
        content = bytearray(valid)
        for place, value in edits:
            content[place] = value
        return bytes(content)

    return st.lists(st.tuples(st.integers(0, len(valid) - 1), st.integers(0, 255)), min_size=1, max_size=6).map(edited)


def spliced(valid: bytes) -> st.SearchStrategy[bytes]:
    """A file of which a part has gone, and some other bytes stand in its place."""

    def cut(start: int, length: int, more: bytes) -> bytes:
        return valid[:start] + more + valid[start + length :]

    return st.builds(cut, st.integers(0, len(valid)), st.integers(1, 64), st.binary(max_size=16))
