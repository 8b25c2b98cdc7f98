"""Machines files: the machines, their kinds, and rules for the machines of models (TOML, formats.md).

The field names are the keys of the file; unknown keys are refused.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from weft.base.errors import PlacingError, unknown_name
from weft.base.jsonfile import first_problem, printable
from weft.base.tomlfile import read_toml

Name = Annotated[str, Field(min_length=1), AfterValidator(printable)]
Positive = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]

GIB = 2**30  # files give memory in GiB
# Cap on machines in a file: a typing error in `count` must not fill the memory. Benchmarks place up to 10,000.
MOST_MACHINES = 100_000


class StatedNeed(BaseModel, extra="forbid", frozen=True):
    """The need of one request of a model on a kind of machine, given instead of a profile."""

    compute_ms: NotNegative = 0.0
    memory_ms: NotNegative = 0.0
    """Time of the memory channel."""
    other_ms: NotNegative = 0.0
    """Kernel launches and the host: time that overlaps with nothing."""
    weights_mib: NotNegative = 0.0
    activations_mib: NotNegative = 0.0
    segment_ms: NotNegative | None = None
    """The longest piece that cannot be interrupted; None: the whole request."""
    alone_ms: Positive | None = None
    """From arrival to answer on an idle machine; None: computing, memory and the rest one after another."""

    @model_validator(mode="after")
    def _takes_time(self) -> StatedNeed:
        if self.compute_ms + self.memory_ms + self.other_ms == 0:
            raise ValueError("takes no time; give compute_ms, memory_ms or other_ms")
        return self


class PlacingRule(BaseModel, extra="forbid", frozen=True):
    """Rules for the machines of one model."""

    replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Least number of machines that have the model."""
    apart: Literal["machine", "zone"] = "machine"
    """Whether the replicas must be on different machines or even in different zones."""
    machine: Name | None = None
    """The only machine that may have it."""
    zone: Name | None = None
    """The only zone that may have it."""
    on: dict[Name, StatedNeed] = {}
    """Kind of machine -> need of one request, instead of a profile."""

    @model_validator(mode="after")
    def _can_be_kept(self) -> PlacingRule:
        if self.machine is not None and self.replicas > 1:
            raise ValueError(f"machine = {self.machine!r} leaves no place for replicas = {self.replicas}; drop one")
        if self.zone is not None and self.apart == "zone" and self.replicas > 1:
            raise ValueError(f"replicas in zones of their own do not go with zone = {self.zone!r}; drop one")
        return self


class MachineKind(BaseModel, extra="forbid", frozen=True):
    """The hardware of machines of one kind, and how far it is used."""

    device: Name | None = None
    """A profile of ``weft profile -o``, an NPU by name or file; None: rules state the need of each model."""
    memory_gib: Positive
    """For weights and activations."""
    overlap: Share = 0.45
    """Share of the ideal overlap of computing and memory that models reach beside each other; .45: an H200."""
    peak_tflops: Positive | None = None
    """Peak compute, in 10^12 operations per second."""
    bandwidth_gb_s: Positive | None = None
    """Memory bandwidth in 10^9 bytes per second; with both peaks, measured times are divided into computing and
    memory."""
    busy_cap: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Cap on a machine's mean load, so that requests need not wait for long."""
    speed: Positive = 1.0
    """Speed relative to its device: 2 is twice as fast."""
    price: NotNegative = 1.0
    """Price of a machine, in any unit."""
    load_gb_s: Positive = 10.0
    """How fast weights are loaded, in 10^9 bytes per second."""

    @model_validator(mode="after")
    def _both_peaks(self) -> MachineKind:
        if (self.peak_tflops is None) != (self.bandwidth_gb_s is None):
            raise ValueError("peak_tflops and bandwidth_gb_s go together; give both or none")
        return self

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def load_bytes_per_s(self) -> float:
        return self.load_gb_s * 1e9


class MachineGroup(BaseModel, extra="forbid", frozen=True):
    """Machines of one kind in one zone."""

    kind: Name
    count: Annotated[int, Field(ge=1, le=MOST_MACHINES)] = 1
    zone: Name = "default"
    name: Name | None = None
    """Name; several machines get numbers. None: the kind's name."""


