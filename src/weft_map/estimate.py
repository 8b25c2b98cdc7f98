"""A profile estimated from a network and a description of a SoC: layers in groups, a roofline for each on every unit.

Groups are cut where a single activation crosses, never inside a fused kernel. A compiler fuses a convolution or
matrix product with the normalisation, addition, activation and pooling that follow it; changing the unit in between
would prevent that. The importer has already fused operations that read nothing but the product; this module fuses those
that read a second activation (a residual addition and what follows it) and pools.

A kernel takes the longer of its arithmetic (at the share of the peak that large products reach) and its memory traffic,
and a fixed cost. Additions and activations are part of the kernel before them, and a concatenation is written in place
by the kernels that feed it. For the ten networks of HaX-CoNN's Table 5 the mean error is 5 to 14 % with fitted
constants; an efficiency that falls with the size of a product was no more accurate and was left out.

``find_profile`` turns a name into a profile: from a file, from those that ship with the package, or by an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import pairwise

from pydantic import ValidationError

from weft.base.errors import ModelError, ProfileError
from weft.base.jsonfile import first_problem
from weft.devices import Soc, Unit
from weft.models import Layer, Model
from weft.models.operators import find
from weft_map.problem import MAX_STEPS
from weft_map.profiles import (
    Origin,
    ProfileCost,
    ProfileGroup,
    SocProfile,
    distinct,
    merge_groups,
    read_soc_profile,
    readable,
)

_MACS_PER_VALUE = 32
"""MACs that take about as long as moving one value: to compare the work of groups before a unit is known."""

_FUSES_POOL = ("conv", "gemm", "elementwise")
"""Kinds of layers into whose kernel a compiler can fuse a pool that follows."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Consecutive layers of a model, which run on one unit."""

    name: str
    layers: tuple[Layer, ...]
    output_elements: int
    """Values that pass to the next group, for one sample."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the network that the group computes; the layer's name for a layer that does not list any."""
        return tuple(dict.fromkeys(node for layer in self.layers for node in layer.nodes or (layer.name,)))

    @property
    def work(self) -> int:
        """MACs plus values moved, each counted as ``_MACS_PER_VALUE`` MACs."""
        moved = sum(layer.weights + layer.input_elements + layer.output_elements for layer in self.layers)
        return sum(layer.macs for layer in self.layers) + _MACS_PER_VALUE * moved


def group_layers(model: Model, *, max_groups: int | None = None) -> tuple[LayerGroup, ...]:
    """Cut *model* into groups, wherever only one activation crosses and no compiler would fuse across.

    Of more than *max_groups* groups, the neighbours with the least work are merged.
    """
    if max_groups is not None and max_groups < 1:
        raise ModelError(f"{model.name}: max_groups = {max_groups} must be at least 1")
    if not model.layers:
        raise ModelError(f"{model.name}: nothing in it takes time, so there is nothing to place")
    cuts = [0, *(end for end in model.block_ends if not _belong_together(model.layers, end)), len(model.layers)]
    elements_at_cuts = _elements_at_cuts(model)
    groups = [_group(model.layers[begin:end], elements_at_cuts.get(end)) for begin, end in pairwise(cuts)]
    return tuple(groups) if max_groups is None else _merge_layer_groups(groups, max_groups)


def _merge_layer_groups(groups: list[LayerGroup], max_groups: int) -> tuple[LayerGroup, ...]:
    """Merge the two neighbours with the least work together, the first pair on a tie, until *max_groups* are left."""
    work = [group.work for group in groups]
    spans = [(first, first + 1) for first in range(len(groups))]
    while len(spans) > max_groups:
        pair_work = [left + right for left, right in pairwise(work)]
        first = pair_work.index(min(pair_work))
        work[first : first + 2] = [pair_work[first]]
        spans[first : first + 2] = [(spans[first][0], spans[first + 1][1])]
    return tuple(
        _group(tuple(layer for group in groups[begin:end] for layer in group.layers), groups[end - 1].output_elements)
        for begin, end in spans
    )


