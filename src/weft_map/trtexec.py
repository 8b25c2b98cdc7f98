"""Profiles measured by TensorRT: the files that ``trtexec --exportProfile`` writes, one for each unit.

Such a file is a list: the number of runs (``{"count": n}``; older versions omit it), then for each kernel its name,
which joins the names of the layers inside ("conv1 + relu1"), and its time in milliseconds. The kernels of all units are
aligned by these names: a model may change units where no kernel of any unit spans both sides. The files do not contain
the cost of moves, which comes from the SoC, or memory demands, which come from the caller or the model's bytes.
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

_REFORMAT = re.compile(r"^(Reformatting CopyNode|reformat)", re.IGNORECASE)  # copies into another data format
_ADDED_KERNEL = re.compile(
    r"^(\(Unnamed Layer\* \d+\) \[(Shuffle|Constant|Identity|Cast)\]|ONNXTRT_|\[\w+|"
    r"(copied_)?(reshape|squeeze|unsqueeze|shuffle|transpose)_(before|after|between)_)|( copy| reformatter \d+)$"
)
"""Kernels that TensorRT adds to a network: copies and changes of shape."""
_MERGED_LAYERS = "ForeignNode["
"""In the name of a kernel that runs many layers as one, as on the DLA."""
_SEPARATORS = re.compile(r"\s\+\s|\s\|\|\s|,\s|PWN\(|[()]")
"""Separators between the names of layers that run as one kernel."""


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """One kernel of a file; its time includes the copies into its data format before it."""

    name: str
    layers: frozenset[str]
    """Names of the layers inside, and the kernel's name itself."""
    time_s: float


@dataclass(frozen=True, slots=True)
class _PlacedKernel:
    """A kernel of a unit, with the range of places (see ``_Alignment``) that it covers, *last* included."""

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
    """Make a measured profile of *model* from one file per unit (*files*: unit -> path).

    model: a ``Model`` gives the groups (``group_layers``), and demands that *demands* lacks follow from its bytes. With
    a name only, the groups are the kernels of the first file, and missing demands are 0. max_groups: merge neighbouring
    groups until at most this many are left. Raises ProfileError.
    """
    if not files:
        raise ProfileError("no trtexec profile was named; give one file for each unit, such as gpu=gpu.json")
    units = [unit.name for unit in soc.units]
    for unit in files:
        if unit not in units:
            raise ProfileError(f"{soc.name}: {unknown_name('unit', unit, units)}")
    entries = {unit: read_entries(path) for unit, path in files.items()}
    alignment = _Alignment.of(model, next(iter(entries.values())))
    placed = _place_kernels(entries, alignment, files)
    try:
        profile = _profile(placed, alignment, model, soc, demands or {})
    except ValidationError as error:
        raise ProfileError(f"{', '.join(map(str, files.values()))}: {first_problem(error)}") from error
    return profile if max_groups is None else merge_groups(profile, max_groups)


# One file


def read_entries(path: str | Path) -> list[KernelEntry]:
    """Read the kernels of one file in order; the time of a copy into another format is added to the next kernel."""
    raw = read_limited(path)
    if not isinstance(raw, list):
        raise ProfileError(f"{path}: not a profile of trtexec, which is a list; write it with --exportProfile")
    runs = _runs(raw, path)
    entries: list[KernelEntry] = []
    copies_s = 0.0
    for place, row in enumerate(raw):
        if isinstance(row, dict) and "name" not in row and "count" in row:
            continue
        name, time_s = _parse_kernel(row, f"{path}: entry {place}", runs)
        if _REFORMAT.match(name):
            copies_s += time_s
            continue
        entries.append(KernelEntry(name, _layers(name), time_s + copies_s))
        copies_s = 0.0
    if not entries:
        raise ProfileError(
            f"{path}: holds no kernel; run trtexec with --exportProfile and --profilingVerbosity=detailed"
        )
    if copies_s:
        last = entries.pop()
        entries.append(KernelEntry(last.name, last.layers, last.time_s + copies_s))
    return entries


