"""How the experiments are run: networks, boards, hardware, schedulers, one run, and many runs on all cores.

A scheduler runs on the paper's NPU of Table I or on hardware of its own. As section IV says, every baseline has the
best design for a batch of 8 under its own way of batching (SERIAL for a batch of 1).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from weft.base.errors import DeviceError
from weft.devices import TiledNpu, load_device, load_platform
from weft.devices.costs.explore import Exploration, explore
from weft.devices.tiled import Batching
from weft.engine.policies import Option
from weft.models import Model
from weft.models.exits import exit_shares
from weft.models.sources import load_model
from weft.reports.exhibits import Dash
from weft.simulation.request_report import RequestReport
from weft.simulation.requests import Case, prepare, simulate_requests
from weft.simulation.sustain import Question
from weft.simulation.workers import QuietProcesses
from weft.workloads.requests import Stream, Workload
from weft_papers.base import Tick
from weft_papers.layerweaver.lab import mean

EXIT_RATES = {"resnet50": (0.051, 0.169, 0.09, 0.69), "inception-v3": (0.145, 0.186, 0.222, 0.447)}
"""Network -> share of samples that leave at each of its three early exits, and at its end."""
EXITS = 3  # early exits of each network, as in the paper's section VI; the last output is not counted
TITLES = {"resnet50": "ResNet-50", "inception-v3": "Inception-v3"}
MAX_BATCH = 8  # largest batch of the paper's searches and tables
DECISION_US = 25.0
"""Time of one scheduler decision; the paper does not print it."""


class Spot(NamedTuple):
    """A network on an FPGA board: a row of Tables I and II."""

    model: str
    board: str

    @property
    def name(self) -> str:
        return f"{TITLES[self.model]}, {self.board.upper()}"

    @property
    def key(self) -> str:
        """The key of its published numbers."""
        return f"{self.model}_{self.board}"

    @property
    def preset(self) -> str:
        return f"{self.board}-{self.model}"


SPOTS = tuple(Spot(model, board) for model in EXIT_RATES for board in ("zc706", "zcu104"))
"""The rows of Tables I and II, in their order."""


class HardwareSearch(NamedTuple):
    """A design search: how the NPU computes a batch, and the batch sizes that the design is optimised for."""

    batching: Batching
    stackable: bool
    only: int | None = None
    """The only batch size to optimise for; None: sizes 1 to 8, equally weighted."""


SEARCHES = {
    "fluid": HardwareSearch("fluid", stackable=True),
    "fluid, fixed PEs": HardwareSearch("fluid", stackable=False),
    "R": HardwareSearch("r", stackable=False, only=MAX_BATCH),
    "P": HardwareSearch("p", stackable=False, only=MAX_BATCH),
    "FC": HardwareSearch("fc", stackable=False, only=MAX_BATCH),
    "serial": HardwareSearch("none", stackable=False, only=1),
}
"""Name of a kind of hardware -> the search for its design."""


@lru_cache(maxsize=64)
def search_design(spot: Spot, hardware: str, bandwidth_gb_s: float | None = None) -> Exploration:
    """Search the design space of *hardware*, a key of SEARCHES, by default at the board's calibrated bandwidth."""
    search = SEARCHES[hardware]
    max_batch = search.only or MAX_BATCH
    return explore(
        [network(spot.model)],
        load_platform(spot.board),
        max_batch=max_batch,
        weights=[0.0] * (max_batch - 1) + [1.0] if search.only else None,
        batching=search.batching,
        stackable=search.stackable,
        bandwidth_gb_s=bandwidth_gb_s,
    )


@lru_cache(maxsize=64)
def npu(spot: Spot, hardware: str) -> TiledNpu:
    """The NPU of a kind of hardware: the paper's for "fluid", else the best design of its own search."""
    device = printed_npu(spot) if hardware == "fluid" else search_design(spot, hardware).device()
    return device.model_copy(update={"decision_us": DECISION_US})


def printed_npu(spot: Spot, preset: str | None = None) -> TiledNpu:
    """The NPU that Table I prints for *spot*, or *preset*. Raises DeviceError if that is no tiled NPU."""
    device = load_device(preset or spot.preset)
    if not isinstance(device, TiledNpu):
        raise DeviceError(f"{device.name}: the paper's NPUs are tiled, this one is not")
    return device


def tile(device: TiledNpu) -> str:
    """The tile sizes of a design as the paper writes them: <T_R, T_P, T_C>."""
    return f"<{device.t_r}, {device.t_p}, {device.t_c}>"