def follows(layer: Layer, before: Layer) -> bool:
    """Whether a compiler fuses *layer* into *before*: an elementwise operation on the values that *before* writes."""
    return layer.kind == "elementwise" and find(layer.op).fuses and layer.output_elements == before.output_elements


def _belong_together(layers: tuple[Layer, ...], end: int) -> bool:
    """Whether a compiler would fuse the layers on both sides of the cut before layer number *end*."""
    before, after = layers[end - 1], layers[end]
    return follows(after, before) or (after.kind == "pool" and before.kind in _FUSES_POOL)


def _elements_at_cuts(model: Model) -> dict[int, int]:
    """End of a block (number of the layer after it) -> elements of the activation that leaves it, for one sample."""
    sizes = (positions * channels for positions, channels in model.block_shapes)
    return dict(zip(model.block_ends, sizes, strict=False))  # a model may have no block_shapes


def _group(layers: tuple[Layer, ...], output_elements: int | None) -> LayerGroup:
    """The group of *layers*; *output_elements*: None: those of its last layer."""
    first_name, last_name = layers[0].name, layers[-1].name
    elements = layers[-1].output_elements if output_elements is None else output_elements
    return LayerGroup(first_name if len(layers) == 1 else f"{first_name} .. {last_name}", layers, elements)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A layer and the operations that are fused into it, for one batch."""

    layer: Layer
    macs: int
    moved_bytes: float
    """Weights, inputs and outputs, each once."""
    ops: frozenset[str]
    """Operators and kinds of layers inside; a unit may not support some."""


def estimate(model: Model, soc: Soc, *, batch: int = 1, max_groups: int | None = None) -> SocProfile:
    """Estimate the profile of *model* on *soc*; a group has costs on every unit that supports all its operators.

    max_groups: merge neighbouring groups until at most this many are left (``merge_groups``). Raises ProfileError if
    a unit has no ``peak_tflops`` or a group runs on no unit.
    """
    if batch < 1:
        raise ProfileError(f"{model.name}: batch = {batch} must be at least 1")
    for unit in soc.units:
        if unit.peak_tflops is None:
            raise ProfileError(
                f"{soc.name}: unit {unit.name} has no peak_tflops to estimate {model.name} by; add it to the SoC's "
                "description, or name a profile (.json)"
            )
    try:
        profile = _estimate_all_groups(model, soc, batch)
    except ValidationError as error:
        raise ProfileError(f"{model.name} on {soc.name}: {first_problem(error)}; look at its units") from error
    return profile if max_groups is None else merge_groups(profile, max_groups)


def _estimate_all_groups(model: Model, soc: Soc, batch: int) -> SocProfile:
    groups = group_layers(model, max_groups=MAX_STEPS)
    names = distinct([readable(group.name) for group in groups])
    profile_groups = [_profile_group(name, group, model, soc, batch) for name, group in zip(names, groups, strict=True)]
    name = readable(model.name)
    return SocProfile(
        model=name,
        soc=soc.name,
        origin="estimated",
        source=f"roofline of {name} at batch {batch} from the description of {soc.name}",
        precision=f"{soc.element_bits} bits",
        groups=tuple(profile_groups),
    )


def kernels(layers: tuple[Layer, ...], *, batch: int, element_bits: int) -> list[Kernel]:
    """Return the kernels that a compiler fuses *layers* into."""
    fused: list[Kernel] = []
    previous: Layer | None = None
    for layer in layers:
        if fused and previous is not None and follows(layer, previous):
            fused[-1] = _with_follower(fused[-1], layer, previous, batch, element_bits)
        else:
            fused.append(_kernel(layer, batch, element_bits))
        previous = layer
    return fused


def move_s(group: LayerGroup, soc: Soc, *, batch: int = 1) -> float:
    """Seconds of a move to another unit after *group*: its output is written and read again, at the full bandwidth."""
    bits = min(group.layers[-1].activation_bits, soc.element_bits)
    crossing_bytes = batch * group.output_elements * bits / 8
    return soc.transition_us * 1e-6 + crossing_bytes / (soc.bandwidth_gb_s * 1e9 / 2)


def _kernel(layer: Layer, batch: int, element_bits: int) -> Kernel:
    """The kernel of *layer* alone; wider values are stored in *element_bits* bits."""
    weight_bytes, value_bytes = min(layer.weight_bits, element_bits) / 8, min(layer.activation_bits, element_bits) / 8
    elements = 0 if _is_in_place(layer) else layer.input_elements + layer.output_elements
    moved_bytes = layer.weights * weight_bytes + batch * (layer.lookups * weight_bytes + elements * value_bytes)
    return Kernel(layer, batch * layer.macs, moved_bytes, frozenset((layer.kind, *layer.op.split("+"))))


def _with_follower(kernel: Kernel, layer: Layer, before: Layer, batch: int, element_bits: int) -> Kernel:
    """Fuse *layer* into *kernel*, whose last layer is *before*.

    The output of *layer* has the size of the kernel's and replaces it; its inputs other than *before*'s output are
    additional traffic.
    """
    other_inputs = max(0, layer.input_elements - before.output_elements)
    moved_bytes = kernel.moved_bytes + batch * other_inputs * min(layer.activation_bits, element_bits) / 8
    return Kernel(kernel.layer, kernel.macs, moved_bytes, kernel.ops | {layer.kind, layer.op})


def _is_in_place(layer: Layer) -> bool:
    """Whether the layer takes no time, because the kernels that feed it write its output: a concatenation."""
    return layer.op == "Concat"


def _profile_group(name: str, group: LayerGroup, model: Model, soc: Soc, batch: int) -> ProfileGroup:
    """The profile of one group: its cost on each unit that supports all its operators."""
    group_kernels = kernels(group.layers, batch=batch, element_bits=soc.element_bits)
    out_s = move_s(group, soc, batch=batch)
    able = [unit for unit in soc.units if not _refused_operators(group_kernels, unit)]
    costs = {unit.name: _cost(group_kernels, unit, soc, out_s) for unit in able}
    if not costs:
        refused = "; ".join(
            f"{unit.name} refuses {', '.join(sorted(_refused_operators(group_kernels, unit)))}" for unit in soc.units
        )
        raise ProfileError(f"{model.name}: no unit of {soc.name} runs group {name!r}: {refused}")
    return ProfileGroup(name=name, layers=tuple(map(readable, group.nodes)), costs=costs)


def _refused_operators(group_kernels: list[Kernel], unit: Unit) -> set[str]:
    """Operators and kinds of layers in *group_kernels* that *unit* does not support."""
    return {op for kernel in group_kernels for op in kernel.ops if op in unit.refuses}


def _cost(group_kernels: list[Kernel], unit: Unit, soc: Soc, out_s: float) -> ProfileCost:
    """The cost of *group_kernels* in a row on *unit*; *out_s*: seconds of a move to another unit afterwards."""
    time_s = sum(_time_s(kernel, unit, soc) for kernel in group_kernels)
    moved_gb = sum(kernel.moved_bytes for kernel in group_kernels) / 1e9
    demand_gb_s = min(moved_gb / time_s, soc.bandwidth_gb_s) if time_s else 0.0
    energy_j = unit.power_w * time_s if unit.power_w is not None else None
    return ProfileCost(time_s=time_s, demand_gb_s=demand_gb_s, out_s=out_s, energy_j=energy_j)


def _time_s(kernel: Kernel, unit: Unit, soc: Soc) -> float:
    """Roofline: arithmetic or memory traffic, whichever takes longer, plus the unit's fixed time per kernel."""
    if _is_in_place(kernel.layer):
        return 0.0
    reached_flops = (unit.peak_tflops or 0.0) * 1e12 * unit.efficiency
    bandwidth_bytes_s = min(unit.bandwidth_gb_s or soc.bandwidth_gb_s, soc.bandwidth_gb_s) * 1e9
    return max(2 * kernel.macs / reached_flops, kernel.moved_bytes / bandwidth_bytes_s) + unit.launch_us * 1e-6