def _runs(raw: list[Any], path: str | Path) -> int:
    """The number of runs that the times in the file are summed over; 1 if the file does not say."""
    count = next((row["count"] for row in raw if isinstance(row, dict) and "count" in row), 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_RUNS:
        raise ProfileError(f"{path}: count = {shortened(repr(count))} must be a whole number from 1 to {MAX_RUNS:g}")
    return count


def _parse_kernel(row: Any, where: str, runs: int) -> tuple[str, float]:
    """The name and the seconds of one kernel; *where* begins the message of a ProfileError."""
    name = row.get("name") if isinstance(row, dict) else None
    if not isinstance(name, str) or not name:
        raise ProfileError(f"{where} has no name: {shortened(repr(row))}")
    quoted = shortened(repr(name))
    if _MERGED_LAYERS in name and not _REFORMAT.match(name):
        raise ProfileError(
            f"{where}, {quoted}, is one blob of many layers (all that the DLA runs in a row), so their times are not "
            "known; profile the layers one by one, or the network cut after each group and take differences, and "
            "write a soc-profile"
        )
    for key, divisor in (("averageMs", 1), ("medianMs", 1), ("timeMs", runs)):
        if key in row:
            value = row[key]
            if isinstance(value, bool) or not isinstance(value, int | float) or not _is_plausible(value):
                raise ProfileError(f"{where}, {quoted}: {key} = {shortened(repr(value))} is not a time")
            return name, value / divisor * 1e-3
    raise ProfileError(f"{where}, {quoted}: has neither averageMs nor medianMs nor timeMs")


def _is_plausible(value: float) -> bool:
    return 0 <= value <= 1e9 and isfinite(value)


def _layers(name: str) -> frozenset[str]:
    """The names of the layers that a kernel's name joins, and that name itself."""
    return frozenset(filter(None, (part.strip() for part in _SEPARATORS.split(name)))) | {name}


# Alignment of all files


@dataclass(frozen=True, slots=True)
class _Alignment:
    """The common sequence of places to which the kernels of all units are assigned, in the order of the model.

    A place is a group of the model, or a kernel of the first file if only the model's name is known.
    """

    places: Mapping[str, int]
    """Name of a layer -> its place."""
    count: int
    """The number of places."""
    groups: tuple[LayerGroup, ...]
    """The model's group at each place; empty if only its name is known."""

    @classmethod
    def of(cls, model: Model | str, entries: Sequence[KernelEntry]) -> _Alignment:
        """The places of *model*'s groups, or those of *entries* (the first file) if *model* is only a name."""
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
    entries: Mapping[str, Sequence[KernelEntry]], alignment: _Alignment, files: Mapping[str, str | Path]
) -> list[_PlacedKernel]:
    """Assign places to every kernel by the names of its layers; *files* (unit -> path) is for messages."""
    placed: list[_PlacedKernel] = []
    for unit, kernels_of_unit in entries.items():
        places_of_kernels = [
            [alignment.places[name] for name in entry.layers if name in alignment.places] for entry in kernels_of_unit
        ]
        # Kernels before the first one with a known layer get the place of that one.
        last = next((min(places) for places in places_of_kernels if places), None)
        if last is None:
            count, example = len(kernels_of_unit), shortened(repr(kernels_of_unit[0].name))
            raise ProfileError(
                f"{files[unit]}: none of its {count} kernels ({example}, ...) has a name that "
                "lays it beside the others; profile the same network with the same names on every unit"
            )
        if alignment.groups:
            _check_known(kernels_of_unit, places_of_kernels, files[unit])
        for entry, places in zip(kernels_of_unit, places_of_kernels, strict=True):
            # A kernel without a known layer (a copy, a shuffle) gets the last place of the kernel before it.
            first, last = (min(places), max(places)) if places else (last, last)
            placed.append(_PlacedKernel(unit, entry, first, last))
    return placed


