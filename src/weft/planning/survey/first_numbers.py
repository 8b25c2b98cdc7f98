"""First numbers: a short measurement of a division of the cores into lanes, by which it may be measured in full."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from weft.base.errors import DeviceError
from weft.base.jsonfile import first_problem, read_json, write_json
from weft.devices import Host

Count = Annotated[int, Field(ge=1, le=1024)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class FirstNumbers(BaseModel, extra="forbid", frozen=True):
    """Times of single requests, and throughput with all lanes full; the fields are keys of its file in the cache."""

    lanes: Count
    threads: Count
    alone_s: Annotated[dict[str, Positive], Field(min_length=1)]
    """Model -> mean time of a request on a lane, the others idle."""
    longest_s: dict[str, Positive]
    """Model -> mean time of its longest segment in such a request."""
    max_batch: dict[str, Count]
    per_s: dict[str, Positive]
    """Model -> requests per second that it would reach with all lane time, at its speed beside the other models."""
    answered_per_s: Positive
    """Requests per second of all models together."""
    too_long: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Share by which these times may be too long, because other processes ran meanwhile."""

    @property
    def label(self) -> str:
        """The name of the division in messages: "2 lanes x 4 threads"."""
        threads = f" x {self.threads} threads" if self.threads > 1 else ""
        return f"{self.lanes} lane{'s' * (self.lanes > 1)}{threads}"

    def with_stitched(self, measured: Mapping[str, str]) -> FirstNumbers:
        """Return the numbers for all models of stitched files; *measured*: model -> measured model of the same file."""
        by_model = {"alone_s": self.alone_s, "longest_s": self.longest_s, "per_s": self.per_s}
        renamed = {key: {name: values[source] for name, source in measured.items()} for key, values in by_model.items()}
        max_batch = {name: self.max_batch[source] for name, source in measured.items()}
        return self.model_copy(update={**renamed, "max_batch": max_batch})


class Surveyed(NamedTuple):
    """The measurements with one number of lanes."""

    first: FirstNumbers
    host: Host | None
    """None: it was not measured further, because of its first numbers."""


def read_first_numbers(path: Path) -> FirstNumbers:
    """Read the numbers from a file; DeviceError if they are not valid."""
    try:
        return FirstNumbers.model_validate(read_json(path, DeviceError))
    except ValidationError as error:
        raise DeviceError(f"{path}: {first_problem(error, FirstNumbers)}") from error


def write_first_numbers(first: FirstNumbers, path: Path) -> None:
    write_json(path, first.model_dump(mode="json"))
