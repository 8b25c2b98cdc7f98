"""The subject of a search: the layers of a network whose weights and inputs may change their number format."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from weft.base.errors import TuneError, unknown_name

Role = Literal["weight", "input"]
ROLES: tuple[Role, ...] = ("weight", "input")


@dataclass(frozen=True, slots=True)
class Target:
    """One layer, or several branches that share its formats; counts are sums over the branches."""

    name: str
    weights: int
    """The number of weights."""
    inputs: int
    """Number of values that enter the layer for one sample."""
    weight_max: float
    """The largest magnitude among the weights."""
    input_max: float
    macs: int = 0
    """Multiplications for one sample."""
    branches: tuple[str, ...] = ()
    """The layers that share its formats; without any, the target is itself a layer."""

    def __post_init__(self) -> None:
        for layer in self.layers:
            if not layer.isprintable() or " " in layer or "#" in layer or "//" in layer or not layer:
                raise TuneError(
                    f"layer {layer!r}: a name must have no blank, # or //: a file of formats could not say it"
                )
        for key in ("weights", "inputs", "macs"):
            if getattr(self, key) < 0:
                raise TuneError(f"layer {self.name!r}: {key} = {getattr(self, key)} must not be negative")
        for key in ("weight_max", "input_max"):
            if not (math.isfinite(getattr(self, key)) and getattr(self, key) >= 0):
                raise TuneError(f"layer {self.name!r}: {key} = {getattr(self, key)} is not the size of a number")

    @property
    def layers(self) -> tuple[str, ...]:
        return self.branches or (self.name,)

    def size(self, role: Role) -> int:
        return self.weights if role == "weight" else self.inputs

    def largest(self, role: Role) -> float:
        return self.weight_max if role == "weight" else self.input_max

    def objects(self, role: Role) -> tuple[str, ...]:
        """Names in a configuration: ``conv1.weight``, ``conv1.input``."""
        return tuple(f"{layer}.{role}" for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Network:
    """The targets of one network, in the order in which they are computed."""

    name: str
    targets: tuple[Target, ...]

    def __post_init__(self) -> None:
        if not self.targets:
            raise TuneError(f"{self.name}: no layer to tune")
        names = self.layers
        if twice := {name for name in names if names.count(name) > 1}:
            raise TuneError(f"{self.name}: layer {min(twice)!r} is listed twice")
        for target in self.targets:
            if target.name in names and target.name not in target.layers:
                raise TuneError(f"{self.name}: {target.name!r} is a layer already; call the group something else")

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of all layers of all targets."""
        return tuple(layer for target in self.targets for layer in target.layers)

    @property
    def objects(self) -> tuple[str, ...]:
        """The names of all weights and inputs, as in a configuration, target by target."""
        return tuple(name for target in self.targets for role in ROLES for name in target.objects(role))

    @property
    def weights(self) -> int:
        return sum(target.weights for target in self.targets)

    @property
    def inputs(self) -> int:
        return sum(target.inputs for target in self.targets)


def join_targets(name: str, branches: Sequence[Target]) -> Target:
    """Join *branches* into one target, called *name*, whose layers share their formats."""
    return Target(
        name,
        weights=sum(target.weights for target in branches),
        inputs=sum(target.inputs for target in branches),
        weight_max=max(target.weight_max for target in branches),
        input_max=max(target.input_max for target in branches),
        macs=sum(target.macs for target in branches),
        branches=tuple(layer for target in branches for layer in target.layers),
    )


def check_layers(network: Network, known: Collection[str], where: str) -> None:
    """Refuse a network with a layer that is not *known*; *where* opens the error message."""
    for name in network.layers:
        if name not in known:
            raise TuneError(f"{where}: {unknown_name('layer', name, known)}")
