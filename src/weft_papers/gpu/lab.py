"""Models that share the simulated H200: the loads, the rules that are compared, and the results of a run.

A rule is a policy with options. Results come from three sources: simulated now, recorded from longer simulations
(``simulated.json``, written by ``benchmarks/gpu_weaving.py``), and recorded from measurements on a real GPU
(``measured.json``, written by ``benchmarks/gpu_abreast.py``). Both files have rows of the same names; the second exists
only if a measurement was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from weft.base.errors import InputError
from weft.base.jsonfile import read_json
from weft.devices import Host, load_device
from weft.engine.policies import Option, policy_called
from weft.engine.policies.base import LateWork
from weft.simulation.request_report import RequestReport
from weft.simulation.requests import Case, prepare, simulate_requests
from weft.workloads.requests import Workload
from weft_papers.base import Tick

Rules = Mapping[str, dict[str, Option]]
"""Name of a rule, which begins with its policy -> options of the policy."""
RuleResults = dict[str, dict[str, Any]]
"""Rule -> its results, by name."""

TOGETHER = (
    ("resnet50-b32", "llm1b-b1"), ("encoder-b16", "llm7b-b1"), ("encoder-b64", "llm7b-b1"),
    ("bertbase-b32", "llm1b-b8"), ("resnet50-b32", "bertlarge-b1"), ("resnet50-b32", "resnet50-b1"),
    ("resnet50-b8", "bertlarge-b1"), ("resnet50-b1", "bertlarge-b1"), ("mobilenet-b1", "resnet50-b1"),
    ("encoder-b16", "resnet50-b32"), ("resnet50-b32", "mobilenet-b32"), ("llm1b-b1", "llm1b-b8"),
    ("resnet50-b32", "llm1b-b1", "bertlarge-b1"), ("encoder-b16", "llm7b-b1", "resnet50-b1"),
    ("resnet50-b1", "bertlarge-b1", "mobilenet-b1"), ("resnet50-b32", "encoder-b16", "llm1b-b1"),
)  # fmt: skip
"""Sets of models that run together with endless work."""
FIRST = 6
"""The first entries of ``TOGETHER``: the pairs in which one model fills the GPU."""
# The rules that are compared: for endless work (SATURATED), for an urgent model (URGENT), for deadlines (ONE_FOR_ALL).
SPLITS: Rules = {
    f"split {cut}{' swapped' * swap}": {"cut": cut, "swap": swap} for cut in (0, 1) for swap in (False, True)
}
SATURATED: Rules = {"streams": {}, **SPLITS, "slices": {}, "abreast": {}}
ORION_RULES: Rules = {f"orion {budget} us": {"budget_us": budget} for budget in (100, 400, 1600)}
URGENT: Rules = {
    "priority": {}, "priority-streams": {}, "split 0 swapped": SPLITS["split 0 swapped"], **ORION_RULES, "reef": {},
    "abreast": {},
}  # fmt: skip
BESIDE = (("bertlarge-b1", "encoder-b16"), ("llm1b-b1", "resnet50-b32"), ("resnet50-b1", "encoder-b64"))
"""Pairs of an urgent model and one with endless work."""
URGENT_LOADS = (0.1, 0.2, 0.4)
"""Loads of the urgent model, in shares of the GPU's time."""
FIVE = {"resnet50-b8": 5, "bertlarge-b1": 2, "llm1b-b1": 5, "resnet50-b1": 2, "encoder-b16": 10}
"""Model -> deadline of its requests, in multiples of their duration alone."""
LOADS = (0.5, 0.65, 0.8, 0.95)
"""Total loads of the five models, in shares of the GPU's time with one model at a time."""
ONE_FOR_ALL: Rules = {"fifo": {}, "edf": {}, "punctual": {}, "streams": {}, "slices": {}, "abreast": {}}
WITHOUT, BARE = ("edf", "punctual"), "none ahead"
"""Policies that also run on ``none_ahead()``, and the suffix of the names of those rules."""
FIRST_OF_ORION = {"resnet50-b8": 0.135, "mobilenet-b32": 0.047}
"""Orion's urgent models (ResNet50 and MobileNetV2, batch 4) in sizes that fill as much of an H200, and their loads:
20.8 requests a second of what one takes on a V100, by the profiles that come with Orion."""
BESIDE_OF_ORION = {"resnet50-b32": 0.52, "mobilenet-b32": 0.23, "bertbase-b32": 0.39, "encoder-b16": 0.33}
"""Orion's best-effort models and their loads: ResNet50, MobileNetV2, BERT, and an encoder in place of Transformer-XL;
ResNet101 is left out."""
SEEDS = (1, 2, 3)  # of the arrivals
WARM_S = 0.05  # simulated warm-up, not counted: queues fill within a few durations of the longest model
FAR_MS = 1e5
"""A deadline that is never missed."""
OURS, ALONE = "abreast", "alone"  # alone: the urgent model with nothing beside it
LATE = ("weave", "demote")
"""Treatments of late requests: scheduled like all others, or served after all others."""


