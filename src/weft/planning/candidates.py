"""What could be done: lanes and threads, batches, policies with their options, and what becomes of late requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.devices import Host
from weft.engine.lateness import SOFT
from weft.engine.policies import POLICIES, Option
from weft.planning.plan import AS_GIVEN, ModelChoice, PlanSettings
from weft.planning.plan_request import PlanRequest
from weft.simulation.comparison import batching
from weft.workloads.requests import Workload

FAVOURITE = "punctual"
"""Tried first: the sooner a good option is known, the fewer of the others need to be simulated."""

NOT_HERE: dict[str, str] = {
    "double-buffer": "a host fetches nothing ahead: it is fifo",
    "serial": "fifo with batches of one",
    "layerweaver": "a host has nothing to weave: it is fifo",
    "aimt": "a host fetches nothing ahead: it is fair",
    "priority": "edf, where no stream has a priority",
}
"""Policies that come to the same as another on a host -> why; ``priority`` unless priorities differ."""

MORE_OPTIONS: dict[str, tuple[dict[str, Option], ...]] = {"punctual": ({"margin": 40},)}
"""Policy -> settings of it that are tried besides its defaults."""

SMALL_BATCH = 2
"""Besides the largest batch that pays: most of the gain of batching, at the least delay."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """A way to serve the models: one option among those that a plan chooses from."""

    host: Host
    """The machine, measured with as many lanes and threads."""
    settings: PlanSettings
    batches: Mapping[str, int]
    """Model -> most requests computed together."""
    grain_ms: Mapping[str, float]
    """Model -> how long its segments may take, as its server cuts it."""
    cut: str = ""
    """How its segments differ from those that were measured, in words; empty where they do not."""
    done: Mapping[str, str] = field(default_factory=dict)
    """Model -> what was done to it before it was measured, of those that are not served as they were given."""

    @property
    def label(self) -> str:
        """What to call it in tables."""
        settings = self.settings
        options = [f"{name} {value}" for name, value in settings.policy_options.items()]
        late = [] if settings.late == "weave" else [f"late: {settings.late}"]
        words = ", ".join([*options, *late])
        threads = f" x {settings.threads} threads" if settings.threads > 1 else ""
        lanes = f"{settings.lanes} lane{'s' * (settings.lanes > 1)}{threads}"
        where = [lanes] if settings.device is None else []
        how = ", ".join([*where, self.batching, *([self.cut] if self.cut else [])])
        return f"{settings.policy}{f' ({words})' if words else ''}, {how}"

    @property
    def simplicity(self) -> tuple[Any, ...]:
        """Sorts options that are equally good, the simplest first (docs/plan.md has the order)."""
        settings = self.settings
        return (
            settings.lanes,
            settings.policy != FAVOURITE,
            list(POLICIES).index(settings.policy),
            len(settings.policy_options),
            settings.late != "weave",
            sum(len(model.segments) for model in self.host.models.values()),
            max(self.batches.values()),
            settings.threads,
            self.label,
        )

    @property
    def batching(self) -> str:
        """How many requests are computed together, in words."""
        return batching(sorted(self.batches.values()))

    @property
    def models(self) -> dict[str, ModelChoice]:
        """How each model is served."""
        return {
            name: ModelChoice(max_batch=most, grain_ms=self.grain_ms[name], done=self.done.get(name, AS_GIVEN))
            for name, most in self.batches.items()
        }

    def serving(self, workload: Workload) -> Workload:
        """A workload whose streams are batched this way."""
        streams = tuple(
            stream.model_copy(update={"max_batch": self.batches[stream.served_name], "batch_timeout_ms": 0.0})
            for stream in workload.stream
        )
        return workload.model_copy(update={"stream": streams})


def arrangements(asked: PlanRequest, hosts: Sequence[Host]) -> list[Arrangement]:
    """All ways to serve the models on these hosts, in the order in which they are worth trying."""
    grain_ms = {model.name: model.config.grain_ms for model in asked.models}
    done = {model.name: model.made.done for model in asked.models if model.made}
    found = [
        Arrangement(host, _settings(asked, host, how), batches, grain_ms, done=done)
        for host in hosts
        for batches in batch_limits(host, asked)
        for how in _ways(asked, batches)
    ]
    return sorted(found, key=_order)


def _settings(asked: PlanRequest, host: Host, how: Mapping[str, Any]) -> PlanSettings:
    if asked.device is not None:
        return PlanSettings(device=asked.device, **how)
    return PlanSettings(lanes=host.lanes, threads=host.threads, isolation=asked.isolation, **how)


def batch_limits(host: Host, asked: PlanRequest) -> list[dict[str, int]]:
    """Model -> most requests together: as far as batches were measured to pay, small ones, and none."""
    pays = {model.name: _most(model.config.max_batch, host.model(model.name).max_batch) for model in asked.models}
    found: list[dict[str, int]] = []
    for most in (max(pays.values()), SMALL_BATCH, 1):
        limits = {name: min(most, size) for name, size in pays.items()}
        if limits not in found:
            found.append(limits)
    return found


def _most(set_by_user: int | None, measured: int) -> int:
    return measured if set_by_user is None else min(set_by_user, measured)


def request_policies(workload: Workload) -> list[str]:
    """Policies that serve requests and differ from each other on a host, the favourite first.

    Those that fill batches up while they run are worth their time only where requests leave early.
    """
    leave = any(stream.leaves for stream in workload.stream)
    priorities = {stream.priority for stream in workload.stream}
    copies = {*NOT_HERE} - ({"priority"} if len(priorities) > 1 else set())
    able = [
        name for name, kind in POLICIES.items() if kind.traits.serves_requests and (leave or not kind.traits.refills)
    ]
    return sorted((name for name in able if name not in copies), key=lambda name: name != FAVOURITE)


def _ways(asked: PlanRequest, batches: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Policies, their options and rules for late requests; without batches none is waited for or filled up."""
    lates = SOFT if asked.deadlines == "soft" else ("weave",)
    for policy in request_policies(asked.workload):
        if max(batches.values()) == 1 and (policy == "adaptive" or POLICIES[policy].traits.refills):
            continue
        for options in ({}, *MORE_OPTIONS.get(policy, ())):
            for late in lates:
                yield {"policy": policy, "policy_options": options, "late": late}


def _order(each: Arrangement) -> tuple[bool, int, int]:
    """The favourite as it comes first, then on many threads of lanes, then those with large batches."""
    settings = each.settings
    first = settings.policy == FAVOURITE and not settings.policy_options and settings.late == "weave"
    return not first, -settings.lanes * settings.threads, -max(each.batches.values())
