"""A tuned network on a weft device: fewer weight bytes to fetch, so less time on the memory channel.

``tuned_model`` is the model with the widths of a configuration, of which ``weft.devices.costs.layer_costs.estimate``
makes a profile for ``weft simulate``. Compute times do not change with the width on these devices: values are stored
narrow and multiplied at the device's own precision. ``Latency`` makes an objective of the time one query takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from weft.devices import Npu
from weft.devices.costs import DEFAULT_COST
from weft.devices.costs.layer_costs import Profile, estimate
from weft.devices.costs.program import Clock, lower
from weft.kernels.replay import replay
from weft.models import Layer, Model
from weft_tune.geometry import places
from weft_tune.network import ROLES, Network
from weft_tune.numbers.configuration import Configuration


def tuned_model(
    model: Model, network: Network, configuration: Configuration, nodes: Mapping[str, str] | None = None
) -> Model:
    """*model* with the weights and inputs of its tuned layers as wide as the configuration says.

    An object without a format keeps the width that the file has. *nodes*: as for ``weft_tune.geometry.places``.
    """
    layers = list(model.layers)
    for name, place in places(model, network, nodes).items():
        layers[place] = _narrowed(layers[place], name, configuration)
    return replace(model, layers=tuple(layers))


def latency_s(profile: Profile, npu: Npu) -> float:
    """The time from the first fetch to the last result of one query that has the device to itself."""
    program = lower(profile, npu)
    times = np.empty((len(program), 4), np.int64)
    replay(
        np.array(program.fetch, np.int64),
        np.array(program.compute, np.int64),
        np.array([0, len(program)], np.int64),
        Clock.of(npu).buffer,
        np.zeros(len(program), np.int64),
        times,
    )
    return float(times[-1, 3]) * Clock.of(npu).tick_s


class Latency:
    """Configuration -> seconds of one query alone on a device; remembers what it has answered."""

    def __init__(
        self,
        model: Model,
        network: Network,
        npu: Npu,
        *,
        batch: int = 1,
        cost: str = DEFAULT_COST,
        nodes: Mapping[str, str] | None = None,
    ) -> None:
        self._npu, self._network = npu, network
        self._tuned = partial(tuned_model, model, network, nodes=nodes)
        self._priced = partial(estimate, npu=npu, batch=batch, cost=cost)
        self._names = tuple(places(model, network, nodes))
        self._known: dict[tuple[int, ...], float] = {}

    def __call__(self, configuration: Configuration) -> float:
        widths = tuple(configuration[f"{name}.{role}"].bits for name in self._names for role in ROLES)
        if widths not in self._known:
            self._known[widths] = latency_s(self._priced(self._tuned(configuration)), self._npu)
        return self._known[widths]


def _narrowed(layer: Layer, name: str, configuration: Configuration) -> Layer:
    weight, data = f"{name}.weight", f"{name}.input"
    return replace(
        layer,
        weight_bits=configuration[weight].bits if weight in configuration else layer.weight_bits,
        activation_bits=configuration[data].bits if data in configuration else layer.activation_bits,
    )