@cache
def h200() -> Host:
    """The simulated H200: the preset, with the costs of its models."""
    device = load_device("h200")
    assert isinstance(device, Host)
    return device


@cache
def none_ahead() -> Host:
    """The H200 without a segment queued ahead of the running one; the gap between two segments costs no time."""
    return h200().model_copy(update={"ahead": 0})


def case_of(streams: Sequence[Mapping[str, Any]], seconds: float, device: Host | None = None) -> Case:
    """Prepare a simulation of *streams* for *seconds* after the warm-up; *device*: the H200 if None."""
    raw = {
        "duration_s": seconds + WARM_S,
        "warmup_s": WARM_S,
        "stream": [{"max_batch": 1, **stream} for stream in streams],
    }
    return prepare(Workload.model_validate(raw), device or h200())


def run(
    streams: Sequence[Mapping[str, Any]],
    rule: str,
    options: Mapping[str, Option],
    seconds: float,
    seed: int = 1,
    late: str = "weave",
    device: Host | None = None,
) -> RequestReport:
    """Simulate streams under a rule; the first word of its name is the policy."""
    return simulate_requests(
        case_of(streams, seconds, device), rule.split()[0], late=late, options=options, seed=seed
    ).report


def alone_s(model: str) -> float:
    """Seconds that a query of a model takes alone on the GPU."""
    return h200().models[model].total_s(1)


def endless(model: str) -> dict[str, Any]:
    """A stream that always has requests: two clients, each sending the next on an answer; no deadline."""
    return {"model": model, "arrival": "closed", "clients": 2, "deadline_ms": FAR_MS}


def at_random(model: str, load: float, times: float, priority: int = 1) -> dict[str, Any]:
    """A stream of Poisson requests that take *load* of the GPU's time; deadline: *times* the duration alone.

    priority: the weight of its requests, as in a workload file.
    """
    duration_s = alone_s(model)
    return {"model": model, "rate": load / duration_s, "deadline_ms": times * duration_s * 1e3, "priority": priority}


def rates(report: RequestReport, seconds: float) -> list[float]:
    """The speed of each stream: its completed work in seconds alone on the GPU, over *seconds*."""
    return [round(stream.completed * alone_s(stream.model) / seconds, 3) for stream in report.streams]


def saturated(models: Sequence[str], seconds: float) -> RuleResults:
    """Simulate models with endless work under every rule.

    Results of a rule: "each", the speeds of the models relative to running alone; "sum", their sum; "least of fair",
    the smallest of them over a fair share, which is 1 / number of models.
    """
    results = {}
    for rule, options in SATURATED.items():
        speeds = rates(run([endless(model) for model in models], rule, options, seconds), seconds)
        least_of_fair = round(min(speeds) * len(speeds), 3)
        results[rule] = {"sum": round(sum(speeds), 3), "least of fair": least_of_fair, "each": speeds}
    return results


def urgent(model: str, beside: str, load: float, seconds: float) -> RuleResults:
    """Simulate an urgent model beside one with endless work under every rule.

    Results of a rule: "p50" and "p99" of the urgent model in multiples of its duration alone; "beside", the speed of
    the other. Late requests are served like others: the slowest 1 % are partly late even on an idle GPU.
    """
    urgent_stream, results = at_random(model, load, times=2, priority=9), {}
    for rule, options in {ALONE: {}, **URGENT}.items():
        streams = [urgent_stream] if rule == ALONE else [urgent_stream, endless(beside)]
        report = run(streams, "fifo" if rule == ALONE else rule, options, seconds, late="keep")
        results[rule] = _tails(report, model)
        if rule != ALONE:
            results[rule]["beside"] = rates(report, seconds)[1]
    return results


def _tails(report: RequestReport, model: str) -> dict[str, Any]:
    """p50 and p99 of the first stream, in multiples of the duration of *model* alone."""
    first, duration_s = report.streams[0], alone_s(model)
    return {"p50": round((first.p50_s or 0.0) / duration_s, 3), "p99": round((first.p99_s or 0.0) / duration_s, 3)}


def deadlines(load: float, seconds: float, seeds: Sequence[int] = SEEDS) -> RuleResults:
    """Share of missed deadlines of five models at a total *load*, under every rule.

    Our policy may leave a lane without a segment queued ahead. For a fair comparison, the policies of WITHOUT, which
    run one model at a time, are also simulated on a device that never queues a segment ahead.
    """
    results = {rule: _measure_missed(rule, options, load, seconds, seeds) for rule, options in ONE_FOR_ALL.items()}
    return results | {
        f"{rule} {BARE}": _measure_missed(rule, {}, load, seconds, seeds, none_ahead()) for rule in WITHOUT
    }


