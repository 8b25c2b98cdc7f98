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
"""Policy that does the same as another on a host -> the reason; ``priority`` only if all priorities are equal."""

MORE_OPTIONS: dict[str, tuple[dict[str, Option], ...]] = {"punctual": ({"margin": 40},)}
"""Policy -> options that are tried besides its defaults."""

SMALL_BATCH = 2
"""A batch limit that is tried besides the largest one: much of the gain of batching at the least delay."""


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
    """Model -> how its file was changed before the measurement, e.g. quantized; without models served as given."""

    @property
    def label(self) -> str:
        """The name of this arrangement in tables."""
        settings = self.settings
        options = [f"{name} {value}" for name, value in settings.policy_options.items()]
        late = [] if settings.late == "weave" else [f"late: {settings.late}"]
        policy_details = ", ".join([*options, *late])
        threads = f" x {settings.threads} threads" if settings.threads > 1 else ""
        lanes = f"{settings.lanes} lane{'s' * (settings.lanes > 1)}{threads}"
        division = [lanes] if settings.device is None else []
        details = ", ".join([*division, self.batching, *([self.cut] if self.cut else [])])
        return f"{settings.policy}{f' ({policy_details})' if policy_details else ''}, {details}"

    @property
    def division(self) -> tuple[int, int]:
        """How the cores are divided: the number of lanes, and of threads per lane."""
        return self.settings.lanes, self.settings.threads

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
            name: ModelChoice(max_batch=limit, grain_ms=self.grain_ms[name], done=self.done.get(name, AS_GIVEN))
            for name, limit in self.batches.items()
        }

    def serving(self, workload: Workload) -> Workload:
        """Return the workload with this arrangement's batch limits; no request waits for others of its batch."""
        streams = tuple(
            stream.model_copy(update={"max_batch": self.batches[stream.served_name], "batch_timeout_ms": 0.0})
            for stream in workload.stream
        )
        return workload.model_copy(update={"stream": streams})


def arrangements(request: PlanRequest, hosts: Sequence[Host]) -> list[Arrangement]:
    """Return all candidates on these hosts, in the order in which to try them."""
    grain_ms = {model.name: model.config.grain_ms for model in request.models}
    file_changes = {model.name: model.preparation.change for model in request.models if model.preparation}
    candidates = [
        Arrangement(host, _settings(request, host, policy_settings), batches, grain_ms, done=file_changes)
        for host in hosts
        for batches in batch_limits(host, request)
        for policy_settings in _policy_choices(request, batches)
    ]
    return sorted(candidates, key=_order)


def _settings(request: PlanRequest, host: Host, policy_settings: Mapping[str, Any]) -> PlanSettings:
    """Return a server's settings: its policy, and the division of its cores or its GPU."""
    if request.device is not None:
        return PlanSettings(device=request.device, **policy_settings)
    return PlanSettings(lanes=host.lanes, threads=host.threads, isolation=request.isolation, **policy_settings)


def batch_limits(host: Host, request: PlanRequest) -> list[dict[str, int]]:
    """Return the different batch limits to try (model -> limit): the largest measured, ``SMALL_BATCH``, and 1."""
    largest = {
        model.name: _upper_limit(model.config.max_batch, host.model(model.name).max_batch) for model in request.models
    }
    distinct: list[dict[str, int]] = []
    for limit in (max(largest.values()), SMALL_BATCH, 1):
        limits = {name: min(limit, size) for name, size in largest.items()}
        if limits not in distinct:
            distinct.append(limits)
    return distinct


def _upper_limit(set_by_user: int | None, measured: int) -> int:
    """Return the largest batch of a model: as measured, or less if the user's setting is less."""
    return measured if set_by_user is None else min(set_by_user, measured)


def request_policies(workload: Workload) -> list[str]:
    """Return the policies that serve requests and differ from each other on a host, the favourite first.

    Policies that refill running batches are tried only where requests leave early.
    """
    exits_used = any(stream.leaves for stream in workload.stream)
    priorities = {stream.priority for stream in workload.stream}
    duplicates = {*NOT_HERE} - ({"priority"} if len(priorities) > 1 else set())
    names = [
        name
        for name, policy in POLICIES.items()
        if policy.traits.serves_requests and (exits_used or not policy.traits.refills) and name not in duplicates
    ]
    return sorted(names, key=lambda name: name != FAVOURITE)


def _policy_choices(request: PlanRequest, batches: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the settings of policies, their options and their rules for late requests.

    With batch limits of 1, policies that wait for batches or refill batches are left out.
    """
    late_rules = SOFT if request.deadlines == "soft" else ("weave",)  # strict: late requests are given up anyway
    for policy in request_policies(request.workload):
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
