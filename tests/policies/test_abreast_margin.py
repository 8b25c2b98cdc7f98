"""``abreast`` as it is, in overload and near it, is not far behind any other way to share a GPU.

``benchmarks/abreast_margin.py`` has random mixes, more rules and more time.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest

from weft.devices import Host, load_device
from weft.simulation.requests import Case, prepare, simulate_requests
from weft.workloads.requests import Workload

TIMES, POINT = 1.2, 0.01
SECONDS = 1.2
Mix = Mapping[str, tuple[float, int]]
"""Model -> its load, of what one at a time can do, and when its requests are due, in times of what they take."""

OVERLOADED: Mix = {"resnet50-b8": (0.54, 5), "bertlarge-b1": (0.54, 5)}
NEARLY_FULL: Mix = {"encoder-b16": (0.3, 8), "resnet50-b32": (0.3, 8), "bertbase-b32": (0.3, 8)}
LONG_AMONG_SHORT: Mix = {
    "resnet50-b32": (0.29, 12), "encoder-b16": (0.23, 5), "resnet50-b8": (0.32, 8), "mobilenet-b32": (0.14, 5),
    "encoder-b64": (0.22, 20),
}  # fmt: skip


@cache
def h200() -> Host:
    device = load_device("h200")
    assert isinstance(device, Host)
    return device


def case_of(mix: Mix) -> Case:
    streams = []
    for model, (load, due) in mix.items():
        alone_s = h200().models[model].total_s(1)
        streams.append({"model": model, "rate": load / alone_s, "deadline_ms": due * alone_s * 1e3, "max_batch": 1})
    return prepare(Workload.model_validate({"duration_s": SECONDS, "stream": streams}), h200())


@pytest.mark.long  # that abreast is about as good as the best of the others is in test_on_shares.py, too
@pytest.mark.parametrize(
    ("mix", "seed", "rivals"),
    [
        (OVERLOADED, 1, (("edf", "weave"), ("orion", "demote"))),
        (NEARLY_FULL, 2, (("top-up", "weave"),)),
        (LONG_AMONG_SHORT, 1, (("top-up", "weave"),)),
    ],
    ids=["overload", "nearly full", "a long model among short ones"],
)
def test_abreast_misses_little_more_than_the_best_rule(
    mix: Mix, seed: int, rivals: tuple[tuple[str, str], ...]
) -> None:
    case = case_of(mix)
    ours = simulate_requests(case, "abreast", seed=seed).report.violation_rate
    best = min(simulate_requests(case, policy, late=late, seed=seed).report.violation_rate for policy, late in rivals)
    assert ours <= TIMES * best + POINT