SHIPPED_ORIGINS: tuple[Origin, ...] = ("measured", "derived")
"""The kinds of profiles that ship with the package, in order of preference."""


def shipped_profiles(soc: str) -> dict[str, tuple[Origin, ...]]:
    """Model -> origins of its profiles on *soc* that ship with the package, the preferred origin first."""
    origins: dict[str, list[Origin]] = {}
    folder = next((child for child in _profiles_folder().iterdir() if child.name == soc and child.is_dir()), None)
    names = [entry.name for entry in folder.iterdir()] if folder else []
    for origin in SHIPPED_ORIGINS:
        for name in sorted(names):
            if name.endswith(f".{origin}.json"):
                origins.setdefault(name.removesuffix(f".{origin}.json"), []).append(origin)
    return {model: tuple(origins[model]) for model in sorted(origins)}


def _profiles_folder() -> Traversable:
    return resources.files("weft_map") / "data" / "profiles"


@lru_cache(maxsize=256)
def _read_shipped(soc: str, model: str, origin: Origin) -> SocProfile:
    path = _profiles_folder() / soc / f"{model}.{origin}.json"
    with resources.as_file(path) as file:
        return read_soc_profile(file)


def find_profile(
    model: str,
    soc: Soc,
    *,
    origin: Origin | None = None,
    max_groups: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> SocProfile:
    """Find the profile of *model* on *soc*: the .json file that it names, else a shipped profile, else an estimate.

    origin: accept only a profile of this origin. max_groups: merge neighbouring groups until at most this many are
    left. shapes: input -> shape; with them the profile is estimated. Raises ProfileError if no profile fits.
    """
    if max_groups is not None and max_groups < 1:
        raise ProfileError(f"max_groups = {max_groups} must be at least 1")
    if model.endswith(".json"):
        if shapes:
            raise ProfileError(f"{model}: a profile is for one size of input; leave its shapes out, or name the model")
        profile = _from_file(model, soc, origin)
    else:
        profile = _shipped_or_estimated(model, soc, origin, max_groups, shapes)
    return profile if max_groups is None else merge_groups(profile, max_groups)


def _from_file(path: str, soc: Soc, origin: Origin | None) -> SocProfile:
    """Read a profile from a file, and check that it is for *soc* and of *origin* (None: of any)."""
    profile = read_soc_profile(path)
    if profile.soc != soc.name:
        raise ProfileError(
            f"{path}: a profile for {profile.soc}, and models are mapped to {soc.name}; take that SoC, or set its soc "
            f"to {soc.name!r} if its numbers hold there"
        )
    if origin is not None and profile.origin != origin:
        raise ProfileError(f"{path}: the profile is {profile.origin}, not {origin}")
    return profile


def _shipped_or_estimated(
    model: str, soc: Soc, origin: Origin | None, max_groups: int | None, shapes: Mapping[str, tuple[int, ...]] | None
) -> SocProfile:
    """The shipped profile of *model* and *origin* (None: any) if it exists and *shapes* is None, else an estimate."""
    origins = shipped_profiles(soc.name).get(model, ())
    # A profile is for one size of input; with shapes the caller asks for another.
    shipped_origin = next((candidate for candidate in origins if shapes is None and origin in (None, candidate)), None)
    if shipped_origin is not None:
        return _read_shipped(soc.name, model, shipped_origin)
    if origin in SHIPPED_ORIGINS:
        listed = ", ".join(f"{name} ({' and '.join(kinds)})" for name, kinds in shipped_profiles(soc.name).items())
        raise ProfileError(f"no {origin} profile of {model} on {soc.name} is shipped; there are: {listed or 'none'}")
    return _estimate_by_name(model, soc, max_groups, shapes)


def _estimate_by_name(
    model: str, soc: Soc, max_groups: int | None, shapes: Mapping[str, tuple[int, ...]] | None
) -> SocProfile:
    # Imported here, because it needs onnx, and a profile from a file does not.
    from weft.models.sources import load_model

    return estimate(load_model(model, shapes=shapes), soc, max_groups=max_groups)
