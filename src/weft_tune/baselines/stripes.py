"""The quantizer of Stripes (Judd et al., MICRO 2016): fixed point of its own width for the input of each layer.

Weights stay in FIXED 16. Inputs start with 16 bits, their range from the largest magnitude; then one bit is taken
away at a time, the last of the fraction or the first of the integer part of one layer, always where the network stays
most accurate, until every such step would fall below the threshold. Ties go to the layer with more inputs, then to the
fraction bit, then to the earlier layer.

The margin is taken from the float32 network, as in the chapter's comparison; the paper itself takes it from the network
in FIXED 16 (``reference="fixed"``). Its text does not print the search; this is the greedy one of the same group's
earlier study of reduced precision, started at 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from weft_tune.baselines.base import Baseline, Progress, Referee
from weft_tune.evaluation import Evaluator, Subset
from weft_tune.network import Network, Role, Target
from weft_tune.numbers.configuration import AnyFormat, Configuration
from weft_tune.numbers.format import FIXED, Format
from weft_tune.search_space import first_scale

BITS = 16
FEWEST_BITS = 2

Reference = Literal["float", "fixed"]
"""What the margin is taken from: the network in float32, or in 16 bits of fixed point."""


def covering(target: Target, role: Role) -> Format:
    """16 bits of fixed point whose range takes in every value."""
    return FIXED(BITS, first_scale(target.largest(role)))


def stripes(
    network: Network,
    evaluator: Evaluator,
    *,
    margin: float,
    reference: Reference = "float",
    subset: Subset = "full",
    database: Path | None = None,
    progress: Progress | None = None,
) -> Baseline:
    """Its greedy search; where the 16-bit network itself fails, that is the result."""
    inputs = [covering(target, "input") for target in network.targets]
    start = _configuration(network, inputs)
    step = "start"
    with Referee(evaluator, margin, subset, database=database, progress=progress) as referee:
        referee.measure_base(Configuration({}) if reference == "float" else start)
        while referee.passes(_configuration(network, inputs), step):
            narrower = _best(referee, network, inputs)
            if narrower is None:
                break
            inputs, step = narrower, "drop"
        return referee.verdict("Stripes", _configuration(network, inputs), step)


def _configuration(network: Network, inputs: Sequence[Format]) -> Configuration:
    formats: dict[str, AnyFormat] = {}
    for target, form in zip(network.targets, inputs, strict=True):
        formats |= dict.fromkeys(target.objects("weight"), covering(target, "weight"))
        formats |= dict.fromkeys(target.objects("input"), form)
    return Configuration(formats)


def _narrower(network: Network, inputs: Sequence[Format]) -> Iterator[list[Format]]:
    """One bit fewer at one layer, layers with most inputs first: without the last fraction bit, then the first bit."""
    for place in sorted(range(len(inputs)), key=lambda place: -network.targets[place].inputs):
        form = inputs[place]
        if form.bits > FEWEST_BITS:
            for bias in (form.bias, form.bias + 1):
                yield [*inputs[:place], FIXED(form.bits - 1, bias), *inputs[place + 1 :]]


def _best(referee: Referee, network: Network, inputs: Sequence[Format]) -> list[Format] | None:
    """The most accurate of the narrower ones that pass."""
    best, needed = None, referee.threshold
    candidates = list(_narrower(network, inputs))
    referee.prepare([_configuration(network, candidate) for candidate in candidates])
    for candidate in candidates:
        value = referee.score(_configuration(network, candidate), "drop", needed).value
        if value >= needed:
            best, needed = candidate, math.nextafter(value, math.inf)
    return best
