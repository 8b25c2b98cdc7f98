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
"""The chapter's names of the models of both streams. Its XLNet has no size; the large one is taken."""
PAIRS: tuple[tuple[str, str], ...] = tuple(product(VISION, LANGUAGE))

Ratio = tuple[float, float]
"""Requests of the memory-intensive model to those of the compute-intensive one."""
RATIOS: tuple[Ratio, ...] = tuple((2.0 ** max(0, step), 2.0 ** max(0, -step)) for step in range(6, -7, -1))
"""The ratios from 64:1 to 1:64."""

LIMIT, SEEDS, TOLERANCE, WARMUP_S = 0.01, 2, 0.01, 0.5
"""Of a search: allowed share of violations, runs per load, relative precision, and seconds not counted."""


class Scheduler(NamedTuple):
    """A policy under the paper's name for it; *late*: what happens to late requests ("keep", "demote")."""

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
"""All schedulers. The first two ignore deadlines, so they keep late requests like others."""


@dataclass(frozen=True)
class StreamPair:
    """A vision and a language stream: models, ratio, deadlines and batching; the load and the scheduler vary."""

    pair: tuple[str, str]
    ratio: Ratio = (1.0, 1.0)
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
    """The scene at a load of *rate* requests per second, prepared for the device."""
    # The costs of the layers do not depend on ratio, duration and load, so all those scenes share one preparation.
    priced = _prepare_cached(replace(scene, ratio=(1.0, 1.0), duration_s=1.0))
    return replace(priced, workload=scene.workload(rate))


@lru_cache(maxsize=64)
def _prepare_cached(scene: StreamPair) -> Case:
    return prepare(scene.workload(1.0), device(DEVICE))


@lru_cache(maxsize=1024)
def capacity(scene: StreamPair) -> float:
    """The load in requests per second at which full batches keep the busier of PE array and DRAM channel always busy.

    No schedule sustains more for long, and good ones nearly as much, so a search from here takes few steps.
    """
    priced = case(StreamPair(scene.pair, seq_len=scene.seq_len, max_batch=scene.max_batch), 1.0)
    fractions = [part / sum(scene.ratio) for part in reversed(scene.ratio)]
    # A stream's programs are those of its batch sizes, from 1 on, and begin at index *term.programs*.
    full_batches = [priced.setting.programs[term.programs + term.max_batch - 1] for term in priced.terms]
    compute = sum(fraction * program.total_compute for fraction, program in zip(fractions, full_batches, strict=True))
    memory = sum(fraction * program.total_fetch for fraction, program in zip(fractions, full_batches, strict=True))
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
    searches = list(dict.fromkeys(product(scenes, schedulers)))
    loads = sustain_all(
        [question(scene, scheduler) for scene, scheduler in searches],
        device(DEVICE),
        processes=os.cpu_count() or 1,
        progress=tick,
    )
    return dict(zip(searches, loads, strict=True))


def simulate_seeds(scene: StreamPair, rate: float, scheduler: Scheduler) -> tuple[RequestRun, ...]:
    """Simulate a scene at a given load, once for each seed that a search uses."""
    return tuple(
        simulate_requests(
            case(scene, rate), scheduler.policy, late=scheduler.late, options=dict(scheduler.options), seed=seed
        )
        for seed in range(SEEDS)
    )