@lru_cache(maxsize=16)
def network(model: str, exits: int | None = None, head: str = "fc") -> Model:
    return load_model(model, exits=exits, exit_head=head)


def macs_per_sample(model: str, head: str = "fc") -> float:
    """Mean MACs per sample, given the shares of samples that leave at each exit."""
    whole = network(model, EXITS, head)
    return whole.macs * sum(rate * share for rate, share in zip(EXIT_RATES[model], exit_shares(whole), strict=True))


SEEDS = (1000, 1001, 1002)
"""Seeds of every run; our policy was tuned on others."""

Change = tuple[str, str | float]
"""Name of a field of the device, and its other value."""
Task = TypeVar("Task")
Result = TypeVar("Result")


class BatchScheduler(NamedTuple):
    """A policy under the name the paper gives it, and the hardware it runs on."""

    name: str
    policy: str
    hardware: str
    """A key of SEARCHES."""
    late: str = "keep"
    """What happens to late samples: "keep" (nothing) or "demote"."""
    options: tuple[tuple[str, Option], ...] = ()


TIMEOUTS = {"S": 5, "M": 45, "L": 95}
"""Timeouts of adaptive batching, in percent of the deadline."""

# The baselines: SERIAL, AdaptB with three timeouts on two kinds of hardware, and LazyBatching.
SERIAL = BatchScheduler("SERIAL", "serial", "serial")
FC_ADAPTIVE, R_ADAPTIVE = (
    tuple(
        BatchScheduler(f"{hardware}-AdaptB-{size}", "adaptive", hardware, options=(("timeout", timeout),))
        for size, timeout in TIMEOUTS.items()
    )
    for hardware in ("FC", "R")
)
LAZY = BatchScheduler("LazyBatching", "lazy-batching", "R")
LAZY_SAME = BatchScheduler("LazyBatching, fluid NPU", "lazy-batching", "fluid")
PLAIN = BatchScheduler("fluid NPU, no preemption", "adaptive", "fluid", options=(("timeout", 0),))
FLUID = BatchScheduler("Fluid Batching", "fluid", "fluid")
OURS = BatchScheduler("top-up", "top-up", "fluid", "demote")
BALANCED = BatchScheduler("top-up, balanced", "top-up", "fluid", "demote", (("miss", 150), ("foresight", 0)))
BASELINES = (SERIAL, *FC_ADAPTIVE, *R_ADAPTIVE, LAZY)
DRAWN = (*BASELINES, PLAIN, FLUID, OURS, BALANCED)
"""The schedulers of Fig. 7 to 9. Only ours (OURS, BALANCED) demote late samples."""

COLOURS = {
    SERIAL: "#1f2933",
    **dict.fromkeys(FC_ADAPTIVE, "#a9b1ba"),
    **dict.fromkeys(R_ADAPTIVE, "#56b4e9"),
    LAZY: "#e69f00",
    LAZY_SAME: "#f0c869",
    PLAIN: "#cc79a7",
    FLUID: "#d55e00",
    OURS: "#009e73",
    BALANCED: "#7fd1b6",
}
DASHES: dict[str, Dash] = {"S": "-", "M": (0, (5, 2)), "L": (0, (1.2, 1.6))}
"""Timeout of adaptive batching (a key of TIMEOUTS) -> dash of its curve."""


@dataclass(frozen=True)
class RunPoint:
    """The settings of one run, without the seed."""

    spot: Spot
    scheduler: BatchScheduler
    rate: float
    """Samples per second, Poisson."""
    deadline_ms: float
    samples: int
    """The number of samples of each seed."""
    head: str = "fc"
    changes: tuple[Change, ...] = ()
    """Other values for fields of the device."""
    preset: str | None = None
    """A device instead of the scheduler's own."""

    @property
    def device(self) -> TiledNpu:
        base = printed_npu(self.spot, self.preset) if self.preset else npu(self.spot, self.scheduler.hardware)
        return base.model_copy(update={"decision_us": DECISION_US, **dict(self.changes)})

    def workload(self) -> Workload:
        """Poisson arrivals of one network with early exits, long enough for *samples* samples."""
        stream = Stream(
            model=self.spot.model,
            rate=self.rate,
            deadline_ms=self.deadline_ms,
            max_batch=MAX_BATCH,
            exits=EXITS,
            exit_head="conv" if self.head == "conv" else "fc",
            exit_rates=EXIT_RATES[self.spot.model],
        )
        # Runs are long, and the paper says nothing of a warm-up.
        return Workload(stream=(stream,), duration_s=self.samples / self.rate, warmup_s=0.0, seed=SEEDS[0])


