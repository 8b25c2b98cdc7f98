"""Profiles for mapping: the cost of each group of a model on each unit of a SoC, as values and as files.

A profile says where its numbers come from (``origin``): *measured* on the device, *derived* from published totals
and the network's structure, or *estimated* from the network and the SoC's description alone. ``estimate.find_profile``
prefers them in that order. ``merge_groups`` joins groups, so that a search has fewer of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, field_validator
from pydantic_core.core_schema import ValidationInfo

from weft.base.errors import ProfileError, reason_of
from weft.base.jsonfile import first_problem, printable, read_json, write_json
from weft_map.problem import MAX_SECONDS, MAX_STEPS, Group, Task, UnitCost

Origin = Literal["measured", "derived", "estimated"]

MAX_FILE_BYTES = 32 << 20  # far above any profile; a larger file is refused before it is read into memory
# Profiles are written with names up to this length, and read with names up to four times as long. TensorRT names a
# kernel after all its layers, which is too long for tables.
MAX_NAME = 400

Name = Annotated[str, Field(min_length=1, max_length=4 * MAX_NAME), AfterValidator(printable)]
Remark = Annotated[str, Field(max_length=4000), AfterValidator(printable)]
Amount = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]


def _tuple(value: Any) -> Any:
    """JSON has lists; strict unions of older pydantic refuse them where a tuple is meant."""
    return tuple(value) if isinstance(value, list) else value


def _check_range(layers: tuple[str, ...] | str) -> tuple[str, ...] | str:
    """Refuse a range of layer numbers such as "9-0"."""
    numbers = layers.split("-") if isinstance(layers, str) else []
    if len(numbers) == 2 and all(number.isdecimal() for number in numbers) and int(numbers[0]) > int(numbers[1]):
        raise ValueError("the first layer must not come after the last")
    return layers


Layers = Annotated[tuple[Name, ...] | Name, BeforeValidator(_tuple), AfterValidator(_check_range)]


class ProfileCost(BaseModel, extra="forbid", frozen=True, strict=True):
    """The cost of a group on one unit, if nothing else runs on the SoC."""

    time_s: Amount
    demand_gb_s: Amount
    """Memory traffic that the group demands while it runs."""
    in_s: Amount = 0.0
    """Seconds before the group, if the previous group ran on another unit."""
    out_s: Amount = 0.0
    """Seconds after the group, if the next group runs on another unit."""
    energy_j: Amount | None = None


class ProfileGroup(BaseModel, extra="forbid", frozen=True, strict=True):
    """Layers that run together on one unit."""

    name: Name
    layers: Layers = ()
    """Names of the layers, or the numbers of the first and the last layer: "0-9"."""
    leave: bool = True
    """Whether the model may change its unit after this group."""
    costs: Annotated[dict[Name, ProfileCost], Field(min_length=1, max_length=64)]
    """The group's cost by unit; a unit that is not named may not run it."""