def _check_known(entries: Sequence[KernelEntry], places_of_kernels: Sequence[Sequence[int]], path: str | Path) -> None:
    """Refuse the profile of another network: one with kernels named after none of the model's nodes.

    places_of_kernels: the places of each kernel in *entries*. Kernels that TensorRT adds by itself are allowed.
    """
    unknown = [
        entry
        for entry, places in zip(entries, places_of_kernels, strict=True)
        if not places and not _ADDED_KERNEL.search(entry.name)
    ]
    if unknown:
        unmatched_s, total_s = (sum(entry.time_s for entry in listed) for listed in (unknown, entries))
        raise ProfileError(
            f"{path}: no node of the model is named as {shortened(repr(unknown[0].name))} is; {len(unknown)} of "
            f"{len(entries)} kernels and {unmatched_s * 1e3:.3f} of {total_s * 1e3:.3f} ms match none; give the .onnx "
            "file that was profiled, or a bare name as --model"
        )


def _profile(
    placed: Sequence[_PlacedKernel], alignment: _Alignment, model: Model | str, soc: Soc, demands: Demands
) -> SocProfile:
    """Make the profile: one group per span of places (``_spans``), with the kernels inside."""
    spans = _spans(placed, alignment.count)
    kernels_of_span: list[list[_PlacedKernel]] = [[] for _ in spans]
    span_of_place = {place: number for number, (begin, end) in enumerate(spans) for place in range(begin, end)}
    for kernel in placed:
        kernels_of_span[span_of_place[kernel.first]].append(kernel)
    maker = _GroupMaker.of(placed, alignment, soc, demands)
    groups = [
        maker.group(inside, alignment.groups[begin:end])
        for inside, (begin, end) in zip(kernels_of_span, spans, strict=True)
        if inside
    ]
    titles = distinct([group.name for group in groups])
    moves = "transition_us and the bytes that cross" if alignment.groups else "transition_us alone"
    return SocProfile(
        model=readable(model.name if isinstance(model, Model) else model),
        soc=soc.name,
        origin="measured",
        source=f"times: trtexec; demands: {maker.describe_demands()}; moves: {moves}, by the description of {soc.name}",
        groups=tuple(group.model_copy(update={"name": title}) for group, title in zip(groups, titles, strict=True)),
    )


def _spans(placed: Sequence[_PlacedKernel], count: int) -> list[tuple[int, int]]:
    """The shortest ranges of places [begin, end) such that no kernel covers places of two ranges."""
    reach = list(range(count))  # [place]: the last place of any kernel that begins there
    for kernel in placed:
        reach[kernel.first] = max(reach[kernel.first], kernel.last)
    spans, begin, furthest = [], 0, 0
    for place in range(count):
        furthest = max(furthest, reach[place])
        if furthest == place:
            spans.append((begin, place + 1))
            begin = furthest = place + 1
    return spans


