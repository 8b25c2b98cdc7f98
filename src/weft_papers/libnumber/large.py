"""The chapter's large networks: sizes and speeds of the configurations that Table III.4 prints, without their accuracy.

They cannot be scored here, because their data is not available. But the sizes and speeds of a printed configuration
follow from the architecture. GoogleNet and DarkNet are left out: the table prints one format too few for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from weft.models import Gemm, Layer, Model
from weft.models.zoo import load
from weft.reports.exhibits import Axis, Bars, Panel
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, beside
from weft_papers.layerweaver.lab import geomean, mean
from weft_papers.libnumber.lab import (
    COLOURS,
    OURS,
    RISTRETTO,
    TITLES,
    by_mean_size,
    parse_printed,
    plain_sizes,
    printed_configurations,
    sizes,
)
from weft_papers.libnumber.recorded import SearchRecord
from weft_tune.hardware import LayerWork, bit_serial, bit_serial_ideal, word_packing, work_of
from weft_tune.network import Network, Target
from weft_tune.numbers.configuration import AnyFormat, Configuration
from weft_tune.numbers.format import EXP, FIXED

FIGURE = "Table III.4"
LIBNUMBER = "libnumber"


class Conv(NamedTuple):
    """A convolution of a network without branches, and the pool behind it."""

    filters: int
    kernel: int
    stride: int = 1
    pad: int | None = None
    """The padding on each side; None: as much as keeps the size of the picture at stride 1."""
    pool: tuple[int, int] | None = None
    """The size and the stride of the pooling behind it; None: no pooling."""


POOL, HALF = (3, 2), (2, 2)  # size and stride of pools
NIN = (
    Conv(96, 11, 4, 0), Conv(96, 1), Conv(96, 1, pool=POOL),
    Conv(256, 5), Conv(256, 1), Conv(256, 1, pool=POOL),
    Conv(384, 3), Conv(384, 1), Conv(384, 1, pool=POOL),
    Conv(1024, 3), Conv(1024, 1), Conv(1000, 1),
)  # fmt: skip
"""Network in Network for ImageNet (Lin, Chen and Yan 2014), as Caffe has it, at 224 pixels."""
TINY_YOLO = (
    *(Conv(filters, 3, pool=HALF) for filters in (16, 32, 64, 128, 256)),
    Conv(512, 3), Conv(1024, 3), Conv(1024, 3), Conv(125, 1),
)  # fmt: skip
"""Tiny YOLO for VOC (Redmon and Farhadi 2017), at 416 pixels; its last pool has stride 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Large:
    """A network with the formats that Table III.4 prints for it."""

    title: str
    network: Network
    work: tuple[LayerWork, ...]
    configurations: Mapping[str, Configuration]
    """The configuration of each framework."""

    def reduction(self, framework: str) -> float:
        """Size of the weights in float32 over their size in the framework's formats."""
        return plain_sizes(self.network).weights / sizes(self.network, self.configurations[framework]).weights

    def storage(self, framework: str) -> float:
        """Size of weights and inputs in float32 over their size in the framework's formats."""
        return plain_sizes(self.network).both / sizes(self.network, self.configurations[framework]).both

    @property
    def below_ristretto(self) -> float:
        """Percent by which libnumber's storage is below Ristretto's."""
        return 100 * (1 - self.storage(RISTRETTO) / self.storage(LIBNUMBER))