class SocProfile(BaseModel, extra="forbid", frozen=True, strict=True):
    """A model on a SoC. The field names are the keys of the file."""

    format: Literal[1] = 1
    kind: Literal["soc-profile"] = "soc-profile"
    model: Name
    soc: Name
    origin: Origin
    source: Remark = ""
    """Where the numbers come from, and what was assumed where nothing is published."""
    precision: Name | None = None
    groups: Annotated[tuple[ProfileGroup, ...], Field(min_length=1, max_length=MAX_STEPS, strict=False)]
    entry_s: dict[Name, Amount] = {}
    """Seconds before the first group of a run, by unit."""
    exit_s: dict[Name, Amount] = {}
    """Seconds after the last group of a run, by unit."""

    def __repr__(self) -> str:
        return f"SocProfile({self.model} on {self.soc}: {len(self.groups)} groups, {self.origin})"

    @field_validator("groups")
    @classmethod
    def _unique_names(cls, groups: tuple[ProfileGroup, ...]) -> tuple[ProfileGroup, ...]:
        seen: set[str] = set()
        for group in groups:
            if group.name in seen:
                raise ValueError(f"group {group.name!r} comes twice; each group needs a name of its own")
            seen.add(group.name)
        return groups

    @field_validator("exit_s", "entry_s")
    @classmethod
    def _units_of_groups(cls, seconds: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        """Refuse entry or exit times of a unit on which no group runs."""
        units = {unit for group in info.data.get("groups", ()) for unit in group.costs}
        unknown = next((unit for unit in seconds if units and unit not in units), None)
        if unknown is not None:
            raise ValueError(f"no group runs on {unknown!r}; they run on {', '.join(sorted(units))}")
        return seconds

    @property
    def units(self) -> tuple[str, ...]:
        """Every unit that runs some group, in order of first mention."""
        return tuple(dict.fromkeys(unit for group in self.groups for unit in group.costs))

    def total_s(self, unit: str) -> float | None:
        """Seconds of the whole model on *unit*, without entry and exit; None if the unit cannot run all groups."""
        if any(unit not in group.costs for group in self.groups):
            return None
        return sum(group.costs[unit].time_s for group in self.groups)

    def task(self, name: str | None = None, *, after: Sequence[str] = (), repeats: int = 1) -> Task:
        """Make a task that runs the model *repeats* times after the tasks *after*; by default, named like the model."""
        groups = tuple(_group(group) for group in self.groups)
        entry, exit_ = dict(self.entry_s) or None, dict(self.exit_s) or None
        return Task(name or self.model, groups, tuple(after), repeats, entry, exit_)


def _group(group: ProfileGroup) -> Group:
    costs = {unit: UnitCost(**cost.model_dump()) for unit, cost in group.costs.items()}
    layers = (group.layers,) if isinstance(group.layers, str) else group.layers
    return Group(group.name, costs, group.leave, layers)


# Files


def read_soc_profile(path: str | Path) -> SocProfile:
    """Read the profile in a JSON file; raises ProfileError if the file or its content is unusable."""
    return parse_soc_profile(read_limited(path), str(path))


def write_soc_profile(profile: SocProfile, path: str | Path) -> None:
    """Write *profile* as JSON, without the keys that have their default values."""
    head = {"format": profile.format, "kind": profile.kind}
    write_json(path, head | profile.model_dump(mode="json", exclude_defaults=True))


def parse_soc_profile(raw: Any, where: str) -> SocProfile:
    """Make a profile from a parsed JSON file; *where* (a path) begins the message of a ProfileError."""
    if not isinstance(raw, dict) or raw.get("kind") != "soc-profile":
        kind = repr(raw.get("kind")) if isinstance(raw, dict) else "no object"
        raise ProfileError(f'{where}: is {shortened(kind)}; a profile for mapping is an object of kind "soc-profile"')
    try:
        return SocProfile.model_validate(raw)
    except ValidationError as error:
        problem = _group_of(raw, error) + first_problem(error, SocProfile, ProfileGroup, ProfileCost)
        # Keys of the file may hold control characters, which must not reach a terminal.
        raise ProfileError(f"{where}: {problem if problem.isprintable() else ascii(problem)[1:-1]}") from error


def read_limited(path: str | Path) -> Any:
    """Parse a JSON file; raises ProfileError if it cannot be read or has more than ``MAX_FILE_BYTES``."""
    try:
        size = Path(path).stat().st_size
    except (OSError, ValueError) as error:  # ValueError: a path with a zero in it
        raise ProfileError(f"{path!s}: cannot read the file: {reason_of(error)}") from error
    if size > MAX_FILE_BYTES:
        raise ProfileError(f"{path}: {size} bytes are too many for a profile; at most {MAX_FILE_BYTES}")
    return read_json(path, ProfileError)


def _group_of(raw: Mapping[str, Any], error: ValidationError) -> str:
    """The begin of an error message, "group 'name': ", if *error* is about a group that has a name; otherwise empty."""
    location = error.errors(include_url=False)[0]["loc"]
    if len(location) < 2 or location[0] != "groups" or not isinstance(location[1], int):
        return ""
    group = raw["groups"][location[1]]
    name = group.get("name") if isinstance(group, dict) else None
    return f"group {shortened(repr(name))}: " if isinstance(name, str) else ""


def shortened(text: str) -> str:
    """Cut *text* to 60 characters, for error messages."""
    return text if len(text) <= 60 else text[:57] + "..."


def readable(name: str) -> str:
    """Make *name* fit for a profile: escape what is not printable, cut it to ``MAX_NAME``; "unnamed" if it is empty."""
    plain = name if name.isprintable() else ascii(name)[1:-1]
    return (plain if len(plain) <= MAX_NAME else plain[: MAX_NAME - 3] + "...") or "unnamed"


def distinct(names: Sequence[str]) -> list[str]:
    """Make *names* unique: the second "a" becomes "a #2", unless another name is that already."""
    all_names, used, unique = set(names), set[str](), []
    last_number: dict[str, int] = {}
    for name in names:
        candidate = name
        while candidate in used or (candidate != name and candidate in all_names):
            last_number[name] = last_number.get(name, 1) + 1
            candidate = f"{name} #{last_number[name]}"
        used.add(candidate)
        unique.append(candidate)
    return unique


# Fewer groups


def merge_groups(profile: SocProfile, max_groups: int) -> SocProfile:
    """Merge neighbouring groups of *profile* until at most *max_groups* are left, the least useful boundary first.

    Least useful are boundaries at which the model may not change units; then boundaries between groups that run on the
    same units; then boundaries with little work on both sides and expensive moves. On a tie, the first in the model.
    Raises ProfileError if two groups that must be merged have no common unit.
    """
    if max_groups < 1:
        raise ProfileError(f"max_groups = {max_groups} must be at least 1")
    groups = list(profile.groups)
    if len(groups) <= max_groups:
        return profile
    ranks = [_usefulness(left, right) for left, right in pairwise(groups)]
    while len(groups) > max_groups:
        boundary = ranks.index(min(ranks))
        if not groups[boundary].costs.keys() & groups[boundary + 1].costs.keys():
            raise ProfileError(
                f"{profile.model}: cannot be merged to {max_groups} groups: no unit runs both "
                f"{groups[boundary].name!r} and {groups[boundary + 1].name!r}; allow {len(groups)}"
            )
        groups[boundary : boundary + 2] = [_join_groups(groups[boundary], groups[boundary + 1])]
        del ranks[boundary]
        for neighbour in (boundary - 1, boundary):
            if 0 <= neighbour < len(ranks):
                ranks[neighbour] = _usefulness(groups[neighbour], groups[neighbour + 1])
    names = distinct([group.name for group in groups])
    named = [group.model_copy(update={"name": name}) for group, name in zip(groups, names, strict=True)]
    units = {unit for group in named for unit in group.costs}
    entry_and_exit = {
        key: {unit: seconds for unit, seconds in getattr(profile, key).items() if unit in units}
        for key in ("entry_s", "exit_s")
    }
    return profile.model_copy(update={"groups": tuple(named), **entry_and_exit})


def _usefulness(left: ProfileGroup, right: ProfileGroup) -> tuple[bool, int, float]:
    """Rank of the boundary between two groups, least useful first; see ``merge_groups``.

    Whether the model may change units there; how many units the merged group would lose (very many if none would be
    left); and the work on both sides less the cost of the cheapest move, in seconds.
    """
    shared = left.costs.keys() & right.costs.keys()
    lost_units = len(left.costs) + len(right.costs) - 2 * len(shared) if shared else 2 * MAX_STEPS
    work_s = sum(min(cost.time_s for cost in side.costs.values()) for side in (left, right))
    moves_s = [
        left.costs[a].out_s + right.costs[b].in_s for a in sorted(left.costs) for b in sorted(right.costs) if a != b
    ]
    return left.leave, lost_units, work_s - min(moves_s, default=0.0)


def _join_groups(left: ProfileGroup, right: ProfileGroup) -> ProfileGroup:
    """Merge two neighbouring groups into one, on the units that run both."""
    name = f"{readable(left.name.split(' .. ')[0])} .. {readable(right.name.split(' .. ')[-1])}"
    try:
        costs = {unit: _sum_costs(left.costs[unit], right.costs[unit]) for unit in left.costs if unit in right.costs}
        return ProfileGroup(name=name, layers=_all_layers(left, right), leave=right.leave, costs=costs)
    except ValidationError as error:
        raise ProfileError(f"group {shortened(name)!r}: {first_problem(error)}") from error


def _sum_costs(left: ProfileCost, right: ProfileCost) -> ProfileCost:
    """The cost of two groups in a row on one unit; the demand is the mean over the time."""
    time_s = left.time_s + right.time_s
    moved_gb = left.time_s * left.demand_gb_s + right.time_s * right.demand_gb_s
    larger_gb_s = max(left.demand_gb_s, right.demand_gb_s)
    demand_gb_s = min(larger_gb_s, moved_gb / time_s) if time_s else larger_gb_s  # min: against rounding
    both_known = left.energy_j is not None and right.energy_j is not None
    energy_j = (left.energy_j or 0.0) + (right.energy_j or 0.0) if both_known else None
    return ProfileCost(time_s=time_s, demand_gb_s=demand_gb_s, in_s=left.in_s, out_s=right.out_s, energy_j=energy_j)


def _all_layers(left: ProfileGroup, right: ProfileGroup) -> tuple[str, ...] | str:
    """The layers of both groups; two ranges of numbers become one range."""
    if isinstance(left.layers, str) and isinstance(right.layers, str):
        first, last = left.layers.split("-"), right.layers.split("-")
        if len(first) == len(last) == 2:
            return f"{first[0]}-{last[1]}"
    sides = [(side.layers,) if isinstance(side.layers, str) else side.layers for side in (left, right)]
    return (*sides[0], *sides[1])