class ClusterMachine(NamedTuple):
    """One machine."""

    name: str
    kind: str
    zone: str


class Machines(BaseModel, extra="forbid", frozen=True):
    """All machines that models may be placed on."""

    kinds: Annotated[dict[Name, MachineKind], Field(min_length=1)]
    machine: Annotated[tuple[MachineGroup, ...], Field(min_length=1)]
    models: dict[Name, PlacingRule] = {}
    """Model -> rules for its machines."""
    folder: str = "."
    """Where relative paths start; set by the reader."""

    @model_validator(mode="after")
    def _consistent(self) -> Machines:
        """Check references between kinds, machines and models, and that names are unique."""
        for group in self.machine:
            if group.kind not in self.kinds:
                raise ValueError(unknown_name("kind", group.kind, self.kinds))
        if sum(group.count for group in self.machine) > MOST_MACHINES:
            raise ValueError(f"more than {MOST_MACHINES} machines")
        names = [machine.name for machine in self.all_machines]
        # The search for the duplicate is quadratic in the number of machines, so it runs only if there is one.
        if (
            twice := next((name for name in names if names.count(name) > 1), None)
            if len(set(names)) < len(names)
            else ""
        ):
            raise ValueError(f"two machines are called {twice!r}; name their groups")
        for model, rule in self.models.items():
            self._check_rule(model, rule, names)
        return self

    def _check_rule(self, model: str, rule: PlacingRule, names: list[str]) -> None:
        """Check that the machine, zone and kinds of a model's rule exist, and that its replicas have room."""
        if rule.machine is not None and rule.machine not in names:
            raise ValueError(f"models.{model}: {unknown_name('machine', rule.machine, names)}")
        if rule.zone is not None and rule.zone not in self.zones:
            raise ValueError(f"models.{model}: {unknown_name('zone', rule.zone, self.zones)}")
        for kind in rule.on:
            if kind not in self.kinds:
                raise ValueError(f"models.{model}: {unknown_name('kind', kind, self.kinds)}")
        places = self.zones if rule.apart == "zone" else names
        if rule.replicas > len(places):
            raise ValueError(f"models.{model}: replicas = {rule.replicas} in {len(places)} {rule.apart}s; add some")

    @cached_property
    def all_machines(self) -> tuple[ClusterMachine, ...]:
        """Every machine, in the order of the file; machines of a group without a name are numbered by kind."""
        machines: list[ClusterMachine] = []
        used: dict[str, int] = {}
        for group in self.machine:
            if group.name is not None and group.count == 1:
                machines.append(ClusterMachine(group.name, group.kind, group.zone))
                continue
            stem = group.name or group.kind
            for _ in range(group.count):
                used[stem] = used.get(stem, 0) + 1
                machines.append(ClusterMachine(f"{stem}-{used[stem]}", group.kind, group.zone))
        return tuple(machines)

    @property
    def zones(self) -> tuple[str, ...]:
        """Every zone once, in the order of the file."""
        return tuple(dict.fromkeys(group.zone for group in self.machine))

    def rule(self, model: str) -> PlacingRule:
        """Return the rules for a model's machines; default rules if the file does not name it."""
        return self.models.get(model, PlacingRule())


def read_machines(path: str | Path) -> Machines:
    """Read and check a machines file (TOML). PlacingError if it is invalid."""
    raw = read_toml(path, PlacingError, "machines")
    if "folder" in raw:
        raise PlacingError(f"{path}: unknown key 'folder'")
    return parse_machines(raw | {"folder": str(Path(path).parent)}, str(path))


def parse_machines(raw: dict[str, Any], where: str = "machines") -> Machines:
    """Parse a mapping with the keys of a machines file. PlacingError, beginning with *where*, if it is invalid."""
    try:
        return Machines.model_validate(raw)
    except ValidationError as error:
        schemas = (Machines, MachineKind, MachineGroup, PlacingRule, StatedNeed)
        raise PlacingError(f"{where}: {first_problem(error, *schemas)}") from error
