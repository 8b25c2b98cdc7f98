"""The largest loads that several policies sustain, at several ratios of the streams' rates: ``sustain``.

The command ``weft sustain`` only parses and prints; ``simulation.sustain`` searches for a single policy and ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.base.errors import DeviceError, InputError, WorkloadError
from weft.devices import Host, TiledNpu, load_device
from weft.engine.lateness import check_late
from weft.engine.policies import POLICIES, check_policy
from weft.reports.pictures import Shown
from weft.reports.tables import ResultTable, TableRow, number
from weft.simulation.comparison import host_settings, request_names
from weft.simulation.requests import ONLINE, Device, prepare
from weft.simulation.sustain import Question, Sustained, sustain_all
from weft.workloads.requests import Workload, parse_workload, read_workload

ALL = "all"
"""Instead of policy names: every policy that serves requests and can be searched with on the device."""
AS_WRITTEN = "as written"
"""Label of the workload's own ratio."""
AS_PLANS = (
    "runs as of weft plan, or for duration_s where that is longer; it finds the same, to 5 %, for the same measurement "
    "(--device plan/host.json), lanes, batches and late rule"
)
PAPER_RATIOS = tuple((float(2**n), 1.0) for n in range(6, -1, -1)) + tuple((1.0, float(2**n)) for n in range(1, 7))
"""The ratios of two streams in the paper: 64:1, 32:1, ... 1:64."""

Ratio = tuple[float, ...]
OnProgress = Callable[[int, int], None]
"""Called with the number of finished searches and the number of all searches."""


