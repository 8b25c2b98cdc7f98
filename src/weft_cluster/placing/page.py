"""A placement as a page that opens from a file: every machine's two resources, its memory, and who limits it.

The page is ``placement.html`` beside this module; here its data is made.
"""

from __future__ import annotations

from typing import Any

from weft.reports.page import page_text
from weft_cluster.placing.placement import PlacedMachine, Placement
from weft_cluster.placing.placement_shown import UNITS, in_words


def placement_page(placement: Placement) -> str:
    """The page of a placement."""
    return page_text("placement.html", page_data(placement), "weft_cluster.placing")


def page_data(placement: Placement) -> dict[str, Any]:
    """All the page shows; machines name models by their number."""
    names = {name: number for number, name in enumerate(placement.models)}
    shown = placement.model_dump(mode="json", exclude={"format", "machines", "idle"})
    return {
        **shown,
        "gap": placement.gap,
        "unit": UNITS[placement.objective],
        "words": in_words(placement),
        "idle": len(placement.idle),
        "models": list(names),
        "machines": [_machine(machine, names) for machine in placement.machines],
    }


def _machine(machine: PlacedMachine, names: dict[str, int]) -> dict[str, Any]:
    shown = machine.model_dump(mode="json", exclude={"models"})
    return {
        **shown,
        "models": [
            [
                names[each.model],
                each.share,
                each.rate,
                each.compute,
                each.bandwidth,
                each.other,
                each.memory_bytes,
                each.attainment,
            ]
            for each in machine.models
        ],
    }