def convnet(name: str, side: int, convolutions: Sequence[Conv]) -> Model:
    """Make a network without branches whose input is a picture of *side* by *side* pixels with three channels."""
    layers, channels = [], 3
    for number, conv in enumerate(convolutions, 1):
        padding = (conv.kernel - 1) // 2 if conv.pad is None else conv.pad
        out_side = (side + 2 * padding - conv.kernel) // conv.stride + 1
        taps = conv.kernel**2
        gemm = Gemm(out_side**2, channels * taps, conv.filters, kernel=taps)
        layers.append(
            Layer(f"conv{number}", "conv", "Conv", gemm, channels * taps * conv.filters,
                  input_elements=channels * side**2, output_elements=conv.filters * out_side**2)
        )  # fmt: skip
        side, channels = out_side, conv.filters
        if conv.pool:
            size, stride = conv.pool
            side = -(-(side - size) // stride) + 1  # rounded up, as Caffe pools
    return Model(name, tuple(layers))


def _block(layer: str) -> str:
    """The name of the residual block of a layer, or of the layer if it is in none."""
    return layer.rpartition(".")[0] or layer


MODELS: dict[str, Callable[[], Model]] = {
    "AlexNet": lambda: load("caffenet"),
    "NiN": lambda: convnet("nin", 224, NIN),
    "VGG-16": lambda: load("vgg16"),
    "ResNet-50": lambda: load("resnet50"),
    "Tiny YOLO": lambda: convnet("tiny-yolo", 416, TINY_YOLO),
}


def network_of(model: Model) -> Network:
    """The convolutions of a model as tuning targets; those of a residual block share a format."""
    blocks: dict[str, list[Layer]] = {}
    for layer in model.layers:
        if layer.kind == "conv":
            blocks.setdefault(_block(layer.name), []).append(layer)
    targets = [
        Target(
            name, sum(part.weights for part in layers), sum(part.input_elements for part in layers), 0.0, 0.0,
            sum(part.macs for part in layers), tuple(part.name for part in layers) if len(layers) > 1 else (),
        )
        for name, layers in blocks.items()
    ]  # fmt: skip
    return Network(model.name, tuple(targets))


def printed(network: Network, text: str) -> Configuration:
    """The configuration that Table III.4 prints, biases left at their defaults: they change neither size nor speed."""
    parsed = parse_printed(text, len(network.targets))
    formats: dict[str, AnyFormat] = {}
    for target, weight in zip(network.targets, parsed.weights, strict=True):
        formats |= dict.fromkeys(target.objects("weight"), _format(weight))
        formats |= dict.fromkeys(target.objects("input"), _format(parsed.inputs))
    return Configuration(formats)


def _format(text: str) -> AnyFormat:
    """Parse a format such as "I8" or "E3"."""
    return {"I": FIXED, "E": EXP}[text[0]](int(text[1:]))


@lru_cache(maxsize=1)
def large_networks() -> tuple[Large, ...]:
    """The chapter's large networks with the formats that Table III.4 prints for them."""
    configurations_of = printed_configurations()
    networks = []
    for title, make in MODELS.items():
        model = make()
        network = network_of(model)
        configurations = {framework: printed(network, text) for framework, text in configurations_of[title].items()}
        networks.append(Large(title, network, work_of(model, network), configurations))
    return tuple(networks)


def small_networks(record: SearchRecord) -> list[Large]:
    """The recorded networks with the formats that Table III.4 prints for them."""
    configurations_of = printed_configurations()
    return [
        Large(
            TITLES[name], net.network, (),
            {framework: printed(net.network, text) for framework, text in configurations_of[TITLES[name]].items()},
        )
        for name, net in record.nets.items()
    ]  # fmt: skip


def printed_sizes(paper: Paper, out: Path, record: SearchRecord) -> Exhibit:
    """Rows for the chapter's averages, recomputed from its own table, and for the speed-ups of the large networks."""
    large = large_networks()
    networks = [*large, *small_networks(record)]
    return Exhibit((*_size_rows(paper, networks), *_speed_rows(paper, large)), (_table(networks), _speeds(large)),
                (_picture(out, large),))  # fmt: skip


def _size_rows(paper: Paper, networks: Sequence[Large]) -> list[Row]:
    """Rows with the chapter's averages of sizes, recomputed from the printed formats."""
    weights = [network.reduction(LIBNUMBER) for network in networks]
    both = [network.storage(LIBNUMBER) for network in networks]
    below = {network.title: network.below_ristretto for network in networks}
    source = f"recomputed from Table III.4 for {len(networks)} of the eleven networks"
    rows = [
        _row(paper, "parameters smaller", "parameters_7", by_mean_size(weights), "x",
             f"{source} as the mean size; geometric mean {geomean(weights):.2f}, mean {mean(weights):.2f}; layers of "
             "the MLPs are as large as ours"),
        _row(paper, "storage smaller", "storage_7", by_mean_size(both), "x",
             f"{source}, with the inputs of one picture; geometric mean {geomean(both):.2f}, mean {mean(both):.2f}"),
        _row(paper, "storage below Ristretto's", "storage_below_ristretto", mean(below.values()), "%",
             f"{source}; from {min(below.values()):.1f} to {max(below.values()):.1f} %"),
    ]  # fmt: skip
    if mlp := below.get("MLP-C"):
        rows.append(
            _row(paper, "storage below Ristretto's, MLP-C,", "storage_below_ristretto_mlp-c", mlp, "%",
                 "layers of our MLP-C: 3072-512-256-128-10")
        )  # fmt: skip
    return rows


def _row(paper: Paper, quantity: str, key: str, value: float, unit: str, why: str) -> Row:
    """Row with a recomputed average beside the published number *key*."""
    theirs = paper[key].value
    return Row(FIGURE, f"{quantity} by the printed formats", theirs, value, unit, beside(value, theirs, why))


def _speed_rows(paper: Paper, large: Sequence[Large]) -> list[Row]:
    """Rows with the FPGA speed-up of the printed formats, and over Ristretto's."""
    ours, ristretto = ([word_packing(network.work, network.configurations[framework]).network for network in large]
                    for framework in (LIBNUMBER, RISTRETTO))  # fmt: skip
    gain = 100 * (geomean(ours) / geomean(ristretto) - 1)
    names = ", ".join(network.title for network in large)
    return [
        Row("Fig. III.6(a)", "FPGA speed-up of the printed formats, geomean", paper["fpga"].value, geomean(ours), "x",
            beside(geomean(ours), paper["fpga"].value, f"a packing proxy, not synthesis: products that fit into a word "
                   f"of 32 bits; {names}")),
        Row("Fig. III.6(a)", "the same over Ristretto's printed formats", paper["fpga_over_ristretto"].value, gain, "%",
            f"not synthesis either: 32 // 8 = 32 // 7 = 4, so that few bits fewer gain nothing; {geomean(ours):.2f} "
            f"and {geomean(ristretto):.2f}"),
    ]  # fmt: skip


def _table(networks: Sequence[Large]) -> Table:
    """Table of the sizes of the printed configurations."""
    body = tuple(
        (
            network.title, f"{network.network.weights / 1e6:.2f}", f"{network.network.inputs / 1e6:.3f}",
            *(f"{network.reduction(framework):.2f}" for framework in (LIBNUMBER, RISTRETTO)),
            *(f"{network.storage(framework):.2f}" for framework in (LIBNUMBER, RISTRETTO)),
            f"{network.below_ristretto:.1f}",
        )
        for network in networks
    )  # fmt: skip
    header = ("network", "weights M", "inputs M", "libnumber: weights x", "Ristretto: weights x",
              "libnumber: storage x", "Ristretto: storage x", "below Ristretto %")  # fmt: skip
    return Table(f"{FIGURE}: sizes of the printed configurations (no accuracy is claimed)", header, body)


def _speeds(large: Sequence[Large]) -> Table:
    """Table of the speed-ups of the printed configurations, a column per hardware model."""
    models = (word_packing, bit_serial_ideal, bit_serial)
    body = tuple(
        (network.title, framework, *(f"{model(network.work, configuration).network:.2f}" for model in models))
        for network in large
        for framework, configuration in network.configurations.items()
    )
    header = ("network", "formats", "word packing x", "bit-serial ideal x", "bit-serial structural x")
    return Table(f"{FIGURE}: speeds of the printed configurations, by model", header, body)


def _picture(out: Path, large: Sequence[Large]) -> Figure:
    """Draw the reductions and speed-ups of the large networks by the printed formats."""
    colours = {LIBNUMBER: COLOURS[OURS], RISTRETTO: COLOURS[RISTRETTO]}
    values: dict[str, Callable[[Large, str], float]] = {
        "weights smaller (x)": Large.reduction,
        "word packing, proxy (x)": lambda net, name: word_packing(net.work, net.configurations[name]).network,
        "bit-serial, ideal (x)": lambda net, name: bit_serial_ideal(net.work, net.configurations[name]).network,
    }
    panels = [
        Panel(
            [
                Bars(
                    [net.title for net in large],
                    {name: [value(net, name) for net in large] for name in colours},
                    colours,
                )
            ],
            heading,
            Axis(size=7),
        )
        for heading, value in values.items()
    ]
    title = "Table III.4: what the printed formats of large networks give"
    return pictures.picture(out, "table3-4-large", title, panels, size=(11, 3.8), columns=3)
