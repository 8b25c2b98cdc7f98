"""Profiles measured by TensorRT: the files that ``trtexec --exportProfile`` writes, one for each unit.

Such a file is a list: the number of runs (``{"count": n}``; older versions leave it out), then for each kernel its
name, which joins the names of the layers inside ("conv1 + relu1"), and its time in milliseconds. The lists of two
units are laid side by side by these names: a model may change units where no kernel of any unit reaches across.
What a file does not say comes from elsewhere: moves from the SoC, demands from the caller or the model's bytes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from weft.base.errors import ProfileError, unknown_name
from weft.base.jsonfile import first_problem
from weft.devices import Soc
from weft.models import Model
from weft_map.estimate import LayerGroup, group_layers, kernels, move_s
from weft_map.profiles import (
    ProfileCost,
    ProfileGroup,
    SocProfile,
    distinct,
    merge_groups,
    read_limited,
    readable,
    shortened,
)

logger = logging.getLogger(__name__)

Demands = Mapping[str, Mapping[str, float]]
"""Unit -> name of a kernel or of a layer inside -> GB/s."""

MAX_RUNS = 10**12  # cap on a file's count of runs, which times are divided by

_REFORMAT = re.compile(r"^(Reformatting CopyNode|reformat)", re.IGNORECASE)
_ADDED = re.compile(
    r"^(\(Unnamed Layer\* \d+\) \[(Shuffle|Constant|Identity|Cast)\]|ONNXTRT_|\[\w+|"
    r"(copied_)?(reshape|squeeze|unsqueeze|shuffle|transpose)_(before|after|between)_)|( copy| reformatter \d+)$"
)
"""Kernels that TensorRT adds to a network: copies and changes of shape."""
_BLOB = "ForeignNode["
_JOINTS = re.compile(r"\s\+\s|\s\|\|\s|,\s|PWN\(|[()]")
"""Separators between the names of layers that run as one kernel."""


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """One kernel of a file, with the copies into its format."""

    name: str
    layers: frozenset[str]
    time_s: float


@dataclass(frozen=True, slots=True)
class _Placed:
    """A kernel on the common line: the places it covers, first and last."""

    unit: str
    entry: KernelEntry
    first: int
    last: int


def read_trtexec(
    files: Mapping[str, str | Path],
    model: Model | str,
    soc: Soc,
    *,
    demands: Demands | None = None,
    max_groups: int | None = None,
) -> SocProfile:
    """A measured profile of *model* from the files of its units (unit -> path).

    model: with its layers, groups are those of ``group_layers`` and demands missing from *demands* follow from its
    bytes; by name alone, groups are the kernels of the first file and missing demands are 0.
    """
    if not files:
        raise ProfileError("no trtexec profile was named; give one file for each unit, such as gpu=gpu.json")
    units = [unit.name for unit in soc.units]
    for unit in files:
        if unit not in units:
            raise ProfileError(f"{soc.name}: {unknown_name('unit', unit, units)}")
    entries = {unit: read_entries(path) for unit, path in files.items()}
    line = _Line.of(model, next(iter(entries.values())))
    placed = _place_kernels(entries, line, files)
    try:
        profile = _profile(placed, line, model, soc, demands or {})
    except ValidationError as error:
        raise ProfileError(f"{', '.join(map(str, files.values()))}: {first_problem(error)}") from error
    return profile if max_groups is None else merge_groups(profile, max_groups)


# One file


def read_entries(path: str | Path) -> list[KernelEntry]:
    """The kernels of one file in their order; a copy into another format counts to the kernel after it."""
    raw = read_limited(path)
    if not isinstance(raw, list):
        raise ProfileError(f"{path}: not a profile of trtexec, which is a list; write it with --exportProfile")
    runs = _runs(raw, path)
    entries: list[KernelEntry] = []
    waiting_s = 0.0
    for place, row in enumerate(raw):
        if isinstance(row, dict) and "name" not in row and "count" in row:
            continue
        name, time_s = _kernel(row, f"{path}: entry {place}", runs)
        if _REFORMAT.match(name):
            waiting_s += time_s
            continue
        entries.append(KernelEntry(name, _layers(name), time_s + waiting_s))
        waiting_s = 0.0
    if not entries:
        raise ProfileError(
            f"{path}: holds no kernel; run trtexec with --exportProfile and --profilingVerbosity=detailed"
        )
    if waiting_s:
        last = entries.pop()
        entries.append(KernelEntry(last.name, last.layers, last.time_s + waiting_s))
    return entries


def _runs(raw: list[Any], path: str | Path) -> int:
    count = next((row["count"] for row in raw if isinstance(row, dict) and "count" in row), 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_RUNS:
        raise ProfileError(f"{path}: count = {shortened(repr(count))} must be a whole number from 1 to {MAX_RUNS:g}")
    return count


def _kernel(row: Any, where: str, runs: int) -> tuple[str, float]:
    name = row.get("name") if isinstance(row, dict) else None
    if not isinstance(name, str) or not name:
        raise ProfileError(f"{where} has no name: {shortened(repr(row))}")
    shown = shortened(repr(name))
    if _BLOB in name and not _REFORMAT.match(name):
        raise ProfileError(
            f"{where}, {shown}, is one blob of many layers (all that the DLA runs in a row), so their times are not "
            "known; profile the layers one by one, or the network cut after each group and take differences, and "
            "write a soc-profile"
        )
    for key, parts in (("averageMs", 1), ("medianMs", 1), ("timeMs", runs)):
        if key in row:
            value = row[key]
            if isinstance(value, bool) or not isinstance(value, int | float) or not _sane(value):
                raise ProfileError(f"{where}, {shown}: {key} = {shortened(repr(value))} is not a time")
            return name, value / parts * 1e-3
    raise ProfileError(f"{where}, {shown}: has neither averageMs nor medianMs nor timeMs")


def _sane(value: float) -> bool:
    return 0 <= value <= 1e9 and isfinite(value)


def _layers(name: str) -> frozenset[str]:
    return frozenset(filter(None, (part.strip() for part in _JOINTS.split(name)))) | {name}


# Side by side


@dataclass(frozen=True, slots=True)
class _Line:
    """The places a kernel can cover, in the order of the model."""

    places: Mapping[str, int]
    """Name of a layer -> its place."""
    count: int
    groups: tuple[LayerGroup, ...]
    """The model's, one for each place, where it is known."""

    @classmethod
    def of(cls, model: Model | str, entries: Sequence[KernelEntry]) -> _Line:
        if isinstance(model, Model):
            groups = group_layers(model)
            places = {node: place for place, group in enumerate(groups) for node in group.nodes}
            places |= {layer.name: place for place, group in enumerate(groups) for layer in group.layers}
            return cls(places, len(groups), groups)
        names: dict[str, int] = {}
        for place, entry in enumerate(entries):
            for name in entry.layers:
                names.setdefault(name, place)
        return cls(names, len(entries), ())


