"""How much faster a tuned network would be on hardware that gains from every bit: three small models.

``bit_serial_ideal`` and ``bit_serial`` are of Stripes (Judd et al., MICRO 2016), which works on one bit of each
activation per cycle, against the bit-parallel DaDianNao of 16 bits; ``word_packing`` is a proxy for the chapter's FPGA.
None of them says anything about memory; for that see ``weft_tune.on_device``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weft.base.errors import TuneError
from weft_tune.geometry import LayerWork
from weft_tune.numbers.configuration import Configuration

SERIAL_BITS = 16
"""Bits of the bit-parallel baseline; wider activations take as long."""
LANES, COLUMNS, FILTERS = 16, 16, 256
"""Sizes of the accelerator: channels that meet at once, windows side by side, filters (16 in each of 16 tiles)."""
WORD_BITS = 32
"""Bits of the FPGA's words."""


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times faster than the baseline that the model names."""

    model: str
    """What kind of estimate it is, for tables."""
    layers: Mapping[str, float]
    network: float
    """All tuned layers together, one after another."""


def bit_serial_ideal(work: Sequence[LayerWork], configuration: Configuration) -> Speedup:
    """The gain as the chapter estimates it: every unit busy, a layer with p-bit activations 16/p times as fast."""
    times = {each.name: each.macs * _serial_bits(each, configuration) / SERIAL_BITS for each in work}
    return _speedup("bit-serial (ideal)", {each.name: each.macs for each in work}, times)


def bit_serial(work: Sequence[LayerWork], configuration: Configuration) -> Speedup:
    """The gain in whole cycles of 16 tiles with 16 filters, 16 windows and 16 channels each.

    Windows that do not fill the columns and channels that do not fill the lanes are lost, so that a layer may be slower
    than on the baseline. In a fully connected layer a column takes up the next channels every cycle and is busy
    for p of them: the weights arrive no faster than before, and there is nothing to gain.
    """
    times = {each.name: float(_serial_cycles(each, _serial_bits(each, configuration))) for each in work}
    return _speedup("bit-serial (structural)", {each.name: _parallel_cycles(each) for each in work}, times)


def word_packing(work: Sequence[LayerWork], configuration: Configuration) -> Speedup:
    """A proxy for high-level synthesis, not its results: as many products at once as both operands fit into a word."""

    def lanes(each: LayerWork) -> int:
        widths = (configuration[f"{each.name}.{role}"].bits for role in ("weight", "input"))
        return min(max(1, WORD_BITS // bits) for bits in widths)

    times = {each.name: each.macs / lanes(each) for each in work}
    return _speedup("word packing (proxy)", {each.name: each.macs for each in work}, times)


SPEED_MODELS: dict[str, Callable[[Sequence[LayerWork], Configuration], Speedup]] = {
    "bit-serial-ideal": bit_serial_ideal,
    "bit-serial": bit_serial,
    "word-packing": word_packing,
}


def _speedup(model: str, before: Mapping[str, float], after: Mapping[str, float]) -> Speedup:
    if not before:
        raise TuneError(f"{model}: no layers to estimate")
    layers = {name: before[name] / after[name] for name in before}
    return Speedup(model, layers, sum(before.values()) / sum(after.values()))


def _serial_bits(work: LayerWork, configuration: Configuration) -> int:
    return min(SERIAL_BITS, configuration[f"{work.name}.input"].bits)


def _parallel_cycles(work: LayerWork) -> int:
    return work.windows * _bricks(work)


def _serial_cycles(work: LayerWork, bits: int) -> int:
    if work.convolution:
        return -(-work.windows // COLUMNS) * _bricks(work) * bits
    return work.windows * _bricks(work) + bits - 1


def _bricks(work: LayerWork) -> int:
    """Groups of channels and filters that the array goes through for one window."""
    return -(-work.channels // LANES) * work.kernel * -(-work.filters // FILTERS) * work.groups
