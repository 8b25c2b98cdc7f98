"""Latencies are counted in the same bins by the plain engine and by the compiled loops."""

from __future__ import annotations

from weft.kernels import request_state
from weft.simulation.requests import plain


def test_a_latency_falls_into_the_same_bin_compiled_or_not():
    edges = [(1 << power) + more for power in range(61) for more in (-1, 0, 1)]
    for latency in [*range(2000), *edges]:
        assert plain.bin_of(latency) == request_state.bin_of(latency)