def _place_kernels(
    entries: Mapping[str, Sequence[KernelEntry]], line: _Line, files: Mapping[str, str | Path]
) -> list[_Placed]:
    placed: list[_Placed] = []
    for unit, its in entries.items():
        known = [[line.places[name] for name in entry.layers if name in line.places] for entry in its]
        last = next((min(places) for places in known if places), None)
        if last is None:
            raise ProfileError(
                f"{files[unit]}: none of its {len(its)} kernels ({shortened(repr(its[0].name))}, ...) has a name that "
                "lays it beside the others; profile the same network with the same names on every unit"
            )
        if line.groups:
            _check_known(its, known, files[unit])
        for entry, places in zip(its, known, strict=True):
            # A kernel of no known layer (a copy, a shuffle) goes where the one before it ended.
            first, last = (min(places), max(places)) if places else (last, last)
            placed.append(_Placed(unit, entry, first, last))
    return placed


def _check_known(its: Sequence[KernelEntry], known: Sequence[Sequence[int]], path: str | Path) -> None:
    """Refuse the profile of another network: kernels that are named after none of the model's nodes."""
    strange = [entry for entry, places in zip(its, known, strict=True) if not places and not _ADDED.search(entry.name)]
    if strange:
        unmatched_s, total_s = (sum(entry.time_s for entry in chosen) for chosen in (strange, its))
        raise ProfileError(
            f"{path}: no node of the model is named as {shortened(repr(strange[0].name))} is; {len(strange)} of "
            f"{len(its)} kernels and {unmatched_s * 1e3:.3f} of {total_s * 1e3:.3f} ms match none; give the .onnx file "
            "that was profiled, or a bare name as --model"
        )


def _profile(placed: Sequence[_Placed], line: _Line, model: Model | str, soc: Soc, demands: Demands) -> SocProfile:
    spans = _spans(placed, line.count)
    inside: list[list[_Placed]] = [[] for _ in spans]
    at = {place: number for number, (here, there) in enumerate(spans) for place in range(here, there)}
    for kernel in placed:
        inside[at[kernel.first]].append(kernel)
    side = _Side.of(placed, line, soc, demands)
    groups = [
        side.group(inner, line.groups[here:there]) for inner, (here, there) in zip(inside, spans, strict=True) if inner
    ]
    titles = distinct([group.name for group in groups])
    moves = "transition_us and the bytes that cross" if line.groups else "transition_us alone"
    return SocProfile(
        model=readable(model.name if isinstance(model, Model) else model),
        soc=soc.name,
        origin="measured",
        source=f"times: trtexec; demands: {side.demands_from()}; moves: {moves}, by the description of {soc.name}",
        groups=tuple(group.model_copy(update={"name": title}) for group, title in zip(groups, titles, strict=True)),
    )


