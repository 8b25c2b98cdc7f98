"""The cache of arrays."""

from __future__ import annotations

import numpy as np

from weft_tune.quantised.runner import ArrayCache

KILO = {"x": np.zeros(1000, np.int8)}


def test_the_least_recently_used_goes_first():
    cache = ArrayCache(3000)
    for key in "abc":
        cache.put(key, KILO)
    cache.begin_round()
    assert cache.get("a") is KILO
    cache.put("d", KILO)
    assert cache.get("b") is None and cache.get("a") is KILO and cache.get("c") is KILO and cache.get("d") is KILO
    assert cache.size_bytes == 3000


def test_more_than_fits_leaves_the_first_in_place():
    """A round over five keys with room for three finds three of them the next time, not none."""
    cache = ArrayCache(3000)
    hits = []
    for _ in range(2):
        cache.begin_round()
        hits.append([key for key in range(5) if cache.get(key) is not None or cache.put(key, KILO)])
    assert hits == [[], [0, 1, 2]]


def test_a_cache_of_nothing_keeps_nothing():
    cache = ArrayCache(0)
    cache.put("a", KILO)
    assert cache.get("a") is None and len(cache) == 0


def test_dropped_keys_give_their_room_back():
    cache = ArrayCache(2000)
    cache.put(("s", 1), KILO)
    cache.put(("t", 1), KILO)
    cache.drop("s")
    assert cache.get(("s", 1)) is None and cache.size_bytes == 1000 and cache.get(("t", 1)) is KILO
