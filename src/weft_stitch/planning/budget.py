"""Models stitched in groups, so that memory and latency stay within limits: ``stitch_groups``.

``grouping`` finds the groups; here is what they cost. A group may be planned for speed, within its part of the memory,
or stored with every weight once (``split``), in slabs, which are fast, or not, which takes less memory. All are tried,
as one may meet limits that others do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.base.errors import StitchError
from weft_stitch.assembly import PLANNED, Stitched, assemble
from weft_stitch.cost import GraphCost, Modelled, count
from weft_stitch.family import Family, Sharing, model_kinds, part
from weft_stitch.planning.grouping import GroupCost, Grouping, LimitsUnmet, Objective, group, size

LIGHT = "split"
"""The form with the fewest weights."""
FEW = 6
"""Most unequal models for which all groupings are searched: each of their 2^n groups is planned, which is slow."""


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """Limits on memory and latency of all groups together."""

    memory_bytes: int | None = None
    """Weights and tables of all groups, and the activations of the largest."""
    seconds: float | None = None
    """Latency of one run of all groups, one after another; met with the least memory."""


def stitch_groups(
    family: Family,
    sharing: Sharing,
    limits: BudgetLimits,
    *,
    form: str = PLANNED,
    cost: GraphCost | None = None,
    dynamic: bool = False,
    slabs: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> tuple[Stitched, ...]:
    """The groups, large ones first, each a graph of its own.

    Layers are planned by the described machine; whole groups are judged by *cost*.
    """
    wish = Objective(limits.memory_bytes, limits.seconds)
    styles = [(PLANNED, slabs), (LIGHT, slabs), (LIGHT, False)] if form == PLANNED else [(form, slabs)]
    candidates: list[tuple[Grouping, _Maker]] = []
    refused: list[StitchError] = []
    unmet: list[LimitsUnmet] = []
    for style, cut in dict.fromkeys(styles):
        maker = _Maker(family, sharing, style, limits, cost or Modelled(), dynamic, cut, progress)
        try:
            candidates.append((maker.grouping(), maker))
        except LimitsUnmet as error:
            unmet.append(error)
        except StitchError as error:
            refused.append(error)
    if not candidates and unmet:
        smallest = min((error.smallest for error in unmet), key=lambda cost: cost.bytes)
        raise LimitsUnmet(wish, smallest, min((error.fastest for error in unmet), key=lambda cost: cost.seconds))
    if not candidates:
        raise refused[0]
    best, maker = min(candidates, key=lambda candidate: wish.rank(candidate[0].cost))
    ordered = sorted(best.groups, key=lambda models: (-len(models), models))
    groups = tuple(maker.stitched(models) for models in ordered)
    _keep(limits, groups)
    return groups


def _keep(limits: BudgetLimits, groups: Sequence[Stitched]) -> None:
    """Check the memory of the actual groups: they were costed by equal-sized models, which may share more."""
    counts = [count(stitched.counted) for stitched in groups]
    taken = sum(cost.weight_bytes + cost.table_bytes for cost in counts) + max(cost.activation_bytes for cost in counts)
    if limits.memory_bytes is not None and taken > limits.memory_bytes:
        allowed = size(limits.memory_bytes)
        raise StitchError(f"the groups found take {size(taken)}, and {allowed} are allowed; raise the memory cap")


@dataclass(frozen=True, eq=False)
class _Maker:
    """Stitches groups in one style."""

    family: Family
    sharing: Sharing
    form: str
    limits: BudgetLimits
    judge: GraphCost
    dynamic: bool
    slabs: bool
    progress: Callable[[str], None]

    def grouping(self) -> Grouping:
        limits = self.limits
        return group(
            model_kinds(self.family, self.sharing),
            self.cost,
            cap_bytes=limits.memory_bytes,
            target_s=limits.seconds,
            few=FEW,
        )

    def cost(self, models: tuple[int, ...]) -> GroupCost:
        self.progress(f"{len(models)} of {self.family.tasks} models, {self.form}")
        stitched = self.stitched(models)
        counts = count(stitched.counted)
        (seconds,) = self.judge.seconds([stitched.counted])
        return GroupCost(seconds, counts.weight_bytes + counts.table_bytes, counts.activation_bytes)

    def stitched(self, models: tuple[int, ...]) -> Stitched:
        """The fastest group within its part of the memory; if that is too little, its cost shows it."""
        family, sharing = part(self.family, self.sharing, models)
        settings: dict[str, Any] = {"dynamic": self.dynamic, "slabs": self.slabs, "slack": 0.0}
        free = assemble(family, sharing, form=self.form, **settings)
        allowed = self._allowed_weights(models, free)
        if self.form != PLANNED or allowed is None or free.graph.weight_bytes <= allowed:
            return free
        try:
            return assemble(family, sharing, **settings, weight_cap_bytes=allowed)
        except StitchError:
            return free

    def _allowed_weights(self, models: tuple[int, ...], stitched: Stitched) -> int | None:
        """The weights that a group may have: its part of the memory, by its part of all weights."""
        if self.limits.memory_bytes is None:
            return None
        counts = count(stitched.counted)
        mine = sum(self.family.nets[model].weights for model in models)
        everyone = sum(net.weights for net in self.family.nets) or 1  # models may be nothing but pools
        left = (self.limits.memory_bytes - counts.activation_bytes) * mine / everyone - counts.table_bytes
        return max(0, int(left))
