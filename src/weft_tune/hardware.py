"""The value of number formats on hardware: the layers' arithmetic, estimated speed-ups, latency on a weft device.

A target knows its number of products; how well they fill an accelerator depends on the windows, channels and filters of
its layer, which the model knows (``work_of``).

Three small models of hardware that gains from every bit: ``bit_serial_ideal`` and ``bit_serial`` are of Stripes (Judd
et al., MICRO 2016), which works on one bit of each activation per cycle, against the bit-parallel DaDianNao of 16 bits;
``word_packing`` is a proxy for the chapter's FPGA. None of them models memory.

On a weft device fewer weight bytes are fetched, so the memory channel needs less time. ``tuned_model`` is the model
with the widths of a configuration, of which ``weft.devices.costs.layer_costs.estimate`` makes a profile for ``weft
simulate``. Compute times do not change with the width on these devices: values are stored narrow and multiplied at the
device's own precision. ``Latency`` makes an objective of the time that one query takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from weft.base.errors import TuneError, unknown_name
from weft.devices import Npu
from weft.devices.costs import DEFAULT_COST
from weft.devices.costs.layer_costs import Profile, estimate
from weft.devices.costs.program import Clock, lower
from weft.kernels.replay import replay
from weft.models import Layer, Model
from weft_tune.network import ROLES, Network, Target
from weft_tune.numbers.configuration import Configuration
from weft_tune.weighted_layers import find_layers, load_flat

SERIAL_BITS = 16
"""Bits of the bit-parallel baseline; wider activations take as long."""
LANES, COLUMNS, FILTERS = 16, 16, 256
"""Sizes of the accelerator: channels that meet at once, windows side by side, filters (16 in each of 16 tiles)."""
WORD_BITS = 32
"""Bits of the FPGA's words."""


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The arithmetic of one tuned layer, for one sample, or for a batch if the file has a fixed batch size."""

    name: str
    """The name as a configuration has it, without the role: ``conv1``."""
    windows: int
    """Output positions; 1 for a fully connected layer."""
    channels: int
    """Input channels of a group."""
    kernel: int
    """Positions of the kernel, Kx times Ky."""
    filters: int
    """Output channels of a group."""
    groups: int
    convolution: bool

    @property
    def macs(self) -> int:
        return self.windows * self.channels * self.kernel * self.filters * self.groups


def work_of(model: Model, network: Network, nodes: Mapping[str, str] | None = None) -> tuple[LayerWork, ...]:
    """The arithmetic of the tuned layers, in the order of the network; *nodes* as for ``places``."""
    return tuple(_work(name, model.layers[place]) for name, place in places(model, network, nodes).items())


def places(model: Model, network: Network, nodes: Mapping[str, str] | None = None) -> dict[str, int]:
    """Tuned layer -> its index among the model's layers; raises TuneError if the model has no such layer.

    *nodes*: tuned layer -> its node (``node_names``), for files in which the two have different names. A layer of the
    model is found by its own name or by that of a node it was made from.
    """
    place_of_name: dict[str, int] = {}
    weighted = [(place, layer) for place, layer in enumerate(model.layers) if layer.gemm and layer.weights]
    # names of layers take precedence over names of nodes
    for place, layer in weighted:
        place_of_name.setdefault(layer.name, place)
    for place, layer in weighted:
        for name in layer.nodes:
            place_of_name.setdefault(name, place)
    node_of = {name: (nodes or {}).get(name, name) for name in network.layers}
    for node in node_of.values():
        if node not in place_of_name:
            raise TuneError(f"{model.name}: {unknown_name('layer', node, [layer.name for _, layer in weighted])}")
    return {name: place_of_name[node] for name, node in node_of.items()}


def node_names(path: str | Path) -> dict[str, str]:
    """Layer with weights -> name of its node in an ONNX file; a node without a name is named after its output."""
    model = load_flat(path)
    named = [(layer.name, model.graph.node[layer.position]) for layer in find_layers(model)]
    return {name: node.name or f"node_of_{node.output[0]}" for name, node in named}


def network_of(model: Model, kinds: Collection[str] = ("conv", "gemm")) -> Network:
    """The network of a model whose weights are not known, for sizes and speeds; the ranges of values are set to 0."""
    targets = tuple(
        Target(layer.name, layer.weights, layer.input_elements, weight_max=0.0, input_max=0.0, macs=layer.macs)
        for layer in model.layers
        if layer.kind in kinds and layer.weights
    )
    return Network(model.name, targets)


def _work(name: str, layer: Layer) -> LayerWork:
    gemm = layer.gemm
    assert gemm is not None
    return LayerWork(
        name, windows=gemm.m, channels=gemm.k // gemm.kernel, kernel=gemm.kernel, filters=gemm.n, groups=gemm.groups,
        convolution=layer.kind == "conv",
    )  # fmt: skip


# Speed-ups, estimated


@dataclass(frozen=True, slots=True)
class Speedup:
    """Speed relative to the baseline that the model names."""

    model: str
    """The kind of estimate, for tables."""
    layers: Mapping[str, float]
    network: float
    """All tuned layers together, one after another."""


def bit_serial_ideal(work: Sequence[LayerWork], configuration: Configuration) -> Speedup:
    """The gain as the chapter estimates it: every unit busy, a layer with p-bit activations 16/p times as fast."""
    times = {layer.name: layer.macs * _serial_bits(layer, configuration) / SERIAL_BITS for layer in work}
    return _speedup("bit-serial (ideal)", {layer.name: layer.macs for layer in work}, times)


def bit_serial(work: Sequence[LayerWork], configuration: Configuration) -> Speedup:
    """The gain in whole cycles of 16 tiles with 16 filters, 16 windows and 16 channels each.

    Windows that do not fill the columns and channels that do not fill the lanes are lost, so that a layer may be slower
    than on the baseline. In a fully connected layer a column takes up the next channels every cycle and is busy
    for p of them: the weights arrive no faster than before, and there is nothing to gain.
    """
    times = {layer.name: float(_serial_cycles(layer, _serial_bits(layer, configuration))) for layer in work}
    return _speedup("bit-serial (structural)", {layer.name: layer.windows * _bricks(layer) for layer in work}, times)


def word_packing(work: Sequence[LayerWork], configuration: Configuration) -> Speedup:
    """A proxy for an FPGA: a word of 32 bits multiplies as many pairs at once as wider operands fit into it."""

    def pairs_at_once(layer: LayerWork) -> int:
        widths = (configuration[f"{layer.name}.{role}"].bits for role in ROLES)
        return min(max(1, WORD_BITS // bits) for bits in widths)

    times = {layer.name: layer.macs / pairs_at_once(layer) for layer in work}
    return _speedup("word packing (proxy)", {layer.name: layer.macs for layer in work}, times)


SPEED_MODELS: dict[str, Callable[[Sequence[LayerWork], Configuration], Speedup]] = {
    "bit-serial-ideal": bit_serial_ideal,
    "bit-serial": bit_serial,
    "word-packing": word_packing,
}


def _speedup(model: str, before: Mapping[str, float], after: Mapping[str, float]) -> Speedup:
    """The speed-up by layer and of all layers, from the times *before* and *after* by layer, in any unit."""
    if not before:
        raise TuneError(f"{model}: no layers to estimate")
    layers = {name: before[name] / after[name] for name in before}
    return Speedup(model, layers, sum(before.values()) / sum(after.values()))


def _serial_bits(work: LayerWork, configuration: Configuration) -> int:
    return min(SERIAL_BITS, configuration[f"{work.name}.input"].bits)


def _serial_cycles(work: LayerWork, bits: int) -> int:
    """Cycles of a layer with activations of *bits* bits; see ``bit_serial``."""
    if work.convolution:
        return -(-work.windows // COLUMNS) * _bricks(work) * bits
    return work.windows * _bricks(work) + bits - 1


def _bricks(work: LayerWork) -> int:
    """Number of blocks of channels and filters that the accelerator processes one after another for one window."""
    return -(-work.channels // LANES) * work.kernel * -(-work.filters // FILTERS) * work.groups


# Latency on a device


def tuned_model(
    model: Model, network: Network, configuration: Configuration, nodes: Mapping[str, str] | None = None
) -> Model:
    """*model* with the weights and inputs of its tuned layers in the widths of *configuration*.

    An object without a format keeps its width in the file. *nodes*: as for ``places``.
    """
    layers = list(model.layers)
    for name, place in places(model, network, nodes).items():
        layers[place] = _with_widths(layers[place], name, configuration)
    return replace(model, layers=tuple(layers))


def latency_s(profile: Profile, npu: Npu) -> float:
    """The time from the first fetch to the last result of one query that has the device to itself."""
    program = lower(profile, npu)
    layers = len(program)
    times = np.empty((layers, 4), np.int64)  # ticks: fetch start, fetch end, compute start, compute end
    replay(
        np.array(program.fetch, np.int64),
        np.array(program.compute, np.int64),
        offsets=np.array([0, layers], np.int64),  # one stream, which owns all layers
        buffer=Clock.of(npu).buffer,
        chosen=np.zeros(layers, np.int64),
        times=times,
    )
    last_compute_end = times[-1, 3]
    return float(last_compute_end) * Clock.of(npu).tick_s


class Latency:
    """Configuration -> seconds of one query alone on a device; caches answers by the widths of the layers."""

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
        self._profile = partial(estimate, npu=npu, batch=batch, cost=cost)
        self._names = tuple(places(model, network, nodes))
        self._known: dict[tuple[int, ...], float] = {}

    def __call__(self, configuration: Configuration) -> float:
        widths = tuple(configuration[f"{name}.{role}"].bits for name in self._names for role in ROLES)
        if widths not in self._known:
            self._known[widths] = latency_s(self._profile(self._tuned(configuration)), self._npu)
        return self._known[widths]


def _with_widths(layer: Layer, name: str, configuration: Configuration) -> Layer:
    """*layer* with the widths that *configuration* has for the objects of the tuned layer *name*."""
    weights, inputs = f"{name}.weight", f"{name}.input"
    return replace(
        layer,
        weight_bits=configuration[weights].bits if weights in configuration else layer.weight_bits,
        activation_bits=configuration[inputs].bits if inputs in configuration else layer.activation_bits,
    )
