"""How long a decision takes: processor time of ``abreast`` with five models that come and go, on this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import mean, median

from weft.engine.policies import Start, View
from weft.engine.policies.abreast import Abreast
from weft.simulation.requests.plain import serve
from weft_papers.base import Exhibit, Row
from weft_papers.gpu.lab import FIVE, at_random, case_of, endless

FIGURE = "decisions"
WANTED_US = 30.0  # goal for one decision: about an eighth of a segment of 0.25 ms, so that decisions hide behind it
SECONDS = 0.1  # simulated time: thousands of decisions, enough for a median


@dataclass(frozen=True)
class _Timed(Abreast):
    took_ns: list[int] = field(default_factory=list)

    def decide(self, view: View) -> Start | None:
        began = time.thread_time_ns()
        start = super().decide(view)
        self.took_ns.append(time.thread_time_ns() - began)
        return start


def decisions() -> Exhibit:
    loads = {
        "four models without end": [endless(model) for model in list(FIVE)[:4]],
        "five models at a load of .8": [at_random(model, 0.8 / len(FIVE), times) for model, times in FIVE.items()],
    }
    return Exhibit(tuple([_row(name, streams) for name, streams in loads.items()]))


def _row(name: str, streams: list[dict[str, object]]) -> Row:
    case = case_of(streams, SECONDS)
    timed = _Timed(case.setting_of(Abreast))
    serve(case, timed, "weave", 1)
    took_us = sorted(took_ns / 1e3 for took_ns in timed.took_ns)
    why = f"median of {len(took_us)}, on this machine, in Python; mean {mean(took_us):.0f}, one in 100 takes more than "
    return Row(FIGURE, name, WANTED_US, median(took_us), " us", f"{why}{took_us[len(took_us) * 99 // 100]:.0f}")
