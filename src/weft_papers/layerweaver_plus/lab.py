"""Common to the chapter's experiments: nine pairs, thirteen ratios, five schedulers, the search for a sustainable load.

A ratio is written as in the paper, memory-intensive to compute-intensive: 64:1 means sixty-four language
requests for every vision request.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from weft.engine.policies import Option
from weft.simulation.requests import Case, RequestRun, prepare, simulate_requests
from weft.simulation.sustain import Question, Sustained, sustain_all
from weft.workloads.requests import Stream, Workload
from weft_papers.base import Tick
from weft_papers.layerweaver.lab import device

DEVICE = "weaver-plus"
VISION = {"IC": "inception-v3", "MN": "mobilenet-v2", "RN": "resnet50"}
LANGUAGE = {"BB": "bert-base", "BL": "bert-large", "XL": "xlnet-large"}
"""The paper writes XLNet without a size; the large one carries that paper's results."""
PAIRS: tuple[tuple[str, str], ...] = tuple(product(VISION, LANGUAGE))

Ratio = tuple[float, float]
RATIOS: tuple[Ratio, ...] = tuple((2.0 ** max(0, step), 2.0 ** max(0, -step)) for step in range(6, -7, -1))
"""The ratios from 64:1 to 1:64."""

LIMIT, SEEDS, TOLERANCE, WARMUP_S = 0.01, 2, 0.01, 0.5


class Scheduler(NamedTuple):
    """A policy under the name the paper gives it; *late*: what becomes of late requests."""

    name: str
    policy: str
    late: str
    options: tuple[tuple[str, Option], ...] = ()


BASELINE = Scheduler("baseline", "fifo", "keep")
WOVEN = Scheduler("layerweaver", "layerweaver", "keep")
PLUS = Scheduler("layerweaver+", "layerweaver+", "demote")
PRECISE = Scheduler("layerweaver+ precise", "layerweaver+", "demote", (("precise", True),))
OURS = Scheduler("weft+", "weft+", "demote")
SCHEDULERS = (BASELINE, WOVEN, PLUS, PRECISE, OURS)
"""The schedulers. The first two ignore deadlines, so late requests are treated like others."""


@dataclass(frozen=True)
class StreamPair:
    """A vision and a language stream at one ratio, with deadlines and batching, without load and scheduler."""

    pair: tuple[str, str]
    ratio: Ratio = (1.0, 1.0)
    """Requests of the memory-intensive model to those of the compute-intensive one."""
    seq_len: int = 16
    duration_s: float = 4.0
    vision_ms: float = 15.0
    language_ms: float = 130.0
    max_batch: int = 16
    timeout_ms: float = 2.0

    @property
    def name(self) -> str:
        """The pair as the paper writes it: BB+RN (4:1)."""
        return f"{self.pair[1]}+{self.pair[0]} ({self.ratio[0]:g}:{self.ratio[1]:g})"

    def workload(self, rate: float) -> Workload:
        """Poisson arrivals, *rate* requests per second in all."""
        vision = self._stream(VISION[self.pair[0]], self.vision_ms)
        language = self._stream(LANGUAGE[self.pair[1]], self.language_ms)
        return Workload(
            device=DEVICE,
            stream=(vision, language),
            total_rate=rate,
            ratio=(self.ratio[1], self.ratio[0]),
            duration_s=self.duration_s,
            warmup_s=min(WARMUP_S, self.duration_s / 4),
        )

    def _stream(self, model: str, deadline_ms: float) -> Stream:
        return Stream(
            model=model,
            deadline_ms=deadline_ms,
            max_batch=self.max_batch,
            batch_timeout_ms=self.timeout_ms,
            seq_len=self.seq_len,
        )


def case(scene: StreamPair, rate: float) -> Case:
    """The scene at a load of *rate* requests per second, prepared for the device.

    What does not depend on the load is prepared once.
    """
    priced = _prepare_cached(replace(scene, ratio=(1.0, 1.0), duration_s=1.0))
    return replace(priced, workload=scene.workload(rate))


@lru_cache(maxsize=64)
def _prepare_cached(scene: StreamPair) -> Case:
    return prepare(scene.workload(1.0), device(DEVICE))


@lru_cache(maxsize=1024)
def capacity(scene: StreamPair) -> float:
    """Requests per second with which the busier of PE array and DRAM channel always works if all batches are full.

    No schedule sustains more, so a search that starts here needs only a step or two.
    """
    priced = case(StreamPair(scene.pair, seq_len=scene.seq_len, max_batch=scene.max_batch), 1.0)
    shares = [part / sum(scene.ratio) for part in reversed(scene.ratio)]
    full = [priced.setting.programs[term.programs + term.max_batch - 1] for term in priced.terms]
    compute = sum(share * program.total_compute for share, program in zip(shares, full, strict=True))
    memory = sum(share * program.total_fetch for share, program in zip(shares, full, strict=True))
    return scene.max_batch / (max(compute, memory) * priced.clock.tick_s)


def question(scene: StreamPair, scheduler: Scheduler) -> Question:
    """The search for the largest load at which no stream violates more than 1 % of its deadlines; not run yet."""
    return Question(
        scene.workload(capacity(scene)),
        scheduler.policy,
        scheduler.name,
        scheduler.late,
        scheduler.options,
        limit=LIMIT,
        seeds=SEEDS,
        tolerance=TOLERANCE,
    )


SustainedLoads = dict[tuple[StreamPair, Scheduler], Sustained]
"""(scene, scheduler) -> the largest load that is sustained."""


def search_loads(
    scenes: Sequence[StreamPair], schedulers: Sequence[Scheduler], tick: Tick | None = None
) -> SustainedLoads:
    """Search the largest load of every scene under every scheduler, on all cores; equal searches run once."""
    wanted = list(dict.fromkeys(product(scenes, schedulers)))
    loads = sustain_all(
        [question(scene, scheduler) for scene, scheduler in wanted],
        device(DEVICE),
        processes=os.cpu_count() or 1,
        progress=tick,
    )
    return dict(zip(wanted, loads, strict=True))


def served(scene: StreamPair, rate: float, scheduler: Scheduler) -> tuple[RequestRun, ...]:
    """Simulate a scene at a given load, once for each seed that a search uses."""
    return tuple(
        simulate_requests(
            case(scene, rate), scheduler.policy, late=scheduler.late, options=dict(scheduler.options), seed=seed
        )
        for seed in range(SEEDS)
    )
