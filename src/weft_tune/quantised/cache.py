"""Arrays that may be needed again, as many as fit: the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import NamedTuple

from weft.runtime.tensors import Array

Arrays = Mapping[str, Array]


class _CacheEntry(NamedTuple):
    arrays: Arrays
    size_bytes: int


class ArrayCache:
    """Key -> named arrays, up to *limit_bytes* in all.

    Whoever reads everything once, in turn, and has more than fits, would find nothing the second time if the oldest
    had to go. So what the current round has used or stored stays: the rest of that round is not stored instead.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._entries: OrderedDict[Hashable, _CacheEntry] = OrderedDict()
        self._fresh: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def begin_round(self) -> None:
        """From now on, all that is there may go."""
        self._fresh.clear()

    def get(self, key: Hashable) -> Arrays | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        self._fresh.add(key)
        return entry.arrays

    def put(self, key: Hashable, arrays: Arrays) -> None:
        """Keep *arrays* if there is room for them."""
        size_bytes = sum(each.nbytes for each in arrays.values())
        if key in self._entries or not self._make_room(size_bytes):
            return
        self._entries[key] = _CacheEntry(arrays, size_bytes)
        self._fresh.add(key)
        self.size_bytes += size_bytes

    def _make_room(self, size_bytes: int) -> bool:
        while self.size_bytes + size_bytes > self.limit_bytes:
            oldest = next(iter(self._entries), None)
            if oldest is None or oldest in self._fresh:
                return False
            self.size_bytes -= self._entries.pop(oldest).size_bytes
        return True

    def drop(self, prefix: Hashable) -> None:
        """Forget all keys that are tuples beginning with *prefix*."""
        for key in [key for key in self._entries if isinstance(key, tuple) and key[0] == prefix]:
            self.size_bytes -= self._entries.pop(key).size_bytes
            self._fresh.discard(key)