@dataclass(frozen=True, slots=True)
class _GroupMaker:
    """Makes the groups of the profile: which units can run a group, and at what cost."""

    layers_of_unit: Mapping[str, frozenset[str]]
    """Unit -> names of all layers in its file."""
    alignment: _Alignment
    soc: Soc
    demands: Demands

    @classmethod
    def of(cls, placed: Sequence[_PlacedKernel], alignment: _Alignment, soc: Soc, demands: Demands) -> _GroupMaker:
        """Collect the layers of each unit, and warn of units whose demands are unknown."""
        layers_of_unit: dict[str, set[str]] = {}
        for kernel in placed:
            layers_of_unit.setdefault(kernel.unit, set()).update(kernel.entry.layers)
        maker = cls({unit: frozenset(layers) for unit, layers in layers_of_unit.items()}, alignment, soc, demands)
        for unit in layers_of_unit:
            # with the model's groups, demands that are not given follow from the bytes that they move
            if unit not in demands and not alignment.groups:
                logger.warning("no demands are given for %s; they are taken as 0, so nothing there slows down", unit)
        return maker

    def describe_demands(self) -> str:
        """Say for the profile's ``source`` where the demands of each unit come from."""
        given = [unit for unit in self.layers_of_unit if unit in self.demands]
        missing = [unit for unit in self.layers_of_unit if unit not in self.demands]
        texts = [f"given for {', '.join(given)}"] if given else []
        if missing:
            texts.append(
                ("the model's bytes over the time" if self.alignment.groups else "0") + f" for {', '.join(missing)}"
            )
        return ", ".join(texts)

    def group(self, inside: Sequence[_PlacedKernel], layers: Sequence[LayerGroup]) -> ProfileGroup:
        """Make the group of the kernels *inside* a span of places; *layers*: the model's groups there, if known."""
        units = self._able_units(inside)
        out_s = move_s(layers[-1], self.soc) if layers else self.soc.transition_us * 1e-6
        costs = {}
        for unit in units:
            entries = [kernel.entry for kernel in inside if kernel.unit == unit]
            time_s, demand_gb_s = sum(entry.time_s for entry in entries), self._demand_gb_s(unit, entries, layers)
            costs[unit] = ProfileCost(time_s=time_s, demand_gb_s=demand_gb_s, out_s=out_s)
        names = [kernel.entry.name for kernel in inside if kernel.unit == units[0]]
        layer_names = list(dict.fromkeys(node for group in layers for node in group.nodes)) or names
        title = readable(names[0]) if len(names) == 1 else f"{readable(names[0])} .. {readable(names[-1])}"
        return ProfileGroup(name=title, layers=tuple(map(readable, layer_names)), costs=costs)

    def _able_units(self, inside: Sequence[_PlacedKernel]) -> list[str]:
        """The units that can run the whole group: those whose file has a layer of every kernel *inside*."""
        known_kernels = [kernel for kernel in inside if not kernel.entry.layers.isdisjoint(self.alignment.places)]
        present = [unit for unit in self.layers_of_unit if any(kernel.unit == unit for kernel in inside)]
        able = [
            unit for unit in present if all(kernel.entry.layers & self.layers_of_unit[unit] for kernel in known_kernels)
        ]
        # If every unit lacks some kernel, the unit with the most kernels is taken to run the whole group.
        return able or [max(present, key=lambda unit: sum(kernel.unit == unit for kernel in known_kernels))]

    def _demand_gb_s(self, unit: str, entries: Sequence[KernelEntry], layers: Sequence[LayerGroup]) -> float:
        """The mean demand of *entries*, the group's kernels on *unit*: as given, else the model's bytes over the time.

        It is at most the bandwidth of the SoC; 0 if neither demands nor the model's layers are known.
        """
        time_s, peak_gb_s = sum(entry.time_s for entry in entries), self.soc.bandwidth_gb_s
        if unit in self.demands:
            given_gb = [entry.time_s * _demand_of(entry, self.demands[unit], unit, peak_gb_s) for entry in entries]
            return min(sum(given_gb) / time_s, peak_gb_s) if time_s else 0.0  # min: against rounding
        if not time_s:
            return 0.0
        bits = self.soc.element_bits
        kernels_of_layers = (kernel for group in layers for kernel in kernels(group.layers, batch=1, element_bits=bits))
        demand_gb_s = sum(kernel.moved_bytes for kernel in kernels_of_layers) / 1e9 / time_s
        if demand_gb_s > peak_gb_s:
            logger.warning(
                "the bytes of %s in %.3f ms on %s are %.0f GB/s, more than the memory has; taken as %g",
                shortened(repr(entries[0].name)), time_s * 1e3, unit, demand_gb_s, peak_gb_s,
            )  # fmt: skip
        return min(demand_gb_s, peak_gb_s)


def _demand_of(entry: KernelEntry, demands: Mapping[str, float], unit: str, peak_gb_s: float) -> float:
    """The given demand of a kernel in GB/s, by its name or by a layer's; 0 with a warning if none is given."""
    name = next((candidate for candidate in (entry.name, *sorted(entry.layers)) if candidate in demands), None)
    if name is None:
        logger.warning("no demand of %s on %s is given; it is taken as 0", shortened(repr(entry.name)), unit)
        return 0.0
    value = demands[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_plausible(value):
        raise ProfileError(f"demand of {shortened(repr(name))} on {unit} = {shortened(repr(value))} is not GB/s")
    if value > peak_gb_s:
        raise ProfileError(
            f"demand of {shortened(repr(name))} on {unit} = {value:g} GB/s is more than the memory's {peak_gb_s:g}; "
            "give what is asked for while the kernel runs alone"
        )
    return value
