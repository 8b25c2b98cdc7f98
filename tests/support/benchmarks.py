"""Reports of ``weft bench`` as files hold them."""

from __future__ import annotations


def benchmark_report(**changes):
    """Two models on one lane: a long one of four segments, and a short urgent one that comes while it runs."""
    models = {
        "long": {"segments": ["a", "b", "c", "d"], "times_s": {"1": [0.010] * 4}, "max_batch": 1},
        "short": {"segments": ["a"], "times_s": {"1": [0.002], "2": [0.003]}, "max_batch": 2},
    }
    streams = [
        {"model": "long", "deadline_s": 1.0, "scheduled_s": [0.0, 0.1], "lag_s": [0.0, 0.0],
         "latency_s": [0.043, 0.041], "status": [200, 200]},
        {"model": "short", "deadline_s": 0.02, "scheduled_s": [0.001], "lag_s": [0.0],
         "latency_s": [0.012], "status": [200]},
    ]  # fmt: skip
    profile = {"policy": "punctual", "lanes": 1, "models": models}
    whole = {"format": 1, "deadlines": "soft", "transport_s": 0.001, "workload": {}, "streams": streams}
    return whole | {"profile": profile} | changes