def _measure_missed(
    rule: str,
    options: Mapping[str, Option],
    load: float,
    seconds: float,
    seeds: Sequence[int],
    device: Host | None = None,
) -> dict[str, Any]:
    """Shares of missed deadlines under a rule and the better treatment of late requests (LATE).

    Returns "missed", of all requests; "worst", of the model that misses most; "late", the treatment.
    """
    streams = [at_random(model, load / len(FIVE), times) for model, times in FIVE.items()]
    late_work, by_late = policy_called(rule).traits.late_work, {}
    # A policy that serves late requests last by itself would be simulated twice alike.
    for late in LATE[:1] if late_work is LateWork.LAST else LATE:
        reports = [run(streams, rule, options, seconds, seed, late, device) for seed in seeds]
        missed = mean(report.violation_rate for report in reports)
        worst = mean(report.worst_violation_rate for report in reports)
        by_late[late] = {"missed": round(missed, 4), "worst": round(worst, 4), "late": late}
    return min(by_late.values(), key=lambda outcome: float(outcome["missed"]))


def orion_pair(model: str, beside: str, seconds: float) -> RuleResults:
    """Simulate a pair of Orion's under every rule; *beside*: its best-effort model, whose requests arrive evenly.

    Results of a rule: "p50" and "p99" of the urgent model, "beside" the share of the best-effort work that was done.
    """
    urgent_stream, results = at_random(model, FIRST_OF_ORION[model], times=2, priority=9), {}
    load = BESIDE_OF_ORION[beside]
    other = {**at_random(beside, load, times=1), "arrival": "uniform", "deadline_ms": FAR_MS}
    for rule, options in {ALONE: {}, **ORION_RULES, "reef": {}, OURS: {}}.items():
        streams = [urgent_stream] if rule == ALONE else [urgent_stream, other]
        report = run(streams, "fifo" if rule == ALONE else rule, options, seconds, late="keep")
        results[rule] = _tails(report, model)
        if rule != ALONE:
            results[rule]["beside"] = round(rates(report, seconds)[1] / load, 3)
    return results


Rows = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Row -> rule -> its results."""
KINDS = ("saturated/", "urgent/", "deadlines/", "orion/", "simulated ")
"""Prefixes of the names of rows. "simulated " + row: a measured row, simulated with that measurement's profiles."""


class Records(NamedTuple):
    """The recorded results: of longer simulations, and measured on a real GPU."""

    simulated: Rows
    measured: Rows


def read(measured: Path | None = None) -> Records:
    """Read the recorded results; *measured*: a file instead of the shipped one."""
    return Records(_rows("simulated.json"), _rows("measured.json", measured))


def _rows(name: str, path: Path | None = None) -> Rows:
    """Read the rows of known kinds from *path*, else from the shipped file *name*; empty if that does not exist."""
    shipped = resources.files("weft_papers") / "data" / "gpu" / name
    if path is None and not shipped.is_file():
        return {}
    with resources.as_file(shipped) as shipped_path:
        rows = read_json(path or shipped_path, InputError)
    if not isinstance(rows, dict):
        raise InputError(f"{path or name}: not rows of a benchmark, which are by name")
    return {row: rules for row, rules in rows.items() if row.startswith(KINDS)}


NOW, RECORDED, MEASURED = "simulated", "simulated for longer", "measured"
TITLES = {
    NOW: "simulated H200, run now",
    RECORDED: "simulated H200, as recorded",
    MEASURED: "measured on an H200, as recorded",
}
COLOURS = {
    "streams": "#e69f00", "best rival": "#56b4e9", "abreast": "#009e73", "edf": "#0072b2", "punctual": "#cc79a7",
    "priority": "#8f8f8f", "orion": "#d55e00", "alone": "#b9c0c8", "fifo": "#1f2933", "slices": "#b8a400",
}  # fmt: skip
"""The colour of a rule, the same in every picture."""


class LoadResults(NamedTuple):
    """The results of all loads of one kind from one source: simulated, recorded or measured."""

    name: str
    results: dict[str, RuleResults]

    @property
    def title(self) -> str:
        return TITLES[self.name]


def sources(
    kind: str, loads: Sequence[str], simulate: Callable[[str], RuleResults], records: Records, tick: Tick
) -> list[LoadResults]:
    """Simulate the loads now, and add recorded results of the same kind; sources without any are left out.

    kind: prefix of the names of recorded rows, without the slash. loads: their names after it.
    """
    now = {}
    for done, load in enumerate(loads):
        tick(done, len(loads))
        now[load] = simulate(load)
    recorded = [(RECORDED, _select_kind(kind, records.simulated)), (MEASURED, _select_kind(kind, records.measured))]
    return [LoadResults(NOW, now), *(LoadResults(name, results) for name, results in recorded if results)]


def sources_to_draw(every: list[LoadResults]) -> list[LoadResults]:
    """Return the sources that pictures show: the recorded ones, or the present run, which is the first, if none is."""
    return every[1:] or every


def _select_kind(kind: str, rows: Rows) -> dict[str, RuleResults]:
    """The rows named "*kind*/load": load -> rule -> results."""
    prefix = f"{kind}/"
    return {
        name.removeprefix(prefix): {rule: dict(numbers) for rule, numbers in row.items()}
        for name, row in rows.items()
        if name.startswith(prefix)
    }
