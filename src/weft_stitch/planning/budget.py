"""Stitches models in groups, so that memory and latency stay within limits: ``stitch_groups``.

``grouping`` searches the groups; this module costs them. A group may be planned for speed, within its part of the
memory, or store every weight once (form ``split``), with slabs, which are faster, or without, which takes less memory.
All these styles are tried, as one may meet limits that others do not.
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
"""The form that stores the fewest weights."""
FEW = 6
"""Up to this many unequal models all groupings are searched; each of their 2^n groups is planned, which is slow."""


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """Limits on memory and latency of all groups together."""

    memory_bytes: int | None = None
    """Limit on the weights and tables of all groups together, plus the activations of the largest group."""
    seconds: float | None = None
    """Limit on one run of all groups, one after another; it is met with the least memory."""


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
    """Stitch the models in groups within *limits*; the largest group comes first.

    Layers are planned for the described machine; *cost* judges whole groups. With *form* ``planned``, several styles
    (forms and slabs) are tried. *dynamic*, *slabs*: see ``assemble``. *progress*: called for each group that is costed,
    with its size and form. Raises ``LimitsUnmet`` if no style is within the limits.
    """
    objective = Objective(limits.memory_bytes, limits.seconds)
    styles = [(PLANNED, slabs), (LIGHT, slabs), (LIGHT, False)] if form == PLANNED else [(form, slabs)]
    candidates: list[tuple[Grouping, _GroupStitcher]] = []
    other_errors: list[StitchError] = []
    unmet: list[LimitsUnmet] = []
    for style_form, style_slabs in dict.fromkeys(styles):  # two are equal if slabs are not allowed
        stitcher = _GroupStitcher(
            family, sharing, style_form, limits, cost or Modelled(), dynamic, style_slabs, progress
        )
        try:
            candidates.append((stitcher.grouping(), stitcher))
        except LimitsUnmet as error:
            unmet.append(error)
        except StitchError as error:
            other_errors.append(error)
    if not candidates and unmet:
        smallest = min((error.smallest for error in unmet), key=lambda cost: cost.bytes)
        raise LimitsUnmet(objective, smallest, min((error.fastest for error in unmet), key=lambda cost: cost.seconds))
    if not candidates:
        raise other_errors[0]
    best, stitcher = min(candidates, key=lambda candidate: objective.rank(candidate[0].cost))
    ordered = sorted(best.groups, key=lambda models: (-len(models), models))
    groups = tuple(stitcher.stitched(models) for models in ordered)
    _check_memory(limits, groups)
    return groups


def _check_memory(limits: BudgetLimits, groups: Sequence[Stitched]) -> None:
    """Check the memory of the final groups; ``StitchError`` if it is above the limit.

    During the search a group is costed once for all models of equal kinds, and others of the kind may share less.
    """
    counts = [count(stitched.counted) for stitched in groups]
    total_bytes = max(cost.activation_bytes for cost in counts)
    total_bytes += sum(cost.weight_bytes + cost.table_bytes for cost in counts)
    if limits.memory_bytes is not None and total_bytes > limits.memory_bytes:
        allowed = size(limits.memory_bytes)
        raise StitchError(f"the groups found take {size(total_bytes)}, and {allowed} are allowed; raise the memory cap")


@dataclass(frozen=True, eq=False)
class _GroupStitcher:
    """Stitches groups of models in one style: a form, and whether slabs are allowed."""

    family: Family
    sharing: Sharing
    form: str
    limits: BudgetLimits
    graph_cost: GraphCost
    """Gives the seconds of a group's whole graph."""
    dynamic: bool
    slabs: bool
    progress: Callable[[str], None]

    def grouping(self) -> Grouping:
        """The best grouping in this style; ``LimitsUnmet`` if none is within the limits."""
        limits = self.limits
        return group(
            model_kinds(self.family, self.sharing),
            self.cost,
            cap_bytes=limits.memory_bytes,
            target_s=limits.seconds,
            few=FEW,
        )

    def cost(self, models: tuple[int, ...]) -> GroupCost:
        """Latency and memory of the group of *models*."""
        self.progress(f"{len(models)} of {self.family.tasks} models, {self.form}")
        stitched = self.stitched(models)
        counts = count(stitched.counted)
        (seconds,) = self.graph_cost.seconds([stitched.counted])
        return GroupCost(seconds, counts.weight_bytes + counts.table_bytes, counts.activation_bytes)

    def stitched(self, models: tuple[int, ...]) -> Stitched:
        """The group of *models*, planned for speed within its part of the memory limit.

        If no plan is within that part, the fastest plan is returned, and its cost shows the excess.
        """
        family, sharing = part(self.family, self.sharing, models)
        settings: dict[str, Any] = {"dynamic": self.dynamic, "slabs": self.slabs, "slack": 0.0}
        fastest = assemble(family, sharing, form=self.form, **settings)
        allowed_bytes = self._allowed_weights(models, fastest)
        if self.form != PLANNED or allowed_bytes is None or fastest.graph.weight_bytes <= allowed_bytes:
            return fastest
        try:
            return assemble(family, sharing, **settings, weight_cap_bytes=allowed_bytes)
        except StitchError:
            return fastest

    def _allowed_weights(self, models: tuple[int, ...], stitched: Stitched) -> int | None:
        """Bytes of weights that a group may have, in proportion to its part of all weights; None without a limit."""
        if self.limits.memory_bytes is None:
            return None
        counts = count(stitched.counted)
        group_weights = sum(self.family.nets[model].weights for model in models)
        all_weights = sum(net.weights for net in self.family.nets) or 1  # models may consist of pools only
        weight_budget = (
            self.limits.memory_bytes - counts.activation_bytes
        ) * group_weights / all_weights - counts.table_bytes
        return max(0, int(weight_budget))