def _spans(placed: Sequence[_Placed], count: int) -> list[tuple[int, int]]:
    """Places joined wherever a kernel reaches from one to the next."""
    reach = list(range(count))
    for kernel in placed:
        reach[kernel.first] = max(reach[kernel.first], kernel.last)
    spans, here, far = [], 0, 0
    for place in range(count):
        far = max(far, reach[place])
        if far == place:
            spans.append((here, place + 1))
            here = far = place + 1
    return spans


@dataclass(frozen=True, slots=True)
class _Side:
    """The kernels of all units, from which the units and costs of a group follow."""

    names: Mapping[str, frozenset[str]]
    """Unit -> every layer in its file."""
    line: _Line
    soc: Soc
    demands: Demands

    @classmethod
    def of(cls, placed: Sequence[_Placed], line: _Line, soc: Soc, demands: Demands) -> _Side:
        names: dict[str, set[str]] = {}
        for kernel in placed:
            names.setdefault(kernel.unit, set()).update(kernel.entry.layers)
        side = cls({unit: frozenset(its) for unit, its in names.items()}, line, soc, demands)
        for unit in names:
            if unit not in demands and not line.groups:
                logger.warning("no demands are given for %s; they are taken as 0, so nothing there slows down", unit)
        return side

    def demands_from(self) -> str:
        given = [unit for unit in self.names if unit in self.demands]
        missing = [unit for unit in self.names if unit not in self.demands]
        parts = [f"given for {', '.join(given)}"] if given else []
        if missing:
            parts.append(
                ("the model's bytes over the time" if self.line.groups else "0") + f" for {', '.join(missing)}"
            )
        return ", ".join(parts)

    def group(self, run: Sequence[_Placed], layers: Sequence[LayerGroup]) -> ProfileGroup:
        units = self._able(run)
        out_s = move_s(layers[-1], self.soc) if layers else self.soc.transition_us * 1e-6
        costs = {}
        for unit in units:
            its = [kernel.entry for kernel in run if kernel.unit == unit]
            time_s = sum(entry.time_s for entry in its)
            costs[unit] = ProfileCost(time_s=time_s, demand_gb_s=self._demand_gb_s(unit, its, layers), out_s=out_s)
        named = [kernel.entry.name for kernel in run if kernel.unit == units[0]]
        inner = list(dict.fromkeys(node for group in layers for node in group.nodes)) or named
        title = readable(named[0]) if len(named) == 1 else f"{readable(named[0])} .. {readable(named[-1])}"
        return ProfileGroup(name=title, layers=tuple(map(readable, inner)), costs=costs)

    def _able(self, run: Sequence[_Placed]) -> list[str]:
        """The units with a part of every kernel that any unit has in this run of groups."""
        known = [kernel for kernel in run if not kernel.entry.layers.isdisjoint(self.line.places)]
        here = [unit for unit in self.names if any(kernel.unit == unit for kernel in run)]
        able = [u for u in here if all(not kernel.entry.layers.isdisjoint(self.names[u]) for kernel in known)]
        # Where each has a kernel that no other knows, the one with the most of them is believed.
        return able or [max(here, key=lambda unit: sum(kernel.unit == unit for kernel in known))]

    def _demand_gb_s(self, unit: str, its: Sequence[KernelEntry], layers: Sequence[LayerGroup]) -> float:
        time_s, peak_gb_s = sum(entry.time_s for entry in its), self.soc.bandwidth_gb_s
        if unit in self.demands:
            given = [entry.time_s * _demand_of(entry, self.demands[unit], unit, peak_gb_s) for entry in its]
            return min(sum(given) / time_s, peak_gb_s) if time_s else 0.0  # min: against rounding
        if not time_s:
            return 0.0
        bits = self.soc.element_bits
        parts = (kernel for group in layers for kernel in kernels(group.layers, batch=1, element_bits=bits))
        demand_gb_s = sum(kernel.moved_bytes for kernel in parts) / 1e9 / time_s
        if demand_gb_s > peak_gb_s:
            logger.warning(
                "the bytes of %s in %.3f ms on %s are %.0f GB/s, more than the memory has; taken as %g",
                shortened(repr(its[0].name)), time_s * 1e3, unit, demand_gb_s, peak_gb_s,
            )  # fmt: skip
        return min(demand_gb_s, peak_gb_s)


def _demand_of(entry: KernelEntry, demands: Mapping[str, float], unit: str, peak_gb_s: float) -> float:
    name = next((candidate for candidate in (entry.name, *sorted(entry.layers)) if candidate in demands), None)
    if name is None:
        logger.warning("no demand of %s on %s is given; it is taken as 0", shortened(repr(entry.name)), unit)
        return 0.0
    value = demands[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not _sane(value):
        raise ProfileError(f"demand of {shortened(repr(name))} on {unit} = {shortened(repr(value))} is not GB/s")
    if value > peak_gb_s:
        raise ProfileError(
            f"demand of {shortened(repr(name))} on {unit} = {value:g} GB/s is more than the memory's {peak_gb_s:g}; "
            "give what is asked for while the kernel runs alone"
        )
    return value
