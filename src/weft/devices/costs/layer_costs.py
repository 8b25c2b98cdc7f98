"""Profiles: the cost of each layer of a model on a device at a batch size.

Estimated from a model by a cost model (``estimate``), or read from a file that a user measured on a
chip of their own (``read_profile``); the file format is docs/formats.md.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from weft.base.errors import ModelError, ProfileError, WorkloadError
from weft.base.jsonfile import first_problem, printable, read_json, write_json
from weft.devices import Npu
from weft.devices.costs import DEFAULT_COST, CostModel, cost_model
from weft.models.layer import Gemm, Layer, Model

FORMAT = 1
"""Version of the file format."""
MAX_BYTES = 2**48
"""Largest size in a profile, 256 TiB; a file that states more is damaged."""
MAX_SECONDS = 1e6
"""Longest layer; twelve days, so that a file that states more has the wrong unit."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of a schedulable layer: time on the PE array, weights to fetch, and its largest activation."""

    name: str
    compute_s: float
    weight_bytes: int
    activation_bytes: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.compute_s) and 0 <= self.compute_s <= MAX_SECONDS):
            raise ProfileError(
                f"layer {self.name!r}: compute_s = {self.compute_s} is not a time from 0 to {MAX_SECONDS:g} s"
            )
        for key in ("weight_bytes", "activation_bytes"):
            if not 0 <= getattr(self, key) <= MAX_BYTES:
                raise ProfileError(
                    f"layer {self.name!r}: {key} = {getattr(self, key)} is not a size from 0 to 2^48 bytes"
                )
        if self.compute_s == 0 and self.weight_bytes == 0:
            raise ProfileError(
                f"layer {self.name!r} costs nothing: no compute time and no weights; merge it into a neighbour"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """The layers of one model, in order, as one device runs them for one batch size."""

    model: str
    device: str
    batch: int
    layers: tuple[LayerCost, ...]

    def __repr__(self) -> str:
        return f"Profile({self.model} on {self.device}, batch {self.batch}: {len(self.layers)} layers)"

    def __post_init__(self) -> None:
        if not self.layers:
            raise ProfileError(f"{self.model}: a profile needs at least one layer")
        if self.batch < 1:
            raise ProfileError(f"{self.model}: batch = {self.batch} must be at least 1")

    @property
    def compute_s(self) -> float:
        return math.fsum(layer.compute_s for layer in self.layers)

    @property
    def weight_bytes(self) -> int:
        return sum(layer.weight_bytes for layer in self.layers)

    @property
    def peak_activation_bytes(self) -> int:
        return max(layer.activation_bytes for layer in self.layers)


def estimate(model: Model, npu: Npu, *, batch: int = 1, cost: str = DEFAULT_COST) -> Profile:
    """Estimate the cost of each schedulable layer of a model on a device by the cost model named *cost*.

    A schedulable layer is a layer with weights together with the weightless layers after it (for the first, also
    those before it): weightless layers need the PE array but never the memory channel.
    """
    if batch < 1:
        raise WorkloadError(f"batch = {batch} must be at least 1")
    cycles = cost_model(cost)
    costs: list[LayerCost] = []
    pending: LayerCost | None = None  # weightless layers before the first that fetches
    for layer in model.layers:
        priced = _price(layer, npu, batch, cycles)
        if layer.kind == "embedding" and priced.weight_bytes > npu.chunk_bytes:
            pieces = cut(priced, npu.chunk_bytes)  # a streamed table is read piece by piece anyway
            costs.extend([_merge(pieces[0].name, pending, pieces[0]), *pieces[1:]] if pending else pieces)
            pending = None
        elif priced.weight_bytes == 0 and costs:
            costs[-1] = _merge(costs[-1].name, costs[-1], priced)
        elif priced.weight_bytes == 0:
            pending = _merge(priced.name, pending, priced) if pending else priced
        else:
            costs.append(_merge(priced.name, pending, priced) if pending else priced)
            pending = None
    if not costs:
        raise ModelError(f"{model.name}: no layer has weights, so there is nothing to fetch and nothing to weave")
    return Profile(model.name, npu.name, batch, tuple(costs))


def cut(layer: LayerCost, most_bytes: int) -> list[LayerCost]:
    """Cut a layer into nearly equal pieces, each of at most *most_bytes* of weights."""
    count = -(-layer.weight_bytes // most_bytes)
    ends = [layer.weight_bytes * i // count for i in range(count + 1)]
    return [
        LayerCost(
            f"{layer.name}[{i + 1}/{count}]", layer.compute_s / count, ends[i + 1] - ends[i], layer.activation_bytes
        )
        for i in range(count)
    ]


def spill(profile: Profile, share_bytes: int) -> Profile:
    """The profile with only *share_bytes* of the activation buffer.

    Activations that do not fit are written to memory and read back: each layer's ``weight_bytes`` grow by twice the
    overflow, which passes through the weight buffer like weights.
    """
    return replace(
        profile,
        layers=tuple(
            replace(layer, weight_bytes=layer.weight_bytes + 2 * max(0, layer.activation_bytes - share_bytes))
            for layer in profile.layers
        ),
    )


def spill_together(profiles: list[Profile], npu: Npu) -> list[Profile]:
    """Divide the activation buffer in proportion to each model's peak, and spill the overflow; unchanged if all fit."""
    total = sum(profile.peak_activation_bytes for profile in profiles)
    if total <= npu.activation_buffer_bytes:
        return profiles
    return [spill(p, p.peak_activation_bytes * npu.activation_buffer_bytes // total) for p in profiles]


def _price(layer: Layer, npu: Npu, batch: int, cycles: CostModel) -> LayerCost:
    """The cost of one layer: products by *cycles*, other layers by the vector unit's bytes per cycle."""
    bits = min(layer.activation_bits, npu.element_bits)
    touched_bytes = (layer.input_elements + layer.output_elements) * batch * bits / 8
    if layer.gemm:
        cycle_count = cycles(_batch_gemm(layer, batch), npu)
    else:
        cycle_count = max(1, math.ceil(touched_bytes / npu.vector_bytes_per_cycle))
    fetched_weights = layer.weights + layer.lookups * batch
    # the input of a weightless layer is the output of an earlier layer, where it was counted
    held_elements = max(layer.input_elements, layer.output_elements) if layer.weights else layer.output_elements
    return LayerCost(
        name=layer.name,
        compute_s=cycle_count / npu.clock_hz,
        weight_bytes=math.ceil(fetched_weights * min(layer.weight_bits, npu.element_bits) / 8),
        activation_bytes=math.ceil(held_elements * batch * bits / 8),
    )


def _batch_gemm(layer: Layer, batch: int) -> Gemm:
    """The layer's product for a batch: more rows if all samples share the weights, else one product per sample."""
    assert layer.gemm is not None
    if layer.reuses_weights:
        return replace(layer.gemm, m=layer.gemm.m * batch)
    return replace(layer.gemm, groups=layer.gemm.groups * batch)


def _merge(name: str, a: LayerCost, b: LayerCost) -> LayerCost:
    return LayerCost(
        name,
        a.compute_s + b.compute_s,
        a.weight_bytes + b.weight_bytes,
        max(a.activation_bytes, b.activation_bytes),
    )


Name = Annotated[str, Field(min_length=1), AfterValidator(printable)]


class _LayerFile(BaseModel, extra="forbid", strict=True):
    name: Name
    compute_s: Annotated[float, Field(strict=False, ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
    weight_bytes: Annotated[int, Field(ge=0, le=MAX_BYTES)]
    activation_bytes: Annotated[int, Field(ge=0, le=MAX_BYTES)] = 0


class _ProfileFile(BaseModel, extra="forbid", strict=True):
    format: Literal[1]
    model: Name
    device: str
    batch: Annotated[int, Field(ge=1)]
    layers: Annotated[list[_LayerFile], Field(min_length=1, max_length=1_000_000)]


def read_profile(path: str | Path) -> Profile:
    """Read a profile from a JSON file; raises ProfileError that names the first wrong value."""
    try:
        raw = _ProfileFile.model_validate(read_json(path, ProfileError))
    except ValidationError as error:
        raise ProfileError(f"{path}: {first_problem(error, _ProfileFile, _LayerFile)}") from error
    names = [entry.name for entry in raw.layers]
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ProfileError(f"{path}: two layers are called {duplicate!r}; give every layer a name of its own")
    for entry in raw.layers:
        if entry.weight_bytes == 0:
            raise ProfileError(
                f"{path}: layer {entry.name!r} has weight_bytes = 0; add its compute_s to the layer before it, "
                "since only layers that fetch weights are scheduled"
            )
    layers = tuple(LayerCost(e.name, e.compute_s, e.weight_bytes, e.activation_bytes) for e in raw.layers)
    return Profile(raw.model, raw.device, raw.batch, layers)


def profile_as_dict(profile: Profile) -> dict[str, Any]:
    """The content of a profile file: the fields of ``Profile`` and ``LayerCost`` and the version of the format."""
    return {"format": FORMAT, **asdict(profile), "layers": [asdict(layer) for layer in profile.layers]}


def write_profile(profile: Profile, path: str | Path) -> None:
    write_json(path, profile_as_dict(profile))
