"""The candidates of a plan: lanes and threads, batch limits, policies with options, and rules for late requests."""

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
"""Policy that is tried first: the sooner a good option is known, the fewer other options need a simulation."""

NOT_HERE: dict[str, str] = {
    "double-buffer": "a host fetches nothing ahead: it is fifo",
    "serial": "fifo with batches of one",
    "layerweaver": "a host has nothing to weave: it is fifo",
    "aimt": "a host fetches nothing ahead: it is fair",
    "priority": "edf, where no stream has a priority",
}
"""Policy that does the same as another on a host -> why; ``priority`` only where all priorities are equal."""

MORE_OPTIONS: dict[str, tuple[dict[str, Option], ...]] = {"punctual": ({"margin": 40},)}
"""Policy -> options that are tried besides its defaults."""

SMALL_BATCH = 2
"""A batch limit that is tried besides the largest useful one: most of the gain of batching at the least delay."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """A complete configuration of the server: one of the options among which a plan chooses."""

    host: Host
    """The machine, measured with the arrangement's lanes and threads."""
    settings: PlanSettings
    batches: Mapping[str, int]
    """Model -> largest batch."""
    grain_ms: Mapping[str, float]
    """Model -> longest segment, in milliseconds, into which its server cuts it."""
    cut: str = ""
    """Description of how the segments differ from the measured segments; empty if they do not differ."""
    done: Mapping[str, str] = field(default_factory=dict)
    """Model -> how its file was changed before the measurement; without models that are served as given."""

    @property
    def label(self) -> str:
        """The name of this arrangement in tables."""
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
        """Sort key of equally good options, the simplest first (docs/plan.md has the order)."""
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
        """The batch limits in words."""
        return batching(sorted(self.batches.values()))

    @property
    def models(self) -> dict[str, ModelChoice]:
        """The settings of each model."""
        return {
            name: ModelChoice(max_batch=most, grain_ms=self.grain_ms[name], done=self.done.get(name, AS_GIVEN))
            for name, most in self.batches.items()
        }

    def serving(self, workload: Workload) -> Workload:
        """Return the workload with this arrangement's batch limits."""
        streams = tuple(
            stream.model_copy(update={"max_batch": self.batches[stream.served_name], "batch_timeout_ms": 0.0})
            for stream in workload.stream
        )
        return workload.model_copy(update={"stream": streams})


def arrangements(asked: PlanRequest, hosts: Sequence[Host]) -> list[Arrangement]:
    """Return all candidates on these hosts, in the order in which to try them."""
    grain_ms = {model.name: model.config.grain_ms for model in asked.models}
    done = {model.name: model.preparation.done for model in asked.models if model.preparation}
    candidates = [
        Arrangement(host, _settings(asked, host, choice), batches, grain_ms, done=done)
        for host in hosts
        for batches in batch_limits(host, asked)
        for choice in _policy_choices(asked, batches)
    ]
    return sorted(candidates, key=_order)


def _settings(asked: PlanRequest, host: Host, choice: Mapping[str, Any]) -> PlanSettings:
    if asked.device is not None:
        return PlanSettings(device=asked.device, **choice)
    return PlanSettings(lanes=host.lanes, threads=host.threads, isolation=asked.isolation, **choice)


def batch_limits(host: Host, asked: PlanRequest) -> list[dict[str, int]]:
    """Return the batch limits to try, each model -> limit: the largest useful batches, ``SMALL_BATCH``, and 1."""
    largest = {
        model.name: _upper_limit(model.config.max_batch, host.model(model.name).max_batch) for model in asked.models
    }
    distinct: list[dict[str, int]] = []
    for most in (max(largest.values()), SMALL_BATCH, 1):
        limits = {name: min(most, size) for name, size in largest.items()}
        if limits not in distinct:
            distinct.append(limits)
    return distinct


def _upper_limit(set_by_user: int | None, measured: int) -> int:
    return measured if set_by_user is None else min(set_by_user, measured)


def request_policies(workload: Workload) -> list[str]:
    """Return the policies that serve requests and differ from each other on a host, the favourite first.

    Policies that refill running batches are tried only where requests leave early.
    """
    leave = any(stream.leaves for stream in workload.stream)
    priorities = {stream.priority for stream in workload.stream}
    copies = {*NOT_HERE} - ({"priority"} if len(priorities) > 1 else set())
    able = [
        name for name, kind in POLICIES.items() if kind.traits.serves_requests and (leave or not kind.traits.refills)
    ]
    return sorted((name for name in able if name not in copies), key=lambda name: name != FAVOURITE)


def _policy_choices(asked: PlanRequest, batches: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the settings of policies, their options and their rules for late requests.

    With batch limits of 1, policies that wait for batches or refill batches are left out.
    """
    late_rules = SOFT if asked.deadlines == "soft" else ("weave",)
    for policy in request_policies(asked.workload):
        if max(batches.values()) == 1 and (policy == "adaptive" or POLICIES[policy].traits.refills):
            continue
        for options in ({}, *MORE_OPTIONS.get(policy, ())):
            for late in late_rules:
                yield {"policy": policy, "policy_options": options, "late": late}


def _order(arrangement: Arrangement) -> tuple[bool, int, int]:
    """Sort key: the favourite with its defaults first, then many threads in all lanes, then large batches."""
    settings = arrangement.settings
    first = settings.policy == FAVOURITE and not settings.policy_options and settings.late == "weave"
    return not first, -settings.lanes * settings.threads, -max(arrangement.batches.values())