@dataclass(frozen=True, eq=False, repr=False)
class SustainedLoads(Shown):
    """The largest load of each policy at each ratio."""

    device: str
    limit: float
    """Largest share of deadlines that a stream might miss."""
    ratios: tuple[Ratio | None, ...]
    """Ratios of the streams' rates; None: those of the workload."""
    policies: tuple[str, ...]
    questions: tuple[Question, ...]
    answers: tuple[Sustained, ...]
    """All policies at the first ratio, then at the next; in the order of the questions."""
    settings: str = ""
    """On a host, the settings besides the policy that a comparison depends on, in words; else empty."""

    def __repr__(self) -> str:
        return f"SustainedLoads({', '.join(self.policies)} on {self.device}: {self.best})"

    @property
    def best(self) -> Sustained:
        """The answer with the largest STP; the first among equals."""
        return max(self.answers, key=lambda answer: answer.stp)

    @property
    def labels(self) -> tuple[str, ...]:
        """The ratios as text, as 64:1."""
        return tuple(":".join(f"{part:g}" for part in ratio) if ratio else AS_WRITTEN for ratio in self.ratios)

    def at(self, place: int) -> tuple[Sustained, ...]:
        """Return the answers of all policies at the ratio with index *place*."""
        return self.answers[place * len(self.policies) : (place + 1) * len(self.policies)]

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the JSON file (docs/formats.md)."""
        pairs = zip(self.questions, self.answers, strict=True)
        answers = [
            {**answer.as_dict(), "rates": [rate * answer.factor if rate else None for rate in question.workload.rates]}
            for question, answer in pairs
        ]
        return {"format": 1, "device": self.device, "answers": answers}

    def table(self) -> ResultTable:
        """Return the loads as ``weft sustain`` prints them."""
        return _table(self)


def sustain(
    workload: Workload | str | Path,
    *,
    policies: str | Sequence[str] = ALL,
    ratios: Sequence[Ratio] | None = None,
    device: Device | str | None = None,
    late: str = "weave",
    limit: float = 0.01,
    seeds: int = 2,
    tolerance: float = 0.01,
    processes: int = 1,
    on_progress: OnProgress | None = None,
) -> SustainedLoads:
    """Find the highest load at which no stream misses more than *limit* of its deadlines.

    workload: a workload or its file. ratios: divisions of its total rate to try, each with one number per stream.
    device: a name, a file, or a machine that ``weft.measure`` returned; None: that of the workload. late: the rule for
    late requests. seeds: runs per load. tolerance: width of the last bracket, relative to the load. processes: searches
    at the same time; a script that uses several must begin under ``if __name__ == "__main__"``.
    """
    base = workload if isinstance(workload, Workload) else read_workload(workload)
    mixes = tuple(ratios) if ratios is not None else (None,)
    loads = check_request(base, policies, ratios, late)
    if processes < 1:
        raise InputError(f"processes = {processes} must be at least 1")
    machine = searchable(load_device(device or base.device) if isinstance(device, str | None) else device)
    names = _select_policies(policies, machine)
    questions = [
        Question(load, name, late=late, limit=limit, seeds=seeds, tolerance=tolerance)
        for load in loads
        for name in names
    ]
    answers = sustain_all(questions, machine, processes=processes, progress=on_progress)
    settings = host_settings(prepare(base, machine), late) if isinstance(machine, Host) else ""
    return SustainedLoads(machine.name, limit, mixes, tuple(names), tuple(questions), tuple(answers), settings)


def check_request(
    base: Workload, policies: str | Sequence[str], ratios: Sequence[Ratio] | None, late: str
) -> list[Workload]:
    """Return the workload *base* at each ratio; InputError for unknown policies or late rules, or unfit ratios.

    Called before a machine is measured, which takes minutes.
    """
    for name in () if policies == ALL else [policies] if isinstance(policies, str) else policies:
        check_policy(name)
    check_late(late)
    return [base] if ratios is None else [_with_ratio(base, ratio) for ratio in ratios]


def searchable(device: Device) -> Device:
    """Return the device; DeviceError for a tiled NPU, on which there is nothing to search for."""
    if isinstance(device, TiledNpu):
        raise DeviceError(f'{device.name}: a tiled NPU has no weight buffer to schedule; this needs kind = "npu"')
    return device


def _select_policies(policies: str | Sequence[str], device: Device) -> list[str]:
    """Return the names of the policies; ALL: on an NPU those with a compiled loop, because a search takes many runs."""
    if policies != ALL:
        return [policies] if isinstance(policies, str) else list(policies)
    return request_names(ALL, device) if isinstance(device, Host) else [n for n, p in POLICIES.items() if p in ONLINE]


def _with_ratio(base: Workload, ratio: Ratio) -> Workload:
    if base.total_rate is None:
        raise WorkloadError("ratios divide the workload's total_rate, which it does not have")
    return parse_workload(base.model_dump(exclude_unset=True) | {"ratio": ratio}, "ratios")


def _table(loads: SustainedLoads) -> ResultTable:
    """Return the table of ``SustainedLoads.table``."""
    on_host = any(answer.load is not None for answer in loads.answers)
    columns = ("missed", "p99 ms", "load") if on_host else ("STP", "over first")
    rows = [
        TableRow(
            (
                label if place == 0 else "",
                answer.policy,
                _rate_text(answer.rate),
                *(_host_cells(answer) if on_host else (f"{answer.stp:.3f}", f"{answer.stp / answers[0].stp:.2f}")),
                _rate_text(answer.unsustained_rate),
                "seeds disagree" if answer.noise_limited else "",
            ),
            answer.stp == max(other.stp for other in answers),
        )
        for label, answers in ((label, loads.at(place)) for place, label in enumerate(loads.labels))
        for place, answer in enumerate(answers)
    ]
    models = " : ".join(stream.model for stream in loads.questions[0].workload.stream)
    where = f"{loads.device}, {loads.settings}" if loads.settings else loads.device
    title = f"{models} on {where}: largest load with at most {loads.limit:.1%} of deadlines missed"
    return ResultTable(
        title,
        ("ratio", "policy", "requests/s", *columns, "first miss at", ""),
        tuple(rows),
        left=2,
        notes=_notes(loads, on_host),
    )


def _notes(loads: SustainedLoads, on_host: bool) -> tuple[str, ...]:
    """Return the notes below the table of loads."""
    explanation = (
        "p99 of each stream in turn; load: share of the lanes' time in which they compute"
        if on_host
        else "STP: standalone time's worth of requests per unit of time"
    )
    noisy = any(answer.noise_limited for answer in loads.answers)
    strict = on_host and any(question.late != "drop" for question in loads.questions)
    return (
        explanation,
        *([AS_PLANS] if on_host else []),
        *(["weft plan gives late requests up where deadlines are strict, its default: --late drop"] if strict else []),
        *(["where seeds disagree, more --seeds or a longer duration_s sharpen the answer"] if noisy else []),
    )


def _rate_text(per_s: float) -> str:
    """Return requests per second as text, with a decimal below 100: hosts serve few."""
    return f"{per_s:.0f}" if per_s >= 100 else f"{per_s:.1f}"


def _host_cells(answer: Sustained) -> tuple[str, str, str]:
    """Return the cells that only hosts have: share missed, p99 of each stream, and load."""
    p99 = " / ".join(number(p99_s, 1, scale=1e3) for p99_s in answer.p99_s)
    return f"{answer.violation_rate:.2%}", p99, f"{answer.load or 0.0:.1%}"
