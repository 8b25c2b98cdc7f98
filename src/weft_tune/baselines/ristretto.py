"""Ristretto (Gysel, Pimentel, Motamedi and Ghiasi, TNNLS 2018): one width of fixed point for each of three groups.

Its dynamic fixed point as its published code has it: two's complement, an integer length for each layer and role from
the largest magnitude (activations get one bit less on purpose, so that the largest saturate), one width for all
convolution weights, one for all fully connected weights, one for all activations. Each group is swept alone, with
everything else in float32, over 16, 8, 4, 2, 1 bits to the first failure; then the three widths are put together
and scored once. Nothing is repaired if that fails, unless ``repair`` asks for it.

Three things are not as in its code. The margin is relative, as in the chapter, not in points. Layer outputs are not
rounded where they leave a layer but where they enter the next target as its input. And of a network only its targets
are quantised, as with every other method here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from weft_tune.baselines.base import Baseline, Progress, Referee
from weft_tune.evaluation import Evaluator, Subset
from weft_tune.network import Network, Role, Target
from weft_tune.numbers.configuration import AnyFormat, Configuration
from weft_tune.numbers.format import FLOAT32
from weft_tune.numbers.twos_complement import TwosComplement

WIDTHS = (16, 8, 4, 2, 1)
RELAXED_WIDTHS = tuple(range(32, 1, -1))
"""Every integer, as the chapter relaxes it: not one bit."""


class WidthGroup(NamedTuple):
    """One role of some targets, with one width."""

    name: str
    role: Role
    targets: tuple[Target, ...]
    covering: bool = False
    """Whether the largest inputs fit too."""

    def formats(self, bits: int | None) -> dict[str, AnyFormat]:
        """The format of every object; float32 without a width."""
        more = self.covering and self.role == "input"
        return {
            name: FLOAT32 if bits is None else TwosComplement(bits, bits - integer_length(target, self.role) - more)
            for target in self.targets
            for name in target.objects(self.role)
        }


def integer_length(target: Target, role: Role) -> int:
    """Bits before the point, the sign among them: the weights fit, of the inputs the largest saturate."""
    largest = target.largest(role)
    if not largest:
        return 0
    return math.ceil(math.log2(largest) + 1) if role == "weight" else math.ceil(math.log2(largest))


def ristretto(
    network: Network,
    evaluator: Evaluator,
    *,
    margin: float,
    widths: Sequence[int] = WIDTHS,
    covering: bool = False,
    repair: bool = False,
    subset: Subset = "full",
    database: Path | None = None,
    progress: Progress | None = None,
    method: str = "Ristretto",
) -> Baseline:
    """Its three sweeps and their combination.

    widths: from wide to narrow. covering: one integer bit more for inputs than its code gives them, so that
    none saturates; at few bits one rule or the other is better. repair: widen the group that gains most by it until the
    combination passes.
    """
    groups = _groups(network, covering)
    ladder: tuple[int | None, ...] = (None, *widths)
    with Referee(evaluator, margin, subset, database=database, progress=progress) as referee:
        referee.measure_base(Configuration({}))
        rungs = [_sweep(referee, group, ladder) for group in groups]
        repaired = False
        while repair and not referee.passes(_combined(groups, ladder, rungs), "combined"):
            rungs, repaired = _widened(referee, groups, ladder, rungs), True
        return referee.verdict(method, _combined(groups, ladder, rungs), "combined", repaired)


def relaxed_ristretto(
    network: Network,
    evaluator: Evaluator,
    *,
    margin: float,
    covering: bool = False,
    repair: bool = False,
    subset: Subset = "full",
    database: Path | None = None,
    progress: Progress | None = None,
) -> Baseline:
    """Ristretto's search with all widths from 32 to 2 bits."""
    return ristretto(
        network, evaluator, margin=margin, widths=RELAXED_WIDTHS, covering=covering,
        repair=repair, subset=subset, database=database, progress=progress, method="relaxed Ristretto",
    )  # fmt: skip


def _groups(network: Network, covering: bool) -> list[WidthGroup]:
    """Fully connected layers are those that use each weight once for a sample."""
    dense = tuple(target for target in network.targets if target.macs == target.weights)
    convolutions = tuple(target for target in network.targets if target.macs != target.weights)
    groups = (
        WidthGroup("conv weights", "weight", convolutions),
        WidthGroup("fc weights", "weight", dense),
        WidthGroup("inputs", "input", network.targets, covering),
    )
    return [group for group in groups if group.targets]


def _sweep(referee: Referee, group: WidthGroup, ladder: Sequence[int | None]) -> int:
    """How far down the ladder a group alone can go before the first failure."""
    for rung in range(1, len(ladder)):
        if not referee.passes(Configuration(group.formats(ladder[rung])), group.name):
            return rung - 1
    return len(ladder) - 1


def _combined(groups: Sequence[WidthGroup], ladder: Sequence[int | None], rungs: Sequence[int]) -> Configuration:
    formats: dict[str, AnyFormat] = {}
    for group, rung in zip(groups, rungs, strict=True):
        formats |= group.formats(ladder[rung])
    return Configuration(formats)


def _widened(
    referee: Referee, groups: Sequence[WidthGroup], ladder: Sequence[int | None], rungs: list[int]
) -> list[int]:
    """One group a rung up: the one that scores highest then."""
    wider = [[rung - (place == moved) for place, rung in enumerate(rungs)] for moved, up in enumerate(rungs) if up > 0]
    return max(wider, key=lambda each: referee.score(_combined(groups, ladder, each), "repair").value)