class RunMeans(NamedTuple):
    """Results of a run: means over the seeds."""

    mean_ms: float
    late: float
    """Percent of the samples that miss their deadline."""
    p99_ms: float
    rate: float
    """Answers per second until the last one."""
    busy: float
    """Percent of the time the NPU computes."""
    efficiency: float
    """Percent of the NPU's peak reached while it computes."""
    calls: float
    """Scheduler calls per sample."""
    apart: float
    """Percentage points between the seeds with the most and the fewest violations."""

    @property
    def used(self) -> float:
        """Percent of the NPU's peak that is reached over the whole run, idle time included."""
        return self.busy * self.efficiency / 100


Outcomes = dict[RunPoint, RunMeans]
"""Settings of a run -> its results."""


def simulate_point(point: RunPoint, device: TiledNpu) -> RunMeans:
    """Simulate a point with each seed on *device* and average the results."""
    # Preparing a case does not depend on rate, samples and scheduler: fixed values let points share a cache entry.
    case = replace(
        _prepare_cached(replace(point, rate=1.0, samples=1, scheduler=FLUID), device), workload=point.workload()
    )
    runs = [_run(case, point.scheduler, seed) for seed in SEEDS]
    streams = [run.streams[0] for run in runs]
    late_percents = [100 * stream.violation_rate for stream in streams]
    rate = mean(
        stream.completed / max(run.makespan_s, case.workload.duration_s)
        for run, stream in zip(runs, streams, strict=True)
    )
    busy = mean(run.pe_utilisation for run in runs)
    return RunMeans(
        mean_ms=1e3 * mean(stream.mean_latency_s or 0.0 for stream in streams),
        late=mean(late_percents),
        p99_ms=1e3 * mean(stream.p99_s or 0.0 for stream in streams),
        rate=rate,
        busy=100 * busy,
        efficiency=100 * rate * macs_per_sample(point.spot.model, point.head) / (busy * device.macs_per_s),
        calls=mean(run.decisions / stream.completed for run, stream in zip(runs, streams, strict=True)),
        apart=max(late_percents) - min(late_percents),
    )


def _run(case: Case, scheduler: BatchScheduler, seed: int) -> RequestReport:
    options = dict(scheduler.options)
    return simulate_requests(case, scheduler.policy, late=scheduler.late, options=options, seed=seed).report


@lru_cache(maxsize=64)
def _prepare_cached(point: RunPoint, device: TiledNpu) -> Case:
    return prepare(point.workload(), device)


def question(point: RunPoint) -> Question:
    """The search for the largest load at which at most 1 % of the point's samples are late; not run yet."""
    scheduler = point.scheduler
    return Question(
        point.workload(), scheduler.policy, scheduler.name, scheduler.late, scheduler.options, seeds=len(SEEDS)
    )


class Bench:
    """Runs points on all cores and remembers their outcomes; a context manager that owns the worker processes."""

    def __init__(self, processes: int | None = None) -> None:
        self.processes = processes or os.cpu_count() or 1
        self._workers = QuietProcesses(self.processes)
        self._outcomes: Outcomes = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers.close()

    def measure(self, points: Iterable[RunPoint], tick: Tick | None = None) -> Outcomes:
        """Run the points that were not run before; return the outcome of every point."""
        unique_points = list(dict.fromkeys(points))
        new_points = [point for point in unique_points if point not in self._outcomes]
        tasks = [(point, point.device) for point in new_points]
        self._outcomes.update(zip(new_points, self.run_all(_serve_task, tasks, tick), strict=True))
        return {point: self._outcomes[point] for point in unique_points}

    def run_all(
        self, function: Callable[[Task], Result], tasks: Sequence[Task], tick: Tick | None = None
    ) -> list[Result]:
        """Run a function for every task; return the results in order."""
        results = []
        for result in map(function, tasks) if self.processes == 1 else self._workers.results(function, tasks):
            results.append(result)
            if tick:
                tick(len(results), len(tasks))
        return results


def _serve_task(task: tuple[RunPoint, TiledNpu]) -> RunMeans:
    """``simulate_point`` with one argument, for a process pool."""
    return simulate_point(*task)
