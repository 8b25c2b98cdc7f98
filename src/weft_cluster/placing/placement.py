"""A placement: the models on each machine, the share of their requests that goes there, and the resulting loads.

``placement.json`` of a placement folder holds one (docs/formats.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from weft.base.errors import PlacingError
from weft.base.jsonfile import first_problem, printable, read_json, write_json
from weft.reports.pictures import Shown

PLACEMENT_FILE = "placement.json"
"""File name of a placement in its folder."""

Name = Annotated[str, Field(min_length=1), AfterValidator(printable)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Part = Annotated[float, Field(gt=0, le=1 + 1e-6, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, le=2**62)]
Objective = Literal["machines", "load", "attainment", "cost"]
Limit = Literal["compute", "bandwidth", "other", "memory", "deadline"]


class PlacedModel(BaseModel, extra="forbid", frozen=True):
    """A model on a machine."""

    model: Name
    share: Part
    """The share of the model's requests that goes to this machine."""
    rate: NotNegative
    """Requests per second of the model that go to this machine."""
    compute: NotNegative = 0.0
    """Share of the machine's time in which these requests compute."""
    bandwidth: NotNegative = 0.0
    """Share in which they keep its memory channel busy."""
    other: NotNegative = 0.0
    """Share in which they take time that overlaps with nothing."""
    memory_bytes: Bytes = 0
    """Memory of the machine that the model occupies."""
    attainment: Share | None = None
    """Share of these requests that is predicted to be on time; None: not simulated."""


class PlacedMachine(BaseModel, extra="forbid", frozen=True):
    """A machine, its models and its loads."""

    name: Name
    kind: Name
    zone: Name
    models: Annotated[tuple[PlacedModel, ...], Field(min_length=1)]
    compute: NotNegative
    """Share of the time in which it computes."""
    bandwidth: NotNegative
    """Share in which its memory channel is busy."""
    other: NotNegative
    """Share of time that overlaps with nothing."""
    overlap: Share = 0.0
    """Share of the ideal overlap of computing and the memory channel."""
    busy: NotNegative
    """Share of the time in which the machine is busy: computing, channel and other time, with that overlap."""
    busy_cap: Share
    memory_bytes: Bytes
    memory_limit_bytes: Bytes
    limit: Limit
    """The resource with the least left."""
    limited_by: Name
    """The model that takes most of that resource."""
    attainment: Share | None = None

    @property
    def compute_load(self) -> float:
        """Computing, and the time that does not overlap with it; ``busy_cap`` limits this and ``bandwidth_load``."""
        return self.compute + (1 - self.overlap) * self.bandwidth + self.other

    @property
    def bandwidth_load(self) -> float:
        """Memory channel time, and the time that does not overlap with it."""
        return self.bandwidth + (1 - self.overlap) * self.compute + self.other


class UnservedModel(BaseModel, extra="forbid", frozen=True):
    """Requests of a model for which no machine has room."""

    model: Name
    share: Part
    rate: NotNegative
    why: Annotated[str, AfterValidator(printable)]
    """The machines that would be needed."""


class Placement(Shown, BaseModel, extra="forbid", frozen=True):
    """The machines of every model."""

    format: Literal[1] = 1
    objective: Objective = "machines"
    machines: tuple[PlacedMachine, ...]
    """Machines with models."""
    idle: tuple[Name, ...] = ()
    """Names of machines without models."""
    unserved: tuple[UnservedModel, ...] = ()
    value: NotNegative
    """Value of the objective: machines, multiple of the workload's rates, share on time, or price."""
    bound: NotNegative
    """The value that no placement can exceed."""
    bound_by: Name = "load"
    """The resource that limits the bound: load, memory or copies."""
    attainment: Share | None = None
    """Share of all requests that is predicted to be on time; None: not simulated."""
    notes: tuple[Annotated[str, AfterValidator(printable)], ...] = ()
    """Notes, in sentences."""

    @model_validator(mode="after")
    def _consistent(self) -> Placement:
        names = [machine.name for machine in self.machines] + list(self.idle)
        if len(set(names)) < len(names):
            raise ValueError(f"machine {next(name for name in names if names.count(name) > 1)!r} is there twice")
        return self

    @property
    def gap(self) -> float:
        """Distance of the value from the bound, as a share of the bound; 0 if it is optimal."""
        return abs(self.value - self.bound) / self.bound if self.bound else 0.0

    @property
    def models(self) -> tuple[str, ...]:
        """Every model that is placed, once."""
        return tuple(dict.fromkeys(placed.model for machine in self.machines for placed in machine.models))

    def where(self, model: str) -> dict[str, float]:
        """Machine -> the share of a model's requests that goes there."""
        return {
            machine.name: placed.share
            for machine in self.machines
            for placed in machine.models
            if placed.model == model
        }


def read_placement(path: str | Path) -> Placement:
    """Read the placement of a folder, or a placement file. PlacingError if it is invalid."""
    file = Path(path) / PLACEMENT_FILE if Path(path).is_dir() else Path(path)
    return parse_placement(read_json(file, PlacingError), str(file))


def parse_placement(raw: Any, where: str) -> Placement:
    """Parse the JSON of a placement; *where* begins the message of the PlacingError if it is invalid."""
    try:
        return Placement.model_validate(raw)
    except ValidationError as error:
        schemas = (Placement, PlacedMachine, PlacedModel, UnservedModel)
        raise PlacingError(f"{where}: {first_problem(error, *schemas)}") from error


def write_placement(placement: Placement, path: str | Path) -> None:
    """Write ``placement.json`` at a path."""
    write_json(path, placement.model_dump(mode="json"))
