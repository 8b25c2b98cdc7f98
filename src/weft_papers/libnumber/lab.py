"""What the parts share: the four networks, the methods, and the sizes of networks under a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from weft.base.errors import InputError
from weft_papers.base import printed_data
from weft_papers.layerweaver.lab import mean
from weft_tune.network import Network
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import label
from weft_tune.objective import total_bits

PAPER = "libnumber"
MARGINS = (0.07, 0.01)
"""The relative losses of accuracy that a configuration may have."""
LENET = "lenet"
TITLES = {"mlp-m": "MLP-M", "mlp-c": "MLP-C", "lenet": "LeNet", "cuda-convnet": "Cuda-convnet"}
NETS = tuple(TITLES)
"""The chapter's networks that can be trained from data in packages, in the chapter's order."""

# Methods. Of ours: the default, all candidates scored in full, no small set, input formats by layer too, inputs only.
OURS, FAITHFUL, WHOLE, BOTH, SERIAL = "weft", "faithful", "full set only", "layer-wise inputs", "inputs only"
RISTRETTO, RELAXED, STRIPES = "Ristretto", "relaxed Ristretto", "Stripes"
INT8, INT8_CHANNELS = "int8", "int8 per channel"
# Variants of ours: other sizes of the small set, other rules for biases, other first biases.
SMALL, BIAS_RULE, START = "small set", "bias rule", "first bias"
# All configurations of an enumerated space, and our search restricted to that space.
EXHAUSTIVE, RESTRICTED = "exhaustive", "restricted"
REPAIRED = " repaired"
"""Suffix of a baseline's name: its own formats missed the margin, so they were widened until they kept it."""
LABELS = {
    OURS: "weft tune",
    BOTH: "weft tune, inputs layer by layer too",
    SERIAL: "weft tune, inputs only",
    RISTRETTO: "Ristretto",
    RELAXED: "relaxed Ristretto",
    STRIPES: "Stripes",
    INT8: "int8 (ONNX Runtime)",
    INT8_CHANNELS: "int8 per channel",
}
COLOURS = {
    "FLOAT 32": "#1f2933",
    OURS: "#009e73",
    BOTH: "#56b4e9",
    SERIAL: "#009e73",
    RISTRETTO: "#e69f00",
    RELAXED: "#d55e00",
    STRIPES: "#0072b2",
    INT8: "#8f8f8f",
    INT8_CHANNELS: "#b9c0c8",
    "the chapter": "#cc79a7",
}
FLOAT_BITS = 32  # bits of float32, which all sizes are given relative to


class Sizes(NamedTuple):
    """Bits of a network's tuned layers, for one sample."""

    weights: int
    activations: int

    @property
    def both(self) -> int:
        return self.weights + self.activations


def sizes(network: Network, configuration: Configuration) -> Sizes:
    """Bits of weights and activations under a configuration."""
    return Sizes(*total_bits(network, configuration))


def plain_sizes(network: Network) -> Sizes:
    """Bits of weights and activations in float32."""
    return Sizes(FLOAT_BITS * network.weights, FLOAT_BITS * network.inputs)


def by_mean_size(reductions: Iterable[float]) -> float:
    """Average reductions by harmonic mean (the reduction of the mean size), which fits the chapter's averages best."""
    return 1 / mean(1 / reduction for reduction in reductions)


def percent(margin: float) -> str:
    return f"{100 * margin:g} %"


def formats_text(network: Network, configuration: Configuration, *, bias: bool = False) -> str:
    """The formats as Table III.4 writes them: those of the inputs, then those of the weights layer by layer."""
    inputs = [label(configuration[target.objects("input")[0]], bias=bias) for target in network.targets]
    weights = [label(configuration[target.objects("weight")[0]], bias=bias) for target in network.targets]
    shown_inputs = inputs[:1] if len(set(inputs)) == 1 else inputs
    return f"{'-'.join(shown_inputs)} / {'-'.join(weights)}"


class Printed(NamedTuple):
    """A configuration as Table III.4 prints it: types and widths such as "E3", without biases."""

    inputs: str
    weights: tuple[str, ...]

    @property
    def input_bits(self) -> int:
        return int(self.inputs[1:])

    @property
    def weight_bits(self) -> tuple[int, ...]:
        return tuple(int(text[1:]) for text in self.weights)


def printed_configurations() -> dict[str, dict[str, str]]:
    """Network -> framework -> configuration as Table III.4 prints it."""
    return dict(printed_data(PAPER)["configurations"])


def parse_printed(text: str, layers: int) -> Printed:
    """Parse a configuration such as "I3 / E3-E2-E3", or "I8 / I8 in every layer", for *layers* layers.

    Raises InputError if the number of formats differs.
    """
    inputs, _, weights = text.partition(" / ")
    formats = (weights.split()[0],) * layers if weights.endswith("in every layer") else tuple(weights.split("-"))
    if len(formats) != layers:
        raise InputError(f"{text!r} has {len(formats)} formats for {layers} layers")
    return Printed(inputs, formats)


def by_title(nets: Mapping[str, object]) -> list[str]:
    """The networks of *nets* in the chapter's order."""
    return [net for net in NETS if net in nets]
